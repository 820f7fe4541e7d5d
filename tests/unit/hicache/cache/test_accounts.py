"""What a request is told of its tokens: by tier, by reason, and what an infinite cache would have had."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from hicache.cache.accounts import (
    Accounts,
    Ask,
    Ceiling,
    Shortfall,
    check_request,
    check_stats,
    marks_of,
)
from hicache.cache.stats import CacheStats
from hicache.config.cache import HostMemoryMode
from hicache.request import Request
from hicache.testing.ledger import make_request
from hicache.testing.scripted_cache import ScriptedCache, tokens
from hicache.transfer.base import JobKind, Why
from hicache.tree.base import TreeRules
from hicache.types import Component, PrefetchPolicy, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
PROMPT = tokens(41)  # 10 pages and the token that is always computed


def stored_cache(**settings: object) -> ScriptedCache:
    """A cache whose storage alone has the prompt."""
    cache = ScriptedCache(**{"hicache_storage_prefetch_policy": PrefetchPolicy.WAIT_COMPLETE, **settings})  # type: ignore[arg-type]
    cache.store_only(PROMPT)
    return cache


def serve(cache: ScriptedCache, request: Request) -> Request:
    """Let everything end well, and check that every sum adds up."""
    cache.drain()
    check_request(request, request.prompt_length)
    check_stats(cache.cache.stats)
    return request


def test_a_first_prompt_is_computed_and_misses_nothing() -> None:
    """Nobody could have had it: a ceiling above 0 would ask for memory that helps nobody."""
    cache = ScriptedCache(storage=False)
    request = serve(cache, cache.submit("a", PROMPT))
    assert (request.cached.computed, request.cached.ceiling, request.cached.missed) == (41, 0, {})
    assert (request.cached.asked, request.cached.failed) == (0, {})


def test_what_was_evicted_is_missed_for_that_reason() -> None:
    """The distance from the ceiling says what more memory would bring."""
    cache = ScriptedCache(storage=False)
    serve(cache, cache.submit("a", PROMPT))
    cache.drop_memory()
    request = serve(cache, cache.submit("b", PROMPT))
    assert (request.cached.ceiling, request.cached.missed) == (40, {"evicted": 40})


def test_what_storage_brings_is_fulfilled() -> None:
    """Asked and fulfilled are the same, and nothing is missed."""
    cache = stored_cache()
    request = serve(cache, cache.submit("b", PROMPT))
    counts = request.cached
    assert (counts.asked, counts.storage, counts.failed) == (40, 40, {})
    assert (counts.ceiling, counts.missed) == (40, {})


@pytest.mark.parametrize("mode", HostMemoryMode)
@pytest.mark.parametrize(("lacking", "pages"), [(SWA, 2), (MAMBA, 1)])
def test_a_hit_is_the_tiers_that_brought_its_window_or_state(
    mode: HostMemoryMode, lacking: Component, pages: int
) -> None:
    """L3 would seem of no use where it saves a whole prompt, or a state look like pages that were moved."""
    cache = ScriptedCache(
        (FULL, lacking),
        hicache_host_memory_mode=mode,
        hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    )
    cache.run("a", PROMPT)
    cache.cache.tick()
    tree, pools, stats = cache.cache.tree, cache.cache.pools, cache.cache.stats
    for tier in (Tier.HOST, Tier.DEVICE):
        pools.free_all(tree.evict(tier, lacking, tree.evictable(tier, lacking)).freed)
    full = tree.resident(Tier.DEVICE, FULL)
    request = serve(cache, cache.submit("b", PROMPT))
    counts = request.cached
    assert full == 10, "FULL never left the device"
    assert (counts.device, counts.host, counts.storage, counts.asked) == (0, 0, 40, 40)
    moved = {name: count for name, count in stats.fetched_pages.items() if count}
    assert moved == {lacking.name.lower(): pages}
    assert stats.loaded_pages == moved


def test_what_storage_never_had_is_a_miss() -> None:
    """New tokens asked for in vain are no shortfall against the ceiling."""
    cache = stored_cache()
    request = serve(cache, cache.submit("b", PROMPT[:40] + tokens(21, seed=9)))
    counts = request.cached
    assert (counts.asked, counts.storage, counts.failed) == (60, 40, {"not_stored": 20})
    assert (counts.ceiling, counts.missed, counts.computed) == (40, {}, 21)


@pytest.mark.parametrize(
    ("lose", "reason"), [("lost", "missing"), ("failed", "error"), ("deadline", "deadline")]
)
def test_a_read_that_ends_short_says_why(lose: str, reason: str) -> None:
    """An operator must see whether the store is slow, failing, or losing objects."""
    policy = PrefetchPolicy.TIMEOUT if lose == "deadline" else PrefetchPolicy.WAIT_COMPLETE
    cache = stored_cache(
        hicache_storage_prefetch_policy=policy, prefetch_timeout_base=1.0, prefetch_timeout_per_ki_token=0.0
    )
    request, job = cache.fetching(PROMPT)
    cache.executor.read(job, 4)
    if lose == "lost":
        cache.lose(list(cache.executor.refs(job))[4:])
        cache.end(job)
    elif lose == "failed":
        cache.end(job, failed=True, upto=4)
    else:
        cache.step()
        cache.clock.advance(2.0)
        cache.step()
    serve(cache, request)
    assert (request.cached.asked, request.cached.storage) == (40, 16)
    assert request.cached.failed == {reason: 24}
    assert request.cached.missed == {reason: 24}


def test_a_failed_probe_is_an_error_and_no_miss() -> None:
    """A store that does not answer is not a store that has nothing."""
    cache = stored_cache()
    request = cache.submit("b", PROMPT)
    cache.end(cache.open(JobKind.PROBE), failed=True)
    serve(cache, request)
    assert request.cached.failed == {"error": 40}


def test_a_few_tokens_are_below_the_threshold() -> None:
    """The setting costs hits; the sum of this reason says how many."""
    cache = stored_cache(prefetch_threshold=64)
    request = serve(cache, cache.submit("b", PROMPT))
    assert request.cached.failed == {"below_threshold": 40}
    assert request.cached.missed == {"below_threshold": 40}


def test_a_withdrawn_request_leaves_the_sums_whole() -> None:
    """What was asked for a request that never began would otherwise be missing from the sums for ever."""
    cache = stored_cache()
    request, _ = cache.fetching(PROMPT)
    cache.scheduler.abort(request.rid)
    cache.drain()
    check_stats(cache.cache.stats)
    assert cache.cache.stats.failed_tokens["cancelled"] == 40


def test_a_load_that_fails_is_counted_where_the_request_begins_again() -> None:
    """The prompt counts once, computed; what storage brought was in vain, and is said to be."""
    cache = stored_cache()
    request, job = cache.fetching(PROMPT)
    cache.end(job)
    cache.scheduler.cache.tick()
    assert cache.cache.ready(request)
    cache.scheduler._admit()
    cache.executor.finish(cache.open(JobKind.LOAD), failed=True)
    serve(cache, request)
    assert request.cached.computed == 41
    assert request.cached.failed == {"load_failed": 40}
    assert request.cached.missed == {"load_failed": 40}


def test_a_window_that_storage_lacks_is_no_boundary_not_a_miss() -> None:
    """FULL pages alone are of no use: the remedy is to store windows, not more pages."""
    cache = ScriptedCache((FULL, SWA), hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    cache.store_only(PROMPT)
    storage = cache.executor.storage
    assert storage is not None
    cache.lose([ref for ref in list(storage) if ref.component is SWA])
    request = serve(cache, cache.submit("b", PROMPT))
    assert request.cached.failed == {"no_boundary": 40}


@pytest.mark.parametrize(
    ("reason", "why", "expected"),
    [
        ("store_failed", Why.TIMEOUT, Shortfall.TIMEOUT),
        ("store_failed", Why.BYPASSED, Shortfall.BREAKER_OPEN),
        ("store_failed", Why.DETACHED, Shortfall.DETACHED),
        ("store_failed", None, Shortfall.ERROR),
        ("incomplete", Why.CORRUPT, Shortfall.CORRUPT),
        ("incomplete", Why.SHORT, Shortfall.SHORT),
        ("incomplete", None, Shortfall.MISSING),
        ("deadline", None, Shortfall.DEADLINE),
        ("cut_off", None, Shortfall.CUT_OFF),
        ("host_capacity", None, Shortfall.HOST_CAPACITY),
    ],
)
def test_every_way_a_read_ends_has_its_reason(reason: str, why: Why | None, expected: Shortfall) -> None:
    """A reason that stood for two would send its reader to the wrong place."""
    marks = marks_of(reason, why, crowded=False, run=8, target=6, reached=2, limit=10)
    assert marks == [
        (2, Shortfall.EVICTED),
        (6, expected),
        (8, Shortfall.NO_BOUNDARY),
        (10, Shortfall.NOT_STORED),
    ]
    crowded = marks_of(reason, why, crowded=True, run=8, target=0, reached=0, limit=10)
    assert crowded == [(8, Shortfall.HOST_CAPACITY), (10, Shortfall.NOT_STORED)]


MARKS = [
    (4, Shortfall.EVICTED),
    (7, Shortfall.DEADLINE),
    (9, Shortfall.NO_BOUNDARY),
    (10, Shortfall.NOT_STORED),
]


def admit(
    ask: Ask, *, device: int, hit: int, whole: int, seen: int = 0
) -> tuple[Accounts, Request, CacheStats]:
    """Account for a request of ten pages of 4 tokens and one token, `seen` of them computed before."""
    stats = CacheStats()
    accounts = Accounts(TreeRules(4, (FULL,)), stats, ceiling_pages=100)
    accounts.committed(make_request("before", PROMPT, 1), 0, seen, [])
    request = make_request("r", PROMPT, 1)
    accounts.admitted(request, ask, device=device, hit=hit, whole=whole)
    check_request(request, 41)
    check_stats(stats)
    return accounts, request, stats


def test_what_others_brought_meanwhile_is_covered_and_not_credited_to_storage() -> None:
    """Storage brought two pages, others computed four more: L3's share must not grow by their work."""
    _, request, _ = admit(Ask(2, 10, 4, MARKS), device=0, hit=8, whole=8)
    assert (request.cached.storage, request.cached.host) == (8, 24)
    assert request.cached.failed == {"covered": 16, "no_boundary": 4, "not_stored": 4}


def test_a_hit_that_shrank_below_what_was_asked_settles_only_what_was_asked() -> None:
    """Pages that L1 and L2 had when storage was asked were never its to bring."""
    _, request, _ = admit(Ask(6, 10, 0, [(10, Shortfall.TIMEOUT)]), device=2, hit=2, whole=3, seen=9)
    assert (request.cached.asked, request.cached.failed) == (16, {"timeout": 16})
    assert request.cached.missed == {"no_room": 4, "evicted": 12, "timeout": 12}


def test_a_failed_load_takes_every_count_of_the_first_admission_back() -> None:
    """The prompt would count twice, and so would what it had missed."""
    accounts, request, stats = admit(Ask(2, 10, 4, MARKS), device=1, hit=4, whole=4, seen=10)
    assert (stats.storage_tokens, stats.missed_tokens) == (
        8,
        {"deadline": 12, "no_boundary": 8, "not_stored": 4},
    )
    accounts.load_failed(request)
    check_stats(stats)
    assert (stats.prompt_tokens, stats.ceiling_tokens, +stats.missed_tokens) == (0, 0, Counter())
    assert stats.failed_tokens["load_failed"] == 8
    request.load_failed = True
    accounts.admitted(request, Ask(), device=1, hit=1, whole=4)
    check_request(request, 41)
    check_stats(stats)
    assert (stats.prompt_tokens, stats.asked_tokens) == (41, 32)
    assert stats.missed_tokens["load_failed"] == 12


class Infinite:
    """The naive infinite cache: every path and every state ever seen."""

    def __init__(self, mamba: bool) -> None:
        self.paths: set[tuple[bytes, tuple[int, ...]]] = set()
        self.states: set[tuple[bytes, tuple[int, ...]]] = set()
        self.mamba = mamba

    def saw(self, request: Request, start: int, end: int, states: Sequence[int]) -> None:
        path = tuple(request.tokens)
        self.paths |= {(request.scope, path[: 2 * (i + 1)]) for i in range(start, end)}
        self.states |= {(request.scope, path[: 2 * at]) for at in states}

    def reusable(self, request: Request, limit: int) -> int:
        path, found = tuple(request.tokens), 0
        for at in range(1, limit + 1):
            key = (request.scope, path[: 2 * at])
            if key not in self.paths:
                break
            if not self.mamba or key in self.states:
                found = at
        return found


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA), (FULL, MAMBA)])
def test_the_ceiling_is_that_of_the_naive_infinite_cache(kinds: tuple[Component, ...]) -> None:
    """A ceiling that is too low hides losses, one that is too high asks for memory in vain."""
    rng = random.Random(len(kinds))
    ceiling, naive = Ceiling(TreeRules(2, kinds, 1 if SWA in kinds else 0), 1 << 16), Infinite(MAMBA in kinds)
    depths = set()
    for i in range(600):
        prompt = array("I", (rng.randrange(2) for _ in range(rng.randrange(2, 20))))
        request = make_request(str(i), prompt, 1, scope=rng.choice([b"", b"s" * 32]))
        limit = (len(prompt) - 1) // 2
        found = ceiling.reusable(request, limit)
        assert found == naive.reusable(request, limit)
        depths.add(found)
        end = len(prompt) // 2
        start = rng.randint(0, end)
        states = sorted(rng.sample(range(start + 1, end + 1), rng.randint(0, end - start)))
        for one in (ceiling, naive):
            one.saw(request, 0, start, [])
            one.saw(request, start, end, states)
    assert len(depths) > 4


def test_the_ceiling_forgets_what_was_met_longest_ago() -> None:
    """Its memory is bounded whatever the traffic; beyond it the ceiling is a lower bound."""
    ceiling = Ceiling(TreeRules(1, (FULL,)), 40)
    asked = [make_request(str(i), tokens(10, seed=i + 1), 1) for i in range(5)]
    for request in asked:
        ceiling.saw(request, 0, 10, [])
        ceiling.reusable(asked[0], 9)  # met again and again
    found = [ceiling.reusable(request, 9) for request in asked]
    assert found[0] == found[-1] == 9
    assert found[1] == 0
    assert len(ceiling._young) + len(ceiling._old) <= 41
