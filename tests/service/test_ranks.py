"""Tensor-parallel ranks as processes: they decide alike, answer like one, and never wait for the dead."""

from __future__ import annotations

import functools
import hashlib
import random
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import ReferenceConfig, preset_config, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.sizing import device_capacities
from hicache.request import Request
from hicache.testing.rank_processes import Death, Prompts, RankCase, RankReport, run_processes
from hicache.tiers.sizing import host_capacities
from hicache.types import PrefetchPolicy, WritePolicy

OUTPUT = 6
PAGE = 16


def model(preset: str) -> ReferenceConfig:
    return replace(preset_config(preset), kv_heads=4, window=32, context_length=512)


def settings(preset: str, **policies: Any) -> EngineSettings:
    config = model(preset)
    spec = reference_spec(config, PAGE)
    device = device_capacities(spec, max_total_tokens=320, max_mamba_cache_size=10)
    cache = CacheConfig(prefetch_threshold=PAGE, chunked_prefill_size=64, mamba_track_interval=64, **policies)
    sizes = TierSizes(device, host_capacities(spec, device, ratio=2.0))
    return EngineSettings(config, PAGE, sizes, cache, max_running_requests=2)


@functools.cache
def script() -> Prompts:
    """Misses, hits, a branch, more than L1 holds, and one that comes back."""
    rng = random.Random(5)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(512) for _ in range(count)]

    first = drawn(120)
    return [[first], [first + drawn(30), first[:70] + drawn(40)], [drawn(180)], [first]]


@functools.cache
def alone(preset: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Each prompt's answer on one rank, cold, with nothing below L1."""
    answers = {}
    for number, prompts in enumerate(script()):
        for i, prompt in enumerate(prompts):
            digest = hashlib.sha256()

            def observe(_: Request, logits: Tensor, digest: Any = digest) -> None:
                digest.update(logits.numpy().tobytes())

            wanted = settings(preset)
            engine = ReferenceEngine(
                replace(wanted, sizes=TierSizes(wanted.sizes.device, {})), observer=observe
            )
            try:
                request = Request("cold", array("I", prompt), len(prompt), OUTPUT)
                engine.scheduler.submit(request)
                engine.scheduler.run_until_idle()
            finally:
                engine.close()
            for turn in range(2):
                answers[f"{turn}.{number}.{i}"] = tuple(request.output), digest.hexdigest()
    return answers


def cases() -> list[RankCase]:
    through = {"hicache_write_policy": WritePolicy.WRITE_THROUGH}
    complete = {"hicache_storage_prefetch_policy": PrefetchPolicy.WAIT_COMPLETE}
    common = {"script": script(), "output": OUTPUT}
    return [
        RankCase(settings=settings("hybrid", **through, **complete), **common),
        RankCase(settings=settings("hybrid", **through, **complete), losses={0: 0.1, 1: 0.2}, **common),
        RankCase(
            settings=settings(
                "full-swa",
                hicache_write_policy=WritePolicy.WRITE_BACK,
                hicache_storage_prefetch_policy=PrefetchPolicy.TIMEOUT,
            ),
            losses={1: 0.2},
            **common,
        ),
        RankCase(settings=settings("full-mamba", **through), losses={1: 1.0}, **common),
        RankCase(settings=settings("compressed-draft", **through, **complete), losses={1: 0.1}, **common),
        RankCase(settings=settings("full", **through, **complete), unreachable=(1,), **common),
    ]


def check_alike(reports: list[list[RankReport] | None], presets: list[str]) -> list[RankReport]:
    """Every rank has reported the same, and what one rank alone answers; return rank 0's reports."""
    first = reports[0]
    assert first is not None
    assert [r.error for r in first] == [""] * len(presets)
    for other in reports[1:]:
        assert other == first
    for report, preset in zip(first, presets, strict=True):
        assert report.answers == alone(preset)
    return first


def test_two_ranks_that_lose_different_pages_decide_alike_and_answer_like_one(tmp_path: Path) -> None:
    """One rank would serve a prefix that another has lost, and the answer would be made of two prompts."""
    presets = ["hybrid", "hybrid", "full-swa", "full-mamba", "compressed-draft"]
    reports = check_alike(run_processes(2, cases()[:5], tmp_path), presets)
    stored = [sum(storage for _, _, storage in report.cached.values()) for report in reports]
    assert 0 < stored[1] < stored[0]
    assert stored[3] == 0  # rank 1 never finds anything: nobody may use what the others find


def test_a_store_that_one_rank_cannot_reach_is_attached_on_none(tmp_path: Path) -> None:
    """Half of the ranks would write to a store that the others never read, and nobody would be told."""
    reports = run_processes(2, cases()[5:], tmp_path)
    (first,), (second,) = (report or [] for report in reports)
    assert first.storage_error == "file could not be opened on another rank"
    assert second.storage_error == "rank 1 cannot reach the store"
    assert first.answers == second.answers == alone("full")
    assert first.decisions == second.decisions
    assert not any(storage for _, _, storage in first.cached.values())


def test_a_rank_whose_breaker_is_open_keeps_all_from_hits_until_it_is_closed(tmp_path: Path) -> None:
    """The others would go on from pages that this one never asked for, or wait for it for ever."""
    case = replace(cases()[0], fails=(1, 3))
    reports = run_processes(2, [case], tmp_path)
    first, second = ((report or [RankReport(error="gone")])[0] for report in reports)
    assert (first.error, second.error) == ("", "")
    assert first == second
    assert (first.breaker_opened, second.breaker_opened) == (0, 1)
    expected = {rid.partition(".")[2]: answer for rid, answer in alone("hybrid").items()}
    assert {rid: expected[rid.partition(".")[2]] for rid in first.answers} == first.answers
    hits = {int(rid.partition(".")[0]) for rid, (*_, storage) in first.cached.items() if storage}
    turns = {int(rid.partition(".")[0]) for rid in first.answers}
    assert hits == {max(turns)}, "hits came back, and only once the breaker had closed"


def test_four_ranks_that_lose_different_pages_decide_alike_and_answer_like_one(tmp_path: Path) -> None:
    """As with two: every further rank is one more that may lack a page."""
    losses = {0: 0.05, 1: 0.1, 2: 0.0, 3: 0.1}
    case = replace(cases()[0], losses=losses)
    (report,) = check_alike(run_processes(4, [case], tmp_path), ["hybrid"])
    assert any(storage for _, _, storage in report.cached.values())


@pytest.mark.parametrize("death", list(Death), ids=lambda death: death.value)
def test_the_others_stop_with_a_clear_error_when_a_rank_dies_or_stands_still(
    death: Death, tmp_path: Path
) -> None:
    """The whole replica would hang, and its users with it, until somebody kills it by hand."""
    bound_s = 3.0
    case = replace(cases()[0], dies=(1, 12, death))
    began = time.monotonic()
    reports = run_processes(2, [case], tmp_path, timeout_s=bound_s, within_s=60.0 + bound_s)
    assert time.monotonic() - began < 60.0 + bound_s
    assert reports[0] is not None
    (report,) = reports[0]
    assert report.error.startswith("RankLost: rank 0 of 2: another rank of this replica is gone or stuck (")
    assert report.error.endswith("restart the whole replica")
