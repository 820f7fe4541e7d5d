"""Splits, evictions, aborts and flushes while a transfer is in flight, at every point and in every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from hicache.keys import page_hashes
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobId, JobKind
from hicache.types import Component, PrefetchPolicy, Tier

SETS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]
PROMPT = tokens(33)  # eight pages and a token


def writing(bed: ScriptedCache) -> list[JobId]:
    """The prompt is computed and on its way to the host."""
    bed.begin("r", PROMPT)
    bed.step(2)
    return bed.executor.open_jobs(JobKind.WRITE)


def storing(bed: ScriptedCache) -> list[JobId]:
    for write in writing(bed):
        bed.end(write)
    return bed.executor.open_jobs(JobKind.STORE)


def fetching(bed: ScriptedCache) -> list[JobId]:
    bed.store_only(PROMPT)
    return [bed.fetching(PROMPT)[1]]


def loading(bed: ScriptedCache) -> list[JobId]:
    bed.run("warm", PROMPT)
    for component in reversed(bed.cache.spec.kinds):
        count = bed.cache.tree.resident(Tier.DEVICE, component)
        bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, component, count).freed)
    request = bed.begin("r", PROMPT)
    assert bed.cache.admit(request)
    bed.scheduler._waiting.remove(request)
    bed.scheduler._running.append(request)
    return bed.executor.open_jobs(JobKind.LOAD)


TRANSFERS: dict[str, Callable[[ScriptedCache], list[JobId]]] = {
    "write": writing,
    "store": storing,
    "fetch": fetching,
    "load": loading,
}


def split(at: int) -> Callable[[ScriptedCache], None]:
    """Another request leaves the path in its middle."""

    def act(bed: ScriptedCache) -> None:
        bed.begin(f"split{at}", PROMPT[: at * 4] + tokens(9, seed=50 + at))
        bed.step(2)

    return act


def evict(tier: Tier) -> Callable[[ScriptedCache], None]:
    """Everybody else needs all the memory there is."""

    def act(bed: ScriptedCache) -> None:
        for component in reversed(bed.cache.spec.kinds):
            freed = bed.cache.tree.evict(tier, component, bed.cache.tree.resident(tier, component)).freed
            bed.cache.pools.free_all(freed)
        if tier is Tier.HOST:
            bed.cache.pools.free(tier, FULL, bed.cache.tree.reclaim_duplicates(100))

    return act


def abort(bed: ScriptedCache) -> None:
    bed.scheduler.abort("r")


def flush(bed: ScriptedCache) -> None:
    bed.cache.flush()


def reuse(bed: ScriptedCache) -> None:
    """Whatever is free is written over by somebody else's pages."""
    bed.begin("reuse", tokens(101, seed=7))
    bed.step(5)


EVENTS: dict[str, Callable[[ScriptedCache], None]] = {
    "split at 3": split(3),
    "split at 5": split(5),
    "evict device": evict(Tier.DEVICE),
    "evict host": evict(Tier.HOST),
    "abort": abort,
    "flush": flush,
    "reuse": reuse,
}


@pytest.mark.parametrize("kinds", [SETS[0], SETS[-1]], ids=str)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_any_two_events_while_a_transfer_is_in_flight_lose_and_leak_nothing(
    kinds: tuple[Component, ...], transfer: str
) -> None:
    """A page named by a transfer that is given away meanwhile becomes another request's text.

    The ledger knows what each slot holds: a changed source, a target written twice or a foreign page
    that is read is an InvariantViolation.
    """
    for first, second in itertools.permutations(EVENTS, 2):
        for failed in (False, True):
            bed = ScriptedCache(kinds, hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
            jobs = TRANSFERS[transfer](bed)
            assert jobs
            for event in (first, second):
                EVENTS[event](bed)
                bed.cache.check_integrity()
            for job in jobs:
                if bed.executor.is_open(job):
                    bed.end(job, failed=failed)
            bed.drain()
            request = bed.run("after", PROMPT)
            assert request.cached.cached + request.cached.computed == len(PROMPT)
            bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("first", TRANSFERS)
def test_two_transfers_end_in_either_order(kinds: tuple[Component, ...], first: str) -> None:
    """An acknowledgement that overtakes another would publish or free what is not its own."""
    for order in (1, -1):
        for fails in itertools.product((False, True), repeat=2):
            bed = ScriptedCache(kinds)
            jobs = TRANSFERS[first](bed)
            bed.begin("other", PROMPT[:20] + tokens(17, seed=3))
            bed.step(2)
            for job in bed.executor.open_jobs(JobKind.WRITE):
                if job not in jobs:
                    jobs.append(job)
            for job, failed in zip(jobs[::order], itertools.cycle(fails), strict=False):
                if bed.executor.is_open(job):
                    bed.end(job, failed=failed)
            bed.drain()
            bed.check_quiet()


@pytest.mark.parametrize("splits", [(3,), (3, 5), (5, 3), (1, 7, 4)])
def test_a_path_that_is_split_between_its_two_writes_is_stored_whole(splits: tuple[int, ...]) -> None:
    """One fragment would reach L3 and the other not: the prompt misses from the hole on."""
    for when in ("during the host write", "during the store"):
        bed = ScriptedCache()
        jobs = writing(bed) if when == "during the host write" else storing(bed)
        for at in splits:
            split(at)(bed)
        for job in jobs:
            bed.end(job)
        bed.drain()
        assert set(page_hashes(b"", PROMPT, 4)) <= bed.stored()
        assert bed.hit(PROMPT) == 8
        bed.drop_memory()
        assert bed.run("again", PROMPT).cached.storage == 32
        bed.check_quiet()


def test_host_pages_of_a_copy_in_progress_are_nobody_elses_victims() -> None:
    """Two copies into one host page mix two prompts."""
    bed = ScriptedCache(host={FULL: 8}, storage=False)
    bed.begin("a", tokens(17))
    bed.step(2)
    (first,) = bed.executor.open_jobs(JobKind.WRITE)
    bed.begin("b", tokens(33, seed=2))
    bed.step(2)
    jobs = bed.executor.open_jobs(JobKind.WRITE)
    targets = [t for job in jobs for _, _, t in bed.executor._jobs[job].moves]
    assert len(targets) == len(set(targets)) == 8
    bed.end(jobs[1])
    bed.end(first)
    bed.drain()
    assert bed.hit(tokens(17)) == 4
    bed.check_quiet()


def test_a_page_whose_store_is_pending_is_not_overwritten() -> None:
    """The object under the old name would hold the new request's bytes."""
    bed = ScriptedCache(device={FULL: 12}, host={FULL: 12})
    (store,) = storing(bed)
    for i in range(4):
        bed.begin(f"n{i}", tokens(37, seed=20 + i))
        bed.step(3)
        for job in bed.executor.open_jobs(JobKind.WRITE):
            bed.end(job)
    bed.end(store)
    assert set(page_hashes(b"", PROMPT, 4)) <= bed.stored()
    bed.drain()
    bed.check_quiet()


def test_two_requests_with_one_prompt_load_it_side_by_side() -> None:
    """The second to commit would give back pages that the first has put into the tree."""
    for order in (1, -1):
        bed = ScriptedCache((FULL, SWA, MAMBA), storage=False)
        bed.run("warm", PROMPT)
        evict(Tier.DEVICE)(bed)
        for rid in ("a", "b"):
            request = bed.submit(rid, PROMPT, new=6)
            assert bed.cache.admit(request)
            bed.scheduler._waiting.remove(request)
            bed.scheduler._running.append(request)
        loads = bed.executor.open_jobs(JobKind.LOAD)
        assert len(loads) == 2
        for load in loads[::order]:
            bed.end(load)
            bed.step()
        bed.drain()
        assert [r.cached.host for r in bed.finished] == [0, 32, 32]
        assert bed.cache.tree.resident(Tier.DEVICE, FULL) <= 10
        bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_flush_with_everything_in_flight_leaves_no_stale_page(kinds: tuple[Component, ...]) -> None:
    """Pages from before the flush would answer requests that came after it."""
    for transfer in TRANSFERS:
        bed = ScriptedCache(kinds, hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
        jobs = TRANSFERS[transfer](bed)
        bed.scheduler.abort("r")
        bed.cache.flush()
        for job in jobs:
            if bed.executor.is_open(job):
                bed.end(job)
        bed.drain()
        bed.drop_memory()
        assert bed.hit(PROMPT) == 0
        bed.check_quiet()
