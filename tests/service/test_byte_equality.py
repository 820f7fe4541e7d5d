"""Whatever the cache does, an answer is the same bytes as without it.

Every prompt of a script that misses, hits, extends what decode wrote, branches, and comes back after
eviction is compared, tokens and logits, with a cold run of the same prompt. The second pass is
another replica on the same store. The default run has every pair of settings, `-m thorough` all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig, HostMemoryMode
from hicache.engine.architecture import DRAFT_SUFFIX, PRESETS, ReferenceConfig, preset_config, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.sizing import device_capacities
from hicache.registry import create_backend
from hicache.request import Request
from hicache.storage_backends.base import StorageBackend
from hicache.testing.daemon import running_daemon
from hicache.testing.pairwise import pairwise
from hicache.testing.services import (
    MooncakeMaster,
    MooncakeOwner,
    RedisServer,
    mooncake_missing,
    redis_missing,
)
from hicache.tiers.layouts import HostLayout
from hicache.tiers.sizing import host_capacities
from hicache.types import CachedTokens, Component, PrefetchPolicy, Tier, WritePolicy

WHOLE_PREFIX = "whole-"  # all layers of a preset that is cut short otherwise
FACTORS: Mapping[str, Sequence[Any]] = {
    "preset": ["dense", "five-in-thirty", "full-mamba-draft", "hybrid", "full", "compressed-draft"],
    "backend": ["none", "memory", "file", "mooncake", "redis", "grpc"],
    "write": list(WritePolicy),
    "prefetch": list(PrefetchPolicy),
    "page_size": [1, 16, 64],
    "layout": list(HostLayout),
}
PAIRS = pairwise(FACTORS)
WHOLE = f"{WHOLE_PREFIX}five-in-thirty"
THOROUGH = {**FACTORS, "preset": [*PRESETS, *(f"{name}{DRAFT_SUFFIX}" for name in PRESETS), WHOLE]}
PRODUCT = [dict(zip(THOROUGH, values, strict=True)) for values in itertools.product(*THOROUGH.values())]
SIDECARS = [
    ("hybrid", "full_index"),
    *(("compressed-draft", name) for name in ("full_c4_index", "full_c32", "swa_c4_state", "swa_c32_state")),
    ("compressed-draft", "swa_draft"),
]
OUTPUT = 20  # tokens: decode crosses a page of 16
L1_TOKENS = 384  # two turns of the script do not fit together

Script = list[list[list[int]]]  # steps of prompts that are sent together


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: its tokens, and the hash of all logits they were sampled from."""

    tokens: tuple[int, ...]
    logits: str


@dataclass(slots=True)
class Run:
    """One engine over the whole script."""

    answers: list[list[Answer]] = field(default_factory=list)
    cached: list[CachedTokens] = field(default_factory=list)
    evicted: int = 0
    left_on_host: int = 0  # pages and states

    @property
    def by_tier(self) -> tuple[int, int, int]:
        return (
            sum(c.device for c in self.cached),
            sum(c.host for c in self.cached),
            sum(c.storage for c in self.cached),
        )


def model(preset: str) -> ReferenceConfig:
    config = replace(preset_config(preset.removeprefix(WHOLE_PREFIX)), window=32, context_length=512)
    return config if preset.startswith(WHOLE_PREFIX) else replace(config, layers=config.layers[-8:])


def settings_of(case: Mapping[str, Any]) -> EngineSettings:
    config, page = model(case["preset"]), case["page_size"]
    spec = reference_spec(config, page)
    device = device_capacities(spec, max_total_tokens=L1_TOKENS, max_mamba_cache_size=12)
    return EngineSettings(
        model=config,
        page_size=page,
        sizes=TierSizes(device, host_capacities(spec, device, ratio=2.0)),
        cache=CacheConfig(
            hicache_host_memory_mode=case.get("mode", HostMemoryMode.CACHE),
            hicache_write_policy=case["write"],
            hicache_storage_prefetch_policy=case["prefetch"],
            prefetch_threshold=16,
            chunked_prefill_size=64,
            mamba_track_interval=64,
        ),
        layout=case["layout"],
        max_running_requests=2,
    )


@functools.cache
def script_and_answers(preset: str) -> tuple[Script, list[list[Answer]]]:
    """The script, and each prompt's answer on a fresh engine with one big chunk and no tier below L1."""
    rng = random.Random(11)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(512) for _ in range(count)]

    first = drawn(150)
    script: Script = []
    answers: list[list[Answer]] = []

    def step(*prompts: list[int]) -> list[list[int]]:
        """Add a step; returns each prompt followed by its answer."""
        script.append(list(prompts))
        answers.append([cold(preset, prompt) for prompt in prompts])
        return [[*p, *a.tokens] for p, a in zip(prompts, answers[-1], strict=True)]

    step(first)
    (told,) = step(first)
    extended, branched = step(told + drawn(30), first[:90] + drawn(50))
    step(drawn(200), drawn(200))
    step(extended + drawn(20))
    step(drawn(230))
    step(branched + drawn(20), first)
    return script, answers


def cold(preset: str, prompt: list[int]) -> Answer:
    config = model(preset)
    device = device_capacities(reference_spec(config, 64), max_total_tokens=1024, max_mamba_cache_size=8)
    cache = CacheConfig(chunked_prefill_size=512, mamba_track_interval=256)
    return play(EngineSettings(config, 64, TierSizes(device, {}), cache), [[prompt]]).answers[0][0]


def play(settings: EngineSettings, script: Script, *, storage: StorageBackend | None = None) -> Run:
    """Run the script on a new engine whose memory is poisoned, checking the laws after every step."""
    hashes: dict[str, Any] = {}

    def observe(request: Request, logits: Tensor) -> None:
        hashes.setdefault(request.rid, hashlib.sha256()).update(logits.numpy().tobytes())

    engine = ReferenceEngine(settings, storage=storage, observer=observe)
    try:
        poison(engine)
        run = Run()
        for number, prompts in enumerate(script):
            requests = [
                Request(f"{number}.{i}", array("I", prompt), len(prompt), OUTPUT)
                for i, prompt in enumerate(prompts)
            ]
            for request in requests:
                engine.scheduler.submit(request)
            engine.scheduler.run_until_idle(stall_s=30.0)
            assert engine.cache.settle()
            engine.cache.check_integrity()
            run.cached += [r.cached for r in requests]
            run.answers.append([Answer(tuple(r.output), hashes[r.rid].hexdigest()) for r in requests])
        if storage is not None and settings.cache.hicache_write_policy is WritePolicy.WRITE_BACK:
            engine.cache.flush_dirty(10.0)
        run.evicted = sum(engine.cache.stats.evicted_pages.values())
        engine.cache.tick()
        pools = engine.cache.pools
        run.left_on_host = sum(pools[pool].num_taken for pool in pools.kinds if pool[0] is Tier.HOST)
        return run
    finally:
        engine.close()


def poison(engine: ReferenceEngine) -> None:
    """Make every byte nobody wrote a NaN, on both tiers."""
    for component, pages in engine.settings.sizes.device.items():
        engine.device_pools.poison(component, range(pages))
    if engine.host_pools is not None:
        for component, pages in engine.settings.sizes.host.items():
            engine.host_pools.poison(component, range(pages))


class Stores:
    """Opens a storage backend per case; the servers behind them are started once, when first needed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._number = 0

    @functools.cached_property
    def _redis(self) -> RedisServer:
        return self._stack.enter_context(RedisServer(self._folder / "redis"))

    @functools.cached_property
    def _mooncake(self) -> MooncakeMaster:
        master = self._stack.enter_context(MooncakeMaster(self._folder / "master"))
        self._stack.enter_context(MooncakeOwner(self._folder / "owner", master, segment_bytes=64 << 20))
        return master

    @functools.cached_property
    def _daemon(self) -> str:
        return self._stack.enter_context(running_daemon()).address

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[StorageBackend | None]:
        """Yield an empty backend, or None for `none`. Skips the test, saying why, where it cannot run."""
        missing = {"redis": redis_missing, "mooncake": mooncake_missing}.get(name, lambda: None)()
        if missing is not None:
            pytest.skip(missing)
        if name == "none":
            yield None
            return
        self._number += 1
        backend = create_backend(name, self._options(name))
        try:
            backend.clear("")
            yield backend
        finally:
            backend.close()

    def _options(self, name: str) -> Mapping[str, object]:
        if name == "file":
            return {"file_storage_path": str(self._folder / f"file-{self._number}")}
        if name == "redis":
            return {"url": self._redis.url}
        if name == "grpc":
            return {"address": self._daemon}
        if name == "mooncake":
            return {
                "master_server_address": self._mooncake.address,
                "master_metrics_port": self._mooncake.metrics_port,
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 0,
            }
        return {}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with contextlib.ExitStack() as stack:
        yield Stores(tmp_path_factory.mktemp("stores"), stack)


def name_of(case: Mapping[str, Any]) -> str:
    return "-".join(str(getattr(value, "value", value)) for value in case.values())


def check(case: Mapping[str, Any], stores: Stores) -> None:
    script, expected = script_and_answers(case["preset"])
    with stores.open(case["backend"]) as storage:
        first = play(settings_of(case), script, storage=storage)
        assert first.answers == expected
        device, host, stored = first.by_tier
        assert first.evicted > 0
        assert device > 0
        assert host + stored > 0
        if storage is not None:
            replica = play(settings_of(case), script, storage=storage)
            assert replica.answers == expected
            if case["prefetch"] is PrefetchPolicy.WAIT_COMPLETE:
                assert replica.by_tier[2] > 0


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_every_pair_of_settings_answers_like_a_cold_run(case: Mapping[str, Any], stores: Stores) -> None:
    """Some setting would change what users are told."""
    check(case, stores)


@pytest.mark.thorough
@pytest.mark.parametrize("case", PRODUCT, ids=name_of)
def test_all_settings_together_answer_like_a_cold_run(case: Mapping[str, Any], stores: Stores) -> None:
    """Some combination of settings would change what users are told."""
    check(case, stores)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_host_that_is_a_buffer_only_answers_like_a_cold_run(preset: str) -> None:
    """Pages that pass through the host on their way to and from L3 would change what users are told."""
    case = {
        "preset": preset,
        "page_size": 16,
        "write": WritePolicy.WRITE_THROUGH,
        "prefetch": PrefetchPolicy.WAIT_COMPLETE,
        "layout": HostLayout.PAGE_FIRST,
        "mode": HostMemoryMode.BUFFER_ONLY,
    }
    script, expected = script_and_answers(preset)
    storage = create_backend("memory", {})
    try:
        for number in range(2):
            run = play(settings_of(case), script, storage=storage)
            assert run.answers == expected
            device, _, stored = run.by_tier
            assert device > 0
            assert stored > 0 or number == 0
            assert run.left_on_host == 0
    finally:
        storage.close()


@pytest.mark.parametrize("preset", FACTORS["preset"])
def test_l1_alone_answers_like_a_cold_run(preset: str) -> None:
    """Prefix sharing in L1, without any tier below, would change what users are told."""
    case = {
        "preset": preset,
        "page_size": 16,
        "write": WritePolicy.WRITE_THROUGH,
        "prefetch": PrefetchPolicy.TIMEOUT,
        "layout": HostLayout.PAGE_FIRST,
    }
    settings = settings_of(case)
    script, expected = script_and_answers(preset)
    run = play(replace(settings, sizes=TierSizes(settings.sizes.device, {})), script)
    assert run.answers == expected
    assert run.by_tier[0] > 0
    assert run.evicted > 0


@pytest.mark.parametrize(("preset", "pool"), SIDECARS)
def test_one_flipped_bit_on_the_host_changes_an_answer(preset: str, pool: str) -> None:
    """The comparison would be blind: any restored byte, of any sidecar, must matter to it."""
    case = {
        "preset": preset,
        "page_size": 16,
        "write": WritePolicy.WRITE_THROUGH,
        "prefetch": PrefetchPolicy.TIMEOUT,
        "layout": HostLayout.PAGE_FIRST,
    }
    script, expected = script_and_answers(preset)
    prompt = script[0][0]
    hashes: list[bytes] = []
    engine = ReferenceEngine(settings_of(case), observer=lambda _, row: hashes.append(row.numpy().tobytes()))
    try:
        for _ in range(2):
            hashes.clear()
            request = Request("r", array("I", prompt), len(prompt), OUTPUT)
            engine.scheduler.submit(request)
            engine.scheduler.run_until_idle()
            assert engine.cache.settle()
            if request.cached.cached == 0:
                whole = hashlib.sha256(b"".join(hashes)).hexdigest()
                assert whole == expected[0][0].logits
                evict_from_device(engine)
                flip_one_bit(engine, prompt, pool)
        assert request.cached.host > 0
        assert hashlib.sha256(b"".join(hashes)).hexdigest() != expected[0][0].logits
    finally:
        engine.close()


def evict_from_device(engine: ReferenceEngine) -> None:
    evicted = engine.cache.tree.evict(Tier.DEVICE, Component.FULL, 1 << 20)
    engine.cache.pools.free_all(evicted.freed)


def flip_one_bit(engine: ReferenceEngine, prompt: list[int], pool: str) -> None:
    """Flip the top mantissa bit of the last number that a pool has on the last page of the hit."""
    assert engine.host_pools is not None
    family = next(c for c in engine.spec.components if pool in [p.name for p in c.pools])
    boundary = (len(prompt) - 1) // 16
    path = engine.cache.tree.slots(
        engine.cache.tree.match(b"", array("I", prompt), len(prompt) - 1), boundary
    )
    slots = path.full_host if family.component is Component.FULL else path.swa_host
    page = boundary - 1 - (pool in engine.spec.absent(family.component, (boundary - 1) % 2))
    slot = slots[page - boundary]
    parts = [bytearray(p.page_bytes) for p in family.pools]
    engine.host_pools.read_page(family.component, slot, [memoryview(part) for part in parts])
    parts[[p.name for p in family.pools].index(pool)][-2] ^= 0x40
    engine.host_pools.write_page(family.component, slot, [memoryview(part) for part in parts])
