"""What only a GPU can show: pinned copies on streams, gates that are events, and who waits for whom."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import torch

from hicache.testing.pools import FULL, MAMBA, SWA, fill, hybrid_spec, page_bytes
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostMemory, HostPools
from hicache.tiers.layouts import HostLayout
from hicache.transfer.base import JobId, LoadTicket, Move
from hicache.transfer.copy_engine import LayerPart, Pages
from hicache.transfer.cuda_copy import CudaStreams, StagedCopyEngine
from hicache.transfer.executor import TransferExecutor

CAPACITIES = {FULL: 64, SWA: 48, MAMBA: 12}
COUNTS = {FULL: 20, SWA: 11, MAMBA: 4}
SLEEP_CYCLES = 40_000_000  # some 20 ms: long against the issuing of a copy


class SlowCopies(StagedCopyEngine):
    """Every copy of a load waits on the device first, so that reading too early reads poison."""

    def load_part(self, part: LayerPart, pages: Pages) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        super().load_part(part, pages)


class Rig:
    """Pools on the GPU and pinned pools on the host, with a choice of engine."""

    def __init__(
        self,
        page_size: int = 16,
        layout: HostLayout = HostLayout.LAYER_FIRST,
        *,
        engine: type[StagedCopyEngine] = StagedCopyEngine,
        direct_run_bytes: int = 1,
    ) -> None:
        self.spec = hybrid_spec(page_size)
        self.device = DevicePools(self.spec, CAPACITIES, "cuda")
        self.host = HostPools(self.spec, CAPACITIES, layout, HostMemory.PINNED)
        fill_cuda(self.device, page_size)
        copy = engine(
            self.device,
            self.host,
            CudaStreams(self.device.device),
            staging_bytes=1 << 16,
            direct_run_bytes=direct_run_bytes,
        )
        self.executor = TransferExecutor(self.spec, self.device, self.host, copy=copy)
        self._jobs = 0

    def job(self) -> JobId:
        self._jobs += 1
        return JobId(self._jobs)

    def write(self, moves: list[Move]) -> None:
        self.executor.start_write(self.job(), moves)
        self.end()

    def end(self) -> None:
        assert self.executor.wait(30)
        (done,) = self.executor.poll()
        assert not done.failed

    def close(self) -> None:
        self.executor.close()
        self.host.close()


def fill_cuda(pools: DevicePools, seed: int) -> None:
    """The same random bytes as on the CPU, copied over."""
    twin = DevicePools(pools.spec, pools.capacities)
    fill(twin, seed)
    for family in pools.spec.components:
        for pool, tensor in pools.component_pools(family.component):
            tensor.view(torch.uint8).copy_(twin.pool(pool.name).view(torch.uint8))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("direct_run_bytes", [1, 1 << 40], ids=["direct", "staged"])
def test_a_page_comes_back_from_pinned_memory_with_the_bytes_it_left_with(
    layout: HostLayout, page_size: int, direct_run_bytes: int
) -> None:
    """Law 1 on a GPU: L1 to L2 to other pages of L1, every sidecar, neighbours untouched."""
    rig = Rig(page_size, layout, direct_run_bytes=direct_run_bytes)
    rng = random.Random(page_size)
    slots = {
        c: [array("i", rng.sample(range(CAPACITIES[c]), n)) for _ in range(3)] for c, n in COUNTS.items()
    }
    truth = {c: [page_bytes(rig.device, c, slot) for slot in slots[c][0]] for c in COUNTS}
    rig.write([Move(c, slots[c][0], slots[c][1]) for c in COUNTS])
    assert {c: [page_bytes(rig.host, c, slot) for slot in slots[c][1]] for c in COUNTS} == truth
    others = {c: [s for s in range(CAPACITIES[c]) if s not in slots[c][2]] for c in COUNTS}
    for c in COUNTS:
        rig.device.poison(c, slots[c][2])
    before = {c: [page_bytes(rig.device, c, slot) for slot in others[c]] for c in COUNTS}
    ticket = rig.executor.start_load(rig.job(), [Move(c, slots[c][1], slots[c][2]) for c in COUNTS])
    for layer in range(len(rig.spec.layers)):
        ticket.wait_layer(layer)
    rig.end()
    assert ticket.done()
    assert {c: [page_bytes(rig.device, c, slot) for slot in slots[c][2]] for c in COUNTS} == truth
    assert {c: [page_bytes(rig.device, c, slot) for slot in others[c]] for c in COUNTS} == before
    rig.close()


def test_host_pools_are_page_locked(rig: Rig) -> None:
    """Pageable memory makes every copy synchronous, and overlap nothing."""
    assert rig.host.pool("full_kv").is_pinned()
    assert rig.host.pool("mamba_conv").is_pinned()


def _read_behind_gates(rig: Rig, ticket: LoadTicket, targets: array[int]) -> dict[str, torch.Tensor]:
    """What the compute stream reads of FULL, each layer behind its gate only."""
    index = torch.tensor(targets.tolist(), device="cuda")
    seen: dict[str, list[torch.Tensor]] = {}
    at = 0
    for layer, component in enumerate(rig.spec.layers):
        if component is not FULL:
            continue
        ticket.wait_layer(layer)
        for pool in rig.spec[FULL].pools[:2]:
            seen.setdefault(pool.name, []).append(rig.device.pool(pool.name)[at, index].clone())
        at += 1
    return {name: torch.stack(layers) for name, layers in seen.items()}


def test_the_compute_stream_waits_for_a_gate_and_the_thread_does_not() -> None:
    """A gate that blocks the thread stalls the scheduler; one that orders nothing reads stale rows."""
    rig = Rig(engine=SlowCopies)
    sources, targets = array("i", range(8)), array("i", range(20, 28))
    rig.write([Move(FULL, sources, sources)])
    truth = {p.name: rig.device.pool(p.name)[:, :8].clone() for p in rig.spec[FULL].pools[:2]}
    rig.device.poison(FULL, targets)
    torch.cuda.synchronize()
    ticket = rig.executor.start_load(rig.job(), [Move(FULL, sources, targets)])
    early = rig.device.pool("full_kv")[1, 20].clone()  # behind no gate: the control of this test
    seen = _read_behind_gates(rig, ticket, targets)
    assert not ticket.done()  # the thread got here while copies were still on their way
    torch.cuda.synchronize()
    assert set(early.view(torch.uint8).cpu().numpy().tobytes()) == {0xFF}
    for name, layers in seen.items():
        assert torch.equal(layers.view(torch.uint8), truth[name].view(torch.uint8)), name
    rig.end()
    rig.close()


def test_a_load_waits_for_readers_queued_before_it(rig: Rig) -> None:
    """A freed page may still be read by the step that is running: the load must not overtake it."""
    source, target = array("i", [3]), array("i", [9])
    rig.write([Move(FULL, source, source)])
    old = rig.device.pool("full_kv")[:, 9].clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = rig.device.pool("full_kv")[:, 9].clone()  # the last reader, still queued
    ticket = rig.executor.start_load(rig.job(), [Move(FULL, source, target)])
    ticket.wait_layer(len(rig.spec.layers) - 1)
    fresh = rig.device.pool("full_kv")[:, 9].clone()
    torch.cuda.synchronize()
    assert torch.equal(read.view(torch.uint8), old.view(torch.uint8))
    want = rig.device.pool("full_kv")[:, 3]
    assert torch.equal(fresh.view(torch.uint8), want.view(torch.uint8))
    rig.end()


def test_a_write_takes_pages_as_the_compute_stream_leaves_them(rig: Rig) -> None:
    """The step that fills a page is often still queued when its write-through begins."""
    torch.cuda._sleep(SLEEP_CYCLES)
    rig.device.pool("full_kv")[:, 5].fill_(1.5)
    rig.executor.start_write(rig.job(), [Move(FULL, array("i", [5]), array("i", [7]))])
    rig.end()
    assert rig.host.pool("full_kv")[:, 7].eq(1.5).all()


def test_a_state_is_copied_in_the_order_of_the_compute_stream(rig: Rig) -> None:
    """Copy-on-write ahead of the kernel that produces the state copies the one before."""
    torch.cuda._sleep(SLEEP_CYCLES)
    rig.device.pool("mamba_state")[:, 2].fill_(2.5)
    rig.executor.copy_state(2, 6)
    rig.device.pool("mamba_state")[:, 2].fill_(-1.0)
    torch.cuda.synchronize()
    assert rig.device.pool("mamba_state")[:, 6].eq(2.5).all()
