"""Host sizes from the two flags."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.testing.pools import FULL, MAMBA, SWA, hybrid_spec
from hicache.tiers.sizing import GB, device_bytes, host_capacities

SPEC = hybrid_spec(16)
DEVICE = {FULL: 100, SWA: 20, MAMBA: 5}


def test_the_ratio_multiplies_every_component() -> None:
    """One component sized differently would be the one that evicts first, unannounced."""
    assert host_capacities(SPEC, DEVICE, ratio=2.0) == {FULL: 200, SWA: 40, MAMBA: 10}


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_of_one_or_less_is_refused_by_name(ratio: float) -> None:
    """An L2 no larger than L1 only holds what L1 holds; the operator must learn which flag to turn."""
    with pytest.raises(ConfigError, match=r"--hicache-ratio .* greater than 1.*--hicache-size"):
        host_capacities(SPEC, DEVICE, ratio=ratio)


def test_the_size_overrides_the_ratio_and_fills_the_budget_in_proportion() -> None:
    """--hicache-size is per rank in decimal GB: more would take memory that was not granted."""
    got = host_capacities(SPEC, DEVICE, ratio=0.0, size_gb=0.25)
    used = device_bytes(SPEC, got)
    assert 0.25 * GB - device_bytes(SPEC, dict.fromkeys(SPEC.kinds, 1)) < used <= 0.25 * GB
    scale = 0.25 * GB / device_bytes(SPEC, DEVICE)
    assert got == {kind: int(pages * scale) for kind, pages in DEVICE.items()}


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_a_senseless_size_is_refused_by_name(size: float) -> None:
    """A typing error in a unit must not start a server with no L2."""
    with pytest.raises(ConfigError, match="--hicache-size"):
        host_capacities(SPEC, DEVICE, ratio=2.0, size_gb=size)


def test_a_size_that_leaves_a_component_without_a_page_is_refused() -> None:
    """A host pool with no page makes every hit of that component impossible, silently."""
    with pytest.raises(ConfigError, match=r"--hicache-size .* no page for MAMBA"):
        host_capacities(SPEC, DEVICE, ratio=2.0, size_gb=0.9 * device_bytes(SPEC, DEVICE) / 5 / GB)


def test_empty_device_pools_cannot_be_scaled() -> None:
    """Dividing by zero is no message."""
    with pytest.raises(ConfigError, match="device pools are empty"):
        host_capacities(SPEC, dict.fromkeys(DEVICE, 0), ratio=2.0, size_gb=1.0)
