"""Calls with a time bound: who waits, what becomes of late calls, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from hicache.errors import BackendTimeout, BackendUnavailable
from hicache.storage_backends.bounded import BoundedCalls, CallAbandoned

PATIENCE_S = 0.02
LONG_S = 30.0


@pytest.fixture
def calls() -> Iterator[BoundedCalls]:
    calls = BoundedCalls("test", workers=2)
    yield calls
    assert calls.close(LONG_S)


def hang(calls: BoundedCalls, gate: threading.Event, *, late: threading.Event | None = None) -> None:
    """Make a call that hangs until `gate`, and stop waiting for it."""
    begun = threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(LONG_S)

    with pytest.raises(CallAbandoned):
        calls.run(work, timeout_s=PATIENCE_S, operation="hang", on_late=late.set if late else None)
    assert begun.wait(LONG_S)


def test_results_and_exceptions_reach_the_caller(calls: BoundedCalls) -> None:
    """A failed call would look like one that returned nothing."""
    assert calls.run(lambda: 7, timeout_s=LONG_S, operation="x") == 7
    with pytest.raises(KeyError):
        calls.run(lambda: {}["a"], timeout_s=LONG_S, operation="x")


def test_a_call_that_hangs_is_given_up_and_its_memory_given_back_when_it_ends(calls: BoundedCalls) -> None:
    """A hung store would hang the engine, or its late bytes land in memory given to another request."""
    gate, late = threading.Event(), threading.Event()
    hang(calls, gate, late=late)
    assert calls.abandoned == 1
    assert not late.is_set()
    gate.set()
    assert late.wait(LONG_S)


def test_a_call_in_time_does_not_give_its_memory_back_twice(calls: BoundedCalls) -> None:
    """The span of a read would be freed while its bytes are being copied out."""
    late = threading.Event()
    calls.run(lambda: None, timeout_s=LONG_S, operation="x", on_late=late.set)
    assert not late.is_set()


def test_when_every_thread_is_lost_calls_are_refused_at_once_until_one_returns(calls: BoundedCalls) -> None:
    """Each further call would wait its whole bound, and hold memory, for nothing."""
    gates = [threading.Event(), threading.Event()]
    for gate in gates:
        hang(calls, gate)
    with pytest.raises(BackendUnavailable, match="2 earlier calls"):
        calls.run(lambda: 1, timeout_s=LONG_S, operation="x")
    late = threading.Event()
    gates[0].set()
    while calls.abandoned == 2:
        late.wait(0.001)
    assert calls.run(lambda: 1, timeout_s=LONG_S, operation="x") == 1
    gates[1].set()


def test_a_call_that_never_began_is_cancelled_not_made_later() -> None:
    """A write given up by its request would still happen, from memory that was reused."""
    calls = BoundedCalls("test", workers=1)
    gate, begun, made, late = (threading.Event() for _ in range(4))
    busy = threading.Thread(
        target=calls.run,
        args=(lambda: begun.set() or gate.wait(LONG_S),),
        kwargs={"timeout_s": LONG_S, "operation": "busy"},
    )
    busy.start()
    assert begun.wait(LONG_S)
    with pytest.raises(BackendTimeout):
        calls.run(made.set, timeout_s=PATIENCE_S, operation="queued", on_late=late.set)
    assert late.is_set()
    gate.set()
    busy.join(LONG_S)
    assert calls.run(lambda: 1, timeout_s=LONG_S, operation="x") == 1
    assert not made.is_set()
    assert calls.close(LONG_S)


def test_close_says_whether_calls_are_still_running() -> None:
    """A library would be shut down under a call, which for some is a crash."""
    calls = BoundedCalls("test", workers=1)
    gate = threading.Event()
    hang(calls, gate)
    assert not calls.close(PATIENCE_S)
    with pytest.raises(BackendUnavailable, match="closed"):
        calls.run(lambda: 1, timeout_s=LONG_S, operation="x")
    gate.set()
    assert calls.close(LONG_S)


def test_a_forked_process_is_refused(calls: BoundedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker would wait for threads that only its parent has."""
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(BackendUnavailable, match="another process"):
        calls.run(lambda: 1, timeout_s=LONG_S, operation="x")
    monkeypatch.undo()
