"""Objects in this process's memory: the reference backend, and the daemon's embedded store.

Decides what stays within a byte limit, and when reservations end; leaves sharing to the daemon.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import msgspec

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
from hicache.storage_backends.lru import Entry, LeasedLru
from hicache.storage_backends.pending import PendingWrites


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `memory` can be told."""

    capacity_bytes: int = 1 << 30
    lease_s: float = 10.0  # how long a probed or read object is safe from eviction
    max_leased_fraction: float = 0.5  # of the capacity; beyond it the oldest leases end early
    reservation_ttl_s: float = 60.0  # a write neither committed nor aborted for so long ends

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1:
            raise ConfigError(f"memory: capacity_bytes={self.capacity_bytes} must be positive")
        if self.lease_s < 0 or self.reservation_ttl_s <= 0 or not 0 <= self.max_leased_fraction <= 1:
            raise ConfigError(
                f"memory: lease_s={self.lease_s} must not be negative, "
                f"reservation_ttl_s={self.reservation_ttl_s} must be positive, "
                f"max_leased_fraction={self.max_leased_fraction} must lie in [0, 1]"
            )


class Change(enum.Enum):
    """What happened to an object."""

    STORED = "stored"
    EVICTED = "evicted"  # dropped for room
    DELETED = "deleted"
    CLEARED = "cleared"
    EXPIRED = "expired"  # a reservation ended by itself: its room is free, nothing had been visible


class StoreEvent(NamedTuple):
    """One change. `sequence` rises by one per event of a store and orders events across threads."""

    sequence: int
    change: Change
    key: str
    size: int


Observer = Callable[[Sequence[StoreEvent]], None]


class _Object(Entry):
    __slots__ = ("data",)

    def __init__(self, data: bytearray) -> None:
        super().__init__(len(data))
        self.data = data


class _Turn:
    """What one locked section leaves to be done after the lock: events to tell, memory to drop."""

    __slots__ = ("dropped", "events", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        self.events: list[StoreEvent] = []
        self.dropped: list[bytearray] = []


class MemoryBackend(StorageBackend):
    """See StorageBackend. Never blocks on anything but its lock, so it never times out.

    Guarded by `_lock`: every field that begins with an underscore. Copies, releases of memory and
    the observer run outside of it. An object's bytearray is written by its reservation's owner
    until commit and by nobody afterwards; a reader that holds it keeps it alive past a delete, so
    memory can exceed the limit by what is being read.

    Invariant: bytes of objects + bytes of reservations <= capacity_bytes.
    """

    name: ClassVar[str] = "memory"

    def __init__(
        self,
        *,
        capacity_bytes: int,
        lease_s: float = 10.0,
        max_leased_fraction: float = 0.5,
        reservation_ttl_s: float = 60.0,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`observer` gets the events of each call, from the caller's thread; it must not raise."""
        self.capacity_bytes = capacity_bytes
        self._clock = clock or SystemClock()
        self._observer = observer
        self._lock = threading.Lock()
        self._objects: LeasedLru[_Object] = LeasedLru(
            lease_s=lease_s, max_leased_bytes=int(capacity_bytes * max_leased_fraction)
        )
        self._pending = PendingWrites(ttl_s=reservation_ttl_s)
        self._sequence = 0
        self._closed = False
        self._counts = dict.fromkeys(
            (
                *("probed", "probe_hits", "reads", "read_misses", "stored", "stored_bytes", "no_space"),
                *("evicted", "evicted_bytes", "deleted", "cleared", "expired_reservations"),
            ),
            0,
        )

    @classmethod
    def from_options(cls, options: Options) -> MemoryBackend:
        return cls(
            capacity_bytes=options.capacity_bytes,
            lease_s=options.lease_s,
            max_leased_fraction=options.max_leased_fraction,
            reservation_ttl_s=options.reservation_ttl_s,
        )

    # -- reading -------------------------------------------------------------------------------

    def probe(self, keys: Sequence[str]) -> bytes:
        with self._lock:
            self._check_open()
            found = self._objects.lease(keys, self._clock.now())
            flags = bytes([entry is not None for entry in found])
            self._counts["probed"] += len(flags)
            self._counts["probe_hits"] += flags.count(1)
        return flags

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)
        sizes = []
        for data, buffer in zip(self._lease_data(keys), buffers, strict=True):
            if data is None:
                sizes.append(MISS)
                continue
            size = len(data)
            if size <= len(buffer):
                buffer[:size] = data
            sizes.append(size)
        return sizes

    def views(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Return read-only views of objects, None where absent, with a lease like read().

        A view stays valid for as long as it is held, whatever becomes of the object.
        """
        return [None if data is None else memoryview(data).toreadonly() for data in self._lease_data(keys)]

    def _lease_data(self, keys: Sequence[str]) -> list[bytearray | None]:
        with self._lock:
            self._check_open()
            found = self._objects.lease(keys, self._clock.now())
            self._counts["reads"] += len(found)
            self._counts["read_misses"] += found.count(None)
        return [None if entry is None else entry.data for entry in found]

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return each object's size, or MISS, without a lease and without counting as use."""
        with self._lock:
            self._check_open()
            found = [self._objects.get(key) for key in keys]
        return [MISS if entry is None else entry.size for entry in found]

    # -- writing -------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)
        turn = _Turn(self._clock.now())
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            answers = [self._reserve(key, size, turn) for key, size in zip(keys, sizes, strict=True)]
        self._finish(turn)
        return answers

    def _reserve(self, key: str, size: int, turn: _Turn) -> Reservation | WriteOutcome:
        if key in self._pending:
            return WriteOutcome.EXISTS
        if key in self._objects:
            self._objects.touch((key,))
            return WriteOutcome.EXISTS
        if not self._make_room(size, turn):
            self._counts["no_space"] += 1
            return WriteOutcome.NO_SPACE
        try:
            return self._pending.begin(key, size, turn.now)
        except MemoryError:
            self._counts["no_space"] += 1
            return WriteOutcome.NO_SPACE

    def _make_room(self, size: int, turn: _Turn) -> bool:
        """Evict until `size` bytes are free; evicts nothing if they cannot be."""
        objects = self._objects
        objects.end_leases(turn.now)
        room = self.capacity_bytes - self._pending.reserved_bytes
        if size > room - objects.leased_bytes:
            return False
        while objects.used_bytes + size > room:
            victim = objects.pop_coldest()
            if victim is None:
                return False
            key, entry = victim
            self._counts["evicted"] += 1
            self._counts["evicted_bytes"] += entry.size
            turn.dropped.append(entry.data)
            self._tell(turn, Change.EVICTED, key, entry.size)
        return True

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        turn = _Turn(self._clock.now())
        outcomes = []
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            stored: list[tuple[str, bytearray]] = []
            for reservation in reservations:
                data = self._pending.take(reservation)
                outcomes.append(WriteOutcome.FAILED if data is None else WriteOutcome.STORED)
                if data is not None:
                    stored.append((reservation.key, data))
                    self._tell(turn, Change.STORED, reservation.key, len(data))
            for key, data in reversed(stored):
                self._objects.add(key, _Object(data))
            self._counts["stored"] += len(stored)
            self._counts["stored_bytes"] += sum(len(data) for _, data in stored)
        self._finish(turn)
        return outcomes

    def abort(self, reservations: Sequence[Reservation]) -> None:
        with self._lock:
            self._check_open()
            for reservation in reservations:
                self._pending.take(reservation)

    def _end_expired(self, turn: _Turn) -> None:
        for key, size in self._pending.expire(turn.now):
            self._counts["expired_reservations"] += 1
            self._tell(turn, Change.EXPIRED, key, size)

    # -- ranking and dropping --------------------------------------------------------------------

    def touch(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._check_open()
            self._objects.touch(keys)

    def delete(self, keys: Sequence[str]) -> int:
        return self._drop(keys, Change.DELETED)

    def clear(self, prefix: str) -> int:
        """See StorageBackend. O(objects), under the lock."""
        return self._drop(None, Change.CLEARED, prefix=prefix)

    def _drop(self, keys: Sequence[str] | None, change: Change, *, prefix: str = "") -> int:
        turn = _Turn(self._clock.now())
        with self._lock:
            self._check_open()
            if keys is None:
                keys = [key for key in self._objects if key.startswith(prefix)]
            for key in keys:
                entry = self._objects.pop(key)
                if entry is not None:
                    turn.dropped.append(entry.data)
                    self._counts[change.value] += 1
                    self._tell(turn, change, key, entry.size)
        dropped = len(turn.dropped)
        self._finish(turn)
        return dropped

    # -- the rest --------------------------------------------------------------------------------

    def stats(self) -> BackendStats:
        turn = _Turn(self._clock.now())
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            self._objects.end_leases(turn.now)
            stats = BackendStats(
                objects=len(self._objects),
                used_bytes=self._objects.used_bytes,
                capacity_bytes=self.capacity_bytes,
                details={
                    **self._counts,
                    "leased_bytes": self._objects.leased_bytes,
                    "reservations": len(self._pending),
                    "reserved_bytes": self._pending.reserved_bytes,
                },
            )
        self._finish(turn)
        return stats

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped = self._objects
            self._objects = LeasedLru(lease_s=0.0, max_leased_bytes=0)
            self._pending.drop_all()
        del dropped

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailable("memory: the backend is closed")

    def _tell(self, turn: _Turn, change: Change, key: str, size: int) -> None:
        self._sequence += 1
        if self._observer is not None:
            turn.events.append(StoreEvent(self._sequence, change, key, size))

    def _finish(self, turn: _Turn) -> None:
        """Do what the lock was released for."""
        turn.dropped.clear()
        if turn.events and self._observer is not None:
            self._observer(turn.events)
