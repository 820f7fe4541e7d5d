"""Replaying traces: an infinite cache finds what the ids promise, smaller ones less, and it adds up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.replay import ReplayReport, ReplaySizes, replay
from hicache.bench.traces import TraceRequest, read_trace
from hicache.cli.replay import replay as replay_command
from hicache.errors import ConfigError

TRACES = Path(__file__).parents[3] / "traces"


def infinite_cache_tokens(requests: list[TraceRequest]) -> int:
    """The oracle: leading blocks seen before in the scope, whole blocks, last token computed."""
    seen: set[tuple[bytes, int]] = set()
    tokens = 0
    for request in requests:
        run = 0
        while run < len(request.blocks) and (request.scope, request.blocks[run]) in seen:
            run += 1
        tokens += min(run, (request.input_length - 1) // request.block_size) * request.block_size
        seen.update((request.scope, block) for block in request.blocks)
    return tokens


def twice(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The same requests again, later: what was pushed down to L3 is asked for once more."""
    return requests + [replace(r, time_s=r.time_s + 1e6) for r in requests]


def total(report: ReplayReport) -> int:
    return report.cached.device + report.cached.host + report.cached.storage


@pytest.mark.parametrize("tiers", ["l1", "l2", "l3"])
def test_a_tier_without_end_gives_the_infinite_cache_figure(tiers: str) -> None:
    """Whichever tier is unlimited; otherwise what-if curves would not be of the sizes but of the replayer."""
    requests = twice(read_trace(TRACES / "agentic"))
    longest = max(r.input_length for r in requests) + 64
    sizes = {
        "l1": ReplaySizes(10_000_000, 0, 0),
        "l2": ReplaySizes(longest, 10_000_000, 0),
        "l3": ReplaySizes(longest, 2 * longest + 64, math.inf),
    }[tiers]
    report = replay(requests, sizes)
    assert total(report) == infinite_cache_tokens(requests) == report.ceiling_tokens
    assert report.input_tokens == sum(r.input_length for r in requests)
    bottom = {"l1": report.cached.device, "l2": report.cached.host, "l3": report.cached.storage}[tiers]
    assert bottom > 0
    if tiers == "l1":
        assert report.cached.host == report.cached.storage == 0


def test_the_line_format_replays_at_both_page_sizes() -> None:
    """Pages smaller than a block find a little more: the rest of a partly filled block."""
    requests = read_trace(TRACES / "conversation.jsonl")
    sizes = {page: ReplaySizes(131_072, 400_000, math.inf, page_size=page) for page in (64, 512)}
    whole = replay(requests, sizes[512])
    assert total(whole) == infinite_cache_tokens(requests) == whole.ceiling_tokens
    fine = replay(requests, sizes[64])
    assert total(fine) == fine.ceiling_tokens >= total(whole)


def test_a_larger_cache_never_finds_less() -> None:
    """LRU over whole prefixes: the curve over sizes must rise, up to the ceiling."""
    requests = read_trace(TRACES / "agentic")
    longest = max(r.input_length for r in requests) + 64
    rates = [replay(requests, ReplaySizes(longest + extra, 0, 0)).hit_rate for extra in (0, 100_000, 300_000)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize("trace", ["agentic", "conversation.jsonl"])
def test_what_is_missed_is_what_lies_below_the_ceiling(trace: str) -> None:
    """Two counts of an infinite cache, over block ids and over hashes of tokens, agree to the token."""
    requests = twice(read_trace(TRACES / trace))
    longest = max(r.input_length for r in requests) + 64
    report = replay(requests, ReplaySizes(longest, 2 * longest, 0))
    assert report.missed == {"evicted": report.ceiling_tokens - total(report)}
    assert report.missed["evicted"] > 0
    stored = replay(requests, ReplaySizes(longest, 2 * longest, longest // 8))
    assert sum(stored.missed.values()) == stored.ceiling_tokens - total(stored)
    assert "not_stored" in stored.missed


def test_a_limited_storage_forgets() -> None:
    """Finite L3 is between none and all of it."""
    requests = twice(read_trace(TRACES / "agentic"))
    longest = max(r.input_length for r in requests) + 64
    l2 = 2 * longest + 64
    none, some, all_of_it = (
        total(replay(requests, ReplaySizes(longest, l2, l3))) for l3 in (0, 100_000, math.inf)
    )
    assert none < some < all_of_it


def test_the_command_writes_fractions_of_input_tokens(tmp_path: Path) -> None:
    """The keys and their meaning are what planning scripts rely on."""
    out = tmp_path / "out.json"
    arguments = [
        str(TRACES / "agentic" / "trace_0072.json"), "--l1-tokens", "90000", "--l2-tokens", "200000",
        "--l3-tokens", "inf", "--page-size", "64", "--json", str(out),
    ]  # fmt: skip
    done = CliRunner().invoke(replay_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(out.read_text())
    assert set(report) == {"requests", "input_tokens", "hit_rate", "ceiling", "by_tier"}
    assert (report["requests"], report["input_tokens"]) == (5, 429_581)
    assert sum(report["by_tier"].values()) == pytest.approx(report["hit_rate"])
    assert 0.75 < report["hit_rate"] == pytest.approx(report["ceiling"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--l1-tokens", "1000"], "the longest prompt has .* give L1 at least"),
        (["--l1-tokens", "900000", "--l3-tokens", "inf"], "--l3-tokens needs --l2-tokens"),
        (["--l1-tokens", "-1"], "--l1-tokens -1"),
        (["--l1-tokens", "900000", "--page-size", "0"], "--page-size 0"),
        (["--l1-tokens", "900000", "--eviction-policy", "oracle"], "oracle"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_what_would(arguments: list[str], message: str) -> None:
    """A planner types sizes by hand."""
    result = CliRunner().invoke(replay_command, [str(TRACES / "agentic"), *arguments])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_a_size_that_is_no_number_is_a_usage_error() -> None:
    """`--l3-tokens lots` names the option."""
    result = CliRunner().invoke(replay_command, ["x", "--l1-tokens", "1", "--l3-tokens", "lots"])
    assert result.exit_code == 2
    assert "neither a whole number of tokens nor inf" in result.output
