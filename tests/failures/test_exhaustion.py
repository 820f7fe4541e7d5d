"""Pools that run out: a shorter hit or none, with a reason; never a crash, a spin or a lie."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.tiers.slots import SlotAllocator
from hicache.transfer.base import JobKind
from hicache.tree.base import Lease
from hicache.types import PrefetchPolicy, Tier, WritePolicy

PROMPT = tokens(41)


def pin_host(bed: ScriptedCache, pages: int) -> Lease:
    """Fill host pages with a prompt, and keep them there."""
    prompt = tokens(pages * 4 + 1, seed=8)
    bed.run("pin", prompt)
    found = bed.cache.tree.match(b"", prompt, pages * 4)
    assert found.host == pages
    return bed.cache.tree.lock(found, pages, Tier.HOST)


@pytest.mark.parametrize("room", range(13))
def test_a_prefetch_takes_the_part_that_fits_or_nothing(room: int) -> None:
    """Keys and pages out of step would put the tail of a prompt into pages of another."""
    threshold = 4
    bed = ScriptedCache(host={FULL: 24}, prefetch_host_share=0.5, prefetch_threshold=threshold * 4)
    bed.store_only(PROMPT)
    pin = pin_host(bed, 24 - room)
    request = bed.begin("r", PROMPT)
    fetches = bed.executor.open_jobs(JobKind.FETCH)
    expected = min(room, 10)
    if expected < threshold:
        assert not fetches
        assert bed.free(Tier.HOST)[FULL] == room
        assert bed.cache.ready(request)
        expected = 0
    else:
        assert len(bed.executor.refs(fetches[0])) == expected
        bed.end(fetches[0])
        assert bed.hit(PROMPT) == expected
    bed.step()
    assert request.cached.storage == expected * 4
    bed.cache.tree.release(pin)
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_host_smaller_than_the_device_still_takes_prefetches(policy: WritePolicy) -> None:
    """Full of copies of what the device holds anyway, it would refuse every one of them."""
    bed = ScriptedCache(
        device={FULL: 32}, host={FULL: 8}, hicache_write_policy=policy, prefetch_host_share=0.5
    )
    wanted = tokens(17, seed=99)
    bed.executor.attach({})
    bed.run("seen", wanted)
    bed.run("seen again", wanted)
    if policy is WritePolicy.WRITE_BACK:
        bed.cache.flush_dirty(10.0)
        bed.drain()
    bed.drop_memory()
    stored = dict(bed.executor.storage or {})
    for i in range(3):
        for again in ("", "again"):
            bed.run(f"{i}{again}", tokens(33, seed=i + 1))
    bed.executor.attach({**(bed.executor.storage or {}), **stored})
    if policy is not WritePolicy.WRITE_BACK:
        assert bed.free(Tier.HOST)[FULL] == 0
    assert bed.run("wanted", wanted).cached.storage == (16 if stored else 0)
    bed.check_quiet()


def test_a_host_that_nothing_can_leave_refuses_at_once() -> None:
    """Waiting for an eviction that cannot happen is a spin."""
    bed = ScriptedCache(host={FULL: 8})
    bed.store_only(PROMPT)
    pin = pin_host(bed, 8)
    request = bed.begin("r", PROMPT)
    assert bed.cache.ready(request)
    assert bed.cache.stats.prefetch["host_capacity"] == 1
    bed.drain()
    assert request in bed.finished
    bed.cache.tree.release(pin)
    bed.check_quiet()


def test_a_list_of_slots_is_its_owners_own() -> None:
    """A view of the free list changes under the thread that reads it."""
    pool = SlotAllocator(16)
    held = pool.allocate(6)
    assert held is not None
    before = held.tolist()
    for i in range(10_000):
        other = pool.allocate(1 + i % 10)
        assert other is not None
        assert not set(other) & set(before)
        pool.free(other)
    assert held.tolist() == before
    pool.free(held)
    assert pool.num_free == 16


@pytest.mark.parametrize("short", [FULL, SWA, MAMBA])
def test_pools_that_cannot_hold_one_request_are_refused_at_start(short: object) -> None:
    """The first long prompt would find out instead."""
    device = {FULL: 64, SWA: 11, MAMBA: 2}
    ScriptedCache((FULL, SWA, MAMBA), device=device)
    with pytest.raises(ConfigError, match="raise --"):
        ScriptedCache((FULL, SWA, MAMBA), device={**device, short: {FULL: 0, SWA: 10, MAMBA: 1}[short]})  # type: ignore[index]


@pytest.mark.parametrize("short", [FULL, SWA, MAMBA])
@pytest.mark.parametrize("pages", [None, 0])
def test_a_host_without_room_for_a_component_is_refused_at_start(short: object, pages: int | None) -> None:
    """What it held of the others could never be resumed."""
    host = {FULL: 8, SWA: 8, MAMBA: 8, short: pages}
    host = {c: n for c, n in host.items() if n is not None}
    with pytest.raises(ConfigError, match=f"L2 has no page for {getattr(short, 'name', '')}"):
        ScriptedCache((FULL, SWA, MAMBA), host=host)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)], ids=str)
@pytest.mark.parametrize("running", [1, 4])
def test_the_smallest_pools_serve_every_request_in_the_end(kinds: tuple[object, ...], running: int) -> None:
    """Requests that hold what the others need would stand still for ever."""
    for policy, share in zip(PrefetchPolicy, (0.1, 0.5, 0.5), strict=True):
        bed = ScriptedCache(
            kinds,  # type: ignore[arg-type]
            device={FULL: 18, SWA: 11, MAMBA: 2},
            host={FULL: 4, SWA: 1, MAMBA: 1},
            max_running_requests=running,
            hicache_storage_prefetch_policy=policy,
            prefetch_host_share=share,
        )
        for turn in range(2):
            for i in range(3):
                bed.submit(f"{turn}-{i}", tokens(30 + i, seed=i % 3 + 1), new=30)
        bed.drain()
        assert len(bed.finished) == 6
        for request in bed.finished:
            counts = request.cached
            assert counts.cached + counts.computed >= request.prompt_length
        bed.check_quiet()


def test_a_request_retracted_with_a_long_answer_is_admitted_again() -> None:
    """Its answer so far, counted twice, would make it too long for ever."""
    bed = ScriptedCache(device={FULL: 20}, host={}, storage=False)
    request = bed.submit("r", tokens(20), new=60)
    bed.step(45)
    assert len(request.tokens) > 60
    bed.scheduler._retract_youngest()
    bed.drain()
    assert request in bed.finished
    bed.check_quiet()


def test_without_a_host_tier_storage_is_not_asked() -> None:
    """There is nowhere to read to: every request would wait for an answer that is of no use."""
    bed = ScriptedCache(host={})
    request = bed.submit("r", tokens(33))
    assert bed.executor.open_jobs() == []
    bed.drain()
    assert request.cached.computed == 33
    bed.check_quiet()


def test_what_the_host_had_no_room_for_is_written_when_there_is_some() -> None:
    """The tail of a prompt would be lost with the device's pages although the host had long had room."""
    bed = ScriptedCache(host={FULL: 12})
    bed.run("old", tokens(33))
    prompt = tokens(33, seed=2)
    bed.begin("new", prompt)
    bed.step(2)
    (write,) = bed.executor.open_jobs(JobKind.WRITE)
    assert len(bed.executor._jobs[write].moves) == 4, "as much as fits"
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, 8).freed)  # the old one's
    bed.end(write)
    bed.drain()
    assert bed.cache.tree.match(b"", prompt, 33).full_device == 8
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, 8).freed)
    assert bed.hit(prompt) == 8
    bed.check_quiet()


def test_nobody_is_admitted_on_pages_that_running_requests_may_still_need() -> None:
    """Both would run out half-way, and one would be computed twice."""
    bed = ScriptedCache(device={FULL: 12}, host={}, storage=False)
    bed.submit("a", tokens(9), new=20)  # eight pages in the end
    bed.submit("b", tokens(9, seed=2), new=12)  # six
    bed.step()
    assert [r.rid for r in bed.scheduler._running] == ["a"]
    bed.drain()
    assert [r.rid for r in bed.finished] == ["a", "b"]
    assert bed.cache.stats.retracted == 0
    bed.check_quiet()
