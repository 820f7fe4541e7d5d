"""The executor that moves real bytes: device, host and storage, on threads (and streams) of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hicache.clock import Clock, SystemClock
from hicache.errors import InvariantViolation
from hicache.spec import ModelSpec
from hicache.storage_backends.base import StorageBackend
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.tiers.layouts import slot_index
from hicache.transfer.attachment import Attachment
from hicache.transfer.base import Done, Executor, JobId, JobKind, Move, ObjectRef, Why
from hicache.transfer.copy_engine import (
    CopyEngine,
    CpuCopyEngine,
    Mark,
    Pages,
    check_mirrors,
    gather_pages,
    layer_schedule,
)
from hicache.transfer.counters import Counters
from hicache.transfer.cuda_copy import CudaStreams, StagedCopyEngine
from hicache.transfer.load import Load
from hicache.transfer.storage_io import StorageJob, StorageLimits, StorageLink
from hicache.transfer.worker import InlineLane, Lane, Worker
from hicache.types import Component

logger = logging.getLogger(__name__)


class TransferExecutor(Executor):
    """Performs jobs: one load thread, one write thread, and per attached storage readers and a writer.

    Every method is called from the cache's thread, except counters(). `_lock` guards `_ended` and
    `_crash`, is held for no copy and no call, and is the only lock here. With `synchronous` a job is
    performed before its start_ method returns, by the same code, and no thread is started.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: DevicePools,
        host: HostPools | None,
        *,
        storage: StorageBackend | None = None,
        shard: str = "0of1",
        clock: Clock | None = None,
        limits: StorageLimits | None = None,
        copy: CopyEngine | None = None,
        readers: int = 2,
        synchronous: bool = False,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._spec, self._device, self._host = spec, device, host
        self._shard = shard
        self._clock = clock if clock is not None else SystemClock()
        self._limits = limits if limits is not None else StorageLimits()
        check_mirrors(spec, device, host)
        self._engine = copy if copy is not None else _engine_for(device, host)
        self._schedule = layer_schedule(spec)
        self._readers = 0 if synchronous else readers
        self._close_timeout_s = close_timeout_s
        self._counters = Counters()
        self._lock = threading.Condition()
        self._ended: deque[Done] = deque()
        self._crash: InvariantViolation | None = None
        self._detached: list[Attachment] = []  # their last calls may still run
        self._load_lane: Lane = InlineLane() if synchronous else Worker("load")
        self._write_lane: Lane = InlineLane() if synchronous else Worker("write")
        self._storage: Attachment | None = None
        self._closed = False
        self._epochs_before = 1
        if storage is not None:
            self.attach(storage)

    # -- storage -------------------------------------------------------------------------------

    @property
    def has_storage(self) -> bool:
        return self._storage is not None and self._storage.usable

    @property
    def storage_bypassed(self) -> bool:
        return self._storage is not None and not self._storage.usable

    @property
    def storage_answers(self) -> bool:
        """True if storage is attached, not bypassed, and its last call did not fail; for people."""
        return self.has_storage and self._storage is not None and self._storage.answers

    @property
    def storage_epoch(self) -> int:
        incidents = self._storage.incidents if self._storage is not None else 0
        return self._epochs_before + incidents

    def attach(self, storage: StorageBackend) -> None:
        """Start using a backend; the caller owns it and closes it after detach() or close()."""
        if self._storage is not None:
            raise ValueError("a storage backend is attached already; detach it first")
        link = StorageLink(
            storage,
            self._spec,
            self._host_pools,
            shard=self._shard,
            clock=self._clock,
            counters=self._counters,
            limits=self._limits,
        )
        self._epochs_before += 1
        self._storage = Attachment(
            link,
            readers=self._readers,
            clock=self._clock,
            counters=self._counters,
            end=self._end,
            crash=self._crashed,
        )

    def detach(self, timeout_s: float) -> bool:
        """Stop using the backend; its jobs end early, as failed. Blocks up to `timeout_s`.

        Returns False if a call into the backend is still running: close the backend to free it. That
        job ends, and its slots become free, only when the call returns.
        """
        if self._storage is None:
            return True
        storage, self._storage = self._storage, None
        self._epochs_before += storage.incidents + 1
        self._detached.append(storage)
        return storage.close(timeout_s)

    def counters(self) -> dict[str, float]:
        """Return sums since the start: bytes, operations, seconds by kind, what went wrong. Any thread."""
        values = self._counters.snapshot()
        storage = self._storage
        values["storage_answers"] = self.storage_answers
        values["quarantined_bytes"] = storage.quarantined_bytes if storage is not None else 0
        return values

    # -- jobs ----------------------------------------------------------------------------------

    def copy_state(self, source: int, target: int) -> None:
        slot_index((source, target), self._device.capacities[Component.MAMBA], "device MAMBA")
        self._device.copy_state(source, target)

    def fence(self) -> Mark:
        return self._engine.fence()

    def passed(self, fence: Mark) -> bool:
        return self._engine.passed(fence)

    def start_load(self, job: JobId, moves: Sequence[Move]) -> Load:
        pages = gather_pages(moves, self._device, self._host_pools, kind=JobKind.LOAD)
        load = Load(job, self._engine, self._schedule, pages)
        after = self._engine.fence()

        def fail(error: BaseException) -> bytes:
            load.fail(error)
            return b"" if isinstance(error, InvariantViolation) else self._try_pages(load, after)

        self._load_lane.submit(
            lambda: self._perform(job, JobKind.LOAD, lambda: self._load(load, after), fail)
        )
        return load

    def start_write(self, job: JobId, moves: Sequence[Move]) -> None:
        pages = gather_pages(moves, self._device, self._host_pools, kind=JobKind.WRITE)
        after = self._engine.fence()
        self._write_lane.submit(lambda: self._perform(job, JobKind.WRITE, lambda: self._write(pages, after)))

    def start_probe(self, job: JobId, refs: Sequence[ObjectRef]) -> None:
        self._start_storage(StorageJob(job, JobKind.PROBE, refs, (), bytearray(len(refs))))

    def start_fetch(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._check_slots(refs, slots)
        self._start_storage(StorageJob(job, JobKind.FETCH, refs, slots, bytearray(len(refs))))

    def start_store(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._check_slots(refs, slots)
        self._start_storage(StorageJob(job, JobKind.STORE, refs, slots, bytearray(len(refs))))

    def pin(self, session: str, refs: Sequence[ObjectRef], ttl_s: float) -> None:
        if self._storage is not None:
            self._storage.hint(lambda link: link.pin(session, refs, ttl_s))

    def close_session(self, session: str) -> None:
        if self._storage is not None:
            self._storage.hint(lambda link: link.close_session(session))

    def arrived(self, job: JobId) -> bytes:
        for storage in self._attachments():
            flags = storage.arrived(job)
            if flags is not None:
                return flags
        with self._lock:  # begun when nothing was attached any more: it has ended without a store
            for done in self._ended:
                if done.job == job:
                    return done.flags
        raise ValueError(f"job {job} is no storage job in flight")

    def cancel(self, job: JobId) -> None:
        """Ask a FETCH or PROBE to end behind the call it is in; a job that has ended is left alone."""
        for storage in self._attachments():
            storage.cancel(job)

    def poll(self) -> list[Done]:
        if self._storage is not None:
            self._storage.recover_inline()
        with self._lock:
            if self._crash is not None:
                raise self._crash
            ended = list(self._ended)
            self._ended.clear()
        for done in ended:
            for storage in self._attachments():
                storage.forget(done.job)
        self._detached = [storage for storage in self._detached if storage.busy]
        return ended

    def wait(self, timeout_s: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: bool(self._ended) or self._crash is not None, timeout_s)

    def close(self) -> None:
        """Stop the threads within a bound. Loads in progress finish; a stuck storage call is left behind."""
        if self._closed:
            return
        self._closed = True
        if not self.detach(self._close_timeout_s / 2):
            logger.warning("a storage call is still running; its thread is left behind")
        ended = [lane.stop(self._close_timeout_s / 4) for lane in (self._load_lane, self._write_lane)]
        if not all(ended):
            logger.warning("a copy is still running; its thread is left behind")

    # -- performing ----------------------------------------------------------------------------

    def _load(self, load: Load, after: Mark) -> bytes:
        started = self._clock.now()
        with self._engine.session(JobKind.LOAD, load.pages, after):
            load.run()
        self._count_copy("load", load.pages, started)
        return b""

    def _write(self, pages: Mapping[Component, Pages], after: Mark) -> bytes:
        started = self._clock.now()
        with self._engine.session(JobKind.WRITE, pages, after):
            for parts in self._schedule:
                for part in parts:
                    if part.component in pages:
                        self._engine.write_part(part, pages[part.component])
        self._count_copy("write", pages, started)
        return b""

    def _try_pages(self, load: Load, after: Mark) -> bytes:
        """Copy page by page what a load could not copy as a whole; of FULL up to the first that fails."""
        flags = bytearray()
        for component, pages in load.pages.items():
            broken = False
            for i in range(len(pages.host)):
                one = {component: Pages(pages.host[i : i + 1], pages.device[i : i + 1])}
                whole = not broken and self._try_page(one, after)
                broken |= not whole and component is Component.FULL
                flags.append(whole)
        return bytes(flags)

    def _try_page(self, one: Mapping[Component, Pages], after: Mark) -> bool:
        try:
            with self._engine.session(JobKind.LOAD, one, after):
                for parts in self._schedule:
                    for part in parts:
                        if part.component in one:
                            self._engine.load_part(part, one[part.component])
        except (OSError, RuntimeError, ValueError) as error:
            logger.debug("a page cannot be copied: %s", error)
            return False
        return True

    def _perform(
        self,
        job: JobId,
        kind: JobKind,
        work: Callable[[], bytes],
        fail: Callable[[BaseException], bytes] | None = None,
    ) -> None:
        """Run a copy job to its end, whatever happens; reports it as Done. `fail` returns its flags."""
        done = Done(job, kind, failed=True)
        started = self._clock.now()
        try:
            flags = work()
            done = Done(job, kind, flags, seconds=self._clock.now() - started)
        except InvariantViolation as error:
            self._crashed(error)
            if fail is not None:
                fail(error)
        except Exception as error:
            logger.exception("%s %d failed", kind.value, job)
            self._counters.add(f"{kind.value}_failed")
            if fail is not None:
                done = Done(job, kind, fail(error), failed=True)
        self._end(done)

    def _start_storage(self, job: StorageJob) -> None:
        if self._storage is None:
            self._end(Done(job.job, job.kind, bytes(job.flags), failed=True, why=Why.DETACHED))
            return
        self._storage.submit(job)

    def _attachments(self) -> list[Attachment]:
        """The attached storage, and detached ones whose last calls may still run."""
        return [*self._detached, *([] if self._storage is None else [self._storage])]

    def _end(self, done: Done) -> None:
        with self._lock:
            self._ended.append(done)
            self._lock.notify_all()

    def _crashed(self, error: InvariantViolation) -> None:
        logger.error("a transfer broke a law: %s", error, exc_info=error)
        with self._lock:
            self._crash = error
            self._lock.notify_all()

    # -- checking and counting -----------------------------------------------------------------

    @property
    def _host_pools(self) -> HostPools:
        if self._host is None:
            raise ValueError("this executor has no host pools")
        return self._host

    def _check_slots(self, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        if len(refs) != len(slots):
            raise ValueError(f"{len(refs)} objects but {len(slots)} slots")
        for component in {ref.component for ref in refs}:
            named = [slot for ref, slot in zip(refs, slots, strict=True) if ref.component is component]
            slot_index(named, self._host_pools.capacities[component], f"host {component.name}")

    def _count_copy(self, kind: str, pages: Mapping[Component, Pages], started: float) -> None:
        moved = sum(len(p.host) * self._spec[component].page_bytes for component, p in pages.items())
        seconds = self._clock.now() - started
        self._counters.add_all({f"{kind}_bytes": moved, f"{kind}_ops": 1, f"{kind}_seconds": seconds})


def _engine_for(device: DevicePools, host: HostPools | None) -> CopyEngine:
    if device.device.type == "cpu":
        return CpuCopyEngine(device, host)
    return StagedCopyEngine(device, host, CudaStreams(device.device))
