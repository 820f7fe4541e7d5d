"""`hicache replay`: what a recorded trace would have found in tiers of given sizes."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import RenderableType
from rich.progress import Progress
from rich.table import Table

from hicache.bench import render
from hicache.bench.replay import ReplayReport, ReplaySizes
from hicache.bench.replay import replay as run_replay
from hicache.bench.traces import read_trace
from hicache.config.outputs import OutputFile, write_json


class _Tokens(click.ParamType[float]):
    """A number of tokens, or inf."""

    name = "tokens"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float("inf") if value == "inf" else int(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number of tokens nor inf", param, ctx)


@click.command("replay")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--l1-tokens", type=int, required=True, help="Size of L1 (device) in tokens.")
@click.option("--l2-tokens", type=int, default=0, show_default=True, help="Size of L2 (host); 0: none.")
@click.option(
    "--l3-tokens", type=_Tokens(), default="0", show_default=True, help="Size of L3, or inf; 0: none."
)
@click.option("--page-size", default=64, show_default=True, help="Tokens per page.")
@click.option("--eviction-policy", default="adaptive", show_default=True, help="As --radix-eviction-policy.")
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def replay(
    path: Path,
    l1_tokens: int,
    l2_tokens: int,
    l3_tokens: float,
    page_size: int,
    eviction_policy: str,
    json_path: Path | None,
) -> None:
    """Replay the trace at PATH: a .jsonl file, a .json session, or a folder of them.

    Requests are admitted one after the other in time order, by the cache itself in virtual time.
    Only prompts are replayed: a reply's tokens are not in a trace. L1's pages are on L2 as well.
    """
    sizes = ReplaySizes(l1_tokens, l2_tokens, l3_tokens, page_size)
    requests = read_trace(path)
    with Progress(console=render.console(stderr=True), transient=True) as progress:
        task = progress.add_task(path.name, total=sum(r.input_length for r in requests))
        report = run_replay(
            requests,
            sizes,
            eviction_policy=eviction_policy,
            on_request=lambda tokens: progress.advance(task, tokens),
        )
    if json_path is None or str(json_path) != "-":
        render.console().print(_table(path, report))
    if json_path is not None:
        write_json(json_path, report.as_json())


def _table(path: Path, report: ReplayReport) -> RenderableType:
    title = f"{path}: {report.requests:,} requests, {report.input_tokens:,} input tokens"
    table = Table(header_style="bold")
    table.add_column("found in")
    table.add_column("tokens", justify="right")
    table.add_column("of input", justify="right")
    cached = report.cached
    tiers = {"l1": cached.device, "l2": cached.host, "l3": cached.storage}
    for name, tokens in tiers.items():
        table.add_row(name, f"{tokens:,}", f"{100 * tokens / report.input_tokens:.2f} %")
    table.add_section()
    table.add_row("hit rate", f"{sum(tiers.values()):,}", f"{100 * report.hit_rate:.2f} %", style="bold")
    table.add_row("ceiling", f"{report.ceiling_tokens:,}", f"{100 * report.ceiling:.2f} %")
    missed = render.by_reason(report.missed)
    return render.under(title, table, *([f"missed {missed}"] if missed else []))
