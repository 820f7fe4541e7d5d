"""The one thread that owns the scheduler and the cache; everybody else hands it commands.

Commands arrive in a queue and run between steps. With nothing to do it sleeps on that queue; with
only transfers in flight it sleeps on the executor. Results go out through callbacks, called here.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from hicache.engine.scheduler import Scheduler
from hicache.errors import HiCacheError, InvariantViolation
from hicache.request import Request
from hicache.types import CachedTokens

logger = logging.getLogger(__name__)

_IDLE_S = 1.0  # how long to sleep without a command; ticks let a bypassed store be tried again
_TRANSFER_S = 0.005  # how long a command may wait behind a transfer that is waited for
_T = TypeVar("_T")


class EngineStopped(HiCacheError):
    """The engine takes no more work: it is shutting down, or has failed."""


class Finish(enum.Enum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Progress:
    """What became of a request since the last one: new tokens, and at the end why it ended."""

    tokens: tuple[int, ...]
    finish: Finish | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)  # of the prompt, by tier
    message: str = ""  # of an abort


Sink = Callable[[Progress], None]


@dataclass(slots=True)
class _Command:
    """Work for the engine thread, and how its asker is told if it cannot be done."""

    run: Callable[[Scheduler], None]
    refuse: Callable[[BaseException], None]


class EngineThread:
    """Runs a scheduler until stopped. submit, abort and call may be used from any thread.

    `make` builds the scheduler with the given on_token and on_finish; from start() to stop() only
    this thread uses it and its cache. `_lock` makes "refuse or queue" one step, so that every command
    is answered; it is held for no work.
    """

    def __init__(
        self,
        make: Callable[[Callable[[Request, int], None], Callable[[Request], None]], Scheduler],
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = make(self._token, self._finish)
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._refusal: EngineStopped | None = None
        self._ending = False  # stop() was called
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="hicache-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while requests are taken."""
        return self._refusal is None

    # -- from any thread -----------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> Future[None]:
        """Queue a request. The future fails with RequestRefused or EngineStopped; then sink stays silent."""

        def queue_it(scheduler: Scheduler) -> None:
            scheduler.submit(request)
            self._sinks[request.rid] = sink

        return self.call(queue_it)

    def abort(self, rid: str) -> Future[bool]:
        """End a request; its sink gets an ABORT. False if it was not there any more."""

        def end(scheduler: Scheduler) -> bool:
            found = scheduler.abort(rid)
            self._emit(rid, Progress((), Finish.ABORT, message="aborted"), last=True)
            return found

        return self.call(end)

    def call(self, work: Callable[[Scheduler], _T]) -> Future[_T]:
        """Run `work` on the engine thread between two steps; it must not block for long.

        The future fails with EngineStopped, or with what `work` raised; anything but a HiCacheError
        also ends the engine.
        """
        return self._call(work, None)

    def cut(self, why: str) -> Future[int]:
        """Take no more work and end every request, told why; the future says how many there were."""
        return self._call(lambda scheduler: self._end_all(scheduler, why), EngineStopped(why))

    def _call(self, work: Callable[[Scheduler], _T], last: EngineStopped | None) -> Future[_T]:
        future: Future[_T] = Future()

        def run(scheduler: Scheduler) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(scheduler)
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, InvariantViolation) or not isinstance(error, HiCacheError):
                    raise
            else:
                future.set_result(result)

        def refuse(error: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(_Command(run, refuse), last)
        return future

    def stop(self, flush: Callable[[Scheduler], None], *, timeout_s: float) -> bool:
        """End every request, run `flush` on the engine thread and wait for it; True if all went well."""

        why = "the server is shutting down"

        def end(scheduler: Scheduler) -> None:
            self._end_all(scheduler, why)
            self._stopping = True
            flush(scheduler)

        with self._lock:
            if not self._ending and not self._failed:
                self._commands.put(_Command(end, lambda error: None))
            self._ending = True
            self._refusal = self._refusal or EngineStopped(why)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._failed

    def _put(self, command: _Command, last: EngineStopped | None) -> None:
        """Queue a command, or refuse it; with `last` given, refuse all that come after it."""
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._commands.put(command)
                self._refusal = last
        if refusal is not None:
            command.refuse(refusal)

    # -- on the engine thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._stopping and not self._scheduler.step():
                    self._rest()
        except Exception as error:
            logger.exception("the engine has failed; no request can be served any more")
            self._fail(error)

    def _take_commands(self) -> None:
        while not self._stopping and not self._commands.empty():
            self._commands.get().run(self._scheduler)

    def _rest(self) -> None:
        """Nothing could be done: sleep until a command, a transfer or a deadline may change that."""
        if not self._scheduler.idle or self._scheduler.cache.in_flight:
            if self._commands.empty():
                self._scheduler.wait(_TRANSFER_S)
            return
        try:
            command = self._commands.get(timeout=_IDLE_S)
        except queue.Empty:
            return
        command.run(self._scheduler)

    def _end_all(self, scheduler: Scheduler, why: str) -> int:
        rids = list(self._sinks)
        for rid in rids:
            scheduler.abort(rid)
            self._emit(rid, Progress((), Finish.ABORT, message=why), last=True)
        return len(rids)

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        refusal = EngineStopped(f"the engine has failed: {error}")
        with self._lock:
            self._refusal = refusal
        while not self._commands.empty():
            self._commands.get().refuse(refusal)
        for rid in list(self._sinks):
            self._emit(rid, Progress((), Finish.ABORT, message=str(refusal)), last=True)
        self._on_failure()

    def _token(self, request: Request, token: int) -> None:
        if not request.finished:  # the last one goes out with the end
            self._emit(request.rid, Progress((token,), None, request.cached), last=False)

    def _finish(self, request: Request) -> None:
        token = request.tokens[-1]
        finish = Finish.STOP if token in request.stop_tokens else Finish.LENGTH
        self._emit(request.rid, Progress((token,), finish, request.cached), last=True)

    def _emit(self, rid: str, progress: Progress, *, last: bool) -> None:
        sink = self._sinks.pop(rid, None) if last else self._sinks.get(rid)
        if sink is not None:
            sink(progress)
