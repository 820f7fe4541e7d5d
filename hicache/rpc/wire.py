"""What both ends of the wire share beside the generated messages: names, limits, and bulk data.

Bulk data is spliced into and out of messages by hand: the generated code copies a bytes field three
times, this once. The bytes on the wire are the same, so any generated client works.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PROTOCOL_VERSION = 1
SERVICE = "hicache.v1.Cache"

MAX_KEYS = 4096  # keys or reservations in one request
MAX_KEY_BYTES = 200
# Room for everything of a message but its bulk data: MAX_KEYS keys of MAX_KEY_BYTES and their sizes.
MAX_CONTROL_BYTES = 2 << 20

READ_DATA_FIELD = 2  # ReadReply.data
COMMIT_DATA_FIELD = 4  # CommitRequest.data

_LENGTH_DELIMITED = 2


def method(name: str) -> str:
    """Return the full path of a method of the service."""
    return f"/{SERVICE}/{name}"


def software_version() -> str:
    """Return the version that this end tells the other, for logs."""
    try:
        return version("hicache-tiered")
    except PackageNotFoundError:
        return "unknown"


def join_data(rest: bytes, field: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """Append a bytes field made of `parts` to the serialized message `rest`, copying each part once."""
    size = sum(len(part) for part in parts)
    if not size:
        return rest
    return b"".join((rest, _varint(field << 3 | _LENGTH_DELIMITED), _varint(size), *parts))


def split_data(message: bytes, field: int) -> tuple[bytes, memoryview]:
    """Return the serialized message without its bytes field `field`, and that field as a view of it.

    Raises ValueError if the message is cut short, is no protobuf at its top level, or has the field twice.
    """
    whole = memoryview(message)
    at, end = 0, len(message)
    data: memoryview | None = None
    rest: list[memoryview] = []
    while at < end:
        start = at
        tag, at = _read_varint(message, at)
        at, content = _skip(message, at, tag & 7)
        if at > end:
            raise ValueError(f"field {tag >> 3} ends {at - end} bytes behind its message")
        if tag >> 3 != field:
            rest.append(whole[start:at])
        elif data is not None or tag & 7 != _LENGTH_DELIMITED:
            raise ValueError(f"field {field} must be one bytes field")
        else:
            data = whole[content:at]
    return b"".join(rest), whole[:0] if data is None else data


def _skip(message: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return where a field's value ends and where its content begins."""
    if wire_type == 0:
        return _read_varint(message, at)[1], at
    if wire_type == 1:
        return at + 8, at
    if wire_type == _LENGTH_DELIMITED:
        size, at = _read_varint(message, at)
        return at + size, at
    if wire_type == 5:
        return at + 4, at
    raise ValueError(f"wire type {wire_type}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("varint cut short")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
