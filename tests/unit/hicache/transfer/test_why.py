"""A job that brought less than it was to bring says why, for the first object that did not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hicache.errors import BackendTimeout, BackendUnavailable
from hicache.testing.faults import Fault, FaultyBackend, always, scripted
from hicache.testing.pools import FULL
from hicache.testing.transfers import TransferWorld, faulty_memory, until
from hicache.transfer.base import ObjectRef, Why
from hicache.transfer.storage_io import StorageLimits

REFS = [ObjectRef(FULL, bytes([i]) * 32) for i in range(8)]
SLOTS = list(range(8))
TARGETS = list(range(10, 18))


@pytest.fixture
def store() -> FaultyBackend:
    return faulty_memory()


@pytest.fixture
def world(store: FaultyBackend) -> Iterator[TransferWorld]:
    limits = StorageLimits(batch_objects=3, breaker_failures=2)
    with TransferWorld(store, limits=limits) as made:
        made.store(REFS, SLOTS)
        yield made


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(miss={1}), Why.MISSING),
        (Fault(short={1}), Why.SHORT),
        (Fault(flip={1}), Why.CORRUPT),
        (Fault(zero={1}), Why.CORRUPT),
        (Fault(error=BackendTimeout("slow")), Why.TIMEOUT),
        (Fault(error=BackendUnavailable("gone")), Why.ERROR),
    ],
)
def test_a_fetch_says_what_kept_its_first_missing_object(
    world: TransferWorld, store: FaultyBackend, fault: Fault, why: Why
) -> None:
    """A slow store and a rotten one ask for different remedies."""
    store.script = scripted(read=[None, fault])
    done = world.fetch(REFS, TARGETS)
    assert done.flags[:3] == b"\x01\x01\x01"
    assert 0 in done.flags
    assert done.why is why


def test_the_first_reason_stays_whatever_follows(world: TransferWorld, store: FaultyBackend) -> None:
    """What comes after the first hole is of no use in any case; its reason would mislead."""
    store.script = scripted(read=[Fault(flip={0}), Fault(error=BackendTimeout("slow"))])
    assert world.fetch(REFS, TARGETS).why is Why.CORRUPT


def test_a_whole_fetch_and_a_probe_that_was_answered_have_no_reason(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """An object that a probe does not find is a plain miss."""
    assert world.fetch(REFS, TARGETS).why is None
    store.script = scripted(probe=[Fault(miss={2})])
    assert world.probe(REFS).why is None


def test_a_probe_that_failed_says_how_and_a_bypassed_store_that_it_was_not_asked(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """While the breaker is open requests go without L3 for a reason that is not a miss."""
    store.script = always(probe=Fault(error=BackendTimeout("slow")))
    assert [world.probe(REFS).why for _ in range(2)] == [Why.TIMEOUT, Why.TIMEOUT]
    assert not world.executor.has_storage
    assert world.executor.storage_bypassed
    assert world.probe(REFS).why is Why.BYPASSED
    assert world.fetch(REFS, TARGETS).why is Why.BYPASSED


def test_a_cancelled_and_a_detached_job_say_so(world: TransferWorld, store: FaultyBackend) -> None:
    """Neither is the store's fault."""
    gate = threading.Event()
    store.script = scripted(read=[Fault(gate=gate), Fault(gate=gate)])
    job = world.job()
    world.executor.start_fetch(job, REFS, TARGETS)
    until(lambda: store.count("read") == 1)
    world.executor.cancel(job)
    gate.set()
    assert world.end().why is Why.CANCELLED
    assert world.executor.detach(60)
    assert not world.executor.storage_bypassed
    assert world.fetch(REFS, TARGETS).why is Why.DETACHED


@pytest.mark.parametrize("ending", [Why.CANCELLED, Why.DETACHED])
def test_a_probe_that_was_cut_short_says_why_and_keeps_what_it_knows(
    store: FaultyBackend, ending: Why
) -> None:
    """What it did not get to ask is not known to be absent, and the accounts would call it not stored."""
    gate = threading.Event()
    with TransferWorld(store, limits=StorageLimits(probe_keys=3)) as world:
        world.store(REFS, SLOTS)
        store.script = scripted(probe=[None, Fault(gate=gate)])
        job = world.job()
        world.executor.start_probe(job, REFS)
        until(lambda: store.count("probe") == 2)
        detach = threading.Thread(target=world.executor.detach, args=(30.0,))
        if ending is Why.CANCELLED:
            world.executor.cancel(job)
        else:
            detach.start()
            until(lambda: not world.executor.has_storage)
        gate.set()
        done = world.end()
        if ending is Why.DETACHED:
            detach.join()
    assert (done.flags, done.why, done.failed) == (b"\x01" * 6 + b"\0\0", ending, True)
