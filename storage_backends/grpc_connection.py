"""The connection to a daemon: its channel, its session, and what a status means.

A channel that lost its daemon is replaced when the next call comes: gRPC's own reconnecting makes
progress only while somebody waits on the channel, and calls that fail at once do not wait. A daemon
that restarted does not know the session; the call says Hello and is made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import msgspec

from hicache.config.serve import DataPlane
from hicache.errors import BackendTimeout, BackendUnavailable, ConfigError
from hicache.rpc import wire
from hicache.rpc.bulk import ProtocolViolation
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends.shared_arena import CannotAttach, SharedArena, attach

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MESSAGE = (64 << 20) + wire.MAX_CONTROL_BYTES
_RECONNECT_S = 0.1  # between attempts; calls in between fail at once

_PLANES = {DataPlane.SHM.value: pb.DATA_PLANE_SHM, DataPlane.INLINE.value: pb.DATA_PLANE_INLINE}

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),  # two backends share neither a connection nor its back-off
    ("SingleThreadedUnaryStream", 1),  # the reading thread takes messages off the wire itself
]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the `grpc` backend."""

    address: str = "127.0.0.1:7380"  # host:port of `hicache serve`
    timeout_s: float = 5.0  # bound of every call
    model_name: str = ""  # for the daemon's log, and to notice other fingerprints under the same name
    fingerprint: str = ""  # the daemon keeps fingerprints apart even where keys do not
    shard: str = ""
    client_id: str = ""  # for the daemon's log; empty: host and process
    refuse_other_fingerprint: bool = False  # rather no L3 than isolation from others of the same model name
    staging_bytes: int = 512 << 20  # most memory of writes that were begun and not ended
    data_planes: str = "shm,inline"  # best first; shm where the daemon is on this host, of the same user

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"grpc: address {self.address!r} must be host:port, as in 127.0.0.1:7380")
        planes = self.data_planes.split(",")
        if not set(planes) <= set(_PLANES) or DataPlane.INLINE.value not in planes:
            raise ConfigError(
                f"grpc: data_planes={self.data_planes!r} must be of {', '.join(_PLANES)}, separated by "
                f"commas, and have inline, on which everything else falls back"
            )
        for name in ("timeout_s", "staging_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"grpc: {name}={getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """What the daemon said at Hello."""

    id: int
    epoch: int
    max_message: int
    max_keys: int
    max_object: int
    arena: SharedArena | None  # None: bytes travel inline


class Link:
    """One channel and the methods of the service on it. `users` and `lost` are the Connection's."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.users = 0  # calls at work
        self.lost = False
        self.hello = self._unary("Hello", pb.HelloReply)
        self.probe = self._unary("Probe", pb.ProbeReply)
        self.begin_write = self._unary("BeginWrite", pb.BeginWriteReply)
        self.locate = self._unary("Locate", pb.LocateReply)
        self.publish = self._unary("Publish", pb.CommitReply)
        self.abort = self._unary("Abort", pb.AbortReply)
        self.touch = self._unary("Touch", pb.TouchReply)
        self.pin = self._unary("Pin", pb.PinReply)
        self.close_session = self._unary("CloseSession", pb.CloseSessionReply)
        self.delete = self._unary("Delete", pb.DeleteReply)
        self.clear = self._unary("Clear", pb.ClearReply)
        self.stats = self._unary("Stats", pb.StatsReply)
        # Serialized messages: bulk data is spliced in and out by rpc.bulk.
        self.read: Callable[..., Iterator[bytes]] = self.channel.unary_stream(
            wire.method("Read"), request_serializer=pb.ReadRequest.SerializeToString
        )
        self.commit: Callable[..., pb.CommitReply] = self.channel.stream_unary(
            wire.method("Commit"), response_deserializer=pb.CommitReply.FromString
        )

    def _unary(self, name: str, reply: type[Any]) -> Callable[..., Any]:
        method: Callable[..., Any] = self.channel.unary_unary(
            wire.method(name),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        return method


class Connection:
    """Thread-safe: `_lock` guards every field below it and those of links; no call is made under it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # held by the one thread that opens a session, before _lock
        self._link: Link | None = None
        self._session: Session | None = None
        self._lost_at = -_RECONNECT_S
        self._lost_why = ""
        self._closed = False
        self._told_inline = False  # that the arena cannot be had is said once

    @property
    def data_plane(self) -> DataPlane:
        """How bytes travel in the present session."""
        session = self._session
        return DataPlane.SHM if session is not None and session.arena is not None else DataPlane.INLINE

    @property
    def epoch(self) -> int:
        """Names the daemon's run that last answered a Hello; 0 before."""
        session = self._session
        return session.epoch if session else 0

    def run(self, operation: str, call: Callable[[Link, Session, float], T]) -> T:
        """Make a call within the time bound, in a new session if the daemon does not know the old one.

        `call` gets the link, the session and the deadline. Raises BackendTimeout and BackendUnavailable.
        """
        deadline = time.monotonic() + self._options.timeout_s
        with self.calling(operation) as link:
            session = self._session
            if session is not None:
                try:
                    return call(link, session, deadline)
                except grpc.RpcError as error:
                    if code(error) is not grpc.StatusCode.NOT_FOUND:
                        raise
            return call(link, self._renew(session, link, deadline), deadline)

    @contextlib.contextmanager
    def calling(self, operation: str) -> Iterator[Link]:
        """Lend the link for calls, and turn what gRPC raises into what a backend raises."""
        what = f"grpc: {operation} at {self._options.address}"
        link = self._take_link(what)
        try:
            yield link
        except grpc.RpcError as error:
            status = code(error)
            if status is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise BackendTimeout(f"{what} did not end within {self._options.timeout_s:g} s") from error
            if status is grpc.StatusCode.UNAVAILABLE:
                self._lose(link, error.details() or status.name)
            raise BackendUnavailable(f"{what}: {status.name}: {error.details()}") from error
        except ProtocolViolation as error:
            raise BackendUnavailable(f"{what}: {error}") from error
        except ValueError as error:
            if self._closed:  # how a channel says that it was closed meanwhile
                raise BackendUnavailable(f"{what}: closed meanwhile") from error
            raise
        finally:
            self._give_back(link)

    def _take_link(self, what: str) -> Link:
        with self._lock:
            self.check_usable()
            if self._link is None:
                if time.monotonic() - self._lost_at < _RECONNECT_S:
                    raise BackendUnavailable(f"{what}: a moment ago: {self._lost_why}")
                self._link = Link(self._options.address)
            self._link.users += 1
            return self._link

    def _lose(self, link: Link, why: str) -> None:
        with self._lock:
            if link is self._link:
                self._link = None
                self._lost_at, self._lost_why = time.monotonic(), why
            link.lost = True

    def _give_back(self, link: Link) -> None:
        with self._lock:
            link.users -= 1
            finished = link.lost and not link.users
        if finished:
            link.channel.close()

    def _renew(self, stale: Session | None, link: Link, deadline: float) -> Session:
        """Return a session other than `stale`; of several threads that need one, one opens it."""
        if not self._opening.acquire(timeout=left(deadline)):
            raise BackendTimeout("grpc: the time was up before a session was open")
        try:
            if self._session is not stale and self._session is not None:
                return self._session
            return self._open_session(link, deadline)
        finally:
            self._opening.release()

    def _open_session(self, link: Link, deadline: float) -> Session:
        options = self._options
        request = pb.HelloRequest(
            protocol_version=wire.PROTOCOL_VERSION,
            client_id=options.client_id or f"{socket.gethostname()}:{self._pid}",
            client_version=wire.software_version(),
            model_name=options.model_name,
            model_fingerprint=options.fingerprint,
            shard=options.shard,
            data_planes=[_PLANES[name] for name in options.data_planes.split(",")],
            refuse_other_fingerprint=options.refuse_other_fingerprint,
        )
        reply: pb.HelloReply = link.hello(request, timeout=left(deadline))
        session = Session(
            id=reply.session,
            epoch=reply.epoch,
            max_message=reply.max_message_bytes,
            max_keys=reply.max_keys,
            max_object=reply.max_object_bytes,
            arena=self._attach(reply, deadline),
        )
        with self._lock:
            before, self._session = self._session, session
            closed = self._closed
        for one in (before, session if closed else None):
            if one is not None and one.arena is not None:
                one.arena.close()
        if before is None or before.epoch != session.epoch:
            known = "" if before is None else "; it restarted, what it held in memory is gone"
            logger.info(
                "grpc: session with daemon %s, store %s, bytes travel %s%s",
                *(options.address, reply.store, self.data_plane.value, known),
            )
        if reply.notice:
            logger.warning("grpc: daemon %s: %s", options.address, reply.notice)
        return session

    def _attach(self, reply: pb.HelloReply, deadline: float) -> SharedArena | None:
        if reply.data_plane != pb.DATA_PLANE_SHM:
            return None
        try:
            return attach(reply.arena, reply.session, timeout_s=left(deadline))
        except CannotAttach as error:
            if not self._told_inline:
                self._told_inline = True
                logger.info(
                    "grpc: daemon %s: bytes travel inline, its shared memory cannot be had here: %s",
                    *(self._options.address, error),
                )
            return None

    def check_usable(self) -> None:
        """Raise BackendUnavailable after close() and in a forked process."""
        if self._closed:
            raise BackendUnavailable("grpc: the backend is closed")
        if self._pid != os.getpid():
            raise BackendUnavailable("grpc: opened in another process; open it after the fork")

    def close(self) -> None:
        """End every call at work. Idempotent."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
            session = self._session
        if session is not None and session.arena is not None:
            session.arena.close()
        if link is not None and self._pid == os.getpid():
            link.channel.close()


def left(deadline: float) -> float:
    """Return the seconds up to a deadline. Raises BackendTimeout if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise BackendTimeout("grpc: the time was up before all of the batch was sent")
    return seconds


def code(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the status that a call ended with."""
    status: grpc.StatusCode = error.code()
    return status
