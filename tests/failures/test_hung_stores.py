"""A store that hangs: no allocation waits for it, and what it reads stays as it is until it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.config.cache import HostMemoryMode
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobId, JobKind, Move
from hicache.types import Component, Tier

HOST = {FULL: 32, SWA: 32, MAMBA: 12}


def hung_behind_device_pages(
    mode: HostMemoryMode, kinds: tuple[Component, ...] = (FULL,)
) -> tuple[ScriptedCache, JobId]:
    """A store in flight, and 16 of 24 device pages before what it stores, without a copy on the host."""
    bed = ScriptedCache(
        kinds,
        device={FULL: 24, SWA: 24, MAMBA: 8},
        host=HOST,
        hicache_host_memory_mode=mode,
        store_host_share=0.5,
    )
    bed.run("earlier turns", tokens(64))
    bed.cache.tick()
    bed.begin("next turn", tokens(72))
    while not bed.executor.open_jobs(JobKind.WRITE):
        bed.step()
    # Somebody needs the host pages that are copies of device pages, while the next ones are written.
    bed.cache.pools.free(Tier.HOST, FULL, bed.cache.tree.reclaim_duplicates(100))
    go_on(bed, 10)
    (hung,) = bed.executor.open_jobs(JobKind.STORE)
    assert bed.cache.tree.evictable(Tier.DEVICE, FULL) == 2
    return bed, hung


def go_on(bed: ScriptedCache, steps: int, *, but: JobId | None = None) -> None:
    """Everything ends `but` one store, or all stores."""
    for _ in range(steps):
        bed.step()
        stores = bed.executor.open_jobs(JobKind.STORE)
        for job in bed.executor.open_jobs():
            if job != but and (but is not None or job not in stores):
                bed.end(job)


@pytest.mark.parametrize("well", [True, False], ids=["ends well", "fails"])
@pytest.mark.parametrize("mode", list(HostMemoryMode))
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA), (FULL, SWA, MAMBA)], ids=str)
def test_no_device_page_hangs_on_a_store_when_somebody_needs_it(
    kinds: tuple[Component, ...], mode: HostMemoryMode, well: bool
) -> None:
    """Pages before those being stored would stay until the store answers, and nobody could be admitted."""
    bed, hung = hung_behind_device_pages(mode, kinds)
    names = {f"r{seed}" for seed in range(2, 8)}
    for seed in range(2, 8):
        bed.begin(f"r{seed}", tokens(72, seed=seed))
        go_on(bed, 100)
    assert bed.executor.is_open(hung)
    assert names <= {r.rid for r in bed.finished}
    bed.end(hung, failed=not well)
    bed.drain()
    bed.check_quiet()
    bed.run("again", tokens(72))
    bed.check_quiet()


@pytest.mark.parametrize("mode", list(HostMemoryMode))
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA, MAMBA)], ids=str)
def test_what_a_hung_store_reads_is_nobody_elses_before_it_ends(
    kinds: tuple[Component, ...], mode: HostMemoryMode
) -> None:
    """The bytes of another page would be stored under a page's name, for every replica."""
    bed, hung = hung_behind_device_pages(mode, kinds)
    reading = len(bed.executor.refs(hung))
    bed.begin("r2", tokens(72, seed=2))
    go_on(bed, 100, but=hung)
    bed.drop_memory()
    assert sum(bed.free(Tier.HOST).values()) == sum(HOST[c] for c in kinds) - reading
    for seed in range(3, 9):  # the rest of the host is written more than once
        bed.begin(f"r{seed}", tokens(72, seed=seed))
        go_on(bed, 100, but=hung)
    before = len(bed.executor.storage or ())
    bed.end(hung)  # the ledger looks whether what it reads has changed since it began
    assert len(bed.executor.storage or ()) == before + reading
    bed.drain()
    bed.drop_memory()
    assert bed.free(Tier.HOST) == {c: HOST[c] for c in kinds}
    bed.check_quiet()


@pytest.mark.parametrize("mode", list(HostMemoryMode))
def test_a_hung_store_is_let_go_of_beside_a_request_that_runs_on(mode: HostMemoryMode) -> None:
    """One long answer would keep all others waiting for the store."""
    bed, hung = hung_behind_device_pages(mode)
    runs = bed.begin("runs", tokens(8, seed=2), new=12)
    go_on(bed, 1)
    beside = bed.begin("beside", tokens(40, seed=3))
    go_on(bed, 3)
    assert {runs, beside}.isdisjoint(bed.finished)
    for _ in range(64):
        bed.cache.tick()
    go_on(bed, 3)
    assert beside in bed.finished
    assert runs not in bed.finished
    assert bed.executor.is_open(hung)
    bed.drain()
    bed.check_quiet()


def test_it_is_let_go_of_64_ticks_after_it_began_and_says_what_that_frees() -> None:
    """A store that is only slow would be stored again; one that hangs would keep others out for ever."""
    bed, _ = hung_behind_device_pages(HostMemoryMode.BUFFER_ONLY)
    since = 0
    while not (freed := bed.cache._writing.release_stores(overdue=True)):
        bed.cache.tick()
        since += 1
    assert (freed, since) == (16, 64 - 10)  # ten steps ended everything else
    assert bed.cache.release_waiting() == 0
    bed.drain()
    bed.check_quiet()


def test_every_store_that_hangs_is_let_go_of_when_it_is_in_the_way() -> None:
    """The second of two would be one too many."""
    bed = ScriptedCache(
        device={FULL: 24},
        host=HOST,
        hicache_host_memory_mode=HostMemoryMode.BUFFER_ONLY,
        store_host_share=0.5,
    )
    for seed in (1, 2):
        bed.run(f"earlier {seed}", tokens(40, seed=seed))
    for seed in (1, 2):
        bed.begin(f"next {seed}", tokens(44, seed=seed))
        go_on(bed, 5)
        assert len(bed.executor.open_jobs(JobKind.STORE)) == seed
        if seed == 1:
            assert bed.cache.release_waiting() == 10
    hung = bed.executor.open_jobs(JobKind.STORE)
    last = bed.begin("last", tokens(88, seed=3))
    go_on(bed, 10)
    assert last in bed.finished
    assert all(map(bed.executor.is_open, hung))
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("mode", list(HostMemoryMode))
def test_device_memory_can_be_given_away_while_a_store_hangs(mode: HostMemoryMode) -> None:
    """Whoever wants the memory of L1 for something else would have to wait for the store."""
    bed, hung = hung_behind_device_pages(mode)
    assert bed.cache.release_device()
    assert bed.executor.is_open(hung)
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("mode", list(HostMemoryMode))
def test_a_store_that_no_device_page_hangs_on_is_left_alone(mode: HostMemoryMode) -> None:
    """Whatever is stored while memory is short would be stored twice."""
    bed = ScriptedCache(device={FULL: 24}, host=HOST, store_host_share=0.5, hicache_host_memory_mode=mode)
    bed.begin("a", tokens(60))
    go_on(bed, 10)
    stores = bed.executor.open_jobs(JobKind.STORE)
    assert stores
    before = bed.cache.remembered()["in custody"]
    assert not bed.cache.release_waiting()
    assert bed.cache.remembered()["in custody"] == before == 0
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("mode", list(HostMemoryMode))
@pytest.mark.parametrize("extra", [SWA, MAMBA], ids=str)
def test_a_write_that_the_host_has_no_slot_for_is_not_begun_again_and_again_behind_a_hung_store(
    extra: Component, mode: HostMemoryMode
) -> None:
    """A copy of no pages at every tick locks its path: nobody is admitted, and the engine spins."""
    bed = ScriptedCache(
        (FULL, extra),
        device={FULL: 24, SWA: 24, MAMBA: 8},
        host={FULL: 32, SWA: 2, MAMBA: 1},
        hicache_host_memory_mode=mode,
        store_host_share=0.5,
    )
    for seed in (1, 2):
        bed.begin(f"r{seed}", tokens(40, seed=seed))
        go_on(bed, 60)
    begun = 0
    start_write = bed.executor.start_write

    def count(job: JobId, moves: Sequence[Move]) -> None:
        nonlocal begun
        begun += 1
        assert any(len(move.sources) for move in moves), "a copy of nothing"
        start_write(job, moves)

    bed.executor.start_write = count  # type: ignore[method-assign]
    bed.begin("last", tokens(80, seed=3))
    go_on(bed, 100)
    assert bed.executor.open_jobs(JobKind.STORE)
    assert "last" in {r.rid for r in bed.finished}
    assert begun < 20
    bed.drain()
    bed.check_quiet()
