"""Random histories of the tree with an observer: what was told is what is held, after every step."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from hicache.testing.history import TreeHistory
from hicache.testing.history_shape import HistoryShape
from hicache.testing.residency import Mirror, check
from hicache.tree import TreeRules, UnifiedTree, make_policy
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
KINDS = {
    "full": (FULL,),
    "full-swa": (FULL, SWA),
    "full-mamba": (FULL, MAMBA),
    "full-swa-mamba": (FULL, SWA, MAMBA),
}
SEEDS = int(os.environ.get("HICACHE_RESIDENCY_SEEDS", "7"))  # per set of components
STEPS = 300


class ObservedHistory(TreeHistory):
    """A history whose tree is observed from the start, or from its middle on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mirror = Mirror(self.rules.page_size)
        self.observed_from = self.random.choice([0, 0, STEPS // 3])
        self.steps = 0
        self._steps += [(self._forget, 12), (self._write, 5), (self._reclaim, 4)]

    def _check(self) -> None:
        super()._check()
        if self.steps == self.observed_from:
            self.tree.observe(self.mirror)
        self.steps += 1
        if self.steps > self.observed_from:
            check(self.mirror, self.oracle, self.rules.page_size)


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_told_is_what_is_held(kinds: str) -> None:
    """A router would send requests to replicas that have lost their pages, or past those that have them."""
    told: Counter[str] = Counter()
    for number in range(SEEDS):
        seed = 7_000_000 + 1000 * list(KINDS).index(kinds) + number
        draw = random.Random(seed)
        rules = TreeRules(
            draw.choice([1, 2, 2, 3]), KINDS[kinds], draw.choice([1, 2, 3, 5]) if SWA in KINDS[kinds] else 0
        )
        policy = make_policy(draw.choice(["lru", "lfu", "fifo", "mru", "adaptive"]))
        policies = {c: policy.for_component(c, rules) for c in rules.kinds}
        shape = HistoryShape(
            device_slots=draw.choice([8, 14, 24]), host_slots=draw.choice([8, 16, 32]), scopes=2
        )
        history = ObservedHistory(UnifiedTree, rules, policies, seed, shape)
        history.run(STEPS)
        told.update(history.mirror.told)
    reasons = {"evicted", "demoted", "reclaimed", "missing", "reset", "untracked", "flushed"}
    assert reasons | {"gained", "cleared"} <= set(told)


def test_the_end_of_observing_is_the_end() -> None:
    """A publisher that was stopped would be called on, from a tree that outlives it."""
    rules = TreeRules(2, (FULL,))
    history = ObservedHistory(UnifiedTree, rules, {FULL: make_policy("lru")}, 7_100_000)
    history.observed_from = 1 << 30
    history.tree.observe(history.mirror)
    history.tree.observe(None)
    history.run(100)
    assert not history.mirror.told
