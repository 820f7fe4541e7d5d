"""The file backend: the directory, its limits, and the contract's outcomes for what the disk says."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hicache.clock import Clock, SystemClock
from hicache.errors import BackendUnavailable, ConfigError
from hicache.storage_backends.base import (
    MISS,
    BackendStats,
    Reservation,
    StorageBackend,
    WriteOutcome,
    check_lengths,
    check_sizes,
)
from hicache.storage_backends.file.directory import FANOUT, Directory
from hicache.storage_backends.file.index import Index
from hicache.storage_backends.file.options import Options, Settings, resolve
from hicache.storage_backends.pending import PendingWrites

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class _Turn:
    """One begin_write: what it knows of the disk, and what it must remove after the lock."""

    now: float
    free_bytes: int  # counts what `victims` will free
    victims: list[str] = field(default_factory=list)


class FileBackend(StorageBackend):
    """See StorageBackend. One file per object; what the filesystem says is the truth, the index a belief.

    Guarded by `_lock`: `_pending`, `_index`, `_counts`. No file is touched while it is held. The time
    bound is the filesystem's: a call on a hung network mount hangs with it.
    """

    name: ClassVar[str] = "file"

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        """Open the directory. With a limit set, lists it first. Raises ConfigError if it cannot be used."""
        if settings.is_default_directory:
            _claim_default(settings)
        self._settings = settings
        self._clock = clock or SystemClock()
        self._directory = Directory(settings.directory, fsync=settings.fsync)
        self._lock = threading.Lock()
        self._pending: PendingWrites[bytearray] = PendingWrites(
            ttl_s=settings.reservation_ttl_s, allocate=bytearray, view=memoryview
        )
        self._index = Index(settings) if settings.max_bytes or settings.min_free_bytes else None
        self._counts: Counter[str] = Counter()
        self._closed = False
        if self._index is not None:
            self._index.load(self._directory, self._clock.now())

    @classmethod
    def from_options(cls, options: Options) -> FileBackend:
        return cls(resolve(options))

    # -- reading -------------------------------------------------------------------------------

    def probe(self, keys: Sequence[str]) -> bytes:
        self._check_open()
        sizes = [self._size(key) for key in keys]
        self._saw(keys, sizes)
        return bytes([size > 0 for size in sizes])

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)
        self._check_open()
        sizes = []
        for key, buffer in zip(keys, buffers, strict=True):
            try:
                sizes.append(self._directory.read(key, buffer))
            except OSError as error:
                self._failed("read", key, error)
                sizes.append(MISS)
        self._saw(keys, sizes)
        return sizes

    def _size(self, key: str) -> int:
        try:
            return self._directory.size(key)
        except OSError as error:
            self._failed("stat", key, error)
            return MISS

    def _saw(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        if self._index is not None:
            with self._lock:
                self._index.saw(keys, sizes)
                self._index.lease(keys, self._clock.now())

    # -- writing -------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)
        self._check_open()
        self._rescan_a_part()
        present = [self._size(key) for key in keys]
        turn = _Turn(self._clock.now(), self._free_bytes() if self._settings.min_free_bytes else 0)
        with self._lock:
            if self._index is not None:
                self._index.saw(keys, present)
                self._index.touch(keys)
            self._counts["expired_reservations"] += len(self._pending.expire(turn.now))
            answers = [
                WriteOutcome.EXISTS if there > 0 or key in self._pending else self._reserve(key, size, turn)
                for key, size, there in zip(keys, sizes, present, strict=True)
            ]
        for key in turn.victims:
            self._remove(key, "evict")
        return answers

    def _reserve(self, key: str, size: int, turn: _Turn) -> Reservation | WriteOutcome:
        try:
            if self._index is None:
                return self._pending.begin(key, size, turn.now)
            victims = self._index.victims(
                size, reserved=self._pending.reserved_bytes, free=turn.free_bytes, now=turn.now
            )
            if victims is not None:
                self._counts["evicted"] += len(victims)
                turn.victims += [victim for victim, _ in victims]
                turn.free_bytes += sum(freed for _, freed in victims)
                return self._pending.begin(key, size, turn.now)
        except MemoryError:
            logger.warning("file: no memory to stage an object of %d bytes", size)
        self._counts["no_space"] += 1
        return WriteOutcome.NO_SPACE

    def _free_bytes(self) -> int:
        try:
            return self._directory.free_bytes()
        except OSError as error:
            self._failed("statvfs", "", error)
            return 0

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        self._check_open()
        with self._lock:
            self._counts["expired_reservations"] += len(self._pending.expire(self._clock.now()))
            taken = [self._pending.take(reservation) for reservation in reservations]
        outcomes = [
            WriteOutcome.FAILED if data is None else self._store(reservation.key, data)
            for reservation, data in zip(reservations, taken, strict=True)
        ]
        stored = [
            (reservation.key, len(data))
            for reservation, data, outcome in zip(reservations, taken, outcomes, strict=True)
            if data is not None and outcome is WriteOutcome.STORED
        ]
        with self._lock:
            self._counts["stored"] += len(stored)
            self._counts["stored_bytes"] += sum(size for _, size in stored)
            if self._index is not None:
                self._index.saw([key for key, _ in stored], [size for _, size in stored])
        return outcomes

    def _store(self, key: str, data: bytearray) -> WriteOutcome:
        try:
            self._directory.write(key, memoryview(data))
        except OSError as error:
            if error.errno in _FULL:
                with self._lock:
                    self._counts["no_space"] += 1
                return WriteOutcome.NO_SPACE
            self._failed("write", key, error)
            return WriteOutcome.FAILED
        return WriteOutcome.STORED

    def abort(self, reservations: Sequence[Reservation]) -> None:
        self._check_open()
        with self._lock:
            for reservation in reservations:
                self._pending.take(reservation)

    # -- ranking and dropping --------------------------------------------------------------------

    def touch(self, keys: Sequence[str]) -> None:
        self._check_open()
        if self._index is not None:
            with self._lock:
                self._index.touch(keys)

    def pin(self, session: str, keys: Sequence[str], ttl_s: float) -> None:
        """See HoldsSessions. Without a limit nothing is dropped; other processes rank by themselves."""
        self._check_open()
        if self._index is not None:
            with self._lock:
                self._index.pin(session, keys, self._clock.now(), ttl_s)

    def close_session(self, session: str) -> None:
        """See HoldsSessions."""
        self._check_open()
        if self._index is not None:
            with self._lock:
                self._index.close_session(session)

    def delete(self, keys: Sequence[str]) -> int:
        self._check_open()
        removed = sum(self._remove(key, "delete") for key in keys)
        if self._index is not None:
            with self._lock:
                self._index.forget(keys)
        return removed

    def clear(self, prefix: str) -> int:
        """See StorageBackend. Lists the whole directory."""
        self._check_open()
        return sum(
            self.delete([key for key in self._directory.keys(part) if key.startswith(prefix)])
            for part in range(FANOUT)
        )

    def _remove(self, key: str, operation: str) -> bool:
        try:
            return self._directory.remove(key)
        except OSError as error:
            self._failed(operation, key, error)
            return False

    def _rescan_a_part(self) -> None:
        """Learn what other processes stored; one part of the directory at a time, paid by writers."""
        if self._index is None:
            return
        with self._lock:
            part = self._index.part_to_rescan(self._clock.now())
        if part is None:
            return
        keys = self._directory.keys(part)
        with self._lock:
            keys = self._index.unknown(keys)
        sizes = [self._size(key) for key in keys]
        with self._lock:
            self._index.saw(keys, sizes)

    # -- the rest --------------------------------------------------------------------------------

    def stats(self) -> BackendStats:
        """See StorageBackend. Without a limit nothing is indexed, and objects and used_bytes are -1."""
        self._check_open()
        free = self._free_bytes()
        with self._lock:
            index = self._index
            return BackendStats(
                objects=-1 if index is None else len(index),
                used_bytes=-1 if index is None else index.used_bytes,
                capacity_bytes=self._settings.max_bytes or -1,
                details={
                    **self._counts,
                    "directory": str(self._settings.directory),
                    "free_bytes": free,
                    "reservations": len(self._pending),
                    "reserved_bytes": self._pending.reserved_bytes,
                },
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pending.drop_all()
        self._directory.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailable("file: the backend is closed")

    def _failed(self, operation: str, key: str, error: OSError) -> None:
        """Count a failure of the disk by its name; say the first of each kind aloud."""
        kind = f"{operation}_{errno.errorcode.get(error.errno or 0, 'error').lower()}"
        with self._lock:
            self._counts["errors"] += 1
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "file: %s of %.60s in %s: %s", operation, key, self._settings.directory, error)


def _claim_default(settings: Settings) -> None:
    """Make the default directory this user's alone, and say that nobody shares it."""
    path = settings.directory
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"file: cannot make {path} ({error.strerror}); set file_storage_path") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"file: {path} is not a directory of this user's own, so anybody may have written its objects; "
            f"set file_storage_path"
        )
    logger.warning(
        "file: no --file-storage-path given, so objects go to %s, which is local to this node and shared "
        "with nobody",
        path,
    )
