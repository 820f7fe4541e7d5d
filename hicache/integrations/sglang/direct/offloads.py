"""From the device to the store, behind SGLang's back: in order, bounded, and answered in the same order.

SGLang keeps the pages of an offload locked until it is answered, and ranks compare their answers one by one.
So what is refused is accepted and answered with False in its turn, never left out. Decides what is refused.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache.clock import Clock
from hicache.integrations.sglang.direct.blocks import Block, Copier
from hicache.integrations.sglang.direct.pools import Layout
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.integrations.sglang.store import ObjectStore
from hicache.transfer.counters import Counters
from hicache.types import Component

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FamilyOffload:
    """Pages of one family: their hashes, and per pool of the family where they are."""

    component: Component
    hashes: Sequence[bytes]
    pages: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Job:
    families: Sequence[FamilyOffload]
    ready: Sequence[Any]
    since: float
    accepted: bool

    @property
    def num_pages(self) -> int:
        return max((len(family.hashes) for family in self.families), default=0)


class Offloader:
    """Offloads come from SGLang's scheduler thread; copies and writes are this object's thread's.

    `_lock` guards the queue, the answers and `_reading`; it is not held while bytes move.
    Invariant: at most `max_pages` wait, unless one offload alone has more.
    """

    def __init__(
        self,
        layout: Layout,
        store: ObjectStore,
        copier: Copier,
        *,
        pinned: bool,
        max_pages: int,
        bounds: Bounds,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._store = store
        self._copier = copier
        self._pinned = pinned
        self._max_pages = max_pages
        self._max_seconds = bounds.offload_s
        self._clock = clock
        self._counters = counters
        self._blocks: dict[Component, Block] = {}  # the thread's
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        self._waiting_pages = 0
        self._current: _Job | None = None
        self._reading = False  # the thread copies from device pages of `_current`
        self._answers: deque[bool] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hicache-linker-write", daemon=True)
        self._thread.start()

    def offload(self, families: Sequence[FamilyOffload], ready: Sequence[Any]) -> None:
        """Store these pages once `ready` has come. They must not change until this is answered."""
        with self._lock:
            pages = max((len(family.hashes) for family in families), default=0)
            accepted = not self._waiting_pages or self._waiting_pages + pages <= self._max_pages
            job = _Job(families, ready, self._clock.now(), accepted)
            if accepted:
                self._waiting_pages += pages
            else:
                self._counters.add("offloads_refused")
            self._queue.append(job)
            self._changed.notify_all()

    def refuse(self) -> None:
        """Answer an offload that cannot be made with False, in its turn."""
        with self._lock:
            self._queue.append(_Job((), (), self._clock.now(), accepted=False))
            self._changed.notify_all()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def pop_answer(self) -> bool:
        """Return whether the oldest answered offload is whole in the store."""
        with self._lock:
            return self._answers.popleft()

    def reset(self) -> None:
        """Drop what waits and all answers; return when no device page is read any more."""
        with self._lock:
            self._counters.add("offloads_dropped", len(self._queue))
            self._queue.clear()
            self._waiting_pages = 0
            self._current = None
            self._answers.clear()
            while self._reading:
                self._changed.wait()

    def close(self, *, timeout_s: float) -> None:
        """End the thread; it is left behind if the store does not let go of it in time."""
        self.reset()
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- on the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._current = self._queue.popleft()
            try:
                done = self._store_all(job)
            except Exception:
                self._counters.add("offload_crashed")
                logger.exception("HiCache: an offload failed")
                done = False
            with self._lock:
                if self._current is job:
                    self._current = None
                    self._answers.append(done)
                    if job.accepted:
                        self._waiting_pages -= job.num_pages

    def _store_all(self, job: _Job) -> bool:
        if not job.accepted or not self._store.usable:
            return False
        if self._clock.now() - job.since > self._max_seconds:
            self._counters.add("offloads_late")
            return False
        for family in job.families:
            stored = self._store.probe(family.component, family.hashes)
            lacking = [i for i, there in enumerate(stored) if not there]
            self._counters.add("existing_objects", len(stored) - len(lacking))
            block = self._block(family.component)
            for start in range(0, len(lacking), block.pages):
                chunk = lacking[start : start + block.pages]
                if not self._gather(job, family, chunk, block) or not self._write(family, chunk, block):
                    return False
        return True

    def _gather(self, job: _Job, family: FamilyOffload, chunk: Sequence[int], block: Block) -> bool:
        """Copy pages off the device; False if the offload was dropped meanwhile."""
        with self._lock:
            if self._current is not job:
                return False
            self._reading = True
        try:
            self._copier.wait_for(job.ready)
            index = 0
            for pool in self._layout[family.component]:
                rows = self._copier.rows([family.pages[pool.name][i] for i in chunk]) if pool.parts else None
                for part in pool.parts:
                    for layer in range(len(part.layers)):
                        self._copier.store(part, layer, rows, block.parts[index][layer, : len(chunk)])
                    index += 1
            self._copier.settle()
        finally:
            with self._lock:
                self._reading = False
                self._changed.notify_all()
        return True

    def _write(self, family: FamilyOffload, chunk: Sequence[int], block: Block) -> bool:
        def fill(i: int, parts: Sequence[memoryview]) -> bool:
            block.take(i, parts)
            return True

        return all(self._store.write(family.component, [family.hashes[i] for i in chunk], fill))

    def _block(self, component: Component) -> Block:
        block = self._blocks.get(component)
        if block is None:
            specs = [spec for pool in self._layout[component] for spec in pool.specs]
            pages = max(1, _CHUNK_BYTES // sum(spec.page_bytes for spec in specs))
            block = self._blocks[component] = Block(specs, min(pages, self._max_pages), pinned=self._pinned)
        return block
