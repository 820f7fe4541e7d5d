"""How a daemon ends: what runs finishes, what begins is refused, and nothing hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.daemon.server import Drained
from hicache.errors import BackendUnavailable
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends.base import WriteOutcome
from hicache.testing.backend_suite import reserve
from hicache.testing.daemon import (
    BOUND_S,
    begin,
    connect,
    generated_client,
    hello,
    poll,
    present,
    running_daemon,
    status,
)


class Upload:
    """A daemon with one upload in flight, that sends its last byte when the gate opens."""

    def __init__(self, *, drain_seconds: float) -> None:
        self.gate = threading.Event()
        self._stack = contextlib.ExitStack()
        self.daemon = self._stack.enter_context(running_daemon(drain_seconds=drain_seconds))
        self.stub = self._stack.enter_context(generated_client(self.daemon.address))
        self._stack.callback(self.gate.set)
        self.session = hello(self.stub).session
        held = begin(self.stub, self.session, {"a": 3})
        first = pb.CommitRequest(session=self.session, reservations=held.reservations, sizes=[3], data=b"ab")
        self.call = self.stub.Commit.future(self._messages(first), timeout=2 * BOUND_S)
        poll(lambda: self.daemon.metrics.counters().get("hicache_daemon_received_bytes_total") == 2)

    def _messages(self, first: pb.CommitRequest) -> Iterator[pb.CommitRequest]:
        yield first
        self.gate.wait(BOUND_S)
        yield pb.CommitRequest(data=b"c", last=True)

    def drained_meanwhile(self) -> list[Drained]:
        """Begin to drain; the list gets what came of it."""
        drained: list[Drained] = []
        drain = threading.Thread(target=lambda: drained.append(self.daemon.drain()))
        self._stack.callback(drain.join, BOUND_S)
        self._stack.callback(self.gate.set)
        drain.start()
        poll(lambda: self.stats().draining)
        return drained

    def stats(self) -> pb.StatsReply:
        return self.stub.Stats(pb.StatsRequest(), timeout=BOUND_S)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def test_draining_lets_a_running_upload_finish() -> None:
    """A rolling restart would tear every write in flight."""
    with Upload(drain_seconds=BOUND_S) as upload:
        drained = upload.drained_meanwhile()
        upload.gate.set()
        assert list(upload.call.result(BOUND_S).outcomes) == [pb.WRITE_OUTCOME_STORED]
        poll(lambda: bool(drained))
        assert (drained[0].finished, drained[0].cut_off) == (1, 0)
        assert status(upload.stats) is grpc.StatusCode.UNAVAILABLE


def test_while_it_drains_new_calls_are_refused_at_once() -> None:
    """A replica that asks as the drain begins would hang until its end."""
    with Upload(drain_seconds=BOUND_S) as upload, grpc.insecure_channel(upload.daemon.address) as channel:
        upload.drained_meanwhile()
        stub = upload.stub
        with pytest.raises(grpc.RpcError, match="the daemon drains"):
            present(stub, upload.session, "a")
        for call in (
            lambda: hello(stub),
            lambda: begin(stub, upload.session, {"b": 3}),
            lambda: next(stub.Watch(pb.WatchRequest(), timeout=BOUND_S)),
            lambda: next(stub.Read(pb.ReadRequest(session=upload.session), timeout=BOUND_S)),
        ):
            assert status(call) is grpc.StatusCode.UNAVAILABLE
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        upload.gate.set()
        assert list(upload.call.result(BOUND_S).outcomes) == [pb.WRITE_OUTCOME_STORED]


@pytest.mark.parametrize("planes", ["inline", "shm,inline"])
def test_while_it_drains_a_write_that_has_begun_may_end_and_none_begins(planes: str) -> None:
    """A page that lies in the shared memory already would be lost for want of its last word."""
    with Upload(drain_seconds=BOUND_S) as upload:
        backend = connect(upload.daemon.address, data_planes=planes)
        held = reserve(backend, "b", 3)
        held.buffer[:] = b"abc"
        dropped = reserve(backend, "c", 3)
        upload.drained_meanwhile()
        assert backend.commit([held]) == [WriteOutcome.STORED]
        backend.abort([dropped])
        assert upload.stats().reservations == 1  # the upload's own
        with pytest.raises(BackendUnavailable, match="the daemon drains"):
            backend.probe(["b"])
        backend.close()


def test_draining_ends_in_time_and_says_what_it_cut_off() -> None:
    """A replica that hangs in a call would keep the daemon from ever restarting."""
    with Upload(drain_seconds=0.2) as upload:
        drained = upload.daemon.drain()
        assert (drained.finished, drained.cut_off) == (0, 1)
        assert drained.seconds < BOUND_S / 2
        assert upload.call.exception(BOUND_S) is not None


def test_draining_does_not_wait_for_watchers() -> None:
    """Every router and every health check connected would delay a restart by the whole drain time."""
    with running_daemon(drain_seconds=BOUND_S) as daemon, generated_client(daemon.address) as stub:
        events = stub.Watch(pb.WatchRequest())
        assert next(events).HasField("subscribed")
        with grpc.insecure_channel(daemon.address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(health).status == health_pb2.HealthCheckResponse.SERVING
            assert daemon.drain().seconds < BOUND_S / 2
        assert not list(events)
