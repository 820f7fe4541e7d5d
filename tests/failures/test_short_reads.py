"""Whatever storage brings, or fails to bring: the hit ends before the first page that is not whole."""

from __future__ import annotations

import itertools

import pytest

from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind, ObjectRef
from hicache.types import Component, PrefetchPolicy, Tier

SETS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]
PROMPT = tokens(41)  # ten pages and a token
WINDOW_PAGES = 2


def usable(kinds: tuple[Component, ...], have: set[tuple[Component, int]]) -> int:
    """The deepest boundary, by brute force: FULL below it, its window, its state."""
    best = 0
    for boundary in range(1, 11):
        pages = all((FULL, p) in have for p in range(boundary))
        window = SWA not in kinds or all(
            (SWA, p) in have for p in range(max(0, boundary - WINDOW_PAGES), boundary)
        )
        state = MAMBA not in kinds or (MAMBA, boundary) in have
        if pages and window and state:
            best = boundary
    return best


def asked(refs: list[ObjectRef], hashes: list[bytes]) -> list[tuple[Component, int]]:
    """Page, or boundary of a state, that each object is."""
    return [(ref.component, hashes.index(ref.page_hash) + (ref.component is MAMBA)) for ref in refs]


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("component", list(Component))
def test_the_hit_ends_before_any_one_object_that_is_missing(
    kinds: tuple[Component, ...], component: Component
) -> None:
    """A page that never came would be read as if it had: wrong text, and no error."""
    if component not in kinds:
        pytest.skip("the model has no such component")
    bed = ScriptedCache(kinds)
    bed.store_only(PROMPT)
    kept = dict(bed.executor.storage or {})
    before = bed.free(Tier.HOST)
    for missing in range(20):
        bed.executor.attach(dict(kept))
        _, fetch = bed.fetching(PROMPT, f"r{missing}")
        refs = list(bed.executor.refs(fetch))
        hashes = [ref.page_hash for ref in refs if ref.component is FULL]
        mine = [ref for ref in refs if ref.component is component]
        if missing >= len(mine):
            bed.drain()
            break
        bed.lose([mine[missing]])
        while bed.executor.open_jobs(JobKind.FETCH):
            bed.end(bed.open(JobKind.FETCH))
        expected = usable(kinds, set(asked(list(bed.executor.storage or ()), hashes)))
        assert bed.hit(PROMPT) == expected
        assert bed.free(Tier.HOST)[FULL] == before[FULL] - expected  # the rest went back, once
        bed.drain()
        request = bed.finished[-1]
        assert request.cached.storage == expected * 4
        assert request.cached.cached + request.cached.computed == len(PROMPT)
        bed.check_quiet()
    else:
        pytest.fail("the read named more objects than there are")


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("failed", [False, True], ids=["short", "error"])
def test_a_read_that_stops_after_any_object_publishes_what_is_whole(
    kinds: tuple[Component, ...], failed: bool
) -> None:
    """Counting what was asked for instead of what came serves another request's pages."""
    bed = ScriptedCache(kinds)
    bed.store_only(PROMPT)
    for upto in itertools.count():
        _, fetch = bed.fetching(PROMPT, f"r{upto}")
        refs = list(bed.executor.refs(fetch))
        named = asked(refs, [ref.page_hash for ref in refs if ref.component is FULL])
        bed.end(fetch, failed=failed, upto=upto)
        while bed.executor.open_jobs(JobKind.FETCH):  # it looks for a boundary below
            bed.end(bed.open(JobKind.FETCH), upto=0)
        expected = usable(kinds, set(named[:upto]))
        assert bed.hit(PROMPT) == expected
        bed.drain()
        assert bed.finished[-1].cached.storage == expected * 4
        loaded = bed.cache.stats.loaded_pages["full"]
        bed.check_quiet()
        bed.cache.stats.loaded_pages.clear()
        assert loaded == expected  # pages copied to the device are the pages reported
        if upto == len(refs):
            return


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT])
def test_what_had_arrived_at_the_deadline_is_published_and_the_rest_freed_when_the_read_ends(
    policy: PrefetchPolicy,
) -> None:
    """Pages freed while the read still writes to them would be another request's."""
    for arrived in range(11):
        bed = ScriptedCache(
            hicache_storage_prefetch_policy=policy,
            prefetch_timeout_base=1.0,
            prefetch_timeout_per_ki_token=0.0,
        )
        bed.store_only(PROMPT)
        total = bed.free(Tier.HOST)[FULL]
        request, fetch = bed.fetching(PROMPT)
        bed.executor.read(fetch, arrived)
        if policy is PrefetchPolicy.TIMEOUT:
            assert not bed.cache.ready(request)
        bed.clock.advance(1.0)
        assert bed.cache.ready(request)
        assert bed.hit(PROMPT) == arrived
        assert bed.free(Tier.HOST)[FULL] == total - 10  # published, or still being read into
        bed.step()
        assert request.cached.storage == arrived * 4
        bed.end(fetch)
        bed.drain()
        bed.check_quiet()
        assert bed.free(Tier.HOST)[FULL] == total


def test_a_read_never_reports_more_than_has_been_copied() -> None:
    """Progress that runs ahead of the copy publishes pages before their bytes are there."""
    bed = ScriptedCache()
    bed.store_only(PROMPT)
    _, fetch = bed.fetching(PROMPT)
    for count in range(11):
        assert sum(bed.executor.arrived(fetch)) == count
        assert bed.hit(PROMPT) == 0
        if count < 10:
            bed.executor.read(fetch, 1)
    bed.end(fetch)
    assert bed.hit(PROMPT) == 10
    bed.drain()
    bed.check_quiet()


def test_a_probe_that_fails_is_no_evidence_of_absence() -> None:
    """A store that was away for a second would be taken for empty, and written all over again."""
    bed = ScriptedCache()
    bed.run("first", PROMPT)
    wanted = bed.stored()
    request = bed.submit("again", tokens(61))
    bed.end(bed.open(JobKind.PROBE), failed=True)
    assert bed.cache.ready(request)
    assert bed.cache.stats.prefetch["store_failed"] == 1
    bed.drain()
    assert wanted < bed.stored()
    assert bed.cache.stats.stored_pages["full"] == len(bed.stored())  # nothing was written twice
    bed.check_quiet()


def test_a_deeper_hit_than_storage_gave_is_not_credited_to_storage() -> None:
    """A router that is promised pages from L3 waits for what was never fetched."""
    bed = ScriptedCache(max_running_requests=1)
    first = bed.submit("first", PROMPT)
    second = bed.submit("second", PROMPT)
    for probe in bed.executor.open_jobs(JobKind.PROBE):
        bed.end(probe)
    while first not in bed.finished:
        bed.step()
        for job in bed.executor.open_jobs():
            bed.end(job)
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, 100).freed)
    bed.drain()
    assert (second.cached.host, second.cached.storage) == (40, 0)
    bed.check_quiet()
