"""KV events where others lost them: splits under way, fetches from storage, sessions, and every producer."""

from __future__ import annotations

from array import array

import pytest

from hicache.keys import page_hashes
from hicache.testing.router import Router
from hicache.testing.scripted_cache import ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.tree.residency import Loss
from hicache.types import Component, Tier

FULL = Component.FULL
PAGE = 4


def held(router: Router, tier: Tier) -> set[bytes]:
    return {digest for digest, where, component in router.held if where is tier and component is FULL}


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_node_that_splits_while_it_is_written_is_told_whole_and_once(cut: int) -> None:
    """Routers would know only the pages behind the split, and send their conversations elsewhere."""
    cache, router = ScriptedCache(storage=False), Router()
    cache.cache.publish_events(router)
    prompt = tokens(8 * PAGE)
    cache.begin("a", prompt)
    cache.step(3)
    first = cache.open(JobKind.WRITE)
    assert not held(router, Tier.HOST)
    fork = prompt[: cut * PAGE] + tokens(2 * PAGE, seed=2)
    cache.begin("b", fork)
    cache.step(3)
    cache.end(first)
    cache.drain()
    path, other = page_hashes(b"", prompt, PAGE), page_hashes(b"", fork, PAGE)
    assert held(router, Tier.HOST) == {*path, *other}
    parents: dict[bytes, bytes | None] = {}
    for event in router.stored:
        if event.tier is Tier.HOST:
            before = event.parent
            for digest in event.digests:
                assert digest not in parents
                parents[digest] = before
                before = digest
    for names in (path, other):
        assert [parents[digest] for digest in names] == [None, *names[:-1]]


def test_pages_that_storage_brings_are_told_as_stored_on_the_host() -> None:
    """They were published as removed only: routers thought that the worker had nothing."""
    cache, router = ScriptedCache(), Router()
    prompt = tokens(10 * PAGE + 1)
    cache.store_only(prompt)
    cache.cache.publish_events(router)
    cache.step()
    assert not router.held
    _, job = cache.fetching(prompt)
    cache.end(job)
    path = page_hashes(b"", prompt[: 10 * PAGE], PAGE)
    assert held(router, Tier.HOST) == held(router, Tier.STORAGE) == set(path)
    assert not held(router, Tier.DEVICE)
    cache.drain()
    assert held(router, Tier.DEVICE) == set(path)


def test_the_end_of_a_session_is_told_by_what_leaves_not_by_the_close() -> None:
    """Pages freed by a close without an event stay in the router's books for ever; ours free nothing then."""
    cache, router = ScriptedCache(storage=False, enable_session_radix_cache=True), Router()
    cache.cache.publish_events(router)
    shared = tokens(4 * PAGE)
    for rid, session in (("a", "s"), ("b", "other")):
        cache.submit(rid, shared + tokens(4 * PAGE, seed=ord(rid)), session=session)
        cache.drain()
    before = set(router.held)
    cache.cache.sessions.close("s")
    cache.step()
    assert router.held == before
    freed = cache.cache.tree.evict(Tier.DEVICE, FULL, 4)
    cache.cache.pools.free_all(freed.freed)
    cache.step()
    gone = {digest for event in router.removed for digest in event.digests if event.tier is Tier.DEVICE}
    mine = page_hashes(b"", shared + tokens(4 * PAGE, seed=ord("a")), PAGE)
    assert gone == set(mine[4:])  # what only the closed session referred to
    assert {event.why for event in router.removed} == {Loss.DEMOTED}


def test_an_aborted_request_tells_only_what_reached_the_tree() -> None:
    """Half a page, or pages of a load that failed, are nobody's."""
    cache, router = ScriptedCache(storage=False), Router()
    cache.cache.publish_events(router)
    prompt = tokens(20 * PAGE + 2)
    cache.begin("a", prompt)
    cache.step(1)  # one chunk of eight pages
    cache.scheduler.abort("a")
    cache.drain()
    assert held(router, Tier.DEVICE) == set(page_hashes(b"", array("I", prompt[: 8 * PAGE]), PAGE))
