"""Islands in the whole cache: what requests hold, what tiers get, and slots that readers still need."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from hicache.errors import ConfigError
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.tree import UnifiedTree
from hicache.types import Component, Tier

SETS = [(FULL, SWA), (FULL, SWA, MAMBA)]
PAGE, WINDOW, CHUNK = 4, 8, 64  # an island is 3 pages, a chunk 16, a quarter of it 4
BIG = {FULL: 400, SWA: 120, MAMBA: 60}


def bed(kinds: tuple[Component, ...] = (FULL, SWA), **settings: Any) -> ScriptedCache:
    chosen = {"device": BIG, "host": BIG, "chunked_prefill_size": CHUNK, "mamba_track_interval": CHUNK}
    return ScriptedCache(kinds, page_size=PAGE, window=WINDOW, islands=True, **{**chosen, **settings})


def many(count: int = 6, **settings: Any) -> ScriptedCache:
    """A tree full of islands: long prompts, branches off them, and replies of many steps."""
    rng = random.Random(7)
    made = bed(accept_length=lambda _: rng.randint(1, 16), **settings)
    for number in range(count):
        prompt = tokens(150, seed=number % 3)[: rng.randint(60, 150)] + tokens(30, seed=10 + number)
        made.run(f"r{number}", prompt, new=70)
    return made


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_only_windows_at_places_are_kept_and_reach_the_tiers_below(kinds: tuple[Component, ...]) -> None:
    """Dead windows would fill L2 and L3, and push out those that somebody asks for."""
    made = bed(kinds)
    made.run("a", tokens(150), new=1)
    # Chunk ends at pages 16 and 32, the prompt's last boundary at 37, three pages each.
    islands = 9
    assert made.cache.tree.resident(Tier.DEVICE, FULL) == 37
    for tier in (Tier.DEVICE, Tier.HOST):
        assert made.cache.tree.resident(tier, SWA) == islands
    assert len(made.stored(SWA)) == islands
    assert len(made.stored(FULL)) == 37
    if MAMBA in kinds:
        assert made.cache.tree.resident(Tier.DEVICE, MAMBA) == len(made.stored(MAMBA)) == 3
    for length in (64, 128, 148, 150):
        assert made.hit(tokens(length)) == length // PAGE
    made.drop_memory()
    again = made.begin("b", tokens(150))
    made.drain()
    assert again.cached.storage == 148
    made.check_quiet()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_decode_leaves_islands_by_progress_whatever_steps_bring(
    kinds: tuple[Component, ...], seed: int
) -> None:
    """Steps that never land on a multiple would leave none, and the next turn would be computed anew."""
    rng = random.Random(seed)
    made = bed(kinds, accept_length=lambda _: rng.randint(1, 16))
    request = made.submit("a", tokens(40), new=300)
    made.drain()
    whole = request.tokens
    # A step commits at the latest when it completes a quarter of a chunk: 16 tokens, and up to 16 more.
    reached = {made.hit(whole[:length]) * PAGE for length in range(0, 340, PAGE)}
    assert max(reached) == 336
    ordered = sorted(reached)
    gaps = [b - a for a, b in itertools.pairwise(ordered)]
    assert max(gaps) <= CHUNK // 4 + 16 + PAGE
    assert len(ordered) > 300 // (CHUNK // 4 + 16)
    made.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_request_holds_its_window_and_a_page_beside_the_step_in_flight(
    kinds: tuple[Component, ...],
) -> None:
    """Fewer requests would run at once than the pool was planned for."""
    made = bed(kinds, accept_length=lambda _: 5)
    made.submit("a", tokens(200), new=120)
    retained, chunk, most = WINDOW // PAGE + 1, CHUNK // PAGE, 0
    for _ in range(400):
        for job in made.executor.open_jobs():
            made.executor.finish(job)
        made.step()
        if made.scheduler.idle:
            break
        held = made.cache.pools.held(Tier.DEVICE, SWA) - len(made.cache.pools.quarantine)
        most = max(most, held)
        request = made.scheduler._running[0]
        if request.computed > request.prompt_length:
            assert held <= retained + 2  # the page being written, and the one that a step reaches into
    assert 0 < most <= retained + chunk
    made.drain()
    made.check_quiet()


def test_a_slot_whose_reader_runs_is_given_to_compute_but_never_to_a_load() -> None:
    """A load, on a stream of its own, would overwrite a window that a forward pass still reads."""
    made = bed(device={FULL: 400, SWA: 32}, storage=False)
    hit = tokens(60, seed=2)
    made.run("warm", hit)
    made.cache.pools.free_all(made.cache.tree.evict(Tier.DEVICE, FULL, 99).freed)
    made.executor.hold_readers()
    made.submit("long", tokens(200), new=40)
    made.step()
    retired = set(made.cache.pools.quarantine.slots(SWA))
    assert len(retired) == 16 - 3  # the chunk, but for its island
    # All else that is free goes to the next chunk, some of what is retired too: compute comes behind.
    made.step()
    held = set(made.cache.pools.quarantine.slots(SWA))
    assert held
    made.submit("hit", hit)
    for _ in range(3):
        held = set(made.cache.pools.quarantine.slots(SWA))
        made.step()
        for job in made.executor.open_jobs(JobKind.LOAD):
            targets = {b for c, _, b in made.executor._jobs[job].moves if c is SWA}
            assert targets
            assert not targets & held
    made.executor.release_readers()
    before = len(made.cache.pools.quarantine)
    made.cache.tick()
    assert before
    assert len(made.cache.pools.quarantine) == 0
    made.drain()
    made.check_quiet()


def test_slots_with_readers_are_not_handed_to_a_load_that_finds_no_others() -> None:
    """Under pressure the shortcut would be tempting; the request waits instead."""
    made = bed(device={FULL: 400, SWA: 20}, storage=False)
    hit = tokens(60, seed=2)
    made.run("warm", hit)
    made.cache.pools.free_all(made.cache.tree.evict(Tier.DEVICE, FULL, 99).freed)
    pools = made.cache.pools
    taken = pools.allocate(Tier.DEVICE, {SWA: 20})
    assert taken is not None
    made.executor.hold_readers()
    pools.retire(SWA, taken[SWA])
    waiting = made.submit("hit", hit)
    for _ in range(3):
        made.scheduler.step()
        assert not made.executor.open_jobs(JobKind.LOAD)
    made.executor.release_readers()
    for job in made.executor.open_jobs():
        made.executor.finish(job)
    made.drain()
    assert waiting.finished
    made.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_tree_full_of_islands_is_flushed_to_the_last_slot(kinds: tuple[Component, ...]) -> None:
    """What flush forgets is lost memory for as long as the server runs."""
    made = many(kinds=kinds)
    assert made.cache.tree.resident(Tier.DEVICE, SWA) < made.cache.tree.resident(Tier.DEVICE, FULL)
    made.check_quiet()
    for tier, component in made.cache.pools.kinds:
        assert made.cache.pools[tier, component].num_taken == 0


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_storage_attached_anew_gets_the_islands_and_nothing_dead(kinds: tuple[Component, ...]) -> None:
    """After a change of stores, hits would end where the old store's objects were."""
    made = many(kinds=kinds)
    made.executor.detach()
    made.step(3)
    made.run("meanwhile", tokens(100, seed=50), new=40)
    made.executor.attach({})
    made.step(2)
    made.drain()
    assert len(made.stored(SWA)) == made.cache.tree.resident(Tier.HOST, SWA)
    made.drop_memory()
    again = made.begin("again", tokens(100, seed=50))
    made.drain()
    assert again.cached.storage == 96
    made.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_l1_is_released_and_resumed_around_islands_that_live_on_below(kinds: tuple[Component, ...]) -> None:
    """Weights are swapped while memory is released: nothing of the old L1 may be looked at again."""
    made = many(kinds=kinds)
    prompt = tokens(90, seed=60)
    made.run("before", prompt, new=20)
    made.cache.tick()
    assert made.cache.release_device()
    made.cache.check_integrity()
    assert not any(made.cache.tree.resident(Tier.DEVICE, c) for c in kinds)
    for slot in range(BIG[FULL]):  # what the memory held is gone
        for component in kinds:
            made.executor.content.pop((Tier.DEVICE, component, slot), None)
    again = made.run("after", prompt)
    assert again.cached.host == 88
    made.check_quiet()


def test_a_checkpoint_interval_keeps_more_windows() -> None:
    """The interval is what trades bytes for hits: it must do either."""
    made = bed(swa_checkpoint_interval=16)
    made.run("a", tokens(130), new=1)
    assert {made.hit(tokens(length)) for length in (16, 32, 48, 80, 112)} == {4, 8, 12, 20, 28}
    made.check_quiet()


def test_a_tree_core_that_cannot_keep_islands_refuses_them_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep all windows, on a pool that was made small for islands."""
    monkeypatch.setattr(UnifiedTree, "keeps_islands", False)
    with pytest.raises(ConfigError, match="--enable-swa-islands: this tree core keeps all windows or none"):
        bed()


def test_settings_without_islands_to_work_on_are_refused() -> None:
    """An interval that nothing heeds would be trusted for weeks."""
    with pytest.raises(ConfigError, match="--swa-checkpoint-interval 16 has no effect without"):
        ScriptedCache((FULL, SWA), page_size=4, swa_checkpoint_interval=16)
    with pytest.raises(ConfigError, match="--page-size 4 does not divide --swa-checkpoint-interval 18"):
        bed(swa_checkpoint_interval=18)
