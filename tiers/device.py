"""L1: pages in torch tensors on one device, layer-first, one tensor per pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hicache.errors import SpecError
from hicache.spec import ModelSpec, PoolSpec
from hicache.tiers.layouts import HostLayout, PageGeometry, slot_index
from hicache.types import Component

POISON = 0xFF  # every float format reads it as NaN, so a stale page shows at once


class DevicePools:
    """The memory of every component and sidecar on `device`.

    A pool's tensor has shape [num_layers, capacity, rows_per_page, *row_shape] in the pool's dtype
    and starts as zeros. Owned by the engine; who may write which slot is the cache's to say.
    """

    def __init__(self, spec: ModelSpec, capacities: Mapping[Component, int], device: str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.capacities = {kind: capacities[kind] for kind in spec.kinds}
        self._tensors: dict[str, torch.Tensor] = {}
        self._geometry: dict[str, PageGeometry] = {}
        for family in spec.components:
            if self.capacities[family.component] < 1:
                raise SpecError(f"{family.component.name}: a device pool needs at least one page")
            for pool in family.pools:
                geometry = PageGeometry(pool, self.capacities[family.component], HostLayout.LAYER_FIRST)
                self._geometry[pool.name] = geometry
                self._tensors[pool.name] = torch.zeros(
                    geometry.shape, dtype=torch_dtype(pool), device=self.device
                )

    def pool(self, name: str) -> torch.Tensor:
        """Return a pool's tensor, not a copy."""
        return self._tensors[name]

    def geometry(self, name: str) -> PageGeometry:
        return self._geometry[name]

    def component_pools(self, component: Component) -> list[tuple[PoolSpec, torch.Tensor]]:
        """Return the family of a component: its own pool first, then the sidecars."""
        return [(pool, self._tensors[pool.name]) for pool in self.spec[component].pools]

    @property
    def size_bytes(self) -> int:
        return sum(g.size_bytes for g in self._geometry.values())

    def copy_state(self, source: int, target: int) -> None:
        """Copy one MAMBA family between slots, ordered with the caller's stream."""
        for layer_tensors in self._tensors_of(Component.MAMBA):
            layer_tensors[:, target].copy_(layer_tensors[:, source])

    def poison(self, component: Component, slots: Sequence[int]) -> None:
        """Fill pages with POISON bytes, so that a reader of a released page is caught."""
        index = slot_index(slots, self.capacities[component], f"device {component.name}")
        for tensor in self._tensors_of(component):
            rows = tensor.view(torch.uint8)
            rows[:, torch.from_numpy(index).to(self.device)] = POISON

    def _tensors_of(self, component: Component) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.component_pools(component)]


def torch_dtype(pool: PoolSpec) -> torch.dtype:
    """Return the torch dtype a pool's spec names."""
    dtype = getattr(torch, pool.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
