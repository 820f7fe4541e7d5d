"""Load or recompute in virtual time: the faster way is taken, and the answer does not depend on it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import pytest

from hicache.bench.virtual import VirtualRunner
from hicache.build import TierSizes, build_virtual
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig, HitLoading
from hicache.engine.scheduler import FinalToken, Scheduler
from hicache.request import Request
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.transfer.virtual import VirtualCosts, VirtualStorage
from hicache.types import Component, PrefetchPolicy

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
PAGE, TOKEN_BYTES, PROMPT = 16, 1000, 1024


def spec(kinds: tuple[Component, ...]) -> ModelSpec:
    def component(kind: Component) -> ComponentSpec:
        rows = 1 if kind is MAMBA else PAGE
        pool = PoolSpec(kind.name.lower(), 1, (TOKEN_BYTES,), "uint8", rows)
        return ComponentSpec(kind, (pool,), window=64 if kind is SWA else 0)

    return ModelSpec("virtual", PAGE, tuple(map(component, kinds)))


@dataclass
class Outcome:
    """What the third pass over a few prompts came to."""

    outputs: list[list[int]]
    host: int
    storage: int
    missed: dict[str, int]
    seconds: float
    prefetches: dict[str, int]


def serve(
    kinds: tuple[Component, ...], costs: VirtualCosts, *, l2_only: bool, config: CacheConfig
) -> Outcome:
    """Send six prompts one after the other, several times; between passes L1 (and L2) are dropped."""
    clock, made = ManualClock(), spec(kinds)
    sizes = dict.fromkeys(kinds, 1000)
    cache = build_virtual(
        made,
        TierSizes(sizes, sizes),
        config,
        clock,
        costs=costs,
        storage=None if l2_only else VirtualStorage(),
    )
    runner = VirtualRunner(clock, prefill_tokens_per_s=10_000.0, decode_tokens_per_s=1000.0)
    scheduler = Scheduler(cache, runner, final_token=FinalToken.SKIP)
    outputs: list[list[int]] = []
    requests: list[Request] = []
    began = 0.0
    for turn in range(3):
        began = clock.now()
        requests = []
        for i in range(6):
            prompt = array("I", (i * 10_000 + k for k in range(PROMPT)))
            request = Request(f"{turn}.{i}", prompt, PROMPT, 4)
            scheduler.submit(request)
            scheduler.run_until_idle()
            assert cache.settle()
            requests.append(request)
        outputs = [list(r.output) for r in requests]
        if turn < 2:
            if l2_only:
                evicted = cache.tree.evict(next(iter(cache.pools.kinds))[0], FULL, 1 << 20)
                cache.pools.free_all(evicted.freed)
            else:
                assert cache.flush()
        cache.check_integrity()
    return Outcome(
        outputs,
        sum(r.cached.host for r in requests),
        sum(r.cached.storage for r in requests),
        dict(requests[-1].cached.missed),
        clock.now() - began,
        dict(cache.stats.prefetch),
    )


CONFIG = CacheConfig(
    hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    prefetch_threshold=PAGE,
    chunked_prefill_size=256,
    mamba_track_interval=256,
    prefetch_timeout_max=1000.0,
)
ALWAYS = {"load_or_recompute": HitLoading.ALWAYS}


def always() -> CacheConfig:
    return CacheConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__}, **ALWAYS})


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)])
def test_a_slow_store_is_left_alone_and_a_fast_one_is_used(kinds: tuple[Component, ...]) -> None:
    """Waiting for L3 would cost more than it saves, or a hit that pays would be thrown away."""
    slow = VirtualCosts(fetch_bandwidth=1e6)  # 1000 tokens a second; computing does 10,000
    weighed = serve(kinds, slow, l2_only=False, config=CONFIG)
    loading = serve(kinds, slow, l2_only=False, config=always())
    assert weighed.outputs == loading.outputs
    assert (weighed.storage, loading.storage > 0) == (0, True)
    assert weighed.missed["recompute"] > 0
    assert weighed.prefetches["recompute"] > 0
    assert weighed.seconds < loading.seconds / 2

    fast = VirtualCosts(fetch_bandwidth=1e9)
    weighed = serve(kinds, fast, l2_only=False, config=CONFIG)
    assert weighed.storage > 0
    assert "recompute" not in weighed.missed
    assert weighed.seconds == serve(kinds, fast, l2_only=False, config=always()).seconds


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA, MAMBA)])
def test_a_slow_link_to_the_host_is_left_alone_and_a_fast_one_is_used(kinds: tuple[Component, ...]) -> None:
    """As with storage, for what L2 holds."""
    slow = VirtualCosts(load_bandwidth=1e6)
    weighed = serve(kinds, slow, l2_only=True, config=CONFIG)
    loading = serve(kinds, slow, l2_only=True, config=always())
    assert weighed.outputs == loading.outputs
    assert (weighed.host, loading.host > 0) == (0, True)
    assert weighed.missed["recompute"] > 0
    assert weighed.seconds < loading.seconds / 2

    fast = replace(slow, load_bandwidth=1e9)
    weighed = serve(kinds, fast, l2_only=True, config=CONFIG)
    assert weighed.host > 0
    assert "recompute" not in weighed.missed
