"""Objects within a byte limit, in memory of any kind: what is kept, what is dropped, when reservations end.

Decides everything but where the bytes lie, which a subclass gives and takes back.
"""

from __future__ import annotations

import enum
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

from hicache.clock import Clock, SystemClock
from hicache.errors import BackendUnavailable
from hicache.storage_backends.base import (
    MISS,
    BackendStats,
    Reservation,
    StorageBackend,
    WriteOutcome,
    check_sizes,
)
from hicache.storage_backends.lru import Entry, LeasedLru
from hicache.storage_backends.pending import D, PendingWrites
from hicache.storage_backends.pins import Pins


class Change(enum.Enum):
    """What happened to an object."""

    STORED = "stored"
    EVICTED = "evicted"  # dropped for room
    DELETED = "deleted"
    CLEARED = "cleared"
    EXPIRED = "expired"  # a reservation ended by itself: its room is free, nothing had been visible


class StoreEvent(NamedTuple):
    """One change. `sequence` rises by one per event of a store and orders events across threads."""

    sequence: int
    change: Change
    key: str
    size: int


Observer = Callable[[Sequence[StoreEvent]], None]


class StoredObject(Entry, Generic[D]):
    """One object and the memory that is its own."""

    __slots__ = ("data",)

    def __init__(self, data: D) -> None:
        super().__init__(len(data))
        self.data = data


class Turn(Generic[D]):
    """What one locked section leaves to be done after the lock: events to tell, memory to drop."""

    __slots__ = ("dropped", "events", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        self.events: list[StoreEvent] = []
        self.dropped: list[D] = []


class ObjectStore(StorageBackend, Generic[D]):
    """See StorageBackend. Never blocks on anything but its lock, so it never times out.

    Guarded by `_lock`: every field that begins with an underscore. Copies, releases of memory and
    the observer run outside of it. An object's memory is written by its reservation's owner until
    commit and by nobody afterwards.

    Invariant: bytes of objects + bytes of reservations + bytes let go but still in use
    (`_lingering_bytes`) <= capacity_bytes.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        lease_s: float = 10.0,
        max_leased_fraction: float = 0.5,
        reservation_ttl_s: float = 60.0,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`observer` gets the events of each call, from the caller's thread; it must not raise."""
        self.capacity_bytes = capacity_bytes
        self._clock = clock or SystemClock()
        self._observer = observer
        self._lock = threading.Lock()
        self._pins = Pins()
        self._objects: LeasedLru[StoredObject[D]] = LeasedLru(
            lease_s=lease_s, max_leased_bytes=int(capacity_bytes * max_leased_fraction), pins=self._pins
        )
        self._pending: PendingWrites[D] = PendingWrites(
            ttl_s=reservation_ttl_s, allocate=self._allocate, view=self._view
        )
        self._lingering_bytes = 0
        self._sequence = 0
        self._closed = False
        self._counts = dict.fromkeys(
            (
                *("probed", "probe_hits", "reads", "read_misses", "stored", "stored_bytes", "no_space"),
                *("evicted", "evicted_bytes", "deleted", "cleared", "expired_reservations"),
            ),
            0,
        )

    # -- where the bytes lie -------------------------------------------------------------------

    @abstractmethod
    def _allocate(self, size: int) -> D:
        """Return memory of `size` bytes. Called under the lock. Raises MemoryError."""

    @abstractmethod
    def _view(self, data: D) -> memoryview:
        """Return the memory as writable bytes."""

    def _stored(self, key: str, data: D) -> StoredObject[D]:
        """Return the entry of an object that becomes visible. Called under the lock."""
        return StoredObject(data)

    @abstractmethod
    def _let_go(self, turn: Turn[D], data: D) -> None:
        """Take memory back that no object and no reservation has any more. Called under the lock."""

    # -- reading -------------------------------------------------------------------------------

    def probe(self, keys: Sequence[str]) -> bytes:
        with self._lock:
            self._check_open()
            found = self._objects.lease(keys, self._clock.now())
            flags = bytes([entry is not None for entry in found])
            self._counts["probed"] += len(flags)
            self._counts["probe_hits"] += flags.count(1)
        return flags

    def _lease_data(self, keys: Sequence[str]) -> list[D | None]:
        """Return each object's memory, with a lease, or None. Called under the lock."""
        self._check_open()
        found = self._objects.lease(keys, self._clock.now())
        self._counts["reads"] += len(found)
        self._counts["read_misses"] += found.count(None)
        return [None if entry is None else entry.data for entry in found]

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Return each object's size, or MISS, without a lease and without counting as use."""
        with self._lock:
            self._check_open()
            found = [self._objects.get(key) for key in keys]
        return [MISS if entry is None else entry.size for entry in found]

    # -- writing -------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)
        turn: Turn[D] = Turn(self._clock.now())
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            answers = [self._reserve(key, size, turn) for key, size in zip(keys, sizes, strict=True)]
        self._finish(turn)
        return answers

    def _reserve(self, key: str, size: int, turn: Turn[D]) -> Reservation | WriteOutcome:
        if key in self._pending:
            return WriteOutcome.EXISTS
        if key in self._objects:
            self._objects.touch((key,))
            return WriteOutcome.EXISTS
        if not self._make_room(size, turn):
            self._counts["no_space"] += 1
            return WriteOutcome.NO_SPACE
        try:
            return self._pending.begin(key, size, turn.now)
        except MemoryError:
            self._counts["no_space"] += 1
            return WriteOutcome.NO_SPACE

    def _make_room(self, size: int, turn: Turn[D]) -> bool:
        """Evict until `size` bytes are free; evicts nothing if they cannot be."""
        objects = self._objects
        objects.end_leases(turn.now)
        objects.unpinned(self._pins.expire(turn.now))
        if size > self._room() - objects.leased_bytes:
            return False
        while objects.used_bytes + size > self._room():
            if not self._evict_coldest(turn):
                return False
        return True

    def _room(self) -> int:
        """Return the bytes that objects may have now."""
        return self.capacity_bytes - self._pending.reserved_bytes - self._lingering_bytes

    def _evict_coldest(self, turn: Turn[D]) -> bool:
        victim = self._objects.pop_coldest()
        if victim is None:
            return False
        self._evicted(turn, *victim)
        return True

    def _evicted(self, turn: Turn[D], key: str, entry: StoredObject[D]) -> None:
        self._counts["evicted"] += 1
        self._counts["evicted_bytes"] += entry.size
        self._let_go(turn, entry.data)
        self._tell(turn, Change.EVICTED, key, entry.size)

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        turn: Turn[D] = Turn(self._clock.now())
        outcomes = []
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            stored: list[tuple[str, D]] = []
            for reservation in reservations:
                data = self._pending.take(reservation)
                outcomes.append(WriteOutcome.FAILED if data is None else WriteOutcome.STORED)
                if data is not None:
                    stored.append((reservation.key, data))
                    self._tell(turn, Change.STORED, reservation.key, len(data))
            for key, data in reversed(stored):
                self._objects.add(key, self._stored(key, data))
            self._counts["stored"] += len(stored)
            self._counts["stored_bytes"] += sum(len(data) for _, data in stored)
        self._finish(turn)
        return outcomes

    def abort(self, reservations: Sequence[Reservation]) -> None:
        turn: Turn[D] = Turn(0.0)
        with self._lock:
            self._check_open()
            for reservation in reservations:
                data = self._pending.take(reservation)
                if data is not None:
                    self._let_go(turn, data)
        self._finish(turn)

    def _end_expired(self, turn: Turn[D]) -> None:
        for key, data in self._pending.expire(turn.now):
            self._counts["expired_reservations"] += 1
            self._let_go(turn, data)
            self._tell(turn, Change.EXPIRED, key, len(data))

    # -- ranking and dropping --------------------------------------------------------------------

    def touch(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._check_open()
            self._objects.touch(keys)

    def pin(self, session: str, keys: Sequence[str], ttl_s: float) -> None:
        """See HoldsSessions. What comes under such a key later is pinned too."""
        now = self._clock.now()
        with self._lock:
            self._check_open()
            self._objects.unpinned(self._pins.expire(now))
            self._objects.unpinned(self._pins.pin(session, keys, now + ttl_s))

    def close_session(self, session: str) -> None:
        """See HoldsSessions."""
        with self._lock:
            self._check_open()
            self._objects.unpinned(self._pins.close(session))

    def delete(self, keys: Sequence[str]) -> int:
        return self._drop(keys, Change.DELETED)

    def clear(self, prefix: str) -> int:
        """See StorageBackend. O(objects), under the lock."""
        return self._drop(None, Change.CLEARED, prefix=prefix)

    def _drop(self, keys: Sequence[str] | None, change: Change, *, prefix: str = "") -> int:
        turn: Turn[D] = Turn(self._clock.now())
        dropped = 0
        with self._lock:
            self._check_open()
            if keys is None:
                keys = [key for key in self._objects if key.startswith(prefix)]
            for key in keys:
                entry = self._objects.pop(key)
                if entry is not None:
                    dropped += 1
                    self._let_go(turn, entry.data)
                    self._tell(turn, change, key, entry.size)
            self._counts[change.value] += dropped
        self._finish(turn)
        return dropped

    # -- the rest --------------------------------------------------------------------------------

    def stats(self) -> BackendStats:
        turn: Turn[D] = Turn(self._clock.now())
        with self._lock:
            self._check_open()
            self._end_expired(turn)
            self._objects.end_leases(turn.now)
            self._objects.unpinned(self._pins.expire(turn.now))
            stats = BackendStats(
                objects=len(self._objects),
                used_bytes=self._objects.used_bytes,
                capacity_bytes=self.capacity_bytes,
                details={
                    **self._counts,
                    "leased_bytes": self._objects.leased_bytes,
                    "pinning_sessions": len(self._pins),
                    "pinned_keys": self._pins.total,
                    "reservations": len(self._pending),
                    "reserved_bytes": self._pending.reserved_bytes,
                },
            )
        self._finish(turn)
        return stats

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped = self._objects
            self._objects = LeasedLru(lease_s=0.0, max_leased_bytes=0)
            self._pending.drop_all()
        del dropped

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailable(f"{self.name}: the backend is closed")

    def _tell(self, turn: Turn[D], change: Change, key: str, size: int) -> None:
        self._sequence += 1
        if self._observer is not None:
            turn.events.append(StoreEvent(self._sequence, change, key, size))

    def _finish(self, turn: Turn[D]) -> None:
        """Do what the lock was released for."""
        turn.dropped.clear()
        if turn.events and self._observer is not None:
            self._observer(turn.events)
