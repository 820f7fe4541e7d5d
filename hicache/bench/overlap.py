"""The command line of `hicache bench overlap`: settings in, table and JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hicache.config.outputs import OutputFile, write_json
from hicache.errors import ConfigError
from hicache.tiers.layouts import HostLayout

if TYPE_CHECKING:
    from hicache.bench.overlap_run import Scenario


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """One prompt: `prefix_tokens` come from the host, `new_tokens` are computed."""

    layers: int = 8
    hidden: int = 128
    prefix_tokens: int = 1024
    new_tokens: int = 64
    page_size: int = 16
    layout: HostLayout = HostLayout.LAYER_FIRST
    repeats: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise ConfigError(f"--layers {self.layers}: overlap needs at least 2")
        if self.prefix_tokens < 1 or self.prefix_tokens % self.page_size:
            raise ConfigError(
                f"--prefix-tokens {self.prefix_tokens} must be a positive multiple of "
                f"--page-size {self.page_size}"
            )
        if min(self.new_tokens, self.repeats) < 1:
            raise ConfigError("--new-tokens and --repeats must be at least 1")


_DEFAULT = OverlapSettings()


@click.command("overlap")
@click.option("--layers", default=_DEFAULT.layers, show_default=True, help="Model layers, all FULL.")
@click.option("--hidden", default=_DEFAULT.hidden, show_default=True, help="Width of the model.")
@click.option("--prefix-tokens", default=_DEFAULT.prefix_tokens, show_default=True, help="Loaded from L2.")
@click.option("--new-tokens", default=_DEFAULT.new_tokens, show_default=True, help="Computed on top.")
@click.option("--page-size", default=_DEFAULT.page_size, show_default=True, help="Tokens per page.")
@click.option(
    "--hicache-mem-layout",
    "layout",
    default=_DEFAULT.layout.value,
    show_default=True,
    type=click.Choice([layout.value for layout in HostLayout]),
    help="Layout of the host pool.",
)
@click.option(
    "--ratio", "ratios", multiple=True, type=float, default=(0.5, 1.0, 2.0), show_default=True,
    help="Length of the load over the length of the compute; repeatable.",
)  # fmt: skip
@click.option("--repeats", default=_DEFAULT.repeats, show_default=True, help="Of every mode, interleaved.")
@click.option("--seed", default=_DEFAULT.seed, show_default=True, help="Of weights and tokens.")
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def overlap_command(
    layers: int,
    hidden: int,
    prefix_tokens: int,
    new_tokens: int,
    page_size: int,
    layout: str,
    ratios: tuple[float, ...],
    repeats: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Time to first token with layer-wise loading, with load-then-compute, and with nothing to load.

    One compute thread runs the reference engine's layers, one copy thread brings the prefix from L2.
    """
    from hicache.bench.overlap_run import environment, measure  # noqa: PLC0415 (--help needs no torch)

    settings = OverlapSettings(
        layers=layers,
        hidden=hidden,
        prefix_tokens=prefix_tokens,
        new_tokens=new_tokens,
        page_size=page_size,
        layout=HostLayout.parse(layout),
        repeats=repeats,
        seed=seed,
    )
    for ratio in ratios:
        if not 0 < ratio < float("inf"):
            raise ConfigError(f"--ratio {ratio:g} must be above 0")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("overlap", total=repeats)
        scenarios = measure(settings, ratios, progress=lambda: progress.advance(task))
    if json_path is None or str(json_path) != "-":
        Console().print(_table(settings, scenarios))
    if json_path is not None:
        report = {
            "benchmark": "overlap",
            "environment": environment(),
            "settings": asdict(settings) | {"layout": settings.layout.value},
            "scenarios": [scenario.as_json() for scenario in scenarios],
        }
        write_json(json_path, report)


def _table(settings: OverlapSettings, scenarios: Sequence[Scenario]) -> Table:
    table = Table(
        title=f"{settings.layers} layers, {settings.prefix_tokens} tokens from L2, {settings.new_tokens} "
        f"computed: ms to the first token, best of {settings.repeats}",
        title_justify="left",
        header_style="bold",
        caption="load/compute: asked, and reached. then: load, then compute. layered: layer N+1 copied while "
        "layer N computes. hidden: share of (N-1)/N of the shorter of load and compute, or "
        "how little that is where no share of it can be told from noise. bound: the same if "
        "both took what they take alone. beside: compute that needs no load, while one runs.",
        caption_justify="left",
    )
    for name in ("load/compute", "load", "none", "then", "layered", "hidden", "bound", "beside"):
        table.add_column(name, justify="right", no_wrap=True)
    for scenario in scenarios:
        ratio = scenario.load_over_compute
        times = (
            scenario.load_s,
            scenario.no_load.best,
            scenario.load_then_compute.best,
            scenario.layer_wise.best,
        )
        reached = f"{scenario.load_s / scenario.no_load.best:.2f}"
        table.add_row(
            f"memory speed: {reached}" if ratio is None else f"{ratio:g}: {reached}",
            *(f"{1e3 * value:.1f}" for value in times),
            *(_percent(share, scenario) for share in (scenario.hidden_share, scenario.bound_share)),
            f"{1e3 * scenario.beside_load.best:.1f}",
        )
    return table


def _percent(share: float | None, scenario: Scenario) -> str:
    return f"{scenario.hideable_s * 1e3:.2f} ms: noise" if share is None else f"{100 * share:.0f} %"
