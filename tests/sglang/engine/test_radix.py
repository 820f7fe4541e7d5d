"""SGLang's own tree with our eviction policy: which leaf goes, its books, and hits that LRU loses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.bench.system import Tiers
from hicache.testing.services import ServiceFailed
from hicache.testing.sglang_cliff import (
    ADAPTIVE,
    LRU,
    Shape,
    TierServer,
    largest_gap,
    multi_turn,
    serving,
    url_flags,
    virtual_flags,
)
from hicache.testing.sglang_driver import reported
from hicache.testing.sglang_server import START_S

DRIVER = Path(__file__).with_name("drive_radix.py")
SHAPE = Shape(rounds=8)
POINTS = 2.0
REQUESTS = "300"


def drive(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = reported(str(DRIVER), *arguments)
    return report


@pytest.mark.parametrize(
    ("components", "tiers", "seed"),
    [("full", "l1", "1"), ("full", "l1+l2", "2"), ("full+swa", "l1", "3"), ("full+swa", "l1+l2", "4")],
)
def test_every_leaf_that_goes_is_the_one_the_policy_names(components: str, tiers: str, seed: str) -> None:
    """A leaf out of turn is a hit lost; a slot lost from SGLang's books is a server that stops one day."""
    report = drive(components, tiers, seed, REQUESTS)
    assert (report["cache"], report["core"]) == ("AdaptiveRadixCache", "AdaptiveTreeCore")
    assert report["wrong"] == []
    compared = report["compared"]
    assert compared["device"] > 100
    assert compared["not the oldest"] > 20, "the history never asks for more than LRU"
    if tiers == "l1+l2":
        assert compared["host"] > 100
    assert report["slots"] == 1280
    assert report["hits"] > 0.2 * report["asked"]


@pytest.mark.parametrize("policy", ["lfu", "mru"])
def test_a_policy_of_sglang_is_left_to_sglang(policy: str) -> None:
    """With another policy nothing of SGLang's tree is replaced, its faster core included."""
    report = drive("full", "l1", "1", REQUESTS, policy)
    assert report == {"cache": "UnifiedRadixCache", "core": "RustUnifiedTreeCore"}


@pytest.fixture
def plain(model: Path, tmp_path: Path) -> Iterator[TierServer]:
    """A server with SGLang's own tree, to compare outputs with."""
    with serving(tmp_path / "plain", model, SHAPE, Tiers.L1, eviction=LRU) as server:
        yield server


def test_adaptive_keeps_hits_on_a_server_where_lru_has_none(model: Path, tmp_path: Path) -> None:
    """Conversations in a loop larger than L1 are what LRU fails at entirely: see the cliff's own test.

    The rest is that SGLang evicts whole leaves, as there.
    """
    predicted = multi_turn(virtual_flags(SHAPE, Tiers.L1, policy="adaptive"), tmp_path / "virtual.json")
    with serving(tmp_path, model, SHAPE, Tiers.L1, eviction=ADAPTIVE) as server:
        assert "impl=AdaptiveRadixCache" in server.log
        measured = multi_turn(url_flags(server, SHAPE, Tiers.L1), tmp_path / "sglang.json")
    assert largest_gap(measured, predicted) <= POINTS
    assert measured.rounds[-1].hit_rate > 0.25


def test_answers_are_those_of_sglangs_own_tree(plain: TierServer, model: Path, tmp_path: Path) -> None:
    """Which leaf goes decides how long an answer takes, never what it says.

    Compared are answers that the plain server gives alike from a cold cache and from a hit: elsewhere a
    random model's near ties differ with the shape of the computation, in SGLang alone.
    """
    prompts = [[(7 * number + position * position) % 500 for position in range(900)] for number in range(8)]
    pairs = [[plain.generate(prompt).output_ids for _ in range(2)] for prompt in prompts]
    cold, warm = zip(*pairs, strict=True)
    steady = [number for number in range(len(prompts)) if cold[number] == warm[number]]
    assert len(steady) >= len(prompts) // 2
    with serving(tmp_path, model, SHAPE, Tiers.L1_L2_L3, eviction=ADAPTIVE) as server:
        replies = [[server.generate(prompt) for prompt in prompts] for _ in range(3)]
        server.flush()
        replies.append([server.generate(prompt) for prompt in prompts])
    for answers in replies:
        assert [answers[number].output_ids for number in steady] == [cold[number] for number in steady]
    # Nothing is known in the first rounds; then some of a loop larger than L1 stays there.
    assert sum(reply.device for reply in replies[2]) > 0
    assert sum(reply.host for reply in replies[2]) > 0
    assert sum(reply.storage for reply in replies[3]) > 0.9 * 8 * 900


def test_a_server_says_in_one_line_what_it_was_not_started_for(model: Path, tmp_path: Path) -> None:
    """A server that starts with another policy than was asked for is found out weeks later."""
    server = TierServer(tmp_path, model, SHAPE, Tiers.L1, eviction=(*ADAPTIVE, "--disable-radix-cache"))
    with pytest.raises(ServiceFailed):
        server.start(timeout_s=START_S, tries=1)
    lines = [line for line in server.log.splitlines() if "has nothing to evict" in line]
    assert lines == [
        "hicache.errors.ConfigError: --radix-cache-backend hicache has nothing to evict with "
        "--disable-radix-cache: drop one of them"
    ]


def test_the_rust_core_asked_for_by_name_is_not_replaced_in_silence() -> None:
    """Whoever set the variable wants its speed, and must choose."""
    result = subprocess.run(
        [sys.executable, str(DRIVER), "full", "l1", "1", "2"],
        env={**os.environ, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 1
    assert "needs SGLang's Python tree core" in result.stderr.splitlines()[-1]
