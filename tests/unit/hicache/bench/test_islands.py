"""`hicache bench islands`: what each arrangement of windows holds, and how many requests that lets run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.islands import Arm, IslandRun, LongRequests, Windows, run_arm
from hicache.bench.system import SimulatedSystem
from hicache.cli.bench_islands import islands
from hicache.errors import ConfigError
from hicache.types import Component

PUBLISHED = SimulatedSystem(
    components=(Component.FULL, Component.SWA),
    page_size=64,
    max_running_requests=48,
    chunked_prefill_size=16_384,
    sliding_window=1024,
)
SMALL = SimulatedSystem(
    components=(Component.FULL, Component.SWA),
    page_size=16,
    max_running_requests=12,
    chunked_prefill_size=512,
    sliding_window=64,
)


def alone(windows: Windows) -> IslandRun:
    """One request of the published size after another, the reply cut to a tenth."""
    workload = LongRequests(num_prompts=3, concurrency=1, input_length=32_000, output_length=1600)
    return run_arm(Arm(windows, 0.17, 980_000), workload, PUBLISHED)


def test_a_request_holds_most_of_a_chunk_without_islands_and_its_window_and_a_page_with_them() -> None:
    """The published 15,500 tokens and 1,088 are what pool ratios are chosen by."""
    locked, leased, kept = (alone(windows) for windows in Windows)
    assert 15_500 <= locked.hold <= 15_616 + 1088 + 256  # its last chunk, and the window of the reply
    # The window, a page more, the page being written, and what two of 196 steps compute in a chunk each.
    assert kept.hold <= 1088 + 64 + 2 * 16_384 / 196
    # A lease of pages holds no more: without islands the difference is what stays behind, evictable.
    assert leased.hold <= 1088 + 256
    assert (locked.evicted_windows, leased.evicted_windows, kept.evicted_windows) == (0, 0, 0)


def test_a_small_pool_of_windows_bounds_who_runs_without_islands_and_not_with_them() -> None:
    """The reason to have them: FULL has room for all, and the windows are in the way."""
    workload = LongRequests(num_prompts=30, concurrency=20, input_length=1024, output_length=512)
    total = 12 * 1600
    locked, _, kept = (run_arm(Arm(w, 0.2, total), workload, SMALL) for w in Windows)
    assert locked.mean(locked.computing) < 7.5  # 0.2 x 19,200 / 512
    assert kept.mean(kept.computing) > 10
    assert kept.retracted == 0
    assert kept.steps < locked.steps
    assert kept.evicted_windows < locked.evicted_windows / 2


def test_the_json_names_the_workload_and_each_arm(tmp_path: Path) -> None:
    """Scripts compare arms by these keys; and the same seed must give the same numbers."""
    reports = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        arguments = [
            "--num-prompts", "8", "--max-concurrency", "4", "--random-input-len", "600",
            "--random-output-len", "100", "--random-range-ratio", "0.5", "--chunked-prefill-size", "256",
            "--sliding-window", "32", "--page-size", "16", "--arm", "islands:0.5:4800",
            "--arm", "page-leases:0.5:4800", "--json", str(out),
        ]  # fmt: skip
        done = CliRunner().invoke(islands, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert "SWA hold" in done.output
        report = json.loads(out.read_text())
        for workload in report["workloads"]:
            for run in workload["runs"]:
                del run["wall_s"]
        reports.append(report)
    assert reports[0] == reports[1]
    (workload,) = reports[0]["workloads"]
    assert workload["traffic"]["concurrency"] == 4
    assert [run["windows"] for run in workload["runs"]] == ["islands", "page-leases"]
    assert all(run["swa_hold_per_request"] > 0 for run in workload["runs"])
    assert reports[0]["published"]["running"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "dry-land:0.1:100"], "--arm 'dry-land:0.1:100': write WINDOWS:RATIO:TOKENS"),
        (["--accept-length", "x"], "--accept-length 'x': write least-most"),
        (["--accept-length", "0-3"], "--accept-length 0-3: write least-most"),
        (["--random-range-ratio", "2"], "--random-range-ratio 2.0: must be in"),
        (["--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
        (["--max-concurrency", "many"], "--max-concurrency 'many': write numbers"),
        (["--max-concurrency", "9.5"], "--max-concurrency '9.5': write numbers, .* as in 96,24"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments: list[str], message: str) -> None:
    """A run of minutes with a number nobody meant."""
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(islands, arguments, catch_exceptions=False)
