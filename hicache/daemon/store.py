"""The store behind the daemon: any backend, with leases counted per session and changes told in order.

The memory backend is read in place and reports its own evictions. Any other is read through a
bounded scratch buffer, and only what this daemon does to it is told to watchers.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from hicache.clock import Clock
from hicache.config.serve import DataPlane, ServeConfig
from hicache.daemon.arena_store import ArenaStore
from hicache.daemon.events import Change, ChangeKind, EventHub
from hicache.daemon.sessions import Session
from hicache.errors import BackendTimeout
from hicache.storage_backends import memory
from hicache.storage_backends.base import MISS, Reservation, StorageBackend, WriteOutcome

logger = logging.getLogger(__name__)

SCRATCH_BYTES = (
    8 << 20
)  # read at once from a backend that cannot be read in place, unless one object is larger
KEYS_AT_ONCE = 64  # pinned at once by a reader of a backend that can

_OWN_CHANGES = {
    memory.Change.STORED: ChangeKind.STORED,
    memory.Change.EVICTED: ChangeKind.EVICTED,
    memory.Change.DELETED: ChangeKind.DELETED,
}
# A reservation's end is decided by the daemon, which knows uploads; the store's own is a backstop.
_STORE_RESERVATION_FACTOR = 10


@runtime_checkable
class ReadsInPlace(Protocol):
    """A backend whose objects can be looked at where they are."""

    def holding(self, keys: Sequence[str]) -> AbstractContextManager[list[memoryview | None]]: ...

    def sizes(self, keys: Sequence[str]) -> list[int]: ...


class SharedStore:
    """One backend for all sessions. Thread-safe; names are stored names, already scoped."""

    def __init__(
        self, backend: StorageBackend, hub: EventHub, *, lease_seconds: float, reports: bool
    ) -> None:
        """`reports` says that the backend's own observer feeds the hub."""
        self.backend = backend
        self._hub = hub
        self._lease_seconds = lease_seconds
        self._reports = reports
        # What a call that timed out may still write to, where the backend cannot stop it: kept for good.
        self._unsettled: list[Sequence[memoryview]] = []
        self._in_place = backend if isinstance(backend, ReadsInPlace) else None

    def probe(self, session: Session, names: Sequence[str]) -> bytes:
        """Return a flag per name; protect what is found as far as the session's share goes."""
        if self._in_place is None:
            return self.backend.probe(names)
        sizes = self._in_place.sizes(names)
        leased = session.lease(names, sizes, seconds=self._lease_seconds)
        return self.backend.probe(names[:leased]) + bytes(size != MISS for size in sizes[leased:])

    def read(
        self, names: Sequence[str], limits: Sequence[int]
    ) -> Iterator[list[tuple[int, memoryview | None]]]:
        """Yield (size, bytes) of each object in order, some at a time; the bytes are None for a miss or above
        the limit, and stay valid until the next item is asked for."""
        if self._in_place is not None:
            for start in range(0, len(names), KEYS_AT_ONCE):
                with self._in_place.holding(names[start : start + KEYS_AT_ONCE]) as views:
                    yield [
                        (MISS, None) if view is None else (len(view), view if len(view) <= limit else None)
                        for view, limit in zip(views, limits[start : start + KEYS_AT_ONCE], strict=True)
                    ]
            return
        for start, stop in _spans(limits):
            buffers = [memoryview(bytearray(limit)) for limit in limits[start:stop]]
            sizes = self._read_into(buffers, names[start:stop])
            yield [
                (size, buffer[:size] if 0 <= size <= len(buffer) else None)
                for size, buffer in zip(sizes, buffers, strict=True)
            ]

    def _read_into(self, buffers: Sequence[memoryview], names: Sequence[str]) -> list[int]:
        try:
            return self.backend.read(names, buffers)
        except BackendTimeout:
            if not self.backend.settles_on_timeout:
                self._unsettled.append(buffers)
            raise

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        """Make reservations visible and tell watchers."""
        outcomes = self.backend.commit(reservations)
        if not self._reports:
            self._hub.publish(
                [
                    Change(ChangeKind.STORED, one.key, len(one.buffer))
                    for one, outcome in zip(reservations, outcomes, strict=True)
                    if outcome is WriteOutcome.STORED
                ]
            )
        return outcomes

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects and tell watchers; return how many were there."""
        if self._reports:
            return self.backend.delete(names)
        there = self.backend.probe(names)
        deleted = self.backend.delete(names)
        gone = [name for name, flag in zip(names, there, strict=True) if flag]
        self._hub.publish([Change(ChangeKind.DELETED, name) for name in gone])
        return deleted

    def clear(self, prefixes: Sequence[str]) -> int:
        """Delete what begins with any of the prefixes and tell watchers so, once per prefix."""
        deleted = 0
        for prefix in prefixes:
            deleted += self.backend.clear(prefix)
            # Told afterwards: what is stored meanwhile may be believed gone, never the reverse.
            self._hub.publish([Change(ChangeKind.CLEARED, prefix)])
        return deleted


def open_memory(config: ServeConfig, hub: EventHub, *, clock: Clock) -> SharedStore:
    """Make the embedded store: memory with a byte limit, telling `hub` what changes.

    It lies in an arena that clients on this host can map, if that is wanted and there is memory for one.
    """
    observer = _InOrder(hub)
    backend: StorageBackend | None = None
    if DataPlane.SHM in config.data_planes:
        try:
            backend = ArenaStore(
                capacity_bytes=int(config.capacity),
                lease_s=config.lease_seconds,
                reservation_ttl_s=config.reservation_seconds * _STORE_RESERVATION_FACTOR,
                clock=clock,
                observer=observer,
            )
        except OSError as error:
            logger.warning("no memory that can be shared, bytes travel inline: %s", error)
    if backend is None:
        backend = memory.MemoryBackend(
            capacity_bytes=int(config.capacity),
            lease_s=config.lease_seconds,
            reservation_ttl_s=config.reservation_seconds * _STORE_RESERVATION_FACTOR,
            clock=clock,
            observer=observer,
        )
    return SharedStore(backend, hub, lease_seconds=config.lease_seconds, reports=True)


class _InOrder:
    """Passes a store's events on by their sequence: threads may hand them in out of order."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._next = 1
        self._early: list[tuple[int, memory.StoreEvent]] = []  # heap; Invariant: every sequence >= _next

    def __call__(self, events: Sequence[memory.StoreEvent]) -> None:
        with self._lock:
            ready = events if not self._early and self._are_next(events) else self._sorted(events)
            if ready:
                self._next = ready[-1].sequence + 1
            changes = [
                Change(kind, event.key, event.size)
                for event in ready
                if (kind := _OWN_CHANGES.get(event.change)) is not None
            ]
            if changes:
                self._hub.publish(changes)

    def _are_next(self, events: Sequence[memory.StoreEvent]) -> bool:
        """Return whether the events continue what was told, without a gap; they are in order."""
        first, last = events[0].sequence, events[-1].sequence
        return first == self._next and last - first + 1 == len(events)

    def _sorted(self, events: Sequence[memory.StoreEvent]) -> list[memory.StoreEvent]:
        """Keep events, and return those that may be told now."""
        for event in events:
            heapq.heappush(self._early, (event.sequence, event))
        ready: list[memory.StoreEvent] = []
        while self._early and self._early[0][0] == self._next + len(ready):
            ready.append(heapq.heappop(self._early)[1])
        return ready


def _spans(limits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a batch into runs of at most SCRATCH_BYTES, or one object."""
    start = total = 0
    for index, limit in enumerate(limits):
        if index > start and total + limit > SCRATCH_BYTES:
            yield start, index
            start, total = index, 0
        total += limit
    if start < len(limits):
        yield start, len(limits)
