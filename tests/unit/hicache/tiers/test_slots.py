"""The slot allocator: every slot free or taken, never both."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import DoubleFree
from hicache.tiers.slots import SlotAllocator


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    """A request that gets half of its pages would leak them."""
    pool = SlotAllocator(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


@pytest.mark.parametrize("count", [0, -1])
def test_who_asks_for_nothing_takes_nothing(count: int) -> None:
    """An empty load would take every page there is."""
    pool = SlotAllocator(3)
    assert pool.allocate(count) == array("i")
    assert (pool.num_free, pool.num_taken) == (3, 0)


def test_a_pool_may_have_no_slots_at_all() -> None:
    """A tier that is switched off is a pool of none; a negative size is a mistake of the caller's."""
    pool = SlotAllocator(0)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == array("i")
    with pytest.raises(DoubleFree):
        pool.free([0])
    with pytest.raises(ValueError, match="-1 must not be negative"):
        SlotAllocator(-1)


@pytest.mark.parametrize("given_back", [[0, 0], [1], [-1], [3], [0, 1]])
def test_a_slot_that_is_not_taken_cannot_be_freed(given_back: list[int]) -> None:
    """A double free hands one page to two requests: wrong bytes in somebody's prompt."""
    pool = SlotAllocator(3)
    taken = pool.allocate(1)
    assert taken == array("i", [0])
    with pytest.raises(DoubleFree):
        pool.free(given_back)
    assert pool.is_taken(0)
    assert pool.num_free == 2


@given(st.lists(st.integers(-5, 6), max_size=60))
def test_free_and_taken_always_add_up_and_no_slot_has_two_owners(steps: list[int]) -> None:
    """Law 3 of the pools, over random histories: positive takes, negative gives back."""
    pool = SlotAllocator(11)
    owned: list[int] = []
    for step in steps:
        if step >= 0:
            owned.extend(pool.allocate(step) or ())
        else:
            back, owned = owned[:-step], owned[-step:]
            pool.free(back)
        assert len(set(owned)) == len(owned) == pool.num_taken
        assert pool.num_free + pool.num_taken == 11
        assert all(pool.is_taken(slot) for slot in owned)
