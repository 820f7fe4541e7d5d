"""`hicache bench islands`: flags to a workload and a system, one run per arm; a table and JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click
from rich.progress import Progress
from rich.table import Table

from hicache.bench import render
from hicache.bench.islands import ARMS, Arm, IslandRun, LongRequests, Windows, run_arm
from hicache.bench.report import JSON
from hicache.bench.system import SimulatedSystem
from hicache.cli.numbers import numbers
from hicache.config.outputs import OutputFile, write_json
from hicache.errors import ConfigError
from hicache.types import Component

_PUBLISHED: dict[str, JSON] = {
    "source": "the article Radix Islands: 32 k in, 16 k out, 96 offered, at most 48 running",
    "running": {
        "0.32 with 740,000 tokens, without islands": "15-18; 21 in the headline",
        "0.17 with 980,000 tokens, without islands": "10-11",
        "0.17 with 980,000 tokens, with islands": "46",
    },
    "swa_hold_per_request": {"without islands": 15_500, "with islands": 1_088},
}


@click.command("islands")
@click.option("--engine", type=click.Choice(["virtual"]), default="virtual", show_default=True)
@click.option("--num-prompts", type=int, default=96, show_default=True, help="Requests in all.")
@click.option(
    "--max-concurrency",
    "concurrency",
    default="96,24",
    show_default=True,
    help="Requests sent and not answered; one or more, comma-separated.",
)
@click.option("--random-input-len", type=int, default=32_768, show_default=True)
@click.option("--random-output-len", type=int, default=16_384, show_default=True)
@click.option(
    "--random-range-ratio",
    "range_ratios",
    default="1,0",
    show_default=True,
    help="Lengths are drawn from this share of the given ones on; one or more, comma-separated.",
)
@click.option(
    "--accept-length",
    default="1-16",
    show_default=True,
    help="Tokens that a decode step brings, drawn in between.",
)
@click.option("--seed", type=int, default=20260626, show_default=True)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    help="WINDOWS:RATIO:TOKENS, as in islands:0.17:980000; WINDOWS is chunk-locks (the published arrangement "
    "without islands), page-leases (this cache without) or islands. Default: the published pair, and both "
    "others at the smaller ratio.",
)
@click.option("--max-running-requests", type=int, default=48, show_default=True)
@click.option("--chunked-prefill-size", type=int, default=16_384, show_default=True)
@click.option("--sliding-window", type=int, default=1024, show_default=True)
@click.option("--page-size", type=int, default=64, show_default=True)
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def islands(
    engine: str,
    num_prompts: int,
    concurrency: str,
    random_input_len: int,
    random_output_len: int,
    range_ratios: str,
    accept_length: str,
    seed: int,
    arms: tuple[str, ...],
    max_running_requests: int,
    chunked_prefill_size: int,
    sliding_window: int,
    page_size: int,
    json_path: Path | None,
) -> None:
    """How many long requests run at once in a given pool of windows: running, retracted, SWA held by each.

    The cache, its allocators and the scheduler are real; nothing is computed. A request is admitted when
    FULL has room for all it may need, so FULL bounds what runs, too.
    """
    del engine  # there is one
    system = SimulatedSystem(
        components=(Component.FULL, Component.SWA),
        page_size=page_size,
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        sliding_window=sliding_window,
    )
    base = LongRequests(
        num_prompts=num_prompts,
        input_length=random_input_len,
        output_length=random_output_len,
        accept_lengths=_accept_lengths(accept_length),
        seed=seed,
    )
    workloads = [
        replace(base, concurrency=offered, range_ratio=share)
        for share in numbers("--random-range-ratio", range_ratios, float)
        for offered in numbers("--max-concurrency", concurrency, int)
    ]
    chosen = tuple(map(_arm, arms)) or ARMS
    runs: list[tuple[LongRequests, list[IslandRun]]] = []
    with Progress(console=render.console(stderr=True), transient=True) as progress:
        for workload in workloads:
            runs.append((workload, []))
            for arm in chosen:
                label = f"{arm.windows.value}, ratio {arm.ratio:g}, {workload.concurrency} offered"
                task = progress.add_task(label, total=workload.num_prompts)
                runs[-1][1].append(run_arm(arm, workload, system, partial(progress.advance, task)))
    if json_path is None or str(json_path) != "-":
        for workload, shown in runs:
            render.console().print(_table(workload, shown))
    if json_path is not None:
        write_json(json_path, _as_json(system, runs))


def _accept_lengths(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError as error:
        raise ConfigError(f"--accept-length {text!r}: write least-most, as in 1-16") from error


def _arm(text: str) -> Arm:
    try:
        windows, ratio, tokens = text.split(":")
        return Arm(Windows(windows), float(ratio), int(tokens))
    except ValueError as error:
        known = ", ".join(w.value for w in Windows)
        raise ConfigError(
            f"--arm {text!r}: write WINDOWS:RATIO:TOKENS, as in islands:0.17:980000, with one of {known}"
        ) from error


def _table(workload: LongRequests, runs: Sequence[IslandRun]) -> Table:
    share = workload.range_ratio
    lengths = "" if share == 1 else f", drawn from {share:g} of that on"
    table = Table(
        title=f"{workload.input_length:,} in, {workload.output_length:,} out{lengths}; "
        f"{workload.concurrency} offered",
        title_justify="left",
        header_style="bold",
    )
    for name in (
        "windows", "ratio", "FULL tokens", "running\nmean", "computing\nmean", "\nmost",
        "SWA hold\nper request", "retractions", "SWA pages\nevicted", "steps",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "windows" else "right")
    for run in runs:
        table.add_row(
            run.arm.windows.value,
            f"{run.arm.ratio:g}",
            f"{run.arm.total_tokens:,}",
            f"{run.mean(run.running):.1f}",
            f"{run.mean(run.computing):.1f}",
            str(run.most_computing),
            f"{run.hold:,.0f}",
            str(run.retracted),
            f"{run.evicted_windows:,}",
            f"{run.steps:,}",
        )
    return table


def _as_json(
    system: SimulatedSystem, runs: Sequence[tuple[LongRequests, Sequence[IslandRun]]]
) -> dict[str, JSON]:
    return {
        "engine": "virtual",
        "system": {
            "page_size": system.page_size,
            "max_running_requests": system.max_running_requests,
            "chunked_prefill_size": system.chunked_prefill_size,
            "sliding_window": system.sliding_window,
        },
        "published": _PUBLISHED,
        "workloads": [
            {
                "traffic": {**asdict(workload), "accept_lengths": list(workload.accept_lengths)},
                "runs": [run.as_json() for run in shown],
            }
            for workload, shown in runs
        ],
    }
