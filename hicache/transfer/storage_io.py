"""Objects between host pages and one attached storage backend: probe, fetch, store, in bounded batches.

Everything read is verified before it is flagged. Failures open the circuit breaker; memory that an
abandoned call may still write to is quarantined.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.keys import HASH_BYTES, object_key
from hicache.objects import ObjectCodec, Verdict
from hicache.seldom import Seldom
from hicache.spec import ModelSpec
from hicache.storage_backends.base import (
    MISS,
    HasEpoch,
    HoldsSessions,
    RegistersMemory,
    Reservation,
    StorageBackend,
    WriteOutcome,
)
from hicache.tiers.host import HostPools
from hicache.transfer.base import JobId, JobKind, ObjectRef, Why
from hicache.transfer.breaker import Breaker
from hicache.transfer.counters import Counters
from hicache.transfer.staging import StagingPool
from hicache.types import Component

logger = logging.getLogger(__name__)

_SHORT = (Verdict.BAD_SIZE, Verdict.WRONG_PARTS)
_REFUSALS = (WriteOutcome.NO_SPACE, WriteOutcome.FAILED)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Bounds on what one storage call moves, and when storage is left alone."""

    batch_objects: int = 64
    batch_bytes: int = 8 << 20
    probe_keys: int = 1024
    quarantine_buffers: int = 4  # staging buffers lost to calls that never settled, before bypassing
    breaker_failures: int = 3
    breaker_backoff_s: float = 1.0
    breaker_max_backoff_s: float = 30.0
    idle_check_s: float = 2.0  # without a call for so long: ask whether it is there, and still the same


@dataclass(slots=True, eq=False)
class StorageJob:
    """A PROBE, FETCH or STORE. Once `flags[i]` is 1, nothing touches the slot of entry i any more."""

    job: JobId
    kind: JobKind
    refs: Sequence[ObjectRef]
    slots: Sequence[int]
    flags: bytearray
    cancelled: bool = False
    claimed: bool = False  # somebody has taken it upon himself to end it
    why: Why | None = None  # the first object that did not come

    def lacks(self, why: Why) -> None:
        """Note why an object did not come, if it is the first."""
        self.why = self.why or why


class StorageLink:
    """One backend while it is attached. Any number of threads may run jobs; each job by one thread."""

    def __init__(
        self,
        backend: StorageBackend,
        spec: ModelSpec,
        host: HostPools,
        *,
        shard: str,
        clock: Clock,
        counters: Counters,
        limits: StorageLimits,
    ) -> None:
        self._backend = backend
        self._host = host
        self._counters = counters
        self._clock = clock
        self._limits = limits
        self._codec = ObjectCodec(spec, shard)
        self._identity = (spec.fingerprint, shard)
        kinds = [(kind, phase) for kind, period in spec.periods.items() for phase in range(period)]
        self._absent = {(kind, phase): spec.absent(kind, phase) for kind, phase in kinds}
        self._sizes = {key: self._codec.size(key[0], absent=absent) for key, absent in self._absent.items()}
        register = backend.register if isinstance(backend, RegistersMemory) else None
        size = max(limits.batch_bytes, *self._sizes.values())
        self._staging = StagingPool(size, limit=limits.quarantine_buffers, register=register)
        self._breaker = Breaker(
            clock,
            threshold=limits.breaker_failures,
            backoff_s=limits.breaker_backoff_s,
            max_backoff_s=limits.breaker_max_backoff_s,
        )
        self._closing = threading.Event()
        self._holds = backend if isinstance(backend, HoldsSessions) else None
        self._epoch_of = backend if isinstance(backend, HasEpoch) else None
        self._last_epoch = 0
        self._suspect = False  # failed since it last worked: it may come back empty
        self._asked_at = clock.now()  # the last call
        self.incidents = 0  # times it may have lost what it held
        self.answers = True  # its last call did not fail
        self._refusing = False  # it had no room for the last objects
        self._said = Seldom(clock)
        self.on_breaker_open: Callable[[], None] = lambda: None

    # -- whether to use it ---------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """True unless it is being detached, bypassed by the breaker, or has lost too many buffers."""
        return not self._closing.is_set() and self._breaker.allows and not self._staging.exhausted

    @property
    def why_not(self) -> Why:
        """Why a call is not made, where `usable` or the staging says so."""
        return Why.DETACHED if self._closing.is_set() else Why.BYPASSED

    @property
    def breaker(self) -> Breaker:
        return self._breaker

    @property
    def quarantined_bytes(self) -> int:
        return self._staging.quarantined_bytes

    def prepare(self, readers: int) -> None:
        """Make the staging of `readers` threads, so that a backend that refuses it does so now."""
        self._staging.prepare(readers)

    def close(self) -> None:
        """Make running jobs end behind the call they are in, and later ones at once."""
        self._closing.set()

    def try_recover(self) -> None:
        """If the breaker is open and a trial is due, ask the backend one harmless question. May block."""
        if not self._closing.is_set() and self._breaker.try_trial():
            self._ask("trial")

    def seconds_to_check(self) -> float:
        """Return how long until check_idle() has something to do, if nobody calls the backend until then."""
        if self._closing.is_set() or not self._breaker.allows:
            return float("inf")
        return max(0.0, self._asked_at + self._limits.idle_check_s - self._clock.now())

    def check_idle(self) -> None:
        """If nobody has called the backend for a while, ask it a harmless question. May block.

        Otherwise nobody would notice that it has started anew, empty, while no request came.
        """
        if not self.seconds_to_check():
            self._asked_at = self._clock.now()
            self._ask("probe")

    def _ask(self, operation: str) -> None:
        fingerprint, shard = self._identity
        try:
            self._backend.probe([object_key(fingerprint, shard, Component.FULL, bytes(HASH_BYTES))])
        except BackendError as error:
            self._failed(operation, error)
        except Exception as error:
            self._breaker_failure(operation, error)
            raise
        else:
            self._worked()

    # -- jobs; each returns whether the store failed -------------------------------------------

    def probe(self, job: StorageJob) -> bool:
        """Fill the flags of a PROBE. True also if it was cut short: absence is then no evidence."""
        step = self._limits.probe_keys
        for start in range(0, len(job.refs), step):
            if job.cancelled or not self.usable:
                job.lacks(Why.CANCELLED if job.cancelled else self.why_not)
                return True
            keys = [self._key(ref) for ref in job.refs[start : start + step]]
            try:
                found = self._backend.probe(keys)
            except BackendError as error:
                job.lacks(_why(error))
                self._failed("probe", error)
                return True
            except Exception as error:
                self._breaker_failure("probe", error)
                raise
            self._worked()
            job.flags[start : start + len(keys)] = bytes(1 if flag else 0 for flag in found)
        return False

    def fetch(self, job: StorageJob) -> bool:
        """Read, verify and place the objects of a FETCH, batch after batch."""
        for start, end in self._batches(job.refs):
            if job.cancelled:
                job.lacks(Why.CANCELLED)
                return False
            staging = self._staging.take() if self.usable else None
            if staging is None:
                job.lacks(self.why_not)
                return True
            try:
                self._fetch_batch(job, start, end, staging)
            except BackendError as error:
                job.lacks(_why(error))
                self._retire(staging, error)
                self._failed("read", error)
                return True
            except Exception as error:
                self._retire(staging, error)
                self._breaker_failure("read", error)
                raise
            self._staging.give(staging)
        return False

    def store(self, job: StorageJob) -> bool:
        """Write the objects of a STORE in order; stops behind the batch in which one was not stored."""
        for start, end in self._batches(job.refs):
            if not self.usable:
                return True
            try:
                failed = self._store_batch(job, start, end)
            except BackendError as error:
                self._failed("write", error)
                return True
            except Exception as error:
                self._breaker_failure("write", error)
                raise
            if failed:
                self._breaker_failure("write", "the store could not keep an object")
                return True
            self._worked()
            if not all(job.flags[start:end]):
                return False
        return False

    # -- hints ---------------------------------------------------------------------------------

    @property
    def takes_hints(self) -> bool:
        return self._holds is not None

    def pin(self, session: str, refs: Sequence[ObjectRef], ttl_s: float) -> None:
        """Tell the backend which objects a session will ask for; a failure counts as any call's."""
        holds = self._holds
        if holds is not None:
            self._try("pin", lambda: holds.pin(session, [self._key(ref) for ref in refs], ttl_s))

    def close_session(self, session: str) -> None:
        """Tell the backend that a session is over."""
        holds = self._holds
        if holds is not None:
            self._try("close_session", lambda: holds.close_session(session))

    def _try(self, operation: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BackendError as error:
            self._failed(operation, error)
        else:
            self._worked()

    # -- one batch -----------------------------------------------------------------------------

    def _fetch_batch(self, job: StorageJob, start: int, end: int, staging: memoryview) -> None:
        refs = job.refs[start:end]
        views, at = [], 0
        for ref in refs:
            views.append(staging[at : at + self._size(ref)])
            at += self._size(ref)
        keys = [self._key(ref) for ref in refs]
        sizes = self._backend.read(keys, views)
        self._worked()
        bad: dict[str, Verdict] = {}
        missing = 0
        for i, (ref, view, size) in enumerate(zip(refs, views, sizes, strict=True), start):
            if size == MISS:
                missing += 1
                job.lacks(Why.MISSING)
                continue
            verdict = self._codec.verify(
                ref.component, ref.page_hash, view, size, absent=self._absent_of(ref)
            )
            if verdict is not Verdict.OK:
                bad[keys[i - start]] = verdict
                job.lacks(Why.SHORT if verdict in _SHORT else Why.CORRUPT)
                continue
            parts = self._codec.payload_views(ref.component, view, absent=self._absent_of(ref))
            self._host.write_page(ref.component, job.slots[i], parts)
            job.flags[i] = 1
        arrived = [len(view) for view, flag in zip(views, job.flags[start:end], strict=True) if flag]
        self._counters.add_all(
            {"fetch_bytes": sum(arrived), "fetch_objects": len(arrived), "fetch_missing": missing}
        )
        if bad:
            self._drop(bad)

    def _drop(self, bad: Mapping[str, Verdict]) -> None:
        """Count and delete objects that failed their check, so that the next write replaces them."""
        for verdict in bad.values():
            self._counters.add(f"mismatch_{verdict.value}")
        key, verdict = next(iter(bad.items()))
        if (more := self._said.due("unusable")) is not None:
            logger.warning(
                "%s: %d objects are unusable and go, first %s (%s)%s",
                *(self._backend.name, len(bad), key, verdict.value, more),
            )
        try:
            self._backend.delete(list(bad))
        except BackendError as error:
            self._failed("delete", error)

    def _store_batch(self, job: StorageJob, start: int, end: int) -> bool:
        """Write one batch; returns whether the store failed. Nothing behind a refused object is written."""
        refs = job.refs[start:end]
        keys = [self._key(ref) for ref in refs]
        answers = self._backend.begin_write(keys, [self._size(ref) for ref in refs])
        cut = next((i for i, answer in enumerate(answers) if answer in _REFUSALS), len(answers))
        going = {start + i: a for i, a in enumerate(answers[:cut]) if isinstance(a, Reservation)}
        dropped = [answer for answer in answers[cut:] if isinstance(answer, Reservation)]
        try:
            for i, reservation in going.items():
                self._fill(job.refs[i], job.slots[i], reservation.buffer)
            outcomes = self._backend.commit(list(going.values())) if going else []
        except BaseException:
            self._abort([*going.values(), *dropped])
            raise
        self._abort(dropped)
        ended: list[Reservation | WriteOutcome] = list(answers[:cut])
        for i, outcome in zip(going, outcomes, strict=True):
            ended[i - start] = outcome
        for i, end_state in enumerate(ended, start):
            job.flags[i] = end_state in (WriteOutcome.STORED, WriteOutcome.EXISTS)
        self._count_stores(refs, ended)
        told = [*ended, *answers[cut : cut + 1]]
        self._watch_room(refused=WriteOutcome.NO_SPACE in told, stored=WriteOutcome.STORED in told)
        return WriteOutcome.FAILED in told

    def _fill(self, ref: ObjectRef, slot: int, buffer: memoryview) -> None:
        absent = self._absent_of(ref)
        parts = self._codec.payload_views(ref.component, buffer, absent=absent)
        self._host.read_page(ref.component, slot, parts)
        self._codec.seal(ref.component, ref.page_hash, buffer, absent=absent)

    def _count_stores(self, refs: Sequence[ObjectRef], ended: Sequence[object]) -> None:
        stored = [ref for ref, e in zip(refs, ended, strict=False) if e is WriteOutcome.STORED]
        existing = sum(e is WriteOutcome.EXISTS for e in ended)
        self._counters.add_all(
            {
                "store_bytes": sum(self._size(ref) for ref in stored),
                "store_objects": len(stored),
                "store_existing": existing,
                "store_refused": len(refs) - len(stored) - existing,
            }
        )

    def _watch_room(self, *, refused: bool, stored: bool) -> None:
        """Say once when storage has no room left, and once when a new object shows that it has again."""
        name = self._backend.name
        if refused and not self._refusing and (more := self._said.due("room")) is not None:
            logger.warning("%s: no room for more objects; what it holds stays usable%s", name, more)
            self._refusing = True
        elif self._refusing and stored and not refused:
            logger.info("%s: there is room again", name)
            self._refusing = False

    def _abort(self, reservations: Sequence[Reservation]) -> None:
        if not reservations:
            return
        try:
            self._backend.abort(reservations)
        except BackendError as error:
            self._warn("abort", error)

    # -- plumbing ------------------------------------------------------------------------------

    def _absent_of(self, ref: ObjectRef) -> frozenset[str]:
        return self._absent[ref.component, ref.phase]

    def _size(self, ref: ObjectRef) -> int:
        return self._sizes[ref.component, ref.phase]

    def _key(self, ref: ObjectRef) -> str:
        fingerprint, shard = self._identity
        return object_key(fingerprint, shard, ref.component, ref.page_hash)

    def _batches(self, refs: Sequence[ObjectRef]) -> Iterator[tuple[int, int]]:
        start, used = 0, 0
        for i, ref in enumerate(refs):
            size = self._size(ref)
            if i > start and (i - start >= self._limits.batch_objects or used + size > self._staging.size):
                yield start, i
                start, used = i, 0
            used += size
        if start < len(refs):
            yield start, len(refs)

    def _retire(self, staging: memoryview, error: BaseException) -> None:
        """Reuse a buffer after a failed read only if nothing can still be writing to it."""
        settled = self._backend.settles_on_timeout or isinstance(error, BackendUnavailable)
        if settled:
            self._staging.give(staging)
            return
        self._staging.quarantine(staging)
        if self._staging.exhausted:
            logger.error(
                "%s: %d bytes are held by calls that never ended; storage is bypassed until it is "
                "attached again",
                self._backend.name,
                self.quarantined_bytes,
            )

    def _worked(self) -> None:
        self.answers, self._asked_at = True, self._clock.now()
        epoch = self._epoch_of.epoch if self._epoch_of is not None else 0
        if self._suspect or epoch != self._last_epoch:
            self.incidents += self._suspect or self._last_epoch != 0
            self._suspect, self._last_epoch = False, epoch
        if self._breaker.success():
            logger.info("%s: storage is back", self._backend.name)

    def _failed(self, operation: str, error: BackendError) -> None:
        self._counters.add("storage_timeouts" if isinstance(error, BackendTimeout) else "storage_errors")
        self._breaker_failure(operation, error)

    def _breaker_failure(self, operation: str, why: object) -> None:
        self._suspect, self.answers, self._asked_at = True, False, self._clock.now()
        self._warn(operation, why)
        if self._breaker.failure():
            self._counters.add("breaker_opened")
            logger.error("%s: storage is bypassed after repeated failures", self._backend.name)
            self.on_breaker_open()

    def _warn(self, operation: str, why: object) -> None:
        """Say what failed, but not at every call, nor at every trial while storage is bypassed."""
        more = self._said.due(operation) if self._breaker.allows else None
        if more is not None:
            logger.warning("%s: %s failed: %s%s", self._backend.name, operation, why, more)
        else:
            logger.debug("%s: %s failed: %s", self._backend.name, operation, why)


def _why(error: BackendError) -> Why:
    return Why.TIMEOUT if isinstance(error, BackendTimeout) else Why.ERROR
