"""What no client should send, and what the daemon answers; it serves on whatever comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
import pytest

from hicache.daemon.server import Daemon
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.rpc.v1.cache_pb2_grpc import CacheStub
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.daemon import begin, generated_client, hello, present, running_daemon, status

BOUND_S = 60.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[CacheStub]:
    with generated_client(daemon.address) as stub:
        yield stub


@pytest.mark.parametrize(
    "name", ["Hello", "Probe", "Read", "BeginWrite", "Commit", "Abort", "Clear", "Stats"]
)
@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x07", b"\x22\x05ab", b"\x0c"])
def test_bytes_that_are_no_message_get_a_status(daemon: Daemon, name: str, raw: bytes) -> None:
    """A scanner or a corrupted client would crash the daemon for every replica."""
    with grpc.insecure_channel(daemon.address) as channel:
        kind = {"Read": channel.unary_stream, "Commit": channel.stream_unary}.get(name, channel.unary_unary)
        call = kind(f"/hicache.v1.Cache/{name}")
        sent = iter([raw]) if name == "Commit" else raw
        with pytest.raises(grpc.RpcError) as caught:
            list(call(sent, timeout=BOUND_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with generated_client(daemon.address) as stub:
        assert hello(stub).session


@pytest.mark.parametrize(
    "key", ["", "k" * 201, "a b", "a\nb", "\x00", "~0123456789abcdef/k", "ключ"], ids=repr
)
def test_keys_that_no_backend_takes_are_refused(stub: CacheStub, key: str) -> None:
    """A key with a blank, or one that names another model's objects, would reach the store."""
    session = hello(stub).session
    for call in (
        lambda: present(stub, session, key),
        lambda: begin(stub, session, {key: 3}),
        lambda: list(stub.Read(pb.ReadRequest(session=session, keys=[key], limits=[1]), timeout=BOUND_S)),
        lambda: stub.Delete(pb.DeleteRequest(session=session, keys=[key]), timeout=BOUND_S),
    ):
        assert status(call) is grpc.StatusCode.INVALID_ARGUMENT


def test_lists_that_do_not_match_are_refused(stub: CacheStub) -> None:
    """Keys would be paired with other keys' sizes."""
    session = hello(stub).session
    keys = ["a", "b"]
    for call in (
        lambda: list(stub.Read(pb.ReadRequest(session=session, keys=keys, limits=[1]), timeout=BOUND_S)),
        lambda: stub.BeginWrite(pb.BeginWriteRequest(session=session, keys=keys, sizes=[1]), timeout=BOUND_S),
        lambda: begin(stub, session, {"a": 0}),
        lambda: begin(stub, session, {"a": 1 << 62}),
        lambda: present(stub, session, *["k"] * 4097),
        lambda: stub.Clear(pb.ClearRequest(prefix="a"), timeout=BOUND_S),
    ):
        assert status(call) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("sizes", "rest", "data"),
    [
        ([3], [], b"ab"),
        ([3], [], b"abcd"),
        ([2], [], b"ab"),
        ([3, 3], [], b"abc"),
        ([3], [pb.CommitRequest(sizes=[3], data=b"c", last=True)], b"ab"),
    ],
    ids=["short", "long", "not the reserved size", "more sizes than reservations", "a second header"],
)
def test_an_upload_that_contradicts_itself_leaves_nothing(
    stub: CacheStub, sizes: list[int], rest: list[pb.CommitRequest], data: bytes
) -> None:
    """A writer with a bug would publish a page with a hole."""
    session = hello(stub).session
    held = begin(stub, session, {"a": 3})
    first = pb.CommitRequest(
        session=session, reservations=held.reservations, sizes=sizes, data=data, last=not rest
    )
    call = lambda: stub.Commit(iter([first, *rest]), timeout=BOUND_S)  # noqa: E731
    assert status(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert present(stub, session, "a") == [0]


def test_an_upload_that_ends_without_saying_so_leaves_nothing(stub: CacheStub) -> None:
    """A killed client's stream looks as if it had ended; its objects would be stored without its word."""
    session = hello(stub).session
    held = begin(stub, session, {"a": 3})
    all_there = pb.CommitRequest(session=session, reservations=held.reservations, sizes=[3], data=b"abc")
    assert status(lambda: stub.Commit(iter([all_there]), timeout=BOUND_S)) is grpc.StatusCode.CANCELLED
    assert present(stub, session, "a") == [0]
    assert list(begin(stub, session, {"a": 3}).outcomes) == [pb.WRITE_OUTCOME_RESERVED]


def test_a_session_it_never_gave_is_not_found(stub: CacheStub) -> None:
    """A replica of a daemon that restarted could not tell a miss from a lost session."""
    for call in (
        lambda: present(stub, 12345, "a"),
        lambda: present(stub, 0, "a"),
        lambda: begin(stub, 12345, {"a": 1}),
        lambda: stub.Commit(iter([pb.CommitRequest(session=12345)]), timeout=BOUND_S),
    ):
        assert status(call) is grpc.StatusCode.NOT_FOUND


def test_a_message_above_the_limit_is_pushed_back(daemon: Daemon, stub: CacheStub) -> None:
    """One message could take all the daemon's memory."""
    request = pb.ProbeRequest(session=hello(stub).session, keys=["k" * (4 << 20)])
    assert status(lambda: stub.Probe(request, timeout=BOUND_S)) is grpc.StatusCode.RESOURCE_EXHAUSTED


class _Broken(MemoryBackend):
    """A store with a bug."""

    def probe(self, keys: Sequence[str]) -> bytes:
        raise RuntimeError("a bug in the store")


def test_a_bug_costs_one_call_and_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """One bad call would take the daemon down for every replica, or leave nothing to find it by."""
    with (
        running_daemon(backend=_Broken(capacity_bytes=1 << 20)) as daemon,
        generated_client(daemon.address) as stub,
    ):
        session = hello(stub).session
        assert status(lambda: present(stub, session, "a")) is grpc.StatusCode.INTERNAL
        assert "a bug in the store" in caplog.text
        assert "Traceback" in caplog.text
        assert list(begin(stub, session, {"a": 3}).outcomes) == [pb.WRITE_OUTCOME_RESERVED]


def test_a_store_that_is_away_is_a_status_and_not_a_miss() -> None:
    """Replicas would take an outage of the store for an empty one and store everything again."""
    backend = MemoryBackend(capacity_bytes=1 << 20)
    with running_daemon(backend=backend) as daemon, generated_client(daemon.address) as stub:
        session = hello(stub).session
        backend.close()
        assert status(lambda: present(stub, session, "a")) is grpc.StatusCode.UNAVAILABLE
