"""Host pools as SGLang's storage backends meet them: its class names, attributes and memory layouts.

Fakes: they allocate and hold bytes, and move nothing between device and host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def _dims(layout: str, layers: int, pages: int, page_size: int, row: tuple[int, ...]) -> tuple[int, ...]:
    if layout == "layer_first":
        return (layers, pages * page_size, *row)
    if layout == "page_first":
        return (pages * page_size, layers, *row)
    if layout == "page_first_direct":
        return (pages, layers, page_size, *row)
    return (pages, row[0], page_size, layers, row[1])


def _page(buffer: torch.Tensor, layout: str, index: int, page_size: int) -> torch.Tensor:
    """Return one page of an array as a view, in the array's own order."""
    if layout == "layer_first":
        return buffer[:, index : index + page_size]
    if layout == "page_first":
        return buffer[index : index + page_size]
    return buffer[index // page_size : index // page_size + 1]


class _PagedPool:
    """What the paged pools share. `arrays` are stacked in a flat page."""

    page_size: int
    layout: str
    start_layer = 0
    end_layer = 0
    arrays: tuple[torch.Tensor, ...]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        pages = [_page(array, self.layout, int(index), self.page_size) for array in self.arrays]
        return torch.cat([page.flatten() for page in pages]) if flat else torch.stack(pages)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        for array, part in zip(self.arrays, data_page.chunk(len(self.arrays)), strict=True):
            page = _page(array, self.layout, int(index), self.page_size)
            page.copy_(part.reshape(page.shape))


class MHATokenToKVPoolHost(_PagedPool):
    """Keys and values of `heads` x `dim` per layer and token."""

    def __init__(
        self,
        layout: str = "page_first_direct",
        *,
        pages: int = 16,
        page_size: int = 4,
        layers: int = 3,
        heads: int = 2,
        dim: int = 8,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.end_layer = layers
        self.kv_buffer = torch.zeros((2, *_dims(layout, layers, pages, page_size, (heads, dim))), dtype=dtype)
        self.k_buffer, self.v_buffer = self.kv_buffer[0], self.kv_buffer[1]
        self.arrays = (self.k_buffer, self.v_buffer)


class MLATokenToKVPoolHost(_PagedPool):
    """Latent KV: one array, the same on every TP rank."""

    def __init__(
        self,
        layout: str = "page_first_direct",
        *,
        pages: int = 16,
        page_size: int = 4,
        layers: int = 3,
        dim: int = 10,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.kv_buffer = torch.zeros(_dims(layout, layers, pages, page_size, (1, dim)), dtype=dtype)
        self.arrays = (self.kv_buffer,)


class DSAIndexerPoolHost:
    """Indexer keys packed with their scales: `stride` bytes per page and layer; indices are those of KV."""

    def __init__(
        self,
        layout: str = "page_first_direct",
        *,
        pages: int = 16,
        page_size: int = 4,
        layers: int = 3,
        stride: int = 33,
    ) -> None:
        self.layout, self.page_size = layout, page_size
        dims = (layers, pages, stride) if layout == "layer_first" else (pages, layers, 1, stride)
        self.index_k_with_scale_buffer = torch.zeros(dims, dtype=torch.uint8)


class MambaPoolHost:
    """Recurrent states: a page is one state of a temporal and a convolution array per layer."""

    page_size = 1

    def __init__(self, layout: str = "page_first_direct", *, states: int = 16, layers: int = 2) -> None:
        self.layout = layout
        head = (layers, states) if layout == "layer_first" else (states, layers, 1)
        self.temporal_buffer = torch.zeros((*head, 3, 5), dtype=torch.float32)
        self.conv_buffer = [torch.zeros((*head, 7), dtype=torch.bfloat16)]
        self.slot_state_buffers: list[torch.Tensor] = []


class LogicalHostPool:
    """The KV anchor of a model that keeps everything in sidecars: it counts pages and has no bytes."""

    kv_buffer = None

    def __init__(self, *, page_size: int = 4, layout: str = "page_first_direct") -> None:
        self.page_size, self.layout = page_size, layout

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Nothing to set."""


class PackedPoolHost(_PagedPool):
    """A pool of a kind that no adapter has heard of."""

    def __init__(self, layout: str = "page_first_direct", *, pages: int = 16, page_size: int = 4) -> None:
        self.layout, self.page_size = layout, page_size
        self.arrays = (torch.zeros((pages, 1, page_size, 6), dtype=torch.uint8),)


FakePool = (
    MHATokenToKVPoolHost
    | MLATokenToKVPoolHost
    | DSAIndexerPoolHost
    | MambaPoolHost
    | LogicalHostPool
    | PackedPoolHost
)


Replicas = Callable[..., Any]
"""(pools by name, config, backend=, extra config...): a HiCacheStorageBackend that is ready."""


def transfer(
    name: str,
    keys: list[str],
    host_indices: torch.Tensor | None = None,
    *,
    policy: str = "all_pages",
    source: str | None = None,
) -> SimpleNamespace:
    """Return a PoolTransfer; `source` is the pool whose indices it shares."""
    return SimpleNamespace(
        name=name, keys=keys, host_indices=host_indices, hit_policy=policy, indices_from_pool=source
    )


def tensors_of(pool: FakePool) -> Iterator[torch.Tensor]:
    """Yield the memory of a pool."""
    if isinstance(pool, _PagedPool):
        yield from pool.arrays
    elif isinstance(pool, DSAIndexerPoolHost):
        yield pool.index_k_with_scale_buffer
    elif isinstance(pool, MambaPoolHost):
        yield pool.temporal_buffer
        yield from pool.conv_buffer


def scramble(pool: FakePool, seed: int) -> None:
    """Fill a pool with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors_of(pool):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def wipe(pool: FakePool) -> None:
    """Zero a pool."""
    for tensor in tensors_of(pool):
        tensor.zero_()


def page_bytes(pool: FakePool, page: int) -> bytes:
    """Return a page in the order layer, row, rest, whatever the layout: what two engines must agree on."""
    size = pool.page_size
    if isinstance(pool, DSAIndexerPoolHost):
        buffer = pool.index_k_with_scale_buffer
        return _raw(buffer[:, page] if pool.layout == "layer_first" else buffer[page])
    if isinstance(pool, MambaPoolHost):
        return b"".join(
            _raw(tensor[:, page] if pool.layout == "layer_first" else tensor[page])
            for tensor in tensors_of(pool)
        )
    rows = []
    for tensor in tensors_of(pool):
        for layer in range(3 if not isinstance(pool, PackedPoolHost) else 1):
            for row in range(size):
                rows.append(_raw(_row(tensor, pool.layout, layer, page, row, size)))
    return b"".join(rows)


def _row(tensor: torch.Tensor, layout: str, layer: int, page: int, row: int, size: int) -> torch.Tensor:
    if layout == "layer_first":
        return tensor[layer, page * size + row]
    if layout == "page_first":
        return tensor[page * size + row, layer]
    if layout == "page_head":
        return tensor[page, :, row, layer]
    return tensor[page, layer, row]


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def indices(pool: FakePool, *pages: int) -> torch.Tensor:
    """Return what SGLang passes for these pages: one index per token."""
    size = pool.page_size
    return torch.tensor([page * size + row for page in pages for row in range(size)], dtype=torch.int64)


@dataclass
class FakeConfig:
    """HiCacheStorageConfig with the defaults of a single GPU."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    dp_rank: int = 0
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "model"
    should_split_heads: bool = False
    extra_config: Mapping[str, object] | None = field(
        default_factory=lambda: {"backend": "memory", "weight_version": "1"}
    )

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0
