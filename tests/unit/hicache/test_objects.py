"""Objects: what comes out of storage is what went in, or it is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache import objects
from hicache.objects import ALIGNMENT, ObjectCodec, Verdict, read_header
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

PAGE = bytes(range(32))


def pool(name: str, rows: int = 4, layers: int = 2, width: int = 5) -> PoolSpec:
    return PoolSpec(name, layers, (width,), "uint8", rows)


def model(**changes: object) -> ModelSpec:
    full = ComponentSpec(Component.FULL, (pool("kv"), pool("indexer", layers=1, width=3), pool("state")))
    swa = ComponentSpec(Component.SWA, (pool("swa"),), window=8)
    mamba = ComponentSpec(Component.MAMBA, (pool("conv", rows=1), pool("ssm", rows=1, width=33)))
    spec = ModelSpec("test/model", 4, (full, swa, mamba))
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def sealed(codec: ObjectCodec, component: Component, *, seed: int = 0, page: bytes = PAGE) -> bytearray:
    data = bytearray(random.Random(seed).randbytes(codec.size(component)))
    codec.seal(component, page, memoryview(data))
    return data


def verdict(codec: ObjectCodec, component: Component, data: bytearray | bytes, page: bytes = PAGE) -> Verdict:
    return codec.verify(component, page, memoryview(data), len(data))


@pytest.fixture(scope="module")
def codec() -> ObjectCodec:
    return ObjectCodec(model(), "tp0of2")


@pytest.mark.parametrize(
    ("component", "absent", "digest"),
    [
        (Component.FULL, (), "e4f8e52f66e58c5a"),
        (Component.FULL, ("indexer",), "c53244a649a1f2b4"),
        (Component.SWA, (), "aed50d4f68b75915"),
        (Component.MAMBA, (), "b9070193bd2e3e6a"),
    ],
)
def test_the_bytes_of_a_version_never_change(
    codec: ObjectCodec, component: Component, absent: tuple[str, ...], digest: str
) -> None:
    """What was stored before an upgrade would be refused. A new format takes a new VERSION and digests."""
    data = bytearray(codec.size(component, absent=absent))
    for view in codec.payload_views(component, memoryview(data), absent=absent):
        view[:] = bytes(i % 251 for i in range(len(view)))
    codec.seal(component, PAGE, memoryview(data), absent=absent)
    assert hashlib.sha256(data).hexdigest()[:16] == digest


@pytest.mark.parametrize("component", list(Component))
def test_what_was_filled_in_comes_back(codec: ObjectCodec, component: Component) -> None:
    """A hit would give other bytes than were computed."""
    data = bytearray(b"\xee" * codec.size(component))
    views = codec.payload_views(component, memoryview(data))
    pools = codec.spec[component].pools
    assert [len(view) for view in views] == [p.page_bytes for p in pools]
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * len(view)
    codec.seal(component, PAGE, memoryview(data))
    assert verdict(codec, component, data) is Verdict.OK
    again = codec.payload_views(component, memoryview(data))
    assert [bytes(view) for view in again] == [bytes([i + 1]) * p.page_bytes for i, p in enumerate(pools)]


def test_parts_are_aligned_and_never_overlap(codec: ObjectCodec) -> None:
    """Copies between pool and object would be slow, or overwrite each other."""
    data = bytearray(codec.size(Component.FULL))
    for i, view in enumerate(codec.payload_views(Component.FULL, memoryview(data))):
        view[:] = bytes([i + 1]) * len(view)
    starts = [data.index(i + 1) for i in range(3)]
    assert [start % ALIGNMENT for start in starts] == [0, 0, 0]
    assert [data.count(i + 1) for i in range(3)] == [p.page_bytes for p in codec.spec[Component.FULL].pools]


@pytest.mark.parametrize("component", list(Component))
def test_an_object_holds_nothing_of_what_its_buffer_held_before(
    codec: ObjectCodec, component: Component
) -> None:
    """Another tenant's bytes would lie between the parts, and equal pages would be different objects."""
    made = []
    for rest in (b"\x00", b"\xa5"):
        data = bytearray(rest * codec.size(component))
        for view in codec.payload_views(component, memoryview(data)):
            view[:] = b"\x11" * len(view)
        codec.seal(component, PAGE, memoryview(data))
        made.append(data)
    assert made[0] == made[1]


@pytest.mark.parametrize("component", list(Component))
def test_any_flipped_bit_is_seen(codec: ObjectCodec, component: Component) -> None:
    """Damaged KV would be served as a hit."""
    data = sealed(codec, component)
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert verdict(codec, component, data) is not Verdict.OK, f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8
    assert verdict(codec, component, data) is Verdict.OK


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_overwritten_span_is_seen(data: st.DataObject) -> None:
    """A torn write, whose head is new and whose tail is old, would be served as a hit."""
    codec = ObjectCodec(model(), "tp0of2")
    good, other = sealed(codec, Component.FULL), sealed(codec, Component.FULL, seed=1, page=bytes(32))
    start = data.draw(st.integers(0, len(good) - 1))
    end = data.draw(st.integers(start + 1, len(good)))
    torn = bytes(good[:start] + other[start:end] + good[end:])
    assert (verdict(codec, Component.FULL, torn) is Verdict.OK) == (torn == good)
    zeroed = bytes(good[:start] + bytes(end - start) + good[end:])
    assert (verdict(codec, Component.FULL, zeroed) is Verdict.OK) == (zeroed == good)


@given(st.integers(-2000, 2000))
def test_any_other_size_is_a_bad_size(change: int) -> None:
    """A truncated object would leave the end of the page as it was."""
    codec = ObjectCodec(model(), "tp0of2")
    data = bytes(sealed(codec, Component.FULL))
    resized = data[: max(0, len(data) + change)] + bytes(max(0, change))
    expected = Verdict.OK if change == 0 else Verdict.BAD_SIZE
    assert verdict(codec, Component.FULL, resized) is expected


def test_a_size_beyond_the_buffer_is_a_bad_size(codec: ObjectCodec) -> None:
    """A store's wrong answer would be read past the end of the host page."""
    data = memoryview(sealed(codec, Component.SWA))
    assert codec.verify(Component.SWA, PAGE, data[:-1], len(data)) is Verdict.BAD_SIZE
    assert codec.verify(Component.SWA, PAGE, data, -1) is Verdict.BAD_SIZE


def test_objects_of_others_are_told_apart(codec: ObjectCodec) -> None:
    """Weights, dtypes, ranks or pages mixed up under one key would be served as hits."""
    good = sealed(codec, Component.FULL)
    other_weights = ObjectCodec(model(weight_version="2"), "tp0of2")
    assert verdict(other_weights, Component.FULL, good) is Verdict.WRONG_MODEL
    assert verdict(ObjectCodec(model(), "tp1of2"), Component.FULL, good) is Verdict.WRONG_SHARD
    assert verdict(codec, Component.FULL, good, page=bytes(32)) is Verdict.WRONG_PAGE


def test_components_of_equal_size_are_told_apart() -> None:
    """An SWA page would be loaded as a FULL page."""
    components = (
        ComponentSpec(Component.FULL, (pool("full"),)),
        ComponentSpec(Component.SWA, (pool("swap"),), window=4),
    )
    codec = ObjectCodec(ModelSpec("m", 4, components), "s")
    assert codec.size(Component.FULL) == codec.size(Component.SWA)
    assert verdict(codec, Component.SWA, sealed(codec, Component.FULL)) is Verdict.WRONG_COMPONENT


def test_a_header_of_another_make_is_refused(codec: ObjectCodec) -> None:
    """After an upgrade old objects would be misread."""
    for at, expected in ((0, Verdict.BAD_MAGIC), (8, Verdict.BAD_VERSION), (12, Verdict.BAD_HEADER)):
        data = sealed(codec, Component.FULL)
        data[at] ^= 0x7F
        assert verdict(codec, Component.FULL, data) is expected
    data = sealed(codec, Component.FULL)
    data[-1] ^= 1
    assert verdict(codec, Component.FULL, data) is Verdict.BAD_PAYLOAD


def test_an_empty_part_is_said_and_checked(codec: ObjectCodec) -> None:
    """A page without sidecar rows would be taken for one whose rows were lost, or the reverse."""
    absent = ("indexer",)
    data = bytearray(codec.size(Component.FULL, absent=absent))
    assert len(data) < codec.size(Component.FULL)
    views = codec.payload_views(Component.FULL, memoryview(data), absent=absent)
    assert [len(view) for view in views] == [40, 0, 40]
    codec.seal(Component.FULL, PAGE, memoryview(data), absent=absent)
    assert codec.verify(Component.FULL, PAGE, memoryview(data), len(data), absent=absent) is Verdict.OK
    assert verdict(codec, Component.FULL, data) is Verdict.BAD_SIZE
    header = read_header(memoryview(data))
    assert isinstance(header, objects.Header)
    assert header.parts == (("kv", 40), ("indexer", 0), ("state", 40))
    with pytest.raises(ValueError, match="sidecars"):
        codec.size(Component.FULL, absent=("kv",))


def test_equal_sizes_with_other_parts_are_refused(codec: ObjectCodec) -> None:
    """Two sidecars would be loaded into each other's pools."""
    spec = model()
    full = dataclasses.replace(spec.components[0], pools=(pool("kv"), pool("aaa"), pool("bbb")))
    codec = ObjectCodec(dataclasses.replace(spec, components=(full, *spec.components[1:])), "s")
    data = bytearray(codec.size(Component.FULL, absent=("aaa",)))
    codec.seal(Component.FULL, PAGE, memoryview(data), absent=("aaa",))
    view = memoryview(data)
    assert codec.verify(Component.FULL, PAGE, view, len(data), absent=("bbb",)) is Verdict.WRONG_PARTS


def test_an_object_describes_itself(codec: ObjectCodec) -> None:
    """Nobody could say what lies in a store."""
    header = read_header(memoryview(sealed(codec, Component.MAMBA)))
    assert isinstance(header, objects.Header)
    assert (header.fingerprint, header.shard) == (codec.spec.fingerprint, "tp0of2")
    assert (header.component, header.page_hash) == (Component.MAMBA, PAGE)
    assert header.parts == (("conv", 10), ("ssm", 66))
    assert header.header_bytes + header.payload_bytes == codec.size(Component.MAMBA)


@given(st.binary(max_size=300), st.binary(max_size=110))
def test_any_bytes_can_be_looked_at(noise: bytes, table: bytes) -> None:
    """A foreign file in the store would crash a worker."""
    assert isinstance(read_header(memoryview(noise)), Verdict)
    head = bytes(sealed(ObjectCodec(model(), "s"), Component.SWA)[:88])
    body = (head + table).ljust(184, b"\0")[:184]
    body = body[:12] + (192).to_bytes(4, "little") + body[16:]
    assert read_header(memoryview(body + xxhash.xxh3_64_digest(body))) not in (
        Verdict.BAD_MAGIC,
        Verdict.BAD_VERSION,
        Verdict.BAD_SIZE,
    )


def test_a_buffer_of_the_wrong_length_is_refused(codec: ObjectCodec) -> None:
    """A header would be written over the neighbouring page."""
    buffer = memoryview(bytearray(codec.size(Component.FULL) + 1))
    with pytest.raises(ValueError, match="bytes"):
        codec.seal(Component.FULL, PAGE, buffer)
    with pytest.raises(ValueError, match="bytes"):
        codec.payload_views(Component.FULL, buffer)
    with pytest.raises(ValueError, match="page hash"):
        codec.seal(Component.FULL, b"", buffer[:-1])
