"""How long a request waits for storage: each policy has an end, whatever the store does."""

from __future__ import annotations

import itertools

import pytest

from hicache.policy.prefetch import PrefetchRule
from hicache.request import Request
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.types import PrefetchPolicy, Tier

PROMPT = tokens(41)
CAP = 5.0


def bed_for(policy: PrefetchPolicy, **settings: object) -> ScriptedCache:
    bed = ScriptedCache(
        (FULL, SWA, MAMBA),
        hicache_storage_prefetch_policy=policy,
        prefetch_timeout_base=1.0,
        prefetch_timeout_per_ki_token=0.0,
        prefetch_timeout_max=CAP,
        **settings,
    )
    bed.store_only(PROMPT)
    return bed


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("read", [0, 10, 12, 13], ids=["nothing", "FULL", "FULL and SWA", "everything"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after the deadline"])
def test_each_policy_ends_when_it_says_and_publishes_what_every_component_has(
    policy: PrefetchPolicy, read: int, late: bool
) -> None:
    """A sidecar or state that stalls would hold the request past its deadline."""
    bed = bed_for(policy)
    request, fetch = bed.fetching(PROMPT)
    waits = bed.cache.ready(request) is False
    assert waits is (policy is not PrefetchPolicy.BEST_EFFORT)
    if waits:
        bed.executor.read(fetch, read)
        if read == 13:
            bed.end(fetch)
        if late:
            bed.clock.advance(CAP if policy is PrefetchPolicy.WAIT_COMPLETE else 1.0)
        if policy is PrefetchPolicy.WAIT_COMPLETE and read and read < 13 and late:
            assert not bed.cache.ready(request)  # it has made progress: a new bound begins
            bed.clock.advance(CAP)
        assert bed.cache.ready(request) is (late or read == 13)
        if late or read == 13:
            assert bed.hit(PROMPT) == (10 if read == 13 else 0)
    bed.drain()
    assert request in bed.finished
    bed.check_quiet()


def test_a_prefetch_that_has_not_been_answered_is_not_complete() -> None:
    """Nothing read of nothing planned would count as everything."""
    bed = bed_for(PrefetchPolicy.WAIT_COMPLETE)
    request = bed.submit("r", PROMPT)
    for _ in range(5):
        assert not bed.cache.ready(request)
    bed.end(bed.open(JobKind.PROBE))
    assert not bed.cache.ready(request)
    bed.end(bed.open(JobKind.FETCH))
    assert bed.cache.ready(request)
    assert bed.hit(PROMPT) == 10
    bed.drain()
    bed.check_quiet()


def test_the_deadline_grows_with_the_prompt_up_to_a_cap() -> None:
    """A prompt of a million tokens would wait for minutes."""
    rule = PrefetchRule(PrefetchPolicy.TIMEOUT, 1.0, 0.25, 30.0)
    deadlines = [rule.deadline(n) for n in (0, 1, 1_000, 64_000, 1_000_000, 10_000_000)]
    assert deadlines == sorted(deadlines)
    assert (deadlines[0], deadlines[-1]) == (1.0, 30.0)


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("stuck", [JobKind.PROBE, JobKind.FETCH])
def test_a_store_that_never_answers_delays_a_request_by_the_bound_at_most(
    policy: PrefetchPolicy, stuck: JobKind
) -> None:
    """A dead store would take every request with it; what it holds stays held until it answers."""
    bed = bed_for(policy)
    if stuck is JobKind.PROBE:
        request = bed.submit("r", PROMPT)
    else:
        request, _ = bed.fetching(PROMPT)
    started = bed.clock.now()
    while request not in bed.finished:
        bed.step()
        if request not in bed.finished and not bed.scheduler.num_running:
            bed.scheduler.wait(0.1)
        assert bed.clock.now() - started < CAP + 0.2
    assert bed.executor.open_jobs(stuck)
    assert request.cached.storage == 0
    held = bed.cache.pools.capacity(Tier.HOST, FULL) - bed.free(Tier.HOST)[FULL]
    assert held >= (10 if stuck is JobKind.FETCH else 0)
    bed.drain()
    bed.check_quiet()


def test_prefetches_beyond_the_cap_wait_or_pass_and_the_counter_comes_back() -> None:
    """Neither queued nor run nor revoked, they would lock the scheduler up."""
    bed = ScriptedCache(
        host={FULL: 20},
        prefetch_host_share=0.5,
        hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        prefetch_timeout_max=CAP,
        max_running_requests=1,
    )
    prompts = [tokens(33, seed=s) for s in (1, 2, 3)]
    for prompt in prompts:
        bed.store_only(prompt)
    for i, prompt in enumerate(prompts):
        bed.submit(f"r{i}", prompt)
    for probe in bed.executor.open_jobs(JobKind.PROBE):
        bed.end(probe)
    assert len(bed.executor.open_jobs(JobKind.FETCH)) == 1  # eight of the ten pages
    bed.drain()
    assert len(bed.finished) == 6
    assert [r.cached.storage for r in bed.finished[3:]] == [32, 32, 32]
    bed.check_quiet()
    bed.run("later", prompts[0])
    assert bed.finished[-1].cached.storage == 32
    bed.check_quiet()


def test_a_hung_store_does_not_stop_requests_that_need_pages() -> None:
    """An allocation that waits for a transfer to end waits for ever when the store hangs."""
    bed = ScriptedCache((FULL, SWA), device={FULL: 64, SWA: 12}, store_host_share=0.5)
    bed.begin("first", tokens(20))
    bed.step(2)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write)
    hung = bed.open(JobKind.STORE)
    for seed in (2, 3):
        bed.begin(f"r{seed}", tokens(20, seed=seed), new=60)
    for _ in range(400):
        bed.step()
        for job in bed.executor.open_jobs(JobKind.WRITE, JobKind.LOAD):
            bed.end(job)
        for probe in bed.executor.open_jobs(JobKind.PROBE):
            bed.end(probe)
    assert bed.executor.is_open(hung)
    assert {r.rid for r in bed.finished} == {"first", "r2", "r3"}
    assert bed.cache.stats.retracted
    bed.drain()
    bed.check_quiet()


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA, MAMBA)], ids=str)
def test_what_queued_requests_hold_never_keeps_the_oldest_from_running(kinds: tuple[object, ...]) -> None:
    """With every device page kept for a prefetch that hangs, nobody could ever be admitted."""
    bed = ScriptedCache(
        kinds,  # type: ignore[arg-type]
        device={FULL: 16, SWA: 14, MAMBA: 4},
        host={FULL: 40, SWA: 40, MAMBA: 8},
        hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        prefetch_timeout_max=1e6,
    )
    bed.store_only(tokens(60))
    bed.run("head", tokens(33))
    bed.cache.pools.free(Tier.HOST, FULL, bed.cache.tree.reclaim_duplicates(100))  # device only
    bed.begin("queued", tokens(60))  # its read hangs on those pages
    assert bed.executor.open_jobs(JobKind.FETCH)
    oldest = bed.begin("oldest", tokens(57, seed=4), new=4)
    for _ in range(40):
        bed.step()
        for job in bed.executor.open_jobs(JobKind.WRITE, JobKind.LOAD):
            bed.end(job)
    assert oldest in bed.finished
    bed.drain()
    bed.check_quiet()


def test_aborts_of_waiting_requests_do_not_move_the_deadline_of_others() -> None:
    """The next deadline is what an idle engine sleeps until."""
    bed = bed_for(PrefetchPolicy.TIMEOUT)
    first, _ = bed.fetching(PROMPT, "a")
    second = bed.submit("b", tokens(61))
    for request in (first, second):
        assert not bed.cache.ready(request)
        bed.clock.advance(0.25)
    deadline = bed.cache.next_deadline()
    assert deadline is not None
    bed.scheduler.abort("a")
    assert bed.cache.next_deadline() == deadline + 0.25
    for _ in itertools.repeat(None, 20):
        bed.step()
        bed.scheduler.wait(0.1)
    assert second in bed.finished
    bed.drain()
    bed.check_quiet()


def test_the_deadline_counts_what_storage_is_asked_for_only() -> None:
    """A long prompt that is mostly in memory would wait as long for its last pages as for all of them."""
    bed = ScriptedCache(
        hicache_storage_prefetch_policy=PrefetchPolicy.TIMEOUT,
        prefetch_timeout_base=0.0,
        prefetch_timeout_per_ki_token=1024.0,  # a second a token
        prefetch_timeout_max=1e6,
    )
    bed.store_only(tokens(33))
    bed.run("known", tokens(17))
    request, _ = bed.fetching(tokens(33))
    assert not bed.cache.ready(request)
    assert bed.cache.next_deadline() == bed.clock.now() + 16.0, "an idle engine would wake up too early"
    bed.clock.advance(15.9)
    assert not bed.cache.ready(request)
    bed.clock.advance(0.2)
    assert bed.cache.ready(request)
    bed.drain()
    bed.check_quiet()


def test_a_request_that_waits_for_its_first_answer_keeps_nobody_from_the_hosts_pages() -> None:
    """Every queued request would hold what the host has of its prompt, and none could be brought."""
    bed = ScriptedCache()
    bed.run("known", tokens(17))
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, 4).freed)
    bed.submit("r", tokens(33))
    bed.open(JobKind.PROBE)
    assert bed.cache.tree.evictable(Tier.HOST, FULL) == 4
    bed.drain()
    bed.check_quiet()


HELD_PAGES = 5


def queued_then_flushed(*, failed: bool) -> tuple[ScriptedCache, Request]:
    """A queued request whose only stored pages leave the host after its probe has ended."""
    bed = ScriptedCache(hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    bed.run("part", PROMPT[: HELD_PAGES * 4 + 1])
    request = bed.submit("r", PROMPT)
    bed.end(bed.open(JobKind.PROBE), failed=failed)
    assert bed.hit(PROMPT) == HELD_PAGES
    bed.drop_memory()
    return bed, request


def test_a_queued_request_whose_prefetch_failed_does_not_ask_again() -> None:
    """With a store in trouble it would wait for every answer twice."""
    bed, request = queued_then_flushed(failed=True)
    assert bed.cache.ready(request)
    assert not bed.executor.open_jobs(JobKind.PROBE)
    bed.drain()
    assert request.cached.storage == 0
    bed.check_quiet()


def test_a_queued_request_that_had_nothing_to_fetch_asks_for_what_the_host_has_lost() -> None:
    """What storage has would be computed, because it was on the host when the request came."""
    bed, request = queued_then_flushed(failed=False)
    assert not bed.cache.ready(request)
    bed.drain()
    assert request.cached.storage == HELD_PAGES * 4
    bed.check_quiet()


def test_a_read_that_fits_beside_another_is_begun_at_once() -> None:
    """Pages that the host has already would count as pages to bring, and the request wait for room it has."""
    bed = ScriptedCache(host={FULL: 40}, prefetch_host_share=0.5)
    other = tokens(33, seed=2)
    bed.store_only(other)
    bed.store_only(PROMPT)
    bed.run("known", PROMPT[: HELD_PAGES * 4 + 1])
    bed.begin("first", other)
    bed.begin("second", PROMPT)
    assert len(bed.executor.open_jobs(JobKind.FETCH)) == 2
    bed.drain()
    bed.check_quiet()


def test_a_read_of_a_state_alone_leaves_all_other_pages_of_the_share() -> None:
    """A page counted that nobody takes would keep the next request waiting for room that there is."""
    bed = ScriptedCache((FULL, MAMBA), host={FULL: 40, MAMBA: 8}, prefetch_host_share=0.5)
    other = tokens(41, seed=2)
    bed.store_only(other)
    bed.run("known", PROMPT)
    tree, pools = bed.cache.tree, bed.cache.pools
    for tier in (Tier.DEVICE, Tier.HOST):
        pools.free_all(tree.evict(tier, MAMBA, tree.resident(tier, MAMBA)).freed)
    bed.begin("first", PROMPT)  # hangs on ten of the twenty pages
    (fetch,) = bed.executor.open_jobs(JobKind.FETCH)
    assert {ref.component for ref in bed.executor.refs(fetch)} == {MAMBA}
    bed.begin("second", other)  # needs the other ten
    reads = [bed.executor.refs(job) for job in bed.executor.open_jobs(JobKind.FETCH)]
    assert [sum(ref.component is FULL for ref in refs) for refs in reads] == [0, 10]
    bed.drain()
    bed.check_quiet()


def test_a_state_behind_the_last_token_is_no_reason_not_to_ask_storage() -> None:
    """It cannot be resumed from, as the last token is computed; one before it may be stored."""
    bed = ScriptedCache((FULL, MAMBA))
    bed.run("whole", PROMPT)
    bed.submit("r", PROMPT[:40])
    assert bed.executor.open_jobs(JobKind.PROBE)
    bed.drain()
    bed.check_quiet()
