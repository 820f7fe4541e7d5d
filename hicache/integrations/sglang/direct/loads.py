"""From verified pages in host memory to the device, layer by layer, while the forward pass follows.

A gate per layer opens when the layer's bytes are there (or, on a stream, are ordered before whoever reads
them). No gate is waited for without a bound; what is late fails its batch, and SGLang drops the output.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache.clock import Clock
from hicache.errors import InvariantViolation
from hicache.integrations.sglang.direct.blocks import Copier
from hicache.integrations.sglang.direct.held import Run
from hicache.integrations.sglang.direct.pools import Layout, Part
from hicache.transfer.counters import Counters
from hicache.types import Component

logger = logging.getLogger(__name__)

_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class FamilyLoad:
    """Pages of one family: where they are, and per pool of the family where they go."""

    component: Component
    runs: Sequence[Run]
    pages: Mapping[str, Sequence[int]]

    @property
    def num_pages(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(slots=True)
class _Batch:
    """What one forward pass loads. `changed` guards the rest and is notified when any of it changes."""

    owners: Sequence[object]  # of held pages, done with when the batch ends
    families: Sequence[FamilyLoad]
    ready: Sequence[Any]
    changed: threading.Condition = field(default_factory=threading.Condition)
    marks: list[Any] = field(default_factory=list)  # one per layer that is copied
    failure: str = ""
    left: bool = False  # nobody will order another copy
    passed: int = -1  # the deepest layer whose mark the forward pass was told to wait for

    def fail(self, why: str) -> None:
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


class LayerGates:
    """SGLang's `layer_done_counter`. Waiting is for the thread that launches the forward pass alone."""

    def __init__(self, num_layers: int, *, timeout_s: float) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._timeout_s = timeout_s
        self._batches: dict[int, _Batch] = {}

    def set_consumer(self, index: int) -> None:
        """Say which batch of loads the next forward pass reads; -1 for none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Return when a layer may be read, or when its batch has failed, which shows at its end."""
        batch = self._batches.get(self.consumer_index)
        threshold = min(threshold, self.num_layers - 1)
        if batch is None or threshold <= batch.passed:
            return
        with batch.changed:
            arrived = batch.changed.wait_for(
                lambda: bool(batch.failure) or len(batch.marks) > threshold, self._timeout_s
            )
        if not arrived:
            batch.fail(f"layer {threshold} was not there after {self._timeout_s:g} s")
        if batch.failure:
            batch.passed = self.num_layers
            return
        batch.passed = threshold
        mark = batch.marks[threshold]
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def open(self, index: int, batch: _Batch) -> None:
        self._batches[index] = batch

    def close(self, index: int) -> _Batch | None:
        return self._batches.pop(index, None)

    @property
    def open_batches(self) -> tuple[int, ...]:
        return tuple(self._batches)


class Loader:
    """Batches come from SGLang's scheduler thread; copies are this object's thread's."""

    def __init__(
        self,
        layout: Layout,
        gates: LayerGates,
        copier: Copier,
        *,
        timeout_s: float,
        clock: Clock,
        counters: Counters,
        release: Callable[[object], None],
    ) -> None:
        """`layout` has the pools of each family, lead first; `release` takes the owner of held pages."""
        self._gates = gates
        self._copier = copier
        self._timeout_s = timeout_s
        self._clock = clock
        self._counters = counters
        self._release = release
        self._due = _arrange(layout, gates.num_layers)
        self._next = 0
        self._wake = threading.Condition()
        self._queue: deque[_Batch | None] = deque()
        self._thread = threading.Thread(target=self._work, name="hicache-linker-load", daemon=True)
        self._thread.start()

    def start(self, owners: Sequence[object], families: Sequence[FamilyLoad], ready: Sequence[Any]) -> int:
        """Begin a batch once `ready` has come; return its index."""
        index, self._next = self._next, self._next + 1
        batch = _Batch(owners, families, ready)
        self._gates.open(index, batch)
        self._put(batch)
        return index

    def finish(self, index: int) -> bool:
        """Return when nothing of a batch is written any more: True if all of it is on the device.

        Raises InvariantViolation if that cannot be had: the pages may not be used again (law 5).
        """
        batch = self._gates.close(index)
        if batch is None:
            return True
        deadline = self._clock.now() + self._timeout_s
        with batch.changed:
            left = batch.changed.wait_for(lambda: batch.left, self._timeout_s)
        if not left:
            batch.fail(f"it was not over after {self._timeout_s:g} s")
            deadline += self._timeout_s  # it stops after the layer it is at
            with batch.changed:
                left = batch.changed.wait_for(lambda: batch.left, self._timeout_s)
        if not left or not self._made(batch, deadline):
            raise InvariantViolation(
                f"law 5: a load still writes to device pages {2 * self._timeout_s:g} s after its forward pass"
            )
        for owner in batch.owners:
            self._release(owner)
        if batch.failure:
            self._counters.add("loads_failed")
            logger.error("HiCache: a load from L3 failed, its requests are aborted: %s", batch.failure)
            return False
        self._counters.add_all(
            {"loads": 1, "loaded_pages": sum(family.num_pages for family in batch.families)}
        )
        return True

    def _made(self, batch: _Batch, deadline: float) -> bool:
        mark = batch.marks[-1] if batch.marks else None
        pause = threading.Event()
        while mark is not None and not mark.query():
            if self._clock.now() >= deadline:
                return False
            pause.wait(_POLL_S)
        return True

    def reset(self) -> None:
        """End what was started and not finished."""
        for index in self._gates.open_batches:
            self.finish(index)
        self._gates.set_consumer(-1)

    def close(self) -> None:
        self.reset()
        self._put(None)
        self._thread.join(self._timeout_s)

    def _put(self, batch: _Batch | None) -> None:
        with self._wake:
            self._queue.append(batch)
            self._wake.notify()

    # -- on the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue:
                    self._wake.wait()
                batch = self._queue.popleft()
            if batch is None:
                return
            try:
                self._copy(batch)
                if batch.failure:
                    self._copier.settle()  # copies behind the last mark
            except Exception as error:
                logger.exception("HiCache: copying to the device failed")
                batch.fail(f"copying to the device: {error}")
                if not self._settled():
                    return  # nobody may be told that the pages are free
            with batch.changed:
                batch.left = True
                batch.changed.notify_all()

    def _settled(self) -> bool:
        try:
            self._copier.settle()
        except Exception:
            logger.exception("HiCache: the device does not end its copies")
            return False
        return True

    def _copy(self, batch: _Batch) -> None:
        copier = self._copier
        copier.wait_for(batch.ready)
        rows = {
            (family.component, name, i, j): copier.rows(pages[run.first : run.first + run.count])
            for i, family in enumerate(batch.families)
            for name, pages in family.pages.items()
            for j, run in enumerate(family.runs)
        }
        for due in self._due:
            if batch.failure:
                return
            for one in due:
                for i, family in enumerate(batch.families):
                    if family.component is not one.component:
                        continue
                    for j, run in enumerate(family.runs):
                        source = run.block.parts[one.index][one.layer, run.slot : run.slot + run.count]
                        copier.load(one.part, one.layer, rows[one.component, one.pool, i, j], source)
            mark = copier.mark()
            with batch.changed:
                batch.marks.append(mark)
                batch.changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Due:
    """One layer of one part, which part `index` of its family's objects is."""

    component: Component
    pool: str
    index: int
    part: Part
    layer: int


def _arrange(layout: Layout, num_layers: int) -> list[list[_Due]]:
    """Return, per transfer layer, what must be there before its gate opens."""
    due: list[list[_Due]] = [[] for _ in range(num_layers)]
    for component, pools in layout.items():
        parts = [(pool.name, part) for pool in pools for part in pool.parts]
        for index, (pool, part) in enumerate(parts):
            for layer, when in enumerate(part.due):
                due[when].append(_Due(component, pool, index, part, layer))
    return due
