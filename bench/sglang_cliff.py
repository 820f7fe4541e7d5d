"""The hit-rate cliff on the real SGLang with one, two and three tiers, beside what virtual time predicts.

    .venv-sglang/bin/python bench/sglang_cliff.py --json bench/results/sglang-cliff.json

Needs the environment of `make sglang-venv`, and for --plot also matplotlib in it. A server of SGLang for each
set of tiers, one after the other, each with a small random Llama on a CPU; L3 is our dynamic backend on a
`hicache serve`. Every server takes the workload twice: one request at a time, where order and timing leave
no choice, and several at once. There virtual time is asked under several arrival rates: who is evicted while
a tier overflows depends on who has been admitted by then. SGLang itself differs from run to run in those
rounds, and may leave the range.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hicache.bench.report import RunReport
from hicache.bench.system import Tiers
from hicache.testing.sglang_cliff import (
    Shape,
    TierServer,
    largest_gap,
    multi_turn,
    serving,
    url_flags,
    virtual_flags,
)
from hicache.testing.sglang_server import make_model

RATES = (float("inf"), 64.0, 32.0, 16.0)  # of virtual time, where requests run side by side


@dataclass(frozen=True)
class Pair:
    """One run on SGLang, and what virtual time says of it at one or more arrival rates."""

    shape: Shape
    measured: RunReport
    predicted: tuple[RunReport, ...]

    @property
    def gap(self) -> float:
        return largest_gap(self.measured, self.predicted[0])

    def band(self, number: int) -> tuple[float, float]:
        """Lowest and highest predicted hit rate of a round, in percent."""
        rates = [100 * run.rounds[number].hit_rate for run in self.predicted]
        return min(rates), max(rates)

    @property
    def outside(self) -> float:
        """How far the worst round is outside what was predicted, in points."""
        worst = 0.0
        for number, row in enumerate(self.measured.rounds):
            low, high = self.band(number)
            worst = max(worst, low - 100 * row.hit_rate, 100 * row.hit_rate - high)
        return worst

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": {**asdict(self.shape), "rate": str(self.shape.rate)},
            "sglang": self.measured.as_json(),
            "virtual": [
                {"rate": str(rate), **run.as_json()} for rate, run in zip(RATES, self.predicted, strict=False)
            ],
            "largest_gap_points": self.gap,
            "outside_prediction_points": self.outside,
        }


def measure(folder: Path, model: Path, shapes: list[Shape]) -> Iterator[Pair]:
    """Run every shape on a server of each set of tiers."""
    result = folder / "run.json"
    for tiers in Tiers:
        with serving(folder, model, shapes[0], tiers) as server:
            for shape in shapes:
                yield pair(server, shape, tiers, result)


def pair(server: TierServer, shape: Shape, tiers: Tiers, result: Path) -> Pair:
    """Measure and predict one run."""
    rates = RATES if shape.parallel > 1 else RATES[:1]
    predicted = [multi_turn(virtual_flags(replace(shape, rate=rate), tiers), result) for rate in rates]
    return Pair(shape, multi_turn(url_flags(server, shape, tiers), result), tuple(predicted))


def table(shape: Shape, pairs: list[Pair]) -> Table:
    """Hit rates by round: SGLang's, then the prediction (a range if there are several)."""
    title = f"hit rate per round, %: {shape.clients} clients, {shape.parallel} at a time"
    out = Table(title=title, title_justify="left")
    for name in ("round", "ceiling"):
        out.add_column(name, justify="right")
    for one in pairs:
        out.add_column(f"{one.measured.tiers.upper()}\nSGLang", justify="right")
        out.add_column("\nvirtual", justify="right")
        out.add_column("cached from\nL1 / L2 / L3", justify="right")
    for number, row in enumerate(pairs[0].measured.rounds):
        cells = [str(number), f"{100 * row.ceiling:.1f}"]
        for one in pairs:
            told = one.measured.rounds[number]
            low, high = one.band(number)
            tiers = told.by_tier
            cells.append(f"{100 * told.hit_rate:.1f}")
            cells.append(f"{low:.1f}" if high - low < 0.05 else f"{low:.1f}-{high:.1f}")
            cells.append(f"{tiers.device} / {tiers.host} / {tiers.storage}" if tiers else "not told")
        out.add_row(*cells)
    return out


def environment() -> dict[str, Any]:
    """Where this ran."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
    }


def plot(path: Path, pairs: list[Pair]) -> None:
    """Draw SGLang's curves and the predictions of one shape."""
    from hicache.bench.plot import plot_runs  # noqa: PLC0415  # the only part that needs matplotlib

    measured = [one.measured for one in pairs]
    predicted = [one.predicted[0] for one in pairs]
    plot_runs(path, "SGLang on a CPU: hit rate per round", measured, predicted=predicted)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path))
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="A picture of one at a time.")
@click.option("--parallel", multiple=True, type=int, default=(1, 4), show_default=True)
def main(json_path: Path | None, plot_path: Path | None, parallel: tuple[int, ...]) -> None:
    """Measure, print the tables, and write everything measured."""
    shapes = [Shape(parallel=count, seed=1 + place) for place, count in enumerate(parallel)]
    before = environment()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "llama")
        pairs = list(measure(Path(folder), model, shapes))
    console = Console(width=150)
    for shape in shapes:
        ours = [one for one in pairs if one.shape == shape]
        console.print(table(shape, ours))
        for one in ours:
            console.print(
                f"{one.measured.tiers}: at most {one.gap:.1f} points from virtual time"
                + (f", {one.outside:.1f} outside its range" if len(one.predicted) > 1 else "")
            )
    if json_path:
        report = {
            "environment": before,
            "model": "llama, 2 layers, random",
            "runs": [one.as_json() for one in pairs],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if plot_path:
        plot(plot_path, [one for one in pairs if one.shape == shapes[0]])


if __name__ == "__main__":
    main()
