"""The embedded store with its objects in an arena that clients on the same host map.

Decides where objects lie and when a place may be used again; what is kept, `object_store` decides.

taken --commit--> an object's --evict, delete--> free, or once its last reader is done: orphan --unpin--> free
  |
abort, lapse ------------------------------------^  (a lapsed writer that may still write counts as a reader)
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import xxhash

from hicache.clock import Clock
from hicache.daemon.extents import Extent, ExtentMap, rounded
from hicache.daemon.segment import Segment
from hicache.storage_backends.base import (
    MISS,
    BackendStats,
    Reservation,
    WriteOutcome,
    check_lengths,
)
from hicache.storage_backends.object_store import ObjectStore, Observer, StoredObject, Turn
from hicache.storage_backends.pending import Pending

logger = logging.getLogger(__name__)

# The arena is a little larger than the capacity: rounding, and gaps too small for any object.
SLACK_FRACTION, SLACK_BYTES = 1 / 32, 1 << 20
BYTES_PER_SLOT, MIN_SLOTS = 8192, 1 << 16  # the smallest objects, on average, that can fill a large arena
GROW_BYTES = (16 << 20, 256 << 20)  # least and most of one step


class Place(NamedTuple):
    """Where an object lies. Without an extent it is a miss, or larger than was asked for."""

    size: int
    extent: Extent | None


class ArenaStore(ObjectStore[Extent]):
    """See ObjectStore, whose lock guards the extents, pins and slots too. One more thread grows the arena.

    Law 5: a pinned extent is not given to another object. Whoever may still look at or write to an
    extent holds a pin: readers of a grant, streams, and writers whose reservation lapsed.
    """

    name: ClassVar[str] = "memory"

    def __init__(
        self,
        *,
        capacity_bytes: int,
        lease_s: float,
        reservation_ttl_s: float,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Take the first part of the arena's memory. Raises OSError if there is none."""
        size = capacity_bytes + int(capacity_bytes * SLACK_FRACTION) + SLACK_BYTES
        slots = max(MIN_SLOTS, size // BYTES_PER_SLOT)
        self.segment = Segment(size, slots=slots)
        self._step = min(max(size // 64, GROW_BYTES[0]), GROW_BYTES[1])
        self._map = ExtentMap(self.segment.table_bytes)
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._num_slots = slots
        self._growing = threading.Lock()  # taken before _lock; held while pages are zeroed
        self._can_grow = True
        self._wanted = threading.Event()
        super().__init__(
            capacity_bytes=capacity_bytes,
            lease_s=lease_s,
            reservation_ttl_s=reservation_ttl_s,
            clock=clock,
            observer=observer,
        )
        try:
            self._map.extend(self.segment.grow(self._step))
        except OSError:
            self.segment.close()
            raise
        self._grower = threading.Thread(target=self._grow_ahead, name="hicache-arena", daemon=True)
        self._grower.start()

    # -- memory --------------------------------------------------------------------------------

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start of the arena's file that have memory."""
        return self.segment.ready_bytes

    def _grow_until(self, size: int) -> None:
        """Grow until `size` bytes lie free side by side, as far as there is memory. Not under the lock."""
        while self._can_grow and self._map.largest < size:
            with self._growing:
                if self._map.largest < size:
                    self._grow()

    def _grow_ahead(self) -> None:
        while self._wanted.wait() and self._can_grow:
            self._wanted.clear()
            self._grow_until(self._step)

    def _grow(self) -> None:
        segment = self.segment
        if self._closed or segment.ready_bytes == segment.size_bytes:
            self._can_grow = False
            return
        try:
            grown = segment.grow(self._step)
        except OSError as error:
            self._can_grow = False
            logger.warning(
                "the arena stays at %d MiB of %d: %s",
                segment.ready_bytes >> 20,
                segment.size_bytes >> 20,
                error,
            )
            return
        with self._lock:
            self._map.extend(grown)

    def _allocate(self, size: int) -> Extent:
        if self._free_slots:
            slot = self._free_slots.pop()
        elif self._next_slot < self._num_slots:
            slot = self._next_slot
            self._next_slot += 1
        else:
            raise MemoryError(f"all {self._num_slots} slots are taken")
        generation = self.segment.generations[slot] + 1
        extent = self._map.take(size, slot=slot, generation=generation)
        if extent is None:
            self._free_slots.append(slot)
            raise MemoryError(f"no {size} bytes side by side")
        self.segment.generations[slot] = generation
        return extent

    def _view(self, data: Extent) -> memoryview:
        return self.segment.memory[data.offset : data.offset + data.size]

    def _stored(self, key: str, data: Extent) -> StoredObject[Extent]:
        data.key = key
        return StoredObject(data)

    def _let_go(self, turn: Turn[Extent], data: Extent) -> None:
        data.key = None
        if data.pins:
            data.orphan = True
            self._lingering_bytes += data.size
        else:
            self._free(data)

    def _free(self, extent: Extent) -> None:
        self.segment.generations[extent.slot] = extent.generation + 1  # before anyone can write there
        self._free_slots.append(extent.slot)
        self._map.give(extent)

    # -- room ----------------------------------------------------------------------------------

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        if self._can_grow:
            self._grow_until(sum(map(rounded, sizes)))
        answers = super().begin_write(keys, sizes)
        if self._can_grow and self._map.largest < self._step:
            self._wanted.set()
        return answers

    def _make_room(self, size: int, turn: Turn[Extent]) -> bool:
        if not super()._make_room(size, turn):
            return False
        while not self._fits(size):
            if not self._clear_around(size, turn) and not self._evict_coldest(turn):
                return False
        return True

    def _fits(self, size: int) -> bool:
        has_slot = bool(self._free_slots) or self._next_slot < self._num_slots
        return has_slot and self._map.largest >= size

    def _clear_around(self, size: int, turn: Turn[Extent]) -> bool:
        """Evict the neighbours of a free span until `size` bytes lie side by side; False if nowhere can be.

        Gives the order of eviction up for the sake of room, only when free bytes are scattered.
        """
        if self._map.largest >= size:
            return False
        for room, left, right in self._map.around():
            victims: list[str] = []
            for extent in (*self._clearable(right, size - room), *self._clearable(left, size - room)):
                if room >= size:
                    break
                room += extent.span
                victims.append(extent.key or "")
            if room >= size and victims:
                for key in victims:
                    entry = self._objects.pop(key)
                    if entry is not None:
                        self._evicted(turn, key, entry)
                return True
        return False

    def _clearable(self, side: Iterator[Extent], size: int) -> Iterator[Extent]:
        """Yield the nearest extents of a side that may be evicted, up to `size` bytes or one that may not."""
        for extent in side:
            if size <= 0 or extent.key is None or extent.pins or self._objects.is_leased(extent.key):
                return
            size -= extent.span
            yield extent

    def _evict_coldest(self, turn: Turn[Extent]) -> bool:
        """See ObjectStore; passes by what is pinned, which would give no room."""
        pinned = []
        while (victim := self._objects.pop_coldest()) is not None and victim[1].data.pins:
            pinned.append(victim)
        for key, entry in reversed(pinned):
            self._objects.add(key, entry)
        if victim is not None:
            self._evicted(turn, *victim)
        return victim is not None

    # -- places --------------------------------------------------------------------------------

    def locate(self, keys: Sequence[str], limits: Sequence[int], *, most_bytes: int) -> list[Place]:
        """Find the leading objects, in all at most `most_bytes`, and pin those that are within their limits.

        The caller unpins them. Every extent's checksum is known.
        """
        places = []
        with self._lock:
            for extent, limit in zip(self._lease_data(keys), limits, strict=True):
                if extent is None:
                    places.append(Place(MISS, None))
                elif extent.size > limit:
                    places.append(Place(extent.size, None))
                elif extent.size > most_bytes:
                    break
                else:
                    most_bytes -= extent.size
                    extent.pins += 1
                    places.append(Place(extent.size, extent))
        for _, extent in places:
            if extent is not None and extent.checksum is None:  # it came inline, and is first read here
                extent.checksum = xxhash.xxh3_64_intdigest(self._view(extent))
        return places

    @contextlib.contextmanager
    def holding(self, keys: Sequence[str]) -> Iterator[list[memoryview | None]]:
        """Yield read-only views of objects, None where absent, valid until the block ends."""
        with self._lock:
            found = self._lease_data(keys)
            for extent in found:
                if extent is not None:
                    extent.pins += 1
        try:
            yield [None if extent is None else self._view(extent).toreadonly() for extent in found]
        finally:
            self.unpin([extent for extent in found if extent is not None])

    def unpin(self, extents: Sequence[Extent]) -> None:
        """Take back one pin from each. Those that nothing owns any more are free with their last."""
        with self._lock:
            for extent in extents:
                extent.pins -= 1
                if extent.orphan and not extent.pins:
                    self._lingering_bytes -= extent.size
                    self._free(extent)

    def withdraw(self, reservations: Sequence[Reservation]) -> list[Extent]:
        """End reservations, but leave a pin on each extent; return the extents of those still open."""
        withdrawn = []
        with self._lock:
            self._check_open()
            for reservation in reservations:
                extent = self._pending.take(reservation)
                if extent is not None:
                    extent.pins += 1
                    extent.orphan = True
                    self._lingering_bytes += extent.size
                    withdrawn.append(extent)
        return withdrawn

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)
        sizes = []
        with self.holding(keys) as views:
            for view, buffer in zip(views, buffers, strict=True):
                sizes.append(MISS if view is None else len(view))
                if view is not None and len(view) <= len(buffer):
                    buffer[: len(view)] = view
        return sizes

    # -- the rest ------------------------------------------------------------------------------

    def stats(self) -> BackendStats:
        stats = super().stats()
        with self._lock:
            details = {
                **stats.details,
                "arena_bytes": self.segment.ready_bytes,
                "arena_free_bytes": self._map.free_bytes,
                "arena_largest_free_bytes": self._map.largest,
                "lingering_bytes": self._lingering_bytes,
            }
        return BackendStats(stats.objects, stats.used_bytes, stats.capacity_bytes, details)

    def close(self) -> None:
        super().close()
        self._can_grow = False
        self._wanted.set()
        self._grower.join()
        with self._growing:
            self.segment.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every extent is an object's, a reservation's or a pinned orphan."""
        with self._lock:
            self._map.check_integrity()
            objects = reserved = lingering = 0
            for extent in self._map:
                if self.segment.generations[extent.slot] != extent.generation:
                    raise AssertionError(
                        f"arena: slot {extent.slot} is not of generation {extent.generation}"
                    )
                if extent.orphan:
                    lingering += extent.size
                    if extent.pins < 1:
                        raise AssertionError(f"arena: the orphan at {extent.offset} has no pin")
                elif extent.key is None:
                    reserved += extent.size
                else:
                    objects += extent.size
            told = (self._objects.used_bytes, self._pending.reserved_bytes, self._lingering_bytes)
            if (objects, reserved, lingering) != told:
                raise AssertionError(f"arena: {(objects, reserved, lingering)} bytes, but told {told}")


def extent_of(reservation: Reservation) -> Extent:
    """Return the extent of a reservation of an ArenaStore."""
    token = reservation.token
    if not isinstance(token, Pending) or not isinstance(token.data, Extent):
        raise ValueError(f"the reservation of {reservation.key} is another backend's")
    return token.data
