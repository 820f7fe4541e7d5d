"""`hicache plan`: arithmetic of memory before there is a server; flags in, a table or JSON out."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from hicache.cli.numbers import numbers
from hicache.cli.plan_pools import pools
from hicache.config.outputs import OutputFile, write_json
from hicache.config.sizes import ByteSize
from hicache.engine.island_plan import IslandPlan, Split, TokenBytes
from hicache.errors import ConfigError


@click.group("plan")
def plan() -> None:
    """Plan memory: pools of published models, and the pool split of those with sliding windows."""


plan.add_command(pools)


@plan.command("islands")
@click.option("--memory", default="37GB", show_default=True, help="Memory for KV, as in 37GB or 34GiB.")
@click.option("--full-token-bytes", type=float, default=9_500, show_default=True)
@click.option("--swa-token-bytes", type=float, default=95_000, show_default=True)
@click.option(
    "--other-token-bytes",
    type=float,
    default=10_240,
    show_default=True,
    help="What each FULL token takes besides, as a draft model's KV.",
)
@click.option(
    "--swa-full-tokens-ratio",
    "ratios",
    default="0.32,0.17,0.10",
    show_default=True,
    help="SWA tokens per FULL token; one or more, comma-separated.",
)
@click.option(
    "--max-total-tokens",
    "totals",
    default="740000,980000",
    show_default=True,
    help="FULL tokens at each ratio, comma-separated; where none is given (or 0), as many as fit.",
)
@click.option("--sliding-window", type=int, default=1024, show_default=True)
@click.option("--page-size", type=int, default=64, show_default=True)
@click.option("--chunked-prefill-size", type=int, default=16_384, show_default=True)
@click.option("--max-running-requests", type=int, default=48, show_default=True)
@click.option(
    "--hold-tokens",
    type=int,
    default=15_500,
    show_default=True,
    help="SWA tokens that a request keeps without islands: most of its last chunk.",
)
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def islands(
    memory: str,
    full_token_bytes: float,
    swa_token_bytes: float,
    other_token_bytes: float,
    ratios: str,
    totals: str,
    sliding_window: int,
    page_size: int,
    chunked_prefill_size: int,
    max_running_requests: int,
    hold_tokens: int,
    json_path: Path | None,
) -> None:
    """What a smaller SWA pool buys, and whether requests still fit: with islands and without.

    The defaults are a published model's (SWA of 1,024 tokens, 37 GB for KV on each GPU).
    """
    planned = IslandPlan(
        memory=float(int(ByteSize.parse(memory))),
        costs=TokenBytes(full_token_bytes, swa_token_bytes, other_token_bytes),
        window=sliding_window,
        page_size=page_size,
        chunk=chunked_prefill_size,
        running=max_running_requests,
        hold=hold_tokens,
    )
    shares = numbers("--swa-full-tokens-ratio", ratios, float)
    given = numbers("--max-total-tokens", totals, int) if totals.strip() else []
    source = click.get_current_context().get_parameter_source("totals")
    if len(given) > len(shares) and source is not ParameterSource.DEFAULT:
        raise ConfigError(
            f"--max-total-tokens {totals}: {len(given)} totals for {len(shares)} of --swa-full-tokens-ratio"
        )
    given = given[: len(shares)] + [0] * (len(shares) - len(given))
    splits = [planned.split(share, total or None) for share, total in zip(shares, given, strict=True)]
    if json_path is None or str(json_path) != "-":
        _show(planned, splits)
    if json_path is not None:
        write_json(json_path, _as_json(planned, splits))


def _show(planned: IslandPlan, splits: list[Split]) -> None:
    from rich.table import Table

    from hicache.bench.render import console

    costs, out = planned.costs, console()
    retained = planned.retained
    out.print(f"bytes per token   c(r) = {costs.full:,.0f} + {costs.swa:,.0f} r + {costs.other:,.0f}")
    out.print(f"FULL tokens       T = {planned.memory / 1e9:g} GB / c(r), where none is given")
    out.print(f"without islands   N = r T / {planned.hold:,}")
    out.print(
        f"with islands      N = (r T - {planned.chunk:,}) / {retained:,}, "
        f"{retained:,} = {planned.page_size} x (ceil({planned.window:,} / {planned.page_size}) + 1)"
    )
    out.print(
        f"SWA pool floor    {planned.chunk:,} + {planned.running} x {retained:,} = {planned.floor:,} tokens\n"
    )
    table = Table(header_style="bold")
    for name in (
        "ratio r", "bytes/token", "T that fits", "T", "SWA pool r T", "N without", "N with", "pool/floor"
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for split in splits:
        table.add_row(
            f"{split.ratio:g}",
            f"{split.token_bytes / 1000:.1f} KB",
            f"{split.fits:,}",
            f"{split.full_tokens:,}",
            f"{split.swa_tokens:,}",
            f"{split.running_without:.1f}",
            f"{split.running_with:.1f}",
            f"{split.over_floor:.1f}x",
        )
    out.print(table)


def _as_json(planned: IslandPlan, splits: list[Split]) -> dict[str, object]:
    costs = planned.costs
    return {
        "terms": {
            "memory_bytes": planned.memory,
            "full_token_bytes": costs.full,
            "swa_token_bytes": costs.swa,
            "other_token_bytes": costs.other,
            "sliding_window": planned.window,
            "page_size": planned.page_size,
            "chunked_prefill_size": planned.chunk,
            "max_running_requests": planned.running,
            "hold_tokens_without_islands": planned.hold,
            "retained_tokens_with_islands": planned.retained,
        },
        "swa_floor_tokens": planned.floor,
        "ratios": [
            {
                "swa_full_tokens_ratio": split.ratio,
                "bytes_per_token": split.token_bytes,
                "tokens_that_fit": split.fits,
                "full_tokens": split.full_tokens,
                "swa_tokens": split.swa_tokens,
                "running_without_islands": split.running_without,
                "running_with_islands": split.running_with,
                "swa_pool_over_floor": split.over_floor,
            }
            for split in splits
        ],
    }
