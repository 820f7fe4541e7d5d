"""What the daemon promises its clients, in this process over loopback."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hicache.clock import ManualClock
from hicache.daemon.server import Daemon
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.rpc.v1.cache_pb2_grpc import CacheStub
from hicache.storage_backends.base import StorageBackend, WriteOutcome
from hicache.testing.backend_suite import pattern, read, reserve, write
from hicache.testing.daemon import (
    begin,
    connect,
    generated_client,
    hello,
    poll,
    present,
    running_daemon,
    status,
)

BOUND_S = 60.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def stub(daemon: Daemon) -> Iterator[CacheStub]:
    with generated_client(daemon.address) as stub:
        yield stub


@pytest.fixture
def backend(daemon: Daemon) -> Iterator[StorageBackend]:
    backend = connect(daemon.address)
    yield backend
    backend.close()


class TestGeneratedClients:
    """A client in another language has the generated code and the comments of the proto, nothing else."""

    def test_write_and_read_with_the_generated_code(self, stub: CacheStub) -> None:
        """The hand-made splicing of bulk data would be a dialect that only our own client speaks."""
        session = hello(stub).session
        data = pattern(300_000)
        reserved = begin(stub, session, {"a": 300_000})
        assert list(reserved.outcomes) == [pb.WRITE_OUTCOME_RESERVED]
        messages = [pb.CommitRequest(session=session, reservations=reserved.reservations, sizes=[300_000])]
        messages += [pb.CommitRequest(data=data[i : i + 100_000]) for i in range(0, 300_000, 100_000)]
        messages += [pb.CommitRequest(last=True)]
        assert list(stub.Commit(iter(messages), timeout=BOUND_S).outcomes) == [pb.WRITE_OUTCOME_STORED]
        request = pb.ReadRequest(session=session, keys=["a", "b", "a"], limits=[300_000, 10, 299_999])
        replies = list(stub.Read(request, timeout=BOUND_S))
        assert [size for reply in replies for size in reply.sizes] == [300_000, -1, 300_000]
        assert b"".join(reply.data for reply in replies) == data

    def test_of_two_clients_racing_on_a_key_one_stores_it(self, stub: CacheStub) -> None:
        """Two replicas that compute the same prefix would both send it."""
        first, second = hello(stub, client_id="a").session, hello(stub, client_id="b").session
        won = begin(stub, first, {"k": 3})
        assert list(begin(stub, second, {"k": 3}).outcomes) == [pb.WRITE_OUTCOME_EXISTS]
        commit = pb.CommitRequest(
            session=first, reservations=won.reservations, sizes=[3], data=b"abc", last=True
        )
        assert list(stub.Commit(iter([commit]), timeout=BOUND_S).outcomes) == [pb.WRITE_OUTCOME_STORED]
        assert list(begin(stub, second, {"k": 3}).outcomes) == [pb.WRITE_OUTCOME_EXISTS]

    def test_a_session_may_not_commit_or_abort_anothers_reservation(self, stub: CacheStub) -> None:
        """A replica with a bug would publish bytes under a key that another is writing."""
        mine, other = hello(stub).session, hello(stub).session
        held = begin(stub, mine, {"k": 3})
        stub.Abort(pb.AbortRequest(session=other, reservations=held.reservations), timeout=BOUND_S)
        stolen = pb.CommitRequest(
            session=other, reservations=held.reservations, sizes=[3], data=b"bad", last=True
        )
        assert list(stub.Commit(iter([stolen]), timeout=BOUND_S).outcomes) == [pb.WRITE_OUTCOME_FAILED]
        assert present(stub, mine, "k") == [0]
        commit = pb.CommitRequest(
            session=mine, reservations=held.reservations, sizes=[3], data=b"abc", last=True
        )
        assert list(stub.Commit(iter([commit]), timeout=BOUND_S).outcomes) == [pb.WRITE_OUTCOME_STORED]


class TestHello:
    def test_versions_that_do_not_meet_are_refused_by_name(self, stub: CacheStub) -> None:
        """After half an upgrade replicas would misread each other's messages instead of failing."""
        with pytest.raises(grpc.RpcError, match="speaks protocol version 1, the client 2") as caught:
            hello(stub, protocol_version=2)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    def test_planes_it_does_not_know_are_skipped(self, stub: CacheStub) -> None:
        """A newer client that prefers a newer data plane could not talk to an older daemon."""
        request = pb.HelloRequest(protocol_version=1, data_planes=[77, pb.DATA_PLANE_INLINE])
        assert stub.Hello(request, timeout=BOUND_S).data_plane == pb.DATA_PLANE_INLINE
        only = pb.HelloRequest(protocol_version=1, data_planes=[77])
        assert status(lambda: stub.Hello(only, timeout=BOUND_S)) is grpc.StatusCode.FAILED_PRECONDITION

    def test_another_fingerprint_under_one_name_is_isolated_and_told(
        self, daemon: Daemon, stub: CacheStub, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After a change of weights a replica would load the old weights' KV, or silently share nothing."""
        with caplog.at_level(logging.WARNING):
            old, new = (connect(daemon.address, model_name="m", fingerprint=f) for f in ("old", "new"))
            assert "new is isolated from old under the same model name" in caplog.text
        assert hello(stub, model_name="m", model_fingerprint="new").other_fingerprints == ["old"]
        assert hello(stub, model_name="else", model_fingerprint="new").notice == ""
        for key in ("plain", "old/0/full/ab"):
            assert write(old, {key: b"old"}) == {key: WriteOutcome.STORED}
            assert new.probe([key]) == b"\x00"
            assert write(new, {key: b"new"}) == {key: WriteOutcome.STORED}
            assert (read(old, [key], 3), read(new, [key], 3)) == ([b"old"], [b"new"])
        assert new.clear("") == 2
        assert old.probe(["plain", "old/0/full/ab"]) == b"\x01\x01"
        for backend in (old, new):
            backend.close()

    def test_another_fingerprint_is_refused_only_if_the_client_asks(self, stub: CacheStub) -> None:
        """An operator who wants no L3 rather than a split one would have no way to say so."""
        hello(stub, model_name="m", model_fingerprint="a")
        refused = {"model_name": "m", "model_fingerprint": "b", "refuse_other_fingerprint": True}
        with pytest.raises(grpc.RpcError, match="b is isolated from a") as caught:
            hello(stub, **refused)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert hello(stub, **refused | {"model_fingerprint": "a"}).session

    def test_an_idle_session_ends_and_the_client_opens_another(self) -> None:
        """Replicas that came and went would fill the table, or a quiet one would lose L3 for good."""
        clock = ManualClock()
        with running_daemon(clock=clock, max_sessions=1) as daemon, generated_client(daemon.address) as stub:
            backend = connect(daemon.address)
            assert status(lambda: hello(stub)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            clock.advance(601.0)
            other = hello(stub).session
            clock.advance(601.0)
            assert backend.probe(["a"]) == b"\x00"
            assert status(lambda: present(stub, other, "a")) is grpc.StatusCode.NOT_FOUND
            backend.close()


class TestLeases:
    def test_what_a_probe_found_survives_a_flood_until_its_lease_ends(self) -> None:
        """Pages that a scheduler counted on would be gone when it reads them."""
        clock = ManualClock()
        settings = {"capacity": 10_000, "reservation_bytes": 10_000, "lease_seconds": 10.0}
        with running_daemon(clock=clock, **settings) as daemon:
            backend = connect(daemon.address)
            write(backend, {"a": pattern(1000), "b": pattern(1000)})
            assert backend.probe(["a"]) == b"\x01"
            write(backend, {f"flood{i}": pattern(1000) for i in range(9)})
            assert backend.probe(["a", "b"]) == b"\x01\x00"
            clock.advance(10.0)
            write(backend, {f"more{i}": pattern(1000) for i in range(10)})
            assert backend.probe(["a"]) == b"\x00"
            backend.close()

    def test_a_session_protects_no_more_than_its_share(self) -> None:
        """One replica that probes everything would freeze the store for all others."""
        clock = ManualClock()
        settings = {"capacity": 10_000, "reservation_bytes": 10_000, "lease_bytes": 2500}
        with running_daemon(clock=clock, **settings) as daemon, generated_client(daemon.address) as stub:
            backend = connect(daemon.address)
            keys = [f"k{i}" for i in range(9)]
            write(backend, {key: pattern(1000) for key in keys})
            session = hello(stub).session
            for _ in range(3):  # asking again renews, it does not use up the share
                assert present(stub, session, *keys) == [1] * 9
            write(backend, {f"flood{i}": pattern(1000) for i in range(8)})
            assert present(stub, session, *keys) == [1, 1] + [0] * 7
            backend.close()


class TestWrites:
    def test_a_reservation_left_alone_is_taken_back(self) -> None:
        """A replica that dies between reserving and writing would block its keys and room for good."""
        clock = ManualClock()
        with running_daemon(clock=clock, reservation_seconds=30.0) as daemon:
            left, other = (connect(daemon.address) for _ in range(2))
            reservation = reserve(left, "k", 1000)
            clock.advance(29.0)
            daemon.housekeep()
            assert other.begin_write(["k"], [1000]) == [WriteOutcome.EXISTS]
            clock.advance(1.0)
            daemon.housekeep()
            assert write(other, {"k": pattern(1000)}) == {"k": WriteOutcome.STORED}
            assert left.commit([reservation]) == [WriteOutcome.FAILED]
            for backend in (left, other):
                backend.close()

    def test_a_stream_that_breaks_leaves_nothing_visible(self, stub: CacheStub) -> None:
        """A replica killed in mid-write would leave half a page, or a whole one of a torn batch."""
        session = hello(stub).session
        held = begin(stub, session, {"a": 3, "b": 3})
        broken = threading.Event()
        received = lambda: stats_of(stub).counters["hicache_daemon_received_bytes_total"]  # noqa: E731
        before = received()

        def messages() -> Iterator[pb.CommitRequest]:
            yield pb.CommitRequest(
                session=session, reservations=held.reservations, sizes=[3, 3], data=b"abcxyz"
            )
            broken.wait(BOUND_S)

        call = stub.Commit.future(messages(), timeout=BOUND_S)
        poll(lambda: received() == before + 6)
        assert stats_of(stub).reservations == 2
        call.cancel()
        broken.set()
        poll(lambda: stats_of(stub).reservations == 0)
        assert present(stub, session, "a", "b") == [0, 0]
        assert list(begin(stub, session, {"a": 3}).outcomes) == [pb.WRITE_OUTCOME_RESERVED]

    def test_an_upload_that_stands_still_is_stopped(self) -> None:
        """A replica stopped in mid-write would hold a thread of the daemon and its room for good."""
        clock = ManualClock()
        with (
            running_daemon(clock=clock, reservation_seconds=30.0) as daemon,
            generated_client(daemon.address) as stub,
        ):
            session = hello(stub).session
            held = begin(stub, session, {"a": 3})
            first = pb.CommitRequest(session=session, reservations=held.reservations, sizes=[3], data=b"a")
            gate = threading.Event()

            def messages() -> Iterator[pb.CommitRequest]:
                yield first
                gate.wait(BOUND_S)

            call = stub.Commit.future(messages(), timeout=BOUND_S)
            poll(lambda: daemon.metrics.counters().get("hicache_daemon_received_bytes_total") == 1)

            def stopped() -> bool:  # its progress may be noted after it was counted
                clock.advance(30.0)
                daemon.housekeep()
                return call.done()

            poll(stopped)
            with pytest.raises(grpc.RpcError):
                call.result(BOUND_S)
            gate.set()
            another = hello(stub).session
            poll(lambda: list(begin(stub, another, {"a": 3}).outcomes) == [pb.WRITE_OUTCOME_RESERVED])

    def test_a_session_reserves_no_more_than_its_share(self) -> None:
        """One replica that reserves and never writes would evict everybody's objects for nothing."""
        with running_daemon(capacity=10_000) as daemon, generated_client(daemon.address) as stub:
            session = hello(stub).session
            outcomes = list(begin(stub, session, {f"k{i}": 1000 for i in range(6)}).outcomes)
            assert outcomes == [pb.WRITE_OUTCOME_RESERVED] * 5 + [pb.WRITE_OUTCOME_NO_SPACE]
            assert list(begin(stub, hello(stub).session, {"x": 1000}).outcomes) == [pb.WRITE_OUTCOME_RESERVED]


class TestWatch:
    def test_it_tells_what_was_stored_and_why_it_went(self) -> None:
        """A router would send requests to a replica whose prefix has gone."""
        settings = {"capacity": 10_000, "reservation_bytes": 10_000, "lease_seconds": 0.0}
        with running_daemon(**settings) as daemon, generated_client(daemon.address) as stub:
            backend = connect(daemon.address, fingerprint="f")
            events = stub.Watch(pb.WatchRequest(session=hello(stub, model_fingerprint="f").session))
            assert next(events).subscribed.epoch == daemon.epoch
            write(backend, {"a": pattern(6000)})
            write(backend, {"b": pattern(6000)})
            backend.delete(["b", "none"])
            backend.clear("x/")
            seen = changes(events, 5)
            stored, removed = pb.Change.KIND_STORED, pb.Change.KIND_REMOVED
            assert [(c.kind, c.reason, c.key, c.size_bytes) for c in seen[:4]] == [
                (stored, 0, "a", 6000),
                (removed, pb.REMOVAL_REASON_EVICTED, "a", 6000),
                (stored, 0, "b", 6000),
                (removed, pb.REMOVAL_REASON_DELETED, "b", 6000),
            ]
            assert (seen[4].reason, seen[4].key) == (pb.REMOVAL_REASON_CLEARED, "x/")
            events.cancel()
            backend.close()

    def test_a_session_hears_of_its_own_model_and_prefix_only(self, stub: CacheStub, daemon: Daemon) -> None:
        """A router of one model would act on another's keys."""
        mine, others = (connect(daemon.address, fingerprint=f) for f in ("mine", "others"))
        session = hello(stub, model_fingerprint="mine").session
        events = stub.Watch(pb.WatchRequest(session=session, prefix="p/"))
        everything = stub.Watch(pb.WatchRequest())
        for stream in (events, everything):
            assert next(stream).HasField("subscribed")
        for backend in (others, mine):
            write(backend, {"p/1": b"1", "q/1": b"1"})
        assert [c.key for c in changes(events, 1)] == ["p/1"]
        names = [c.key for c in changes(everything, 4)]
        assert len(set(names)) == 4
        assert all(name.startswith("~") for name in names)
        for closed in (mine, others):
            closed.close()
        for stream in (events, everything):
            stream.cancel()

    def test_a_clear_of_another_model_is_not_told(self, stub: CacheStub, daemon: Daemon) -> None:
        """A router would forget every replica's pages because one model was cleared."""
        others = connect(daemon.address, fingerprint="others")
        for session in (hello(stub).session, hello(stub, model_fingerprint="mine").session):
            backend = connect(daemon.address, fingerprint="mine")
            events = stub.Watch(pb.WatchRequest(session=session))
            assert next(events).HasField("subscribed")
            others.clear("others/")
            backend.clear("mine/")
            told = [c.key for c in changes(events, 1) if c.reason == pb.REMOVAL_REASON_CLEARED]
            assert "" not in told
            events.cancel()
            backend.close()
        others.close()

    def test_a_watcher_that_lags_is_told_what_it_lost(self) -> None:
        """A router would take a picture with holes for the whole one."""
        with running_daemon(watch_queue=1) as daemon, generated_client(daemon.address) as stub:
            backend = connect(daemon.address)
            events = stub.Watch(pb.WatchRequest())
            assert next(events).HasField("subscribed")
            write(backend, {key: b"1" for key in "abc"})  # told at once, and only one has room
            assert len(next(events).changes.changes) == 1
            assert next(events).lost.changes == 2
            write(backend, {"d": b"1"})
            assert [change.key for change in changes(events, 1)] == ["d"]
            events.cancel()
            backend.close()

    def test_watchers_above_the_limit_are_pushed_back_and_leave_no_trace(self) -> None:
        """Watchers would take every thread of the daemon, or its places would run out with time."""
        with running_daemon(max_watchers=1) as daemon, generated_client(daemon.address) as stub:
            for _ in range(3):
                first = stub.Watch(pb.WatchRequest())
                assert next(first).HasField("subscribed")
                second = stub.Watch(pb.WatchRequest())
                assert status(lambda call=second: next(call)) is grpc.StatusCode.RESOURCE_EXHAUSTED
                first.cancel()
                poll(lambda: stub.Stats(pb.StatsRequest(), timeout=BOUND_S).watchers == 0)


class TestOperation:
    def test_health_answers_and_says_when_it_drains(self) -> None:
        """Kubernetes would send traffic to a daemon that is going away."""
        with running_daemon() as daemon, grpc.insecure_channel(daemon.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "hicache.v1.Cache"):
                request = health_pb2.HealthCheckRequest(service=name)
                assert health.Check(request, timeout=BOUND_S).status == health_pb2.HealthCheckResponse.SERVING
            updates = health.Watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
            assert next(updates).status == health_pb2.HealthCheckResponse.SERVING
            drain = threading.Thread(target=daemon.drain)
            drain.start()
            assert next(updates).status == health_pb2.HealthCheckResponse.NOT_SERVING
            updates.cancel()
            drain.join(BOUND_S)
            assert not drain.is_alive()

    def test_reflection_lists_the_services(self, daemon: Daemon) -> None:
        """grpcurl could not list or call anything without our proto file."""
        with grpc.insecure_channel(daemon.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=BOUND_S)
        names = {service.name for service in reply.list_services_response.service}
        assert {"hicache.v1.Cache", "grpc.health.v1.Health"} <= names

    @pytest.mark.parametrize(
        ("planes", "attached", "write_call"), [("inline", 0, "Commit"), ("shm,inline", 1, "Publish")]
    )
    def test_metrics_count_what_clients_did(self, planes: str, attached: int, write_call: str) -> None:
        """An operator would see a flat line while the store is evicting everything."""
        with running_daemon(metrics_port=0) as daemon:
            backend = connect(daemon.address, data_planes=planes)
            write(backend, {"a": pattern(1000)})
            backend.probe(["a", "b"])
            read(backend, ["a"], 1000)
            url = f"http://127.0.0.1:{daemon.metrics_port}/metrics"
            with urllib.request.urlopen(url, timeout=BOUND_S) as reply:
                text = reply.read().decode()
            for line in (
                'hicache_daemon_keys_total{operation="probe",outcome="hit"} 1.0',
                'hicache_daemon_keys_total{operation="probe",outcome="miss"} 1.0',
                'hicache_daemon_keys_total{operation="write",outcome="stored"} 1.0',
                "hicache_daemon_sent_bytes_total 1000.0",
                "hicache_daemon_received_bytes_total 1000.0",
                f'hicache_daemon_calls_total{{code="OK",method="{write_call}"}} 1.0',
                f"hicache_daemon_attached {attached}.0",
                'hicache_daemon_changes_total{kind="stored"} 1.0',
                "hicache_daemon_objects 1.0",
                "hicache_daemon_used_bytes 1000.0",
                "hicache_daemon_sessions 1.0",
                "hicache_daemon_reservations 0.0",
            ):
                assert line in text.splitlines()
            backend.close()

    def test_calls_above_the_limit_are_pushed_back(self) -> None:
        """A burst would pile up in the daemon's memory until it dies."""
        settings = {"max_calls": 1, "max_watchers": 1, "max_waiting": 1}
        with running_daemon(**settings) as daemon, generated_client(daemon.address) as stub:
            gate = threading.Event()

            def messages() -> Iterator[pb.CommitRequest]:
                gate.wait(BOUND_S)
                yield pb.CommitRequest(session=1)

            calls = [stub.Commit.future(messages(), timeout=BOUND_S) for _ in range(3)]
            poll(lambda: pushed_back(lambda: stub.Stats(pb.StatsRequest(), timeout=0.5)))
            gate.set()
            codes = {call.exception(BOUND_S).code() for call in calls}
            assert grpc.StatusCode.NOT_FOUND in codes
            assert codes <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
            poll(lambda: not pushed_back(lambda: stats_of(stub)))


def changes(events: Iterator[pb.WatchReply], count: int) -> list[pb.Change]:
    seen: list[pb.Change] = []
    while len(seen) < count:
        seen += next(events).changes.changes
    return seen


def stats_of(stub: CacheStub) -> pb.StatsReply:
    return stub.Stats(pb.StatsRequest(), timeout=BOUND_S)


def pushed_back(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return False
