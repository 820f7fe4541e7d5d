"""The radix-cache backend without SGLang's tree: the order of leaves, and what it is not combined with."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.integrations.sglang.radix import backend
from hicache.integrations.sglang.radix.order import LeafOrder
from hicache.tree.adaptive import USELESS, Adaptive
from hicache.tree.eviction import Stats
from hicache.tree.observing import see_request
from hicache.tree.reuse import FRESH, REUSED, ReuseAges


class Leaf:
    """A leaf as the order sees it."""

    def __init__(self, number: int, last: float, hits: int, references: int, reachable: bool) -> None:
        self.number = number
        self.stats = Stats(last=last, hits=hits)
        self.references = references
        self.reachable = reachable


def order(policy: Adaptive, leaves: list[Leaf]) -> LeafOrder[Leaf]:
    return LeafOrder(
        policy,
        leaves,
        identity=lambda leaf: leaf.number,
        stats=lambda leaf: leaf.stats,
        references=lambda leaf: leaf.references,
        reachable=lambda leaf: leaf.reachable,
    )


def taught() -> Adaptive:
    """A policy that has seen a loop of 40 conversations, and that what is fresh seldom returns."""
    policy = Adaptive()
    for step in range(400):
        talk = step % 40
        tokens = memoryview(b"".join(bytes([talk, page]) * 8 for page in range(4)))
        found = 4 if step >= 40 else 0
        see_request(policy.learned, b"", tokens, 16, now=float(step), found=found, start=0, end=4, cached=64)
    return policy


def kind_of(leaf: Leaf) -> int:
    if not leaf.reachable:
        return USELESS
    return REUSED if leaf.stats.hits >= 2 else FRESH


def next_by_reading_all(policy: Adaptive, leaves: list[Leaf]) -> Leaf:
    fewest = min(leaf.references for leaf in leaves)
    ends = []
    for kind in (FRESH, REUSED, USELESS):
        of_kind = [leaf for leaf in leaves if leaf.references == fewest and kind_of(leaf) == kind]
        if of_kind:
            oldest = min(of_kind, key=lambda leaf: (leaf.stats.last, leaf.number))
            newest = max(of_kind, key=lambda leaf: (leaf.stats.last, leaf.number))
            worth, is_newest = policy.lesser_end((kind, oldest.stats.last), (kind, newest.stats.last))
            ends.append((worth, newest if is_newest else oldest))
    return min(ends, key=lambda end: end[0])[1]


@pytest.mark.parametrize("seed", range(5))
def test_leaves_go_in_the_order_of_a_reading_of_all(seed: int) -> None:
    """Sorted lists are only a faster way to the leaf that the policy names, also while parents join in."""
    chance = random.Random(seed)
    policy = taught()

    def leaf(number: int) -> Leaf:
        last = float(chance.randrange(400))
        return Leaf(number, last, chance.randrange(1, 4), chance.randrange(2), chance.random() < 0.9)

    left = [leaf(number) for number in range(60)]
    queue = order(policy, left)
    taken_newest = 0
    for number in range(60, 90):
        wanted = next_by_reading_all(policy, left)
        assert queue.pop() is wanted
        left.remove(wanted)
        taken_newest += any(other.stats.last < wanted.stats.last for other in left)
        left.append(leaf(number))
        queue.add(left[-1])
    while left:
        wanted = next_by_reading_all(policy, left)
        assert queue.pop() is wanted
        left.remove(wanted)
    assert queue.pop() is None
    assert taken_newest > 5


def test_leaves_that_no_session_refers_to_go_first() -> None:
    """A live session's cache would go to strangers otherwise."""
    leaves = [Leaf(0, 1.0, 1, 2, True), Leaf(1, 9.0, 5, 0, True), Leaf(2, 1.0, 1, 1, True)]
    queue = order(taught(), leaves)
    assert [queue.pop(), queue.pop(), queue.pop()] == [leaves[1], leaves[2], leaves[0]]


def test_what_a_request_shows_is_one_access_however_often_it_publishes() -> None:
    """Ages count requests: one that publishes chunk by chunk must not make all others old."""
    reuse = ReuseAges()
    tokens = memoryview(bytes(range(64)))
    see_request(reuse, b"", tokens, 8, now=1.0, found=2, start=0, end=4, cached=8)
    born = reuse.remembered
    see_request(reuse, b"", tokens, 8, now=2.0, found=2, start=4, end=8, cached=8)
    assert reuse.remembered == born + 4  # four pages more, no access more


def context(**other: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "server_args": SimpleNamespace(radix_eviction_policy="lru", nnodes=1),
        "params": SimpleNamespace(req_to_token_pool=object()),
        "disable_radix_cache": False,
        "is_hybrid_swa": False,
        "full_tokens_per_layer": None,
        **other,
    }
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("other", "core", "said"),
    [
        ({"disable_radix_cache": True}, "", "drop one of them"),
        ({"server_args": SimpleNamespace(enable_lmcache=True)}, "", "--enable-lmcache are both the cache"),
        ({"server_args": SimpleNamespace(enable_flexkv=True)}, "", "--enable-flexkv are both the cache"),
        ({"is_hybrid_swa": True, "full_tokens_per_layer": 0}, "", "needs layers with FULL attention"),
        ({}, "rust", "is 'rust': unset it"),
        ({"server_args": SimpleNamespace(nnodes=2)}, "", "serve a replica on one node"),
        (
            {"params": SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_c128_sidecar=1))},
            "",
            "and this model has others: drop the flag",
        ),
    ],
)
def test_a_combination_that_would_not_do_what_it_says_is_refused(
    other: dict[str, Any], core: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line names the flag and what to change; nothing falls back to LRU in silence."""
    monkeypatch.setattr(backend.metadata, "version", lambda name: "0.5.23")
    reason = backend.refusal(context(**other), "adaptive", core=core)
    assert said in reason
    assert reason.startswith("--radix-cache-backend hicache")
    assert "\n" not in reason
    assert backend.refusal(context(), "adaptive", core="python") == ""


def test_a_version_never_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner parts change their meaning without changing their names."""
    monkeypatch.setattr(backend.metadata, "version", lambda name: "0.6.0")
    reason = backend.refusal(context(), "lru", core="")
    assert "was never tested with 0.6.0 (tested: 0.5.23)" in reason


def test_the_flag_alone_means_adaptive() -> None:
    """Whoever names the backend wants its policy; who names a policy gets that one."""
    assert backend.chosen_policy(SimpleNamespace(radix_eviction_policy="lru")) == "adaptive"
    given = SimpleNamespace(radix_eviction_policy="lru", _radix_eviction_policy_explicitly_set=True)
    assert backend.chosen_policy(given) == "lru"
    assert backend.chosen_policy(SimpleNamespace(radix_eviction_policy="Adaptive")) == "adaptive"
    assert backend.chosen_policy(SimpleNamespace(radix_eviction_policy="priority")) == "priority"
