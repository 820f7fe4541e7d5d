"""A storage backend while it is attached: its lanes, the jobs on them, and its return after failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hicache.clock import Clock
from hicache.errors import InvariantViolation
from hicache.transfer.base import Done, JobId, JobKind, Why
from hicache.transfer.counters import Counters
from hicache.transfer.storage_io import StorageJob, StorageLink
from hicache.transfer.worker import InlineLane, Lane, Worker

logger = logging.getLogger(__name__)

_TRIAL_POLL_S = 0.25  # how often an idle reader looks whether a trial is due while the breaker is open
_MOST_HINTS = 256  # waiting at once
_CHECK_POLL_S = 1.0  # and whether to ask an idle backend how it is


class Attachment:
    """Runs PROBE and FETCH jobs on reader threads and STORE jobs on one writer thread.

    submit, cancel, arrived, forget and close are called from the cache's thread. A job ends exactly
    once: by the thread that claimed it, or by cancel/close before anyone did. `_lock` guards the
    claims and the count of hints, and is held for nothing else.
    """

    def __init__(
        self,
        link: StorageLink,
        *,
        readers: int,
        clock: Clock,
        counters: Counters,
        end: Callable[[Done], None],
        crash: Callable[[InvariantViolation], None],
    ) -> None:
        self._link = link
        self._clock = clock
        self._counters = counters
        self._end = end
        self._crash = crash
        self._lock = threading.Lock()
        self._jobs: dict[JobId, StorageJob] = {}  # until their Done is polled
        self._hints = 0  # waiting; guarded by _lock
        self._inline = readers == 0
        link.prepare(max(1, readers))
        if self._inline:
            self._read: Lane = InlineLane()
            self._write: Lane = InlineLane()
            return
        self._read = Worker("read", threads=readers, idle=self._next_look, on_idle=self._look)
        self._write = Worker("store")
        link.on_breaker_open = lambda: self._read.submit(_wake)

    @property
    def usable(self) -> bool:
        return self._link.usable

    @property
    def answers(self) -> bool:
        """True unless its last call failed."""
        return self._link.answers

    @property
    def incidents(self) -> int:
        """Times the store may have lost what it held since it was attached."""
        return self._link.incidents

    @property
    def quarantined_bytes(self) -> int:
        return self._link.quarantined_bytes

    @property
    def busy(self) -> bool:
        """True while a job has not ended, or its Done has not been polled."""
        return bool(self._jobs)

    def submit(self, job: StorageJob) -> None:
        self._jobs[job.job] = job
        if not self._link.usable:
            job.lacks(self._link.why_not)
            self._finish(job, failed=True)
            return
        lane = self._write if job.kind is JobKind.STORE else self._read
        lane.submit(lambda: self._perform(job))

    def hint(self, give: Callable[[StorageLink], None]) -> None:
        """Give the backend a hint behind the stores that are under way, or drop it where too many wait."""
        if not self._link.takes_hints or not self._link.usable or self._hints >= _MOST_HINTS:
            return

        def work() -> None:
            with self._lock:
                self._hints -= 1
            if self._link.usable:
                try:
                    give(self._link)
                except Exception:
                    logger.exception("a hint to storage failed")

        with self._lock:
            self._hints += 1
        self._write.submit(work)

    def arrived(self, job: JobId) -> bytes | None:
        found = self._jobs.get(job)
        return None if found is None else bytes(found.flags)

    def cancel(self, job: JobId) -> None:
        """End a FETCH or PROBE behind the call it is in, or at once if it has not begun."""
        found = self._jobs.get(job)
        if found is None or found.kind is JobKind.STORE:
            return
        found.cancelled = True
        if self._claim(found):
            found.lacks(Why.CANCELLED)
            # A probe that never asked is no evidence that anything is absent.
            self._finish(found, failed=found.kind is JobKind.PROBE)

    def forget(self, job: JobId) -> None:
        """The job's Done was polled."""
        self._jobs.pop(job, None)

    def recover_inline(self) -> None:
        """Without threads, somebody must ask whether the backend is back."""
        if self._inline:
            self._link.try_recover()

    def close(self, timeout_s: float) -> bool:
        """End every job behind the call it is in; return False if a call is still running afterwards."""
        self._link.close()
        for job in list(self._jobs.values()):
            if self._claim(job):
                job.lacks(Why.DETACHED)
                self._finish(job, failed=True)
        stores_ended = self._write.stop(timeout_s / 2)
        return self._read.stop(timeout_s / 2) and stores_ended

    def _claim(self, job: StorageJob) -> bool:
        with self._lock:
            claimed, job.claimed = job.claimed, True
            return not claimed

    def _finish(self, job: StorageJob, *, failed: bool, seconds: float = 0.0) -> None:
        job.claimed = True
        self._end(Done(job.job, job.kind, bytes(job.flags), failed, seconds, job.why))

    def _perform(self, job: StorageJob) -> None:
        if not self._claim(job):
            return
        kind = job.kind.value
        started = self._clock.now()
        failed = True
        try:
            failed = self._run(job)
        except InvariantViolation as error:
            self._crash(error)
        except Exception:
            logger.exception("%s %d failed", kind, job.job)
            self._counters.add(f"{kind}_failed")
        seconds = self._clock.now() - started
        self._counters.add_all({f"{kind}_ops": 1, f"{kind}_seconds": seconds})
        self._finish(job, failed=failed, seconds=seconds)

    def _run(self, job: StorageJob) -> bool:
        if job.kind is JobKind.PROBE:
            return self._link.probe(job)
        if job.kind is JobKind.FETCH:
            return self._link.fetch(job)
        return self._link.store(job)

    def _next_look(self) -> float:
        due_in = self._link.breaker.seconds_to_trial()
        if due_in is not None:
            return min(due_in, _TRIAL_POLL_S)
        return min(self._link.seconds_to_check(), _CHECK_POLL_S)

    def _look(self) -> None:
        self._link.try_recover()
        self._link.check_idle()


def _wake() -> None:
    """Do nothing: a reader that wakes up asks anew how long it may sleep."""
