"""One layer-wise load: the order of its copies, and the gate that each model layer waits behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from hicache.errors import LoadFailed
from hicache.transfer.base import JobId, LoadTicket
from hicache.transfer.copy_engine import CopyEngine, LayerPart, Mark, Pages
from hicache.types import Component


class Load(LoadTicket):
    """A load in progress and the ticket for it.

    The copy thread calls run() once, or fail(); any thread may wait. A gate opens after its mark is
    set, so whoever passes it sees the mark.
    """

    def __init__(
        self,
        job: JobId,
        engine: CopyEngine,
        schedule: tuple[tuple[LayerPart, ...], ...],
        pages: Mapping[Component, Pages],
    ) -> None:
        self.job = job
        self.pages = pages
        self._engine = engine
        self._schedule = schedule
        self._gates = [threading.Event() for _ in schedule]
        self._marks: list[Mark] = [None] * len(schedule)
        self._error: BaseException | None = None

    def wait_layer(self, layer: int) -> None:
        """Wait for model layer `layer`; raises LoadFailed if the load failed, whichever layer it was at."""
        self._gates[layer].wait()
        if self._error is not None:
            raise LoadFailed(
                f"load {self.job}: a copy from host to device failed: {self._error}"
            ) from self._error
        self._engine.wait(self._marks[layer])

    def done(self) -> bool:
        return all(gate.is_set() for gate in self._gates) and self._engine.passed(self._marks[-1])

    def run(self) -> None:
        """Copy layer after layer, opening each gate. Inside a load session, on the copy thread."""
        for layer, parts in enumerate(self._schedule):
            for part in parts:
                pages = self.pages.get(part.component)
                if pages is not None:
                    self._engine.load_part(part, pages)
            self._marks[layer] = self._engine.mark()
            self._gates[layer].set()

    def fail(self, error: BaseException) -> None:
        """Open every gate onto an error, so that no reader waits for ever."""
        self._error = error
        for gate in self._gates:
            gate.set()
