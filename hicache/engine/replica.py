"""One rank of a tensor-parallel replica: rank 0 takes requests, and all ranks do the same with them.

What rank 0 is asked goes to all ranks with the tick's message, and takes effect behind the same step
everywhere. Whoever loses the others stops with RankLost.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from typing import Union

import msgspec

from hicache.cache import SessionRefused
from hicache.engine.reference import ReferenceEngine
from hicache.engine.scheduler import RequestRefused
from hicache.errors import HiCacheError
from hicache.request import Request
from hicache.storage_backends.base import StorageBackend

logger = logging.getLogger(__name__)

_DETACH_S = 5.0


class _Submit(msgspec.Struct, tag="submit", frozen=True):
    rid: str
    tokens: bytes  # little-endian u32; msgspec writes bytes in base64
    prompt_length: int
    max_new_tokens: int
    scope: bytes
    priority: int
    session_id: str | None
    stop_tokens: list[int]


class _Abort(msgspec.Struct, tag="abort", frozen=True):
    rid: str


class _OpenSession(msgspec.Struct, tag="open_session", frozen=True):
    session_id: str
    timeout_s: float | None


class _CloseSession(msgspec.Struct, tag="close_session", frozen=True):
    session_id: str


class _Flush(msgspec.Struct, tag="flush", frozen=True):
    pass


class _Attach(msgspec.Struct, tag="attach", frozen=True):
    name: str
    options: dict[str, object]


class _Detach(msgspec.Struct, tag="detach", frozen=True):
    pass


class _Stop(msgspec.Struct, tag="stop", frozen=True):
    pass


_Command = Union[  # noqa: UP007 - msgspec reads it at run time
    _Submit, _Abort, _OpenSession, _CloseSession, _Flush, _Attach, _Detach, _Stop
]


class Replica:
    """Drives one rank's engine. On rank 0: submit() and the like, then step(); on the others: follow().

    `open_backend` opens this rank's connection to a store by name and options, and may address it as seen
    from this node. One thread per rank. `refused` gets requests that can never run, on every rank.
    """

    def __init__(
        self,
        engine: ReferenceEngine,
        *,
        open_backend: Callable[[str, Mapping[str, object]], StorageBackend] | None = None,
        refused: Callable[[str, RequestRefused], None] = lambda rid, error: None,
    ) -> None:
        if engine.agreed is None or engine.ranks is None:
            raise ValueError("a replica of ranks needs an engine that was given some")
        self._engine, self._agreed, self._ranks = engine, engine.agreed, engine.ranks
        self._scheduler = engine.scheduler
        self._open_backend = open_backend
        self._refused = refused
        self._backend: StorageBackend | None = None
        self._said = self._done = 0
        self.stopped = False
        self.storage_error = ""  # why the last attach did not come about; equal on all ranks but in detail

    # -- rank 0; each takes effect on all ranks at a step to come ---------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request on all ranks. The object itself is not used: every rank makes its own."""
        self._say(
            _Submit(
                request.rid,
                request.tokens.tobytes(),
                request.prompt_length,
                request.max_new_tokens,
                request.scope,
                request.priority,
                request.session_id,
                sorted(request.stop_tokens),
            )
        )

    def abort(self, rid: str) -> None:
        self._say(_Abort(rid))

    def open_session(self, session_id: str, timeout_s: float | None = None) -> None:
        """Begin a session on all ranks; one that cannot be, or is there, is left out and logged."""
        self._say(_OpenSession(session_id, timeout_s))

    def close_session(self, session_id: str) -> None:
        """End a session on all ranks."""
        self._say(_CloseSession(session_id))

    def flush(self) -> None:
        """Drop L1 and L2 on all ranks, once nothing is queued or running."""
        self._say(_Flush())

    def attach(self, name: str, options: Mapping[str, object]) -> None:
        """Open and attach a store on every rank, or on none if one of them cannot."""
        self._say(_Attach(name, dict(options)))

    def detach(self) -> None:
        self._say(_Detach())

    def stop(self) -> None:
        """End all ranks."""
        self._say(_Stop())

    def _say(self, command: _Command) -> None:
        self._agreed.say(msgspec.json.encode(command))
        self._said += 1

    @property
    def idle(self) -> bool:
        """True if nothing is queued or running, and all that was said has been done. On rank 0."""
        return self._scheduler.idle and self._said == self._done

    def run_until_idle(self, stall_s: float = 60.0) -> None:
        """Step until nothing is left; TimeoutError after `stall_s` without progress. On rank 0."""
        clock = self._agreed.clock.local
        stalled_since = clock.now()
        while not self.idle:
            if self.step():
                stalled_since = clock.now()
            elif clock.now() - stalled_since > stall_s:
                raise TimeoutError(f"no progress for {stall_s} s")
            else:
                self._scheduler.wait(1.0)

    # -- every rank -------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the scheduler, together with all ranks, then what rank 0 has said. Raises RankLost."""
        progress = self._scheduler.step()
        for text in self._agreed.heard():
            self._apply(msgspec.json.decode(text, type=_Command))
            self._done += 1
            progress = True
        return progress

    def follow(self) -> None:
        """Step until rank 0 says stop. Raises RankLost if it goes without saying so."""
        while not self.stopped:
            self.step()

    def _apply(self, command: _Command) -> None:
        if isinstance(command, _Submit):
            self._submit(command)
        elif isinstance(command, _Abort):
            self._scheduler.abort(command.rid)
        elif isinstance(command, (_OpenSession, _CloseSession)):
            self._meet_session(command)
        elif isinstance(command, _Flush):
            self._scheduler.flush()
        elif isinstance(command, _Attach):
            self._attach(command)
        elif isinstance(command, _Detach):
            self._let_go()
        else:
            self.stopped = True

    def _submit(self, command: _Submit) -> None:
        request = Request(
            rid=command.rid,
            tokens=array("I", command.tokens),
            prompt_length=command.prompt_length,
            max_new_tokens=command.max_new_tokens,
            scope=command.scope,
            priority=command.priority,
            session_id=command.session_id,
            stop_tokens=frozenset(command.stop_tokens),
        )
        try:
            self._scheduler.submit(request)
        except RequestRefused as error:
            self._refused(request.rid, error)

    def _meet_session(self, command: _OpenSession | _CloseSession) -> None:
        sessions = self._scheduler.cache.sessions
        try:
            if isinstance(command, _OpenSession):
                sessions.open(command.session_id, command.timeout_s)
            else:
                sessions.close(command.session_id)
        except SessionRefused as error:
            logger.warning("%s", error)

    def _attach(self, command: _Attach) -> None:
        """Open the store here; use it only if every rank could. A failure leaves everything as it was."""
        error = ""
        opened: StorageBackend | None = None
        if self._backend is not None:
            error = "a store is attached already; detach it first"
        elif self._open_backend is None:
            error = "this rank opens no stores"
        else:
            try:
                opened = self._open_backend(command.name, command.options)
            except HiCacheError as failure:
                error = str(failure)
        if self._ranks.any(opened is None):
            self.storage_error = error or f"{command.name} could not be opened on another rank"
            logger.error("%s is not attached: %s", command.name, self.storage_error)
            if opened is not None:
                opened.close()
            return
        assert opened is not None
        self.storage_error = ""
        self._engine.executor.attach(opened)
        self._backend = opened

    def _let_go(self) -> None:
        if self._backend is None:
            return
        if not self._engine.executor.detach(_DETACH_S):
            logger.warning("a call into the storage backend was still running when it was detached")
        self._backend.close()
        self._backend = None

    def close(self) -> None:
        """End this rank; the others notice."""
        self._engine.close()
        if self._backend is not None:
            self._backend.close()
            self._backend = None
