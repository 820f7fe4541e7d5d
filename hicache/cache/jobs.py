"""The table of transfers in flight: a job is opened with its continuation, and ends exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache.errors import InvariantViolation
from hicache.transfer.base import Done, Executor, JobId, JobKind


@dataclass(slots=True)
class StorageAge:
    """Which storage it is, and since which clear: what was put or seen there at another age may be gone."""

    executor: Executor
    clears: int = 0

    @property
    def now(self) -> tuple[int, int]:
        return self.executor.storage_epoch, self.clears


class Jobs:
    """Owned by the cache's thread."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[JobId, tuple[JobKind, Callable[[Done], None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: JobKind, then: Callable[[Done], None]) -> JobId:
        """Register a job before it is handed to the executor; `then` runs when it is polled as done."""
        self._next += 1
        job = JobId(self._next)
        self._open[job] = (kind, then)
        return job

    def close(self, done: Done) -> None:
        entry = self._open.pop(done.job, None)
        if entry is None or entry[0] is not done.kind:
            raise InvariantViolation(f"job {done.job} ({done.kind.value}) ended but was not open")
        entry[1](done)

    def count(self, kind: JobKind) -> int:
        return sum(1 for k, _ in self._open.values() if k is kind)
