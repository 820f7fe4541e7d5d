"""Host slots that a store in flight still reads although the tree need not keep them any more.

Where a store hangs and device pages that somebody needs hang on its path, the path is let go of and the
slots it reads come here. The tree may drop them as it likes: a slot that is dropped stays taken until
every store that reads it has ended.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

from hicache.types import Component, Slots


class Custody:
    """Owned by the cache's thread. Invariant: what is kept back has a reader and counts as taken."""

    def __init__(self) -> None:
        self._readers: dict[Component, Counter[int]] = {}  # stores that read a slot
        self._kept_back: dict[Component, set[int]] = {}  # dropped by whoever owned it

    def take(self, slots: Mapping[Component, Slots]) -> None:
        """Guard the slots that one store reads, until end() is called with the same."""
        for component, read in slots.items():
            self._readers.setdefault(component, Counter()).update(read)

    def end(self, slots: Mapping[Component, Slots]) -> dict[Component, Slots]:
        """A store has ended; return those of its slots that nobody owns or reads any more."""
        free: dict[Component, Slots] = {}
        for component, read in slots.items():
            readers, kept_back = self._readers[component], self._kept_back.get(component, set())
            readers.subtract(read)
            for slot in read:
                if not readers[slot]:
                    del readers[slot]
                    if slot in kept_back:
                        kept_back.remove(slot)
                        free.setdefault(component, array("i")).append(slot)
        return free

    def keep_back(self, component: Component, slots: Slots) -> Slots:
        """Their owner drops these slots: keep those that are still read, return the others."""
        readers = self._readers.get(component)
        if not readers:
            return slots
        self._kept_back.setdefault(component, set()).update(slot for slot in slots if slot in readers)
        return array("i", (slot for slot in slots if slot not in readers))

    def kept_back(self) -> dict[Component, Slots]:
        """Return the slots of each pool that nobody owns and a store still reads; they stay."""
        return {component: array("i", slots) for component, slots in self._kept_back.items()}

    def owned(self, component: Component) -> int:
        """Slots in custody that somebody owns: to drop them frees nothing yet."""
        return len(self._readers.get(component, ())) - len(self._kept_back.get(component, ()))

    def __len__(self) -> int:
        return sum(map(len, self._readers.values()))
