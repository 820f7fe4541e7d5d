"""L1: pages in torch tensors on one device, layer-first, one tensor per pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hicache.spec import ModelSpec, PoolSpec
from hicache.tiers.layouts import HostLayout, slot_index
from hicache.tiers.pools import POISON, TorchPools
from hicache.types import Component


class DevicePools(TorchPools):
    """The memory of every component and sidecar on `device` ("cpu", "cuda", "cuda:1").

    A pool's tensor has shape [num_layers, capacity, rows_per_page, *row_shape] in the pool's dtype
    and starts as zeros. Owned by the engine. Raises ConfigError for an empty pool.
    """

    def __init__(self, spec: ModelSpec, capacities: Mapping[Component, int], device: str = "cpu") -> None:
        self.device = torch.device(device)
        super().__init__(spec, capacities, HostLayout.LAYER_FIRST, self._allocate)

    def _allocate(self, pool: PoolSpec, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def release(self) -> None:
        """Give the memory back. Tensors and views of them stay, and have nothing behind them until resume().

        On the CPU, where copies look at the memory itself, it is kept and overwritten with POISON.
        """
        for tensor in self._tensors.values():
            if self.device.type == "cpu":
                tensor.view(torch.uint8).fill_(POISON)
            else:
                tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Have memory again, of zeros, behind the same tensors."""
        for name, tensor in self._tensors.items():
            if self.device.type != "cpu":
                tensor.untyped_storage().resize_(self._geometry[name].size_bytes)
            tensor.zero_()

    def copy_state(self, source: int, target: int) -> None:
        """Copy one MAMBA family between slots, ordered with the caller's stream."""
        for _, tensor in self.component_pools(Component.MAMBA):
            tensor[:, target].copy_(tensor[:, source])

    def poison(self, component: Component, slots: Sequence[int]) -> None:
        """Fill pages with POISON bytes, so that a reader of a released page is caught."""
        index = slot_index(slots, self.capacities[component], f"device {component.name}")
        at = torch.from_numpy(index).to(self.device)
        for _, tensor in self.component_pools(component):
            tensor.view(torch.uint8)[:, at] = POISON
