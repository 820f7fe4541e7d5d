"""Which objects a store would drop next: recency, what is pinned behind it, and read leases.

Decides the order and counts bytes; leaves to the store what an object is and how one is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Generic, TypeVar


class Entry:
    """What is ranked; a store adds its own fields."""

    __slots__ = ("leased_until", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.leased_until = 0.0


E = TypeVar("E", bound=Entry)


class LeasedLru(Generic[E]):
    """Entries by key, coldest first, except those under a lease. Not thread-safe; the store locks.

    Keys in `pins` are passed by while there are others; the caller tells what pins nobody any more.

    A lease ends after `lease_s`, or early when leases would cover more than `max_leased_bytes`; its
    entry is then the most recently used. Invariant: used_bytes and leased_bytes equal the sums of
    the sizes; `_leased` is ordered by the end of its leases. Every operation is O(1) per key, that of
    pop_coldest() over all calls: each pinned entry is passed by once.
    """

    def __init__(self, *, lease_s: float, max_leased_bytes: int, pins: Container[str] = ()) -> None:
        self._pins = pins
        self._held: OrderedDict[str, E] = OrderedDict()  # pinned, and passed by
        self._lease_s = lease_s
        self._max_leased_bytes = max_leased_bytes
        self._cold: OrderedDict[str, E] = OrderedDict()
        self._leased: OrderedDict[str, E] = OrderedDict()
        self.used_bytes = 0
        self.leased_bytes = 0

    def __len__(self) -> int:
        return len(self._cold) + len(self._leased) + len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._leased or key in self._cold or key in self._held

    def __iter__(self) -> Iterator[str]:
        yield from self._cold
        yield from self._held
        yield from self._leased

    def get(self, key: str) -> E | None:
        """Return an entry without ranking it."""
        return self._leased.get(key) or self._cold.get(key) or self._held.get(key)

    def is_leased(self, key: str) -> bool:
        """Return whether a lease protects the key, one that ran out and was not ended yet included."""
        return key in self._leased

    def add(self, key: str, entry: E) -> None:
        """Add an entry as the most recently used; the key must be new."""
        if key in self:
            raise ValueError(f"{key} is already ranked")
        self._cold[key] = entry
        self.used_bytes += entry.size

    def pop(self, key: str) -> E | None:
        """Take an entry out, leased or not."""
        entry = self._cold.pop(key, None) or self._held.pop(key, None)
        if entry is None:
            entry = self._leased.pop(key, None)
            if entry is None:
                return None
            self.leased_bytes -= entry.size
        self.used_bytes -= entry.size
        return entry

    def touch(self, keys: Sequence[str]) -> None:
        """Rank the keys as the most recently used, the first of them highest. Unknown keys are fine."""
        cold = self._cold
        for key in reversed(keys):
            if key in cold:
                cold.move_to_end(key)
            elif key in self._held:
                self._held.move_to_end(key)

    def lease(self, keys: Sequence[str], now: float) -> list[E | None]:
        """Return each entry and protect it from pop_coldest() until now + lease_s."""
        cold, leased = self._cold, self._leased
        until = now + self._lease_s
        found: list[E | None] = [None] * len(keys)
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            entry = leased.get(key)
            if entry is not None:
                leased.move_to_end(key)
            else:
                entry = cold.pop(key, None) or self._held.pop(key, None)
                if entry is None:
                    continue
                leased[key] = entry
                self.leased_bytes += entry.size
            entry.leased_until = until
            found[i] = entry
        while self.leased_bytes > self._max_leased_bytes:
            self._end_oldest_lease()
        return found

    def end_leases(self, now: float) -> None:
        """End the leases that ran out by `now`."""
        leased = self._leased
        while leased and next(iter(leased.values())).leased_until <= now:
            self._end_oldest_lease()

    def _end_oldest_lease(self) -> None:
        key, entry = self._leased.popitem(last=False)
        self._cold[key] = entry
        self.leased_bytes -= entry.size

    @property
    def evictable_bytes(self) -> int:
        """What pop_coldest() could free in all."""
        return self.used_bytes - self.leased_bytes

    def pop_coldest(self) -> tuple[str, E] | None:
        """Take out the least recently used entry that is not leased: of the pinned ones only if all are."""
        while self._cold:
            key, entry = self._cold.popitem(last=False)
            if key not in self._pins:
                self.used_bytes -= entry.size
                return key, entry
            self._held[key] = entry
        if not self._held:
            return None
        key, entry = self._held.popitem(last=False)
        self.used_bytes -= entry.size
        return key, entry

    def unpinned(self, keys: Iterable[str]) -> None:
        """Take note that nobody pins these keys any more: they rank as the most recently used."""
        for key in keys:
            entry = self._held.pop(key, None)
            if entry is not None:
                self._cold[key] = entry
