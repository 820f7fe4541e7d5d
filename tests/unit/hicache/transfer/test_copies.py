"""Bytes between device and host: every pool, layout and page size, by every engine."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from hicache.errors import InvariantViolation, SpecError
from hicache.spec import ModelSpec
from hicache.testing.pools import FULL, MAMBA, SWA, fill, hybrid_spec, page_bytes
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.tiers.layouts import HostLayout
from hicache.transfer import copy_engine
from hicache.transfer.base import JobId, JobKind, Move
from hicache.transfer.copy_engine import CopyEngine, CpuCopyEngine, layer_schedule
from hicache.transfer.cuda_copy import NoStreams, StagedCopyEngine
from hicache.transfer.executor import TransferExecutor
from hicache.types import Component

DEVICE = {FULL: 23, SWA: 19, MAMBA: 7}
HOST = {FULL: 41, SWA: 31, MAMBA: 11}


def make_engine(kind: str, device: DevicePools, host: HostPools) -> CopyEngine:
    if kind == "cpu":
        return CpuCopyEngine(device, host)
    direct = 1 if kind == "direct" else 1 << 40
    return StagedCopyEngine(device, host, NoStreams(), staging_bytes=1 << 12, direct_run_bytes=direct)


def slots(component: Component, capacity: dict[Component, int], count: int, seed: int) -> array[int]:
    """Scattered slots with some runs among them."""
    start = random.Random(seed).randrange(capacity[component] - 3)
    run = [start, start + 1, start + 2]
    rest = [slot for slot in range(capacity[component]) if slot not in run]
    return array("i", (run + random.Random(seed).sample(rest, len(rest)))[:count])


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("scratch_bytes", [1, 500, 2048, 10_000])
def test_pages_larger_than_the_scratch_and_copies_of_many_pieces_come_back(
    scratch_bytes: int, layout: HostLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models have layers of pages larger than any fixed buffer; a copy that is cut must lose nothing."""
    monkeypatch.setattr(copy_engine, "_SCRATCH_BYTES", scratch_bytes)
    test_a_page_comes_back_from_the_host_with_the_bytes_it_left_with("cpu", 16, layout)


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["cpu", "staged", "direct"])
def test_a_page_comes_back_from_the_host_with_the_bytes_it_left_with(
    kind: str, page_size: int, layout: HostLayout
) -> None:
    """Law 1: L1 to L2, eviction, L2 to other pages of L1; every sidecar too, neighbours untouched."""
    spec = hybrid_spec(page_size)
    device, host = DevicePools(spec, DEVICE), HostPools(spec, HOST, layout)
    fill(device, page_size)
    executor = TransferExecutor(spec, device, host, copy=make_engine(kind, device, host), synchronous=True)
    counts = {FULL: 9, SWA: 5, MAMBA: 3}
    sources = {c: slots(c, DEVICE, n, 1) for c, n in counts.items()}
    parked = {c: slots(c, HOST, n, 2) for c, n in counts.items()}
    targets = {c: slots(c, DEVICE, n, 3) for c, n in counts.items()}
    truth = {c: [page_bytes(device, c, slot) for slot in sources[c]] for c in counts}

    executor.start_write(JobId(1), [Move(c, sources[c], parked[c]) for c in counts])
    assert {c: [page_bytes(host, c, slot) for slot in parked[c]] for c in counts} == truth
    others = {c: [s for s in range(DEVICE[c]) if s not in targets[c]] for c in counts}
    for c in counts:
        device.poison(c, targets[c])
    before = {c: [page_bytes(device, c, slot) for slot in others[c]] for c in counts}

    ticket = executor.start_load(JobId(2), [Move(c, parked[c], targets[c]) for c in counts])
    for layer in range(len(spec.layers)):
        ticket.wait_layer(layer)
    assert ticket.done()
    assert {c: [page_bytes(device, c, slot) for slot in targets[c]] for c in counts} == truth
    assert {c: [page_bytes(device, c, slot) for slot in others[c]] for c in counts} == before
    assert [done.kind for done in executor.poll()] == [JobKind.WRITE, JobKind.LOAD]
    moved = sum(n * spec[c].page_bytes for c, n in counts.items())
    assert executor.counters()["write_bytes"] == executor.counters()["load_bytes"] == moved
    executor.close()


def test_several_moves_of_one_component_are_one_copy() -> None:
    """The cache may plan one path in pieces."""
    spec = hybrid_spec(16)
    device, host = DevicePools(spec, DEVICE), HostPools(spec, HOST)
    fill(device, 5)
    executor = TransferExecutor(spec, device, host, synchronous=True)
    executor.start_write(
        JobId(1),
        [Move(FULL, array("i", [1]), array("i", [7])), Move(FULL, array("i", [5, 2]), array("i", [0, 40]))],
    )
    for source, target in ((1, 7), (5, 0), (2, 40)):
        assert page_bytes(host, FULL, target) == page_bytes(device, FULL, source)
    executor.close()


def test_every_layer_of_every_pool_is_scheduled_exactly_once_and_in_time() -> None:
    """A pool left out keeps what the last owner wrote; one scheduled late is read before it is there."""
    spec: ModelSpec = hybrid_spec(16)
    schedule = layer_schedule(spec)
    parts = [(part.pool, part.layer) for parts in schedule for part in parts]
    wanted = {(p.name, layer) for c in spec.components for p in c.pools for layer in range(p.num_layers)}
    assert len(parts) == len(wanted)
    assert set(parts) == wanted
    by_layer = [[(part.pool, part.layer) for part in parts] for parts in schedule]
    assert by_layer[0] == [("swa_kv", 0)]
    assert by_layer[1] == [
        *(("full_kv", 0), ("full_index", 0)),
        *(("full_draft", 0), ("full_draft", 1), ("full_draft", 2)),
    ]
    assert by_layer[4] == [("full_kv", 1), ("full_index", 1)]


@pytest.mark.parametrize("bad", [-1, 41])
def test_a_slot_outside_the_pool_is_refused_before_anything_moves(bad: int) -> None:
    """A tombstone (-1) among the slots would wrap round to a page of somebody else."""
    spec = hybrid_spec(16)
    device, host = DevicePools(spec, DEVICE), HostPools(spec, HOST)
    executor = TransferExecutor(spec, device, host, synchronous=True)
    with pytest.raises(InvariantViolation, match="host FULL"):
        executor.start_load(JobId(1), [Move(FULL, array("i", [3, bad]), array("i", [0, 1]))])
    with pytest.raises(ValueError, match="2 sources but 1 targets"):
        executor.start_load(JobId(1), [Move(FULL, array("i", [3, 4]), array("i", [0]))])
    assert executor.poll() == []
    executor.close()


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("change", "message"), [("lost", "is missing"), ("narrow", "another shape")])
def test_a_pool_without_a_mirror_on_some_tier_is_refused(tier: str, change: str, message: str) -> None:
    """A sidecar that stays behind is read as whatever its page held before."""
    spec = hybrid_spec(16)
    for family in (c.component for c in spec.components):
        for number in range(len(spec[family].pools)):
            pools = list(spec[family].pools)
            if change == "narrow":
                pools[number] = replace(pools[number], row_shape=(1, *pools[number].row_shape))
            elif number:
                del pools[number]
            else:
                continue
            components = [
                replace(c, pools=tuple(pools)) if c.component is family else c for c in spec.components
            ]
            other = replace(spec, components=tuple(components))
            sizes = {FULL: 2, SWA: 2, MAMBA: 2}
            device = DevicePools(other if tier == "device" else spec, sizes)
            host = HostPools(other if tier == "host" else spec, sizes)
            with pytest.raises(SpecError, match=f"{message} on the {tier}.*whole, or not at all"):
                TransferExecutor(spec, device, host, synchronous=True)
