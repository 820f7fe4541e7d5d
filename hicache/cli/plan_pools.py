"""`hicache plan pools`: the pools of published models, at their real sizes."""

from __future__ import annotations

from pathlib import Path

import click

from hicache.config.outputs import OutputFile, write_json
from hicache.engine.families import FAMILIES, published_spec, stored_bytes
from hicache.errors import ConfigError, SpecError
from hicache.spec import ModelSpec
from hicache.types import Component


@click.command("pools")
@click.option(
    "--model-preset",
    type=click.Choice(list(FAMILIES)),
    required=True,
    help="A published shape; the reference server's preset of this name is it in little.",
)
@click.option("--draft", is_flag=True, help="With the pools of a draft model.")
@click.option("--page-size", type=int, default=64, show_default=True)
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def pools(model_preset: str, draft: bool, page_size: int, json_path: Path | None) -> None:
    """Pools of a published model: what moves together, what it takes, where a prefix can be resumed."""
    if page_size < 1:
        raise ConfigError(f"--page-size {page_size} must be at least 1")
    try:
        spec = published_spec(model_preset, page_size, draft=draft)
    except SpecError as error:
        raise ConfigError(f"--page-size {page_size}: {error}") from error
    if json_path is None or str(json_path) != "-":
        _show(model_preset, spec)
    if json_path is not None:
        write_json(json_path, _as_json(model_preset, spec))


def _show(name: str, spec: ModelSpec) -> None:
    from rich.table import Table

    from hicache.bench.render import console

    out = console()
    out.print(f"{name}: {FAMILIES[name].title}")
    out.print(f"source: {FAMILIES[name].source}\n")
    table = Table(header_style="bold")
    for heading in ("family", "pool", "layers", "tokens a row", "bytes a page", "state of"):
        table.add_column(heading, justify="left" if heading in ("family", "pool", "state of") else "right")
    for family in spec.components:
        for pool in family.pools:
            state = ", ".join(pool.state_of) or "-"
            ratio = "-" if family.component is Component.MAMBA or pool.state_of else str(pool.ratio)
            table.add_row(
                *(family.component.name, pool.name, str(pool.num_layers), ratio),
                *(f"{pool.page_bytes:,}", state),
            )
    out.print(table)
    for family in spec.components:
        per = "state" if family.component is Component.MAMBA else "token"
        size = stored_bytes(spec, family.component)
        window = f", the last {family.window:,} before a boundary" if family.window else ""
        out.print(f"{family.component.name}: {size:,.0f} bytes a {per} in L3{window}")
    out.print(f"A prefix can be resumed at multiples of {spec.align_pages * spec.page_size} tokens.")


def _as_json(name: str, spec: ModelSpec) -> dict[str, object]:
    return {
        "name": name,
        "source": FAMILIES[name].source,
        "page_size": spec.page_size,
        "resumable_every_tokens": spec.align_pages * spec.page_size,
        "families": [
            {
                "component": family.component.name,
                "window": family.window,
                "stored_bytes": stored_bytes(spec, family.component),
                "page_bytes": family.page_bytes,
                "pools": [
                    {
                        "name": pool.name,
                        "layers": pool.num_layers,
                        "tokens_per_row": pool.ratio,
                        "page_bytes": pool.page_bytes,
                        "state_of": list(pool.state_of),
                    }
                    for pool in family.pools
                ],
            }
            for family in spec.components
        ],
    }
