"""SGLang's device pools as ours, for every model that its linkers support and for plain FULL and FULL + SWA.

Decides which models are served. Imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from hicache.integrations.sglang.contract import Refused, text
from hicache.integrations.sglang.direct.pools import DevicePool, Part, PoolGroup, alike, make_part

FULL, SWA = ComponentType.FULL, ComponentType.SWA


def device_pools(params: Any, components: Collection[Any]) -> tuple[PoolGroup, bool]:
    """Return the pools of a model, and whether every TP rank holds the same FULL bytes.

    `params` are SGLang's CacheInitParams. Raises Refused for a model without a way to its pages.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    try:
        group = _plain(kvcache, params, set(components)) or resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=params.page_size, params=params, components=set(components)
        )
    except (ValueError, AssertionError, NotImplementedError) as error:  # how SGLang says no
        raise Refused(f"the device pools of this model ({type(kvcache).__name__}): {error}") from error
    pools = {text(entry.name): _open(entry) for entry in group.entries}
    if "kv" not in pools:
        # The model keeps everything in sidecars of a KV that only counts pages.
        pools["kv"] = DevicePool("kv", params.page_size, (), lambda indices: [])
    device = next(part.layers[0].device for pool in pools.values() for part in pool.parts)
    full = getattr(kvcache, "full_kv_pool", kvcache)
    replicated = group.rank_replicated or type(full) is MLATokenToKVPool
    return PoolGroup(pools, group.num_layers, device), replicated


def _plain(kvcache: Any, params: Any, components: set[Any]) -> DevicePoolGroup | None:
    """Return the pools of models that SGLang's own linkers leave out; None for all others."""
    page_size = params.page_size
    if type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool) and components == {FULL}:
        layers = {i: i for i in range(kvcache.layer_num)}
        entries = [_entry(PoolName.KV, kvcache, layers, page_size)]
    elif type(kvcache) is SWAKVPool and components == {FULL, SWA}:
        full, window = kvcache.full_kv_pool, kvcache.swa_kv_pool
        entries = [
            _entry(PoolName.KV, full, _layers(kvcache, window=False), page_size),
            _entry(PoolName.SWA, window, _layers(kvcache, window=True), page_size),
        ]
    else:
        return None
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ValueError("draft KV is not supported; serve without speculative decoding, or without L3")
    num_layers = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, num_layers, page_size)


def _layers(kvcache: Any, *, window: bool) -> dict[int, int]:
    return {
        layer - kvcache.start_layer: index
        for layer, (index, is_window) in kvcache.layers_mapping.items()
        if is_window == window
    }


def _entry(name: Any, pool: Any, layers: Mapping[int, int], page_size: int) -> DevicePoolEntry:
    mapping: dict[int, int | tuple[int, int]]
    if type(pool) is MLATokenToKVPool:
        buffers, mapping = [*pool.kv_buffer], {**layers}
    elif type(pool) is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd" or pool.k_scale_buffer is not None:
            raise ValueError(f"KV in layout {pool.kv_cache_layout!r} or with scales is not supported")
        buffers, count = [*pool.k_buffer, *pool.v_buffer], len(pool.k_buffer)
        mapping = {layer: (i, count + i) for layer, i in layers.items()}
    else:
        raise ValueError(f"pools of type {type(pool).__name__} are not supported")
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=[buffers],
        layer_mapping=mapping,
        page_size=page_size,
        rows_are_pages=False,
    )


def _open(entry: DevicePoolEntry) -> DevicePool:
    name = text(entry.name)
    size, buffer = entry.buffer_meta[0][0][2], entry.components[0][0]
    span = size * buffer.shape[0] // buffer.nbytes  # rows of a buffer that make a page
    due: dict[int, int] = {}
    for layer, mapped in entry.layer_mapping.items():
        for index in [mapped] if isinstance(mapped, int) else mapped:
            due[index] = min(layer, due.get(index, layer))
    parts: list[Part] = []
    for label, first, buffers in _arrays(name, entry):
        runs = list(alike(buffers))
        for i, run in enumerate(runs):
            when = [due.get(first + at, 0) for at in range(run.start, run.stop)]
            part_name = label if len(runs) == 1 else f"{label}.{i}"
            parts.append(make_part(part_name, buffers[run], when, rows_per_page=span))
    return DevicePool(name, entry.page_size, tuple(parts), _pages_of(entry, span))


def _arrays(name: str, entry: DevicePoolEntry) -> list[tuple[str, int, Sequence[torch.Tensor]]]:
    """Return (part name, index of the first buffer, buffers), named as the parts of host pools are."""
    groups = entry.components
    if name == "mamba":
        has_temporal = entry.device_pool.mamba_cache.temporal.numel() > 0
        labels = ["mamba.temporal"] * has_temporal + [f"mamba.conv{i}" for i in range(len(groups))]
        return [(label, 0, group) for label, group in zip(labels, groups, strict=False)]
    keys = getattr(entry.device_pool, "k_buffer", None)
    if len(groups) == 1 and keys and len(groups[0]) == 2 * len(keys):
        half = len(keys)
        return [(f"{name}.k", 0, groups[0][:half]), (f"{name}.v", half, groups[0][half:])]
    if len(groups) == 1:
        return [(name, 0, groups[0])]
    return [(f"{name}.{i}", 0, group) for i, group in enumerate(groups)]


def _pages_of(entry: DevicePoolEntry, span: int) -> Callable[[torch.Tensor], Sequence[int]]:
    def pages_of(indices: torch.Tensor) -> Sequence[int]:
        rows = entry.prepare_locations(entry.translate_indices(indices))
        return [row // span for row in rows]

    return pages_of
