"""KV events of a whole cache: numbered, in order, merged, and told anew to who has lost some."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from hicache.cache.events import Cleared, EventLog, Removed, Stored
from hicache.keys import page_hashes
from hicache.testing.router import Router
from hicache.testing.scripted_cache import ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.tree.residency import Loss
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


@pytest.fixture
def router() -> Router:
    return Router()


def settle(cache: ScriptedCache) -> None:
    """Let every transfer end, and be noticed."""
    while cache.executor.open_jobs():
        for job in cache.executor.open_jobs():
            cache.end(job)
        cache.step()
    cache.step()


def test_one_request_is_told_once_per_tier_with_its_path(router: Router) -> None:
    """A router indexes paths by these hashes; a page told twice or out of order breaks its tree."""
    cache = ScriptedCache()
    cache.cache.publish_events(router)
    prompt = tokens(40)
    cache.run("a", prompt, new=1)
    settle(cache)
    path = page_hashes(b"", array("I", prompt), 4)
    for tier in Tier:
        told = [e for e in router.events if isinstance(e, Stored) and e.tier is tier]
        assert [digest for e in told for digest in e.digests] == path
        assert array("I", (token for e in told for token in e.tokens)) == array("I", prompt)
        before = [None, *path]
        assert [e.parent for e in told] == [before[path.index(e.digests[0])] for e in told]
    assert [b.sequence for b in router.batches] == list(range(len(router.batches)))


def test_a_second_copy_of_the_same_pages_is_not_told(router: Router) -> None:
    """Two requests compute one prefix at once: the second copy is given back, and is no event."""
    cache = ScriptedCache(storage=False)
    cache.cache.publish_events(router)
    cache.begin("a", tokens(40))
    cache.begin("b", tokens(40))
    cache.step(6)
    settle(cache)
    assert {r.rid for r in cache.finished} == {"a", "b"}
    stored = [e for e in router.events if isinstance(e, Stored) and e.tier is Tier.DEVICE]
    assert sum(len(e.digests) for e in stored) == 10


def test_a_failed_store_is_never_told(router: Router) -> None:
    """A router would send a request to a replica for pages that L3 has never had."""
    cache = ScriptedCache()
    cache.cache.publish_events(router)
    cache.begin("a", tokens(40))
    cache.step(4)
    while cache.executor.open_jobs():
        for job in cache.executor.open_jobs():
            failed = job in cache.executor.open_jobs(JobKind.STORE)
            cache.end(job, failed=failed)
        cache.step()
    cache.step()
    assert {tier for _, tier, _ in router.held} == {Tier.DEVICE, Tier.HOST}


def test_another_storage_ends_every_belief_about_the_old_one(router: Router) -> None:
    """A daemon that restarted empty holds nothing; routers must hear it from whoever noticed."""
    cache = ScriptedCache()
    cache.cache.publish_events(router)
    cache.run("a", tokens(40))
    settle(cache)
    assert any(tier is Tier.STORAGE for _, tier, _ in router.held)
    cache.executor.lose_storage()
    cache.step()
    assert [(e.tier, e.why, len(e.digests)) for e in router.removed] == [(Tier.STORAGE, Loss.RESET, 10)]


def test_a_flush_is_one_event(router: Router) -> None:
    """SGLang's routers know a flush as AllBlocksCleared."""
    cache = ScriptedCache(kinds=(FULL, SWA, MAMBA))
    cache.cache.publish_events(router)
    cache.run("a", tokens(40))
    settle(cache)
    assert {component for _, _, component in router.held} == {FULL, SWA, MAMBA}
    assert cache.scheduler.flush()
    cache.step()
    assert router.batches[-1].events == (Cleared(),)
    assert not router.held


def test_a_router_that_lost_some_is_told_everything_again(router: Router) -> None:
    """Without a new start its picture would stay wrong for ever; the gap in the numbers shows it."""
    cache = ScriptedCache(storage=False)
    cache.cache.publish_events(router)
    cache.run("a", tokens(40))
    settle(cache)
    before = router.batches[-1].sequence
    router.busy = True
    cache.run("b", tokens(24, seed=2))
    settle(cache)
    router.busy = False
    cache.run("c", tokens(24, seed=3))
    settle(cache)
    after = [b for b in router.batches if b.sequence > before]
    assert after[0].sequence == before + 2
    assert cache.cache.event_batches == (len(router.batches), 1)
    assert after[0].events[0] == Cleared()
    fresh = Router()
    cache.cache.publish_events(fresh)
    cache.step()
    assert router.held == fresh.held
    assert len({d for d, tier, _ in router.held if tier is Tier.DEVICE}) == 22


def test_nothing_is_told_and_no_page_is_hashed_unless_asked_for() -> None:
    """Events are off by default and must cost nothing then."""
    cache = ScriptedCache(storage=False)
    cache.run("a", tokens(40))
    found = cache.cache.tree.match(b"", tokens(40), 40)
    assert found.node.hashes == []  # type: ignore[attr-defined]


def test_pages_that_branch_off_before_the_last_are_told_apart(router: Router) -> None:
    """Told as one event, the second branch would hang on the first one's end in a router's tree."""
    cache = ScriptedCache()
    log = EventLog(cache.cache.tree, router)
    words = tokens(4).tobytes()
    log.gained(Tier.DEVICE, FULL, [b"a", b"b"], None, words * 2)
    log.gained(Tier.DEVICE, FULL, [b"c"], b"a", words)
    log.gained(Tier.DEVICE, FULL, [b"d"], b"c", words)
    log.flush()
    assert [(e.digests, e.parent) for e in router.events if isinstance(e, Stored)] == [
        ([b"a", b"b"], None),
        ([b"c", b"d"], b"a"),
    ]


def test_who_comes_late_is_told_what_storage_has_of_every_component(router: Router) -> None:
    """A router that is started after its workers would send conversations elsewhere."""
    cache = ScriptedCache((FULL, SWA, MAMBA))
    cache.run("a", tokens(41))
    settle(cache)
    cache.cache.publish_events(router)
    cache.step()
    cache.cache.tick()
    for component in (FULL, SWA, MAMBA):
        told = {digest for digest, tier, what in router.held if (tier, what) == (Tier.STORAGE, component)}
        assert told == cache.stored(component)
        assert told


def test_evicted_pages_are_counted_by_tier_and_component_as_routers_hear_of_them(router: Router) -> None:
    """An operator would size the wrong pool: only the counts say which one is short."""
    cache = ScriptedCache(
        (FULL, SWA, MAMBA), device={FULL: 24, SWA: 16, MAMBA: 4}, host={FULL: 30, SWA: 12, MAMBA: 4}
    )
    cache.cache.publish_events(router)
    for i in range(8):
        cache.run(f"r{i}", tokens(50, seed=i + 1))
        settle(cache)
    told = Counter(
        f"{e.tier.name.lower()}.{e.component.name.lower()}"
        for e in router.events
        if isinstance(e, Removed) and e.why in (Loss.EVICTED, Loss.DEMOTED)
        for _ in e.digests
    )
    assert cache.cache.stats.evicted_pages == told
    assert set(told) == {f"{tier}.{c}" for tier in ("device", "host") for c in ("full", "swa", "mamba")}
