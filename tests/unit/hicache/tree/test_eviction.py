"""What leaves first, what it takes along, and that a call costs nothing that grows with the tree."""

from __future__ import annotations

from array import array

import pytest

from hicache.errors import ConfigError
from hicache.tree import POLICIES, Match, TreeRules, UnifiedTree, make_policy
from hicache.tree.eviction import EvictionPolicy, Lru, Stats
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def test_a_tail_is_trimmed_page_by_page_to_the_exact_count(bed) -> None:
    """Freeing a whole conversation for one page would throw away hits that still fit."""
    b = bed()
    b.serve("abcdefgh")
    assert b.evict(3) == {(DEVICE, FULL): 3}
    assert b.full("abcdefgh") == 5
    assert b.evict(99) == {(DEVICE, FULL): 5}
    assert b.evict(1) == {}


def test_a_hot_prefix_does_not_keep_its_cold_tail(bed) -> None:
    """Otherwise a shared system prompt keeps every answer that followed it, and hot answers go instead."""
    b = bed()
    b.serve("systemXXXX")
    b.serve("other")
    b.serve("system")  # an access to the prefix of the first span, later than to "other"
    b.evict(4)
    assert b.full("systemXXXX") == 6
    assert b.full("other") == 5


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [
        ("lru", "b"),
        ("mru", "a"),
        ("fifo", "b"),
        ("filo", "a"),
        ("lfu", "a"),
        ("slru", "a"),
        ("priority", "a"),
    ],
)
def test_each_policy_keeps_what_its_name_says(bed, policy: str, survivor: str) -> None:
    """An operator who picks a policy gets that one: a is older and used twice, b is newer and used once."""
    b = bed(policy=policy)
    b.serve("aaaa")
    b.serve("bbbb")
    if policy in ("lfu", "slru"):
        b.serve("aaaa")
        b.serve("bbbbcccc")
        b.serve("aaaa")
        b.serve("aaaa")
        b.evict(4)
        assert b.full("bbbbcccc") == 4
        b.evict(4)
    elif policy == "priority":
        lease = b.lock("aaaa")
        b.tree.touch(lease, 2.5, priority=3)
        b.tree.release(lease)
        b.evict(4)
    else:
        b.evict(4)
    assert {name for name in "ab" if b.full(name * 4)} == {survivor}


def test_tlru_gives_up_what_a_follow_up_does_not_need_first(bed) -> None:
    """With a budget of 4 tokens to recompute, the last 4 of a long conversation are free to take."""
    b = bed(policy="tlru", threshold=4, next_prompt_estimate=0)
    b.serve("aaaa")  # a follow-up may recompute all of it
    b.serve("bbbbbbbb")
    b.evict(4)
    assert (b.full("aaaa"), b.full("bbbbbbbb")) == (0, 8)
    b.serve("cc")
    b.evict(4)
    assert (b.full("bbbbbbbb"), b.full("cc")) == (4, 2)
    b.evict(2)
    assert (b.full("bbbbbbbb"), b.full("cc")) == (4, 0)


def test_an_unknown_policy_or_option_is_refused_by_name() -> None:
    """A typo must not silently run another policy."""
    with pytest.raises(ConfigError, match="'lur' is unknown; there are lru, lfu, slru"):
        make_policy("lur")
    with pytest.raises(ConfigError, match="unknown option 'treshold'; there are threshold"):
        make_policy("tlru", treshold=3)
    with pytest.raises(ConfigError, match="lru: unknown option 'k'; there are none"):
        make_policy("lru", k=1)
    with pytest.raises(ConfigError, match="protected_threshold='x' must be an integer"):
        make_policy("slru", protected_threshold="x")
    with pytest.raises(ConfigError, match="protected_threshold=0 must be at least 1"):
        make_policy("slru", protected_threshold=0)
    with pytest.raises(ConfigError, match="tlru: threshold=-1"):
        make_policy("tlru", threshold=-1)
    assert [make_policy(name).name for name in POLICIES] == list(POLICIES)


def test_windows_go_alone_from_the_front_of_the_oldest_run(bed) -> None:
    """The page farthest from the boundary it serves is the cheapest to lose."""
    b = bed((FULL, SWA), window=3)
    b.serve("abcdef")
    b.serve("uvw")
    assert b.evict(2, SWA) == {(DEVICE, SWA): 2}
    found = b.match("abcdef")
    assert (found.full, found.device) == (6, 6)
    assert b.tree.presence(found).swa == bytearray([0, 0, 1, 1, 1, 1])
    assert b.evict(2, SWA) == {(DEVICE, SWA): 2}
    assert b.match("abcdef").device == 0
    assert b.match("uvw").device == 3


def test_a_touched_window_outlives_the_front_of_its_run(bed) -> None:
    """A conversation that goes on needs its last window, not the window of last week."""
    b = bed((FULL, SWA), window=2)
    b.serve("abcdefgh")
    b.serve("xyz")
    b.serve("abcdefgh")  # stamps the last window and one page, no more
    assert b.evict(5, SWA) == {(DEVICE, SWA): 5}
    assert b.match("xyz").device == 3
    assert b.evict(3, SWA) == {(DEVICE, SWA): 3}
    assert (b.match("xyz").device, b.match("abcdefgh").device) == (0, 8)


def test_states_go_alone_oldest_first(bed) -> None:
    """A checkpoint lost must not cost KV."""
    b = bed((FULL, MAMBA))
    b.serve("abcd", states=(2,))
    b.serve("abcdef", states=(6,))
    assert b.evict(1, MAMBA) == {(DEVICE, MAMBA): 1}
    assert b.match("abcdef").device == 6
    assert b.match("abcd").device == 0
    assert b.match("abcd").branch == (4,)


def test_a_full_page_takes_its_window_and_state_along(bed) -> None:
    """A window without the KV before it would be a hit that is not there."""
    b = bed((FULL, SWA, MAMBA))
    b.serve("abcd", states=(3, 4))
    assert b.evict(1) == {(DEVICE, FULL): 1, (DEVICE, SWA): 1, (DEVICE, MAMBA): 1}
    assert b.match("abcd").device == 3


def test_a_page_with_a_host_copy_is_demoted_and_counted(bed) -> None:
    """Demotion is what the second tier is for; losing the page would be a recomputation."""
    b = bed()
    b.serve("abcd")
    b.back_up("abcd")
    outcome = b.tree.evict(DEVICE, FULL, 3)
    assert (outcome.demoted, outcome.lost) == (3, 0)
    found = b.match("abcd")
    assert (found.full_device, found.device, found.host) == (1, 1, 4)
    outcome = b.tree.evict(HOST, FULL, 9)
    assert (outcome.demoted, outcome.lost, len(outcome.freed[(HOST, FULL)])) == (0, 3, 3)


def test_a_device_page_without_copy_takes_host_only_descendants_along(bed) -> None:
    """A page nobody can reach is memory nobody can use."""
    b = bed()
    b.serve("abcd")
    ids = array("I", map(ord, "abcdef"))
    assert b.tree.insert_host(b"", ids, 4, 6, full=b.take(HOST, FULL, 2)) == {}
    assert b.match("abcdef").host == 6
    assert b.evict(1) == {(DEVICE, FULL): 1, (HOST, FULL): 2}
    assert b.full("abcdef") == 3


def test_a_host_lease_below_keeps_the_device_page_above(bed) -> None:
    """A load in flight from the host must not lose the prefix it continues."""
    b = bed()
    b.serve("abcd")
    ids = array("I", map(ord, "abcdef"))
    b.tree.insert_host(b"", ids, 4, 6, full=b.take(HOST, FULL, 2))
    lease = b.lock("abcdef", tier=HOST)
    assert b.tree.evictable(DEVICE, FULL) == 0
    assert b.evict(4) == {}
    b.tree.release(lease)
    assert b.tree.evictable(DEVICE, FULL) == 4
    assert b.evict(4) == {(DEVICE, FULL): 4, (HOST, FULL): 2}


def test_a_host_copy_lets_a_page_under_a_host_lease_leave_the_device(bed) -> None:
    """What was kept only for lack of a copy must become evictable the moment the copy is there."""
    b = bed()
    b.serve("abcd")
    lease = b.lock("abcd", tier=HOST)
    assert b.evict(4) == {}
    b.tree.insert_host(b"", array("I", map(ord, "abcd")), 0, 4, full=b.take(HOST, FULL, 4))
    b.tree.check_integrity()
    assert b.evict(4) == {(DEVICE, FULL): 4}
    assert b.match("abcd").host == 4
    b.tree.release(lease)


def test_a_prefix_is_as_recent_as_the_branches_that_left_the_device(bed) -> None:
    """A system prompt used a moment ago must not go before a conversation that ended long before."""
    b = bed()
    b.serve("abcX")
    b.serve("abcY")
    b.back_up("abcX")
    b.back_up("abcY")
    b.serve("www")
    lease = b.lock("www")
    b.serve("abcX")
    b.evict(2)
    assert b.match("abcX").full_device == 3
    b.tree.release(lease)
    b.evict(1)
    assert (b.match("abcX").full_device, b.full("www")) == (3, 2)


def test_reclaim_frees_host_copies_that_the_device_holds_too(bed) -> None:
    """A full host tier must be able to take new pages while the device has the old ones anyway."""
    b = bed()
    b.serve("abcd")
    b.back_up("abcd")
    lease = b.lock("abcd", 1, HOST)
    assert len(b.tree.reclaim_duplicates(2)) == 2
    assert len(b.tree.reclaim_duplicates(9)) == 1  # one is under a HOST lease
    b.tree.release(lease)
    assert len(b.tree.reclaim_duplicates(9)) == 1
    b.tree.check_integrity()
    assert b.match("abcd").device == 4


class CountedLru(Lru):
    """LRU that counts how often a key is asked for: what an eviction looks at."""

    asked = 0

    def key(self, stats: Stats, tokens_before: int) -> float:
        CountedLru.asked += 1
        return super().key(stats, tokens_before)


def _cost_of_evictions(conversations: int) -> int:
    policy: EvictionPolicy = CountedLru()
    tree = UnifiedTree(TreeRules(1, (FULL,)), policy)
    for i in range(conversations):
        tokens = array("I", [i, 1, 2, 3])
        lease = tree.lock(tree.match(b"", tokens, 4), 0, DEVICE)
        tree.insert(lease, tokens, 0, 4, full=array("i", range(4 * i, 4 * i + 4)), now=float(i))
        tree.release(lease)
    before = CountedLru.asked
    for _ in range(50):
        assert len(tree.evict(DEVICE, FULL, 2).freed[(DEVICE, FULL)]) == 2
    return CountedLru.asked - before


def test_an_eviction_looks_at_no_more_of_a_large_tree_than_of_a_small_one() -> None:
    """A scan over leaves makes every allocation slower the more is cached."""
    assert _cost_of_evictions(5000) == _cost_of_evictions(100) <= 200


def test_repeated_touches_do_not_pile_up_in_the_heaps(bed) -> None:
    """A server that runs for weeks must not leak an entry an access."""
    b = bed(policy="mru")
    b.serve("abcd")
    lease = b.lock("abcd")
    for i in range(2000):
        b.tree.touch(lease, 10.0 + i)
    heap = b.tree._forest.full[DEVICE]
    assert len(heap) == 1
    assert len(heap._free._heap) <= 66


def test_drop_all_leaves_only_what_a_lease_protects(bed) -> None:
    """A flush while requests run must not pull pages from under them."""
    b = bed((FULL, SWA, MAMBA))
    b.serve("abcdef", states=(2, 4, 6))
    b.back_up("abcdef")
    lease = b.lock("abcdef", 4)
    freed = {key: len(slots) for key, slots in b.tree.drop_all().items()}
    assert freed == {
        (DEVICE, FULL): 2,
        (DEVICE, SWA): 4,
        (DEVICE, MAMBA): 2,
        (HOST, FULL): 6,
        (HOST, SWA): 6,
        (HOST, MAMBA): 3,
    }
    b.tree.check_integrity()
    assert b.match("abcdef").device == 4
    b.tree.release(lease)
    b.tree.drop_all()
    assert b.match("abcdef").node is None
    assert isinstance(b.match("abcdef"), Match)


@pytest.mark.parametrize("kind", [FULL, SWA, MAMBA])
def test_under_mru_an_access_alone_makes_an_entry_the_next_to_go(bed, kind: Component) -> None:
    """A read that inserts nothing would leave the order as it was: another's pages go, not the newest."""
    b = bed((FULL, SWA, MAMBA), policy="mru", window=2)
    for name in "abc":
        b.serve(name * 4, states=(4,))
    lease = b.lock("aaaa")
    b.tree.touch(lease, 99.0)
    b.tree.release(lease)
    count = {FULL: 4, SWA: 2, MAMBA: 1}[kind]
    assert b.evict(count, kind)[(DEVICE, kind)] == count
    assert [name for name in "abc" if b.match(name * 4).device == 4] == ["b", "c"]
