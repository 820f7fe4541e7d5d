"""Device pools and transfers as SGLang's linkers get them, and ranks that share one store.

Fakes: the pools are ordinary memory on a CPU; the linker core, its threads and the store are the real ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache.clock import Clock, SystemClock
from hicache.integrations.sglang.direct.core import LinkerCore
from hicache.integrations.sglang.direct.pools import DevicePool, Part, PoolGroup, make_part
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.integrations.sglang.identity import freeze
from hicache.integrations.sglang.settings import Settings
from hicache.integrations.sglang.store import ObjectStore
from hicache.storage_backends.base import StorageBackend
from hicache.testing.sglang_pools import FakeConfig
from hicache.transfer.counters import Counters

PAGE, PAGES, LAYERS = 4, 32, 3


def keys(count: int, *, chain: str = "a") -> list[str]:
    """Page hashes as SGLang writes them."""
    return [hashlib.sha256(f"{chain}{i}".encode()).hexdigest() for i in range(count)]


@dataclass
class Transfer:
    """PoolTransfer, as far as linkers need it."""

    name: str
    keys: list[str] | None
    device_indices: torch.Tensor | None = None


def tokens(pages: Sequence[int], page_size: int = PAGE) -> torch.Tensor:
    """Return one index per token of these pages."""
    return torch.tensor([page * page_size + row for page in pages for row in range(page_size)])


def _pool(name: str, parts: Sequence[Part], page_size: int = PAGE) -> DevicePool:
    def pages_of(indices: torch.Tensor) -> list[int]:
        if indices.numel() % page_size:
            raise ValueError(f"{indices.numel()} indices are no whole pages")
        found: list[int] = (indices[::page_size] // page_size).tolist()
        return found

    return DevicePool(name, page_size, tuple(parts), pages_of)


def _buffers(layers: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(layers)]


def plain() -> PoolGroup:
    """Keys and values of every layer."""
    due = range(LAYERS)
    rows = PAGES * PAGE
    parts = [make_part(f"kv.{part}", _buffers(LAYERS, rows, 2, 8), due, rows_per_page=PAGE) for part in "kv"]
    return PoolGroup({"kv": _pool("kv", parts)}, LAYERS, torch.device("cpu"))


def window() -> PoolGroup:
    """Full attention in the last layer, a sliding window in the others, and states between them."""
    rows = PAGES * PAGE
    kv = make_part("kv", _buffers(1, rows, 1, 10), [2], rows_per_page=PAGE)
    swa = make_part("swa", _buffers(2, rows, 1, 6), [0, 1], rows_per_page=PAGE)
    state = make_part("swa_state", _buffers(2, PAGES, 12), [0, 1], rows_per_page=1)
    mamba = make_part("mamba.temporal", _buffers(1, PAGES, 20), [1], rows_per_page=1)
    pools = {
        "kv": _pool("kv", [kv]),
        "swa": _pool("swa", [swa]),
        "deepseek_v4_c4_state": _pool("deepseek_v4_c4_state", [state]),
        "mamba": _pool("mamba", [mamba], 1),
    }
    return PoolGroup(pools, LAYERS, torch.device("cpu"))


def page_bytes(group: PoolGroup, pool: str, page: int) -> bytes:
    """Everything of one page, all parts and layers."""
    return b"".join(bytes(layer[page].numpy()) for part in group.pools[pool].parts for layer in part.layers)


@dataclass
class Rank:
    """One rank's linker on its own pools."""

    group: PoolGroup
    core: LinkerCore
    counters: Counters
    config: FakeConfig = field(default_factory=FakeConfig)

    def counter(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)


def make_rank(
    group: PoolGroup,
    backend: StorageBackend,
    *,
    bounds: Bounds | None = None,
    config: FakeConfig | None = None,
    agree: Callable[[bool], bool] | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Rank:
    """Return a linker as the class that SGLang loads would make it."""
    config = config or FakeConfig()
    given: Mapping[str, Any] = {"backend": "memory", "weight_version": "1", **settings}
    identity = freeze(config, Settings(**given), group.pools, facts={}, layers=(0, 0))
    counters, clock = Counters(), clock or SystemClock()
    store = ObjectStore(identity, lambda: backend, clock=clock, counters=counters, call_timeout_s=5.0)
    core = LinkerCore(
        identity,
        group,
        store,
        bounds=bounds or Bounds(),
        writes=lambda kind: config.is_storage_writer,
        agree=agree,
        clock=clock,
        counters=counters,
    )
    return Rank(group, core, counters, config)
