"""Calls over a connected socket: turns, time-outs, and answers that nobody waits for any more."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import grpc
import pytest

from hicache.rpc import local, wire


@pytest.fixture
def ends() -> Iterator[tuple[local.Channel, local.Frames, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield local.Channel(ours), local.Frames(theirs), theirs
    for one in (ours, theirs):
        one.close()


def test_a_call_gets_its_own_answer_after_one_that_timed_out(
    ends: tuple[local.Channel, local.Frames, socket.socket],
) -> None:
    """After a slow call every later one would get the answer of the one before."""
    channel, server, _ = ends
    with pytest.raises(TimeoutError):
        channel.call("Probe", b"first", timeout_s=0.01)

    def serve() -> None:
        for _ in range(2):
            number, method, request = server.receive(timeout_s=60.0)
            server.send(number, 0, local.METHODS[method].encode() + request * 100_000)

    thread = threading.Thread(target=serve)
    thread.start()
    assert channel.call("Locate", b"second", timeout_s=60.0) == b"Locate" + b"second" * 100_000
    thread.join()


def test_a_status_is_raised_as_grpc_raises_it(
    ends: tuple[local.Channel, local.Frames, socket.socket],
) -> None:
    """A session that the daemon forgot would not be opened anew."""
    channel, server, _ = ends
    server.send(1, grpc.StatusCode.NOT_FOUND.value[0], b"say Hello")
    with pytest.raises(grpc.RpcError) as caught:
        channel.call("Probe", b"", timeout_s=60.0)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "say Hello")


@pytest.mark.parametrize("sent", [b"", b"\x01\x02", struct.pack("<IIB", wire.MAX_CONTROL_BYTES + 1, 1, 0)])
def test_an_end_or_nonsense_is_a_lost_channel_for_good(
    ends: tuple[local.Channel, local.Frames, socket.socket], sent: bytes
) -> None:
    """A client would wait for a daemon that is gone, or take its memory for a frame."""
    channel, _, theirs = ends
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    for _ in range(2):
        with pytest.raises(local.ChannelLost):
            channel.call("Probe", b"", timeout_s=60.0)
