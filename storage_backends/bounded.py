"""Blocking calls with a time bound that holds whatever the called library does.

Decides who waits how long, and what becomes of a call that does not come back. Leaves to the backends
what the calls do and which memory they use.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from hicache.errors import BackendTimeout, BackendUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CallAbandoned(BackendTimeout):
    """The caller stopped waiting; the call may still be running and ends later, or never."""


class _State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    ABANDONED = enum.auto()  # running, and nobody waits any more


class _Job(Generic[T]):
    """One call. `state` is guarded by the lock of the BoundedCalls it belongs to."""

    def __init__(self, work: Callable[[], T], on_late: Callable[[], None] | None) -> None:
        self.work = work
        self.on_late = on_late
        self.state = _State.QUEUED
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None


class BoundedCalls:
    """A few daemon threads that make blocking calls for callers who wait at most a given time.

    Thread-safe. A call that outlives its caller's patience keeps its thread until it returns; when every
    thread is lost this way, further calls are refused at once, so the number of calls in flight, and with
    it the memory they hold, never exceeds `workers`. One lock guards the queue and all counters; no
    call runs under it. A process forked from the owner has none of the threads and is refused too.
    """

    def __init__(self, name: str, *, workers: int) -> None:
        self._name = name
        self._workers = workers
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_Job[object]] = deque()
        self._threads = 0
        self._idle = 0
        self._running = 0
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """Calls that are still running although nobody waits for them."""
        with self._lock:
            return self._abandoned

    def run(
        self,
        work: Callable[[], T],
        *,
        timeout_s: float,
        operation: str,
        on_late: Callable[[], None] | None = None,
    ) -> T:
        """Make the call on a worker thread and return its result, or raise what it raised.

        Raises CallAbandoned after `timeout_s`; `on_late` is then called once, by whichever thread sees
        the call end (at once if it had not begun), and the memory the call uses must stay untouched
        until then. In every other case `on_late` is not called. Raises BackendUnavailable, with the
        call not made, when all threads are lost to earlier calls, after close() and after a fork.
        """
        job: _Job[T] = _Job(work, on_late)
        self._enqueue(job)
        try:
            returned = job.ended.wait(timeout_s)
        except BaseException:
            self._abandon(job)
            raise
        if not returned and not self._abandon(job):
            raise CallAbandoned(f"{self._name}: {operation} did not return within {timeout_s:g} s")
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # set whenever error is not

    def close(self, timeout_s: float) -> bool:
        """Refuse further calls and wait for running ones; return whether all of them ended."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            self._wake.notify_all()
            if self._pid != os.getpid():
                return False
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(left)
            return self._running == 0

    def _enqueue(self, job: _Job[T]) -> None:
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self._name}: closed")
            if self._pid != os.getpid():
                raise BackendUnavailable(f"{self._name}: opened in another process; open it after the fork")
            if self._abandoned >= self._workers:
                raise BackendUnavailable(f"{self._name}: {self._abandoned} earlier calls have not returned")
            self._queue.append(job)  # type: ignore[arg-type]  # the queue does not look at results
            if self._idle < len(self._queue) and self._threads < self._workers:
                self._threads += 1
                name = f"hicache-{self._name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._wake.notify()

    def _abandon(self, job: _Job[T]) -> bool:
        """Stop waiting for `job`; return True if it has ended in the meantime."""
        with self._lock:
            if job.state is _State.DONE:
                return True
            cancelled = job.state is _State.QUEUED
            if cancelled:
                self._queue.remove(job)  # type: ignore[arg-type]  # as above
            else:
                job.state = _State.ABANDONED
                self._abandoned += 1
        if cancelled and job.on_late is not None:
            job.on_late()
        return False

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.result = job.work()
            except BaseException as error:  # noqa: BLE001  # handed to the waiting caller
                job.error = error
            self._finish(job)

    def _next(self) -> _Job[object] | None:
        with self._lock:
            self._idle += 1
            try:
                while not self._queue and not self._closed:
                    self._wake.wait()
            finally:
                self._idle -= 1
            if not self._queue:
                self._threads -= 1
                return None
            job = self._queue.popleft()
            job.state = _State.RUNNING
            self._running += 1
            return job

    def _finish(self, job: _Job[object]) -> None:
        with self._lock:
            late = job.state is _State.ABANDONED
            job.state = _State.DONE
        if late and job.on_late is not None:
            try:
                job.on_late()
            except Exception:
                logger.exception("%s: giving back what a late call held failed", self._name)
        with self._lock:
            self._running -= 1
            self._abandoned -= late
            self._wake.notify_all()
        job.ended.set()
