"""Which slots of a pool are free. Metadata only: no tensors, so virtual time uses it as it is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hicache.errors import DoubleFree
from hicache.types import Slots


class SlotAllocator:
    """Hands out slots of one pool, page by page. Single-threaded: owned by the cache.

    Invariant: every slot in [0, capacity) is free or taken, never both; a free of a slot that is not
    taken raises DoubleFree and changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity {capacity} must not be negative")
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))
        self._taken = bytearray(capacity)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> Slots | None:
        """Take `count` slots, or none at all: returns None if fewer are free."""
        if count > len(self._free):
            return None
        if count <= 0:
            return array("i")
        slots = self._free[-count:]
        del self._free[-count:]
        for slot in slots:
            self._taken[slot] = 1
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back. All or nothing."""
        taken = self._taken
        given = array("i", slots)
        for i, slot in enumerate(given):
            if not 0 <= slot < self.capacity or not taken[slot]:
                for undone in given[:i]:
                    taken[undone] = 1
                raise DoubleFree(f"slot {slot} of {self.capacity} is not taken")
            taken[slot] = 0
        self._free.extend(given)

    def is_taken(self, slot: int) -> bool:
        return bool(self._taken[slot])
