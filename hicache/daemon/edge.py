"""The edge of the daemon: raw messages in and out, every failure a status, every call counted.

Handlers get parsed requests and raise; what they raise becomes a status in one place, here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from hicache.daemon.events import TooManyWatchers
from hicache.daemon.sessions import TooManySessions, UnknownSession
from hicache.daemon.writes import BadUpload
from hicache.errors import BackendError, BackendTimeout
from hicache.metrics import DaemonMetrics

logger = logging.getLogger(__name__)

_OK: int = grpc.StatusCode.OK.value[0]
# Answered while the daemon drains: what ends a write that has begun, and what an operator looks at.
_TO_THE_END = frozenset({"Commit", "Publish", "Abort", "Stats"})

Request = TypeVar("Request", bound=Message)


class Refusal(Exception):
    """A call is answered with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class BadRequest(Refusal):
    """The message contradicts itself or breaks a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message)


class Cancelled(Exception):
    """The client went away or the stream broke."""


class Aborts(Protocol):
    """Ends a call with a status instead of a reply, by raising."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class _Aborted(Exception):
    """A call that is not gRPC's ended with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class _Local:
    """Aborts a call that is not gRPC's."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _Aborted(code, details)


class Context(Aborts, Protocol):
    """The part of grpc.ServicerContext that is used here."""

    def cancel(self) -> bool: ...

    def is_active(self) -> bool: ...

    def add_callback(self, callback: Callable[[], None]) -> bool: ...

    def peer(self) -> str: ...


_STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (UnknownSession, grpc.StatusCode.NOT_FOUND),
    (TooManySessions, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TooManyWatchers, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (BadUpload, grpc.StatusCode.INVALID_ARGUMENT),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (BackendTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (BackendError, grpc.StatusCode.UNAVAILABLE),
)


def parse(kind: type[Request], raw: bytes) -> Request:
    """Return the message in `raw`. Raises BadRequest."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise BadRequest(f"not a {kind.__name__}: {error}") from error


def receive(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the messages of a client's stream. Raises Cancelled if it breaks."""
    while True:
        try:
            raw = next(stream)
        except StopIteration:
            return
        except grpc.RpcError as error:
            raise Cancelled("the stream broke") from error
        yield raw


class Edge:
    """Turns handlers into method handlers of gRPC. Thread-safe."""

    def __init__(self, metrics: DaemonMetrics) -> None:
        self._metrics = metrics
        self._changed = threading.Condition()
        self._closed = False
        self._running = 0  # of those that began before close()
        self._answered = 0  # of those, after it

    @property
    def closed(self) -> bool:
        """True from close() on."""
        return self._closed

    def close(self) -> None:
        """Refuse what begins from now on."""
        with self._changed:
            self._closed = True

    def finish(self, seconds: float) -> tuple[int, int]:
        """Wait for the calls that began before close(), so long at most.

        Return how many were answered since then, whatever the answer, and how many are still at work.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=seconds)
            return self._answered, self._running

    def unary(
        self, name: str, kind: type[Request], handle: Callable[[Request], Message]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """One message in, one out."""

        def call(raw: bytes, context: Context) -> bytes:
            with self._guard(name, context):
                return handle(parse(kind, raw)).SerializeToString()
            raise AssertionError("the guard aborts")

        return grpc.unary_unary_rpc_method_handler(call)

    def local(
        self, name: str, kind: type[Request], handle: Callable[[Request], Message]
    ) -> Callable[[bytes], tuple[int, bytes]]:
        """The same over an attached client's own connection: a status code, and a message or why not."""

        def call(raw: bytes) -> tuple[int, bytes]:
            try:
                with self._guard(name, _Local()):
                    return _OK, handle(parse(kind, raw)).SerializeToString()
            except _Aborted as ended:
                return ended.code.value[0], str(ended).encode()
            raise AssertionError("the guard aborts")

        return call

    def stream_out(
        self, name: str, kind: type[Request], handle: Callable[[Request, Context], Iterator[bytes]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """One message in, serialized messages out."""

        def call(raw: bytes, context: Context) -> Iterator[bytes]:
            with self._guard(name, context):
                yield from handle(parse(kind, raw), context)

        return grpc.unary_stream_rpc_method_handler(call)

    def stream_in(
        self, name: str, handle: Callable[[Iterator[bytes], Context], Message]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Serialized messages in, one message out."""

        def call(stream: Iterator[bytes], context: Context) -> bytes:
            with self._guard(name, context):
                return handle(receive(stream), context).SerializeToString()
            raise AssertionError("the guard aborts")

        return grpc.stream_unary_rpc_method_handler(call)

    @contextlib.contextmanager
    def _guard(self, name: str, context: Aborts) -> Iterator[None]:
        started = time.perf_counter()
        code, message = grpc.StatusCode.CANCELLED, "the call was given up"
        with self._changed:
            late = self._closed
            self._running += not late
        try:
            if late and name not in _TO_THE_END:
                raise Refusal(grpc.StatusCode.UNAVAILABLE, "the daemon drains")
            with self._metrics.in_flight.labels(name).track_inprogress():
                yield
            code, message = grpc.StatusCode.OK, ""
        except Exception as error:  # noqa: BLE001  # the edge: everything becomes a status
            code, message = _status(name, error)
        finally:
            with self._changed:
                self._running -= not late
                self._answered += self._closed and not late and code is not grpc.StatusCode.CANCELLED
                self._changed.notify_all()
            self._metrics.call_seconds.labels(name).observe(time.perf_counter() - started)
            self._metrics.calls.labels(name, code.name).inc()
        if code is not grpc.StatusCode.OK:
            context.abort(code, message)


def _status(name: str, error: Exception) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, Refusal):
        return error.code, str(error)
    for kind, code in _STATUS:
        if isinstance(error, kind):
            if isinstance(error, BackendError):
                logger.warning("%s: the store failed: %s", name, error)
            return code, str(error)
    logger.error("%s failed", name, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"{name} failed in the daemon, see its log"
