"""What a client publishes too late, or under another's generation, keeps no room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.clock import ManualClock
from hicache.daemon.arena_store import ArenaStore, extent_of
from hicache.daemon.events import EventHub
from hicache.daemon.sessions import Identity, Session, Sessions
from hicache.daemon.store import SharedStore
from hicache.daemon.writes import Writes
from hicache.storage_backends.base import Reservation, WriteOutcome
from hicache.testing.backend_suite import pattern, write

CAPACITY, SIZE, RESERVATION_S = 1 << 20, 600_000, 10.0


class _Bed:
    """Writes into an arena that has room for one object, and the one session that writes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = ArenaStore(
            capacity_bytes=CAPACITY, lease_s=10.0, reservation_ttl_s=60.0, clock=self.clock
        )
        hub = EventHub(max_watchers=1, queue_limit=9)
        shared = SharedStore(self.store, hub, lease_seconds=10.0, reports=True)
        self.writes = Writes(shared, clock=self.clock, reservation_seconds=RESERVATION_S)
        sessions = Sessions(clock=self.clock, limit=1, lease_bytes=CAPACITY, reservation_bytes=SIZE)
        self.session: Session = sessions.open(Identity())

    def begin(self) -> tuple[int, int]:
        """Reserve a place for the client to write to; return its number and generation."""
        ((number, answer),) = self.writes.begin(self.session, ["a"], [SIZE], in_arena=True)
        assert isinstance(answer, Reservation)
        return number, extent_of(answer).generation

    def publish(self, number: int, generation: int) -> WriteOutcome:
        (outcome,), taken = self.writes.publish(
            self.session, [number], generations=[generation], checksums=[0]
        )
        assert taken == (SIZE if outcome is WriteOutcome.STORED else 0)
        return outcome

    def check_nothing_is_kept(self) -> None:
        """The share is the session's again, and the place anybody's."""
        assert self.session.reserved == self.writes.reserved_bytes() == 0
        assert not self.writes.in_arena(self.session)
        details = self.store.stats().details
        assert (details["reserved_bytes"], details["lingering_bytes"]) == (0, 0)
        assert write(self.store, {"b": pattern(SIZE)}) == {"b": WriteOutcome.STORED}


@pytest.fixture
def bed() -> Iterator[_Bed]:
    bed = _Bed()
    yield bed
    bed.store.check_integrity()
    bed.store.close()


def test_what_is_published_too_late_gives_its_place_back(bed: _Bed) -> None:
    """A client that was stopped for a while would have less room, for as long as it lives."""
    number, generation = bed.begin()
    bed.clock.advance(RESERVATION_S)
    bed.writes.expire()
    assert bed.session.reserved == SIZE, "it may still write there"
    assert bed.publish(number, generation) is WriteOutcome.FAILED
    bed.check_nothing_is_kept()


def test_what_is_published_under_a_wrong_generation_gives_its_place_back(bed: _Bed) -> None:
    """A client that mixes up its places would use up its share, and the store's room."""
    number, generation = bed.begin()
    assert bed.publish(number, generation + 1) is WriteOutcome.FAILED
    bed.check_nothing_is_kept()


def test_what_is_published_in_time_is_visible_and_counted_no_more(bed: _Bed) -> None:
    """A share would shrink with every object that was written well."""
    number, generation = bed.begin()
    assert bed.publish(number, generation) is WriteOutcome.STORED
    assert bed.store.sizes(["a"]) == [SIZE]
    assert bed.session.reserved == bed.writes.reserved_bytes() == 0
