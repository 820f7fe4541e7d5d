"""The tree benchmark on a small scale: it measures what it says, and divides the right way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.tree import OPERATIONS, Caches, cases, ratios, run_case, run_growth, tree_command


@pytest.mark.parametrize("shape", ["linear", "forked", "short"])
@pytest.mark.parametrize("components", ["full", "full+swa", "full+mamba", "full+swa+mamba"])
def test_every_workload_measures_every_operation(components: str, shape: str) -> None:
    """A workload that misses its hits or leaves pages behind would report a speed nobody gets."""
    for case in cases([components], [shape], [1, 64], [2], 6):
        result = run_case(case)
        assert all(float(result[f"{name}_us"]) > 0 for name in OPERATIONS)
        tokens = case.conversations * case.turns * (case.tokens_in + case.tokens_out)
        assert int(result["pages"]) * case.page_size > tokens * 0.8


def test_growth_is_measured_on_trees_of_three_sizes() -> None:
    """The claim that a match does not slow down needs the large tree to be there."""
    sizes = [line["pages"] for line in run_growth(1, 5000, 50, Caches.ACTIVE)]
    assert sizes == [10_000, 100_000, 1_000_000]


def test_a_ratio_is_their_time_over_ours() -> None:
    """Above one must mean that ours is faster."""
    where = {"components": "full", "shape": "linear", "page_size": 1, "conversations": 1}
    ours = {**where, "core": "hicache", **{f"{name}_us": 2.0 for name in OPERATIONS}}
    theirs = {**where, "core": "sglang-python", **{f"{name}_us": 10.0 for name in OPERATIONS}}
    failed = {**where, "core": "sglang-rust", "error": "refused"}
    (line,) = ratios([ours], [theirs, failed])
    assert line["core"] == "sglang-python"
    assert {line[name] for name in (*OPERATIONS, "turn")} == {5.0}


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    """The figures must be there to be compared next month, with the machine they were measured on."""
    path = tmp_path / "new" / "tree.json"
    options = ["--sets", "full", "--shapes", "short", "--pages", "1", "--json", str(path)]
    outcome = CliRunner().invoke(tree_command, options)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(path.read_text())
    assert set(report) == {"environment", "results", "growth", "references"}
    assert report["environment"]["python"]
    assert {result["core"] for result in report["results"]} == {"hicache"}
    assert all(word in outcome.output for word in ("release", "evict_swa", "short", "1 M / 10 k"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sets", "full+foo"], "is none of full, full+swa"),
        (["--pages", "x"], "no list of integers"),
        (["--pages", "0"], "must be positive"),
        (["--turns", "0"], "not in the range"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], message: str) -> None:
    """A typo costs a second, not the minutes of a run."""
    outcome = CliRunner().invoke(tree_command, options)
    assert outcome.exit_code == 2
    assert message in outcome.output
