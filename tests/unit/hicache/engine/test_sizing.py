"""L1's pools follow from SGLang's memory flags."""

from __future__ import annotations

import pytest

from hicache.engine.architecture import PRESETS, reference_spec
from hicache.engine.sizing import device_capacities
from hicache.errors import ConfigError
from hicache.types import Component

SPEC = reference_spec(PRESETS["hybrid"], 16)


def test_ratios_are_tokens_for_swa_and_bytes_for_mamba() -> None:
    """Pools would not be those that the same flags give elsewhere."""
    pages = device_capacities(
        SPEC, max_total_tokens=1600, swa_full_tokens_ratio=0.5, mamba_full_memory_ratio=0.25
    )
    assert pages[Component.FULL] == 100
    assert pages[Component.SWA] == 50
    states = int(0.25 * 100 * SPEC[Component.FULL].page_bytes / SPEC[Component.MAMBA].page_bytes)
    assert pages[Component.MAMBA] == states


def test_a_given_number_of_states_wins_over_the_ratio() -> None:
    """--max-mamba-cache-size would be ignored."""
    assert device_capacities(SPEC, max_total_tokens=1600, max_mamba_cache_size=7)[Component.MAMBA] == 7


def test_absent_components_get_no_pool() -> None:
    """Memory would be spent on pools that the model does not have."""
    spec = reference_spec(PRESETS["full"], 16)
    assert device_capacities(spec, max_total_tokens=160) == {Component.FULL: 10}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 15}, "less than one page of 16"),
        ({"max_total_tokens": 160, "swa_full_tokens_ratio": 0.0}, r"must be in \(0, 1\]"),
        ({"max_total_tokens": 160, "mamba_full_memory_ratio": -1.0}, "must be above 0"),
        ({"max_total_tokens": 160, "max_mamba_cache_size": 0}, "must be at least 1"),
    ],
)
def test_sizes_that_hold_nothing_are_refused(settings: dict[str, float], message: str) -> None:
    """A server would start and refuse every request."""
    with pytest.raises(ConfigError, match=message):
        device_capacities(SPEC, **settings)  # type: ignore[arg-type]
