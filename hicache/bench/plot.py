"""The picture of the cliff: hit rate per round, one line per run, and the throughput beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hicache.bench.published import Published
from hicache.bench.report import RunReport

_COLORS = {"l1": "#c44e52", "l1+l2": "#dd8452", "l1+l2+l3": "#2a7f62"}
_OTHERS = ("#4c72b0", "#8172b3", "#937860", "#64b5cd")
_GRID = "#dddddd"


def plot_runs(
    path: Path,
    title: str,
    runs: Sequence[RunReport],
    published: Published | None = None,
    *,
    predicted: Sequence[RunReport] = (),
) -> None:
    """Write a PNG of the runs; `published` readings and virtual time's predictions as hollow markers.

    Readings belong to the first run of their tiers. A prediction has the colour of the run of its tiers, and
    no bar. Raises ValueError without such a run.
    """
    if unmeasured := {run.tiers for run in predicted} - {run.tiers for run in runs}:
        raise ValueError(f"a prediction of {', '.join(sorted(unmeasured))}, of which there is no run")
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 4.6), dpi=160, layout="constrained")
        curve, bars = figure.subplots(1, 2, width_ratios=(3.2, 1))
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        colors = _colors(runs)
        _draw_predictions(curve, predicted, dict(zip((run.tiers for run in runs), colors, strict=True)))
        _draw_curves(curve, runs, colors, published)
        _draw_bars(bars, runs, colors, published)
        figure.savefig(path, format="png")


def _colors(runs: Sequence[RunReport]) -> list[str]:
    """The tier set's own colour the first time it appears, another one for every further run."""
    seen: set[str] = set()
    others = iter(_OTHERS * len(runs))
    colors = []
    for run in runs:
        fresh = run.tiers in _COLORS and run.tiers not in seen
        colors.append(_COLORS[run.tiers] if fresh else next(others))
        seen.add(run.tiers)
    return colors


def _draw_curves(
    axes: Axes, runs: Sequence[RunReport], colors: Sequence[str], published: Published | None
) -> None:
    longest = max(runs, key=lambda run: len(run.rounds))
    axes.plot(
        [r.round for r in longest.rounds],
        [100 * r.ceiling for r in longest.rounds],
        color="#555555",
        linestyle=":",
        linewidth=1.2,
        label="ceiling",
        zorder=1,
    )
    for place, (run, color) in enumerate(zip(runs, colors, strict=True)):
        axes.plot(
            [r.round for r in run.rounds],
            [100 * r.hit_rate for r in run.rounds],
            color=color,
            linewidth=2.0 + 2.4 * (len(runs) - 1 - place),  # where curves coincide all of them show
            label=_label(run, runs),
            zorder=3,
        )
        first = run.tiers not in {other.tiers for other in runs[:place]}
        readings = published.hit_percent.get(run.tiers) if published and first else None
        if published and readings:
            _circles(axes, published.rounds, readings, color, f"{run.tiers.upper()}, published")
    axes.set_xlabel("round (each client extends its conversation)")
    axes.set_ylabel("hit rate, % of prompt tokens")
    axes.set_ylim(-3, 103)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.46), fontsize=9)


def _draw_predictions(axes: Axes, predicted: Sequence[RunReport], colors: Mapping[str, str]) -> None:
    for run in predicted:
        rates = [100 * r.hit_rate for r in run.rounds]
        label = f"{run.tiers.upper()}, virtual time"
        _circles(axes, [r.round for r in run.rounds], rates, colors[run.tiers], label)


def _circles(axes: Axes, rounds: Sequence[int], percent: Sequence[float], color: str, label: str) -> None:
    axes.plot(
        rounds,
        percent,
        color=color,
        linestyle="none",
        marker="o",
        markersize=5,
        markerfacecolor="white",
        markeredgewidth=1.2,
        label=label,
        zorder=4,
    )


def _draw_bars(
    axes: Axes, runs: Sequence[RunReport], colors: Sequence[str], published: Published | None
) -> None:
    values = [run.effective_input_tokens_per_s for run in runs]
    places = range(len(runs))
    axes.bar(places, values, color=colors, width=0.62)
    for place, run, value in zip(places, runs, values, strict=True):
        first = run.tiers not in {other.tiers for other in runs[:place]}
        reading = published.effective_input_tokens_per_s.get(run.tiers) if published and first else None
        axes.annotate(
            f"{value / 1000:,.1f} K",
            (place, max(value, reading or 0.0)),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
        if reading:
            axes.plot(place, reading, "o", markerfacecolor="white", markeredgecolor="#222222", markersize=5)
    axes.set_xticks(places, [_label(run, runs).replace("+L", "\n+L") for run in runs], fontsize=9)
    axes.set_ylabel("effective input tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f} K")
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _label(run: RunReport, runs: Sequence[RunReport]) -> str:
    several = len({other.eviction_policy for other in runs}) > 1
    tiers = run.tiers.upper() if run.tiers in _COLORS else run.tiers
    return f"{tiers}, {run.eviction_policy}" if several else tiers
