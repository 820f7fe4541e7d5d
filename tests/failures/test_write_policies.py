"""What each write policy promises, whatever fails on the way; what is stored can always be reached."""

from __future__ import annotations

import pytest

from hicache.keys import page_hashes
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind, ObjectRef
from hicache.types import Component, Tier, WritePolicy

SETS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]


def leading_run(bed: ScriptedCache, prompt_seed: int, count: int) -> int:
    """Pages of a path that a probe would find, from the root on."""
    hashes = page_hashes(b"", tokens(count * 4, seed=prompt_seed), 4)
    stored = bed.stored()
    return next((i for i, h in enumerate(hashes) if h not in stored), count)


def orphans(bed: ScriptedCache, prompt_seed: int, count: int) -> int:
    """Objects of a path behind a hole, which no probe can reach."""
    hashes = page_hashes(b"", tokens(count * 4, seed=prompt_seed), 4)
    return sum(h in bed.stored() for h in hashes[leading_run(bed, prompt_seed, count) :])


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.25])
def test_a_prompt_of_many_chunks_reaches_host_and_storage_whole_after_one_request(
    kinds: tuple[Component, ...], share: float
) -> None:
    """The tail of a long session would be recomputed in full each time it comes back."""
    host = {FULL: 96, SWA: 96, MAMBA: 32}
    bed = ScriptedCache(kinds, host=host, store_host_share=share)  # 0.02: one page in flight at a time
    prompt = tokens(161)
    bed.begin("r", prompt)
    bed.step(20)  # every chunk is computed before any transfer ends
    bed.drain()
    assert bed.cache.tree.resident(Tier.HOST, FULL) == 40
    assert leading_run(bed, 1, 40) == 40
    bed.drop_memory()
    assert bed.run("again", prompt).cached.storage == 160
    bed.check_quiet()


def test_pages_that_the_host_had_no_room_for_follow_when_it_has() -> None:
    """A moment of pressure would cost the session its place in L3 for good."""
    bed = ScriptedCache(host={FULL: 8}, store_host_share=0.5)
    bed.begin("a", tokens(33))
    bed.step(3)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    store = bed.open(JobKind.STORE)  # holds all of the host
    bed.begin("b", tokens(17, seed=2))
    bed.step(3)
    assert not bed.executor.open_jobs(JobKind.WRITE)
    bed.end(store)
    assert leading_run(bed, 1, 8) == 8
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, 8).freed)  # the first goes cold
    bed.begin("c", tokens(5, seed=3))
    bed.drain()
    assert leading_run(bed, 3, 1) == 1
    bed.check_quiet()


@pytest.mark.parametrize("chunks", [1, 3])
def test_selective_counts_a_request_once_however_it_is_chunked_or_retried(chunks: int) -> None:
    """Everything would be written after one use, which is what the policy is there to avoid."""
    bed = ScriptedCache(
        hicache_write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, chunked_prefill_size=40 // chunks // 4 * 4
    )
    prompt = tokens(41)
    request = bed.begin("r", prompt, new=30)
    bed.step(5)
    bed.scheduler._retract_youngest()  # somebody needed its pages
    bed.drain()
    assert request in bed.finished
    assert bed.cache.stats.retracted == 1
    assert (bed.cache.tree.resident(Tier.HOST, FULL), len(bed.stored())) == (0, 0)
    bed.run("second", prompt)
    assert bed.cache.tree.resident(Tier.HOST, FULL) == 10
    assert leading_run(bed, 1, 10) == 10 == len(bed.stored())
    bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("upto", range(10))
def test_a_store_that_stops_half_way_is_believed_for_what_it_stored_only(
    kinds: tuple[Component, ...], upto: int
) -> None:
    """Missing pages remembered as present are never written again, and recomputed for ever."""
    bed = ScriptedCache(kinds)
    bed.begin("r", tokens(33))
    bed.step(2)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    store = bed.open(JobKind.STORE)
    refs = list(bed.executor.refs(store))
    upto = min(upto, len(refs))
    bed.end(store, failed=upto < len(refs), upto=upto)
    assert set(bed.executor.storage or ()) == set(refs[:upto])
    if upto < len(refs):
        retry = bed.open(JobKind.STORE)
        assert list(bed.executor.refs(retry)) == refs[upto:]
    bed.drain()
    assert set(refs) <= set(bed.executor.storage or ())
    bed.check_quiet()


def test_a_store_that_always_fails_is_given_up_counted_and_lets_go_once() -> None:
    """Endless retries would hold host pages that prefetches need."""
    bed = ScriptedCache(store_attempts=3)
    bed.begin("r", tokens(33))
    bed.step(2)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    tries = 0
    while bed.executor.open_jobs(JobKind.STORE):
        bed.end(bed.open(JobKind.STORE), failed=True)
        tries += 1
        assert tries <= 3
    assert tries == 3
    assert bed.cache.stats.store_failed_pages == 8
    assert bed.cache.stats.stored_pages.total() == 0
    assert bed.cache.tree.evictable(Tier.HOST, FULL) + bed.cache.tree.reclaimable() == 8  # unlocked
    bed.drain()
    bed.run("again", tokens(33))  # the next commit on the path tries anew
    assert leading_run(bed, 1, 8) == 8
    bed.check_quiet()


@pytest.mark.parametrize(("taken", "failed"), [(8, 0), (5, 3), (0, 8)])
def test_what_a_store_did_not_take_at_its_only_try_is_counted(taken: int, failed: int) -> None:
    """An alert would ring for stores that work, or not for those that do not."""
    bed = ScriptedCache(store_attempts=1)
    bed.begin("r", tokens(33))
    bed.step(2)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    bed.end(bed.open(JobKind.STORE), upto=taken)
    assert bed.cache.stats.store_failed_pages == failed
    assert bed.cache.stats.stored_pages.total() == taken
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_is_stored_is_closed_under_prefixes(kinds: tuple[Component, ...], policy: WritePolicy) -> None:
    """Files that no probe can reach fill the disk, and every lookup returns nothing."""
    bed = ScriptedCache(
        kinds,
        hicache_write_policy=policy,
        device={FULL: 24, SWA: 20, MAMBA: 8},
        host={FULL: 30, SWA: 30, MAMBA: 10},
    )
    system = tokens(32)  # stays on the device: everybody uses it
    for turn in range(12):
        for user in range(3):
            prompt = system + tokens(9 + 4 * turn, seed=user + 2)
            bed.run(f"{turn}-{user}", prompt[: bed.cache.max_request_tokens - 4])
    held = bed.executor.storage
    assert held
    for user in range(3):
        path = system + tokens(60, seed=user + 2)
        hashes = page_hashes(b"", path, 4)
        has = [h in bed.stored() for h in hashes]
        assert has == sorted(has, reverse=True), has
        assert sum(has) > 8, "nothing of this conversation beyond the system prompt ever reached storage"
        for component in kinds[1:]:
            for h in bed.stored(component):
                assert ObjectRef(FULL, h) in held
    bed.check_quiet()


def test_write_back_sends_the_ancestors_that_only_the_device_has() -> None:
    """With a hot system prompt on the device, nothing below it would ever reach storage."""
    bed = ScriptedCache(
        hicache_write_policy=WritePolicy.WRITE_BACK,
        device={FULL: 20},
        host={FULL: 40},
        clean_reserve_share=0.5,
    )
    system = tokens(16)
    for user in range(12):
        bed.run(f"u{user}", system + tokens(20, seed=user + 2))
    assert page_hashes(b"", system, 4)[0] in bed.stored()
    assert bed.cache.tree.match(b"", system, 16).device == 4  # it has never left
    bed.drop_memory()
    hits = [bed.run(f"v{u}", system + tokens(21, seed=u + 2)).cached.storage for u in range(2, 8)]
    assert max(hits) > 16
    bed.check_quiet()


def test_a_page_that_could_not_be_backed_up_is_lost_and_said_to_be() -> None:
    """A page listed on the host without a copy there is served as garbage."""
    bed = ScriptedCache(
        hicache_write_policy=WritePolicy.WRITE_BACK, device={FULL: 8}, host={FULL: 4}, storage=False
    )
    bed.run("a", tokens(25))
    host = bed.cache.tree.lock(
        bed.cache.tree.match(b"", tokens(25), 25), bed.hit(tokens(25)), Tier.HOST
    )  # the host cannot take anything else
    bed.cache.tree.release(host)
    before = bed.cache.stats.lost_pages
    bed.run("b", tokens(29, seed=2))
    resident = bed.cache.tree.resident(Tier.HOST, FULL)
    assert resident == 4 - bed.free(Tier.HOST)[FULL]
    assert bed.cache.stats.lost_pages > before
    bed.check_quiet()


def test_write_back_stores_a_tail_whose_head_has_lost_its_host_copy() -> None:
    """Leaves on the host, whose head is on the device alone, would never be stored, and be lost."""
    bed = ScriptedCache(
        hicache_write_policy=WritePolicy.WRITE_BACK,
        device={FULL: 20},
        host={FULL: 40},
        clean_reserve_share=0.5,
    )
    prompt = tokens(37)
    bed.executor.detach()
    bed.run("a", prompt)
    bed.run("b", tokens(9, seed=2))
    pools, tree = bed.cache.pools, bed.cache.tree
    assert tree.resident(Tier.HOST, FULL) >= 9
    pools.free_all(tree.evict(Tier.DEVICE, FULL, 5).freed)
    pools.free(Tier.HOST, FULL, tree.reclaim_duplicates(100))
    found = tree.match(b"", prompt, 36)
    assert 0 < found.device < found.host == 9
    bed.executor.attach({})
    bed.run("c", tokens(9, seed=3))
    bed.run("d", tokens(9, seed=4))
    assert leading_run(bed, 1, 9) == 9
    bed.check_quiet()


def test_write_back_into_a_host_full_of_copies_of_hot_pages_goes_on() -> None:
    """What the device keeps anyway would stand in the way of everything that leaves it."""
    bed = ScriptedCache(
        hicache_write_policy=WritePolicy.WRITE_BACK,
        device={FULL: 32},
        host={FULL: 8},
        clean_reserve_share=0.5,
        storage=False,
    )
    hot = tokens(33)
    bed.run("hot", hot)
    bed.drain()  # the reserve: nothing else is there to be copied
    assert bed.free(Tier.HOST)[FULL] == 0
    for i in range(6):
        bed.run(f"cold{i}", tokens(25, seed=i + 2))
        bed.run(f"hot{i}", hot)
    assert bed.hit(hot) == 8
    assert bed.cache.stats.demoted_pages > 0
    bed.check_quiet()


@pytest.mark.parametrize(("share", "most"), [(0.1, 4), (0.25, 10), (0.01, 2)])
def test_stores_in_flight_hold_no_more_of_the_host_than_their_share(share: float, most: int) -> None:
    """A slow store would keep all of L2 busy; one store at a time must go all the same."""
    bed = ScriptedCache(host={FULL: 40}, store_host_share=share)
    for i in range(8):
        bed.begin(f"r{i}", tokens(9, seed=i))  # two pages each
        bed.step(2)
        for write in bed.executor.open_jobs(JobKind.WRITE):
            bed.end(write)
        held = sum(len(bed.executor.refs(job)) for job in bed.executor.open_jobs(JobKind.STORE))
        assert held == min(2 * (i + 1), most)
    bed.drain()
    assert len(bed.stored()) == 16, "what had to wait is stored when there is room"
    bed.check_quiet()
