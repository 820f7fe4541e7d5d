"""The external linker on real device memory: copies on their own stream, behind events, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from hicache.integrations.sglang.direct.blocks import CudaCopier
from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.sglang_device import (
    LAYERS,
    Rank,
    Shared,
    families,
    keys,
    make_rank,
    plain,
    same,
    until,
    window,
)

SLEEP_CYCLES = 40_000_000  # some 20 ms: long against the issuing of a copy


def moved(group: PoolGroup, device: torch.device) -> PoolGroup:
    """The same pools in other memory."""
    pools = {}
    for name, pool in group.pools.items():
        parts = [
            replace(part, layers=tuple(layer.to(device, copy=True) for layer in part.layers))
            for part in pool.parts
        ]
        pools[name] = replace(pool, parts=tuple(parts))
    return replace(group, pools=pools, device=device)


def on_device(group: PoolGroup) -> PoolGroup:
    """The pools of a rank."""
    return moved(group, torch.device("cuda", torch.cuda.current_device()))


def on_host(group: PoolGroup) -> PoolGroup:
    """A copy of the pools that can be compared."""
    torch.cuda.synchronize()
    return moved(group, torch.device("cpu"))


@pytest.fixture
def ranks() -> Iterator[Callable[[PoolGroup], Rank]]:
    """Return a function that makes linkers on one store."""
    shared = Shared(MemoryBackend(capacity_bytes=64 << 20))
    made: list[Rank] = []

    def make(group: PoolGroup) -> Rank:
        made.append(make_rank(on_device(group), shared))
        return made[-1]

    yield make
    for one in made:
        one.core.close()


def ready() -> Sequence[torch.cuda.Event]:
    """An event behind everything on the current stream, as SGLang hands them over."""
    event = torch.cuda.Event()
    event.record()
    return [event]


def offloaded(one: Rank, chain: Sequence[str], pages: Sequence[int]) -> bool:
    assert one.core.offload(families(one.group, chain, pages), ready)
    until(lambda: one.core.num_answers() > 0)
    return one.core.pop_answer()


def landed(one: Rank) -> bool:
    """Load as a forward pass would, waiting at every gate."""
    index = one.core.start(ready)
    one.core.gates.set_consumer(index)
    for layer in range(LAYERS):
        one.core.gates.wait_until(layer)
    return one.core.finish(index)


@pytest.mark.parametrize("pools", [plain, window])
def test_a_load_brings_the_bytes_that_were_offloaded(
    ranks: Callable[[PoolGroup], Rank], pools: Callable[[], PoolGroup]
) -> None:
    """The copy kernels of a GPU are others than those of a CPU; a wrong row changes what a model says."""
    a, b = ranks(pools()), ranks(pools())
    chain, source, target = keys(9), [3, 1, 4, 5, 9, 2, 6, 8, 7], [20, 11, 12, 13, 31, 30, 9, 10, 5]
    assert offloaded(a, chain, source)
    assert b.core.lookup("r", families(b.group, chain)) == [9]
    assert b.core.load("r", families(b.group, chain, target))
    assert landed(b)
    assert same(on_host(b.group), target, on_host(a.group), source)


def test_an_offload_waits_for_the_kernels_that_compute_the_pages(ranks: Callable[[PoolGroup], Rank]) -> None:
    """SGLang hands pages over while the forward pass that writes them is still running."""
    a, b = ranks(plain()), ranks(plain())
    chain, pages = keys(4), [1, 2, 3, 4]
    torch.cuda._sleep(SLEEP_CYCLES)
    for part in a.group.pools["kv"].parts:
        for layer in part.layers:
            layer.fill_(77)
    assert offloaded(a, chain, pages)
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    assert b.core.load("r", families(b.group, chain, pages))
    assert landed(b)
    for part in on_host(b.group).pools["kv"].parts:
        for layer in part.layers:
            assert bool((layer[1:5] == 77).all())


def test_a_load_waits_for_the_last_reader_of_its_slots(ranks: Callable[[PoolGroup], Rank]) -> None:
    """Slots come from the allocator while a forward pass may still read what they held."""
    a, b = ranks(plain()), ranks(plain())
    chain, pages = keys(4), [1, 2, 3, 4]
    assert offloaded(a, chain, pages)
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    layer = b.group.pools["kv"].parts[0].layers[0]
    before = layer.clone()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = layer.clone()  # the reader, behind the pause
    assert b.core.load("r", families(b.group, chain, pages))
    assert landed(b)
    assert torch.equal(read, before)
    assert not torch.equal(layer[1:5], before[1:5])


def test_a_gate_holds_the_stream_that_computes_until_its_layer_is_there(
    ranks: Callable[[PoolGroup], Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a layer before its copy is reading another request's KV."""
    a, b = ranks(plain()), ranks(plain())
    chain, pages = keys(6), [1, 2, 3, 4, 5, 6]
    assert offloaded(a, chain, pages)
    assert b.core.lookup("r", families(b.group, chain)) == [6]
    load = CudaCopier.load

    def slow(self: CudaCopier, part: object, layer: int, rows: object, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        load(self, part, layer, rows, source)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaCopier, "load", slow)
    assert b.core.load("r", families(b.group, chain, pages))
    index = b.core.start(ready)
    b.core.gates.set_consumer(index)
    seen = []
    for layer in range(LAYERS):
        b.core.gates.wait_until(layer)
        seen.append([part.layers[layer].clone() for part in b.group.pools["kv"].parts])
    assert b.core.finish(index)
    whole = on_host(a.group).pools["kv"].parts
    for layer, copies in enumerate(seen):
        for part, copy in zip(whole, copies, strict=True):
            assert torch.equal(copy.cpu()[1:7], part.layers[layer][1:7])
