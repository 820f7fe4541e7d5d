"""From the store to verified pages in host memory, ahead of the answer that promises them.

SGLang asks on its scheduler's thread what can be restored, and aborts a request whose load fails. So a
thread reads and verifies the pages first, and a prefix is promised only as far as they are at hand. Decides
how long the scheduler waits for that: once per request, and within what is left of its tick.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hicache.clock import Clock
from hicache.integrations.sglang.direct.held import HeldPages, Key
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.integrations.sglang.store import ObjectStore
from hicache.transfer.counters import Counters
from hicache.types import Component

logger = logging.getLogger(__name__)

_SLICE_PAGES = 256  # read before looking whether anyone still waits
_ATTEMPTS = 4  # boundaries tried, deepest first, when the pages of a window turn out to be lost


class Agreement(Enum):
    """Whether other ranks must be able to restore what this one answers."""

    ALONE = "alone"
    SHARED = "shared"  # other ranks may lack this one's deepest boundary: shallower ones are named too


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chain of FULL pages, and for each component with a trailing window how many of its pages count."""

    hashes: tuple[bytes, ...]
    windows: tuple[tuple[Component, int], ...] = ()

    @property
    def name(self) -> object:
        """Tells one from another: a hash names all that is before it."""
        return len(self.hashes), self.hashes[0], self.hashes[-1], self.windows


@dataclass(slots=True)
class _Job:
    """Work for the thread; `finished` is set when it was done or given up."""

    run: Callable[[], None]
    finished: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Promise:
    """What one request was told; it grows while its pages come in."""

    wanted: Wanted
    touched: float
    wait_left_s: float
    job: _Job | None = None
    finished_at: float = 0.0
    lead: int = 0  # FULL pages from the start that are held
    bounded: tuple[int, ...] = ()  # with windows: prefix lengths whose windows are held, the deepest verified
    forgotten: bool = False


class Fetcher:
    """Lookups come from SGLang's scheduler thread alone; reads are this object's thread's.

    `_lock` guards the promises and the queue; no call to the store is made under it.
    """

    def __init__(
        self,
        store: ObjectStore,
        held: HeldPages,
        *,
        bounds: Bounds,
        clock: Clock,
        counters: Counters,
        agreement: Agreement = Agreement.ALONE,
    ) -> None:
        self._store = store
        self._held = held
        self._bounds = bounds
        self._clock = clock
        self._counters = counters
        self._shared = agreement is Agreement.SHARED
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._promises: dict[str, _Promise] = {}
        self._queue: deque[_Job] = deque()
        self._closed = False
        self._tick_left_s = bounds.lookup_timeout_s
        self._batches = 0  # grows with every batch of the store that ended, whatever came of it
        self._stuck_at = -1  # value of `_batches` at which a wait ran out: whoever waits then waits in vain
        self._thread = threading.Thread(target=self._work, name="hicache-linker-read", daemon=True)
        self._thread.start()

    def new_tick(self) -> None:
        """The scheduler begins another round: it may wait again."""
        self._tick_left_s = self._bounds.lookup_timeout_s
        oldest = self._clock.now() - self._bounds.promise_s
        for rid in [rid for rid, promise in self._promises.items() if promise.touched < oldest]:
            self._counters.add("promises_expired")
            self.forget(rid)

    def lookup(self, rid: str, wanted: Wanted) -> list[int]:
        """Return the prefix lengths, in pages, that can be restored; waits at most what is allowed."""
        now = self._clock.now()
        promise = self._promises.get(rid)
        if promise is not None and promise.wanted.name != wanted.name:
            self.forget(rid)
            promise = None
        if promise is None:
            if not self._store.usable:
                self._counters.add("lookups_without_store")
                return []
            promise = self._promises[rid] = _Promise(wanted, now, self._bounds.lookup_timeout_s)
            self._counters.add("lookups")
        promise.touched = now
        if promise.job is None and self._is_due(promise, now):
            self._submit(rid, promise)
        if promise.job is not None:
            promise.wait_left_s -= self._wait(promise.job, promise.wait_left_s)
        if promise.job is not None and promise.job.finished.is_set():
            promise.job, promise.finished_at = None, now
        return self._answer(promise)

    def _answer(self, promise: _Promise) -> list[int]:
        if promise.wanted.windows:
            return list(promise.bounded)
        lead = promise.lead
        return list(range(1, lead + 1)) if self._shared else [lead] if lead else []

    def _is_due(self, promise: _Promise, now: float) -> bool:
        if not self._store.usable or len(promise.wanted.hashes) in self._answer(promise)[-1:]:
            return False
        return promise.finished_at == 0 or now - promise.finished_at >= self._bounds.retry_s

    def _submit(self, rid: str, promise: _Promise) -> None:
        keys = [(Component.FULL, page_hash) for page_hash in promise.wanted.hashes]
        keys += [
            (component, page_hash)
            for component, _ in promise.wanted.windows
            for page_hash in promise.wanted.hashes
        ]
        self._held.want(rid, keys)
        promise.job = self._enqueue(lambda: self._fetch(promise))

    def ensure(self, rid: str, keys: Sequence[Key]) -> bool:
        """Have these pages at hand, read again if they were lost; False if that takes too long."""
        if all(self._held.has(*key) for key in keys):
            return True
        if not self._store.usable:
            return False
        self._held.want(rid, keys)
        by_component: dict[Component, list[bytes]] = {}
        for component, page_hash in keys:
            by_component.setdefault(component, []).append(page_hash)

        def run() -> None:
            for component, hashes in by_component.items():
                self._read(component, hashes)

        job = self._enqueue(run)
        self._wait(job, self._bounds.lookup_timeout_s)
        return job.finished.is_set() and all(self._held.has(*key) for key in keys)

    def take(self, rid: str, heir: object) -> None:
        """The promise is kept: its pages are the heir's from now on."""
        self._promises.pop(rid, None)
        self._held.hand_over(rid, heir)

    def forget(self, rid: str) -> None:
        """Nobody waits for what this request was promised."""
        promise = self._promises.pop(rid, None)
        if promise is not None:
            promise.forgotten = True
        self._held.done(rid)

    def reset(self) -> None:
        """Forget every promise. A read under way ends by itself and keeps nothing."""
        with self._lock:
            for job in self._queue:
                job.finished.set()
            self._queue.clear()
        for rid in list(self._promises):
            self.forget(rid)

    def close(self, *, timeout_s: float) -> None:
        """End the thread; it is left behind if the store does not let go of it in time."""
        self.reset()
        with self._lock:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout_s)

    # -- waiting ---------------------------------------------------------------------------------

    def _wait(self, job: _Job, most_s: float) -> float:
        """Wait for a job within the tick; return the seconds that took."""
        most_s = min(most_s, self._tick_left_s)
        if most_s <= 0 or self._stuck_at == self._batches:
            return 0.0
        seen, began = self._batches, self._clock.now()
        if not job.finished.wait(most_s):
            self._counters.add("lookups_cut_off")
            if self._batches == seen:
                self._stuck_at = seen
        took = self._clock.now() - began
        self._tick_left_s -= took
        return took

    def _enqueue(self, run: Callable[[], None]) -> _Job:
        job = _Job(run)
        with self._lock:
            self._queue.append(job)
            self._wake.notify()
        return job

    # -- reading, on the thread ------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                job = self._queue.popleft()
            try:
                job.run()
            except Exception:
                self._counters.add("fetch_crashed")
                logger.exception("HiCache: reading from L3 failed; it counts as a miss")
            self._batches += 1
            job.finished.set()

    def _fetch(self, promise: _Promise) -> None:
        wanted = promise.wanted
        if not wanted.windows:
            self._lead(promise, len(wanted.hashes))
            return
        full = self._present(Component.FULL, wanted.hashes)
        depth = full.index(0) if 0 in full else len(full)
        present = {
            component: self._present(component, wanted.hashes[:depth]) for component, _ in wanted.windows
        }
        for _ in range(_ATTEMPTS):
            allowed = _boundaries(present, wanted.windows, depth)
            if not allowed:
                return
            self._lead(promise, allowed[-1])
            reached = [length for length in allowed if length <= promise.lead]
            if not reached:
                return
            lost = self._window(wanted, reached[-1], present)
            if not lost:
                promise.bounded = tuple(reached) if self._shared else (reached[-1],)
                return

    def _window(self, wanted: Wanted, end: int, present: dict[Component, bytearray]) -> bool:
        """Read the windows that end at a boundary; strike out what is not there after all."""
        lost = False
        for component, width in wanted.windows:
            start = max(0, end - width)
            self._read(component, wanted.hashes[start:end])
            for at in range(start, end):
                if not self._held.has(component, wanted.hashes[at]):
                    present[component][at] = 0
                    lost = True
        return lost

    def _lead(self, promise: _Promise, target: int) -> None:
        """Read FULL pages in order, up to `target`; without windows each is promised once it is held."""
        hashes = promise.wanted.hashes
        while promise.lead < target and not promise.forgotten:
            start = end = promise.lead
            if self._held.has(Component.FULL, hashes[start]):
                promise.lead += 1
                continue
            most = min(target, start + _SLICE_PAGES)
            while end < most and not self._held.has(Component.FULL, hashes[end]):
                end += 1

            def kept(i: int, start: int = start) -> None:
                promise.lead = start + i + 1

            self._read(Component.FULL, hashes[start:end], kept)
            if promise.lead < end:
                return

    def _present(self, component: Component, hashes: Sequence[bytes]) -> bytearray:
        found = self._store.probe(component, hashes)
        self._batches += 1
        return found

    def _read(
        self, component: Component, hashes: Sequence[bytes], kept: Callable[[int], None] | None = None
    ) -> None:
        """Read, verify and hold pages until one is missing, as far as there is room for them."""
        lacking = [i for i, page_hash in enumerate(hashes) if not self._held.has(component, page_hash)]
        room = self._held.room(component)
        if room < len(lacking):
            self._counters.add("transit_full")
            lacking = lacking[:room]
        expected = iter(lacking)

        def place(at: int, parts: Sequence[memoryview]) -> None:
            self._batches += 1
            # A page behind a hole is of no use, and would take room from others.
            if next(expected, None) == lacking[at] and self._held.put(
                (component, hashes[lacking[at]]), parts
            ):
                if kept is not None:
                    kept(lacking[at])
            else:
                for _ in expected:
                    pass

        if lacking:
            self._store.read(component, [hashes[i] for i in lacking], place)


def _boundaries(
    present: dict[Component, bytearray], windows: Iterable[tuple[Component, int]], depth: int
) -> list[int]:
    """Return the prefix lengths up to `depth` whose windows are all there."""
    accepted = np.ones(depth + 1, dtype=bool)
    accepted[0] = False
    lengths = np.arange(1, depth + 1)
    for component, width in windows:
        there = np.frombuffer(bytes(present[component]), np.uint8).astype(bool)
        last_gap = np.maximum.accumulate(np.where(there, 0, lengths)) if depth else lengths
        accepted[1:] &= lengths - last_gap >= np.minimum(width, lengths)
    return [int(length) for length in np.flatnonzero(accepted)]
