"""Bulk data spliced by hand is the same protocol as the generated code's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.rpc import bulk, wire
from hicache.rpc.v1 import cache_pb2 as pb

small = st.integers(0, (1 << 63) - 1)
chunks = st.lists(st.binary(max_size=300), max_size=4)


@given(session=small, numbers=st.lists(small, max_size=5), parts=chunks)
def test_joined_messages_parse_as_the_generated_code_reads_them(
    session: int, numbers: list[int], parts: list[bytes]
) -> None:
    """A daemon in another language would read other bytes than were sent."""
    head = pb.CommitRequest(session=session, reservations=numbers, sizes=numbers)
    raw = wire.join_data(head.SerializeToString(), wire.COMMIT_DATA_FIELD, [memoryview(p) for p in parts])
    assert pb.CommitRequest.FromString(raw) == pb.CommitRequest(
        session=session, reservations=numbers, sizes=numbers, data=b"".join(parts)
    )


@given(sizes=st.lists(st.integers(-1, 1 << 60), max_size=5), data=st.binary(max_size=400))
def test_split_messages_are_what_the_generated_code_wrote(sizes: list[int], data: bytes) -> None:
    """Our client would misread a daemon in another language."""
    rest, found = wire.split_data(
        pb.ReadReply(sizes=sizes, data=data).SerializeToString(), wire.READ_DATA_FIELD
    )
    assert bytes(found) == data
    assert pb.ReadReply.FromString(rest) == pb.ReadReply(sizes=sizes)


@given(raw=st.binary(max_size=60))
def test_arbitrary_bytes_are_split_or_refused_and_nothing_else(raw: bytes) -> None:
    """A hostile message would raise something that no one expects, or loop."""
    try:
        rest, data = wire.split_data(raw, wire.READ_DATA_FIELD)
    except ValueError:
        return
    assert len(rest) + len(data) <= len(raw)


def test_unknown_fields_are_left_for_the_parser_to_skip() -> None:
    """A newer peer that adds a field would be refused."""
    raw = pb.ReadReply(sizes=[3], data=b"abc").SerializeToString() + b"\xf8\x07\x01"
    rest, data = wire.split_data(raw, wire.READ_DATA_FIELD)
    assert bytes(data) == b"abc"
    assert list(pb.ReadReply.FromString(rest).sizes) == [3]


objects = st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8)


@given(contents=objects, cut=st.integers(1, 120), room=st.integers(0, 60))
def test_a_read_comes_back_whole_however_it_is_cut(contents: list[bytes], cut: int, room: int) -> None:
    """A page would be shifted by a message boundary, or an object that does not fit would spill over."""
    fitting = [c for c in contents if len(c) <= room]
    stream = b"".join(fitting)
    messages = [pb.ReadReply(sizes=[len(c) for c in contents]).SerializeToString()]
    messages += [
        pb.ReadReply(data=stream[i : i + cut]).SerializeToString() for i in range(0, len(stream), cut)
    ]
    buffers = [bytearray(room) for _ in contents]
    sizes = bulk.receive(messages, [memoryview(b) for b in buffers])
    assert sizes == [len(c) for c in contents]
    for content, buffer in zip(contents, buffers, strict=True):
        expected = content if len(content) <= room else b""
        assert buffer == expected.ljust(room, b"\0")


@given(contents=objects, most=st.integers(1, 120))
def test_an_upload_is_the_objects_in_order_and_no_message_is_too_large(
    contents: list[bytes], most: int
) -> None:
    """The daemon would refuse the upload, or store pages that are shifted."""
    numbers = list(range(1, len(contents) + 1))
    views = [memoryview(c) for c in contents]
    sent = [pb.CommitRequest.FromString(m) for m in bulk.upload(7, numbers, views, max_message=most)]
    assert b"".join(m.data for m in sent) == b"".join(contents)
    assert all(0 < len(m.data) <= most for m in sent)
    assert [m.last for m in sent] == [False] * (len(sent) - 1) + [True]
    assert (sent[0].session, list(sent[0].reservations)) == (7, numbers)
    assert list(sent[0].sizes) == [len(c) for c in contents]
    assert not any(m.reservations or m.session for m in sent[1:])


@pytest.mark.parametrize(
    "replies",
    [
        [],
        [pb.ReadReply(sizes=[3])],
        [pb.ReadReply(sizes=[3, -1, 3], data=b"abc")],
        [pb.ReadReply(sizes=[3, -1], data=b"abcd")],
        [pb.ReadReply(sizes=[3, -1], data=b"ab")],
        [pb.ReadReply(sizes=[-1, -1], data=b"a")],
        [pb.ReadReply(data=b"abc"), pb.ReadReply(sizes=[3, -1])],
    ],
    ids=["nothing", "no data", "more sizes", "more data", "less data", "data of a miss", "data first"],
)
def test_a_daemon_that_contradicts_itself_is_found_out(replies: list[pb.ReadReply]) -> None:
    """Half a page would count as read."""
    buffers = [memoryview(bytearray(3)), memoryview(bytearray(3))]
    with pytest.raises(bulk.ProtocolViolation):
        bulk.receive([reply.SerializeToString() for reply in replies], buffers)


def test_bytes_that_are_no_message_are_found_out() -> None:
    """A damaged stream would crash the reader's thread."""
    with pytest.raises(bulk.ProtocolViolation, match="not a ReadReply"):
        bulk.receive([b"\xff\xff"], [memoryview(bytearray(3))])
