"""The client's side of bulk data: objects out of a Read, objects into a Commit.

Bytes reach or leave the caller's memory on the caller's thread, one copy each way in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import DecodeError

from hicache.rpc import wire
from hicache.rpc.v1 import cache_pb2 as pb

MISS = -1


class ProtocolViolation(Exception):
    """The other end sent something that the protocol does not allow."""


def receive(messages: Iterable[bytes], buffers: Sequence[memoryview]) -> list[int]:
    """Copy the objects of a Read into the buffers; return each one's size, or MISS.

    Objects larger than their buffer are not sent. Raises ProtocolViolation.
    """
    sizes: list[int] = []
    current, offset = 0, 0  # where the next byte belongs
    for message in messages:
        try:
            rest, data = wire.split_data(message, wire.READ_DATA_FIELD)
            if rest:
                sizes += pb.ReadReply.FromString(rest).sizes
        except (ValueError, DecodeError) as error:
            raise ProtocolViolation(f"not a ReadReply: {error}") from error
        if len(sizes) > len(buffers):
            raise ProtocolViolation(f"{len(sizes)} sizes for {len(buffers)} keys")
        while len(data):
            while current < len(sizes) and not 0 < sizes[current] <= len(buffers[current]):
                current += 1
            if current == len(sizes):
                raise ProtocolViolation(f"{len(data)} bytes that belong to no object")
            piece = data[: sizes[current] - offset]
            buffers[current][offset : offset + len(piece)] = piece
            offset += len(piece)
            data = data[len(piece) :]
            if offset == sizes[current]:
                current, offset = current + 1, 0
    complete = offset == 0 and not any(
        0 < size <= len(buffer) for size, buffer in zip(sizes[current:], buffers[current:], strict=False)
    )
    if len(sizes) < len(buffers) or not complete:
        raise ProtocolViolation(f"the stream ended in object {current} of {len(buffers)}")
    return sizes


def upload(
    session: int, numbers: Sequence[int], buffers: Sequence[memoryview], *, max_message: int
) -> Iterator[bytes]:
    """Yield the messages of a Commit: reservations by number, and the bytes of each from its buffer."""
    head = pb.CommitRequest(session=session, reservations=numbers, sizes=[len(b) for b in buffers])
    rest = head.SerializeToString()
    last = pb.CommitRequest(last=True).SerializeToString()
    parts: list[memoryview] = []
    filled = 0
    for buffer in buffers:
        while len(buffer):
            if filled == max_message:
                yield wire.join_data(rest, wire.COMMIT_DATA_FIELD, parts)
                rest, parts, filled = b"", [], 0
            piece = buffer[: max_message - filled]
            parts.append(piece)
            filled += len(piece)
            buffer = buffer[len(piece) :]
    yield wire.join_data(rest + last, wire.COMMIT_DATA_FIELD, parts)  # messages merge by concatenation
