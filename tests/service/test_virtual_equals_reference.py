"""Virtual time and the reference engine agree, request by request and tier by tier.

Both run the same cache and scheduler; if they disagreed, every figure of the virtual benchmark would
be of something that no engine does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.bench.in_process import InProcessDriver
from hicache.bench.report import ByTier, TurnResult
from hicache.bench.virtual import VirtualRunner
from hicache.bench.workloads import Workload
from hicache.build import TierSizes, build_virtual
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import PRESETS, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import Scheduler, Settle
from hicache.registry import create_backend
from hicache.transfer.virtual import VirtualStorage
from hicache.types import Component, PrefetchPolicy

PAGE = 16
# 6 clients of 8 rounds of 40 + 8 tokens: 144 pages in the end, 18 a round.
WORKLOAD = Workload(
    name="small",
    num_clients=6,
    num_rounds=8,
    request_length=40,
    output_length=8,
    max_parallel=3,
    request_rate=float("inf"),
    vocab_size=256,
)
CONFIG = CacheConfig(
    chunked_prefill_size=64,
    mamba_track_interval=32,
    prefetch_threshold=PAGE,
    hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
)
DEVICE = {Component.FULL: 60, Component.SWA: 44, Component.MAMBA: 20}
HOST = {Component.FULL: 90, Component.SWA: 60, Component.MAMBA: 24}
Outcome = dict[tuple[int, int], ByTier | None]


def outcome(results: list[TurnResult]) -> Outcome:
    return {(r.client, r.round): r.by_tier for r in results}


def settings(preset: str, tiers: str) -> EngineSettings:
    model = replace(PRESETS[preset], context_length=512, window=32)
    kinds = model.kinds
    host = {c: HOST[c] for c in kinds} if tiers != "l1" else {}
    return EngineSettings(
        model=model,
        page_size=PAGE,
        sizes=TierSizes(device={c: DEVICE[c] for c in kinds}, host=host),
        cache=CONFIG,
        max_running_requests=3,
        settle=Settle.EVERY_STEP,
    )


def reference(of: EngineSettings, tiers: str) -> Outcome:
    driver = InProcessDriver(WORKLOAD, lambda result: None)
    storage = create_backend("memory", {}) if tiers == "l1+l2+l3" else None
    engine = ReferenceEngine(of, storage=storage, on_finish=driver.finished)
    try:
        driver.drive(engine.scheduler)
    finally:
        engine.close()
        if storage is not None:
            storage.close()
    return outcome(driver.results)


def virtual(of: EngineSettings, tiers: str) -> Outcome:
    clock = ManualClock()
    cache = build_virtual(
        reference_spec(of.model, PAGE),
        of.sizes,
        of.cache,
        clock,
        storage=VirtualStorage() if tiers == "l1+l2+l3" else None,
    )
    driver = InProcessDriver(WORKLOAD, lambda result: None)
    scheduler = Scheduler(
        cache,
        VirtualRunner(clock, prefill_tokens_per_s=1e3, decode_tokens_per_s=1e3),
        max_running_requests=of.max_running_requests,
        settle=of.settle,
        on_finish=driver.finished,
    )
    driver.drive(scheduler)
    return outcome(driver.results)


@pytest.mark.parametrize("preset", ["full", "hybrid"])
@pytest.mark.parametrize("tiers", ["l1", "l1+l2", "l1+l2+l3"])
def test_cached_tokens_are_equal_per_request_and_tier(preset: str, tiers: str) -> None:
    """Six clients of eight rounds overflow L1 and L2; every request must find the same on every tier."""
    of = settings(preset, tiers)
    real, modelled = reference(of, tiers), virtual(of, tiers)
    assert len(real) == WORKLOAD.num_requests
    assert modelled == real
    sums = [sum(getattr(t, name) for t in real.values() if t) for name in ("device", "host", "storage")]
    assert [bool(s) for s in sums] == [True, tiers != "l1", tiers == "l1+l2+l3"]
    ceiling = sum(WORKLOAD.history_length(round_) for _, round_ in real)
    if tiers != "l1+l2+l3":
        assert sum(sums) < 0.9 * ceiling  # it did overflow
