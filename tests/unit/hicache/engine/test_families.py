"""Published shapes: the right pools, of the sizes that their sources give."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hicache.cli.plan import plan
from hicache.engine.architecture import preset_config, reference_spec
from hicache.engine.families import FAMILIES, published_spec, stored_bytes
from hicache.errors import ConfigError, SpecError
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


@pytest.mark.parametrize("draft", [False, True], ids=["", "draft"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_engine_has_the_families_of_the_published_shape(name: str, draft: bool) -> None:
    """What the reference engine proves would say nothing about the models that people serve."""
    published = published_spec(name, 64, draft=draft)
    ours = reference_spec(preset_config(f"{name}-draft" if draft else name), 64)
    assert published.kinds == ours.kinds
    for theirs, mine in zip(published.components, ours.components, strict=True):
        assert theirs.logical is mine.logical
        packed = [sum(pool.ratio > 1 for pool in family.pools) for family in (theirs, mine)]
        states = [sum(bool(pool.state_of) for pool in family.pools) for family in (theirs, mine)]
        assert packed[0] == packed[1]
        assert states[0] == states[1]
        assert any("index" in pool.name for pool in theirs.pools) <= any(
            "index" in p.name for p in mine.pools
        )


def test_published_sizes_come_out() -> None:
    """A plan would be off by the difference."""
    assert stored_bytes(published_spec("dense", 64), FULL) == 64 * 2 * 8 * 128 * 2
    islands = published_spec("five-in-thirty", 64, draft=True)
    assert (stored_bytes(islands, FULL), stored_bytes(islands, SWA)) == (9_500 + 10_240, 95_000)
    assert islands.window == 1024
    assert islands.layers.count(FULL) * 6 == len(islands.layers) == 30
    compressed = published_spec("compressed", 64)
    assert 3_600 <= stored_bytes(compressed, FULL) <= 1.1 * 3_600
    assert [len(family.pools) for family in compressed.components] == [3, 3]
    # With pages of 64 every other page has no row of 128 tokens, and with 256 all have two.
    assert stored_bytes(published_spec("compressed", 256), FULL) == stored_bytes(compressed, FULL)


def test_draft_pools_follow_their_family_and_change_the_identity() -> None:
    """A replica with speculative decoding would take objects without draft KV for its own."""
    for name in FAMILIES:
        plain, drafted = (published_spec(name, 64, draft=draft) for draft in (False, True))
        assert plain.fingerprint != drafted.fingerprint
        added = {p.name for c in drafted.components for p in c.pools} - {
            p.name for c in plain.components for p in c.pools
        }
        assert added
        assert all("draft" in pool for pool in added)


def test_a_page_size_that_a_ratio_does_not_allow_is_refused() -> None:
    """A row would belong to no page."""
    with pytest.raises(SpecError, match="one must divide the other"):
        published_spec("compressed", 48)
    with pytest.raises(ConfigError, match="there are dense"):
        published_spec("gpt", 64)
    ran = CliRunner().invoke(plan, ["pools", "--model-preset", "compressed", "--page-size", "48"])
    assert ran.exit_code
    assert "--page-size 48: pool c128: 128 tokens a row" in str(ran.exception or ran.output)


def test_the_plan_is_told_as_a_table_and_as_numbers() -> None:
    """Nobody could see what a model's pools take."""
    ran = CliRunner().invoke(plan, ["pools", "--model-preset", "compressed", "--draft"])
    assert ran.exit_code == 0
    assert "c4_index" in ran.output
    assert "resumed at multiples of 64 tokens" in ran.output
    ran = CliRunner().invoke(plan, ["pools", "--model-preset", "full-mamba", "--json", "-"])
    told = json.loads(ran.output)
    assert [family["component"] for family in told["families"]] == ["FULL", "MAMBA"]
    assert told["families"][1]["stored_bytes"] == 36 * (32 * 128 * 128 * 4 + 3 * 8_192 * 2)
