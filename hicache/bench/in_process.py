"""Drives a scheduler in this process, in real or in virtual time: the same loop for both.

Who computes (runner), who moves bytes (executor) and whose clock it is were decided by the caller.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache.bench.report import ByTier, TurnResult
from hicache.bench.traffic import Traffic, Turn
from hicache.bench.workloads import Workload
from hicache.engine.scheduler import Scheduler
from hicache.errors import HiCacheError
from hicache.request import Request

_LONGEST_WAIT_S = 1.0
_STALLED_AFTER = 1000  # waits in a row, each up to _LONGEST_WAIT_S, without anything happening


class Stalled(HiCacheError):
    """Requests are queued or running and nothing moves any more."""


class InProcessDriver:
    """Feeds one scheduler with one workload. `scheduler.on_finish` must be `finished` of this driver."""

    def __init__(
        self,
        workload: Workload,
        on_result: Callable[[TurnResult], None],
        on_sent: Callable[[Turn], None] = lambda turn: None,
    ) -> None:
        self._traffic = Traffic(workload)
        self._workload = workload
        self._on_result, self._on_sent = on_result, on_sent
        self._open: dict[str, Turn] = {}
        self._over: list[str] = []  # sessions to close once their last request has ended
        self.results: list[TurnResult] = []

    def finished(self, request: Request) -> None:
        """Take a finished request; the scheduler calls this."""
        turn = self._open.pop(request.rid)
        cached = request.cached
        assert request.first_token_at is not None
        assert request.finished_at is not None
        self._traffic.finish(turn, request.output, now=request.finished_at)
        if turn.last and turn.session is not None:
            self._over.append(turn.session)
        result = TurnResult(
            client=turn.client,
            round=turn.round,
            prompt_tokens=request.prompt_length,
            history=turn.history,
            cached_tokens=cached.cached,
            by_tier=ByTier(device=cached.device, host=cached.host, storage=cached.storage),
            ttft_s=request.first_token_at - turn.sent_at,
            latency_s=request.finished_at - turn.sent_at,
            missed=cached.missed,
        )
        self.results.append(result)
        self._on_result(result)

    def drive(self, scheduler: Scheduler) -> float:
        """Run the workload to its end; return the seconds it took by the scheduler's clock."""
        clock = scheduler.cache.clock
        started = clock.now()
        idle_waits = 0
        while not self._traffic.done:
            while self._over:
                scheduler.cache.sessions.close(self._over.pop())
            self._submit_due(scheduler, clock.now())
            if scheduler.step():
                idle_waits = 0
                continue
            due = self._traffic.due_at()
            if due is None or due > clock.now():
                gap = _LONGEST_WAIT_S if due is None else min(_LONGEST_WAIT_S, due - clock.now())
                idle_waits = 0 if scheduler.wait(gap) else idle_waits + 1
            if idle_waits > _STALLED_AFTER:
                raise Stalled(f"{scheduler.num_waiting} queued, {scheduler.num_running} running, no progress")
        return clock.now() - started

    def _submit_due(self, scheduler: Scheduler, now: float) -> None:
        while (due := self._traffic.due_at()) is not None and due <= now:
            turn = self._traffic.take(now)
            self._open[turn.rid] = turn
            self._on_sent(turn)
            scheduler.submit(
                Request(
                    rid=turn.rid,
                    tokens=turn.prompt,
                    prompt_length=len(turn.prompt),
                    max_new_tokens=self._workload.output_length,
                    session_id=turn.session,
                )
            )
