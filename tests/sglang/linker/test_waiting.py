"""Nothing waits without a bound: not the scheduler for the store, not the forward pass for a layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache.integrations.sglang.direct.settings import Bounds
from hicache.testing.sglang_device import (
    LAYERS,
    Hold,
    Rank,
    Shared,
    families,
    keys,
    loaded,
    nothing,
    page_bytes,
    plain,
    same,
    stored,
    until,
)

PATIENCE_S = 60.0  # of a busy machine


def test_a_store_that_hangs_costs_one_bounded_wait(rank: Callable[..., Rank], store: Shared) -> None:
    """Lookups run on the scheduler's thread: every second there stops all decoding."""
    one = rank(plain(), bounds=Bounds(lookup_timeout_s=0.3))
    store.gate.clear()
    began = time.monotonic()
    assert one.core.lookup("first", families(one.group, keys(4))) == []
    assert 0.25 < time.monotonic() - began < PATIENCE_S
    began = time.monotonic()
    for i in range(400):  # two minutes, if each waited
        one.core.num_answers()
        assert one.core.lookup(f"r{i}", families(one.group, keys(4, chain=str(i)))) == []
    assert time.monotonic() - began < PATIENCE_S
    store.gate.set()


def test_a_dead_store_is_not_asked_again(rank: Callable[..., Rank], store: Shared) -> None:
    """After one failure requests must be computed at once, as without L3."""
    one = rank(plain())
    store.dead = True
    assert one.core.lookup("first", families(one.group, keys(4))) == []
    asked = len(store.calls)
    assert one.core.lookup("second", families(one.group, keys(4))) == []
    assert one.counter("lookups_without_store") == 1
    assert store.calls[asked:].count("read") == 0
    assert not stored(one, keys(4), [1, 2, 3, 4])
    store.dead = False
    until(lambda: one.core._store.usable)
    assert stored(one, keys(4), [1, 2, 3, 4])
    assert one.core.lookup("third", families(one.group, keys(4))) == [4]


def test_requests_share_the_waiting_of_a_tick(rank: Callable[..., Rank], store: Shared) -> None:
    """A queue of a hundred requests must not stop the scheduler a hundred times as long as one."""
    one = rank(plain(), bounds=Bounds(lookup_timeout_s=0.2))
    began = time.monotonic()
    slow = threading.Event()

    def creep() -> None:
        while not slow.wait(0.05):
            one.core._fetcher._batches += 1  # the store makes progress, slowly

    thread = threading.Thread(target=creep)
    thread.start()
    store.gate.clear()
    try:
        for i in range(600):  # two minutes, if each waited
            assert one.core.lookup(f"r{i}", families(one.group, keys(4, chain=str(i)))) == []
        assert time.monotonic() - began < PATIENCE_S
    finally:
        slow.set()
        thread.join()
        store.gate.set()


def test_what_came_too_late_for_one_tick_is_there_for_the_next(
    rank: Callable[..., Rank], store: Shared
) -> None:
    """A request that waits in the queue must not lose its prefix to a slow first look."""
    a, b = rank(plain()), rank(plain(), bounds=Bounds(lookup_timeout_s=0.05))
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    store.gate.clear()
    assert b.core.lookup("r", families(b.group, chain)) == []
    store.gate.set()

    def comes() -> bool:
        b.core.num_answers()
        return b.core.lookup("r", families(b.group, chain)) == [4]

    until(comes)
    asked = len(store.calls)
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    assert len(store.calls) == asked


def test_a_layer_may_be_read_while_the_next_is_still_copied(rank: Callable[..., Rank]) -> None:
    """Waiting for the whole load before the first layer is what layer-wise loading is there to avoid."""
    a, b = rank(plain()), rank(plain())
    chain = keys(3)
    assert stored(a, chain, [1, 2, 3])
    hold = b.core._loader._copier = Hold(b.core._loader._copier, 1)
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.core.load("r", families(b.group, chain, [4, 5, 6]))
    index = b.core.start(nothing)
    b.core.gates.set_consumer(index)
    b.core.gates.wait_until(0)
    parts = b.group.pools["kv"].parts
    theirs = a.group.pools["kv"].parts
    assert torch.equal(parts[0].layers[0][4], theirs[0].layers[0][1])
    assert not torch.equal(parts[0].layers[2][4], theirs[0].layers[2][1])
    hold.go.set()
    b.core.gates.wait_until(2)
    assert torch.equal(parts[1].layers[2][6], theirs[1].layers[2][3])
    assert b.core.finish(index)


def test_a_layer_that_does_not_come_fails_its_requests_in_time(rank: Callable[..., Rank]) -> None:
    """A forward pass that waits for ever takes every request of the server with it."""
    a, b = rank(plain()), rank(plain(), bounds=Bounds(layer_timeout_s=0.3))
    chain = keys(3)
    assert stored(a, chain, [1, 2, 3])
    hold = b.core._loader._copier = Hold(b.core._loader._copier, 1)
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.core.load("r", families(b.group, chain, [4, 5, 6]))
    index = b.core.start(nothing)
    b.core.gates.set_consumer(index)
    began = time.monotonic()
    for layer in range(LAYERS):
        b.core.gates.wait_until(layer)
    assert 0.25 < time.monotonic() - began < PATIENCE_S  # the copy itself would never come
    threading.Timer(0.1, hold.go.set).start()
    assert not b.core.finish(index)
    assert b.counter("loads_failed") == 1
    assert b.core.held_pages == 0
    before = page_bytes(b.group, "kv", 4)
    assert stored(b, keys(1, chain="later"), [7])
    assert page_bytes(b.group, "kv", 4) == before


def test_a_copy_that_fails_is_told_and_the_next_load_works(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """A device that refuses one copy must cost those requests only."""
    a, b = rank(plain()), rank(plain())
    chain = keys(3)
    assert stored(a, chain, [1, 2, 3])
    real = b.core._loader._copier

    class Broken(Hold):
        def load(self, part: Any, layer: int, rows: Any, source: torch.Tensor) -> None:
            raise RuntimeError("out of order")

    b.core._loader._copier = Broken(real, 0)
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert not loaded(b, "r", chain, [4, 5, 6])
    assert "its requests are aborted: copying to the device: out of order" in caplog.text
    b.core._loader._copier = real
    assert b.core.held_pages == 0
    assert b.core.lookup("s", families(b.group, chain)) == [3]
    assert loaded(b, "s", chain, [4, 5, 6])
    assert same(b.group, [4, 5, 6], a.group, [1, 2, 3])


def test_a_batch_without_loads_has_no_gates(rank: Callable[..., Rank]) -> None:
    one = rank(plain())
    assert one.core.start(nothing) == -1
    one.core.gates.set_consumer(-1)
    one.core.gates.wait_until(0)
    assert one.core.finish(-1)
