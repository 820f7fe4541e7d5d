"""Seeded histories of everything at once; HICACHE_SIMULATIONS and HICACHE_SIMULATION_STEPS lengthen them."""

from __future__ import annotations

import os

import pytest

from hicache.testing.simulation import make_world, run

SEEDS = int(os.environ.get("HICACHE_SIMULATIONS", "30"))
FIRST = int(os.environ.get("HICACHE_SIMULATION_FIRST", "0"))
STEPS = int(os.environ.get("HICACHE_SIMULATION_STEPS", "300"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_no_history_breaks_a_law_serves_a_foreign_page_or_stands_still(seed: int) -> None:
    """The seed in the name of the test replays the history that a user would have suffered."""
    run(make_world(seed), STEPS)


def test_a_seed_replays_its_history_to_the_last_count() -> None:
    """A failure that cannot be replayed cannot be fixed."""
    for seed in (3, 11, 24):
        worlds = [make_world(seed) for _ in range(2)]
        for world in worlds:
            run(world, 200)
        first, second = worlds
        assert first.cache.stats == second.cache.stats
        assert first.clock.now() == second.clock.now()
        assert [r.tokens for r in first.seen] == [r.tokens for r in second.seen]
