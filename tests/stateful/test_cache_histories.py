"""Random histories of the whole cache: requests, transfers, faults and aborts, every page checked."""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import dataclass

import pytest

from hicache.build import TierSizes, build_cache
from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig, StateCheckpoints
from hicache.engine.scheduler import FinalToken, Scheduler
from hicache.testing.ledger import Faults, LedgerExecutor, LedgerRunner, make_request
from hicache.testing.simulation import SETS, next_prompt, tiny_spec
from hicache.types import Component, PrefetchPolicy, Tier, WritePolicy

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
STEPS = int(os.environ.get("HICACHE_HISTORY_STEPS", "400"))


@dataclass
class World:
    """One cache, its scheduler and everything random about them, from a seed."""

    cache: HiCache
    scheduler: Scheduler
    executor: LedgerExecutor
    rng: random.Random
    prompts: list[array[int]]
    keeps: int = 13
    again: float = 0.0
    finished: int = 0


def make_world(seed: int) -> World:
    rng = random.Random(seed)
    kinds = rng.choice(SETS)
    page = rng.choice([1, 2, 4])
    chunk = page * rng.choice([2, 4, 8])
    window = rng.choice([1, page, 2 * page + 1, 3 * page])
    islands = SWA in kinds and rng.random() < 0.5
    spec = tiny_spec(kinds, page, window, islands=islands)
    swa_need = spec.window_pages + max(chunk, 8 * page) // page + 1
    device = {
        FULL: rng.choice([24, 40]),
        SWA: swa_need + rng.choice([1, 8, 20]),
        MAMBA: rng.choice([3, 6, 12]),
    }
    host = {FULL: rng.choice([30, 60]), SWA: rng.choice([8, 30]), MAMBA: rng.choice([2, 8])}
    tiers = rng.choice(["l1", "l1+l2", "l1+l2+l3", "l1+l2+l3"])
    sizes = TierSizes({c: device[c] for c in kinds}, {} if tiers == "l1" else {c: host[c] for c in kinds})
    policy = rng.choice(["lru", "lfu", "slru", "priority", "fifo", "mru", "filo", "adaptive"])
    config = CacheConfig(
        hicache_write_policy=rng.choice(list(WritePolicy)),
        hicache_storage_prefetch_policy=rng.choice(list(PrefetchPolicy)),
        prefetch_threshold=rng.choice([1, 2 * page]),
        prefetch_timeout_base=0.01,
        prefetch_timeout_per_ki_token=0.01,
        prefetch_timeout_max=0.05,
        radix_eviction_policy=policy,
        chunked_prefill_size=chunk,
        mamba_track_interval=8 * page,
        mamba_prefill_checkpoints=rng.choice(list(StateCheckpoints)),
        swa_checkpoint_interval=rng.choice([0, page, 3 * page]) if islands else 0,
    )
    clock = ManualClock()
    faults = rng.choice([Faults(), Faults(store_fails=0.1, object_lost=0.1, put_refused=0.05)])
    executor = LedgerExecutor(clock, rng, storage=tiers == "l1+l2+l3", faults=faults)
    cache = build_cache(spec, sizes, config, executor, clock)
    runner = LedgerRunner(spec, executor, clock, vocabulary=3)
    world = World(cache, None, executor, rng, [])  # type: ignore[arg-type]

    def finished(request: object) -> None:
        world.finished += 1

    world.scheduler = Scheduler(
        cache,
        runner,
        max_running_requests=rng.choice([1, 3, 6]),
        final_token=rng.choice(list(FinalToken)),
        accept_length=rng.choice([None, lambda _: rng.randint(1, 16)]),
        on_finish=finished,
    )
    return world


def run(world: World, steps: int) -> None:
    rng, scheduler, cache = world.rng, world.scheduler, world.cache
    submitted = aborted = 0
    live: list[str] = []
    for _ in range(steps):
        action = rng.random()
        if action < 0.25 and scheduler.num_waiting < 6:
            rid = f"r{submitted}"
            scope = rng.choice([b"", b"", b"s" * 32])
            scheduler.submit(make_request(rid, next_prompt(world), rng.randint(1, 12), scope=scope))
            submitted += 1
            live.append(rid)
        elif action < 0.28 and live:
            aborted += scheduler.abort(live.pop(rng.randrange(len(live))))
        elif action < 0.30:
            scheduler.flush()
        elif action < 0.31:
            world.executor.lose_storage()
        elif not scheduler.step():
            scheduler.wait(0.01)
        cache.check_integrity()
    scheduler.run_until_idle(stall_s=1e6)
    assert cache.settle()
    cache.check_integrity()
    assert world.finished + aborted == submitted
    # Quiescence: nothing is locked or in flight, so everything can be dropped.
    assert cache.in_flight == 0
    assert cache.flush()
    for tier, component in cache.pools.kinds:
        assert cache.pools[tier, component].num_taken == 0, (tier, component)
        assert cache.tree.evictable(tier, component) == 0
    assert cache.tree.resident(Tier.DEVICE, FULL) == 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("HICACHE_HISTORIES", "60"))))
def test_random_histories_keep_every_law_and_never_serve_a_foreign_page(seed: int) -> None:
    """A user would see another request's text, a leak, or a hang; the seed replays the history."""
    run(make_world(seed), STEPS)
