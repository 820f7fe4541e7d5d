"""Continuous batching over HiCache: which request runs, what it computes next, when it ends.

Shared by the reference engine and by virtual time: only the runner (who computes), the executor (who
moves bytes) and the clock differ. Single-threaded.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hicache.cache import HiCache
from hicache.cache.sessions import SessionRefused, check_id, shown_id
from hicache.errors import HiCacheError, LoadFailed
from hicache.request import Request

logger = logging.getLogger(__name__)

_SHORT_S = 0.01


class Runner(Protocol):
    """Computes. Called from the scheduler's thread; page tables and captures are in the request."""

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        """Compute tokens [start, end): KV into the request's pages, MAMBA into its working state.

        Waits for `request.load` layer by layer, honours `request.captures`, and returns the greedily
        sampled next token if `end` is the end of the tokens, else None. Raises LoadFailed if the load
        failed; whatever it wrote until then is dropped.
        """

    def decode(self, request: Request) -> int:
        """Compute the last token's position and return the next token."""


class Settle(enum.Enum):
    """When transfers take effect."""

    ASYNC = "async"  # as they end
    EVERY_STEP = "every_step"  # each step waits for all of them: deterministic


class FinalToken(enum.Enum):
    """Whether the last sampled token's KV is computed, and so cached, although nothing follows it."""

    SKIP = "skip"
    COMPUTE = "compute"


# How many tokens a request's next decode step brings, as with speculative decoding; one without it.
AcceptLength = Callable[[Request], int]


class RequestRefused(HiCacheError, ValueError):
    """A request that can never run; the message says why."""


class Scheduler:
    """First come, first served; a request whose prefetch must be waited for lets others pass."""

    def __init__(
        self,
        cache: HiCache,
        runner: Runner,
        *,
        max_running_requests: int = 16,
        context_length: int | None = None,
        settle: Settle = Settle.ASYNC,
        final_token: FinalToken = FinalToken.SKIP,
        accept_length: AcceptLength | None = None,
        on_token: Callable[[Request, int], None] | None = None,
        on_finish: Callable[[Request], None] | None = None,
    ) -> None:
        self.cache, self._runner = cache, runner
        self._max_running = max_running_requests
        self._limit = min(cache.max_request_tokens, context_length or cache.max_request_tokens)
        self._settle, self._final = settle, final_token
        self._accept_length = accept_length
        self._on_token, self._on_finish = on_token, on_finish
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rids: set[str] = set()
        self._prefilled: tuple[float, int] | None = None  # when the last step began, and what it computed
        self._crowded = False  # after a retraction: nobody is admitted before somebody has computed

    # -- queue ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused if it can never run; then nothing has changed."""
        total = len(request.tokens) + request.max_new_tokens
        if not request.tokens:
            raise RequestRefused("the prompt is empty; send at least one token")
        if request.max_new_tokens < 1:
            raise RequestRefused(f"max_new_tokens={request.max_new_tokens} must be at least 1")
        if total > self._limit:
            raise RequestRefused(
                f"{len(request.tokens)} prompt tokens + {request.max_new_tokens} new tokens = {total} exceed "
                f"the limit of {self._limit} tokens (the context length, or what L1 can hold)"
            )
        if request.session_id is not None:
            try:
                check_id(request.session_id)
            except SessionRefused as error:
                raise RequestRefused(str(error)) from None
        if request.rid in self._rids:
            raise RequestRefused(f"request id {shown_id(request.rid)} is in use")
        self._rids.add(request.rid)
        self._waiting.append(request)
        self.cache.enqueue(request)

    def abort(self, rid: str) -> bool:
        """End a request at any time; returns whether it was there."""
        for request in self._waiting:
            if request.rid == rid:
                self._waiting.remove(request)
                self.cache.withdraw(request)
                self._rids.discard(rid)
                return True
        for request in self._running:
            if request.rid == rid:
                self._running.remove(request)
                self.cache.abort(request)
                self._rids.discard(rid)
                return True
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def flush(self) -> bool:
        """Drop L1 and L2. Refused (False) while requests are queued or running, as SGLang does."""
        if not self.idle:
            return False
        self.cache.settle()
        return self.cache.flush()

    def release_device(self) -> bool:
        """Drop L1 alone; L2 and L3 keep what they have. Refused (False) while anybody waits or runs."""
        if not self.idle:
            return False
        self.cache.settle()
        return self.cache.release_device()

    # -- one step ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what may run, compute one chunk of prefill, then one token of each decode.

        Returns False if nothing could be done: wait for a transfer, a deadline or a submission.
        """
        if self._settle is Settle.EVERY_STEP:
            self.cache.settle()
        progress = self.cache.tick()
        self._measure()
        self._crowded &= bool(self._running)  # who was waited for may have been aborted
        if not self._crowded:
            progress |= self._admit()
        computed = self._prefill()
        computed |= self._decode()
        self._crowded &= not computed
        if not computed and self._running and not self.cache.copying:
            # Storage is not waited for: it may hang with pages that a queued request wants (law 11).
            if not self.cache.release_waiting():
                self._retract_youngest()
            return True
        return progress or computed

    def _measure(self) -> None:
        """Tell the cache how long the last step took, if it computed prompts and waited for no load."""
        now = self.cache.clock.now()
        if self._prefilled is not None:
            began, tokens = self._prefilled
            self.cache.weighing.computed(tokens, now - began)
        self._prefilled = (now, 0) if self._settle is Settle.ASYNC else None

    def wait(self, timeout_s: float) -> bool:
        """Block until a transfer ends or a prefetch deadline passes, at most `timeout_s`."""
        deadline = self.cache.next_deadline()
        if deadline is not None:
            # One that has passed is of a request behind another that waits for memory: no reason to spin.
            timeout_s = min(timeout_s, max(_SHORT_S, deadline - self.cache.clock.now()))
        return self.cache.executor.wait(timeout_s)

    def run_until_idle(self, stall_s: float = 60.0) -> None:
        """Step until no request is left. Raises TimeoutError after `stall_s` without any progress."""
        stalled_since = self.cache.clock.now()
        while not self.idle:
            if self.step():
                stalled_since = self.cache.clock.now()
                continue
            self.wait(1.0)
            if self.cache.clock.now() - stalled_since > stall_s:
                raise TimeoutError(f"{len(self._waiting)} queued, {len(self._running)} running, no progress")

    def _admit(self) -> bool:
        """Admit while the coming chunk has room: a hit is as deep as it can be, and locked, only then."""
        backlog = sum(len(r.tokens) - r.computed for r in self._running if not self._decoding(r))
        admitted = False
        for request in list(self._waiting):
            if len(self._running) >= self._max_running or backlog >= self.cache.config.chunked_prefill_size:
                break
            if not self.cache.ready(request):
                continue
            if not self.cache.admit(request):
                break  # no overtaking for memory: the oldest would starve
            self._waiting.remove(request)
            self._running.append(request)
            backlog += len(request.tokens) - request.computed
            admitted = True
        return admitted

    @staticmethod
    def _decoding(request: Request) -> bool:
        """True if only the last sampled token, or nothing, is left to compute."""
        left = len(request.tokens) - request.computed
        return left == 0 or (left == 1 and len(request.tokens) > request.prompt_length)

    def _prefill(self) -> bool:
        budget, computed = self.cache.config.chunked_prefill_size, False
        for request in list(self._running):
            if budget <= 0:
                break
            if self._decoding(request):
                continue
            start = request.computed
            end = start + min(budget, len(request.tokens) - start)
            if not self.cache.extend(request, end):
                continue
            budget -= end - start
            computed = True
            self._count_prefill(request, end - start)
            try:
                token = self._runner.prefill(request, start, end)
            except LoadFailed:
                self._restart(request)
                continue
            self.cache.computed(request, end)
            if token is not None:
                self._sampled(request, token)
        return computed

    def _count_prefill(self, request: Request, tokens: int) -> None:
        """Add to what this step computes; a step that may wait for a load measures nothing."""
        if self._prefilled is not None:
            began, before = self._prefilled
            self._prefilled = None if request.load is not None else (began, before + tokens)

    def _decode(self) -> bool:
        computed = False
        for request in list(self._running):
            end = len(request.tokens)
            if request.computed != end - 1 or end == request.prompt_length:
                continue
            last = end - 1 + self._accepted(request)
            if last > end and self.cache.extend(request, last, decode=True):
                end = last
            elif not self.cache.extend(request, end, decode=True):
                continue
            computed = True
            try:
                self._decode_to(request, end)
            except LoadFailed:
                self._restart(request)
        return computed

    def _accepted(self, request: Request) -> int:
        if self._accept_length is None:
            return 1
        left = request.max_new_tokens - (len(request.tokens) - request.prompt_length)
        return max(1, min(self._accept_length(request), left))

    def _decode_to(self, request: Request, end: int) -> None:
        """Compute the positions of one decode step, [computed, end); a stop token ends it early."""
        captures = request.captures
        for reached in range(request.computed + 1, end + 1):
            request.captures = [c for c in captures if c.position == reached]
            token = self._runner.decode(request)
            last = reached == end or token in request.stop_tokens
            if last:
                self.cache.computed(request, reached, decode=True)
            self._sampled(request, token)
            if last:
                return

    def _sampled(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        if request.first_token_at is None:
            request.first_token_at = self.cache.clock.now()
        if self._on_token:
            self._on_token(request, token)
        if request.finished:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        end = len(request.tokens)
        if self._final is FinalToken.COMPUTE and self.cache.extend(request, end, decode=True):
            self._runner.prefill(request, end - 1, end)
            self.cache.computed(request, end, decode=True)
        self._running.remove(request)
        self._rids.discard(request.rid)
        self.cache.finish(request)
        request.finished_at = self.cache.clock.now()
        if self._on_finish:
            self._on_finish(request)

    def _restart(self, request: Request) -> None:
        """Its load failed: back to its place in the queue, to be computed; the others go on."""
        logger.warning(
            "%s: not all of its pages could be loaded from the host; those are computed", request.rid
        )
        self._running.remove(request)
        self.cache.restart(request)
        younger = (i for i, r in enumerate(self._waiting) if r.enqueued_at > request.enqueued_at)
        self._waiting.insert(next(younger, len(self._waiting)), request)

    def _retract_youngest(self) -> None:
        """Nobody can go on: take the youngest request's pages so that the oldest can (law 11)."""
        request = self._running.pop()
        self.cache.retract(request)
        self._waiting.appendleft(request)
        self._crowded = bool(self._running)
