"""Ranks that lose, finish and fail differently: same decisions at every tick, from any seed.

HICACHE_SIMULATIONS and HICACHE_SIMULATION_STEPS lengthen the histories.
"""

from __future__ import annotations

import os

import pytest
import xxhash

from hicache.build import TierSizes, build_cache
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig
from hicache.engine.scheduler import Scheduler
from hicache.errors import InvariantViolation
from hicache.keys import page_hashes
from hicache.testing.ledger import LedgerRunner, ScriptedLedger, identity, make_request
from hicache.testing.ranks import Meeting, MeetingMember, RankedRunner, run_ranks
from hicache.testing.scripted_cache import tokens
from hicache.testing.simulation import World, act, come_to_rest, make_world, tiny_spec
from hicache.transfer.agreed import AgreedExecutor
from hicache.transfer.agreement import MESSAGE_BYTES
from hicache.transfer.base import ObjectRef
from hicache.types import Component, PrefetchPolicy

FULL, MAMBA = Component.FULL, Component.MAMBA

SEEDS = int(os.environ.get("HICACHE_SIMULATIONS", "10"))
FIRST = int(os.environ.get("HICACHE_SIMULATION_FIRST", "0"))
STEPS = int(os.environ.get("HICACHE_SIMULATION_STEPS", "200"))


def decided(world: World) -> bytes:
    """A digest of all that ranks must have in common: who runs, what is where, what was counted."""
    cache = world.cache
    state = [
        cache.clock.now(),
        repr(cache.stats),
        sorted(cache.remembered().items()),
        [(r.rid, r.computed, r.committed, list(r.full), list(r.swa), r.state) for r in world.live.values()],
        [(r.rid, list(r.tokens), repr(r.cached)) for r in world.seen],
        [sorted(cache.tree.owned(tier, component)) for tier, component in cache.pools.kinds],
        [cache.pools[tier, component].num_free for tier, component in cache.pools.kinds],
    ]
    return xxhash.xxh3_128_digest(repr(state).encode())


def run_alike(member: MeetingMember, seed: int, steps: int) -> tuple[int, int, int]:
    """One rank's history; compares with the others after every action. Returns ticks, finished, lost."""
    world = make_world(seed, member)
    for step in range(steps):
        act(world)
        world.cache.check_integrity()
        if len(set(member.gather(decided(world)))) > 1:
            raise InvariantViolation(f"the ranks differ after action {step}")
    come_to_rest(world)
    assert isinstance(world.cache.executor, AgreedExecutor)
    return world.cache.executor.ticks, world.finished, world.executor.spoiled


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_ranks_with_different_stores_and_clocks_decide_alike_at_every_tick(seed: int, size: int) -> None:
    """Trees that drift apart serve one rank's half of a prompt with another's, or hang after hours."""
    results = run_ranks(size, lambda member: run_alike(member, seed, STEPS))
    assert len({(ticks, finished) for ticks, finished, _ in results}) == 1


def test_the_histories_spoil_different_transfers_on_different_ranks() -> None:
    """Ranks that only ever see the same agree by themselves, and the test above would prove nothing."""
    spoiled = [
        {lost for _, _, lost in run_ranks(2, lambda member, seed=seed: run_alike(member, seed, 150))}
        for seed in range(4)
    ]
    assert sum(len(counts) > 1 for counts in spoiled) >= 1


def test_every_rank_enters_the_same_collectives_of_one_size_whatever_its_own_pools_look_like() -> None:
    """A collective that only some ranks enter hangs the replica."""
    meeting = Meeting(4)

    def work(member: MeetingMember) -> None:
        world = make_world(6, meeting.member(member.rank))
        for _ in range(200):
            act(world)
        come_to_rest(world)

    run_ranks(4, work)
    assert len(meeting.lengths[0]) > 100
    assert all(lengths == meeting.lengths[0] for lengths in meeting.lengths)
    assert set(meeting.lengths[0]) <= {MESSAGE_BYTES, 1}  # ticks, and steps that wait for a load


@pytest.mark.parametrize(
    ("lacks", "hit"),
    [({0: {6}, 1: {4}}, 2), ({0: {6}, 1: {6}}, 4), ({0: {2, 4}, 1: {6}}, 0), ({}, 6)],
    ids=lambda value: str(value),
)
def test_a_hit_is_the_deepest_boundary_that_every_rank_can_restore(
    lacks: dict[int, set[int]], hit: int
) -> None:
    """The least of the ranks' depths is a boundary at which one of them has no state to go on from."""
    page, prompt = 4, tokens(26)
    hashes = page_hashes(b"", prompt, page)

    def work(member: MeetingMember) -> tuple[int, int]:
        spec, clock = tiny_spec((FULL, MAMBA), page, 1), ManualClock()
        ledger = ScriptedLedger(clock, storage=True)
        truth = make_request("truth", prompt, 1)
        assert ledger.storage is not None
        for i, page_hash in enumerate(hashes):
            ledger.storage[ObjectRef(FULL, page_hash)] = identity(truth, (i + 1) * page)
            if i + 1 in {2, 4, 6} - lacks.get(member.rank, set()):
                ledger.storage[ObjectRef(MAMBA, page_hash)] = identity(truth, (i + 1) * page)
        executor = AgreedExecutor(ledger, member, clock)
        room = {FULL: 64, MAMBA: 16}
        config = CacheConfig(
            prefetch_threshold=1,
            chunked_prefill_size=32,
            mamba_track_interval=32,
            hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        )
        cache = build_cache(spec, TierSizes(room, room), config, executor, executor.clock)
        runner = RankedRunner(LedgerRunner(spec, ledger, clock, vocabulary=3), member)
        scheduler = Scheduler(cache, runner)
        request = make_request("r", prompt, 1)
        scheduler.submit(request)
        for _ in range(40):
            for job in ledger.open_jobs():
                ledger.finish(job)
            scheduler.step()
            cache.check_integrity()
        return request.cached.storage // page, len(request.output)

    assert run_ranks(2, work) == [(hit, 1)] * 2
