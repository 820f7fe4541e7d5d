"""The executor of virtual time: slots are real, tensors are absent, copies cost time instead.

Storage is a set of object names with a byte limit. Every channel (D2H, H2D, L3 read, L3 write) is
serial, as one copy stream or one network link is.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hicache.clock import ManualClock
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobId, JobKind, LoadTicket, Move, ObjectRef


@dataclass(frozen=True, slots=True)
class VirtualCosts:
    """What transfers cost. Bandwidths in bytes/s (inf: free), latencies in s per job."""

    write_bandwidth: float = float("inf")  # device to host
    load_bandwidth: float = float("inf")  # host to device
    fetch_bandwidth: float = float("inf")  # storage to host
    store_bandwidth: float = float("inf")  # host to storage
    storage_latency: float = 0.0


class VirtualStorage:
    """L3 shared by any number of virtual replicas: object names, LRU under a byte limit."""

    def __init__(self, capacity_bytes: float = float("inf")) -> None:
        self._capacity = capacity_bytes
        self._objects: OrderedDict[ObjectRef, int] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._objects)

    def has(self, ref: ObjectRef) -> bool:
        """Look up and refresh."""
        if ref not in self._objects:
            return False
        self._objects.move_to_end(ref)
        return True

    def present(self, refs: Sequence[ObjectRef]) -> bytes:
        """Look up and refresh many: one byte per name, 1 if it is there."""
        objects, refresh = self._objects, self._objects.move_to_end
        flags = bytearray(len(refs))
        for i, ref in enumerate(refs):
            if ref in objects:
                refresh(ref)
                flags[i] = 1
        return bytes(flags)

    def put(self, ref: ObjectRef, size: int) -> bool:
        """Store, evicting the least recently used; False if it can never fit."""
        if self.has(ref):
            return True
        if size > self._capacity:
            return False
        self._objects[ref] = size
        self.used_bytes += size
        while self.used_bytes > self._capacity:
            self.used_bytes -= self._objects.popitem(last=False)[1]
        return True


@dataclass(frozen=True, slots=True)
class VirtualTicket(LoadTicket):
    """A load that ends at `finish_at`; the runner decides what of it hides behind compute."""

    clock: ManualClock
    finish_at: float

    def wait_layer(self, layer: int) -> None:
        return

    def done(self) -> bool:
        return self.clock.now() >= self.finish_at


@dataclass(slots=True)
class _Channel:
    bandwidth: float
    latency: float = 0.0
    free_at: float = 0.0

    def book(self, now: float, size: int) -> tuple[float, float]:
        """Queue `size` bytes; returns when they start and when they have arrived."""
        start = max(now, self.free_at)
        self.free_at = start + self.latency + size / self.bandwidth
        return start, self.free_at


@dataclass(order=True, slots=True)
class _Pending:
    finish_at: float
    job: int
    done: Done = field(compare=False)
    start_at: float = field(compare=False, default=0.0)
    refs: Sequence[ObjectRef] = field(compare=False, default=())  # STORE only


class VirtualExecutor(Executor):
    """Performs nothing and accounts for everything; wait() cranks the clock."""

    def __init__(
        self,
        spec: ModelSpec,
        clock: ManualClock,
        *,
        costs: VirtualCosts | None = None,
        storage: VirtualStorage | None = None,
    ) -> None:
        costs = costs or VirtualCosts()
        self._clock, self._storage = clock, storage
        self._page_bytes = {c.component: c.page_bytes for c in spec.components}
        self._object_bytes = {
            (kind, phase): spec.object_bytes(kind, phase)
            for kind, period in spec.periods.items()
            for phase in range(period)
        }
        self._channels = {
            JobKind.WRITE: _Channel(costs.write_bandwidth),
            JobKind.LOAD: _Channel(costs.load_bandwidth),
            JobKind.FETCH: _Channel(costs.fetch_bandwidth, costs.storage_latency),
            JobKind.STORE: _Channel(costs.store_bandwidth, costs.storage_latency),
            JobKind.PROBE: _Channel(float("inf"), costs.storage_latency),
        }
        self._queue: list[_Pending] = []
        self._fetches: dict[JobId, _Pending] = {}
        self.moved_bytes = dict.fromkeys(JobKind, 0)

    @property
    def has_storage(self) -> bool:
        return self._storage is not None

    @property
    def storage_epoch(self) -> int:
        return 1

    def copy_state(self, source: int, target: int) -> None:
        return

    def fence(self) -> object:
        return None

    def passed(self, fence: object) -> bool:
        return True  # a runner of virtual time has computed when it returns

    def start_load(self, job: JobId, moves: Sequence[Move]) -> LoadTicket:
        pending = self._begin(JobKind.LOAD, job, self._size(moves))
        return VirtualTicket(self._clock, pending.finish_at)

    def start_write(self, job: JobId, moves: Sequence[Move]) -> None:
        self._begin(JobKind.WRITE, job, self._size(moves))

    def start_probe(self, job: JobId, refs: Sequence[ObjectRef]) -> None:
        self._begin(JobKind.PROBE, job, 0, self._present(refs))

    def start_fetch(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        flags = self._present(refs)
        size = sum(self._size_of(r) for r, there in zip(refs, flags, strict=True) if there)
        self._fetches[job] = self._begin(JobKind.FETCH, job, size, flags)

    def start_store(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        have = self._present(refs)
        size = sum(self._size_of(r) for r, there in zip(refs, have, strict=True) if not there)
        self._begin(JobKind.STORE, job, size).refs = refs

    def arrived(self, job: JobId) -> bytes:
        pending = self._fetches[job]
        span = pending.finish_at - pending.start_at
        share = 1.0 if span <= 0 else (self._clock.now() - pending.start_at) / span
        flags = pending.done.flags
        count = int(len(flags) * min(1.0, max(0.0, share)))
        return flags[:count].ljust(len(flags), b"\0")

    def cancel(self, job: JobId) -> None:
        for pending in self._queue:
            if pending.job == job:
                pending.finish_at = min(pending.finish_at, self._clock.now())
        heapq.heapify(self._queue)

    def poll(self) -> list[Done]:
        ended = []
        while self._queue and self._queue[0].finish_at <= self._clock.now():
            pending = heapq.heappop(self._queue)
            done = pending.done
            self._fetches.pop(done.job, None)
            if done.kind is JobKind.STORE:  # visible after its last byte, not before
                put = self._require().put
                flags = bytes(put(ref, self._size_of(ref)) for ref in pending.refs)
                done = replace(done, flags=flags)
            ended.append(done)
        return ended

    def wait(self, timeout_s: float) -> bool:
        until = self._clock.now() + max(0.0, timeout_s)
        if self._queue and self._queue[0].finish_at <= until:
            self._clock.advance_to(self._queue[0].finish_at)
            return True
        self._clock.advance_to(until)
        return False

    def close(self) -> None:
        return

    def _begin(self, kind: JobKind, job: JobId, size: int, flags: bytes = b"") -> _Pending:
        start, finish = self._channels[kind].book(self._clock.now(), size)
        pending = _Pending(finish, job, Done(job, kind, flags, seconds=finish - start), start)
        self.moved_bytes[kind] += size
        heapq.heappush(self._queue, pending)
        return pending

    def _size_of(self, ref: ObjectRef) -> int:
        return self._object_bytes[ref.component, ref.phase]

    def _size(self, moves: Sequence[Move]) -> int:
        return sum(self._page_bytes[m.component] * len(m.sources) for m in moves)

    def _present(self, refs: Sequence[ObjectRef]) -> bytes:
        return self._require().present(refs)

    def _require(self) -> VirtualStorage:
        if self._storage is None:
            raise ValueError("no storage is attached")
        return self._storage
