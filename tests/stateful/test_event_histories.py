"""Random histories of the whole cache: a router that replays KV events knows what the tree holds."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from hicache.testing.residency import Entry, Mirror
from hicache.testing.router import Router
from hicache.testing.simulation import act, check_quiet, make_world
from hicache.tree import UnifiedTree
from hicache.tree.residency import observe

SEEDS = int(os.environ.get("HICACHE_EVENT_SEEDS", "14"))
STEPS = 150


def held_by(tree: UnifiedTree) -> set[Entry]:
    """Everything a tree would tell to somebody who asked now; whoever observes it is not disturbed."""
    forest = tree._forest
    mirror = Mirror(tree.rules.page_size)
    kept = forest.observer
    observe(forest, mirror)
    forest.observer = kept
    return mirror.held


def follow(seed: int) -> Router:
    world = make_world(seed)
    tree = world.cache.tree
    assert isinstance(tree, UnifiedTree)
    router = Router()
    world.cache.publish_events(router)
    for step in range(STEPS):
        router.busy = step % 50 > 45
        act(world)
        world.cache.check_integrity()
        log = world.cache._events
        assert log is not None
        log.flush()
        if not router.busy:
            assert router.held == held_by(tree), f"seed {seed}, step {step}"
    router.busy = False
    world.executor.release_readers()
    world.scheduler.run_until_idle(stall_s=1e3)
    assert world.cache.settle(1e3)
    world.cache.tick()
    assert router.held == held_by(tree)
    check_quiet(world)
    world.cache.tick()
    assert not router.held
    return router


def test_a_router_that_replays_events_knows_what_the_tree_holds() -> None:
    """Over evictions, splits, flushes, islands, failed, lost and detached stores: never one page off."""
    seen: Counter[str] = Counter()
    gaps = 0
    for seed in range(SEEDS):
        router = follow(seed)
        seen += router.seen
        gaps += router.gaps
    media = {f"{tier} {c}" for tier in ("DEVICE", "HOST", "STORAGE") for c in ("FULL", "SWA", "MAMBA")}
    assert media | {"evicted", "demoted", "flushed", "reset", "untracked", "cleared"} <= set(seen)
    assert gaps


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_long_run_of_the_same(seed: int) -> None:
    """As above, over two hundred worlds."""
    follow(seed)
