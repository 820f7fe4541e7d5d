"""Reports and pictures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.bench.plot import plot_runs
from hicache.bench.published import PUBLISHED
from hicache.bench.report import ByTier, RoundReport, RunReport, TurnResult, by_round, percentile
from hicache.bench.workloads import WORKLOADS


def turn(
    round_: int, prompt: int, cached: int, *, history: int = 0, ttft: float = 1.0, tiers: ByTier | None = None
) -> TurnResult:
    return TurnResult(0, round_, prompt, history, cached, tiers, ttft, ttft)


def test_a_rounds_hit_rate_is_sum_over_sum() -> None:
    """A mean of ratios would hide that the long prompts missed."""
    rows = by_round([turn(1, 100, 100, history=100), turn(1, 900, 0, history=900), turn(0, 10, 0)])
    assert [row.round for row in rows] == [0, 1]
    assert (rows[1].hit_rate, rows[1].ceiling, rows[1].distance) == (0.1, 1.0, 0.9)


def test_tiers_are_summed_only_if_every_reply_tells_them() -> None:
    """A half-told breakdown would not add up to the cached tokens."""
    told = turn(0, 10, 6, tiers=ByTier(1, 2, 3))
    assert by_round([told, told])[0].by_tier == ByTier(2, 4, 6)
    assert by_round([told, turn(0, 10, 6)])[0].by_tier is None


def test_a_run_says_what_kept_tokens_below_the_ceiling_most_first() -> None:
    """The distance from the ceiling is a number; its reasons are what can be changed."""
    told = replace(turn(0, 10, 2, history=9), missed={"evicted": 3, "deadline": 4})
    rounds = by_round([told, replace(told, round=1, missed={"deadline": 7})])
    run = RunReport("l1", "lru", "virtual", rounds, 1.0, 1.0)
    assert run.missed == {"deadline": 11, "evicted": 3}
    assert run.as_json()["missed_tokens"] == run.missed
    assert rounds[0].as_json()["missed_tokens"] == {"evicted": 3, "deadline": 4}
    assert "missed_tokens" not in by_round([turn(0, 10, 2)])[0].as_json()


@pytest.mark.parametrize("by_tier", [None, ByTier(4, 2, 0)])
@pytest.mark.parametrize("missed", [{}, {"evicted": 3}])
def test_a_round_is_read_back_as_it_was_written(by_tier: ByTier | None, missed: dict[str, int]) -> None:
    """Figures of today are compared with those of last month."""
    row = RoundReport(2, 4, 10, 6, 0.6, 0.9, 0.1, 0.1, 0.2, by_tier, missed)
    assert RoundReport.from_json(row.as_json()) == row


def test_percentiles_are_values_that_occurred() -> None:
    """As SGLang's multi-turn bench counts them: index int(q * n)."""
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, q) for q in (0.5, 0.99, 1.0)] == [51.0, 100.0, 100.0]
    assert percentile([3.0], 0.99) == 3.0


def test_throughput_counts_cached_tokens_too() -> None:
    """Effective input throughput is of full prompts: that is what the user sent."""
    run = RunReport("l1", "lru", "virtual", by_round([turn(0, 1000, 400)]), duration_s=2.0, wall_s=0.1)
    assert run.effective_input_tokens_per_s == 500.0


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_published_readings_stay_below_the_ceiling(name: str) -> None:
    """A mistyped reading would be compared with for ever."""
    workload, published = WORKLOADS[name], PUBLISHED[name]
    for curve in published.hit_percent.values():
        assert len(curve) == len(published.rounds)
        for round_, percent in zip(published.rounds, curve, strict=True):
            assert percent <= 100 * workload.ceiling(round_) + 0.51


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    """The README shows it."""
    rounds = by_round([turn(n, 100, 90 if n else 0, history=95 if n else 0) for n in range(30)])
    runs = [
        RunReport(tiers, "lru", "virtual", rounds, duration_s=1.0, wall_s=0.1)
        for tiers in ("l1", "l1+l2", "x")
    ]
    path = tmp_path / "cliff.png"
    plot_runs(path, "inkling-small", runs, PUBLISHED["inkling-small"])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_predictions_are_drawn_into_the_picture_of_what_was_measured(tmp_path: Path) -> None:
    """A prediction that is not seen, or needs a run of tiers that were not measured, misleads."""
    rounds = by_round([turn(n, 100, 90 if n else 0, history=95 if n else 0) for n in range(30)])
    run = RunReport("l1", "lru", "http", rounds, duration_s=1.0, wall_s=0.1)
    plain, with_prediction = tmp_path / "plain.png", tmp_path / "predicted.png"
    plot_runs(plain, "cliff", [run])
    plot_runs(with_prediction, "cliff", [run], predicted=[run])
    assert plain.read_bytes() != with_prediction.read_bytes()
    with pytest.raises(ValueError, match=r"l1\+l2"):
        plot_runs(plain, "cliff", [run], predicted=[replace(run, tiers="l1+l2")])
