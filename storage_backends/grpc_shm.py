"""The calls of a client that shares memory with its daemon: places travel, bytes do not.

One call per batch read, two per batch written; a read's grant is released by a later call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from hicache.errors import BackendTimeout
from hicache.rpc import local
from hicache.rpc.bulk import ProtocolViolation
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends.base import MISS
from hicache.storage_backends.grpc_connection import Link, Session, left
from hicache.storage_backends.shared_arena import SharedArena

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)

_ATTEMPTS = 2  # at a copy that came too late, before it counts as a miss


class Given(NamedTuple):
    """BeginWrite's answer for one key: a number and its place, or number 0 and why not."""

    number: int
    outcome: pb.WriteOutcome
    generation: int
    buffer: memoryview | None


def call(
    arena: SharedArena,
    otherwise: Callable[..., Reply],
    request: Message,
    method: str,
    *,
    reply_kind: type[Reply],
    deadline: float,
) -> Reply:
    """Make a call over the client's own connection, or over gRPC where that is lost."""
    try:
        raw = arena.channel.call(method, request.SerializeToString(), timeout_s=left(deadline))
    except local.ChannelLost:
        return otherwise(request, timeout=left(deadline))
    except TimeoutError as error:
        raise BackendTimeout(f"grpc: {method} did not end in time") from error
    try:
        return reply_kind.FromString(raw)
    except DecodeError as error:
        raise ProtocolViolation(f"not a {reply_kind.__name__}: {error}") from error


def read(
    link: Link,
    session: Session,
    arena: SharedArena,
    *,
    keys: Sequence[str],
    buffers: Sequence[memoryview],
    deadline: float,
) -> tuple[list[int], list[int]]:
    """Read objects into the buffers; return sizes, and the indices that must be read inline.

    Those are what the session's share of grants had no room for while other threads were reading.
    """
    sizes = [MISS] * len(keys)
    wanted = list(range(len(keys)))
    for _ in range(_ATTEMPTS):
        late: list[int] = []
        while wanted:
            part = wanted[: session.max_keys]
            request = pb.LocateRequest(
                session=session.id,
                keys=[keys[i] for i in part],
                limits=[len(buffers[i]) for i in part],
                release=arena.take_releases(),
            )
            reply: pb.LocateReply = call(
                arena, link.locate, request, "Locate", reply_kind=pb.LocateReply, deadline=deadline
            )
            if not reply.sizes:
                return sizes, wanted + late
            try:
                copied = arena.copy_out(reply, [buffers[i] for i in part])
            finally:
                arena.note_release(reply.grant)
            for i, size in zip(part, copied.sizes, strict=False):
                sizes[i] = size
            for index in (*copied.stale, *copied.damaged):
                sizes[part[index]] = MISS
            late += [part[index] for index in copied.stale]
            if copied.damaged:
                _drop(link, session, [keys[part[index]] for index in copied.damaged], deadline=deadline)
            wanted = wanted[len(copied.sizes) :]
        wanted = late
    return sizes, []


def _drop(link: Link, session: Session, keys: Sequence[str], *, deadline: float) -> None:
    """Delete objects that are not what their writers wrote, so that the next write replaces them."""
    logger.warning("grpc: %d damaged objects in shared memory are deleted, %s first", len(keys), keys[0][:40])
    link.delete(pb.DeleteRequest(session=session.id, keys=keys), timeout=left(deadline))


def begin(
    link: Link,
    session: Session,
    arena: SharedArena,
    *,
    keys: Sequence[str],
    sizes: Sequence[int],
    deadline: float,
) -> Iterator[Given]:
    """Reserve places; yield an answer per key. `keys` are at most a request's worth."""
    request = pb.BeginWriteRequest(
        session=session.id, keys=keys, sizes=sizes, in_arena=True, release=arena.take_releases()
    )
    reply: pb.BeginWriteReply = call(
        arena, link.begin_write, request, "BeginWrite", reply_kind=pb.BeginWriteReply, deadline=deadline
    )
    arena.want(reply.ready_bytes)
    for size, number, outcome, offset, generation in zip(
        sizes, reply.reservations, reply.outcomes, reply.offsets, reply.generations, strict=True
    ):
        yield Given(number, outcome, generation, arena.view(offset, size) if number else None)
