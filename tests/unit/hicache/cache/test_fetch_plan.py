"""What storage is asked for: nothing that is there, and nothing twice."""

from __future__ import annotations

from hicache.cache.fetch_plan import Outlook, reading_order, wanted
from hicache.tree.base import PathPresence, TreeRules
from hicache.types import Component

FULL, SWA = Component.FULL, Component.SWA
RULES = TreeRules(1, (FULL, SWA), 2)


def test_windows_that_memory_has_are_not_asked_for() -> None:
    """Storage would be asked, and host memory taken, for pages that are there."""
    parts = wanted(RULES, 3, 2, 5, PathPresence(3, bytearray(b"\1\1\0"), None))
    assert {part.component: list(part.positions) for part in parts} == {FULL: [3, 4], SWA: [2, 3, 4]}


def test_windows_of_neighbouring_boundaries_are_read_once() -> None:
    """Boundaries share pages; each would be read once for every boundary, and hold a host page each time."""
    there = {FULL: set(range(5)), SWA: set(range(5))}
    outlook = Outlook(RULES, 0, PathPresence(0, bytearray(), None), there)
    read = [
        p for part in reading_order(outlook, [3, 4, 5], {}) if part.component is SWA for p in part.positions
    ]
    assert sorted(read) == [1, 2, 3, 4]
