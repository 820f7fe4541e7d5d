"""The self-describing storage object: one page of one family, with everything needed to trust it.

    header | part | part | ...        each begins at a multiple of 64 bytes; gaps are zero

    header: magic, version, component, number of parts, header bytes, payload bytes, model
            fingerprint, page hash, payload checksum, shard id, part table (pool name, bytes),
            zeros, header checksum

Decides the layout and what a reader accepts; moves no page bytes and knows no backend.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection
from dataclasses import dataclass

import xxhash

from hicache.keys import HASH_BYTES
from hicache.spec import ModelSpec
from hicache.types import Component

ALIGNMENT = 64
MAGIC = b"HiCacheO"
VERSION = 1

# magic, version, component, parts, header and payload bytes, fingerprint, page hash, checksum, shard length
_FIXED = struct.Struct("<8sHBBIQ16s32s16sH")
_HASH_AT = 40
_CHECKSUM_AT = 72
_CHECKSUM_BYTES = 16
_PART = struct.Struct("<HQ")  # name length, bytes; the name follows
_TRAILER_BYTES = 8  # checksum of the header before it


class Verdict(enum.Enum):
    """What a reader found. Everything but OK is a miss."""

    OK = "ok"
    BAD_SIZE = "bad_size"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_HEADER = "bad_header"  # its checksum does not match, or it contradicts itself
    WRONG_MODEL = "wrong_model"
    WRONG_SHARD = "wrong_shard"
    WRONG_PAGE = "wrong_page"
    WRONG_COMPONENT = "wrong_component"
    WRONG_PARTS = "wrong_parts"
    BAD_PAYLOAD = "bad_payload"


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself; see read_header."""

    fingerprint: str
    shard: str
    component: Component
    page_hash: bytes
    parts: tuple[tuple[str, int], ...]  # pool name, bytes; 0 bytes: the page has none of this pool
    header_bytes: int
    payload_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything about the objects of one component that does not depend on the page."""

    header_bytes: int
    size: int
    parts: tuple[tuple[int, int], ...]  # start, end within the object
    gaps: tuple[tuple[int, int], ...]  # between parts
    before_hash: bytes
    after_checksum: bytes  # up to the header checksum


class ObjectCodec:
    """Writes and verifies the objects of one model and shard, in place. Thread-safe.

    `absent` names the pools of the family that have nothing for this page (a sidecar whose group
    ends on another page); their part is empty and the part table says so. Which pools those are
    follows from the page's position (ModelSpec.absent), so reader and writer name the same ones.
    """

    def __init__(self, spec: ModelSpec, shard: str) -> None:
        self.spec = spec
        self.shard = shard
        self._fingerprint = bytes.fromhex(spec.fingerprint)
        self._layouts: dict[tuple[Component, frozenset[str]], _Layout] = {}
        for component in spec.kinds:
            self._layout(component, ())

    def size(self, component: Component, *, absent: Collection[str] = ()) -> int:
        """Return the exact size of an object in bytes."""
        return self._layout(component, absent).size

    def payload_views(
        self, component: Component, buffer: memoryview, *, absent: Collection[str] = ()
    ) -> list[memoryview]:
        """Return one view per pool of the family, into `buffer`, to fill or to read in place.

        `buffer` holds one object, contiguous, of format 'B'. The views keep it alive.
        """
        layout = self._layout(component, absent)
        self._check_length(layout, buffer)
        return [buffer[start:end] for start, end in layout.parts]

    def seal(
        self, component: Component, page_hash: bytes, buffer: memoryview, *, absent: Collection[str] = ()
    ) -> None:
        """Write the header around a payload that is complete; `buffer` is then the object."""
        layout = self._layout(component, absent)
        self._check_length(layout, buffer)
        if len(page_hash) != HASH_BYTES:
            raise ValueError(f"a page hash has {HASH_BYTES} bytes, not {len(page_hash)}")
        for start, end in layout.gaps:
            buffer[start:end] = bytes(end - start)
        checksum = xxhash.xxh3_128_digest(buffer[layout.header_bytes :])
        buffer[: layout.header_bytes] = _assemble(layout, page_hash, checksum)

    def verify(
        self,
        component: Component,
        page_hash: bytes,
        buffer: memoryview,
        size: int,
        *,
        absent: Collection[str] = (),
    ) -> Verdict:
        """Say whether the first `size` bytes of `buffer` are exactly the object asked for.

        `size` is what the store returned. Never raises for what is in the buffer.
        """
        layout = self._layout(component, absent)
        if size != layout.size or len(buffer) < size:
            return Verdict.BAD_SIZE
        stored = bytes(buffer[: layout.header_bytes])
        checksum = stored[_CHECKSUM_AT : _CHECKSUM_AT + _CHECKSUM_BYTES]
        if stored != _assemble(layout, page_hash, checksum):
            return self._diagnose(component, page_hash, buffer[:size])
        if xxhash.xxh3_128_digest(buffer[layout.header_bytes : size]) != checksum:
            return Verdict.BAD_PAYLOAD
        return Verdict.OK

    def _diagnose(self, component: Component, page_hash: bytes, buffer: memoryview) -> Verdict:
        header = read_header(buffer)
        if isinstance(header, Verdict):
            return header
        if header.fingerprint != self.spec.fingerprint:
            return Verdict.WRONG_MODEL
        if header.shard != self.shard:
            return Verdict.WRONG_SHARD
        if header.component is not component:
            return Verdict.WRONG_COMPONENT
        if header.page_hash != page_hash:
            return Verdict.WRONG_PAGE
        return Verdict.WRONG_PARTS

    def _layout(self, component: Component, absent: Collection[str]) -> _Layout:
        key = (component, frozenset(absent))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._make_layout(component, key[1])
        return layout

    def _make_layout(self, component: Component, absent: frozenset[str]) -> _Layout:
        pools = self.spec[component].pools
        own = 0 if self.spec[component].logical else 1
        if not absent <= {pool.name for pool in pools[own:]}:
            raise ValueError(f"{sorted(absent)} are not all sidecars of {component.name}")
        shard = self.shard.encode()
        table = shard
        sizes = [0 if pool.name in absent else pool.page_bytes for pool in pools]
        for pool, size in zip(pools, sizes, strict=True):
            name = pool.name.encode()
            table += _PART.pack(len(name), size) + name
        header_bytes = _aligned(_FIXED.size + len(table) + _TRAILER_BYTES)
        parts = []
        gaps = []
        end = header_bytes
        for size in sizes:
            start = _aligned(end) if size else end
            if start > end:
                gaps.append((end, start))
            end = start + size
            parts.append((start, end))
        fixed = _FIXED.pack(
            *(MAGIC, VERSION, component, len(pools), header_bytes, end - header_bytes),
            *(self._fingerprint, bytes(HASH_BYTES), bytes(_CHECKSUM_BYTES), len(shard)),
        )
        after = fixed[_CHECKSUM_AT + _CHECKSUM_BYTES :] + table
        room = header_bytes - _TRAILER_BYTES - (_CHECKSUM_AT + _CHECKSUM_BYTES)
        return _Layout(
            header_bytes, end, tuple(parts), tuple(gaps), fixed[:_HASH_AT], after.ljust(room, b"\0")
        )

    @staticmethod
    def _check_length(layout: _Layout, buffer: memoryview) -> None:
        if len(buffer) != layout.size:
            raise ValueError(f"the object has {layout.size} bytes, the buffer {len(buffer)}")


def read_header(buffer: memoryview) -> Header | Verdict:
    """Return what the object in `buffer` says of itself, or why it cannot be believed.

    Needs neither spec nor payload, but at least the whole header.
    """
    if len(buffer) < _FIXED.size:
        return Verdict.BAD_SIZE
    magic, version, kind, num_parts, header_bytes, payload_bytes, model, page_hash, checksum, shard_length = (
        _FIXED.unpack_from(buffer)
    )
    if magic != MAGIC:
        return Verdict.BAD_MAGIC
    if version != VERSION:
        return Verdict.BAD_VERSION
    if header_bytes % ALIGNMENT or not _FIXED.size + _TRAILER_BYTES <= header_bytes <= len(buffer):
        return Verdict.BAD_HEADER
    body = bytes(buffer[: header_bytes - _TRAILER_BYTES])
    if buffer[len(body) : header_bytes] != xxhash.xxh3_64_digest(body):
        return Verdict.BAD_HEADER
    try:
        at = _FIXED.size + shard_length
        shard = body[_FIXED.size : at].decode()
        parts = []
        for _ in range(num_parts):
            name_length, size = _PART.unpack_from(body, at)
            at += _PART.size + name_length
            parts.append((body[at - name_length : at].decode(), size))
        component = Component(kind)
    except (struct.error, ValueError):
        return Verdict.BAD_HEADER
    return Header(
        fingerprint=model.hex(),
        shard=shard,
        component=component,
        page_hash=page_hash,
        parts=tuple(parts),
        header_bytes=header_bytes,
        payload_bytes=payload_bytes,
        checksum=checksum,
    )


def _assemble(layout: _Layout, page_hash: bytes, checksum: bytes) -> bytes:
    body = layout.before_hash + page_hash + checksum + layout.after_checksum
    return body + xxhash.xxh3_64_digest(body)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
