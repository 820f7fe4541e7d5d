"""A hit of any length, from any tier, is the cold run of that length: for every family of pools."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import DRAFT_SUFFIX, PRESETS, preset_config, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.request import Request
from hicache.storage_backends.memory import MemoryBackend
from hicache.types import Component, PrefetchPolicy, Tier

CHUNK = 64
FAMILIES = [f"{name}{suffix}" for name in PRESETS for suffix in ("", DRAFT_SUFFIX)]


def longest(page: int) -> int:
    return 3 * CHUNK + 2 * page


def some_lengths(page: int, seed: int) -> list[int]:
    """Around pages and chunks, and a few of the others."""
    edges = {1, page, page + 1, CHUNK, CHUNK + page + 1, 3 * CHUNK + page, longest(page)}
    return sorted(edges | set(random.Random(seed).sample(range(1, longest(page)), 4)))


def check(
    preset: str, page: int, lengths: Iterable[int], *, layers: int | None = None, islands: bool = False
) -> None:
    """Ask for a prompt of each length with nothing cached, then from L1, from L2 and from L3."""
    config = replace(preset_config(preset), window=40, context_length=512)
    config = replace(config, layers=config.layers[-layers:]) if layers else config
    spec = reference_spec(config, page)
    pages = -(-longest(page) // page) + 2
    sizes = {c: {Component.MAMBA: 16}.get(c, 2 * pages + 128 // page) for c in spec.kinds}
    seen: list[bytes] = []
    settings = EngineSettings(
        model=config,
        page_size=page,
        sizes=TierSizes(sizes, sizes),
        cache=CacheConfig(
            prefetch_threshold=1,
            hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            chunked_prefill_size=CHUNK,
            mamba_track_interval=CHUNK,
            store_host_share=0.5,
        ),
        islands=islands,
    )
    store = MemoryBackend(capacity_bytes=64 << 20)
    engine = ReferenceEngine(
        settings, storage=store, observer=lambda _, row: seen.append(row.numpy().tobytes())
    )

    def ask(prompt: array[int]) -> tuple[list[int], list[bytes], Request]:
        seen.clear()
        request = Request("r", array("I", prompt), len(prompt), 2)
        engine.scheduler.submit(request)
        engine.scheduler.run_until_idle()
        assert engine.cache.settle()
        return list(request.output), list(seen), request

    try:
        for component in spec.kinds:
            engine.device_pools.poison(component, range(sizes[component]))
            assert engine.host_pools is not None
            engine.host_pools.poison(component, range(sizes[component]))
        for length in lengths:
            draw = random.Random(length)
            prompt = array("I", (draw.randrange(config.vocab) for _ in range(length)))
            *cold, request = ask(prompt)
            assert request.cached.cached == 0
            best = (length - 1) // page * page
            for tier in Tier:
                *answer, request = ask(prompt)
                assert answer == cold, (length, tier)
                counts = request.cached
                assert (counts.device, counts.host, counts.storage)[tier] == counts.cached == best, length
                evicted = engine.cache.tree.evict(Tier.DEVICE, Component.FULL, 1 << 20)
                engine.cache.pools.free_all(evicted.freed)
                if tier is not Tier.DEVICE:
                    assert engine.cache.flush()
            store.clear("")
            engine.cache.check_integrity()
    finally:
        engine.close()
        store.close()


@pytest.mark.parametrize(
    "preset", ["dense", "five-in-thirty", "full-mamba", "hybrid", "full", "compressed-draft"]
)
def test_a_hit_equals_the_cold_run_at_lengths_around_pages_and_chunks(preset: str) -> None:
    """A user would be answered differently because the prompt had been seen before."""
    check(preset, 16, some_lengths(16, 1), layers=6 if preset == "five-in-thirty" else None)


@pytest.mark.parametrize("preset", ["five-in-thirty", "compressed-draft"])
def test_islands_do_not_shorten_a_hit_or_change_an_answer(preset: str) -> None:
    """What is given back of windows and of the sums beside them would be needed to resume."""
    check(preset, 16, some_lengths(16, 2), layers=6 if preset == "five-in-thirty" else None, islands=True)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("preset", FAMILIES)
def test_a_hit_equals_the_cold_run_at_every_length(preset: str, page: int) -> None:
    """As above, for every length of up to three chunks and two pages."""
    check(preset, page, range(1, longest(page) + 1))
