"""Whole, verified objects between pages and one storage backend, in bounded batches and bounded time.

Decides what is believed, when the store is left alone, and what becomes of memory that a late call may
still write to. Knows nothing of SGLang.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.clock import Clock
from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.integrations.sglang.identity import Identity
from hicache.keys import HASH_BYTES, key_prefix, object_key
from hicache.objects import ObjectCodec, Verdict
from hicache.seldom import Seldom
from hicache.storage_backends.base import (
    MISS,
    BackendStats,
    RegistersMemory,
    Reservation,
    StorageBackend,
    WriteOutcome,
)
from hicache.transfer.breaker import Breaker, BreakerState
from hicache.transfer.counters import Counters
from hicache.transfer.staging import StagingPool
from hicache.types import Component

logger = logging.getLogger(__name__)

T = TypeVar("T")

Place = Callable[[int, Sequence[memoryview]], None]
"""Takes the parts of object i, valid during the call."""
Fill = Callable[[int, Sequence[memoryview]], bool]
"""Fills the parts of object i; False if it cannot, and the object is not stored."""

_TRIAL_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one backend call, and when the store is left alone."""

    batch_objects: int = 64
    batch_bytes: int = 8 << 20
    probe_keys: int = 1024
    quarantine_buffers: int = 4
    # One failure is enough: SGLang's threads are few, and whoever waits for a dead store waits in vain.
    breaker_failures: int = 1
    breaker_backoff_s: float = 0.5
    breaker_max_backoff_s: float = 15.0


class ObjectStore:
    """Any thread may call anything. Nothing is raised for what the store does; it is a miss, and counted.

    A thread of its own asks whether the store is back while the breaker is open. `_lock` guards
    `_backend` and `_trial`; no call is made under it.
    """

    def __init__(
        self,
        identity: Identity,
        open_backend: Callable[[], StorageBackend],
        *,
        clock: Clock,
        counters: Counters,
        call_timeout_s: float,
        limits: Limits | None = None,
    ) -> None:
        """`open_backend` may raise BackendError: it is tried again. ConfigError passes through."""
        self._identity = identity
        self._open_backend = open_backend
        self._clock = clock
        self._counters = counters
        self._call_timeout_s = call_timeout_s
        self._limits = limits or Limits()
        self._codecs = {
            component: ObjectCodec(identity.spec, family.shard)
            for component, family in identity.families.items()
        }
        self._sizes = {component: codec.size(component) for component, codec in self._codecs.items()}
        self._breaker = Breaker(
            clock,
            threshold=self._limits.breaker_failures,
            backoff_s=self._limits.breaker_backoff_s,
            max_backoff_s=self._limits.breaker_max_backoff_s,
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._backend: StorageBackend | None = None
        self._trial: threading.Thread | None = None
        self._staging: StagingPool | None = None
        self._said = Seldom(clock)
        try:
            self._open()
            self._running().stats()  # so that what is away is said at the start, not at the first request
        except BackendError as error:
            self._failed("open", error)

    @property
    def usable(self) -> bool:
        """False while closing, while the breaker is open, or with too many buffers lost to late calls."""
        staging = self._staging
        return (
            staging is not None
            and not staging.exhausted
            and self._breaker.allows
            and not self._closing.is_set()
        )

    @property
    def counters(self) -> Mapping[str, float]:
        return self._counters.snapshot()

    def object_bytes(self, component: Component) -> int:
        return self._sizes[component]

    # -- reading -------------------------------------------------------------------------------

    def probe(self, component: Component, hashes: Sequence[bytes]) -> bytearray:
        """Return one byte per page: 1 if its object is there, as far as could be asked."""
        found = bytearray(len(hashes))
        deadline = self._deadline()
        step = self._limits.probe_keys
        for start in range(0, len(hashes), step):
            if not self._may_go_on(deadline):
                break
            keys = self._keys(component, hashes[start : start + step])
            try:
                flags = self._running().probe(keys)
            except BackendError as error:
                self._failed("probe", error)
                break
            self._worked()
            found[start : start + len(keys)] = bytes(1 if flag else 0 for flag in flags)
        return found

    def read(self, component: Component, hashes: Sequence[bytes], place: Place) -> list[bool]:
        """Read and verify objects, give the parts of good ones to `place`; stop at a batch with a miss."""
        done = [False] * len(hashes)
        deadline = self._deadline()
        for start, end in self._batches(component, len(hashes)):
            pool = self._staging
            staging = pool.take() if pool is not None and self._may_go_on(deadline) else None
            if pool is None or staging is None:
                break
            try:
                done[start:end] = self._read_batch(
                    component, hashes[start:end], staging, _shifted(place, start)
                )
            except BackendError as error:
                self._retire(staging, error)
                self._failed("read", error)
                break
            except BaseException as error:
                self._retire(staging, error)
                raise
            pool.give(staging)
            if not all(done[start:end]):
                break
        return done

    def _read_batch(
        self, component: Component, hashes: Sequence[bytes], staging: memoryview, place: Place
    ) -> list[bool]:
        codec, size = self._codecs[component], self._sizes[component]
        views = [staging[i * size : (i + 1) * size] for i in range(len(hashes))]
        keys = self._keys(component, hashes)
        sizes = self._running().read(keys, views)
        self._worked()
        good = [False] * len(hashes)
        bad: dict[str, Verdict] = {}
        for i, (page_hash, view, got) in enumerate(zip(hashes, views, sizes, strict=True)):
            if got == MISS:
                continue
            verdict = codec.verify(component, page_hash, view, got)
            if verdict is Verdict.OK:
                place(i, codec.payload_views(component, view))
                good[i] = True
            else:
                bad[keys[i]] = verdict
        read = sum(good)
        self._counters.add_all(
            {
                "read_objects": read,
                "read_bytes": read * size,
                "read_missing": len(hashes) - read - len(bad),
            }
        )
        if bad:
            self._drop(bad)
        return good

    def _drop(self, bad: Mapping[str, Verdict]) -> None:
        """Count and delete objects that failed their check, so that the next write replaces them."""
        for verdict in bad.values():
            self._counters.add(f"mismatch_{verdict.value}")
        key, verdict = next(iter(bad.items()))
        if (more := self._said.due("unusable")) is not None:
            logger.warning(
                "HiCache: %d objects in L3 are unusable and deleted, first %s (%s)%s",
                *(len(bad), key, verdict.value, more),
            )
        try:
            self._running().delete(list(bad))
        except BackendError as error:
            self._failed("delete", error)

    # -- writing -------------------------------------------------------------------------------

    def write(self, component: Component, hashes: Sequence[bytes], fill: Fill) -> list[bool]:
        """Store objects in order, True for each that is there afterwards; stop at the first that is not."""
        done = [False] * len(hashes)
        deadline = self._deadline()
        for start, end in self._batches(component, len(hashes)):
            if not self._may_go_on(deadline):
                break
            try:
                done[start:end] = self._write_batch(component, hashes[start:end], _shifted(fill, start))
            except BackendError as error:
                self._failed("write", error)
                break
            if not all(done[start:end]):
                break
        return done

    def _write_batch(self, component: Component, hashes: Sequence[bytes], fill: Fill) -> list[bool]:
        codec, size = self._codecs[component], self._sizes[component]
        backend = self._running()
        answers = backend.begin_write(self._keys(component, hashes), [size] * len(hashes))
        open_writes = {i: answer for i, answer in enumerate(answers) if isinstance(answer, Reservation)}
        going: dict[int, Reservation] = {}
        try:
            for i, answer in enumerate(answers):
                if isinstance(answer, Reservation):
                    if not fill(i, codec.payload_views(component, answer.buffer)):
                        break
                    codec.seal(component, hashes[i], answer.buffer)
                    going[i] = open_writes.pop(i)
                elif answer is not WriteOutcome.EXISTS:
                    break
            ready = list(going.items())
            outcomes = backend.commit([reservation for _, reservation in ready]) if ready else []
            going.clear()
        finally:
            self._abort(backend, [*going.values(), *open_writes.values()])
        self._worked()
        ended: list[Reservation | WriteOutcome] = list(answers)
        for (i, _), outcome in zip(ready, outcomes, strict=True):
            ended[i] = outcome
        done = [end in (WriteOutcome.STORED, WriteOutcome.EXISTS) for end in ended]
        self._count(ended, size)
        if WriteOutcome.FAILED in ended:
            self._breaker_failure("write", "the store could not keep an object")
        return done

    def _count(self, ended: Sequence[object], size: int) -> None:
        stored = sum(end is WriteOutcome.STORED for end in ended)
        existing = sum(end is WriteOutcome.EXISTS for end in ended)
        self._counters.add_all(
            {
                "stored_objects": stored,
                "stored_bytes": stored * size,
                "existing_objects": existing,
                "refused_objects": len(ended) - stored - existing,
            }
        )

    def _abort(self, backend: StorageBackend, reservations: Sequence[Reservation]) -> None:
        if not reservations:
            return
        try:
            backend.abort(reservations)
        except BackendError as error:
            logger.warning("HiCache: %d writes could not be taken back: %s", len(reservations), error)

    # -- the rest --------------------------------------------------------------------------------

    def clear(self) -> int:
        """Delete the objects of this rank and model. Raises BackendError if that could not be done."""
        shards = {family.shard for family in self._identity.families.values()}
        fingerprint = self._identity.spec.fingerprint
        return sum(self._running().clear(key_prefix(fingerprint, shard)) for shard in sorted(shards))

    def stats(self) -> BackendStats:
        """Return the backend's statistics. Raises BackendError."""
        return self._running().stats()

    def close(self) -> None:
        """Release the backend. Idempotent; calls at work end as misses."""
        self._closing.set()
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _open(self) -> None:
        backend = self._open_backend()
        register = backend.register if isinstance(backend, RegistersMemory) else None
        size = max(self._limits.batch_bytes, *self._sizes.values())
        staging = StagingPool(size, limit=self._limits.quarantine_buffers, register=register)
        try:
            staging.prepare(1)
        except BaseException:
            backend.close()
            raise
        with self._lock:
            closed = self._closing.is_set()
            if not closed:
                self._backend, self._staging = backend, staging
        if closed:
            backend.close()

    def _running(self) -> StorageBackend:
        backend = self._backend
        if backend is None:
            raise BackendUnavailable("the backend is not open")
        return backend

    def _retire(self, staging: memoryview, error: BaseException) -> None:
        """Reuse a buffer after a failed read only if nothing can still be writing to it (law 9)."""
        assert self._staging is not None
        backend = self._backend
        settled = backend is not None and backend.settles_on_timeout
        if settled or isinstance(error, BackendUnavailable):
            self._staging.give(staging)
            return
        self._staging.quarantine(staging)
        if self._staging.exhausted:
            logger.error(
                "HiCache: %d bytes are held by calls that never ended; L3 is off until it is attached again",
                self._staging.quarantined_bytes,
            )

    def _worked(self) -> None:
        if self._breaker.success():
            logger.info("HiCache: L3 is back")

    def _failed(self, operation: str, error: BackendError) -> None:
        if self._closing.is_set():
            return
        self._counters.add("store_timeouts" if isinstance(error, BackendTimeout) else "store_errors")
        self._breaker_failure(operation, error)

    def _breaker_failure(self, operation: str, why: object) -> None:
        if self._breaker.failure():
            self._counters.add("breaker_opened")
            logger.warning(
                "HiCache: serving without L3 until it answers again: %s failed: %s (does the store run, and "
                "can it be reached from here?)",
                operation,
                why,
            )
        if self._breaker.allows:
            return
        with self._lock:
            if self._closing.is_set() or self._trial is not None:
                return
            self._trial = threading.Thread(target=self._recover, name="hicache-l3-trial", daemon=True)
            self._trial.start()

    def _recover(self) -> None:
        """Ask now and then whether the store is back; end when it is, or when this is closed."""
        while True:
            with self._lock:
                if self._breaker.state is BreakerState.CLOSED:
                    self._trial = None  # whoever opens the breaker from now on starts another thread
                    return
            due_in = self._breaker.seconds_to_trial()
            if self._closing.wait(_TRIAL_POLL_S if due_in is None else min(due_in, _TRIAL_POLL_S)):
                return
            if not self._breaker.try_trial():
                continue
            try:
                if self._backend is None:
                    self._open()
                self._running().probe(self._keys(Component.FULL, [bytes(HASH_BYTES)]))
            except BackendError as error:
                logger.debug("HiCache: L3 is still away: %s", error)
                self._breaker.failure()
            except Exception:
                logger.exception("HiCache: asking whether L3 is back failed")
                self._breaker.failure()
            else:
                self._worked()

    def _keys(self, component: Component, hashes: Sequence[bytes]) -> list[str]:
        fingerprint = self._identity.spec.fingerprint
        shard = self._identity.families[component].shard
        return [object_key(fingerprint, shard, component, page_hash) for page_hash in hashes]

    def _deadline(self) -> float:
        return self._clock.now() + self._call_timeout_s

    def _may_go_on(self, deadline: float) -> bool:
        return self.usable and self._clock.now() < deadline

    def _batches(self, component: Component, count: int) -> Iterator[tuple[int, int]]:
        most = max(1, min(self._limits.batch_objects, self._limits.batch_bytes // self._sizes[component]))
        for start in range(0, count, most):
            yield start, min(start + most, count)


def _shifted(
    call: Callable[[int, Sequence[memoryview]], T], by: int
) -> Callable[[int, Sequence[memoryview]], T]:
    """Return `call` for indices that count from `by`."""
    return lambda i, parts: call(by + i, parts)
