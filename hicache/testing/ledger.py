"""A cache simulation in which every page carries its own identity, so that a foreign byte is seen.

LedgerExecutor moves identities instead of bytes and ends jobs in a seeded order, with faults;
LedgerRunner writes identities when it computes and checks every page that attention would read.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from hicache.clock import ManualClock
from hicache.errors import InvariantViolation, LoadFailed
from hicache.request import Request
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobId, JobKind, LoadTicket, Move, ObjectRef, Why
from hicache.types import NO_SLOT, Component, Tier

# What a page holds: how many tokens of the path it was computed from, and which tokens those were.
Identity = tuple[int, int]
POISON: Identity = (-1, -1)


def identity(request: Request, upto: int) -> Identity:
    """The identity of whatever was computed from tokens [0, upto) of this request's scope."""
    return upto, xxhash.xxh3_64_intdigest(request.scope + request.tokens[:upto].tobytes())


@dataclass(slots=True)
class Faults:
    """Probabilities per job or object."""

    store_fails: float = 0.0  # a storage job fails as a whole
    object_lost: float = 0.0  # an object vanishes from storage before it is read
    object_short: float = 0.0  # a read brings fewer bytes than the object has; the object is deleted
    put_refused: float = 0.0  # a store stops at an object
    copy_fails: float = 0.0  # a copy between host and device fails
    slow: float = 0.0  # a storage job takes `slow_s` longer
    slow_s: float = 0.0


@dataclass(slots=True)
class _Job:
    done: Done
    moves: list[tuple[Component, int, int]] = field(default_factory=list)  # component, source, target
    refs: Sequence[ObjectRef] = ()
    slots: Sequence[int] = ()
    sources: list[Identity] = field(default_factory=list)
    arrived: int = 0
    why: list[Why | None] = field(default_factory=list)  # of each object read, why it did not come
    cancelled: bool = False
    due: float = 0.0  # it does not end before


class LedgerTicket(LoadTicket):
    """Layer gates of a load; waiting for any layer ends the whole load."""

    def __init__(self, executor: LedgerExecutor, job: JobId) -> None:
        self._executor, self._job = executor, job

    def wait_layer(self, layer: int) -> None:
        self._executor.finish(self._job)
        if self._job in self._executor.failed_loads:
            raise LoadFailed(f"load {self._job} failed")

    def done(self) -> bool:
        return not self._executor.is_open(self._job)


class LedgerExecutor(Executor):
    """Moves identities; `content` is what each slot holds. Jobs end in random order when polled."""

    def __init__(
        self,
        clock: ManualClock,
        rng: random.Random,
        *,
        storage: bool,
        faults: Faults,
        longest_s: float = 0.0,
    ) -> None:
        """A transfer says that it took some time up to `longest_s`."""
        self._longest_s = longest_s
        self._clock, self._rng, self._faults = clock, rng, faults
        self.content: dict[tuple[Tier, Component, int], Identity] = {}
        self.storage: dict[ObjectRef, Identity] | None = {} if storage else None
        self.failed_loads: set[JobId] = set()
        self.spoiled = 0  # transfers that failed, and objects that were not there whole when read
        self._jobs: dict[JobId, _Job] = {}
        self._ended: list[Done] = []
        self._epoch = 1
        self._fences = 0
        self.issued: int | None = None  # while set, nothing issued behind this fence has been read yet

    @property
    def has_storage(self) -> bool:
        return self.storage is not None

    @property
    def storage_epoch(self) -> int:
        return self._epoch

    def lose_storage(self) -> None:
        """Storage restarts empty, as a killed daemon does."""
        if self.storage:
            self.storage.clear()
        self._epoch += 1

    def detach(self) -> None:
        """Take storage away: its jobs end, as failed."""
        for job, entry in list(self._jobs.items()):
            if entry.done.kind in (JobKind.PROBE, JobKind.FETCH, JobKind.STORE):
                self.finish(job, failed=True)
        self.storage = None
        self._epoch += 1

    def attach(self, storage: dict[ObjectRef, Identity]) -> None:
        """Use a storage with whatever it holds."""
        self.storage = storage
        self._epoch += 1

    def open_jobs(self, *kinds: JobKind) -> list[JobId]:
        """Jobs that have not ended, in the order they were started; of these kinds, or of all."""
        return [job for job, entry in self._jobs.items() if not kinds or entry.done.kind in kinds]

    def is_open(self, job: JobId) -> bool:
        return job in self._jobs

    def copy_state(self, source: int, target: int) -> None:
        key = (Tier.DEVICE, Component.MAMBA)
        self.content[(*key, target)] = self.content[(*key, source)]

    def fence(self) -> object:
        self._fences += 1
        return self._fences

    def passed(self, fence: object) -> bool:
        assert isinstance(fence, int)
        return self.issued is None or fence <= self.issued

    def hold_readers(self) -> None:
        """Let everything that reads from now on not end, until release_readers()."""
        self.issued = self._fences

    def release_readers(self) -> None:
        """Let it all have been read."""
        self.issued = None

    def start_load(self, job: JobId, moves: Sequence[Move]) -> LoadTicket:
        self._start(job, JobKind.LOAD, moves)
        return LedgerTicket(self, job)

    def start_write(self, job: JobId, moves: Sequence[Move]) -> None:
        self._start(job, JobKind.WRITE, moves)

    def start_probe(self, job: JobId, refs: Sequence[ObjectRef]) -> None:
        self._begin_storage(_Job(Done(job, JobKind.PROBE), refs=list(refs)))

    def start_fetch(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._begin_storage(_Job(Done(job, JobKind.FETCH), refs=list(refs), slots=list(slots)))

    def start_store(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        entry = _Job(Done(job, JobKind.STORE), refs=list(refs), slots=list(slots))
        entry.sources = [self.content[Tier.HOST, r.component, s] for r, s in zip(refs, slots, strict=True)]
        self._begin_storage(entry)

    def _begin_storage(self, entry: _Job) -> None:
        if self.storage is None:
            flags = bytes(len(entry.refs))
            why = Why.DETACHED
            self._ended.append(Done(entry.done.job, entry.done.kind, flags, failed=True, why=why))
            return
        slow = self._rng.random() < self._faults.slow
        entry.due = self._clock.now() + (self._faults.slow_s if slow else 0.0)
        self._jobs[entry.done.job] = entry

    def _start(self, job: JobId, kind: JobKind, moves: Sequence[Move]) -> None:
        entry = _Job(Done(job, kind))
        tier = Tier.DEVICE if kind is JobKind.WRITE else Tier.HOST
        for move in moves:
            for source, target in zip(move.sources, move.targets, strict=True):
                entry.moves.append((move.component, source, target))
                entry.sources.append(self.content[tier, move.component, source])
                # Half-written until the end: a reader that does not wait sees poison.
                other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
                self.content[other, move.component, target] = POISON
        if not entry.moves:
            raise InvariantViolation(f"{kind.value}: a copy of no pages locks its path for nothing")
        self._jobs[job] = entry

    def finish(self, job: JobId, *, failed: bool | None = None, upto: int | None = None) -> None:
        """Perform a job now; its Done is polled later.

        `failed` decides instead of chance; `upto` entries of a FETCH or STORE are done before it ends,
        and so many pages of a LOAD that fails could be copied.
        """
        entry = self._jobs.pop(job, None)
        if entry is None:
            return
        kind = entry.done.kind
        copy = kind in (JobKind.WRITE, JobKind.LOAD)
        chance = failed is None
        if failed is None:
            failed = self._rng.random() < (self._faults.copy_fails if copy else self._faults.store_fails)
        self.spoiled += failed
        if copy:
            if not failed:
                self._finish_copy(entry, kind)
            elif kind is JobKind.LOAD:
                self.failed_loads.add(job)
            flags = b""
            if failed and kind is JobKind.LOAD and upto is not None:
                flags = bytes(i < upto for i in range(len(entry.moves)))
            elif failed and chance and kind is JobKind.LOAD and self._rng.random() < 0.7:
                flags = bytes(self._rng.random() < 0.8 for _ in entry.moves)
            self._ended.append(Done(job, kind, flags, failed, self._took()))
            return
        if kind is JobKind.PROBE and failed:
            flags = b""
        else:
            limit = len(entry.refs) if upto is None else min(upto, len(entry.refs))
            flags = self._finish_storage(entry, kind, 0 if failed and upto is None else limit)
        self._ended.append(
            Done(job, kind, flags, failed, self._took(), self._why(entry, flags, failed=failed))
        )

    def _took(self) -> float:
        return self._rng.random() * self._longest_s if self._longest_s else 0.0

    @staticmethod
    def _why(entry: _Job, flags: bytes, *, failed: bool) -> Why | None:
        kind = entry.done.kind
        if kind is JobKind.STORE or (not failed and (kind is JobKind.PROBE or 0 not in flags)):
            return None
        first = flags.find(0) if flags else 0
        if first < len(entry.why) and entry.why[first] is not None:
            return entry.why[first]
        return Why.ERROR if failed else Why.CANCELLED if entry.cancelled else None

    def _finish_copy(self, entry: _Job, kind: JobKind) -> None:
        source, target = (Tier.DEVICE, Tier.HOST) if kind is JobKind.WRITE else (Tier.HOST, Tier.DEVICE)
        for (component, a, b), before in zip(entry.moves, entry.sources, strict=True):
            if self.content[source, component, a] != before:
                raise InvariantViolation(
                    f"{kind.value}: {component.name} slot {a} changed while it was read (law 5)"
                )
            if self.content[target, component, b] != POISON:
                raise InvariantViolation(
                    f"{kind.value}: {component.name} slot {b} changed while it was written"
                )
            self.content[target, component, b] = before

    def _finish_storage(self, entry: _Job, kind: JobKind, limit: int) -> bytes:
        storage = self.storage if self.storage is not None else {}
        if kind is JobKind.PROBE:
            return bytes(ref in storage for ref in entry.refs)
        if kind is JobKind.FETCH:
            while entry.arrived < limit and not entry.cancelled:
                self._read_one(entry, storage)
            return self._flags(entry)
        flags = bytearray(len(entry.refs))
        for i, (ref, slot, before) in enumerate(zip(entry.refs, entry.slots, entry.sources, strict=True)):
            if self.content[Tier.HOST, ref.component, slot] != before:
                raise InvariantViolation(f"store: {ref.component.name} slot {slot} changed while it was read")
            if i >= limit or self._rng.random() < self._faults.put_refused:
                break
            storage[ref] = before
            flags[i] = 1
        return bytes(flags)

    def _read_one(self, entry: _Job, storage: dict[ObjectRef, Identity]) -> None:
        ref, slot = entry.refs[entry.arrived], entry.slots[entry.arrived]
        if self._rng.random() < self._faults.object_lost:
            storage.pop(ref, None)
        found = storage.get(ref)
        why = Why.MISSING if found is None else None
        if found is not None and self._rng.random() < self._faults.object_short:
            del storage[ref]
            found, why = None, Why.SHORT
        entry.why.append(why)
        self.content[Tier.HOST, ref.component, slot] = POISON if found is None else found
        self.spoiled += found is None
        entry.arrived += 1

    def _flags(self, entry: _Job) -> bytes:
        got = [
            self.content[Tier.HOST, r.component, s] != POISON
            for r, s in zip(entry.refs[: entry.arrived], entry.slots[: entry.arrived], strict=True)
        ]
        return bytes(got).ljust(len(entry.refs), b"\0")

    def arrived(self, job: JobId) -> bytes:
        if job not in self._jobs:
            return next(d.flags for d in self._ended if d.job == job)
        return self._flags(self._jobs[job])

    def cancel(self, job: JobId) -> None:
        if job in self._jobs:
            self._jobs[job].cancelled = True

    def poll(self) -> list[Done]:
        for job, entry in list(self._jobs.items()):
            if entry.due > self._clock.now():
                continue
            if entry.done.kind is JobKind.FETCH and not entry.cancelled and entry.arrived < len(entry.refs):
                self._read_one(entry, {} if self.storage is None else self.storage)
            if self._rng.random() < 0.4 and self._next(entry):
                self.finish(job)
        ended, self._ended = self._ended, []
        return ended

    def _next(self, entry: _Job) -> bool:
        """True unless it is a STORE behind another one: there is one writer."""
        return entry.done.kind is not JobKind.STORE or self.open_jobs(JobKind.STORE)[0] == entry.done.job

    def wait(self, timeout_s: float) -> bool:
        until = self._clock.now() + max(0.0, timeout_s)
        if not self._ended and self._jobs:
            self._clock.advance_to(min(until, min(e.due for e in self._jobs.values() if self._next(e))))
            ready = [j for j, e in self._jobs.items() if e.due <= self._clock.now() and self._next(e)]
            if ready:
                self.finish(self._rng.choice(ready))
        if self._ended:
            self._clock.advance(0.001)
            return True
        self._clock.advance_to(until)
        return False

    def close(self) -> None:
        return


class ScriptedLedger(LedgerExecutor):
    """A ledger in which nothing ends by itself: the test says which job ends next, and how."""

    def __init__(self, clock: ManualClock, *, storage: bool) -> None:
        super().__init__(clock, random.Random(0), storage=storage, faults=Faults())

    def read(self, job: JobId, count: int) -> None:
        """Let a FETCH read its next `count` objects."""
        entry = self._jobs[job]
        for _ in range(count):
            self._read_one(entry, {} if self.storage is None else self.storage)

    def refs(self, job: JobId) -> Sequence[ObjectRef]:
        """Return what a storage job names."""
        return self._jobs[job].refs

    def pages(self, job: JobId) -> int:
        """Return how many pages a copy moves."""
        return len(self._jobs[job].moves)

    def poll(self) -> list[Done]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> bool:
        if not self._ended:
            self._clock.advance(max(0.0, timeout_s))
        return bool(self._ended)


class LedgerRunner:
    """Computes identities, and checks that everything it would read is exactly what was computed."""

    def __init__(
        self, spec: ModelSpec, executor: LedgerExecutor, clock: ManualClock, vocabulary: int
    ) -> None:
        self._spec, self._executor, self._clock, self._vocabulary = spec, executor, clock, vocabulary
        self._begun: dict[str, tuple[Request, int]] = {}  # by request id: its last admission seen

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        if request.load is not None:
            for layer in range(len(self._spec.layers)):
                request.load.wait_layer(layer)
        self._check_inputs(request, start)
        page, content = self._spec.page_size, self._executor.content
        for i in range(start // page, -(-end // page)):
            what = identity(request, min(end, (i + 1) * page))
            content[Tier.DEVICE, Component.FULL, request.full[i]] = what
            if Component.SWA in self._spec.kinds and request.swa[i] != NO_SLOT:
                content[Tier.DEVICE, Component.SWA, request.swa[i]] = what
        if Component.MAMBA in self._spec.kinds:
            for capture in request.captures:
                if not start < capture.position <= end or capture.position % page:
                    raise InvariantViolation(f"capture at {capture.position} outside ({start}, {end}]")
                key = (Tier.DEVICE, Component.MAMBA, capture.slot)
                content[key] = identity(request, capture.position)
            content[Tier.DEVICE, Component.MAMBA, request.state] = identity(request, end)
        self._clock.advance(0.001 * (end - start))
        if end < len(request.tokens):
            return None
        return identity(request, end)[1] % self._vocabulary

    def decode(self, request: Request) -> int:
        token = self.prefill(request, len(request.tokens) - 1, len(request.tokens))
        assert token is not None
        return token

    def _check_inputs(self, request: Request, start: int) -> None:
        page, content = self._spec.page_size, self._executor.content
        admission = (request, request.admissions)
        if self._begun.get(request.rid) != admission:
            self._begun[request.rid] = admission
            if start % (page * self._spec.align_pages):
                raise InvariantViolation(
                    f"{request.rid} resumes at {start}, within a group whose unfinished state nobody keeps"
                )

        def check(component: Component, slot: int, upto: int) -> None:
            want = identity(request, upto)
            found = content.get((Tier.DEVICE, component, slot), POISON)
            if found != want:
                raise InvariantViolation(
                    f"{request.rid} at {start}: {component.name} slot {slot} holds {found}, not {want}"
                )

        for i in range(-(-start // page)):
            upto = min(start, (i + 1) * page)
            check(Component.FULL, request.full[i], upto)
            if Component.SWA in self._spec.kinds and (i + 1) * page > start - self._spec.window:
                check(Component.SWA, request.swa[i], upto)
        if start and Component.MAMBA in self._spec.kinds:
            check(Component.MAMBA, request.state, start)


def make_request(rid: str, prompt: array[int], max_new_tokens: int, *, scope: bytes = b"") -> Request:
    """A request as the scheduler wants it; the prompt is copied."""
    return Request(
        rid=rid,
        tokens=array("I", prompt),
        prompt_length=len(prompt),
        max_new_tokens=max_new_tokens,
        scope=scope,
    )
