"""The last act: the hit rate of growing conversations, round by round, with one tier, two and three.

Under lru, as published, with its cliffs; then under the default policy, which has none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hicache.bench.demo.checks import Checks
from hicache.bench.demo.processes import DemoFailed

ALIVE, DEAD, NEAR_CEILING = 0.5, 0.05, 0.02  # hit rates
# Sixteen conversations of up to 16 k tokens: 64 k tokens of L1 hold four rounds of them, L2 eight.
_SETTING = (
    *("--components", "full+swa+mamba", "--page-size", "64"),
    *("--max-total-tokens", "65536", "--hicache-ratio", "2"),
    *("--num-clients", "16", "--num-rounds", "16", "--request-length", "1024", "--output-length", "16"),
    *("--max-parallel", "2", "--request-rate", "inf"),
    *("--enable-round-barrier", "--ready-queue-policy", "fifo"),
)


def show_cliff(console: Console, checks: Checks, out: Path) -> None:
    """Run the workload in virtual time, and check where each tier set falls."""
    plot = out / "multi-turn.png"
    runs = _run(console, out / "multi-turn.json", "l1,l1+l2,l1+l2+l3", "lru", "--plot", str(plot))
    falls = {tiers: _fall(rounds) for tiers, rounds in runs.items()}
    l1, l1_l2 = falls["l1"], falls["l1+l2"]
    checks.that(l1 is not None, f"L1 alone falls off its cliff at round {l1}")
    checks.that(
        l1 is not None and l1_l2 is not None and l1_l2 > l1, f"with L2 the cliff moves to round {l1_l2}"
    )
    last = runs["l1+l2+l3"][-1]
    checks.that(
        all(row["ceiling"] - row["hit_rate"] < NEAR_CEILING for row in runs["l1+l2+l3"]),
        f"with L3 there is none, every round is near its ceiling: "
        f"{100 * last['hit_rate']:.1f} of {100 * last['ceiling']:.1f} % in the last",
    )
    kept = _run(console, out / "multi-turn-adaptive.json", "l1,l1+l2", "adaptive")
    for tiers, rounds in kept.items():
        worst = min(row["hit_rate"] for row in rounds[falls[tiers] or 0 :])
        checks.that(
            _fall(rounds) is None and worst > DEAD,
            f"{tiers} with the default policy, adaptive: no cliff, {100 * worst:.0f} % in the worst round "
            f"from {falls[tiers]} on",
        )
    checks.that(plot.is_file() and plot.stat().st_size > 0, f"the plot is in {plot}")


def _run(
    console: Console, data: Path, tiers: str, policy: str, *more: str
) -> Mapping[str, Sequence[Mapping[str, float]]]:
    """Run the benchmark as people run it; return its rounds by tier set."""
    arguments = [
        *("bench", "multi-turn", "--engine", "virtual", *_SETTING, "--tiers", tiers),
        *("--eviction-policy", policy, "--json", str(data), *more),
    ]
    console.print(
        f"  [dim]$[/dim] {escape('hicache ' + ' '.join(arguments))}", soft_wrap=True, highlight=False
    )
    command = [sys.executable, "-c", "from hicache.cli.main import main; main()", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise DemoFailed("the benchmark failed; its message is above")
    return {run["tiers"]: run["rounds"] for run in json.loads(data.read_text())["runs"]}


def _fall(rounds: Sequence[Mapping[str, float]]) -> int | None:
    """The first round from which on (nearly) nothing is hit, after rounds that hit; None if there is none."""
    dead = [int(row["round"]) for row in rounds if row["round"] > 0 and row["hit_rate"] < DEAD]
    if not dead or rounds[-1]["hit_rate"] >= DEAD:
        return None
    first = min(dead)
    before = [row["hit_rate"] for row in rounds if 0 < row["round"] < first]
    return first if before and max(before) > ALIVE else None
