"""Islands in the tree: what insert() keeps of SWA, what it hands back, and what a lease still holds."""

from __future__ import annotations

import random
from array import array

import pytest

from hicache.tree import Lease, TreeRules, UnifiedTree, make_policy
from hicache.tree.islands import frontier, island_ranges, part
from hicache.types import NO_SLOT, Component, Tier

FULL, SWA = Component.FULL, Component.SWA
DEVICE = Tier.DEVICE


def tree_with_lease(window_pages: int) -> tuple[UnifiedTree, Lease]:
    tree = UnifiedTree(TreeRules(1, (FULL, SWA), window_pages), make_policy("lru"))
    return tree, tree.lock(tree.match(b"", array("I"), 0), 0, DEVICE)


def tokens(count: int) -> array[int]:
    return array("I", range(1, count + 1))


def test_every_offered_slot_is_kept_or_handed_back_once() -> None:
    """A slot in both would be freed under its reader; one in neither would be lost."""
    rng = random.Random(3)
    for _ in range(2000):
        start, count = rng.randrange(20), rng.randrange(1, 30)
        places = [rng.randrange(60) for _ in range(rng.randrange(5))]
        window = rng.randint(1, 9)
        rules = TreeRules(1, (FULL, SWA), window, rng.randint(1, 3))
        swa = array("i", [slot if rng.random() < 0.8 else NO_SLOT for slot in range(count)])
        kept, dead = part(swa, start, island_ranges(places, rules, start, start + count))
        alive = {i for p in places for i in range(frontier(p, rules), p)}
        for i in range(count):
            assert kept[i] == (swa[i] if start + i in alive else NO_SLOT)
        offered = sorted(slot for slot in swa if slot != NO_SLOT)
        assert sorted([*dead, *(slot for slot in kept if slot != NO_SLOT)]) == offered


@pytest.mark.parametrize("window", [1, 3, 7])
def test_insert_keeps_the_window_before_each_place_and_one_page_more(window: int) -> None:
    """A boundary one page before the place, which the same prompt asks for again, would have a hole."""
    tree, lease = tree_with_lease(window)
    done = tree.insert(
        lease, tokens(30), 0, 30, full=array("i", range(30)), swa=array("i", range(30)), places=[12, 30]
    )
    alive = {*range(max(0, 12 - window - 1), 12), *range(30 - window - 1, 30)}
    assert [i for i, slot in enumerate(done.swa) if slot != NO_SLOT] == sorted(alive)
    assert sorted(done.duplicates[SWA]) == sorted(set(range(30)) - alive)
    for boundary in range(31):
        found = tree.match(b"", tokens(boundary), boundary).device
        whole = set(range(max(0, boundary - window), boundary)) <= alive
        assert (found == boundary) == whole
    tree.check_integrity()


def test_a_prefix_that_is_there_gets_the_windows_of_places_back_and_no_others() -> None:
    """A branching point would be computed again by every request, though one of them computed its window."""
    tree, lease = tree_with_lease(2)
    tree.insert(lease, tokens(20), 0, 20, full=array("i", range(20)), swa=array("i", range(20)), places=[20])
    again = tree.lock(tree.match(b"", array("I"), 0), 0, DEVICE)
    done = tree.insert(
        again,
        tokens(20),
        0,
        20,
        full=array("i", range(50, 70)),
        swa=array("i", range(50, 70)),
        places=[9, 20],
    )
    assert [i for i, slot in enumerate(done.swa) if slot != NO_SLOT] == [6, 7, 8, 17, 18, 19]
    assert list(done.swa[6:9]) == [56, 57, 58]
    assert len(done.duplicates[SWA]) == 17
    assert tree.match(b"", tokens(9), 9).device == 9
    tree.check_integrity()


def test_a_lease_that_has_moved_on_lets_go_of_its_old_window() -> None:
    """A request that decodes for minutes would hold the window of its prompt all the time."""
    tree, lease = tree_with_lease(4)
    tree.insert(lease, tokens(12), 0, 12, full=array("i", range(12)), swa=array("i", range(12)), places=[12])
    assert tree.evictable(DEVICE, SWA) == 1
    tree.hold_windows(lease, 10)
    assert tree.evictable(DEVICE, SWA) == 3
    assert len(tree.evict(DEVICE, SWA, 99).freed[DEVICE, SWA]) == 3
    tree.check_integrity()
    tree.hold_windows(lease, 40)  # beyond its end: nothing is held
    assert len(tree.evict(DEVICE, SWA, 99).freed[DEVICE, SWA]) == 2
    tree.check_integrity()


def say(tree: UnifiedTree, path: array[int], slot: int, now: float) -> None:
    """One turn: match, touch, insert what is missing as one chunk, release."""
    found = tree.match(b"", path, len(path))
    lease = tree.lock(found, found.device, DEVICE)
    tree.touch(lease, now)
    start, end = found.full_device, len(path)
    fresh = array("i", range(slot + start, slot + end))
    tree.insert(lease, path, start, end, full=fresh, swa=fresh, places=[end], now=now)
    tree.release(lease)
    tree.check_integrity()


def test_an_island_that_its_conversation_has_outgrown_goes_before_those_it_may_come_back_to() -> None:
    """A hit would keep the window it began from as long as the one it left: half of the pool for nothing."""
    tree = UnifiedTree(TreeRules(1, (FULL, SWA), 2), make_policy("lru"))
    one, two = tokens(40), array("I", range(101, 141))
    say(tree, one[:10], 0, 1.0)
    say(tree, two[:10], 100, 2.0)
    say(tree, one[:20], 0, 3.0)
    assert sorted(tree.evict(DEVICE, SWA, 3).freed[DEVICE, SWA]) == [7, 8, 9]
    assert tree.match(b"", two, 10).device == 10
    assert tree.match(b"", one, 20).device == 20


def test_an_island_where_lines_part_stays_as_recent_as_its_last_use() -> None:
    """A system prompt's window would go first, however many requests begin with it."""
    tree = UnifiedTree(TreeRules(1, (FULL, SWA), 2), make_policy("lru"))
    prefix = tokens(10)
    say(tree, prefix, 0, 1.0)
    for number in range(1, 4):
        say(tree, prefix + array("I", [number * 1000 + i for i in range(8)]), number * 100, 1.0 + number)
    # The first branch's island is the oldest; the prefix was used by the last one.
    assert sorted(tree.evict(DEVICE, SWA, 3).freed[DEVICE, SWA]) == [115, 116, 117]
    assert tree.match(b"", prefix, 10).device == 10
