"""Layer-wise loads: nobody reads a layer before every pool of it is there, and nobody waits for ever."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from hicache.errors import HiCacheError, InvariantViolation
from hicache.testing.pools import FULL, MAMBA, SWA, GatedCopyEngine, fill, hybrid_spec, page_bytes
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.transfer.base import JobId, JobKind, Move
from hicache.transfer.copy_engine import CpuCopyEngine, LayerPart, layer_schedule
from hicache.transfer.executor import TransferExecutor
from hicache.transfer.load import Load

SPEC = hybrid_spec(16)
SCHEDULE = layer_schedule(SPEC)
PARTS = [part for parts in SCHEDULE for part in parts]
MOVES = [
    Move(FULL, array("i", [3, 0]), array("i", [2, 5])),
    Move(SWA, array("i", [1]), array("i", [4])),
    Move(MAMBA, array("i", [2]), array("i", [0])),
]


class Bench:
    """An executor whose copy thread moves only as far as a test allows."""

    def __init__(self, *, fail_on: tuple[str, int] | None = None, bad: Collection[int] | None = None) -> None:
        capacities = {FULL: 8, SWA: 8, MAMBA: 4}
        self.device, self.host = DevicePools(SPEC, capacities), HostPools(SPEC, capacities)
        source = DevicePools(SPEC, capacities)
        fill(source, 3)
        filler = TransferExecutor(SPEC, source, self.host, synchronous=True)
        filler.start_write(
            JobId(0), [Move(c, array("i", range(n)), array("i", range(n))) for c, n in capacities.items()]
        )
        filler.close()
        for kind, n in capacities.items():
            self.device.poison(kind, range(n))
        self.gate = GatedCopyEngine(CpuCopyEngine(self.device, self.host), fail_on=fail_on, bad=bad)
        self.executor = TransferExecutor(SPEC, self.device, self.host, copy=self.gate)
        self.reader = ThreadPoolExecutor(1)

    def read(self, ticket_wait: object, layer: int) -> Future[None]:
        return self.reader.submit(ticket_wait, layer)  # type: ignore[arg-type]

    def close(self) -> None:
        self.gate.allow(1000)
        self.executor.close()
        self.reader.shutdown()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.mark.parametrize("layer", range(len(SCHEDULE)))
def test_a_reader_of_a_layer_waits_for_the_last_pool_of_its_family(bench: Bench, layer: int) -> None:
    """A sidecar behind no gate, or a gate opened one pool too early, gives stale rows and no error."""
    before = sum(len(parts) for parts in SCHEDULE[:layer])
    ticket = bench.executor.start_load(JobId(1), MOVES)
    waiting = bench.read(ticket.wait_layer, layer)
    bench.gate.allow(before + len(SCHEDULE[layer]) - 1)  # all but the layer's last pool
    bench.gate.wait_until_held_at(before + len(SCHEDULE[layer]) - 1)
    with pytest.raises(FutureTimeout):
        waiting.result(timeout=0.02)
    assert not ticket.done()
    bench.gate.allow(1)
    waiting.result(timeout=60)
    for part in SCHEDULE[layer]:
        move = next(m for m in MOVES if m.component is part.component)
        for source, target in zip(move.sources, move.targets, strict=True):
            size = next(p for p in SPEC[part.component].pools if p.name == part.pool).layer_page_bytes
            at = part.layer * size
            assert (
                page_bytes(bench.device, part.component, target)[part.pool][at : at + size]
                == page_bytes(bench.host, part.component, source)[part.pool][at : at + size]
            )


def test_earlier_layers_are_open_while_later_ones_are_on_their_way(bench: Bench) -> None:
    """Without this a load hides behind no compute."""
    ticket = bench.executor.start_load(JobId(1), MOVES)
    bench.gate.allow(sum(len(parts) for parts in SCHEDULE[:3]))
    for layer in range(3):
        bench.read(ticket.wait_layer, layer).result(timeout=60)
    assert not ticket.done()
    assert bench.executor.poll() == []


def test_loads_queue_and_end_in_order(bench: Bench) -> None:
    """A second request's load must neither overtake nor disturb the first."""
    first = bench.executor.start_load(JobId(1), MOVES[:1])
    second = bench.executor.start_load(JobId(2), MOVES[1:])
    bench.gate.allow(sum(1 for part in PARTS if part.component is FULL))
    bench.read(first.wait_layer, len(SCHEDULE) - 1).result(timeout=60)
    assert not second.done()
    bench.gate.allow(len(PARTS))
    bench.read(second.wait_layer, len(SCHEDULE) - 1).result(timeout=60)
    done = []
    while len(done) < 2:
        assert bench.executor.wait(60)
        done += bench.executor.poll()
    assert [(d.job, d.kind, d.failed) for d in done] == [(1, JobKind.LOAD, False), (2, JobKind.LOAD, False)]


@pytest.mark.parametrize("broken", [(part.pool, part.layer) for part in PARTS])
def test_a_copy_that_fails_wakes_every_reader_with_the_reason(broken: tuple[str, int]) -> None:
    """Whatever step fails: an engine that waits at a gate for ever looks like a hung GPU."""
    bench = Bench(fail_on=broken)
    ticket = bench.executor.start_load(JobId(1), MOVES)
    waiting = bench.read(ticket.wait_layer, len(SCHEDULE) - 1)
    bench.gate.allow(len(PARTS))
    with pytest.raises(HiCacheError, match=f"load 1: .*{broken[0]} layer {broken[1]}"):
        waiting.result(timeout=60)
    assert bench.executor.wait(60)
    assert [(d.job, d.failed) for d in bench.executor.poll()] == [(1, True)]
    assert bench.executor.counters()["load_failed"] == 1

    again = bench.executor.start_load(JobId(2), [])  # the copy thread has survived
    again.wait_layer(0)
    assert bench.executor.wait(60)
    assert [d.failed for d in bench.executor.poll()] == [False]
    bench.close()


@pytest.mark.parametrize(
    ("pool", "flags"),
    [("full_index", b"\1\1\0\0\1\1"), ("swa_kv", b"\1\1\1\1\0\1"), ("mamba_conv", b"\1" * 6)],
)
def test_a_load_that_fails_says_which_pages_can_be_copied(pool: str, flags: bytes) -> None:
    """One page that cannot be read would cost all the others; of FULL those behind it are of no use."""
    bench = Bench(fail_on=(pool, 0), bad={5})
    moves = [
        Move(FULL, array("i", [3, 2, 5, 7]), array("i", [0, 1, 2, 3])),
        Move(SWA, *[array("i", [5, 6])] * 2),
    ]
    bench.executor.start_load(JobId(1), moves)
    bench.gate.allow(1000)
    assert bench.executor.wait(60)
    (done,) = bench.executor.poll()
    assert done.failed is (0 in flags)
    assert done.flags == (flags if done.failed else b"")
    bench.close()


def test_a_write_that_fails_is_reported_as_failed() -> None:
    """The cache must not publish host pages that were filled in part."""
    bench = Bench(fail_on=("full_index", 1))
    bench.executor.start_write(JobId(4), [Move(FULL, array("i", [0]), array("i", [0]))])
    assert bench.executor.wait(60)
    assert [(d.job, d.kind, d.failed) for d in bench.executor.poll()] == [(4, JobKind.WRITE, True)]
    bench.close()


def test_a_broken_law_on_a_worker_reaches_the_caches_thread() -> None:
    """Law violations crash; swallowed in a thread they would become wrong answers."""

    class Lawless(GatedCopyEngine):
        def write_part(self, part: object, pages: object) -> None:
            raise InvariantViolation("slot 3 is owned twice")

    capacities = {FULL: 8, SWA: 8, MAMBA: 4}
    device, host = DevicePools(SPEC, capacities), HostPools(SPEC, capacities)
    executor = TransferExecutor(SPEC, device, host, copy=Lawless(CpuCopyEngine(device, host)))
    executor.start_write(JobId(1), [Move(FULL, array("i", [0]), array("i", [0]))])
    assert executor.wait(60)
    with pytest.raises(InvariantViolation, match="owned twice"):
        executor.poll()
    executor.close()


def test_close_returns_in_time_although_a_copy_is_stuck() -> None:
    """A server that cannot be stopped is killed, and loses what it should have flushed."""
    bench = Bench()
    executor = TransferExecutor(SPEC, bench.device, bench.host, copy=bench.gate, close_timeout_s=0.2)
    executor.start_load(JobId(1), MOVES)
    closed = threading.Thread(target=executor.close)
    closed.start()
    closed.join(timeout=60)
    assert not closed.is_alive()
    bench.close()


def test_waiting_with_nothing_in_flight_ends_by_itself() -> None:
    """An idle scheduler sleeps in wait()."""
    bench = Bench()
    assert not bench.executor.wait(0.0)
    assert bench.executor.poll() == []
    bench.close()


class Marking(CpuCopyEngine):
    """An engine whose copies happen when their mark is waited for, as on a stream of a device."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, int]] = []
        self.waited: list[object] = []
        self.reached = 0

    def load_part(self, part: LayerPart, pages: object) -> None:
        self.copied.append((part.pool, part.layer))

    def mark(self) -> object:
        return len(self.copied)

    def wait(self, mark: object) -> None:
        self.waited.append(mark)

    def passed(self, mark: object) -> bool:
        return mark is not None and self.reached >= mark  # type: ignore[operator]


def test_whoever_passes_a_gate_waits_for_its_own_layers_copies_on_the_device_too() -> None:
    """On a GPU a gate opens when copies are queued, not when they have happened: the rest is the mark's."""
    engine = Marking()
    load = Load(JobId(1), engine, SCHEDULE, {c: object() for c in (FULL, SWA, MAMBA)})  # type: ignore[misc]
    load.run()
    ends = list(itertools.accumulate(len(parts) for parts in SCHEDULE))
    for layer in range(len(SCHEDULE)):
        load.wait_layer(layer)
    assert engine.waited == ends
    assert engine.copied == [(part.pool, part.layer) for part in PARTS]
    engine.reached = ends[-1] - 1
    assert not load.done(), "the last copy has not happened"
    engine.reached = ends[-1]
    assert load.done()


def test_a_load_of_some_components_opens_the_gates_of_all() -> None:
    """A layer whose pool had nothing to load would be waited for, for ever."""
    engine = Marking()
    load = Load(JobId(1), engine, SCHEDULE, {SWA: object()})  # type: ignore[dict-item]
    assert not load.done()
    load.run()
    for layer in range(len(SCHEDULE)):
        load.wait_layer(layer)
    assert engine.copied == [(part.pool, part.layer) for part in PARTS if part.component is SWA]
