"""What open sessions refer to goes last, in every component, and references follow what becomes of pages."""

from __future__ import annotations

from array import array

import pytest

from hicache.tree import POLICIES, SessionRefs, TreeRules, UnifiedTree
from hicache.tree.eviction import EvictionPolicy, Lru, Stats
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def refer(b, tokens: str, session: SessionRefs, depth: int | None = None) -> None:
    lease = b.lock(tokens, depth)
    b.tree.refer(lease, session)
    b.tree.release(lease)
    b.tree.check_integrity()


def counts(b, tokens: str) -> list[int]:
    return b.tree.references(b.match(tokens))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_session_refers_to_goes_last_and_no_later(bed, policy: str) -> None:
    """An agent that thinks for a minute would find its conversation gone, or the cache full for good."""
    b = bed(policy=policy)
    session = SessionRefs()
    for name in "kabc":  # under some policy or other each of these would be the first to go
        b.serve(name * 4)
        if name in "ab":
            refer(b, name * 4, session if name == "a" else SessionRefs())
    b.evict(8)
    assert [b.full(name * 4) for name in "kabc"] == [0, 4, 4, 0]
    assert b.evict(8) == {(DEVICE, FULL): 8}
    assert not session.ends


@pytest.mark.parametrize("policy", ["lru", "mru", "adaptive"])
def test_fewer_sessions_go_before_more(bed, policy: str) -> None:
    """The prompt that ten agents share would go before the last words of one."""
    b = bed(policy=policy)
    for name, sessions in (("aa", 2), ("bb", 3), ("cc", 1)):
        b.serve(name)
        for _ in range(sessions):
            refer(b, name, SessionRefs())
    for gone in ("cc", "aa", "bb"):
        b.evict(2)
        assert b.full(gone) == 0
        assert b.tree.resident(DEVICE, FULL) == {"cc": 4, "aa": 2, "bb": 0}[gone]


def test_closing_drops_a_sessions_own_references_and_leaves_those_of_others(bed) -> None:
    """One user's goodbye would cost another the prompt they share."""
    b = bed()
    mine, other = SessionRefs(), SessionRefs()
    b.serve("sysmine")
    refer(b, "sysmine", mine)
    b.serve("sysother")
    refer(b, "sysother", other)
    b.serve("new")
    assert counts(b, "sysmine") == [2, 2, 2, 1, 1, 1, 1]
    b.tree.unrefer(mine)
    b.tree.unrefer(mine)
    assert counts(b, "sysmine") == [1, 1, 1, 0, 0, 0, 0]
    b.tree.check_integrity()
    b.evict(7)
    assert (b.full("sysmine"), b.full("sysother"), b.full("new")) == (3, 8, 0)


def test_a_session_counts_once_however_often_it_comes(bed) -> None:
    """A talkative client would outweigh every other one."""
    b = bed()
    session = SessionRefs()
    for tokens in ("ab", "abcd", "abcd", "abxy", "abcdef", "ab"):
        b.serve(tokens)
        refer(b, tokens, session)
    assert counts(b, "abcdef") == [1] * 6
    assert counts(b, "abxy") == [1] * 4
    assert len(session.ends) == 2  # the two branches


def test_only_the_windows_and_states_that_a_session_goes_on_from_are_kept(bed) -> None:
    """Old windows and checkpoints of a long conversation would push out those that others need."""
    b = bed((FULL, SWA, MAMBA), window=2)
    session = SessionRefs()
    b.serve("abcd", states=(4,))
    refer(b, "abcd", session)
    b.serve("abcdefghij", states=(10,))
    refer(b, "abcdefghij", session)
    b.serve("wxyz", states=(4,))
    assert b.evict(2, MAMBA) == {(DEVICE, MAMBA): 2}
    assert b.match("abcdefghij").device == 10
    b.evict(11, SWA)
    assert b.match("abcdefghij").device == 10
    assert b.match("wxyz").device == 0
    assert b.evict(3, SWA) == {(DEVICE, SWA): 3}  # and these are no pins either
    assert b.evict(1, MAMBA) == {(DEVICE, MAMBA): 1}


def test_references_hold_on_the_host_too(bed) -> None:
    """A session demoted from the device would be the next victim of the host."""
    b = bed()
    for tokens in ("aaaa", "bbbb"):
        b.serve(tokens)
        b.back_up(tokens)
    refer(b, "aaaa", SessionRefs())
    b.evict(8)
    assert b.evict(4, FULL, HOST) == {(HOST, FULL): 4}
    assert (b.full("aaaa"), b.full("bbbb")) == (4, 0)


def test_pages_that_replace_lost_ones_are_nobodys_until_they_are_used(bed) -> None:
    """A session would go on to hold what another request computed after it had lost its own."""
    b = bed()
    session = SessionRefs()
    b.serve("abcdef")
    refer(b, "abcdef", session)
    b.evict(3)
    assert counts(b, "abcdef") == [1, 1, 1]
    b.serve("abcdefgh")
    assert counts(b, "abcdefgh") == [1, 1, 1, 0, 0, 0, 0, 0]
    b.tree.unrefer(session)
    assert counts(b, "abcdefgh") == [0] * 8
    b.tree.check_integrity()


def test_references_follow_splits_and_joins(bed) -> None:
    """A branch off a conversation would lose it its standing, or give it to the branch."""
    b = bed((FULL, SWA, MAMBA), window=2)
    session, other = SessionRefs(), SessionRefs()
    b.serve("abcdefgh", states=(8,))
    refer(b, "abcdefgh", session)
    b.serve("abcdeXY", states=(7,))  # splits it
    refer(b, "abcdeXY", other)
    assert counts(b, "abcdefgh") == [2] * 5 + [1] * 3
    b.tree.unrefer(other)
    b.evict(2)  # XY; what is left is one span again
    assert counts(b, "abcdefgh") == [1] * 8
    b.tree.unrefer(session)
    assert counts(b, "abcdefgh") == [0] * 8
    b.tree.check_integrity()


class CountedLru(Lru):
    """LRU that counts how often a key is asked for."""

    asked = 0

    def key(self, stats: Stats, tokens_before: int) -> float:
        CountedLru.asked += 1
        return super().key(stats, tokens_before)


def _cost_of_evictions(referred: int) -> int:
    """Keys asked for by 50 evictions among 2000 paths, of which so many percent are referred to."""
    policy: EvictionPolicy = CountedLru()
    tree = UnifiedTree(TreeRules(1, (FULL,)), policy)
    for i in range(2000):
        tokens = array("I", [i, 1, 2, 3])
        lease = tree.lock(tree.match(b"", tokens, 4), 0, DEVICE)
        tree.insert(lease, tokens, 0, 4, full=array("i", range(4 * i, 4 * i + 4)), now=float(i))
        if i * 37 % 100 < referred:
            tree.refer(lease, SessionRefs())
        tree.release(lease)
    before = CountedLru.asked
    for _ in range(50):
        assert len(tree.evict(DEVICE, FULL, 2).freed[(DEVICE, FULL)]) == 2
    return CountedLru.asked - before


def test_an_eviction_looks_at_no_more_when_most_pages_are_referred_to() -> None:
    """With sessions for everybody, each allocation would pass by all of them: stalls after an hour."""
    costs = [_cost_of_evictions(share) for share in (0, 50, 99, 100)]
    assert len(set(costs)) == 1
    assert costs[0] <= 200
