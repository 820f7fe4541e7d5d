"""Scripted faults do what they say, or tests of the tiers above would prove nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.errors import BackendTimeout
from hicache.storage_backends.base import MISS, WriteOutcome
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.backend_suite import BackendSuite, pattern, read, write
from hicache.testing.faults import ALL, Fault, FaultyBackend, always, corrupt, scripted, seeded

KEYS = ["a", "b", "c"]


@pytest.fixture
def faulty() -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend(capacity_bytes=1 << 20))
    write(backend, {key: pattern(100, i) for i, key in enumerate(KEYS)})
    return backend


class TestFaultyWithoutFaults(BackendSuite):
    def make_backend(self) -> FaultyBackend:
        return FaultyBackend(MemoryBackend(capacity_bytes=64 << 20))


def test_misses_hit_only_the_named_positions(faulty: FaultyBackend) -> None:
    """A test of holes in a chain would test something else."""
    faulty.script = always(probe=Fault(miss=[1]), read=Fault(miss=ALL))
    assert faulty.probe(KEYS) == b"\x01\x00\x01"
    assert read(faulty, KEYS, 100) == [None] * 3


def test_reads_are_spoiled_as_named(faulty: FaultyBackend) -> None:
    """A test of checksums would pass on undamaged bytes."""
    faulty.script = always(read=Fault(flip=[0], zero=[1], truncated=[2]))
    flipped, zeroed, cut = read(faulty, KEYS, 100)
    assert flipped is not None
    assert [i for i in range(100) if flipped[i] != pattern(100, 0)[i]] == [50]
    assert zeroed == bytes(100)
    assert cut == pattern(100, 2)[:50] + bytes(50)
    faulty.script = always(read=Fault(short=[0]))
    assert read(faulty, KEYS, 100) == [pattern(100, 0)[:50], pattern(100, 1), pattern(100, 2)]


def test_errors_come_at_the_scripted_call_only(faulty: FaultyBackend) -> None:
    """A test of retries would see the wrong number of failures."""
    faulty.script = scripted(probe=[None, Fault(error=BackendTimeout("slow"))])
    assert faulty.probe(KEYS) == b"\x01" * 3
    with pytest.raises(BackendTimeout, match="slow"):
        faulty.probe(KEYS)
    assert faulty.probe(KEYS) == b"\x01" * 3
    assert faulty.count("probe") == 3
    assert [call.keys for call in faulty.calls if call.operation == "probe"] == [tuple(KEYS)] * 3


def test_a_lost_answer_leaves_the_work_done(faulty: FaultyBackend) -> None:
    """A write that timed out but arrived could not be tested."""
    faulty.script = always(commit=Fault(error_after=BackendTimeout("lost")))
    with pytest.raises(BackendTimeout):
        write(faulty, {"new": pattern(10)})
    assert faulty.probe(["new"]) == b"\x01"


def test_writes_fail_in_part(faulty: FaultyBackend) -> None:
    """A batch of which only some pages are stored could not be tested."""
    faulty.script = always(begin_write=Fault(refuse={0: WriteOutcome.NO_SPACE}), commit=Fault(lose=[1]))
    outcomes = write(faulty, {f"n{i}": pattern(10, i) for i in range(4)})
    assert {key: outcome.value for key, outcome in outcomes.items()} == {
        "n0": "no_space",
        "n1": "stored",
        "n2": "failed",
        "n3": "stored",
    }
    assert faulty.inner.probe([f"n{i}" for i in range(4)]) == b"\x00\x01\x00\x01"
    assert faulty.inner.stats().details["reservations"] == 0
    faulty.script = always(begin_write=Fault(refuse=WriteOutcome.FAILED))
    assert write(faulty, {"x": pattern(1)}) == {"x": WriteOutcome.FAILED}


def test_a_gate_holds_the_call_until_it_opens(faulty: FaultyBackend) -> None:
    """Tests of slow stores would need sleeps."""
    gate = threading.Event()
    faulty.script = always(read=Fault(gate=gate))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(read, faulty, KEYS, 100)
        assert faulty.probe(KEYS) == b"\x01" * 3
        assert not pending.done()
        gate.set()
        assert pending.result(30) == [pattern(100, i) for i in range(3)]
    faulty.script = always(read=Fault(gate=threading.Event(), gate_timeout_s=0.0))
    with pytest.raises(AssertionError, match="gate"):
        read(faulty, KEYS, 100)


def test_seeded_faults_repeat_and_keep_their_rate() -> None:
    """A failing random run could not be run again."""

    def outcomes(seed: int) -> list[bool]:
        script = seeded(seed, {"probe": [(0.3, Fault(miss=ALL))]})
        backend = FaultyBackend(MemoryBackend(capacity_bytes=1000), script)
        write(backend, {"a": b"x"})
        return [backend.probe(["a"]) == b"\x00" for _ in range(400)]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 80 < sum(outcomes(1)) < 160


def test_corrupt_leaves_the_damage_in_the_store(faulty: FaultyBackend) -> None:
    """`flip a bit, miss, rewrite, hit` could not be tested on every backend."""

    def flip(data: bytearray) -> None:
        data[3] ^= 1

    corrupt(faulty, "a", flip)
    (seen,) = read(faulty, ["a"], 100)
    assert seen is not None
    assert [i for i in range(100) if seen[i] != pattern(100, 0)[i]] == [3]
    corrupt(faulty, "b", lambda data: data.pop())
    assert faulty.read(["b"], [memoryview(bytearray(100))]) == [99]
    buffer = memoryview(bytearray(1))
    assert faulty.read(["none"], [buffer]) == [MISS]
