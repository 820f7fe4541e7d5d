"""Names of objects: the same from whoever computes them, with the parts that the page has."""

from __future__ import annotations

from hicache.transfer.base import ObjectRef, name_objects
from hicache.types import Component

HASHES = [bytes([i]) * 32 for i in range(4)]


def test_a_page_is_named_with_its_phase_and_a_state_with_that_of_the_page_it_ends() -> None:
    """Writer and reader would not mean the same object."""
    pages = name_objects(Component.FULL, range(2, 6), HASHES, 3)
    assert [ref.phase for ref in pages] == [2, 0, 1, 2]
    states = name_objects(Component.MAMBA, range(2, 6), HASHES, 3)
    assert [ref.phase for ref in states] == [1, 2, 0, 1]
    assert [ref.page_hash for ref in states] == HASHES


def test_where_all_pages_have_the_same_parts_there_is_one_phase() -> None:
    """Objects of models without compressed pools would have several names."""
    assert name_objects(Component.SWA, [7], HASHES[:1], 1) == [ObjectRef(Component.SWA, HASHES[0])]
