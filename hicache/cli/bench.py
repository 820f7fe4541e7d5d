"""`hicache bench`: the group; each benchmark is imported when it is asked for."""

from __future__ import annotations

import click

from hicache.cli.main import LazyGroup

_BENCHES = {
    "multi-turn": (
        "hicache.cli.multi_turn:multi_turn",
        "Growing conversations: the hit-rate cliff, tier by tier.",
    ),
    "islands": (
        "hicache.cli.bench_islands:islands",
        "Long requests on a small pool of windows: how many run.",
    ),
    "overlap": ("hicache.bench.overlap:overlap_command", "Layer-wise loading against load-then-compute."),
    "tree": ("hicache.bench.tree:tree_command", "The prefix tree alone, operation by operation."),
}


@click.group("bench", cls=LazyGroup, table=_BENCHES)
def bench() -> None:
    """Measure: multi-turn, islands, overlap, tree."""
