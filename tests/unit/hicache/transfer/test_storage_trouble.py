"""Storage that hangs, dies and returns; jobs that are cut off; storage taken away while serving."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache.errors import BackendTimeout, BackendUnavailable
from hicache.registry import create_backend
from hicache.storage_backends.base import WriteOutcome
from hicache.storage_backends.file import directory
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, always, scripted
from hicache.testing.pools import FULL
from hicache.testing.transfers import TransferWorld, faulty_memory, until
from hicache.transfer.base import JobKind, ObjectRef
from hicache.transfer.storage_io import StorageLimits

REFS = [ObjectRef(FULL, bytes([i]) * 32) for i in range(8)]
SLOTS = [30, 2, 9, 4, 31, 0, 17, 11]
TARGETS = [1, 3, 5, 7, 12, 14, 16, 18]
ALL_EIGHT = b"\x01" * 8


@pytest.fixture
def store() -> FaultyBackend:
    return faulty_memory()


@pytest.fixture
def world(store: FaultyBackend) -> Iterator[TransferWorld]:
    with TransferWorld(store) as made:
        made.store(REFS, SLOTS)
        yield made


def test_a_cancelled_fetch_ends_behind_the_batch_in_flight_and_keeps_what_arrived(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """Its slots stay busy until then: a call that is under way may still write."""
    gate = threading.Event()
    store.script = scripted(read=[None, Fault(gate=gate)])
    job = world.job()
    world.executor.start_fetch(job, REFS, TARGETS)
    until(lambda: store.count("read") == 2)
    assert world.executor.arrived(job) == b"\x01\x01\x01\0\0\0\0\0"
    world.executor.cancel(job)
    assert world.executor.poll() == []
    gate.set()
    done = world.end()
    assert (done.job, done.flags, done.failed) == (job, b"\x01" * 6 + b"\0\0", False)
    assert store.count("read") == 2
    world.executor.cancel(job)  # too late, and harmless
    with pytest.raises(ValueError, match="no storage job"):
        world.executor.arrived(job)


def test_a_full_disk_is_one_line_and_its_end_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every page that finds no room would write a line, and nobody would know when it was over."""
    caplog.set_level(logging.INFO)
    store = create_backend("file", {"file_storage_path": str(tmp_path)})

    def no_room(fd: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TransferWorld(store) as world:
        assert world.store(REFS[:3], SLOTS[:3]).flags == b"\x01" * 3
        with monkeypatch.context() as patch:
            patch.setattr(directory, "write_all", no_room)
            for _ in range(5):
                done = world.store(REFS, SLOTS)
                assert (done.flags[3:], done.failed) == (bytes(5), False)
            assert world.fetch(REFS[:3], TARGETS[:3]).flags == b"\x01" * 3
            assert world.executor.storage_answers
        assert world.store(REFS, SLOTS).flags == ALL_EIGHT
    store.close()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "file: no room for more objects; what it holds stays usable"),
        ("INFO", "file: there is room again"),
    ]


def test_a_store_that_nobody_asks_is_asked_how_it_is(world: TransferWorld, store: FaultyBackend) -> None:
    """An idle replica would not notice that its store died, or came back with nothing."""
    before, epoch = store.count("probe"), world.executor.storage_epoch
    store.script = always(probe=Fault(error=BackendUnavailable("dead")))
    world.clock.advance(2.5)
    until(lambda: not world.executor.storage_answers)
    store.script = scripted()
    world.clock.advance(2.5)
    until(lambda: world.executor.storage_answers)
    assert store.count("probe") >= before + 2
    assert world.executor.storage_epoch == epoch + 1


def test_a_store_that_stays_away_is_not_told_of_at_every_trial(
    world: TransferWorld, store: FaultyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead store would write a line per trial until somebody comes."""
    store.script = always(probe=Fault(error=BackendUnavailable("dead")))
    while world.executor.has_storage:
        world.executor.start_probe(world.job(), REFS)
        assert world.end().failed
    for _ in range(5):
        before = store.count("probe")
        world.clock.advance(60.0)
        until(lambda before=before: store.count("probe") > before)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "faulty: probe failed: dead"),
        ("ERROR", "faulty: storage is bypassed after repeated failures"),
    ]


@pytest.mark.parametrize("kind", [JobKind.FETCH, JobKind.PROBE])
def test_a_cancelled_job_that_has_not_begun_ends_at_once(
    world: TransferWorld, store: FaultyBackend, kind: JobKind
) -> None:
    """Behind stuck readers its slots would else be held for as long as the store hangs."""
    gate = threading.Event()
    store.script = scripted(probe=[Fault(gate=gate), Fault(gate=gate)])
    blockers = [world.job(), world.job()]
    for blocker in blockers:
        world.executor.start_probe(blocker, REFS)
    until(lambda: store.count("probe") == 2)
    job = world.job()
    if kind is JobKind.FETCH:
        world.executor.start_fetch(job, REFS, TARGETS)
    else:
        world.executor.start_probe(job, REFS)
    world.executor.cancel(job)
    done = world.end()
    assert (done.job, done.flags, done.failed) == (job, bytes(8), kind is JobKind.PROBE)
    gate.set()
    ended = []
    while len(ended) < 2:
        assert world.executor.wait(60)
        ended += world.executor.poll()
    assert {d.job for d in ended} == set(blockers)
    assert store.count("read") == 0


def test_detach_ends_jobs_early_and_storage_can_be_attached_again(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """Storage is attached and detached while serving."""
    gate = threading.Event()
    store.script = scripted(read=[Fault(gate=gate)])
    first, second = world.job(), world.job()
    world.executor.start_fetch(first, REFS, TARGETS)
    until(lambda: store.count("read") == 1)
    assert not world.executor.detach(0.01)
    assert not world.executor.has_storage
    gate.set()
    done = world.end()
    assert (done.job, done.flags, done.failed) == (first, b"\x01\x01\x01\0\0\0\0\0", True)
    world.executor.start_probe(second, REFS)
    done = world.end()
    assert (done.job, done.flags, done.failed) == (second, bytes(8), True)
    world.executor.attach(store)
    assert world.executor.has_storage
    assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
    with pytest.raises(ValueError, match="attached already"):
        world.executor.attach(store)
    assert world.executor.detach(60)
    assert world.executor.detach(60)  # nothing to do is done


def test_close_returns_in_time_although_a_store_call_is_stuck(store: FaultyBackend) -> None:
    """SIGTERM must end a server whose L3 hangs; the stuck job ends when its call does, not before."""
    gate = threading.Event()
    store.script = always(read=Fault(gate=gate))
    with TransferWorld(store, close_timeout_s=0.2) as world:
        job = world.job()
        world.executor.start_fetch(job, REFS, TARGETS)
        until(lambda: store.count("read") == 1)
    assert world.executor.poll() == []
    gate.set()
    assert world.end().job == job


LIMITS = StorageLimits(batch_objects=3, breaker_failures=3, breaker_backoff_s=5.0)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_dead_store_is_bypassed_and_comes_back_by_itself(store: FaultyBackend, synchronous: bool) -> None:
    """A dead L3 must cost a few time-outs, not one per request, and need no restart to return."""
    dead = Fault(error=BackendUnavailable("gone"))
    with TransferWorld(store, limits=LIMITS, synchronous=synchronous) as world:
        world.store(REFS, SLOTS)
        store.script = always(probe=dead, read=dead)
        for _ in range(3):
            assert world.executor.has_storage
            assert world.probe(REFS).failed
        assert not world.executor.has_storage
        assert world.executor.counters()["breaker_opened"] == 1
        assert world.fetch(REFS, TARGETS).failed  # at once, and without a call
        assert store.count("read") == 0
        world.clock.advance(5.0)  # the first trial fails, so the wait doubles
        until(lambda: world.executor.poll() == [] and store.count("probe") == 4)
        assert not world.executor.has_storage
        store.script = always()
        world.clock.advance(10.0)
        until(lambda: world.executor.poll() == [] and world.executor.has_storage)
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT


def test_writes_that_fail_open_the_breaker_too(store: FaultyBackend) -> None:
    """A store that takes nothing any more would cost every write-through its bound."""
    store.script = always(begin_write=Fault(refuse=WriteOutcome.FAILED))
    with TransferWorld(store, limits=LIMITS) as world:
        for _ in range(3):
            assert world.executor.has_storage
            assert world.store(REFS, SLOTS).failed
        assert not world.executor.has_storage


@pytest.mark.parametrize(
    ("operation", "kind", "said"),
    [
        ("probe", JobKind.PROBE, "probe"),
        ("read", JobKind.FETCH, "read"),
        ("begin_write", JobKind.STORE, "write"),
        ("commit", JobKind.STORE, "write"),
    ],
)
def test_a_backend_with_a_bug_is_bypassed_like_a_dead_one(
    store: FaultyBackend, operation: str, kind: JobKind, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody's own backend that raises what it likes would be called, and logged, for ever."""
    with TransferWorld(store, limits=LIMITS) as world:
        world.store(REFS[:4], SLOTS[:4])
        store.script = always(**{operation: Fault(error=KeyError("bug"))})
        for _ in range(3):
            assert world.executor.has_storage
            if kind is JobKind.PROBE:
                done = world.probe(REFS)
            elif kind is JobKind.FETCH:
                done = world.fetch(REFS, TARGETS)
            else:
                done = world.store(REFS[4:], SLOTS[4:])
            assert done.failed
            assert not any(done.flags[-4:])
        assert not world.executor.has_storage
        assert f"faulty: {said} failed: 'bug'" in caplog.messages


def test_a_full_store_is_no_failure(store: FaultyBackend) -> None:
    """Bypassing a store because it is full would lose the hits on what it holds."""
    store.script = always(begin_write=Fault(refuse=WriteOutcome.NO_SPACE))
    with TransferWorld(store, limits=LIMITS) as world:
        for _ in range(5):
            done = world.store(REFS, SLOTS)
            assert (done.flags, done.failed) == (bytes(8), False)
        assert world.executor.has_storage


class Abandoned(FaultyBackend):
    """Its timed-out reads may go on writing; it remembers the buffers it was given."""

    settles_on_timeout = False

    def __init__(self) -> None:
        super().__init__(MemoryBackend(capacity_bytes=64 << 20))
        self.buffers: list[memoryview] = []

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        self.buffers.append(buffers[0])
        return super().read(keys, buffers)


def test_memory_of_an_abandoned_read_is_never_used_again() -> None:
    """A late write into a reused buffer would put one page's bytes under another's checksum."""
    store = Abandoned()
    limits = StorageLimits(batch_objects=8, quarantine_buffers=2, breaker_failures=100)
    slow = Fault(error=BackendTimeout("still running"))
    with TransferWorld(store, limits=limits, readers=1) as world:
        world.store(REFS, SLOTS)
        store.script = scripted(read=[slow, None, None, slow])
        assert world.fetch(REFS, TARGETS).failed
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
        store.buffers[0][:] = b"\xee" * len(store.buffers[0])  # the abandoned call writes at last
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
        assert world.bytes(REFS, TARGETS) == world.bytes(REFS, SLOTS)
        assert store.buffers[1].obj is store.buffers[2].obj
        assert store.buffers[0].obj is not store.buffers[1].obj
        assert world.executor.counters()["quarantined_bytes"] == limits.batch_bytes


def test_storage_is_bypassed_when_abandoned_reads_hold_too_much_memory() -> None:
    """A store that hangs on every call must not eat the host; attaching it anew starts afresh."""
    store = Abandoned()
    store.script = always(read=Fault(error=BackendTimeout("still running")))
    limits = StorageLimits(batch_objects=8, quarantine_buffers=2, breaker_failures=100)
    with TransferWorld(store, limits=limits, readers=1) as world:
        world.store(REFS, SLOTS)
        for _ in range(2):
            assert world.executor.has_storage
            assert world.fetch(REFS, TARGETS).failed
        assert not world.executor.has_storage
        assert world.fetch(REFS, TARGETS).failed
        assert store.count("read") == 2
        assert world.executor.detach(60)
        store.script = always()
        world.executor.attach(store)
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
