"""The adaptive policy: loops larger than the cache, conversations that end, and what it learns from."""

from __future__ import annotations

import random
from array import array

import pytest

from hicache.errors import ConfigError
from hicache.tree import TreeRules, UnifiedTree, make_policy
from hicache.tree.adaptive import Adaptive
from hicache.tree.reuse import FRESH, REUSED, ReuseAges, Sampler
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST = Tier.DEVICE, Tier.HOST


class SmallCache:
    """A device tier of `room` pages of one token each, asked for whole paths."""

    def __init__(self, room: int, policy: str = "adaptive") -> None:
        self.tree = UnifiedTree(TreeRules(1, (FULL,)), make_policy(policy), host=False)
        self.room = room
        self.slots = 0
        self.now = 0.0

    def ask(self, path: list[int]) -> int:
        """Serve one request; return how many of its pages were there."""
        self.now += 1
        tokens = array("I", path)
        found = self.tree.match(b"", tokens, len(tokens))
        lease = self.tree.lock(found, found.full, DEVICE)
        self.tree.touch(lease, self.now)
        missing = len(tokens) - found.full
        over = self.tree.resident(DEVICE, FULL) + missing - self.room
        if over > 0:
            assert len(self.tree.evict(DEVICE, FULL, over).freed[(DEVICE, FULL)]) == over
        fresh = array("i", range(self.slots, self.slots + missing))
        self.slots += missing
        self.tree.insert(lease, tokens, found.full, len(tokens), full=fresh, now=self.now)
        self.tree.release(lease)
        return found.full

    def loop(self, conversations: range, length: int) -> float:
        """Ask each conversation once; return the share of pages found."""
        found = sum(self.ask([1000 * c + i for i in range(length)]) for c in conversations)
        return found / (len(conversations) * length)


def test_a_loop_a_little_larger_than_the_cache_keeps_most_of_its_hits() -> None:
    """Under LRU one conversation too many costs every hit: the cliff that operators meet."""
    lru, adaptive = SmallCache(400, "lru"), SmallCache(400)
    for _ in range(8):
        last = lru.loop(range(50), 10), adaptive.loop(range(50), 10)
    assert last[0] == 0
    assert last[1] > 0.72  # 80 % fits


def test_conversations_that_end_leave_once_they_are_overdue() -> None:
    """Pages nobody asks for again must not hold room for ever: the cache would shrink with every user."""
    cache = SmallCache(400)
    for _ in range(6):
        cache.loop(range(50), 10)
    for _ in range(6):
        last = cache.loop(range(100, 135), 10)
    assert last == 1


def test_where_recent_pages_return_soonest_the_oldest_go() -> None:
    """A policy for loops that spoils the usual case would cost more than the cliff."""
    draw, hits = random.Random(5), {"lru": 0, "adaptive": 0}
    asked = [int(draw.paretovariate(0.7)) % 400 for _ in range(3000)]
    for policy in hits:
        cache = SmallCache(300, policy)
        hits[policy] = sum(cache.ask([1000 * c + i for i in range(6)]) for c in asked)
    assert hits["adaptive"] > 0.99 * hits["lru"]


def test_the_same_requests_give_the_same_evictions() -> None:
    """A run that cannot be repeated cannot be explained."""
    runs = []
    for _ in range(2):
        cache, draw = SmallCache(150), random.Random(7)
        runs.append([cache.ask([100 * draw.randrange(30) + i for i in range(8)]) for _ in range(400)])
    assert runs[0] == runs[1]


def test_an_idle_night_makes_nothing_older() -> None:
    """In the morning the cache would throw out what everybody returns to."""
    cache = SmallCache(400)
    for _ in range(8):
        cache.loop(range(50), 10)
    cache.now += 1e6
    assert cache.loop(range(50), 10) > 0.7


def test_what_is_leased_stays_and_is_given_up_afterwards(bed) -> None:
    """A candidate lost while it was protected would hold its page until the server restarts."""
    b = bed(policy="adaptive")
    b.serve("abcd")
    b.serve("wxyz")
    leases = [b.lock("abcd"), b.lock("wxyz")]
    assert b.evict(8) == {}
    for lease in leases:
        b.tree.release(lease)
    assert b.evict(8) == {(DEVICE, FULL): 8}


def test_pages_beyond_the_last_state_go_before_those_a_hit_can_use(bed) -> None:
    """A tail without a checkpoint cannot be hit: keeping it while trimming another makes two broken ones."""
    b = bed((FULL, MAMBA), policy="adaptive")
    b.serve("abcdef", states=(6,))
    b.serve("uvwxyz", states=(3, 6))
    b.evict(1)
    broken = "abcdef" if b.match("abcdef").full == 5 else "uvwxyz"
    usable = 0 if broken == "abcdef" else 3
    b.evict(5 - usable)
    assert b.match(broken).full == usable
    other = "uvwxyz" if broken == "abcdef" else "abcdef"
    assert b.match(other).full == 6


def test_a_state_where_a_request_ended_outlives_one_on_the_way(bed) -> None:
    """Checkpoints of a long prefill would push out the ones that conversations continue from."""
    b = bed((FULL, MAMBA), policy="adaptive")
    b.serve("abcdef", states=(6,))
    b.serve("uvwxyz", states=(2, 4, 6))
    assert b.evict(2, MAMBA) == {(DEVICE, MAMBA): 2}
    assert b.match("abcdef").device == 6
    assert b.match("uvwxyz").device == 6


def test_a_window_where_a_request_ended_outlives_what_is_before_it(bed) -> None:
    """Dead window pages of a long prompt would cost other conversations their only way back in."""
    b = bed((FULL, SWA), policy="adaptive", window=2)
    b.serve("ab")
    b.serve("qrstuvwxyz")
    b.evict(7, SWA)
    assert b.match("ab").device == 2
    assert b.match("qrstuvwxyz").device == 10


def test_the_worth_of_waiting_rises_until_a_page_is_due_and_ends_when_it_is_overdue() -> None:
    """This order is the policy: youngest first before the date, and first of all what missed it."""
    ages = ReuseAges()
    for number in range(400):
        ages.access(float(number))
        ages.see(number % 40, 1, REUSED)
        if number < 60:
            ages.see(1000 + number, 1, REUSED)  # never again
    young, due, overdue = (ages.worth(REUSED, 399.0 - age) for age in (2, 36, 120))
    assert young < due
    assert overdue < young / 2


def test_what_is_computed_again_counts_as_a_hit_that_was_missed() -> None:
    """Only what was kept would be seen to return, and what the cache throws out would never be learned."""
    ages = ReuseAges()
    for number in range(320):
        ages.access(float(number))
        ages.see(number % 20, 1, FRESH)
    assert ages.worth(FRESH, 319.0 - 15) > 0
    assert ages.worth(REUSED, 319.0 - 15) == 0


def test_records_are_bounded_whatever_comes() -> None:
    """A table that grows with every request is a leak of the serving process."""
    ages = ReuseAges()
    for number in range(5000):
        ages.access(float(number))
        ages.see(number, 3, FRESH)
        ages.bound(300)
    assert ages.remembered <= 100 + 2048
    assert ages.worth(FRESH, 0.0) == 0


def test_the_sample_is_the_same_for_every_path_and_stands_for_all_pages() -> None:
    """Weights that do not add up would favour long conversations, or short ones."""
    sampler = Sampler()
    for depth in (1, 31, 32, 100, 1000, 4000):
        at = sampler.positions(depth)
        assert at == sorted(set(at))
        assert sampler.positions(4000)[: len(at)] == at
        covered = sum(sampler.weight(i) for i in range(len(at)))
        assert depth <= covered < depth + sampler.weight(len(at) - 1)
    assert len(sampler.positions(4000)) < 160


def test_equal_pages_in_different_scopes_or_after_different_prefixes_are_different() -> None:
    """Otherwise one tenant's use would make another's pages look wanted."""
    keys = [list(Sampler.keys(scope, iter(pages))) for scope, pages in (
        (b"a", [b"x", b"y"]), (b"b", [b"x", b"y"]), (b"a", [b"z", b"y"])
    )]  # fmt: skip
    assert len({key for path in keys for key in path}) == 6


def test_a_half_life_of_nothing_is_refused() -> None:
    """Zero would divide, and a negative one would let the oldest evidence weigh most."""
    with pytest.raises(ConfigError, match="half_life=0"):
        Adaptive(half_life=0)
