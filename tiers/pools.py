"""What device and host pools share: one torch tensor per pool of a spec, in one layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hicache.errors import ConfigError
from hicache.spec import ModelSpec, PoolSpec
from hicache.tiers.layouts import HostLayout, PageGeometry
from hicache.types import Component

POISON = 0xFF  # every float format reads it as NaN, so a stale page shows at once

# Makes the zeroed tensor of one pool, of the given shape and dtype.
Allocate = Callable[[PoolSpec, tuple[int, ...], torch.dtype], torch.Tensor]


class TorchPools:
    """The memory of every component and sidecar on one tier. Which slot is whose is the cache's to say."""

    def __init__(
        self, spec: ModelSpec, capacities: Mapping[Component, int], layout: HostLayout, allocate: Allocate
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.capacities = {kind: capacities[kind] for kind in spec.kinds}
        self._tensors: dict[str, torch.Tensor] = {}
        self._geometry: dict[str, PageGeometry] = {}
        for family in spec.components:
            capacity = self.capacities[family.component]
            if capacity < 1:
                raise ConfigError(f"{family.component.name}: a pool of {capacity} pages holds nothing")
            for pool in family.pools:
                geometry = PageGeometry(pool, capacity, layout)
                dtype = getattr(torch, pool.dtype)
                assert isinstance(dtype, torch.dtype)
                self._geometry[pool.name] = geometry
                self._tensors[pool.name] = allocate(pool, geometry.shape, dtype)

    def pool(self, name: str) -> torch.Tensor:
        """Return a pool's tensor in its layout, not a copy."""
        return self._tensors[name]

    def geometry(self, name: str) -> PageGeometry:
        """Return which rows of a pool are which page."""
        return self._geometry[name]

    def component_pools(self, component: Component) -> list[tuple[PoolSpec, torch.Tensor]]:
        """Return the family of a component: its own pool first, then the sidecars."""
        return [(pool, self._tensors[pool.name]) for pool in self.spec[component].pools]

    @property
    def size_bytes(self) -> int:
        return sum(geometry.size_bytes for geometry in self._geometry.values())
