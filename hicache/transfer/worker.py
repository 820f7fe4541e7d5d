"""Lanes that run tasks in order: on threads, or at once in the caller. Whoever makes a lane stops it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class Lane(ABC):
    """Runs submitted tasks, each begun in the order submitted. Tasks report their own failures."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Hand over a task. May run it before returning (InlineLane)."""

    @abstractmethod
    def stop(self, timeout_s: float) -> bool:
        """Let queued tasks finish and end; return False if one is still running after `timeout_s`."""


class InlineLane(Lane):
    """Runs a task where it is submitted; for tests that must not depend on threads."""

    def submit(self, task: Task) -> None:
        task()

    def stop(self, timeout_s: float) -> bool:
        return True


class Worker(Lane):
    """Daemon threads over one queue: a stuck one does not keep the process alive.

    `idle` is asked before each wait for how many seconds to wait before `on_idle` runs; None is for ever.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int = 1,
        idle: Callable[[], float | None] | None = None,
        on_idle: Task | None = None,
    ) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = idle
        self._on_idle = on_idle
        self._threads = [
            threading.Thread(target=self._run, name=f"hicache-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        self._queue.put(task)

    def stop(self, timeout_s: float) -> bool:
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            timeout = self._idle() if self._idle is not None else None
            try:
                task = self._queue.get(timeout=timeout)
            except queue.Empty:
                task = self._on_idle
            if task is None:
                return
            try:
                task()
            except Exception:
                logger.exception("a transfer task failed without reporting it")
