"""Storage that is cleared, restarted, detached, attached, or taken away in the middle of things."""

from __future__ import annotations

import itertools
from array import array

import pytest

from hicache.build import TierSizes, build_cache
from hicache.config.cache import CacheConfig
from hicache.engine.scheduler import Scheduler
from hicache.errors import BackendUnavailable
from hicache.keys import page_hashes
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import Call, Fault, FaultyBackend
from hicache.testing.ledger import make_request
from hicache.testing.pools import FULL, MAMBA, SWA
from hicache.testing.scripted_cache import ScriptedCache, tokens
from hicache.testing.transfers import CAPACITIES, TransferWorld, faulty_memory
from hicache.transfer.base import JobKind, ObjectRef
from hicache.types import PrefetchPolicy

PROMPT = tokens(41)
KINDS = (FULL, SWA, MAMBA)


@pytest.mark.parametrize("moment", ["probing", "fetching", "storing", "idle"])
@pytest.mark.parametrize("change", ["detach", "restart", "lose"])
def test_whatever_happens_to_storage_every_request_ends_with_its_own_pages(moment: str, change: str) -> None:
    """A store that is swapped under a read would have its pages taken for those of the old one."""
    bed = ScriptedCache(KINDS, hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    bed.store_only(PROMPT)
    old = dict(bed.executor.storage or {})
    if moment == "probing":
        bed.submit("r", PROMPT)
    elif moment == "fetching":
        bed.executor.read(bed.fetching(PROMPT)[1], 6)
    elif moment == "storing":
        bed.begin("r", tokens(61))
        bed.step(3)
        for write in bed.executor.open_jobs(JobKind.WRITE):
            bed.end(write)
    if change == "detach":
        bed.executor.detach()
    elif change == "restart":
        bed.executor.lose_storage()
    else:
        bed.lose(list(old)[::2])
    bed.step()
    bed.drain()
    if change == "detach":
        bed.executor.attach({})
    bed.drain()
    bed.run("next", PROMPT)
    counts = bed.finished[-1].cached
    assert counts.cached + counts.computed == len(PROMPT)
    bed.check_quiet()


def test_a_store_that_comes_back_empty_is_stocked_again() -> None:
    """What is believed stored would never be written again, and every lookup would miss."""
    bed = ScriptedCache(KINDS)
    bed.run("a", PROMPT)
    bed.run("b", tokens(33, seed=2))
    before = set(bed.executor.storage or ())
    assert before
    bed.executor.lose_storage()
    bed.drain()
    for _ in range(20):
        bed.cache.tick()
        bed.drain()
    assert set(bed.executor.storage or ()) == before
    bed.check_quiet()


def test_what_went_with_the_old_store_is_not_taken_for_stored_in_the_new() -> None:
    """A write acknowledged after the restart was kept by the store before it."""
    bed = ScriptedCache()
    bed.begin("r", PROMPT)
    bed.step(3)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    store = bed.executor.open_jobs(JobKind.STORE)[0]
    refs = list(bed.executor.refs(store))
    bed.executor.lose_storage()
    bed.cache.tick()  # the restart is noticed, the write is still open
    bed.executor.finish(store)
    bed.lose(refs)
    bed.drain()
    assert set(refs) <= set(bed.executor.storage or ())
    bed.check_quiet()


def test_what_was_cleared_under_a_write_in_flight_is_not_taken_for_stored() -> None:
    """Acknowledged after the clear, kept before it: nobody would find it, and nobody store it again."""
    bed = ScriptedCache(KINDS)
    bed.begin("r", PROMPT)
    bed.step(3)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    store = bed.executor.open_jobs(JobKind.STORE)[0]
    refs = list(bed.executor.refs(store))
    bed.executor.finish(store)  # kept, and not known yet
    bed.lose(list(bed.executor.storage or ()))
    bed.cache.storage_cleared()
    bed.drain()
    assert set(refs) <= set(bed.executor.storage or ())
    bed.check_quiet()


def test_what_was_cleared_under_a_read_in_flight_is_not_taken_for_stored() -> None:
    """Pages that were read before the clear would never be stored again."""
    bed = ScriptedCache(KINDS, hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    bed.store_only(PROMPT)
    kept = set(bed.executor.storage or ())
    _, fetch = bed.fetching(PROMPT)
    bed.executor.finish(fetch)
    bed.lose(kept)
    bed.cache.storage_cleared()
    bed.drain()
    assert bed.finished[-1].cached.storage > 0
    bed.run("next", PROMPT)
    assert {ref for ref in kept if ref.component is FULL} <= set(bed.executor.storage or ())
    bed.check_quiet()


def test_a_hole_found_by_a_probe_is_filled_by_the_next_write() -> None:
    """A page that L3 evicted would be missing for as long as the process believes it is there."""
    bed = ScriptedCache()
    bed.run("a", PROMPT)
    victims = [ref for i, ref in enumerate(bed.executor.storage or ()) if i in (2, 6)]
    bed.lose(victims)
    bed.run("longer", tokens(81))
    bed.run("longer still", tokens(121))
    if not set(victims) <= set(bed.executor.storage or ()):
        bed.drop_memory()
        assert bed.run("seen", PROMPT).cached.storage == 8  # up to the hole, and told
        bed.drain()
    assert set(victims) <= set(bed.executor.storage or ())
    bed.check_quiet()


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_storage_detached_between_a_probe_and_its_read_is_a_miss(policy: PrefetchPolicy) -> None:
    """The engine asked for the progress of a read that no store has, and stopped for good."""
    with TransferWorld(faulty_memory(), synchronous=True) as world:
        config = CacheConfig(
            hicache_storage_prefetch_policy=policy,
            prefetch_threshold=1,
            chunked_prefill_size=64,
            mamba_track_interval=64,
        )
        sizes = TierSizes(CAPACITIES, CAPACITIES)
        cache = build_cache(world.spec, sizes, config, world.executor, world.clock)
        request = make_request("r", array("I", range(80)), 1)
        names = page_hashes(b"", request.tokens, 16)[:4]
        refs = [ObjectRef(FULL, h) for h in names]
        refs += [ObjectRef(SWA, h) for h in names] + [ObjectRef(MAMBA, h) for h in names]
        world.store(refs, [*range(4), *range(4), *range(4)])
        scheduler = Scheduler(cache, NoRunner())
        scheduler.submit(request)  # the probe has been answered, and waits to be polled
        world.executor.detach(1.0)
        cache.tick()
        cache.ready(request)
        cache.tick()
        assert cache.ready(request)
        cache.withdraw(request)
        cache.check_integrity()
        assert cache.in_flight == 0


class NoRunner:
    """Nothing is computed in this test."""

    def prefill(self, request: object, start: int, end: int) -> int | None:
        raise AssertionError

    def decode(self, request: object) -> int:
        raise AssertionError


def test_models_in_one_store_clear_only_their_own() -> None:
    """Clearing one deployment would delete another's data."""
    store = MemoryBackend(capacity_bytes=1 << 20)
    keys = ["a/s/full/1", "a/s/full/2", "b/s/full/1", "foreign"]
    for key in keys:
        (reservation,) = store.begin_write([key], [4])
        assert not isinstance(reservation, str)
        store.commit([reservation])  # type: ignore[list-item]
    assert store.clear("a/") == 2
    assert store.probe(keys) == b"\0\0\1\1"
    store.close()


@pytest.mark.parametrize("operation", ["probe", "read", "begin_write", "commit"])
@pytest.mark.parametrize("at", range(4))
def test_a_store_that_dies_at_any_call_costs_hits_and_nothing_else(operation: str, at: int) -> None:
    """A failed read that is taken for a good one garbles the answer."""
    seen = itertools.count()

    def script(call: Call) -> Fault | None:
        dead = call.operation == operation and next(seen) >= at
        return Fault(error=BackendUnavailable("gone")) if dead else None

    store = FaultyBackend(MemoryBackend(capacity_bytes=64 << 20), script)
    with TransferWorld(store, synchronous=True) as world:
        refs = [ObjectRef(FULL, bytes([i]) * 32) for i in range(8)]
        good = world.bytes(refs, list(range(8)))
        stored = world.store(refs, list(range(8))).flags
        probed = world.probe(refs).flags
        fetched = world.fetch(refs, list(range(10, 18))).flags
        got = world.bytes(refs, list(range(10, 18)))
    for i in range(8):
        assert not fetched[i] or (stored[i] and got[i] == good[i])
        assert not probed[i] or stored[i]
    whole = operation == "probe" or at > 2  # there are three batches
    assert all(fetched) is whole
