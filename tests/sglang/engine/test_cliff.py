"""The hit-rate cliff of a multi-turn workload on real SGLang servers, beside what virtual time predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.bench.system import Tiers
from hicache.testing.sglang_cliff import (
    Shape,
    largest_gap,
    multi_turn,
    serving,
    url_flags,
    virtual_flags,
)

POINTS = 2.0
SHAPE = Shape(rounds=8)


@pytest.mark.parametrize("tiers", list(Tiers), ids=[tiers.value for tiers in Tiers])
def test_sglang_falls_where_virtual_time_says(tiers: Tiers, model: Path, tmp_path: Path) -> None:
    """Operators size L1, L2 and L3 by virtual time: a cliff elsewhere on their servers makes that worthless.

    SGLang evicts whole leaves, at most a question's tokens more than asked: less than two points of a round.
    """
    predicted = multi_turn(virtual_flags(SHAPE, tiers), tmp_path / "virtual.json")
    with serving(tmp_path, model, SHAPE, tiers) as server:
        measured = multi_turn(url_flags(server, SHAPE, tiers), tmp_path / "sglang.json")
    assert largest_gap(measured, predicted) <= POINTS
    first, last = measured.rounds[1], measured.rounds[-1]
    assert first.ceiling - first.hit_rate < 2 * SHAPE.page * SHAPE.clients / first.prompt_tokens
    if tiers is Tiers.L1_L2_L3:
        assert last.by_tier is not None
        assert last.by_tier.storage == last.cached_tokens > 0.98 * last.ceiling * last.prompt_tokens
    else:
        assert last.cached_tokens == 0
