"""Objects in a Mooncake Store: the pooled memory of many processes, reached over RDMA or TCP.

Decides which calls are made, with which memory, and what their codes mean. Leaves set-up and reconnecting
to `mooncake_connection`, and time bounds to `bounded`.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import msgspec

from hicache.config.mooncake import MooncakeSettings, prepare_environment, resolve
from hicache.errors import BackendTimeout, BackendUnavailable, ConfigError
from hicache.seldom import Seldom
from hicache.storage_backends.arena import Span
from hicache.storage_backends.base import MISS, BackendStats, Reservation, StorageBackend, WriteOutcome
from hicache.storage_backends.bounded import BoundedCalls, CallAbandoned
from hicache.storage_backends.mooncake_connection import (
    Connection,
    MooncakeLink,
    address_of,
    gauges,
    load_library,
    warn_about,
)
from hicache.storage_backends.open_writes import OpenWrites, check_sizes

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_BYTES = 32 << 20  # of one native call
BATCH_KEYS = 512
NO_SPACE = -200
BAD_PARAMETERS = -600
EXISTS = -705
RPC_FAILED = -900
RPC_TIMED_OUT = -901
THERE = 1  # the only good answer to "exists": errors are negative, hence true


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the `mooncake` backend.

    The first block has SGLang's names, meanings and defaults; what is None here comes from the file or the
    variables that `hicache.config.mooncake` describes.
    """

    master_server_address: str | None = None
    client_server_address: str | None = None
    local_hostname: str | None = None
    metadata_server: str | None = None
    global_segment_size: int | str | None = None
    protocol: str | None = None
    device_name: str | None = None
    master_metrics_port: int | None = None
    check_server: bool | None = None
    standalone_storage: bool | None = None
    enable_ssd_offload: bool | None = None
    ssd_offload_path: str | None = None
    tenant_id: str | None = None

    timeout_s: float = 3.0  # bound of every call
    workers: int = 4  # calls at a time, and calls that may hang before the store is bypassed
    staging_bytes: int = 256 << 20  # registered memory; one half for reads, one for open writes
    direct_reads: bool = False  # read into memory that the caller registered, without a copy
    replicas: int = 1  # copies of each object, in different segments
    key_prefix: str = "hicache/"  # what our keys begin with in the store; clear stays below it

    def explicit(self) -> dict[str, object]:
        """Return the options of SGLang's names that were given."""
        given = {name: getattr(self, name) for name in MooncakeSettings.__struct_fields__}
        return {name: value for name, value in given.items() if value is not None}

    def validate(self) -> None:
        """Raise ConfigError naming the first option that is wrong."""
        for name in ("timeout_s", "workers", "replicas"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"mooncake: {name}={getattr(self, name)} must be positive")
        if self.staging_bytes < 1 << 20:
            raise ConfigError(f"mooncake: staging_bytes={self.staging_bytes} must be at least {1 << 20}")


class MooncakeBackend(StorageBackend):
    """One Mooncake client.

    Thread-safe: `_lock` guards the open reservations; native calls run on BoundedCalls threads and use
    registered staging memory only, which a call that nobody waits for any more keeps until it returns.
    What the store says is not taken on trust: a put that succeeded is looked up before it counts as
    stored, since putting beside another writer succeeds and stores nothing.
    """

    name: ClassVar[str] = "mooncake"
    settles_on_timeout: ClassVar[bool] = True

    def __init__(self, options: Options, settings: MooncakeSettings, link: MooncakeLink) -> None:
        self._options = options
        self._settings = settings
        self._link = link
        self._calls = BoundedCalls("mooncake", workers=options.workers)
        self._open: OpenWrites[tuple[Connection, Span]] = OpenWrites()
        self._lock = threading.Lock()
        self._closed = False
        self._said = Seldom()

    @classmethod
    def from_options(cls, options: Options) -> MooncakeBackend:
        """Open the backend; waits at most `timeout_s` for the master, then goes on trying behind the calls.

        Until it is there calls raise BackendUnavailable at once. Raises ConfigError for wrong settings and
        when the library is missing. Not usable in a process forked afterwards.
        """
        options.validate()
        settings = resolve(options.explicit())
        warn_about(settings)
        prepare_environment(options.timeout_s)
        load_library()
        link = MooncakeLink(settings, staging_bytes=options.staging_bytes)
        if not link.wait_up(options.timeout_s):
            logger.debug("mooncake: not there yet: %s", link.reason)
        return (DirectMooncakeBackend if options.direct_reads else MooncakeBackend)(options, settings, link)

    def probe(self, keys: Sequence[str]) -> bytes:
        if not keys:
            return b""
        names = [self._options.key_prefix + key for key in keys]

        def work(connection: Connection, deadline: float) -> list[int]:
            return _exists(connection, names, deadline)

        return bytes(code == THERE for code in self._run("probe", work))

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
        deadline = time.monotonic() + self._options.timeout_s
        limit = min(BATCH_BYTES, self._options.staging_bytes // 2)
        sizes: list[int] = []
        for start, stop in _by_bytes([b.nbytes for b in buffers], limit):
            names = [self._options.key_prefix + key for key in keys[start:stop]]
            sizes += self._read_batch(names, buffers[start:stop], deadline)
        return sizes

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)
        there = self.probe(keys)
        connection = self._link.connection()
        return [
            WriteOutcome.EXISTS if found else self._reserve(connection, key, size)
            for key, size, found in zip(keys, sizes, there, strict=True)
        ]

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        held = [self._open.end(r) for r in reservations]
        live = [(r, h) for r, h in zip(reservations, held, strict=True) if h is not None]
        names = [self._options.key_prefix + r.key for r, _ in live]
        spans = [span for _, (_, span) in live]

        def work(connection: Connection, deadline: float) -> list[int]:
            return _put(connection, names, spans, deadline, replicas=self._options.replicas)

        def release() -> None:
            for _, (connection, span) in live:
                connection.writes.give_back(span)

        codes = self._run("commit", work, release=release) if reservations else []
        outcomes = [_outcome(code) for code in codes]
        failed = outcomes.count(WriteOutcome.FAILED)
        if failed and (more := self._said.due("failed")) is not None:
            logger.warning(
                "mooncake: commit: %d of %d writes failed, codes %s%s", failed, len(codes), set(codes), more
            )
        ended = iter(outcomes)
        return [WriteOutcome.FAILED if h is None else next(ended) for h in held]

    def abort(self, reservations: Sequence[Reservation]) -> None:
        for reservation in reservations:
            held = self._open.end(reservation)
            if held is not None:
                held[0].writes.give_back(held[1])

    def touch(self, keys: Sequence[str]) -> None:
        """Look the keys up: Mooncake ranks by last look-up, and gives each a read lease."""
        self.probe(keys)

    def delete(self, keys: Sequence[str]) -> int:
        """Delete objects even while they are leased: a reader in another process may then see torn bytes.

        Without force an object cannot be deleted for 10 seconds after any look-up, so a bad one would stay;
        readers verify what they read.
        """
        if not keys:
            return 0
        names = [self._options.key_prefix + key for key in keys]

        def work(connection: Connection, deadline: float) -> list[int]:
            codes: list[int] = []
            for chunk in _chunks(names, deadline):
                codes += connection.store.batch_remove(chunk, True)
            return codes

        return self._run("delete", work).count(0)

    def clear(self, prefix: str) -> int:
        pattern = "^" + re.sub(r"([\^$\\.*+?()\[\]{}|/])", r"\\\1", self._options.key_prefix + prefix) + ".*"

        def work(connection: Connection, _: float) -> list[int]:
            return [connection.store.remove_by_regex(pattern, True)]

        gone = self._run("clear", work)[0]
        if gone < 0:
            raise BackendUnavailable(f"mooncake: clear failed with code {gone}")
        return gone

    def stats(self) -> BackendStats:
        """Return what the master's metrics port tells of the whole store, other users' objects included."""

        def work(_: Connection, __: float) -> dict[str, int]:
            return gauges(self._settings)

        found = self._run("stats", work)
        connection = self._link.connection()
        details: dict[str, float | int | str] = {
            "state": self._link.state.value,
            "calls_abandoned": self._calls.abandoned,
            "staged_read_bytes": connection.reads.taken_bytes,
            "staged_write_bytes": connection.writes.taken_bytes,
        }
        return BackendStats(
            found.get("master_key_count", -1),
            found.get("master_allocated_bytes", -1),
            found.get("master_total_capacity_bytes", -1),
            details,
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        idle = self._calls.close(self._options.timeout_s)
        self._link.close(self._options.timeout_s, idle=idle)

    def _run(
        self,
        operation: str,
        work: Callable[[Connection, float], T],
        *,
        deadline: float | None = None,
        release: Callable[[], None] | None = None,
        finish: Callable[[T], None] | None = None,
    ) -> T:
        """Make one bounded call; the only place where failures of the store become exceptions of ours.

        `finish` sees the result on the calling thread. `release` gives back what the call uses, once, after
        that: now, or when the call really ends.
        """
        now = time.monotonic()
        until = now + self._options.timeout_s if deadline is None else deadline
        late = False
        try:
            connection = self._link.connection()
            result = self._calls.run(
                lambda: work(connection, until),
                timeout_s=max(until - now, 0.0),
                operation=operation,
                on_late=release,
            )
            self._raise_if_unreachable(operation, result)
            if finish is not None:
                finish(result)
            return result
        except CallAbandoned as error:
            late = True
            self._link.suspect(str(error))
            raise
        finally:
            if release is not None and not late:
                release()

    def _raise_if_unreachable(self, operation: str, result: object) -> None:
        """Raise if every object of the call failed because the master did not answer."""
        if not isinstance(result, list) or not result:
            return
        codes = set(result)
        if not codes <= {RPC_FAILED, RPC_TIMED_OUT}:
            return
        reason = f"{operation}: the master does not answer (codes {sorted(codes)})"
        self._link.suspect(reason)
        raise (BackendTimeout if codes == {RPC_TIMED_OUT} else BackendUnavailable)(f"mooncake: {reason}")

    def _read_batch(self, names: list[str], buffers: Sequence[memoryview], deadline: float) -> list[int]:
        sizes = [b.nbytes for b in buffers]
        connection = self._link.connection()
        offsets = [0, *itertools.accumulate(_aligned(size) for size in sizes)]
        total = offsets.pop()
        span = connection.reads.take(total, deadline=deadline)
        if span is None:
            if total > connection.reads.size_bytes:
                if (more := self._said.due("too large")) is not None:
                    logger.warning("mooncake: %d bytes do not fit half of staging_bytes%s", total, more)
                return [MISS] * len(names)
            raise BackendTimeout("mooncake: read: all staging memory is held by other reads")
        starts = [span.offset + offset for offset in offsets]

        def work(live: Connection, until: float) -> list[int]:
            return _get(live, names, [live.address + at for at in starts], sizes, until)

        def finish(codes: list[int]) -> None:
            for code, at, buffer in zip(codes, starts, buffers, strict=True):
                if 0 <= code <= buffer.nbytes:
                    buffer[:code] = connection.memory[at : at + code]

        codes = self._run(
            "read", work, deadline=deadline, release=lambda: connection.reads.give_back(span), finish=finish
        )
        return [code if code >= 0 else MISS for code in codes]

    def _reserve(self, connection: Connection, key: str, size: int) -> Reservation | WriteOutcome:
        if key in self._open:
            return WriteOutcome.EXISTS
        span = connection.writes.try_take(size)
        if span is None:
            return WriteOutcome.NO_SPACE
        token = self._open.add(key, (connection, span))
        if token is None:
            connection.writes.give_back(span)
            return WriteOutcome.EXISTS
        return Reservation(key, connection.memory[span.offset : span.offset + size], token)


class DirectMooncakeBackend(MooncakeBackend):
    """Reads straight into memory that the caller registered (RegistersMemory); other buffers are staged.

    A read that timed out may still write into the caller's memory, so it does not settle.
    """

    settles_on_timeout: ClassVar[bool] = False

    def __init__(self, options: Options, settings: MooncakeSettings, link: MooncakeLink) -> None:
        super().__init__(options, settings, link)
        self._regions: list[tuple[int, int]] = []

    def register(self, memory: memoryview) -> None:
        """Register long-lived writable memory; the caller keeps it alive until close()."""
        self._calls.run(
            lambda: self._link.register(memory), timeout_s=self._options.timeout_s, operation="register"
        )
        start = address_of(memory)
        with self._lock:
            self._regions.append((start, start + memory.nbytes))

    def _read_batch(self, names: list[str], buffers: Sequence[memoryview], deadline: float) -> list[int]:
        addresses = [address_of(b) for b in buffers if b.nbytes and not b.readonly]
        if len(addresses) < len(buffers) or not all(map(self._knows, addresses, buffers)):
            return super()._read_batch(names, buffers, deadline)
        sizes = [b.nbytes for b in buffers]

        def work(live: Connection, until: float) -> list[int]:
            return _get(live, names, addresses, sizes, until)

        return [code if code >= 0 else MISS for code in self._run("read", work, deadline=deadline)]

    def _knows(self, address: int, buffer: memoryview) -> bool:
        with self._lock:
            return any(start <= address and address + buffer.nbytes <= end for start, end in self._regions)


def _exists(connection: Connection, names: list[str], deadline: float) -> list[int]:
    codes: list[int] = []
    for chunk in _chunks(names, deadline):
        codes += connection.store.batch_is_exist(chunk)
    return codes


def _get(
    connection: Connection, names: list[str], addresses: list[int], sizes: list[int], deadline: float
) -> list[int]:
    """Read into memory; a code is the object's size, or negative. Larger than its size: nothing was read."""
    codes: list[int] = connection.store.batch_get_into(names, addresses, sizes)
    for at, code in enumerate(codes):
        if code == BAD_PARAMETERS and time.monotonic() < deadline:
            size = connection.store.get_size(names[at])
            codes[at] = size if size > sizes[at] else MISS
    return codes


def _put(
    connection: Connection, names: list[str], spans: Sequence[Span], deadline: float, *, replicas: int
) -> list[int]:
    """Put objects; a code is THERE where a look-up afterwards found it, 0 where it did not, or negative."""
    config = load_library().ReplicateConfig()
    config.replica_num = replicas
    codes: list[int] = []
    for start, stop in _by_bytes([span.size_bytes for span in spans], BATCH_BYTES):
        if time.monotonic() > deadline:
            codes += [RPC_TIMED_OUT] * (stop - start)
            continue
        addresses = [connection.address + span.offset for span in spans[start:stop]]
        sizes = [span.size_bytes for span in spans[start:stop]]
        codes += connection.store.batch_put_from(names[start:stop], addresses, sizes, config)
    stored = [at for at, code in enumerate(codes) if code == 0]
    found = _exists(connection, [names[at] for at in stored], deadline)
    for at, code in zip(stored, found, strict=True):
        codes[at] = code
    return codes


def _outcome(code: int) -> WriteOutcome:
    if code == THERE:
        return WriteOutcome.STORED
    if code == NO_SPACE:
        return WriteOutcome.NO_SPACE
    if code == EXISTS:
        return WriteOutcome.EXISTS
    if code == 0:
        return WriteOutcome.BUSY  # put, and not there: another writer is in the middle of it, or died there
    return WriteOutcome.FAILED


def _chunks(names: list[str], deadline: float) -> Iterator[list[str]]:
    for start in range(0, len(names), BATCH_KEYS):
        if time.monotonic() > deadline:
            raise BackendTimeout("mooncake: the time bound is over before the last batch")
        yield names[start : start + BATCH_KEYS]


def _by_bytes(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cut positions into runs of at most `limit` bytes (or one object) and BATCH_KEYS."""
    start = total = 0
    for at, size in enumerate(map(_aligned, sizes)):
        if at > start and (total + size > limit or at - start == BATCH_KEYS):
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _aligned(size_bytes: int) -> int:
    return max(1, -(-size_bytes // 64)) * 64
