"""An abort at any moment gives everything back: pages, leases, counters and entries in every table."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import pytest

from hicache.request import Request
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.types import PrefetchPolicy, Tier

PROMPT, OTHER = tokens(41), tokens(41, seed=2)
Tokens: TypeAlias = "array[int]"
KINDS = (FULL, SWA, MAMBA)


def bed_with_stored_prompt(**settings: object) -> ScriptedCache:
    policy = PrefetchPolicy.WAIT_COMPLETE
    bed = ScriptedCache(KINDS, hicache_storage_prefetch_policy=policy, prefetch_timeout_max=1e6, **settings)
    bed.store_only(PROMPT)
    bed.store_only(OTHER)
    return bed


def queued(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
    bed.submit(rid, prompt, new=20)


def probed(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
    bed.submit(rid, prompt, new=20)
    bed.end(bed.executor.open_jobs(JobKind.PROBE)[-1])


def reading(count: int) -> Callable[[ScriptedCache, str, Tokens], None]:
    def reach(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
        probed(bed, rid, prompt)
        bed.executor.read(bed.executor.open_jobs(JobKind.FETCH)[-1], count)

    return reach


def published(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
    probed(bed, rid, prompt)
    bed.end(bed.executor.open_jobs(JobKind.FETCH)[-1])


def loading(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
    """Admitted, and its pages are on their way to the device: the runner has not waited for them."""
    published(bed, rid, prompt)
    (request,) = (r for r in bed.scheduler._waiting if r.rid == rid)
    assert bed.cache.ready(request)
    assert bed.cache.admit(request)
    bed.scheduler._waiting.remove(request)
    bed.scheduler._running.append(request)
    assert bed.executor.open_jobs(JobKind.LOAD)


def decoding(bed: ScriptedCache, rid: str, prompt: Tokens) -> None:
    published(bed, rid, prompt)
    bed.step(3)


STATES: dict[str, Callable[[ScriptedCache, str, Tokens], None]] = {
    "querying": queued,
    "probed": probed,
    "0 of 13 read": reading(0),
    "3 of 13 read": reading(3),
    "13 of 13 read": reading(13),
    "published": published,
    "loading": loading,
    "decoding": decoding,
}


def serve_with_hit(bed: ScriptedCache, rid: str) -> Request:
    """Serve the prompt, and check that storage still helps."""
    bed.drop_memory()
    request = bed.run(rid, PROMPT)
    assert request.cached.storage == 40
    return request


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ended", ["before", "after"])
def test_an_abort_in_any_state_gives_every_page_back(state: str, ended: str) -> None:
    """Host memory would shrink with each abort until prefetch stops for everyone."""
    bed = bed_with_stored_prompt()
    for tier in (Tier.DEVICE, Tier.HOST):
        assert all(bed.cache.pools.capacity(tier, c) == n for c, n in bed.free(tier).items())
    STATES[state](bed, "r", PROMPT)
    if ended == "before":
        assert bed.scheduler.abort("r")
        bed.cache.check_integrity()
    transfers = bed.executor.open_jobs()
    for job in transfers:
        bed.end(job)
    if ended == "after":
        assert bed.scheduler.abort("r")
        bed.cache.check_integrity()
    bed.drain()
    bed.check_quiet()
    serve_with_hit(bed, "next")
    bed.check_quiet()


@pytest.mark.parametrize("state", STATES)
def test_any_number_of_aborts_in_one_state_leave_no_trace(state: str) -> None:
    """A counter that leaks a little per abort switches prefetch off for the life of the process."""
    bed = bed_with_stored_prompt()
    for i in range(200 if state in ("loading", "decoding") else 1000):
        STATES[state](bed, f"r{i}", PROMPT)
        assert bed.scheduler.abort(f"r{i}")
        for job in bed.executor.open_jobs():
            bed.executor.finish(job)
        bed.drain()
        bed.drop_memory()
        if i % 100 == 0:
            bed.check_quiet()
    bed.drain()
    bed.check_quiet()
    serve_with_hit(bed, "next")


@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("second", ["querying", "3 of 13 read", "published", "loading"])
def test_the_end_of_an_aborted_attempt_does_not_touch_the_next_with_the_same_id(
    first: str, second: str
) -> None:
    """A retry under its old id would lose its pages to the clean-up of the attempt before."""
    bed = bed_with_stored_prompt()
    STATES[first](bed, "r", PROMPT)
    assert bed.scheduler.abort("r")
    old = bed.executor.open_jobs()
    STATES[second](bed, "r", OTHER)
    for job in old:
        if bed.executor.is_open(job):
            bed.end(job)
    bed.drain()
    assert len(bed.finished) == 3  # those that stored the prompts, and the second attempt
    request = bed.finished[-1]
    assert request.cached.cached == 40
    assert request.cached.cached + request.cached.computed == len(PROMPT)
    bed.check_quiet()


def test_an_abort_of_the_request_that_others_wait_for_lets_them_in() -> None:
    """After a retraction nobody is admitted until somebody computes: if he is aborted, all wait for ever."""
    bed = ScriptedCache((FULL, SWA), device={FULL: 64, SWA: 12}, host={}, storage=False)
    bed.submit("old", tokens(20), new=60)
    bed.submit("young", tokens(20, seed=2), new=60)
    for _ in range(200):
        if bed.cache.stats.retracted:
            break
        bed.step()
    assert bed.cache.stats.retracted
    assert bed.scheduler.abort("old")
    bed.drain()
    assert [r.rid for r in bed.finished] == ["young"]
    bed.check_quiet()
