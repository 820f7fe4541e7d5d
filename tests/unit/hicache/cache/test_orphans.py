"""What storage holds behind a page that it did not take is counted: nobody can reach it there."""

from __future__ import annotations

from array import array

import pytest

from hicache.cache.writing import _orphans
from hicache.testing.pools import FULL, MAMBA, SWA
from hicache.tree.base import WritePlan
from hicache.types import NO_SLOT, Component, Slots, Tier

STORED, REFUSED = 0, NO_SLOT


def orphans(**entries: dict[int, int]) -> int:
    """Count them for entries of position to outcome, by component."""
    by_kind = {{"full": FULL, "swa": SWA, "mamba": MAMBA}[name]: found for name, found in entries.items()}
    pages: dict[Component, Slots] = {kind: array("i", found) for kind, found in by_kind.items()}
    outcome: dict[Component, Slots] = {kind: array("i", found.values()) for kind, found in by_kind.items()}
    return _orphans(WritePlan(Tier.HOST, pages, pages), outcome)


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ({"full": {0: STORED, 1: STORED}}, 0),
        ({"full": {0: STORED, 1: REFUSED}}, 0),
        ({"full": {4: STORED, 5: REFUSED, 6: STORED, 7: STORED}}, 2),
        ({"full": {4: REFUSED, 5: REFUSED, 6: STORED}, "swa": {3: STORED, 4: STORED, 6: REFUSED}}, 2),
        ({"full": {4: REFUSED}, "mamba": {4: STORED, 5: STORED}}, 1),  # the state at 4 needs pages 0 to 3
        ({"swa": {3: STORED, 4: REFUSED}}, 0),
    ],
)
def test_what_lies_behind_a_hole_is_an_orphan(entries: dict[str, dict[int, int]], count: int) -> None:
    """L3 would fill up with objects that no hit can use, and no number would show it."""
    assert orphans(**entries) == count
