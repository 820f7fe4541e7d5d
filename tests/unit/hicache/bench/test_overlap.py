"""The overlap benchmark: its arithmetic, and that it runs the real thing and checks what it ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.overlap import OverlapSettings, overlap_command
from hicache.bench.overlap_run import Scenario, Timing, _pipeline, _quietest_steps
from hicache.errors import ConfigError


def test_the_bound_is_the_two_stage_pipeline() -> None:
    """With equal layers, all but one layer of the shorter side can be hidden."""
    steps = [1.0, 1.0, 1.0, 1.0, 1.0]  # embedding, then four layers
    assert _pipeline([0.5, 1.0, 1.5, 2.0], steps) == 5.0  # loads half as long are all hidden
    assert _pipeline([2.0, 4.0, 6.0, 8.0], steps) == 9.0  # twice as long: the last layer's compute is left
    assert _pipeline([9.0, 9.0, 9.0, 9.0], steps) == 13.0  # all at the end: load, then compute


def test_the_bound_takes_each_layer_from_its_quietest_run() -> None:
    """A neighbour that disturbs one layer of every run must not pass for the layer's cost."""
    runs = [([1.0, 2.0, 9.0], 10.0), ([1.5, 7.5, 8.5], 10.5)]
    assert _quietest_steps(runs) == [1.0, 1.0, 1.0, 1.0]


def test_the_hidden_share_is_of_what_can_be_hidden() -> None:
    """A share of the whole load would forbid 100 %."""
    scenario = Scenario(
        load_over_compute=2.0,
        load_s=2.0,
        load_bytes_per_s=1.0,
        no_load=Timing(1.0, 1.0),
        load_then_compute=Timing(3.0, 3.0),
        layer_wise=Timing(2.3, 2.4),
        beside_load=Timing(1.0, 1.0),
        bound_s=2.125,
        bound_then_compute_s=3.0,
        layers=8,
    )
    assert scenario.hideable_s == pytest.approx(7 / 8)
    assert scenario.hidden_share == pytest.approx(0.7 / 0.875)
    assert scenario.bound_share == pytest.approx(1.0)


def test_a_run_writes_every_scenario_with_its_environment(tmp_path: Path) -> None:
    """Numbers without their machine and settings can be compared with nothing."""
    out = tmp_path / "overlap.json"
    small = [
        "--layers",
        "2",
        "--hidden",
        "32",
        "--prefix-tokens",
        "32",
        "--new-tokens",
        "5",
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(
        overlap_command, [*small, "--ratio", "1", "--json", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0
    report = json.loads(out.read_text())
    assert report["settings"] | {"layers": 2, "layout": "layer_first"} == report["settings"]
    assert report["environment"]["torch_threads"] == 1
    assert [s["load_over_compute"] for s in report["scenarios"]] == [1.0, None]
    for scenario in report["scenarios"]:
        times = scenario["ttft_s"]
        assert set(times) == {"no_load", "load_then_compute", "layer_wise", "beside_load"}
        assert min(t["best"] for t in times.values()) > 0
    assert "load/compute" in result.output


@pytest.mark.parametrize(
    ("bad", "flag"),
    [
        ({"layers": 1}, "--layers"),
        ({"prefix_tokens": 17}, "--prefix-tokens 17"),
        ({"repeats": 0}, "--repeats"),
    ],
)
def test_settings_that_measure_nothing_are_refused_by_name(bad: dict[str, int], flag: str) -> None:
    """A benchmark that divides by zero says nothing of what to change."""
    with pytest.raises(ConfigError, match=flag):
        OverlapSettings(**bad)  # type: ignore[arg-type]
