"""The shared L3 daemon as a backend: `hicache serve` over gRPC, bytes inline.

Decides batching and what is staged here; leaves sessions to `grpc_connection` and what is kept to the
daemon. It survives the daemon's death: calls raise until it is back, then work again.

gRPC keeps threads per channel and per upload, and a channel does not survive a fork: open the backend
in the process that uses it; elsewhere every call raises BackendUnavailable.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc

from hicache.errors import BackendError
from hicache.rpc import bulk
from hicache.rpc.v1 import cache_pb2 as pb
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

__all__ = ["GrpcBackend", "Options"]

logger = logging.getLogger(__name__)

_OUTCOMES = {
    pb.WRITE_OUTCOME_STORED: WriteOutcome.STORED,
    pb.WRITE_OUTCOME_EXISTS: WriteOutcome.EXISTS,
    pb.WRITE_OUTCOME_NO_SPACE: WriteOutcome.NO_SPACE,
    pb.WRITE_OUTCOME_FAILED: WriteOutcome.FAILED,
}


@dataclass(slots=True, eq=False)
class _Staged:
    """The token of a reservation. `live` until commit or abort took it; guarded by the backend's lock."""

    session: Session
    number: int
    span: Span
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
        """Open the backend. A daemon that cannot be reached is logged, and calls raise until it is there."""
        backend = cls(options)
        try:
            backend._connection.run("hello", lambda link, session, deadline: None)
        except BackendError as error:
            logger.warning("grpc: serving without L3 until the daemon answers: %s", error)
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
                found += link.probe(request, timeout=left(deadline)).present
            return bytes(found)

        return self._connection.run("probe", call) if self._some(keys) else b""

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)

        def call(link: Link, session: Session, deadline: float) -> list[int]:
            sizes: list[int] = []
            for part in _slices(len(keys), session.max_keys):
                limits = [len(buffer) for buffer in buffers[part]]
                request = pb.ReadRequest(session=session.id, keys=keys[part], limits=limits)
                sizes += bulk.receive(link.read(request, timeout=left(deadline)), buffers[part])
            return sizes

        return self._connection.run("read", call) if self._some(keys) else []

    # -- writing -------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)

        def call(link: Link, session: Session, deadline: float) -> list[Reservation | WriteOutcome]:
            answers: list[Reservation | WriteOutcome] = [WriteOutcome.NO_SPACE] * len(keys)
            spans = self._stage(sizes, session.max_object)
            staged = list(spans)
            try:
                for part in _slices(len(staged), session.max_keys):
                    indices = staged[part]
                    request = pb.BeginWriteRequest(
                        session=session.id, keys=[keys[i] for i in indices], sizes=[sizes[i] for i in indices]
                    )
                    reply = link.begin_write(request, timeout=left(deadline))
                    for i, number, outcome in zip(indices, reply.reservations, reply.outcomes, strict=True):
                        if number:
                            token = _Staged(session, number, spans.pop(i))
                            answers[i] = Reservation(keys[i], self._view(token.span), token)
                        else:
                            answers[i] = _OUTCOMES.get(outcome, WriteOutcome.FAILED)
            except BaseException:
                # What the daemon granted so far lapses there by itself.
                spans |= {
                    i: _token(one).span for i, one in enumerate(answers) if isinstance(one, Reservation)
                }
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
                messages = self._messages([reservations[i] for i in indices])
                try:
                    reply = link.commit(messages, timeout=left(deadline))
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
                self._staging.give_back(_token(reservations[index]).span)

    def _messages(self, batch: Sequence[Reservation]) -> Iterator[bytes]:
        tokens = [_token(reservation) for reservation in batch]
        return bulk.upload(
            tokens[0].session.id,
            [token.number for token in tokens],
            [self._view(token.span) for token in tokens],
            max_message=tokens[0].session.max_message,
        )

    # -- the rest --------------------------------------------------------------------------------

    def touch(self, keys: Sequence[str]) -> None:
        def call(link: Link, session: Session, deadline: float) -> None:
            for part in _slices(len(keys), session.max_keys):
                link.touch(pb.TouchRequest(session=session.id, keys=keys[part]), timeout=left(deadline))

        if self._some(keys):
            self._connection.run("touch", call)

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
                    "data_plane": "inline",
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


def _token(reservation: Reservation) -> _Staged:
    if not isinstance(reservation.token, _Staged):
        raise ValueError(f"the reservation of {reservation.key} is another backend's")
    return reservation.token


def _by_session(reservations: Sequence[Reservation], live: Sequence[int]) -> Iterator[list[int]]:
    """Group indices by the session that gave the reservation, at most a request's worth each."""
    groups: dict[Session, list[int]] = {}
    for index in live:
        groups.setdefault(_token(reservations[index]).session, []).append(index)
    for session, indices in groups.items():
        for part in _slices(len(indices), session.max_keys):
            yield indices[part]


def _slices(count: int, most: int) -> Iterator[slice]:
    """Cut [0, count) into runs of at most `most`."""
    return (slice(start, min(start + most, count)) for start in range(0, count, most))
