"""The adaptive eviction policy in SGLang's own tree, beside its LRU: hit rates per round on real servers.

    .venv-sglang/bin/python bench/sglang_adaptive.py --json bench/results/sglang-adaptive.json

Needs the environment of `make sglang-venv`. The cyclic multi-turn workload of `sglang_cliff.py`, one request
at a time, on servers with L1 and with L1 + L2, for each policy; virtual time predicts each run. Then what the
tree itself costs per operation on SGLang's cores and on ours, in microseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from sglang_cliff import environment

from hicache.bench.report import RunReport
from hicache.bench.system import Tiers
from hicache.testing.sglang_cliff import (
    ADAPTIVE,
    LRU,
    Shape,
    largest_gap,
    multi_turn,
    serving,
    url_flags,
    virtual_flags,
)
from hicache.testing.sglang_server import make_model

POLICIES = {"lru": LRU, "adaptive": ADAPTIVE}
TREE = Path(__file__).with_name("sglang_tree.py")
CORES = ("rust", "python", "hicache-adaptive")
TIMES = ("match_us", "insert_us", "lock_us", "release_us", "evict_us")


def measure(folder: Path, model: Path, shape: Shape) -> list[dict[str, Any]]:
    """Run the workload on a server for each set of tiers and each policy."""
    rows = []
    for tiers in (Tiers.L1, Tiers.L1_L2):
        for policy, eviction in POLICIES.items():
            predicted = multi_turn(virtual_flags(shape, tiers, policy=policy), folder / "run.json")
            with serving(
                folder / f"{policy}-{tiers.value}", model, shape, tiers, eviction=eviction
            ) as server:
                measured = multi_turn(url_flags(server, shape, tiers), folder / "run.json")
            rows.append({"tiers": tiers.value, "policy": policy, "sglang": measured, "virtual": predicted})
            click.echo(f"{tiers.value} {policy}: {rates(measured)}", err=True)
    return rows


def rates(run: RunReport) -> list[float]:
    """Hit rates in percent."""
    return [round(100 * row.hit_rate, 1) for row in run.rounds]


def tree_costs(conversations: int) -> list[dict[str, Any]]:
    """What operations of the tree take on each core: FULL, pages of 64, 20 turns of 100 + 100 tokens."""
    shape = {"components": "full", "shape": "linear", "page_size": 64, "conversations": conversations}
    sizes = {"turns": 20, "tokens_in": 100, "tokens_out": 100, "window": 128, "seed": 1, "evict_tokens": 64}
    cases = [{**shape, **sizes, "core": core} for core in CORES]
    result = subprocess.run(
        [sys.executable, str(TREE)], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where the result goes.")
@click.option("--rounds", default=10, show_default=True)
@click.option("--conversations", default=64, show_default=True, help="In the tree whose costs are measured.")
def main(path: Path | None, rounds: int, conversations: int) -> None:
    """Measure, print tables and write JSON."""
    shape, before = Shape(rounds=rounds), environment()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "llama")
        rows = measure(Path(folder), model, shape)
    costs = tree_costs(conversations)
    print(f"hit rate per round, %: {shape.clients} clients, one request at a time, L1 of {shape.l1:,} tokens")
    for row in rows:
        gap = largest_gap(row["sglang"], row["virtual"])
        told = "  ".join(f"{rate:4.1f}" for rate in rates(row["sglang"]))
        print(f"{row['tiers']:6} {row['policy']:9} {told}   virtual within {gap:.1f}")
    print(f"microseconds, FULL, page 64, {conversations} conversations")
    for cost in costs:
        print(f"{cost['core']:17}" + "".join(f"{name[:-3]:>9} {cost[name]:7.0f}" for name in TIMES))
    if path is not None:
        runs = [
            {**row, "sglang": row["sglang"].as_json(), "virtual": row["virtual"].as_json()} for row in rows
        ]
        report = {"environment": before, "model": "llama, 2 layers, random", "runs": runs, "tree": costs}
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
