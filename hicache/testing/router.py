"""A router as tests need it: takes KV events strictly, and keeps the set that follows from them."""

from __future__ import annotations

from collections import Counter

from hicache.cache.events import Batch, Cleared, Event, Removed, Stored
from hicache.errors import InvariantViolation
from hicache.testing.residency import Entry


class Router:
    """A sink for cache.publish_events. `busy` leaves it no room, as a publisher that falls behind.

    A batch out of order, a page that comes twice or leaves without having come is a broken law.
    """

    def __init__(self) -> None:
        self.busy = False
        self.batches: list[Batch] = []
        self.gaps = 0
        self.held: set[Entry] = set()
        self.seen: Counter[str] = Counter()  # kinds of events, and reasons

    def has_room(self) -> bool:
        return not self.busy

    def offer(self, batch: Batch) -> None:
        expected = self.batches[-1].sequence + 1 if self.batches else batch.sequence
        if batch.sequence < expected:
            raise InvariantViolation(f"batch {batch.sequence} came where {expected} was due")
        if batch.sequence > expected:
            self.gaps += 1
            if not isinstance(batch.events[0], Cleared):
                raise InvariantViolation("after a gap everything must be told again")
        self.batches.append(batch)
        for event in batch.events:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Cleared):
            self.seen["cleared"] += 1
            self.held.clear()
            return
        entries = {(digest, event.tier, event.component) for digest in event.digests}
        if len(entries) != len(event.digests):
            raise InvariantViolation(f"a page twice in one event: {event}")
        if isinstance(event, Stored):
            self.seen[f"{event.tier.name} {event.component.name}"] += 1
            if entries & self.held:
                raise InvariantViolation(f"stored twice: {event}")
            self.held |= entries
        else:
            self.seen[event.why.value] += 1
            if not entries <= self.held:
                raise InvariantViolation(f"removed without having been stored: {event}")
            self.held -= entries

    @property
    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch.events]

    @property
    def stored(self) -> list[Stored]:
        return [event for event in self.events if isinstance(event, Stored)]

    @property
    def removed(self) -> list[Removed]:
        return [event for event in self.events if isinstance(event, Removed)]
