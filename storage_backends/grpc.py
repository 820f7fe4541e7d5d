"""The shared L3 daemon as a backend: `hicache serve` over gRPC, bytes inline or through shared memory.

Decides batching and what is staged here; leaves sessions to `grpc_connection`, the calls of the shm plane
to `grpc_shm`, and what is kept to the daemon. It survives the daemon's death: calls raise until it is
back, then work again.

gRPC keeps threads per channel and per upload, and a channel does not survive a fork: open the backend
in the process that uses it; elsewhere every call raises BackendUnavailable.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import grpc

from hicache.errors import BackendError
from hicache.rpc import bulk
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends import grpc_shm
from hicache.storage_backends.arena import Arena, Span
from hicache.storage_backends.base import (
    BackendStats,
    Reservation,
    StorageBackend,
    WriteOutcome,
    check_lengths,
    check_sizes,
)
from hicache.storage_backends.grpc_connection import Connection, Link, Options, Session, code, left
from hicache.storage_backends.shared_arena import CannotAttach, SharedArena, checksum

__all__ = ["GrpcBackend", "Options"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PIN_S = 86400.0  # the daemon's limit

_OUTCOMES = {
    pb.WRITE_OUTCOME_STORED: WriteOutcome.STORED,
    pb.WRITE_OUTCOME_EXISTS: WriteOutcome.EXISTS,
    pb.WRITE_OUTCOME_NO_SPACE: WriteOutcome.NO_SPACE,
    pb.WRITE_OUTCOME_FAILED: WriteOutcome.FAILED,
    pb.WRITE_OUTCOME_BUSY: WriteOutcome.BUSY,
}


@dataclass(slots=True, eq=False)
class _Staged:
    """The token of a reservation. `live` until commit or abort took it; guarded by the backend's lock."""

    session: Session
    number: int
    span: Span | None  # of our own memory; None where the buffer lies in the daemon's arena
    generation: int = 0  # of the place in the arena
    live: bool = True


class GrpcBackend(StorageBackend):
    """One daemon.

    Thread-safe: `_lock` guards the tokens; no call is made under it.
    Bytes reach the caller's memory on the caller's own thread only, so time-outs settle.
    """

    name: ClassVar[str] = "grpc"
    settles_on_timeout: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        # Mapped once and used again from its start, so that only its first use pays for fresh pages.
        self._memory = memoryview(mmap.mmap(-1, options.staging_bytes))
        self._staging = Arena(0, options.staging_bytes)
        self._connection = Connection(options)

    @classmethod
    def from_options(cls, options: Options) -> GrpcBackend:
        """Open the backend, and a session if the daemon is there; while it cannot be reached, calls raise."""
        backend = cls(options)
        try:
            backend._connection.run("hello", lambda link, session, deadline: None)
        except BackendError as error:
            logger.debug("grpc: not there yet: %s", error)
        return backend

    @property
    def epoch(self) -> int:
        """Names the daemon's run that last answered; another value means that what was stored may be gone."""
        return self._connection.epoch

    # -- reading -------------------------------------------------------------------------------

    def probe(self, keys: Sequence[str]) -> bytes:
        def call(link: Link, session: Session, deadline: float) -> bytes:
            found = bytearray()
            for part in _slices(len(keys), session.max_keys):
                request = pb.ProbeRequest(session=session.id, keys=keys[part])
                arena = session.arena
                if arena is None:
                    found += link.probe(request, timeout=left(deadline)).present
                else:
                    found += grpc_shm.call(
                        arena, link.probe, request, "Probe", reply_kind=pb.ProbeReply, deadline=deadline
                    ).present
            return bytes(found)

        return self._connection.run("probe", call) if self._some(keys) else b""

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)

        def call(link: Link, session: Session, deadline: float) -> list[int]:
            sizes, rest = [0] * len(keys), list(range(len(keys)))
            shared = _if_shared(
                session,
                lambda arena: grpc_shm.read(
                    link, session, arena, keys=keys, buffers=buffers, deadline=deadline
                ),
            )
            if shared is not None:
                sizes, rest = shared
            for part in _slices(len(rest), session.max_keys):
                indices = rest[part]
                targets = [buffers[i] for i in indices]
                request = pb.ReadRequest(
                    session=session.id, keys=[keys[i] for i in indices], limits=list(map(len, targets))
                )
                found = bulk.receive(link.read(request, timeout=left(deadline)), targets)
                for i, size in zip(indices, found, strict=True):
                    sizes[i] = size
            return sizes

        return self._connection.run("read", call) if self._some(keys) else []

    # -- writing -------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)

        def call(link: Link, session: Session, deadline: float) -> list[Reservation | WriteOutcome]:
            shared = _if_shared(
                session, lambda arena: _begin_shared(link, session, arena, keys, sizes, deadline)
            )
            return staged(link, session, deadline) if shared is None else shared

        def staged(link: Link, session: Session, deadline: float) -> list[Reservation | WriteOutcome]:
            answers: list[Reservation | WriteOutcome] = [WriteOutcome.NO_SPACE] * len(keys)
            spans = self._stage(sizes, session.max_object)
            wanted = list(spans)
            try:
                for part in _slices(len(wanted), session.max_keys):
                    indices = wanted[part]
                    request = pb.BeginWriteRequest(
                        session=session.id, keys=[keys[i] for i in indices], sizes=[sizes[i] for i in indices]
                    )
                    reply = link.begin_write(request, timeout=left(deadline))
                    for i, number, outcome in zip(indices, reply.reservations, reply.outcomes, strict=True):
                        if number:
                            span = spans.pop(i)
                            answers[i] = Reservation(
                                keys[i], self._view(span), _Staged(session, number, span)
                            )
                        else:
                            answers[i] = _OUTCOMES.get(outcome, WriteOutcome.FAILED)
            except BaseException:
                # What the daemon granted so far lapses there by itself.
                for i, one in enumerate(answers):
                    if isinstance(one, Reservation) and (given := _token(one).span) is not None:
                        spans[i] = given
                raise
            finally:
                for span in spans.values():
                    self._staging.give_back(span)
            return answers

        return self._connection.run("begin_write", call) if self._some(keys) else []

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        outcomes = [WriteOutcome.FAILED] * len(reservations)
        deadline = time.monotonic() + self._options.timeout_s
        with self._ending(reservations) as live, self._connection.calling("commit") as link:
            for indices in _by_session(reservations, live):
                batch = [reservations[i] for i in indices]
                try:
                    reply = self._commit(link, batch, deadline)
                except grpc.RpcError as error:
                    if code(error) is not grpc.StatusCode.NOT_FOUND:
                        raise
                    continue  # the daemon that gave the reservations is gone, and they with it
                for index, outcome in zip(indices, reply.outcomes, strict=True):
                    outcomes[index] = _OUTCOMES.get(outcome, WriteOutcome.FAILED)
        return outcomes

    def abort(self, reservations: Sequence[Reservation]) -> None:
        deadline = time.monotonic() + self._options.timeout_s
        with self._ending(reservations) as live:
            for indices in _by_session(reservations, live):
                tokens = [_token(reservations[i]) for i in indices]
                request = pb.AbortRequest(
                    session=tokens[0].session.id, reservations=[token.number for token in tokens]
                )
                try:
                    with self._connection.calling("abort") as link:
                        link.abort(request, timeout=left(deadline))
                except BackendError as error:
                    logger.debug("grpc: an abort was not heard; the daemon takes the room back: %s", error)

    def _stage(self, sizes: Sequence[int], most: int) -> dict[int, Span]:
        """Take memory for objects of at most `most` bytes; return spans by index, as far as there is room."""
        spans: dict[int, Span] = {}
        for index, size in enumerate(sizes):
            if size <= most and (span := self._staging.try_take(size)) is not None:
                spans[index] = span
        return spans

    def _view(self, span: Span) -> memoryview:
        return self._memory[span.offset : span.offset + span.size_bytes]

    @contextlib.contextmanager
    def _ending(self, reservations: Sequence[Reservation]) -> Iterator[list[int]]:
        """End reservations on this side; yield the indices of those that were live; then free their memory.

        A call that timed out sends nothing more, so its memory may be used again at once.
        """
        self._connection.check_usable()
        live = []
        with self._lock:
            for index, reservation in enumerate(reservations):
                token = _token(reservation)
                if token.live:
                    token.live = False
                    live.append(index)
        try:
            yield live
        finally:
            for index in live:
                span = _token(reservations[index]).span
                if span is not None:
                    self._staging.give_back(span)

    def _commit(self, link: Link, batch: Sequence[Reservation], deadline: float) -> pb.CommitReply:
        """Commit reservations of one session, all of them in its arena or none."""
        tokens = [_token(reservation) for reservation in batch]
        session, numbers = tokens[0].session, [token.number for token in tokens]
        buffers = [reservation.buffer for reservation in batch]
        arena = session.arena
        if tokens[0].span is not None or arena is None:
            messages = bulk.upload(session.id, numbers, buffers, max_message=session.max_message)
            return link.commit(messages, timeout=left(deadline))
        request = pb.PublishRequest(
            session=session.id,
            reservations=numbers,
            generations=[token.generation for token in tokens],
            checksums=[checksum(buffer) for buffer in buffers],
            release=arena.take_releases(),
        )
        return grpc_shm.call(
            arena, link.publish, request, "Publish", reply_kind=pb.CommitReply, deadline=deadline
        )

    # -- the rest --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[str]) -> None:
        def call(link: Link, session: Session, deadline: float) -> None:
            for part in _slices(len(keys), session.max_keys):
                link.touch(pb.TouchRequest(session=session.id, keys=keys[part]), timeout=left(deadline))

        if self._some(keys):
            self._connection.run("touch", call)

    def pin(self, session: str, keys: Sequence[str], ttl_s: float) -> None:
        """See HoldsSessions; the daemon's store decides whether it can."""

        def call(link: Link, hello: Session, deadline: float) -> None:
            for part in _slices(len(keys), hello.max_keys):
                request = pb.PinRequest(
                    session=hello.id,
                    conversation=session,
                    keys=keys[part],
                    ttl_seconds=min(ttl_s, _LONGEST_PIN_S),
                )
                link.pin(request, timeout=left(deadline))

        if self._some(keys):
            self._connection.run("pin", call)

    def close_session(self, session: str) -> None:
        """See HoldsSessions."""

        def call(link: Link, hello: Session, deadline: float) -> None:
            request = pb.CloseSessionRequest(session=hello.id, conversation=session)
            link.close_session(request, timeout=left(deadline))

        self._connection.run("close_session", call)

    def delete(self, keys: Sequence[str]) -> int:
        def call(link: Link, session: Session, deadline: float) -> int:
            deleted = 0
            for part in _slices(len(keys), session.max_keys):
                request = pb.DeleteRequest(session=session.id, keys=keys[part])
                deleted += link.delete(request, timeout=left(deadline)).deleted
            return deleted

        return self._connection.run("delete", call) if self._some(keys) else 0

    def clear(self, prefix: str) -> int:
        def call(link: Link, session: Session, deadline: float) -> int:
            request = pb.ClearRequest(session=session.id, prefix=prefix)
            return int(link.clear(request, timeout=left(deadline)).deleted)

        return self._connection.run("clear", call)

    def stats(self) -> BackendStats:
        def call(link: Link, session: Session, deadline: float) -> BackendStats:
            reply = link.stats(pb.StatsRequest(), timeout=left(deadline))
            return BackendStats(
                objects=reply.objects,
                used_bytes=reply.used_bytes,
                capacity_bytes=reply.capacity_bytes,
                details={
                    "address": self._options.address,
                    "data_plane": self._connection.data_plane.value,
                    "arena_bytes": reply.arena_bytes,
                    "store": reply.store,
                    "epoch": reply.epoch,
                    "sessions": reply.sessions,
                    "reservations": reply.reservations,
                    "reserved_bytes": reply.reserved_bytes,
                    **reply.counters,
                },
            )

        return self._connection.run("stats", call)

    def close(self) -> None:
        self._connection.close()

    def _some(self, keys: Sequence[str]) -> bool:
        """True if there is anything to ask; raises as a call would even if there is not."""
        self._connection.check_usable()
        return bool(keys)


def _if_shared(session: Session, call: Callable[[SharedArena], T]) -> T | None:
    """Make a call of the shm plane; None where the session has none, or has it no longer."""
    arena = session.arena
    if arena is None or arena.closed:
        return None
    try:
        return call(arena)
    except CannotAttach as error:
        why = str(error)
    except grpc.RpcError as error:
        if code(error) is not grpc.StatusCode.FAILED_PRECONDITION:
            raise
        why = error.details() or "refused"
    logger.info("grpc: bytes travel inline from here: %s", why)
    arena.close()
    return None


def _begin_shared(
    link: Link,
    session: Session,
    arena: SharedArena,
    keys: Sequence[str],
    sizes: Sequence[int],
    deadline: float,
) -> list[Reservation | WriteOutcome]:
    answers: list[Reservation | WriteOutcome] = [WriteOutcome.NO_SPACE] * len(keys)
    wanted = [index for index, size in enumerate(sizes) if size <= session.max_object]
    for part in _slices(len(wanted), session.max_keys):
        indices = wanted[part]
        given = grpc_shm.begin(
            link,
            session,
            arena,
            keys=[keys[i] for i in indices],
            sizes=[sizes[i] for i in indices],
            deadline=deadline,
        )
        for i, one in zip(indices, given, strict=True):
            if one.buffer is None:
                answers[i] = _OUTCOMES.get(one.outcome, WriteOutcome.FAILED)
            else:
                token = _Staged(session, one.number, None, one.generation)
                answers[i] = Reservation(keys[i], one.buffer, token)
    return answers


def _token(reservation: Reservation) -> _Staged:
    if not isinstance(reservation.token, _Staged):
        raise ValueError(f"the reservation of {reservation.key} is another backend's")
    return reservation.token


def _by_session(reservations: Sequence[Reservation], live: Sequence[int]) -> Iterator[list[int]]:
    """Group indices by the session that gave the reservation and where its bytes lie, at most a request's
    worth each."""
    groups: dict[tuple[Session, bool], list[int]] = {}
    for index in live:
        token = _token(reservations[index])
        groups.setdefault((token.session, token.span is None), []).append(index)
    for (session, _), indices in groups.items():
        for part in _slices(len(indices), session.max_keys):
            yield indices[part]


def _slices(count: int, most: int) -> Iterator[slice]:
    """Cut [0, count) into runs of at most `most`."""
    return (slice(start, min(start + most, count)) for start in range(0, count, most))
