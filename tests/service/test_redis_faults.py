"""A real redis-server dies, stops, comes back or is slow: calls end in time, bytes stay right."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.storage_backends.base import WriteOutcome
from hicache.storage_backends.redis import Options, RedisBackend
from hicache.testing.backend_suite import pattern, read, reserve, write
from hicache.testing.services import RedisServer, patiently, redis_missing

pytestmark = pytest.mark.skipif(redis_missing() is not None, reason=str(redis_missing()))

TIMEOUT_S = 0.5
SLACK_S = 20.0  # on a busy machine; without our bound a stopped server holds a call for ever
PATIENCE_S = 60.0
PAGE = 50_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def backend(server: RedisServer) -> Iterator[RedisBackend]:
    backend = RedisBackend.from_options(
        Options(url=server.url, timeout_s=TIMEOUT_S, clear_timeout_s=TIMEOUT_S)
    )
    yield backend
    backend.close()


def every_call(backend: RedisBackend) -> list[Callable[[], object]]:
    return [
        lambda: backend.probe(["a"]),
        lambda: backend.read(["a"], [memoryview(bytearray(PAGE))]),
        lambda: backend.begin_write(["b"], [PAGE]),
        lambda: backend.touch(["a"]),
        lambda: backend.delete(["none"]),
        lambda: backend.clear("none"),
        backend.stats,
    ]


def comes_back(backend: RedisBackend, key: str) -> bool:
    """Write and read until it works, as traffic would; return whether it did in time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            outcome = write(backend, {key: pattern(PAGE, 3)})[key]
            there = outcome in (WriteOutcome.STORED, WriteOutcome.EXISTS)  # EXISTS: the answer came too late
            return there and read(backend, [key], PAGE) == [pattern(PAGE, 3)]
        except BackendError:
            threading.Event().wait(0.02)
    return False


def test_a_killed_server_fails_calls_at_once_and_serves_again_after_its_restart(
    server: RedisServer, backend: RedisBackend
) -> None:
    """A restart of Redis would need a restart of every engine."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    open_write = patiently(lambda: reserve(backend, "open", PAGE))
    server.kill()
    for call in every_call(backend):
        started = time.monotonic()
        with pytest.raises(BackendError):
            call()
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    with pytest.raises(BackendError):
        backend.commit([open_write])
    server.restart()
    assert comes_back(backend, "b")
    assert patiently(lambda: read(backend, ["a", "open"], PAGE)) == [None, None]
    assert patiently(backend.stats).details["staged_bytes"] == 0


def test_traffic_over_a_kill_and_a_restart_sees_right_bytes_or_none(
    server: RedisServer, backend: RedisBackend
) -> None:
    """A reply cut by the crash would be served as KV."""
    ended, slowest, verified, failures = threading.Event(), [0.0], [0], [0]

    def traffic(thread: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            key = f"{thread}/{turn % 20}"
            started = time.monotonic()
            try:
                write(backend, {key: pattern(PAGE, turn % 20)})
                (seen,) = read(backend, [key], PAGE)
            except BackendError:
                failures[0] += 1
            else:
                assert seen is None or seen == pattern(PAGE, turn % 20)
                verified[0] += seen is not None
            slowest[0] = max(slowest[0], time.monotonic() - started)

    threads = [threading.Thread(target=traffic, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            reached = verified[0] + 40
            assert poll(lambda reached=reached: verified[0] >= reached)
            server.kill()
            failed = failures[0] + 4
            assert poll(lambda failed=failed: failures[0] >= failed)
            server.restart()
        reached = verified[0] + 40
        assert poll(lambda: verified[0] >= reached)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert slowest[0] < 3 * TIMEOUT_S + SLACK_S  # probe, commit and read, each within its bound


def test_a_stopped_server_times_every_call_out_in_its_bound(
    server: RedisServer, backend: RedisBackend
) -> None:
    """The server's port still accepts, so an engine without a bound would wait for ever."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    server.pause()
    for call in every_call(backend):
        started = time.monotonic()
        with pytest.raises((BackendTimeout, BackendUnavailable)):
            call()
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    server.resume()
    assert comes_back(backend, "b")
    assert patiently(lambda: read(backend, ["a"], PAGE)) == [pattern(PAGE)]


def test_a_read_given_up_never_touches_its_buffer_again(server: RedisServer, backend: RedisBackend) -> None:
    """The host page, by then another request's, would be overwritten by a late reply."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    server.pause()
    buffer = bytearray(PAGE)
    with pytest.raises(BackendTimeout):
        backend.read(["a"], [memoryview(buffer)])
    server.resume()
    assert comes_back(backend, "x")
    assert poll(lambda: patiently(backend.stats).details["calls_abandoned"] == 0)
    assert buffer == bytes(PAGE)


def test_a_commit_given_up_leaves_the_object_whole_or_absent(
    server: RedisServer, backend: RedisBackend
) -> None:
    """A write cut by its time-out would be visible in part."""
    patiently(lambda: write(backend, {"warm": pattern(10)}))
    answer = patiently(lambda: reserve(backend, "cut", PAGE))
    answer.buffer[:] = pattern(PAGE, 5)
    server.pause()
    with pytest.raises(BackendTimeout):
        backend.commit([answer])
    server.resume()
    assert comes_back(backend, "after")
    assert patiently(lambda: read(backend, ["cut"], PAGE)) in ([None], [pattern(PAGE, 5)])


def test_a_server_that_comes_up_later_is_used_then(tmp_path: Path, server: RedisServer) -> None:
    """The start order of two services would decide whether there is a cache."""
    server.kill()
    backend = RedisBackend.from_options(Options(url=server.url, timeout_s=TIMEOUT_S))
    try:
        with pytest.raises(BackendError):
            backend.probe(["a"])
        server.restart()
        assert comes_back(backend, "a")
    finally:
        backend.close()


def test_a_cluster_found_later_is_an_outage(tmp_path: Path) -> None:
    """Configuration errors in the middle of serving would end the engine."""
    server = RedisServer(tmp_path, arguments=["--cluster-enabled", "yes"]).start()
    server.kill()
    backend = RedisBackend.from_options(Options(url=server.url, timeout_s=TIMEOUT_S))
    try:
        server.restart()
        assert poll(lambda: "Redis Cluster" in refusal(backend))
    finally:
        backend.close()
        server.kill()


def test_a_reply_that_trickles_is_cut_at_the_bound() -> None:
    """Each byte resets a socket's time-out, so a slow link would hold a request for minutes."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while not ended.wait(TIMEOUT_S / 10):
                    try:
                        connection.sendall(b"$")  # the start of a length that never ends
                    except OSError:
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        started = time.monotonic()
        backend = RedisBackend.from_options(
            Options(url=f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=TIMEOUT_S)
        )
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S
        assert backend._calls.abandoned == 1  # the socket's own time-out has not ended it
        ended.set()
        thread.join(PATIENCE_S)
        backend.close()


def refusal(backend: RedisBackend) -> str:
    """What a probe is told; nothing if it is answered, or its time is up."""
    try:
        backend.probe(["a"])
    except BackendUnavailable as error:
        return str(error)
    except BackendTimeout:
        pass
    return ""


def poll(condition: Callable[[], bool]) -> bool:
    """Return whether the condition holds within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.01)
    return True
