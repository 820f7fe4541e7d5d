"""The adaptive eviction policy beside lru, mru, slru and offline Belady: rounds in virtual time, and traces.

python bench/adaptive.py --traces FOLDER writes bench/results/adaptive.json and its picture; --picture only
draws what is there. Belady is run on FULL pages alone, which no window or state can spoil, and on all
components.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from hicache.bench.replay import ReplaySizes, replay
from hicache.bench.report import JSON
from hicache.bench.system import SYSTEMS, Tiers
from hicache.bench.traces import TraceRequest, read_trace
from hicache.bench.virtual import run_virtual
from hicache.bench.workloads import WORKLOADS, ReadyQueue, Workload
from hicache.engine.scheduler import FinalToken
from hicache.types import Component

FULL = (Component.FULL,)
PAGE = 64
SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
SMALL = 400_000  # tokens of L1, for the workloads that end conversations


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with mooncake_conversation.jsonl and agentic/")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adaptive.json")
    parser.add_argument("--picture", action="store_true", help="run nothing, draw --out")
    options = parser.parse_args()
    if options.picture:
        draw(json.loads(options.out.read_text())["published"], options.out.with_suffix(".png"))
        return
    report: dict[str, JSON] = {}
    report["published"] = {name: published(name) for name in WORKLOADS}
    report["churn"] = {name: churn(name) for name in churned()}
    if options.traces:
        report["traces"] = {
            "conversation": trace(options.traces / "mooncake_conversation.jsonl"),
            "agentic": trace(options.traces / "agentic"),
        }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    draw(report["published"], options.out.with_suffix(".png"))


def draw(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Write a PNG of both published workloads: hit rate per round under lru, adaptive and belady."""
    styles = {
        "belady": ("#bbbbbb", 6.0, "Belady, which knows the future"),
        "adaptive": ("#2a7f62", 2.0, "adaptive"),
        "lru": ("#dd8452", 2.0, "lru"),
    }
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 4.0), dpi=160, layout="constrained")
        for axes, (name, rates) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
            rounds = range(len(rates["lru"]))
            ceiling = [100 * WORKLOADS[name].ceiling(r) for r in rounds]
            axes.plot(rounds, ceiling, color="#555555", linestyle=":", linewidth=1.2, label="ceiling")
            for policy, (color, width, label) in styles.items():
                axes.plot(rounds, [100 * x for x in rates[policy]], color=color, linewidth=width, label=label)
            axes.set_title(f"{name}, L1 + L2", loc="left", fontweight="bold", fontsize=10)
            axes.set_xlabel("round")
            axes.set_ylabel("hit rate, % of prompt tokens")
            axes.set_ylim(-3, 103)
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.3), fontsize=9)
        figure.savefig(path, format="png")


def rates(workload: Workload, policy: str, components: tuple[Component, ...] | None, tokens: int = 0) -> JSON:
    """Hit rate per round with L1 and L2, in the workload's own simulated system."""
    system = SYSTEMS[workload.name]
    if components:
        system = system.given(components=components)
    if tokens:
        system = system.given(max_total_tokens=tokens)
    done = run_virtual(
        workload,
        system,
        tiers=Tiers.L1_L2,
        eviction_policy=policy,
        final_token=FinalToken.COMPUTE,
        on_result=lambda _: None,
    )
    print(workload.name, policy, f"{done.wall_s:.0f} s", flush=True)
    return [round(row.hit_rate, 4) for row in done.rounds]


def published(name: str) -> JSON:
    """Rates of a published workload."""
    workload = WORKLOADS[name]
    return {
        "lru": rates(workload, "lru", None),
        "adaptive": rates(workload, "adaptive", None),
        "belady": rates(workload, "belady", None),
        "belady, full pages alone": rates(workload, "belady", FULL),
    }


def churned() -> dict[str, Workload]:
    """Inkling's turns in 40 rounds, with conversations that end, come in any order, or share prefixes."""
    base = replace(WORKLOADS["inkling-small"], num_rounds=40)
    return {
        "5 % replaced each round": replace(base, churn=0.05),
        "random ready queue": replace(base, ready_queue=ReadyQueue.RANDOM),
        "5 % replaced, random ready queue": replace(base, churn=0.05, ready_queue=ReadyQueue.RANDOM),
        "half-way all replaced, then half of them each round": replace(base, churn_later=0.5),
        "half of them each round, half-way all replaced, then none": replace(
            base, churn=0.5, churn_later=0.0
        ),
        "5 % replaced, 16 shared prefixes of 100 pages": replace(
            base, churn=0.05, shared_prefix_length=100 * PAGE, num_shared_prefixes=16
        ),
    }


def churn(name: str) -> JSON:
    """Rates of one of `churned()`, by components."""
    workload = churned()[name]
    tokens = 0 if name == "random ready queue" else SMALL
    return {
        which: {policy: rates(workload, policy, components, tokens) for policy in policies}
        for which, components, policies in (
            ("full", FULL, ("lru", "mru", "slru", "adaptive")),
            ("full+swa+mamba", None, ("lru", "mru", "adaptive")),
        )
    }


def trace(path: Path) -> JSON:
    """Hit rate with L1 alone, by the share of the trace's distinct pages that fit."""
    requests = read_trace(path)
    pages = distinct_pages(requests)
    longest = max(request.input_length for request in requests)
    found: dict[str, JSON] = {"distinct_tokens": pages * PAGE}
    for share in SHARES:
        tokens = max(int(pages * share), longest // PAGE + 1) * PAGE
        row: dict[str, JSON] = {"l1_tokens": tokens}
        for policy in ("lru", "adaptive"):
            done = replay(requests, ReplaySizes(tokens, 0, 0, PAGE), eviction_policy=policy)
            row[policy] = round(done.hit_rate, 5)
        found[str(share)] = row
        print(path.name, share, row, flush=True)
    return found


def distinct_pages(requests: list[TraceRequest]) -> int:
    """Whole pages of all prompts; a block's pages are distinct by scope and the blocks before it."""
    nodes: dict[tuple[object, int], int] = {}
    seen: dict[int, int] = {}
    for request in requests:
        at: object = request.scope
        left = request.input_length
        for block in request.blocks:
            node = nodes.setdefault((at, block), len(nodes))
            filled = min(left, request.block_size)
            seen[node] = max(seen.get(node, 0), filled // PAGE)
            left -= filled
            at = node
    return sum(seen.values())


if __name__ == "__main__":
    main()
