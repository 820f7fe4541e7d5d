"""Islands: the windows that are kept where a path may be resumed, while the SWA around them goes.

A *place* is a page boundary worth resuming from. Its island is the window before it and one more page
(as many as lie between boundaries, where compressed pools allow fewer), so that a prompt asked again,
whose last token has to be computed, finds the window of the boundary before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hicache.tree.base import TreeRules
from hicache.tree.window import HOLE
from hicache.types import NO_SLOT, Slots


def frontier(end: int, rules: TreeRules) -> int:
    """Return the first page of the island at `end`; who runs on from there needs nothing before it."""
    return max(0, end - rules.window_pages - rules.align_pages)


def island_ranges(places: Iterable[int], rules: TreeRules, start: int, end: int) -> list[tuple[int, int]]:
    """Return what the islands at `places` cover of pages [start, end): ascending, without overlaps."""
    ranges: list[tuple[int, int]] = []
    for place in sorted(set(places)):
        low, high = max(start, frontier(place, rules)), min(end, place)
        if ranges and low <= ranges[-1][1]:
            low = ranges.pop()[0]
        if low < high:
            ranges.append((low, high))
    return ranges


def part(swa: Slots, start: int, ranges: Iterable[tuple[int, int]]) -> tuple[Slots, Slots]:
    """Part the slots of pages from `start` on: those in `ranges`, with holes between, and the dead others.

    Every slot given is in exactly one of the two.
    """
    kept = HOLE * len(swa)
    dead: Slots = array("i")
    at = 0
    for low, high in ranges:
        i, j = low - start, high - start
        dead += swa[at:i]
        kept[i:j] = swa[i:j]
        at = j
    dead += swa[at:]
    return kept, array("i", [slot for slot in dead if slot != NO_SLOT]) if NO_SLOT in dead else dead
