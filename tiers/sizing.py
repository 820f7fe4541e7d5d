"""How many pages of each component the host holds, from --hicache-ratio or --hicache-size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hicache.errors import ConfigError
from hicache.spec import ModelSpec
from hicache.types import Component

GB = 1_000_000_000  # --hicache-size counts decimal gigabytes, as SGLang does


def device_bytes(spec: ModelSpec, capacities: Mapping[Component, int]) -> int:
    """Return the bytes that pools of these capacities (pages per component) take."""
    return sum(capacities[c.component] * c.page_bytes for c in spec.components)


def host_capacities(
    spec: ModelSpec,
    device: Mapping[Component, int],
    *,
    ratio: float,
    size_gb: float = 0.0,
    staging_only: bool = False,
) -> dict[Component, int]:
    """Return host pages per component.

    `size_gb` > 0 overrides `ratio` and is split in proportion to the device bytes of each component;
    else every component gets `ratio` times its device pages: more than 1, unless pages are only staged there.
    Raises ConfigError naming the flag.
    """
    if not math.isfinite(size_gb) or size_gb < 0:
        raise ConfigError(
            f"--hicache-size {size_gb} must be 0 (use --hicache-ratio) or a positive size in GB"
        )
    if size_gb > 0:
        return _by_size(spec, device, size_gb)
    if staging_only and not 0 < ratio < math.inf:
        raise ConfigError(f"--hicache-ratio {ratio} must be above 0")
    if not staging_only and (not math.isfinite(ratio) or ratio <= 1):
        raise ConfigError(
            f"--hicache-ratio {ratio} must be greater than 1: the host holds everything the device holds and "
            "more; raise it, or give the size in GB with --hicache-size"
        )
    return _no_empty_pool(
        {kind: int(device[kind] * ratio) for kind in spec.kinds}, f"--hicache-ratio {ratio}"
    )


def _by_size(spec: ModelSpec, device: Mapping[Component, int], size_gb: float) -> dict[Component, int]:
    total = device_bytes(spec, device)
    if total == 0:
        raise ConfigError("the device pools are empty: give them pages before sizing the host")
    scale = size_gb * GB / total
    return _no_empty_pool(
        {kind: int(device[kind] * scale) for kind in spec.kinds}, f"--hicache-size {size_gb}"
    )


def _no_empty_pool(capacities: dict[Component, int], flag: str) -> dict[Component, int]:
    empty = [kind.name for kind, pages in capacities.items() if pages < 1]
    if empty:
        raise ConfigError(f"{flag} leaves no page for {', '.join(empty)} on the host; give more")
    return capacities
