"""A real mooncake_master or segment owner dies, stops or comes back: calls end in time, bytes stay right."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.storage_backends.base import Reservation, WriteOutcome
from hicache.storage_backends.mooncake import MooncakeBackend, Options
from hicache.testing.backend_suite import pattern, read, reserve, write
from hicache.testing.services import MooncakeMaster, MooncakeOwner, mooncake_missing, patiently

pytestmark = pytest.mark.skipif(mooncake_missing() is not None, reason=str(mooncake_missing()))

TIMEOUT_S = 1.0
SLACK_S = 20.0  # on a busy machine; without our bound a stopped master holds a call for 30 s
PATIENCE_S = 60.0
PAGE = 50_000
SEGMENT_BYTES = 64 << 20


def options(master: MooncakeMaster, **more: object) -> Options:
    given: dict[str, object] = {
        "master_server_address": master.address,
        "master_metrics_port": master.metrics_port,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": 0,
        "staging_bytes": 16 << 20,
        "timeout_s": TIMEOUT_S,
    }
    return Options(**(given | more))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path, arguments=["--client_ttl=3"]) as master:
        yield master


@pytest.fixture
def owner(tmp_path: Path, master: MooncakeMaster) -> Iterator[MooncakeOwner]:
    with MooncakeOwner(tmp_path, master, segment_bytes=SEGMENT_BYTES) as owner:
        yield owner


@pytest.fixture
def backend(master: MooncakeMaster, owner: MooncakeOwner) -> Iterator[MooncakeBackend]:
    backend = MooncakeBackend.from_options(options(master))
    assert poll(lambda: works(backend, "warm"))
    yield backend
    backend.close()


def poll(condition: Callable[[], bool]) -> bool:
    """Return whether the condition holds within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


def works(backend: MooncakeBackend, key: str) -> bool:
    """Write one object and read it back, as traffic would; errors and refusals are a no."""
    try:
        if write(backend, {key: pattern(PAGE, 3)})[key] not in (WriteOutcome.STORED, WriteOutcome.EXISTS):
            return False
        return read(backend, [key], PAGE) == [pattern(PAGE, 3)]
    except BackendError:
        return False


def timed(call: Callable[[], object]) -> tuple[float, object]:
    started = time.monotonic()
    try:
        result = call()
    except BackendError as error:
        result = error
    return time.monotonic() - started, result


def every_call(backend: MooncakeBackend) -> list[Callable[[], object]]:
    return [
        lambda: backend.probe(["a"]),
        lambda: backend.read(["a"], [memoryview(bytearray(PAGE))]),
        lambda: backend.begin_write(["b"], [PAGE]),
        lambda: backend.touch(["a"]),
        lambda: backend.delete(["none"]),
        lambda: backend.clear("none"),
        backend.stats,
    ]


def test_a_killed_master_costs_no_waiting_and_its_successor_is_used(
    master: MooncakeMaster, backend: MooncakeBackend
) -> None:
    """Each call would hold a thread for 4 seconds, and a restart of the master need one of every engine."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    open_write = patiently(lambda: reserve(backend, "open", PAGE))
    master.kill()
    took, result = timed(lambda: backend.probe(["a"]))
    assert took < TIMEOUT_S + SLACK_S
    assert isinstance(result, BackendError)
    for call in [*every_call(backend), lambda: backend.commit([open_write])]:
        _, result = timed(call)
        assert isinstance(result, BackendUnavailable)  # refused: a call that was made would time out
    master.restart()
    assert poll(lambda: works(backend, "b"))
    assert backend.stats().details["staged_write_bytes"] == 0
    assert patiently(lambda: read(backend, ["a", "open"], PAGE)) == [None, None]


def test_traffic_over_a_kill_and_a_restart_of_the_master_sees_right_bytes_or_none(
    master: MooncakeMaster, backend: MooncakeBackend
) -> None:
    """Answers would be garbled by reads that failed and were taken for hits."""
    ended, slowest, verified, failures = threading.Event(), [0.0], [0], [0]

    def traffic(thread: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            key = f"{thread}/{turn % 50}"
            try:
                started = time.monotonic()
                write(backend, {key: pattern(PAGE, turn % 50)})
                (seen,) = read(backend, [key], PAGE)
            except BackendError:
                failures[0] += 1
                ended.wait(0.005)
            else:
                assert seen is None or seen == pattern(PAGE, turn % 50)
                verified[0] += seen is not None
            slowest[0] = max(slowest[0], time.monotonic() - started)

    threads = [threading.Thread(target=traffic, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert poll(lambda: verified[0] >= 50)
        master.kill()
        assert poll(lambda: failures[0] >= 10)
        master.restart()
        reached = verified[0] + 50
        assert poll(lambda: verified[0] >= reached)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert slowest[0] < 3 * TIMEOUT_S + SLACK_S  # probe, commit and read, each within its bound


def test_a_stopped_master_times_calls_out_in_their_bound_and_is_used_when_it_goes_on(
    master: MooncakeMaster, backend: MooncakeBackend
) -> None:
    """The master's port still accepts, so an engine without a bound would wait for 30 seconds or for ever."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    master.pause()
    buffer = bytearray(PAGE)
    took, result = timed(lambda: backend.read(["a"], [memoryview(buffer)]))
    assert isinstance(result, BackendTimeout)
    assert took < TIMEOUT_S + SLACK_S
    for call in every_call(backend):
        took, result = timed(call)
        assert isinstance(result, BackendError)
        assert took < TIMEOUT_S + SLACK_S
    master.resume()
    assert poll(lambda: works(backend, "b"))
    assert poll(lambda: backend.stats().details["calls_abandoned"] == 0)
    assert backend.stats().details["staged_read_bytes"] == 0
    assert buffer == bytes(PAGE)  # the late call has not written where nobody waits any more


def test_a_killed_owner_turns_its_objects_into_misses_and_another_takes_over(
    tmp_path: Path, master: MooncakeMaster, owner: MooncakeOwner, backend: MooncakeBackend
) -> None:
    """The master goes on saying that they exist; a read that failed must not count as a hit."""
    objects = {f"owned{i}": pattern(PAGE, i) for i in range(4)}
    patiently(lambda: write(backend, objects))
    owner.kill()
    buffers = [bytearray(PAGE) for _ in objects]
    took, result = timed(lambda: backend.read(list(objects), [memoryview(b) for b in buffers]))
    assert took < TIMEOUT_S + SLACK_S
    assert isinstance(result, BackendError) or result == [-1] * 4
    assert not any(map(any, buffers))
    with MooncakeOwner(tmp_path / "second", master, segment_bytes=SEGMENT_BYTES):
        assert poll(lambda: works(backend, f"new{time.monotonic_ns()}"))


def test_a_stopped_owner_is_bounded_and_leaves_other_memory_alone(
    owner: MooncakeOwner, backend: MooncakeBackend
) -> None:
    """A read would hang, and its bytes arrive in memory that another request owns by then."""
    patiently(lambda: write(backend, {"a": pattern(PAGE)}))
    owner.pause()
    buffer = bytearray(PAGE)
    took, result = timed(lambda: backend.read(["a"], [memoryview(buffer)]))
    assert took < TIMEOUT_S + SLACK_S
    assert isinstance(result, BackendTimeout) or result == [-1]
    owner.resume()
    assert poll(lambda: works(backend, f"again{time.monotonic_ns()}"))
    assert poll(lambda: backend.stats().details["staged_read_bytes"] == 0)
    assert buffer == bytes(PAGE)
    assert patiently(lambda: read(backend, ["a"], PAGE)) == [pattern(PAGE)]


def test_writing_beside_another_writer_is_not_reported_as_stored(
    master: MooncakeMaster, owner: MooncakeOwner
) -> None:
    """Mooncake answers 0 and stores nothing; the page would be believed to be in L3."""
    backend = MooncakeBackend.from_options(options(master, timeout_s=PATIENCE_S))
    raw = backend._link.connection().store
    assert raw.batch_put_session_start(["hicache/shared"], [PAGE]) == [0]
    assert backend.probe(["shared"]) == b"\x00"
    assert read(backend, ["shared"], PAGE) == [None]
    assert write(backend, {"shared": pattern(PAGE), "mine": pattern(PAGE, 1)}) == {
        "shared": WriteOutcome.BUSY,
        "mine": WriteOutcome.STORED,
    }
    assert backend.probe(["shared", "mine"]) == b"\x00\x01"
    assert raw.batch_put_session_revoke(["hicache/shared"]) == [0]
    assert write(backend, {"shared": pattern(PAGE)}) == {"shared": WriteOutcome.STORED}
    backend.close()


def test_a_master_that_comes_up_later_is_used_then(tmp_path: Path, master: MooncakeMaster) -> None:
    """The start order of two services would decide whether there is a cache."""
    master.kill()
    started = time.monotonic()
    backend = MooncakeBackend.from_options(options(master))
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    try:
        for call in every_call(backend):
            _, result = timed(call)
            assert isinstance(result, BackendUnavailable)
        master.restart()
        with MooncakeOwner(tmp_path / "late", master, segment_bytes=SEGMENT_BYTES):
            assert poll(lambda: works(backend, f"k{time.monotonic_ns()}"))
    finally:
        backend.close()


def test_without_any_segment_writes_are_refused_not_lost(master: MooncakeMaster) -> None:
    """Writes into a pool without memory would count as stored."""
    backend = MooncakeBackend.from_options(options(master, timeout_s=PATIENCE_S))
    try:
        (answer,) = backend.begin_write(["a"], [PAGE])
        assert isinstance(answer, Reservation)
        assert backend.commit([answer]) == [WriteOutcome.NO_SPACE]
        assert backend.probe(["a"]) == b"\x00"
    finally:
        backend.close()


PROGRAM = """
    import os, signal, sys, time
    from hicache.errors import BackendError, BackendUnavailable
    from hicache.storage_backends.mooncake import MooncakeBackend, Options

    backend = MooncakeBackend.from_options(Options(
        master_server_address=sys.argv[1], local_hostname="127.0.0.1", protocol="tcp",
        global_segment_size=0, staging_bytes=4 << 20, timeout_s=1.0))
    deadline = time.monotonic() + 60
    while True:  # on a busy machine the link may take longer than the bound of a call
        try:
            assert backend.probe(["a"]) == bytes(1)
            break
        except BackendError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
"""


def run_program(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=150, check=False
    )


def test_closing_while_a_call_hangs_neither_crashes_nor_hangs(master: MooncakeMaster) -> None:
    """Detaching a store that is down would end the engine with a segmentation fault."""
    ended = run_program(
        """
        os.kill(int(sys.argv[2]), signal.SIGSTOP)
        started = time.monotonic()
        try:
            backend.probe(["a"])
        except BackendError as error:
            print("probe", type(error).__name__)
        backend.close()
        try:
            backend.probe(["a"])
        except BackendUnavailable:
                print("closed", time.monotonic() - started < 25)
        os.kill(int(sys.argv[2]), signal.SIGCONT)
        """,
        master.address,
        str(master.pid),
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["probe", "BackendTimeout", "closed", "True"]


def test_a_forked_process_is_told_instead_of_hanging(master: MooncakeMaster) -> None:
    """A worker process made by fork would hang in its first call."""
    ended = run_program(
        """
        child = os.fork()
        if child == 0:
            try:
                backend.probe(["a"])
            except BackendUnavailable:
                os._exit(42)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        backend.close()
        """,
        master.address,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["42"]
