"""The arena's store against a simple model, and where a place may be used again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hicache.clock import ManualClock
from hicache.daemon import arena_store
from hicache.daemon.arena_store import ArenaStore, extent_of
from hicache.daemon.extents import Extent
from hicache.daemon.grants import Grants
from hicache.storage_backends.base import MISS, Reservation, WriteOutcome
from hicache.testing.backend_suite import pattern, read, reserve, write

CAPACITY = 1 << 20
MIB = 1 << 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaStore]:
    """A store whose arena has no slack to speak of, so that gaps matter."""
    monkeypatch.setattr(arena_store, "SLACK_BYTES", 0)
    store = ArenaStore(capacity_bytes=CAPACITY, lease_s=10.0, reservation_ttl_s=60.0, clock=clock)
    yield store
    store.check_integrity()
    store.close()


class _History:
    """Random calls beside a plain picture of what they must do."""

    def __init__(self, store: ArenaStore, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.written: dict[str, bytes] = {}
        self.open: list[tuple[Reservation, bytes]] = []
        self.pinned: list[tuple[Extent, bytes]] = []

    def key(self) -> str:
        return f"k{self.rng.randrange(80)}"

    def begin(self) -> None:
        size = self.rng.choice((1000, 20_000, 70_000, 150_000))
        (answer,) = self.store.begin_write([self.key()], [size])
        if isinstance(answer, Reservation):
            data = pattern(size, self.rng.randrange(250))
            answer.buffer[:] = data
            self.open.append((answer, data))

    def end(self) -> None:
        if not self.open:
            return
        answer, data = self.open.pop(self.rng.randrange(len(self.open)))
        if self.rng.random() < 0.2:
            self.store.abort([answer])
        elif self.store.commit([answer]) == [WriteOutcome.STORED]:
            self.written[answer.key] = data

    def pin(self) -> None:
        key = self.key()
        (place,) = self.store.locate([key], [MIB], most_bytes=MIB)
        if place.extent is not None:
            self.pinned.append((place.extent, self.written[key]))
        while len(self.pinned) > 4:
            self.store.unpin([self.pinned.pop(0)[0]])

    def read(self) -> None:
        key = self.key()
        (found,) = read(self.store, [key], 150_000)
        assert found is None or found == self.written[key]

    def delete(self) -> None:
        self.store.delete([self.key()])

    def check(self) -> None:
        self.store.check_integrity()
        for extent, data in self.pinned:
            assert bytes(self.store._view(extent)) == data, "a pinned place was given away"
        stats = self.store.stats()
        held = stats.details["reserved_bytes"] + stats.details["lingering_bytes"]
        assert stats.used_bytes + held <= CAPACITY


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_keep_bytes_limits_and_pins(
    store: ArenaStore, clock: ManualClock, seed: int
) -> None:
    """A page would be another's, or the arena would lose room until nothing fits."""
    history = _History(store, seed)
    actions = (history.begin, history.end, history.pin, history.read, history.delete)
    for _ in range(1200):
        history.rng.choices(actions, (7, 5, 2, 4, 1))[0]()
        if history.rng.random() < 0.05:
            clock.advance(3.0)
        history.check()
    store.unpin([extent for extent, _ in history.pinned])
    store.abort([answer for answer, _ in history.open])
    store.clear("")
    assert store.stats().details["evicted"] > 50
    assert store.stats().details["arena_free_bytes"] == store.stats().details["arena_largest_free_bytes"]


def test_scattered_room_is_joined_by_dropping_neighbours(store: ArenaStore, clock: ManualClock) -> None:
    """A model with larger pages would find no place among smaller ones, or empty the store for one."""
    size = 16 << 10
    keys = [f"k{i}" for i in range(CAPACITY // size)]
    for key in keys:
        write(store, {key: pattern(size)})
    store.delete([key for key in keys if int(key[1:]) % 2])
    assert store.stats().details["arena_free_bytes"] > CAPACITY // 2
    assert store.stats().details["arena_largest_free_bytes"] < 24 * size
    there = store.sizes(keys).count(size)
    assert write(store, {"large": pattern(24 * size)}) == {"large": WriteOutcome.STORED}
    assert there - 12 <= store.sizes(keys).count(size) < there
    assert read(store, ["large"], 24 * size) == [pattern(24 * size)]


def test_no_more_is_evicted_than_the_cleared_span_needs(store: ArenaStore) -> None:
    """Every large object would cost another one that nobody needed to lose."""
    size = 64 << 10
    keys = [f"k{i}" for i in range(CAPACITY // size)]
    for key in keys:
        write(store, {key: pattern(size)})
    store.delete(["k5", "k9"])  # two sizes are free, but not side by side
    assert store.stats().details["arena_largest_free_bytes"] < 2 * size
    assert write(store, {"large": pattern(2 * size)}) == {"large": WriteOutcome.STORED}
    assert store.stats().details["evicted"] == 1


def test_a_place_has_another_generation_for_every_owner(store: ArenaStore) -> None:
    """A reader that came too late would take the new object for the one it asked for."""
    seen: set[tuple[int, int]] = set()
    for i in range(50):
        write(store, {"a": pattern(1000, i)})
        (place,) = store.locate(["a"], [1000], most_bytes=MIB)
        extent = place.extent
        assert extent is not None
        assert store.segment.generations[extent.slot] == extent.generation
        assert (extent.slot, extent.generation) not in seen
        seen.add((extent.slot, extent.generation))
        store.delete(["a"])
        assert store.segment.generations[extent.slot] == extent.generation  # it is being read
        store.unpin([extent])
        assert store.segment.generations[extent.slot] != extent.generation


def test_what_is_deleted_while_read_counts_until_it_is_free(store: ArenaStore) -> None:
    """Readers and writers together would exceed the memory that the operator gave."""
    write(store, {"a": pattern(600_000)})
    (place,) = store.locate(["a"], [MIB], most_bytes=MIB)
    store.delete(["a"])
    assert store.begin_write(["b"], [600_000]) == [WriteOutcome.NO_SPACE]
    store.unpin([place.extent])
    store.abort([reserve(store, "b", 600_000)])


def test_locating_stops_at_the_share_and_says_why_not(store: ArenaStore) -> None:
    """A reader would be given places that it may not hold, or take a miss for a place."""
    write(store, {key: pattern(1000) for key in "abcd"})
    places = store.locate(["a", "none", "b", "c", "d"], [1000, 1000, 999, 1000, 1000], most_bytes=2500)
    assert [place.size for place in places] == [1000, MISS, 1000, 1000]
    assert [place.extent is not None for place in places] == [True, False, False, True]
    store.unpin([place.extent for place in places if place.extent is not None])


def test_a_withdrawn_write_frees_its_key_and_keeps_its_place(store: ArenaStore) -> None:
    """A writer that wakes up late would write into another's page."""
    late = reserve(store, "a", 1000)
    extent = extent_of(late)
    assert store.withdraw([late]) == [extent]
    assert store.withdraw([late]) == []
    assert write(store, {"a": pattern(1000)}) == {"a": WriteOutcome.STORED}
    late.buffer[:] = b"\xee" * 1000
    assert read(store, ["a"], 1000) == [pattern(1000)]
    assert store.commit([late]) == [WriteOutcome.FAILED]
    store.unpin([extent])
    assert store.stats().details["lingering_bytes"] == 0


def test_grants_end_by_release_time_or_their_client(store: ArenaStore, clock: ManualClock) -> None:
    """Places read long ago would never be used again, or be used while they are read."""
    grants = Grants(store, clock=clock, seconds=10.0, session_bytes=2500, most=5000)
    write(store, {key: pattern(1000) for key in "abc"})

    def grant(session: int, key: str) -> int:
        (place,) = store.locate([key], [MIB], most_bytes=MIB)
        assert place.extent is not None
        return grants.add(session, [place.extent])

    def pins() -> int:
        return sum(extent.pins for extent in store._map)

    assert grants.room(1) == 5000  # the largest object can always be read
    first, second = grant(1, "a"), grant(1, "b")
    assert grants.room(1) == 500
    assert grants.add(1, []) == 0
    grants.release(2, [first])
    assert pins() == 2
    grants.release(1, [first, first, 999])
    assert (pins(), grants.room(1)) == (1, 1500)
    clock.advance(9.0)
    grant(2, "c")
    grants.expire()
    assert pins() == 2
    clock.advance(1.0)
    grants.expire()
    assert (pins(), grants.lapsed) == (1, 1)
    grants.release(1, [second])
    grants.drop(2)
    assert pins() == 0
