"""buffer_only: pages pass through the host to storage and back, and none of them stays."""

from __future__ import annotations

import pytest

from hicache.config.cache import CacheConfig, HostMemoryMode
from hicache.errors import ConfigError
from hicache.testing.scripted_cache import FULL, MAMBA, ROOMY, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.types import PrefetchPolicy, Tier, WritePolicy

ALL = (FULL, SWA, MAMBA)
WAIT = PrefetchPolicy.WAIT_COMPLETE


def buffered(kinds: tuple[object, ...] = ALL, **settings: object) -> ScriptedCache:
    chosen = {
        "hicache_host_memory_mode": HostMemoryMode.BUFFER_ONLY,
        "hicache_storage_prefetch_policy": WAIT,
        **settings,
    }
    return ScriptedCache(kinds, **chosen)  # type: ignore[arg-type]


def host_taken(world: ScriptedCache) -> int:
    pools = world.cache.pools
    return sum(pools[pool].num_taken for pool in pools.kinds if pool[0] is Tier.HOST)


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA), (FULL, MAMBA), ALL])
def test_what_is_stored_leaves_the_host_and_comes_back_from_storage(kinds: tuple[object, ...]) -> None:
    """Memory that was to be a small buffer would fill up, or what L3 has would be computed again."""
    world = buffered(kinds)
    world.run("first", tokens(40))
    world.cache.tick()
    assert len(world.stored()) == 10
    assert host_taken(world) == 0
    world.drop_memory()
    again = world.run("again", tokens(40))
    assert (again.cached.device, again.cached.host) == (0, 0)
    assert again.cached.storage == 36
    world.cache.tick()
    assert host_taken(world) == 0
    world.check_quiet()


def test_a_page_goes_to_the_host_once_however_often_its_path_is_used() -> None:
    """The host lacks every page all the time: each turn would copy its whole history again."""
    world = buffered()
    for turn in range(5):
        world.run(f"turn {turn}", tokens(16 * (turn + 1)))
    stats = world.cache.stats
    assert stats.written_pages["full"] == len(world.stored()) == 20
    assert stats.device_tokens > 0


def test_without_storage_nothing_is_copied_and_when_it_comes_it_is_stocked() -> None:
    """Every commit would copy pages nobody stores; and what was computed meanwhile would never be stored."""
    world = buffered((FULL,))
    storage = world.executor.storage
    assert storage is not None
    world.executor.detach()
    world.run("alone", tokens(40))
    assert world.cache.stats.written_pages["full"] == 0
    assert host_taken(world) == 0
    world.executor.attach(storage)
    for _ in range(20):
        world.cache.tick()
        for job in world.executor.open_jobs():
            world.executor.finish(job)
    world.cache.tick()
    assert len(world.stored()) == 10
    assert host_taken(world) == 0
    world.check_quiet()


@pytest.mark.parametrize("failing", [JobKind.WRITE, JobKind.STORE])
def test_pages_whose_copy_or_store_fails_do_not_stay_on_the_host(failing: JobKind) -> None:
    """A store that refuses would fill the buffer, and nothing would pass through it any more."""
    world = buffered((FULL,))
    world.submit("r", tokens(40))
    for _ in range(60):
        for job in world.executor.open_jobs():
            world.executor.finish(job, failed=job in world.executor.open_jobs(failing))
        world.step()
    world.cache.tick()
    assert host_taken(world) == 0
    assert not world.stored()
    world.check_quiet()


@pytest.mark.parametrize("buffer", [8, 3, 1])
def test_a_prompt_longer_than_the_buffer_is_stored_whole(buffer: int) -> None:
    """The buffer bounds what is under way, not what can be stored, in however many parts."""
    world = buffered((FULL,), host={FULL: buffer}, device=ROOMY)
    world.run("long", tokens(200))
    for _ in range(200):
        for job in world.executor.open_jobs():
            world.executor.finish(job)
        world.cache.tick()
    assert len(world.stored()) == 50
    assert host_taken(world) == 0


def test_pages_fetched_for_a_queued_request_stay_until_it_begins_or_goes() -> None:
    """They would leave before the request could use them, and it would compute what was just read."""
    world = buffered((FULL,))
    world.store_only(tokens(40))
    request, fetch = world.fetching(tokens(40))
    world.end(fetch)
    assert world.cache.ready(request)
    for _ in range(5):
        world.cache.tick()
    assert host_taken(world) == 9
    world.scheduler.abort(request.rid)
    world.cache.tick()
    assert host_taken(world) == 0
    world.check_quiet()


def test_write_back_is_refused() -> None:
    """What is written back later must be somewhere meanwhile."""
    with pytest.raises(ConfigError, match="buffer_only keeps nothing"):
        CacheConfig(
            hicache_host_memory_mode=HostMemoryMode.BUFFER_ONLY, hicache_write_policy=WritePolicy.WRITE_BACK
        )
