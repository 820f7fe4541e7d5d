"""Random histories of the tree, each step compared with the naive cache and followed by a full check.

HICACHE_HISTORY_OPS sets how many operations the bounded run takes in all (110,000), and
HICACHE_HISTORY_SEED where its seeds begin; a failure names the seed and the step to repeat.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from hicache.testing.history import TreeHistory
from hicache.testing.history_shape import HistoryShape
from hicache.tree import POLICIES, TreeRules, UnifiedTree, make_policy
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
KINDS = {
    "full": (FULL,),
    "full-swa": (FULL, SWA),
    "full-mamba": (FULL, MAMBA),
    "full-swa-mamba": (FULL, SWA, MAMBA),
}
OPS = int(os.environ.get("HICACHE_HISTORY_OPS", "110000"))
SEED = int(os.environ.get("HICACHE_HISTORY_SEED", "20"))
STEPS = 430  # of one history


def take_histories(kinds: tuple[Component, ...], policy: str, seed: int, ops: int) -> Counter[str]:
    """Run histories of varied page size, window and world until `ops` operations are done."""
    done: Counter[str] = Counter()
    while sum(done.values()) < ops:
        draw = random.Random(seed)
        options = {"threshold": 4, "next_prompt_estimate": 2} if policy == "tlru" else {}
        others = {
            c: draw.choice(["lru", "fifo", "mru"]) for c in kinds if c is not FULL and draw.random() >= 0.7
        }
        rules = TreeRules(
            draw.choice([1, 2, 2, 3]),
            kinds,
            draw.choice([1, 2, 3, 5]) if SWA in kinds else 0,
            align_pages=draw.choice([1, 1, 1, 2, 3]),
        )
        policies = {
            component: make_policy(others[component])
            if component in others
            else make_policy(policy, **options).for_component(component, rules)
            for component in kinds
        }
        shape = HistoryShape(
            device_slots=draw.choice([8, 14, 14, 24]),
            host_slots=draw.choice([8, 16, 16, 32]),
            alphabet=draw.choice([1, 2, 2, 3]),
            longest=draw.choice([4, 9, 9, 14]),
            scopes=draw.choice([1, 2]),
            most_leases=draw.choice([2, 5, 7]),
            islands=SWA in kinds and draw.random() < 0.5,
        )
        done += TreeHistory(UnifiedTree, rules, policies, seed, shape).run(STEPS)
        seed += 1
    return done


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", KINDS)
def test_every_answer_of_a_random_history_equals_the_naive_cache(kinds: str, policy: str) -> None:
    """A difference is a wrong hit, a lost slot or a page freed under a lease: wrong bytes for a user."""
    share = -(-OPS // (len(KINDS) * len(POLICIES)))
    first = SEED + 1_000_000 * list(POLICIES).index(policy) + 100_000 * list(KINDS).index(kinds)
    done = take_histories(KINDS[kinds], policy, first, share)
    assert sum(done.values()) >= share
    if share >= 2000:  # enough for every kind of operation to come up
        assert (
            min(done[name] for name in ("_grow", "_evict", "_write", "_written", "_fetch", "_drop_all")) > 0
        )


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kinds", KINDS)
def test_long_random_histories_equal_the_naive_cache(kinds: str) -> None:
    """As above, a million operations for each set of components."""
    for number, policy in enumerate(POLICIES):
        take_histories(KINDS[kinds], policy, 50_000_000 + 1_000_000 * number, 125_000)
