"""`hicache verify` between real SGLang servers: a switch that changes nothing, and weights that do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache.testing.sglang_cliff import ADAPTIVE, LRU, Shape, Tiers, TierServer, serving
from hicache.testing.sglang_server import ADMIN_KEY, make_model

HICACHE = str(Path(sys.executable).with_name("hicache"))
TIERED = Tiers.L1_L2_L3


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TierServer]]:
    """With SGLang's tree and all tiers; with ours to evict; and with other weights and L1 alone."""
    folder = tmp_path_factory.mktemp("verify")
    other = make_model("qwen3", folder / "qwen3")
    kinds = {
        "own": (model, TIERED, LRU),
        "adaptive": (model, TIERED, ADAPTIVE),
        "other": (other, Tiers.L1, LRU),
    }
    with ExitStack() as stack, ThreadPoolExecutor(len(kinds)) as pool:

        def start(name: str) -> TierServer:
            of, tiers, eviction = kinds[name]
            return stack.enter_context(serving(folder / name, of, Shape(rounds=8), tiers, eviction=eviction))

        yield dict(zip(kinds, pool.map(start, kinds), strict=True))


def verify(a: TierServer, b: TierServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    urls = [flag for server in (a, b) for flag in ("--url", f"http://{server.address}")]
    return subprocess.run(
        [HICACHE, "verify", *urls, "--vocab-size", "500", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_switch_that_changes_no_token_is_equal_through_all_tiers(
    servers: dict[str, TierServer], tmp_path: Path
) -> None:
    """Before a switch is turned on for a fleet, its operator wants to see hits compared, L3's too."""
    report = tmp_path / "report.json"
    ran = verify(
        *(servers["own"], servers["adaptive"]),
        *("--restored", "--admin-api-key", ADMIN_KEY, "--json", str(report)),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "EQUAL: 24 answers, token by token" in ran.stdout
    found = json.loads(report.read_text())
    assert found["unproven_stages"] == []
    for one in found["comparisons"]:
        assert one["as_meant"], one
        if one["stage"] == "restored":
            assert all(by_tier["storage"] > 0 for by_tier in one["cached_tokens_details"]), one


def test_other_weights_are_found_at_their_first_token(servers: dict[str, TierServer]) -> None:
    """The report must lead to one request that can be repeated."""
    pair = servers["own"], servers["other"]
    refused = verify(*pair)
    assert refused.returncode == 2
    assert "the servers have different models" in refused.stderr
    ran = verify(*pair, "--other-models", "--json", "-")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    first = json.loads(ran.stdout)["first_difference"]
    a, b = first["tokens"]
    assert (first["prompt"], first["stage"]) == (0, "cold")
    assert a != b
    assert f"output token {first['position']}: http://{pair[0].address} has {a}," in ran.stderr


def test_a_flush_without_the_admin_key_is_one_line(servers: dict[str, TierServer]) -> None:
    """It would be tried for half a minute, and then say no more than a number."""
    ran = verify(servers["own"], servers["adaptive"], "--prompts", "1", "--restored")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "/flush_cache: status 40" in line
    assert line.endswith("or with --admin-api-key where it has one")
