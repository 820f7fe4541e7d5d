"""Answers are the same bytes with islands and without, hit or cold, however deep in what decode wrote.

After every step each free SWA slot of L1 is overwritten, so that a page which was given back too early
changes an answer, or is NaN, at once.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import PRESETS, ReferenceConfig, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import Settle
from hicache.errors import ConfigError
from hicache.registry import create_backend
from hicache.request import Request
from hicache.types import Component, PrefetchPolicy, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
PAGE, WINDOW = 16, 32
SMALL = {"hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "index_dim": 4, "mlp": 16, "vocab": 256}
LAYERS = {"full-swa": (SWA, FULL), "hybrid": (SWA, MAMBA, FULL)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to, and what it began with."""

    tokens: tuple[int, ...]
    logits: str
    cached: int


def settings(
    kinds: str, *, islands: bool, chunk: int, full: int, swa: int, context: int, host: bool = False
) -> EngineSettings:
    model: ReferenceConfig = replace(
        PRESETS["full-swa"], layers=LAYERS[kinds], window=WINDOW, context_length=context, **SMALL
    )
    device = {FULL: full, SWA: swa, MAMBA: 60}
    device = {c: device[c] for c in model.kinds}
    return EngineSettings(
        model=model,
        page_size=PAGE,
        sizes=TierSizes(device, {c: 2 * n for c, n in device.items()} if host else {}),
        cache=CacheConfig(
            chunked_prefill_size=chunk,
            mamba_track_interval=64,
            radix_eviction_policy="lru",  # the script counts on what it keeps
            prefetch_threshold=PAGE,
            hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        ),
        max_running_requests=2,
        settle=Settle.EVERY_STEP,
        islands=islands,
        accept_length=steps(5),
    )


def steps(seed: int) -> Callable[[Request], int]:
    rng = random.Random(seed)
    return lambda _: rng.randint(1, 16)


class Asked:
    """An engine, asked one prompt after another."""

    def __init__(self, of: EngineSettings, *, storage: bool = False) -> None:
        self._rows: list[bytes] = []
        self.storage = create_backend("memory", {}) if storage else None
        self.engine = ReferenceEngine(
            of, storage=self.storage, observer=lambda _, row: self._rows.append(row.numpy().tobytes())
        )
        self._count = 0

    def ask(self, prompt: Sequence[int], new: int) -> Answer:
        self._rows.clear()
        self._count += 1
        request = Request(f"r{self._count}", array("I", prompt), len(prompt), new)
        scheduler = self.engine.scheduler
        scheduler.submit(request)
        while not scheduler.idle:
            if not scheduler.step():
                scheduler.wait(1.0)
            self.overwrite_free()
        self.engine.cache.check_integrity()
        logits = hashlib.sha256(b"".join(self._rows)).hexdigest()
        return Answer(tuple(request.output), logits, request.cached.cached)

    def overwrite_free(self) -> None:
        pool = self.engine.cache.pools[Tier.DEVICE, SWA]
        self.engine.device_pools.poison(SWA, [s for s in range(pool.capacity) if not pool.is_taken(s)])

    def close(self) -> None:
        self.engine.close()
        if self.storage is not None:
            self.storage.close()


def ask_all(
    of: EngineSettings, script: list[tuple[list[int], int]], *, storage: bool = False
) -> list[Answer]:
    asked = Asked(of, storage=storage)
    try:
        return [asked.ask(prompt, new) for prompt, new in script]
    finally:
        asked.close()


def cold(of: EngineSettings, prompt: list[int], new: int) -> Answer:
    return ask_all(of, [(prompt, new)])[0]


def drawn(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kinds", LAYERS)
def test_a_script_of_hits_branches_and_returns_answers_alike_with_islands_and_without(
    kinds: str, host: bool
) -> None:
    """A page given back a step too early, or a window with a hole, would show in an answer."""
    sizes = {"chunk": 64, "context": 512, "full": 40, "host": host}
    on = settings(kinds, islands=True, swa=14, **sizes)  # type: ignore[arg-type]
    off = settings(kinds, islands=False, swa=40, **sizes)  # type: ignore[arg-type]
    first = ask_all(on, [(drawn(150, 1), 90)])[0]
    told = drawn(150, 1) + list(first.tokens)
    script = [
        (drawn(150, 1), 90),
        (drawn(150, 1), 20),
        (told + drawn(20, 2), 20),  # goes on from the end of the reply
        (told[:200] + drawn(30, 3), 20),  # from within what decode wrote
        (drawn(150, 1)[:100] + drawn(60, 4), 20),  # a branch in the middle of a chunk
        (drawn(150, 1)[:100] + drawn(60, 5), 20),  # and the next one, which finds its window
        (drawn(300, 6), 20),  # pushes them out
        (told + drawn(20, 2), 20),
    ]
    with_islands = ask_all(on, script, storage=host)
    without = ask_all(off, script, storage=host)
    for (prompt, new), a, b in zip(script, with_islands, without, strict=True):
        reference = cold(off, prompt, new)
        assert (a.tokens, a.logits) == (b.tokens, b.logits) == (reference.tokens, reference.logits)
        reference = cold(on, prompt, new)
        assert (a.tokens, a.logits) == (reference.tokens, reference.logits)
    assert with_islands[1].cached == 144
    assert with_islands[2].cached == 224
    assert with_islands[3].cached >= 150
    assert with_islands[5].cached == 96
    if host:
        assert with_islands[7].cached == 256  # from below L1


@pytest.mark.parametrize(
    ("kinds", "depth"),
    [
        ("full-swa", 1000),
        ("hybrid", 600),
        pytest.param("full-swa", 9000, marks=[pytest.mark.thorough, pytest.mark.timeout(3600)]),
        pytest.param("hybrid", 9000, marks=[pytest.mark.thorough, pytest.mark.timeout(3600)]),
    ],
)
def test_a_prompt_goes_on_from_deep_within_what_decode_wrote(kinds: str, depth: int) -> None:
    """Islands of decode are what a later turn begins from: a wrong one is wrong from its first token on."""
    chunk = depth // 9 // 64 * 64
    pages = depth // PAGE + 80
    sizes = {"chunk": chunk, "context": depth + 512, "full": 2 * pages}
    on = settings(kinds, islands=True, swa=chunk // PAGE + 80, **sizes)
    off = settings(kinds, islands=False, swa=2 * pages, **sizes)
    prompt, extra = drawn(100, 1), drawn(40, 2)
    asked = {}
    for name, of in (("on", on), ("off", off)):
        bed = Asked(of)
        try:
            told = bed.ask(prompt, depth + 100)
            whole = prompt + list(told.tokens)
            cuts = [100 + depth, 100 + depth - 3 * chunk // 8, 100 + depth // 2]
            asked[name] = [told, *(bed.ask(whole[:cut] + extra, 8) for cut in cuts)]
        finally:
            bed.close()
    assert [(a.tokens, a.logits) for a in asked["on"]] == [(a.tokens, a.logits) for a in asked["off"]]
    for cut, hit in zip(cuts, asked["on"][1:], strict=True):
        assert cut - hit.cached <= chunk // 4 + 16 + PAGE  # an island lies so near
        for of in (on, off):
            fresh = cold(of, whole[:cut] + extra, 8)
            assert fresh.cached == 0
            assert (fresh.tokens, fresh.logits) == (hit.tokens, hit.logits)


@pytest.mark.parametrize("kinds", LAYERS)
def test_memory_is_released_and_resumed_and_islands_on_the_host_answer_alike(kinds: str) -> None:
    """Anybody may write to memory that is away: a page of the old L1 that is still believed in is wrong."""
    of = settings(kinds, islands=True, chunk=64, context=512, full=60, swa=20, host=True)
    prompt, extra = drawn(200, 1), drawn(30, 2)
    bed = Asked(of)
    try:
        told = prompt + list(bed.ask(prompt, 70).tokens)
        bed.engine.scheduler.submit(Request("running", array("I", drawn(20, 3)), 20, 4))
        assert not bed.engine.release_memory()
        bed.engine.scheduler.run_until_idle()
        assert bed.engine.release_memory()
        assert all(bed.engine.cache.tree.resident(Tier.DEVICE, c) == 0 for c in of.model.kinds)
        bed.engine.resume_memory()
        again = bed.ask(told + extra, 10)
        assert again.cached >= 256
        reference = cold(of, told + extra, 10)
        assert (again.tokens, again.logits) == (reference.tokens, reference.logits)
    finally:
        bed.close()


def test_islands_switched_off_on_a_pool_that_assumes_them_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server runs, and hits end where dead windows have pushed out live ones: nobody would look there."""
    sizes = {"chunk": 64, "context": 512, "full": 200}
    for islands, swa in ((False, 7), (True, 7), (False, 180)):
        engine = ReferenceEngine(settings("full-swa", islands=islands, swa=swa, **sizes))
        engine.close()
    (record,) = caplog.records
    assert "--swa-full-tokens-ratio 0.035 assumes islands, and they are off" in record.getMessage()
    assert "--enable-swa-islands" in record.getMessage()


def test_a_model_without_windows_has_no_islands() -> None:
    """A flag without effect would be trusted."""
    with pytest.raises(ConfigError, match="needs a model with SWA layers; FFFF has none"):
        reference_spec(PRESETS["full"], 16, islands=True)
