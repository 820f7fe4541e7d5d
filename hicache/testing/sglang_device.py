"""Device pools and transfers as SGLang's linkers get them, and ranks that share one store.

Fakes: the pools are ordinary memory on a CPU; the linker core, its threads and the store are the real ones.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache.clock import Clock, SystemClock
from hicache.errors import BackendUnavailable
from hicache.integrations.sglang.direct.core import LinkerCore
from hicache.integrations.sglang.direct.pools import DevicePool, Part, PoolGroup, make_part
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.integrations.sglang.identity import Identity, freeze
from hicache.integrations.sglang.settings import Settings
from hicache.integrations.sglang.store import ObjectStore
from hicache.keys import object_key
from hicache.storage_backends.base import StorageBackend
from hicache.testing.sglang_pools import FakeConfig
from hicache.transfer.counters import Counters

PAGE, PAGES, LAYERS = 4, 32, 3
BOUND_S = 60.0
WINDOW = 2  # pages


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
    identity: Identity

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
    return Rank(group, core, counters, identity)


class Shared:
    """One store behind several linkers: their close() leaves it open. Calls can be held or made to fail."""

    def __init__(self, store: StorageBackend) -> None:
        self._store = store
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.dead = False
        self.calls: list[str] = []

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        self.entered.set()
        assert self.gate.wait(BOUND_S)
        if self.dead:
            raise BackendUnavailable("dead")
        return getattr(self._store, name)(*arguments)

    def probe(self, *arguments: Any) -> Any:
        return self._call("probe", *arguments)

    def read(self, *arguments: Any) -> Any:
        return self._call("read", *arguments)

    def begin_write(self, *arguments: Any) -> Any:
        return self._call("begin_write", *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Stays open for the others."""


def until(true: Callable[[], bool]) -> None:
    """Poll until something holds. Raises AssertionError if that takes too long."""
    deadline = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def nothing() -> Sequence[object]:
    """No events: on a CPU there are none to wait for."""
    return ()


def families(group: PoolGroup, chain: Sequence[str], pages: Sequence[int] = ()) -> list[Transfer]:
    """What SGLang passes for a chain: FULL all of it, SWA its last pages, MAMBA its end."""
    made = [Transfer("kv", list(chain), tokens(pages) if pages else None)]
    if "swa" in group.pools:
        tail = chain[-WINDOW:]
        made.append(Transfer("swa", list(tail), tokens(pages[-len(tail) :]) if pages else None))
    if "mamba" in group.pools:
        made.append(Transfer("mamba", [chain[-1]], tokens(pages[-1:], 1) if pages else None))
    return made


def stored(one: Rank, chain: Sequence[str], pages: Sequence[int]) -> bool:
    """Offload a chain and return the answer."""
    before = one.core.num_answers()
    assert one.core.offload(families(one.group, chain, pages), nothing)
    until(lambda: one.core.num_answers() > before)
    return one.core.pop_answer()


def loaded(one: Rank, rid: str, chain: Sequence[str], pages: Sequence[int]) -> bool:
    """Load a chain as a forward pass would, waiting at every gate."""
    assert one.core.load(rid, families(one.group, chain, pages))
    index = one.core.start(nothing)
    one.core.gates.set_consumer(index)
    for layer in range(LAYERS):
        one.core.gates.wait_until(layer)
    return one.core.finish(index)


def same(ours: PoolGroup, pages: Sequence[int], theirs: PoolGroup, others: Sequence[int]) -> bool:
    """Whether everything that a prefix of these pages needs has the same bytes."""
    needed = {"kv": len(pages), "swa": WINDOW, "deepseek_v4_c4_state": WINDOW, "mamba": 1}
    return all(
        page_bytes(ours, pool, mine) == page_bytes(theirs, pool, other)
        for pool in ours.pools
        for mine, other in list(zip(pages, others, strict=True))[-needed[pool] :]
    )


def object_of(one: Rank, pool: str, page: str) -> list[str]:
    """Return the key of the object that has a page of this pool."""
    family = one.identity.by_pool[pool]
    return [object_key(one.identity.spec.fingerprint, family.shard, family.component, bytes.fromhex(page))]


def zero(store: Shared, key: list[str]) -> None:
    """Replace an object by zeros of the same size."""
    (size,) = store.read(key, [memoryview(bytearray(1 << 16))])
    store.delete(key)
    (reservation,) = store.begin_write(key, [size])
    reservation.buffer[:] = bytes(size)
    store.commit([reservation])


class Hold:
    """A copier of a real one that stops before a layer until it is let go."""

    def __init__(self, copier: Any, layer: int) -> None:
        self._copier = copier
        self._layer = layer
        self.go = threading.Event()

    def load(self, part: Any, layer: int, rows: Any, source: torch.Tensor) -> None:
        if layer == self._layer:
            assert self.go.wait(BOUND_S)
        self._copier.load(part, layer, rows, source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)


class HoldStores(Hold):
    """The same for copies off the device."""

    def __init__(self, copier: Any, layer: int) -> None:
        super().__init__(copier, -1)
        self._held_layer = layer
        self.entered = threading.Event()

    def store(self, part: Any, layer: int, rows: Any, target: torch.Tensor) -> None:
        if layer == self._held_layer:
            self.entered.set()
            assert self.go.wait(BOUND_S)
        self._copier.store(part, layer, rows, target)
