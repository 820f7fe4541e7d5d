"""Copies between "device" and host pools by torch indexing, and host pools in ordinary memory.

For `--hicache-io-backend direct` with the host layouts layer_first and page_first_direct.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

_POOLS = "sglang.srt.mem_cache.pool_host"
_USERS = (
    *(f"{_POOLS}.{name}" for name in ("mha", "mla", "mamba", "dsa")),
    "sglang.srt.mem_cache.memory_pool_host",
)

Tensors = Sequence[torch.Tensor]


def rows(
    src_layers: Tensors,
    dst_layers: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int = 1,
    **_: object,
) -> None:
    """Token rows of some layers to token rows."""
    for source, target in zip(src_layers, dst_layers, strict=False):
        target.index_copy_(0, dst_indices, source.index_select(0, src_indices).to(target.dtype))


def pages_to_rows(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    **_: object,
) -> None:
    """One layer of host pages (page, layer, row, ...) to the token rows of that layer."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=False):
        picked = source[src_indices // page_size, layer_id, src_indices % page_size]
        target[dst_indices] = picked.reshape(len(dst_indices), *target.shape[1:])


def rows_to_pages(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
    **_: object,
) -> None:
    """Token rows of all layers to host pages; `src_ptrs` has the layers of one array after the other."""
    layers = len(src_ptrs) // len(dst_ptrs)
    page, row = dst_indices // page_size, dst_indices % page_size
    for number, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[number // layers], number % layers
        target[page, layer, row] = source[src_indices].reshape(len(row), *target.shape[3:])


def ordinary_memory(
    dims: Sequence[int],
    dtype: torch.dtype,
    device: object,
    pin_memory: bool = False,
    allocator: object = None,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """What SGLang takes host pools from: no pinning without a GPU."""
    return torch.empty(tuple(dims), dtype=dtype, device="cpu")


def install() -> None:
    """Replace SGLang's copies and allocations in the modules that hold them."""
    common = importlib.import_module(f"{_POOLS}.common")
    common.ALLOC_MEMORY_FUNCS["cpu"] = ordinary_memory
    common.ALLOC_MEMORY_FUNCS[torch.device("cpu")] = ordinary_memory
    for name in _USERS:
        module = importlib.import_module(name)
        module.transfer_kv_direct = rows
        module.transfer_kv_per_layer_direct_pf_lf = pages_to_rows
        module.transfer_kv_all_layer_direct_lf_pf = rows_to_pages
    # Host pools ask for pinned memory whatever the platform says.
    base = importlib.import_module(f"{_POOLS}.base")
    base.HostKVCache.pin_memory = property(lambda self: False, lambda self, wanted: None)
    # ... and leave 10 GiB of the machine free, which small machines do not have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
