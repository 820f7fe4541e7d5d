"""Pins of conversations by the clock, and their bound; what a store does with them is in session_suite."""

from __future__ import annotations

import pytest

from hicache.clock import ManualClock
from hicache.daemon.server import Daemon
from hicache.registry import create_backend
from hicache.storage_backends.base import HoldsSessions, Reservation, StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.storage_backends.pins import Pins
from hicache.testing.daemon import running_daemon

SIZE = 1000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryBackend:
    return MemoryBackend(capacity_bytes=10 * SIZE, lease_s=0.0, clock=clock)


def put(store: StorageBackend, *keys: str) -> None:
    for key in keys:
        (answer,) = store.begin_write([key], [SIZE])
        assert isinstance(answer, Reservation), answer
        answer.buffer[:] = key.encode().ljust(SIZE)
        store.commit([answer])


def there(store: StorageBackend, *keys: str) -> list[int]:
    sizes = store.read(list(keys), [memoryview(bytearray(SIZE)) for _ in keys])
    return [int(size == SIZE) for size in sizes]


def flood(store: StorageBackend, mark: str, count: int = 30) -> None:
    put(store, *(f"{mark}{i}" for i in range(count)))


def test_shared_objects_stay_for_the_other_session_and_times_run_out(
    store: MemoryBackend, clock: ManualClock
) -> None:
    """One goodbye would cost another user the common prompt; one that never comes would keep it for ever."""
    put(store, "shared", "mine")
    store.pin("one", ["shared", "mine"], 60.0)
    store.pin("two", ["shared"], 10.0)
    store.close_session("one")
    flood(store, "x")
    assert there(store, "shared", "mine") == [1, 0]
    clock.advance(11.0)  # nobody asks for statistics, or pins anything
    flood(store, "y")
    assert there(store, "shared") == [0]
    assert store.stats().details["pinned_keys"] == 0


def test_pins_are_bounded_by_ending_the_session_heard_of_least_recently() -> None:
    """A client that pins without end would fill the daemon's memory."""
    pins = Pins(most_keys=10)
    for number in range(100):
        pins.pin(f"s{number}", [f"k{number}-{i}" for i in range(3)], 1e9)
    assert pins.total <= 10
    assert "k99-0" in pins
    assert "k0-0" not in pins
    assert pins.pin("huge", [f"h{i}" for i in range(50)], 1e9)
    assert (pins.total, len(pins)) == (0, 0)


def test_a_session_lasts_as_long_as_was_said_last() -> None:
    """One that goes on would lose its pages after its first time-out; one cut short would keep them."""
    pins = Pins()
    for session, ends in (("longer", (10.0, 30.0)), ("shorter", (30.0, 10.0)), ("again", (10.0,))):
        for end in ends:
            pins.pin(session, [session], end)
    pins.close("again")
    pins.pin("again", ["again"], 20.0)
    gone = {now: sorted(pins.expire(now)) for now in (9.9, 10.0, 19.9, 20.0, 29.9, 30.0)}
    assert gone == {9.9: [], 10.0: ["shorter"], 19.9: [], 20.0: ["again"], 29.9: [], 30.0: ["longer"]}
    assert (len(pins), pins.total, pins.expire(1e9)) == (0, 0, [])


def test_what_another_session_pins_too_is_not_let_go() -> None:
    """Two sessions that end at once, and a third that shares a prompt with them."""
    pins = Pins()
    for session in "ab":
        pins.pin(session, ["shared", session, "both"], 10.0)
    pins.pin("c", ["shared"], 20.0)
    assert sorted(pins.expire(10.0)) == ["a", "b", "both"]
    assert "shared" in pins


def test_a_daemon_keeps_what_its_clients_pin() -> None:
    """Pins would end at the client, and the shared tier would evict as if nobody had said anything."""
    with running_daemon(capacity="16KiB", lease_seconds=0.001) as daemon:
        backend = client_of(daemon)
        assert isinstance(backend, HoldsSessions)
        put(backend, "a", "b")
        backend.pin("s", ["a"], 60.0)
        flood(backend, "x")
        assert there(backend, "a", "b") == [1, 0]
        backend.close_session("s")
        flood(backend, "y", 40)
        assert there(backend, "a") == [0]
        backend.close()


def client_of(daemon: Daemon) -> StorageBackend:
    return create_backend("grpc", {"address": daemon.address})
