"""Tables for people. Everything here prints; nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.bench.hit_rate import HitRate, HitRateRow
from hicache.bench.report import RunReport


def runs_table(title: str, runs: Sequence[RunReport]) -> RenderableType:
    """One row per round, three columns per run; the last row is the whole run."""
    table = Table(header_style="bold")
    table.add_column("round", justify="right")
    table.add_column("ceiling", justify="right", style="dim")
    several = len({run.eviction_policy for run in runs}) > 1
    above = "\n\n" if several else "\n"
    for run in runs:
        policy = f"{run.eviction_policy}\n" if several else ""
        table.add_column(f"{run.tiers}\n{policy}hit", justify="right")
        table.add_column(f"{above}l1/l2/l3", justify="right", style="dim")
        table.add_column(f"{above}TTFT", justify="right")
    rows = [{r.round: r for r in run.rounds} for run in runs]
    for number in sorted({n for row in rows for n in row}):
        cells = [str(number), percent(next(row[number].ceiling for row in rows if number in row))]
        for row in rows:
            found = row.get(number)
            if found is None:
                cells += ["", "", ""]
                continue
            cells.append(percent(found.hit_rate))
            tiers = found.by_tier
            whole = max(1, found.prompt_tokens)
            parts = (tiers.device, tiers.host, tiers.storage) if tiers else ()
            cells.append("/".join(f"{100 * part / whole:.0f}" for part in parts) or "-")
            cells.append(seconds(found.ttft_mean_s))
        table.add_row(*cells)
    table.add_section()
    cells = ["all", percent(runs[0].ceiling) if runs else ""]
    for run in runs:
        cells += [percent(run.hit_rate), "", f"{run.effective_input_tokens_per_s:,.0f}\ntok/s"]
    table.add_row(*cells, style="bold")
    lines = [f"{run.tiers} missed {by_reason(run.missed)}" for run in runs if run.missed]
    return under(title, table, *lines)


def hit_rate_table(title: str, measured: HitRate, *, unit: str = "round") -> RenderableType:
    """One row per round (or interval) and one for everything."""
    table = Table(header_style="bold")
    for name in (
        unit,
        "requests" if unit == "round" else "samples",
        "prompt tokens",
        "cached tokens",
        "hit rate",
    ):
        table.add_column(name, justify="right")
    told = measured.overall.ceiling is not None
    if told:
        table.add_column("ceiling", justify="right")
    for row in measured.rounds:
        table.add_row(*_hit_rate_cells(str(row.round), row, ceiling=told))
    table.add_section()
    table.add_row(*_hit_rate_cells("all", measured.overall, ceiling=told), style="bold")
    missed = by_reason(measured.overall.missed)
    return under(title, table, *([f"missed {missed}"] if missed else []))


def under(title: str, table: Table, *notes: str) -> RenderableType:
    """Put a table between its title and notes, which may be wider than the table is."""
    return Group(Text(title, style="italic"), table, *(Text(note) for note in notes))


def by_reason(missed: Mapping[str, int]) -> str:
    """Tokens below the ceiling by what kept them back, most first."""
    ordered = sorted(missed.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {tokens:,}" for reason, tokens in ordered if tokens)


def _hit_rate_cells(label: str, row: HitRateRow, *, ceiling: bool) -> list[str]:
    cells = [label, str(row.requests), f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}"]
    for rate in (row.hit_rate, row.ceiling) if ceiling else (row.hit_rate,):
        cells.append("-" if rate is None else percent(rate))
    return cells


def percent(fraction: float) -> str:
    """One decimal."""
    return f"{100 * fraction:.1f} %"


def seconds(value: float) -> str:
    """Three digits, in the unit that fits."""
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def console(*, stderr: bool = False) -> Console:
    """A console that never wraps a table when the output is a file."""
    made = Console(stderr=stderr)
    if not made.is_terminal:
        made.width = 200
    return made
