"""The memory store beyond the contract: leases, expiring reservations, events, counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.clock import ManualClock
from hicache.errors import ConfigError
from hicache.storage_backends.base import Reservation, WriteOutcome
from hicache.storage_backends.memory import Change, MemoryBackend, Options, StoreEvent
from hicache.testing.backend_suite import pattern, read, reserve, write


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make(clock: ManualClock, events: list[StoreEvent] | None = None, **changes: float) -> MemoryBackend:
    def observe(told: Sequence[StoreEvent]) -> None:
        assert not backend._lock.locked()
        if events is not None:
            events.extend(told)

    options: dict[str, float] = {"lease_s": 10.0, "reservation_ttl_s": 60.0} | changes
    backend = MemoryBackend(capacity_bytes=1000, clock=clock, observer=observe, **options)
    return backend


@pytest.mark.parametrize("how", ["probe", "read", "views"])
def test_what_was_just_found_is_not_evicted(clock: ManualClock, how: str) -> None:
    """A hit that a probe promised would be gone when it is read."""
    store = make(clock)
    write(store, {"a": pattern(400), "b": pattern(400)})
    if how == "probe":
        assert store.probe(["a"]) == b"\x01"
    elif how == "read":
        assert read(store, ["a"], 400) == [pattern(400)]
    else:
        assert store.views(["a", "x"]) == [memoryview(pattern(400)), None]
    assert write(store, {"c": pattern(400)}) == {"c": WriteOutcome.STORED}
    assert store.sizes(["a", "b", "c"]) == [400, -1, 400]
    assert store.begin_write(["d"], [601]) == [WriteOutcome.NO_SPACE]
    clock.advance(10.0)
    assert write(store, {"d": pattern(601)}) == {"d": WriteOutcome.STORED}


def test_leases_cannot_hold_more_than_their_share(clock: ManualClock) -> None:
    """A replica that probes everything would stop all others from storing."""
    store = make(clock, max_leased_fraction=0.5)
    write(store, {str(i): pattern(100) for i in range(10)})
    store.probe([str(i) for i in range(10)])
    assert store.stats().details["leased_bytes"] == 500
    assert write(store, {"new": pattern(500)}) == {"new": WriteOutcome.STORED}
    assert store.probe([str(i) for i in range(10)]) == b"\x01" * 5 + b"\x00" * 5


def test_a_refused_write_evicts_nothing(clock: ManualClock) -> None:
    """A page that cannot be stored would still cost others."""
    store = make(clock)
    write(store, {"a": pattern(400), "b": pattern(400)})
    store.probe(["b"])
    assert store.begin_write(["c"], [601]) == [WriteOutcome.NO_SPACE]
    assert store.sizes(["a", "b"]) == [400, 400]


def test_an_abandoned_reservation_gives_its_room_back(clock: ManualClock) -> None:
    """A replica killed in mid-write would take its share of the store with it."""
    events: list[StoreEvent] = []
    store = make(clock, events)
    abandoned = reserve(store, "a", 900)
    assert store.begin_write(["b"], [200]) == [WriteOutcome.NO_SPACE]
    clock.advance(59.9)
    assert store.begin_write(["a"], [900]) == [WriteOutcome.EXISTS]
    clock.advance(0.1)
    again = reserve(store, "a", 900)
    assert [(e.change, e.key, e.size) for e in events] == [(Change.EXPIRED, "a", 900)]
    assert store.commit([abandoned]) == [WriteOutcome.FAILED]
    assert store.probe(["a"]) == b"\x00"
    again.buffer[:] = pattern(900)
    assert store.commit([again]) == [WriteOutcome.STORED]
    late = reserve(store, "c", 50)
    clock.advance(60)
    assert store.commit([late]) == [WriteOutcome.FAILED]
    assert store.stats().details["expired_reservations"] == 2


def test_every_change_is_told_once_and_in_order(clock: ManualClock) -> None:
    """A router that watches the daemon would send requests to pages that are gone."""
    events: list[StoreEvent] = []
    store = make(clock, events)
    write(store, {"a/1": pattern(300), "a/2": pattern(300)})
    write(store, {"b": pattern(800)})
    store.delete(["b", "b", "none"])
    write(store, {"a/3": pattern(10)})
    store.clear("a/")
    told = [(e.change.value, e.key) for e in events]
    assert told == [
        *[("stored", "a/1"), ("stored", "a/2"), ("evicted", "a/2"), ("evicted", "a/1"), ("stored", "b")],
        *[("deleted", "b"), ("stored", "a/3"), ("cleared", "a/3")],
    ]
    assert [e.sequence for e in events] == list(range(1, 9))


def test_a_view_outlives_its_object(clock: ManualClock) -> None:
    """A stream to a replica would send another page's bytes after an eviction."""
    store = make(clock)
    write(store, {"a": pattern(400)})
    (view,) = store.views(["a"])
    assert view is not None
    assert view.readonly
    store.delete(["a"])
    write(store, {"a": pattern(400, 1), "b": pattern(400, 2)})
    store.close()
    assert view == pattern(400)


def test_counts_say_what_happened(clock: ManualClock) -> None:
    """Hit rates and evictions on the dashboard would be made up."""
    store = make(clock)
    write(store, {"a": pattern(600)})
    store.probe(["a", "b"])
    read(store, ["a", "b", "c"], 600)
    clock.advance(20)
    write(store, {"d": pattern(600)})
    stats = store.stats()
    assert (stats.objects, stats.used_bytes, stats.capacity_bytes) == (1, 600, 1000)
    expected = {"probed": 2, "probe_hits": 1, "reads": 3, "read_misses": 2, "stored": 2, "stored_bytes": 1200}
    expected |= {"evicted": 1, "evicted_bytes": 600, "no_space": 0, "reservations": 0, "leased_bytes": 0}
    assert {name: stats.details[name] for name in expected} == expected


def test_memory_that_cannot_be_had_is_no_space(clock: ManualClock) -> None:
    """A limit larger than the machine would crash the daemon instead of refusing a write."""
    store = MemoryBackend(capacity_bytes=1 << 62, clock=clock)
    assert store.begin_write(["a"], [1 << 61]) == [WriteOutcome.NO_SPACE]
    assert isinstance(store.begin_write(["a"], [10])[0], Reservation)


@pytest.mark.parametrize(
    "wrong",
    [{"capacity_bytes": 0}, {"lease_s": -1.0}, {"reservation_ttl_s": 0.0}, {"max_leased_fraction": 2.0}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    """A store without room would look like one that always misses."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]
