"""Host slots that stores still read: whoever drops them, they are nobody's until the last store ends."""

from __future__ import annotations

from array import array

import pytest

from hicache.cache.custody import Custody
from hicache.cache.pools import Copies
from hicache.testing.scripted_cache import FULL, SWA, ScriptedCache, tokens
from hicache.types import Tier


def slots(*given: int) -> array[int]:
    return array("i", given)


def test_a_slot_is_free_when_its_owner_and_every_reader_are_done() -> None:
    """After the first of two stores, the second would read another page."""
    custody = Custody()
    custody.take({FULL: slots(1, 2), SWA: slots(1)})
    custody.take({FULL: slots(2, 3)})
    assert list(custody.keep_back(FULL, slots(2, 7, 1))) == [7]
    assert custody.owned(FULL) == 1
    assert custody.end({FULL: slots(1, 2), SWA: slots(1)}) == {FULL: slots(1)}
    assert custody.kept_back() == {FULL: slots(2)}
    assert custody.end({FULL: slots(2, 3)}) == {FULL: slots(2)}
    assert not len(custody)
    assert list(custody.keep_back(FULL, slots(1, 2, 3))) == [1, 2, 3]


def test_a_slot_that_its_owner_keeps_is_not_given_away_when_the_store_ends() -> None:
    """It would belong to two."""
    custody = Custody()
    custody.take({FULL: slots(1)})
    assert custody.end({FULL: slots(1)}) == {}


@pytest.mark.parametrize("guarded", range(9))
@pytest.mark.parametrize("dropped_first", range(3))
def test_the_host_promises_what_it_can_give_while_some_of_its_pages_are_read(
    guarded: int, dropped_first: int
) -> None:
    """It would promise pages that stay taken, and crash; or refuse those that it has."""
    bed = ScriptedCache((FULL,), host={FULL: 8})
    bed.run("cached", tokens(32))
    bed.cache.release_device()
    pools, tree = bed.cache.pools, bed.cache.tree
    held = {FULL: tree.owned(Tier.HOST, FULL)[8 - guarded :]}  # the first to be evicted
    assert tree.evictable(Tier.HOST, FULL) == 8
    pools.guard(held)
    pools.free_all(tree.evict(Tier.HOST, FULL, dropped_first).freed)
    room = 8 - guarded
    assert pools.available(Tier.HOST, FULL) == room
    assert pools.held(Tier.HOST, FULL) == guarded
    assert pools.allocate(Tier.HOST, {FULL: room + 1}) is None
    given = pools.allocate(Tier.HOST, {FULL: room})
    assert given is not None
    assert not set(given[FULL]) & set(held[FULL])
    pools.free(Tier.HOST, FULL, given[FULL])
    bed.cache.check_integrity()
    pools.unguard(held)
    assert pools.available(Tier.HOST, FULL) == 8
    bed.check_quiet()


@pytest.mark.parametrize("guarded", range(9))
def test_copies_of_device_pages_are_taken_as_far_as_nobody_reads_them(guarded: int) -> None:
    """A prefetch would be promised the room of copies that a store still reads."""
    bed = ScriptedCache((FULL,), host={FULL: 8})
    bed.run("cached", tokens(32))
    pools, tree = bed.cache.pools, bed.cache.tree
    assert tree.reclaimable() == 8
    held = {FULL: tree.owned(Tier.HOST, FULL)[:guarded]}
    pools.guard(held)
    assert pools.available(Tier.HOST, FULL, Copies.LAST) == 8 - guarded
    given = pools.allocate(Tier.HOST, {FULL: 8 - guarded}, Copies.LAST)
    assert given is not None
    assert not set(given[FULL]) & set(held[FULL])
    pools.free(Tier.HOST, FULL, given[FULL])
    pools.unguard(held)
    bed.check_quiet()


@pytest.mark.parametrize("free", [0, 3])
@pytest.mark.parametrize("wanted", range(6))
@pytest.mark.parametrize("copies", list(Copies))
def test_no_more_is_given_up_than_is_wanted(wanted: int, free: int, copies: Copies) -> None:
    """What others come back for would be lost, or what the device drops next be lost instead of demoted."""
    bed = ScriptedCache((FULL,), host={FULL: 8})
    bed.run("cached", tokens(4 * (8 - free)))
    pools, tree = bed.cache.pools, bed.cache.tree
    if copies is Copies.KEPT:
        bed.cache.release_device()
    given = pools.allocate(Tier.HOST, {FULL: wanted}, copies)
    assert given is not None
    assert tree.evictable(Tier.HOST, FULL) + tree.reclaimable() == min(8 - free, 8 - wanted)
    pools.free(Tier.HOST, FULL, given[FULL])
    bed.check_quiet()
