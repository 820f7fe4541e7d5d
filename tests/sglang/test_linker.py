"""The external linker on its own: what is promised is loaded, byte for byte, and nothing waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from hicache.errors import BackendUnavailable, ConfigError
from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.integrations.sglang.direct.settings import Bounds, read_linker_settings
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.sglang_device import (
    LAYERS,
    PAGE,
    PAGES,
    Rank,
    Transfer,
    keys,
    make_rank,
    page_bytes,
    plain,
    tokens,
    window,
)
from hicache.testing.sglang_pools import FakeConfig

BOUND_S = 20.0
WINDOW = 2


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


@pytest.fixture
def store() -> Shared:
    return Shared(MemoryBackend(capacity_bytes=64 << 20))


@pytest.fixture
def rank(store: Shared) -> Iterator[Callable[..., Rank]]:
    """Return a function that makes a rank on the shared store."""
    made: list[Rank] = []

    def make(group: PoolGroup, *, backend: Any = None, **more: Any) -> Rank:
        made.append(make_rank(group, backend or store, **more))
        return made[-1]

    yield make
    store.gate.set()
    for one in made:
        one.core.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def nothing() -> Sequence[object]:
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


@pytest.mark.parametrize("pools", [plain, window])
def test_another_rank_loads_exactly_what_was_offloaded(
    rank: Callable[..., Rank], pools: Callable[[], PoolGroup]
) -> None:
    """A page in the wrong slot, layer or pool would change what a model says."""
    a, b = rank(pools()), rank(pools())
    chain, source, target = keys(9), [3, 1, 4, 5, 9, 2, 6, 8, 7], [20, 11, 12, 13, 31, 30, 9, 10, 5]
    assert stored(a, chain, source)
    assert b.core.lookup("r", families(b.group, chain)) == [9]
    assert not same(b.group, target, a.group, source)
    untouched = page_bytes(b.group, "kv", 0)
    assert loaded(b, "r", chain, target)
    assert same(b.group, target, a.group, source)
    assert page_bytes(b.group, "kv", 0) == untouched
    assert b.core.held_pages == 0


@pytest.mark.parametrize("pools", [plain, window])
def test_a_prefix_that_was_promised_is_loaded_although_the_store_lost_it(
    rank: Callable[..., Rank], store: Shared, pools: Callable[[], PoolGroup]
) -> None:
    """SGLang answers 503 to a request whose promised load fails."""
    a, b = rank(pools()), rank(pools())
    chain, pages = keys(5), [1, 2, 3, 4, 5]
    assert stored(a, chain, pages)
    assert b.core.lookup("r", families(b.group, chain)) == [5]
    store.clear("")
    assert loaded(b, "r", chain, [9, 8, 7, 6, 5])
    assert same(b.group, [9, 8, 7, 6, 5], a.group, pages)


def test_a_damaged_page_ends_the_promise_before_it(rank: Callable[..., Rank], store: Shared) -> None:
    """Bytes that are not what was computed must never reach the device."""
    a, b = rank(plain()), rank(plain())
    chain = keys(6)
    assert stored(a, chain, range(1, 7))
    key = b.core._store._keys(b.core._identity.by_pool["kv"].component, [bytes.fromhex(chain[3])])
    size = store.read(key, [memoryview(bytearray(1 << 16))])[0]
    store.delete(key)
    (reservation,) = store.begin_write(key, [size])
    reservation.buffer[:] = bytes(size)
    store.commit([reservation])
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.counter("mismatch_bad_magic") == 1
    assert store.probe(key) == b"\0"
    assert loaded(b, "r", chain[:3], [10, 11, 12])
    assert same(b.group, [10, 11, 12], a.group, [1, 2, 3])


def test_a_window_that_was_lost_moves_the_promise_to_a_boundary_that_has_one(
    rank: Callable[..., Rank], store: Shared
) -> None:
    """A prefix whose window is not there would be computed on stale rows of the pool."""
    a, b = rank(window()), rank(window())
    chain = keys(8)
    assert stored(a, chain[:4], [1, 2, 3, 4])
    assert stored(a, chain, range(1, 9))
    assert b.core.lookup("before", families(b.group, chain)) == [8]
    component = b.core._identity.by_pool["swa"].component
    store.delete(b.core._store._keys(component, [bytes.fromhex(chain[6])]))
    b.core.reset()
    assert b.core.lookup("after", families(b.group, chain)) == [4]
    assert loaded(b, "after", chain[:4], [20, 21, 22, 23])
    assert same(b.group, [20, 21, 22, 23], a.group, [1, 2, 3, 4])


def test_a_store_that_hangs_costs_one_bounded_wait(rank: Callable[..., Rank], store: Shared) -> None:
    """Lookups run on the scheduler's thread: every second there stops all decoding."""
    one = rank(plain(), bounds=Bounds(lookup_timeout_s=0.3))
    store.gate.clear()
    began = time.monotonic()
    assert one.core.lookup("first", families(one.group, keys(4))) == []
    assert 0.25 < time.monotonic() - began < 2
    began = time.monotonic()
    for i in range(50):
        one.core.num_answers()
        assert one.core.lookup(f"r{i}", families(one.group, keys(4, chain=str(i)))) == []
    assert time.monotonic() - began < 0.25
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
        for i in range(20):
            assert one.core.lookup(f"r{i}", families(one.group, keys(4, chain=str(i)))) == []
        assert time.monotonic() - began < 1
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
    assert 0.25 < time.monotonic() - began < 2
    threading.Timer(0.1, hold.go.set).start()
    assert not b.core.finish(index)
    assert b.counter("loads_failed") == 1
    assert b.core.held_pages == 0
    before = page_bytes(b.group, "kv", 4)
    assert stored(b, keys(1, chain="later"), [7])
    assert page_bytes(b.group, "kv", 4) == before


def test_a_batch_without_loads_has_no_gates(rank: Callable[..., Rank]) -> None:
    one = rank(plain())
    assert one.core.start(nothing) == -1
    one.core.gates.set_consumer(-1)
    one.core.gates.wait_until(0)
    assert one.core.finish(-1)


def test_what_is_cancelled_reset_or_closed_leaves_nothing_behind(rank: Callable[..., Rank]) -> None:
    """Host memory of requests that went away must not add up."""
    a, b = rank(plain()), rank(plain())
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    before = page_bytes(b.group, "kv", 9)
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    assert b.core.load("r", families(b.group, chain, [9, 10, 11, 12]))
    assert b.core.cancel("r")
    assert not b.core.cancel("r")
    assert b.core.start(nothing) == -1
    assert b.core.held_pages == 0
    assert b.core.lookup("s", families(b.group, chain)) == [4]
    assert b.core.lookup("t", families(b.group, chain)) == [4]
    assert b.core.held_pages == 4
    assert b.core.load("s", families(b.group, chain, [9, 10, 11, 12]))
    b.core.reset()
    assert b.core.held_pages == 0
    assert page_bytes(b.group, "kv", 9) == before
    assert b.core.lookup("t", families(b.group, chain)) == [4]
    b.core.close()
    assert b.core.held_pages == 0
    assert not b.core._fetcher._thread.is_alive()
    assert not b.core._offloader._thread.is_alive()
    assert not b.core._loader._thread.is_alive()


def test_a_promise_that_nobody_takes_up_expires(rank: Callable[..., Rank]) -> None:
    """SGLang does not say when a queued request is aborted."""
    a, b = rank(plain()), rank(plain(), bounds=Bounds(promise_s=0.05))
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    assert b.core.lookup("gone", families(b.group, chain)) == [4]

    def expired() -> bool:
        b.core.num_answers()
        return b.core.held_pages == 0

    until(expired)
    assert b.counter("promises_expired") == 1
    assert loaded(b, "gone", chain, [5, 6, 7, 8])
    assert same(b.group, [5, 6, 7, 8], a.group, [1, 2, 3, 4])


def test_a_load_whose_pages_are_lost_everywhere_is_refused(rank: Callable[..., Rank], store: Shared) -> None:
    """Refused before SGLang relies on it: the prompt is computed, no request fails."""
    a, b = rank(plain()), rank(plain())
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    b.core.reset()
    store.clear("")
    assert not b.core.load("r", families(b.group, chain, [5, 6, 7, 8]))
    assert b.core.start(nothing) == -1
    assert b.core.held_pages == 0


def test_transit_memory_is_bounded(rank: Callable[..., Rank]) -> None:
    """A prefix larger than the bound is promised as far as it fits."""
    a = rank(plain())
    chain = keys(8)
    assert stored(a, chain, range(1, 9))
    page = len(page_bytes(a.group, "kv", 1))
    b = rank(plain(), bounds=Bounds(transit_bytes=3 * page + 10))
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.core.lookup("s", families(b.group, keys(8, chain="b"))) == []
    assert b.core._held.used_bytes <= 3 * page
    assert loaded(b, "r", chain[:3], [10, 11, 12])
    assert same(b.group, [10, 11, 12], a.group, [1, 2, 3])


def test_ranks_refuse_a_load_together(rank: Callable[..., Rank]) -> None:
    """Ranks that differ in what they load compute different batches, and hang."""
    a = rank(plain())
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    asked: list[bool] = []

    def elsewhere_not(good: bool) -> bool:
        asked.append(good)
        return False

    b = rank(plain(), agree=elsewhere_not)
    assert b.core.lookup("r", families(b.group, chain)) == [1, 2, 3, 4]
    assert not b.core.load("r", families(b.group, chain, [5, 6, 7, 8]))
    assert asked == [True]
    assert not b.core.load("lost", families(b.group, keys(2, chain="no"), [5, 6]))
    assert asked == [True, False]
    assert b.core.held_pages == 0


def test_ranks_name_shallower_boundaries_too(rank: Callable[..., Rank]) -> None:
    """The other ranks may lack the deepest; their common one must not be nothing."""
    a, b = rank(window()), rank(window(), agree=lambda good: good)
    chain = keys(8)
    assert stored(a, chain[:4], [1, 2, 3, 4])
    assert stored(a, chain, range(1, 9))
    assert b.core.lookup("r", families(b.group, chain)) == [4, 8]
    assert loaded(b, "r", chain[:4], [20, 21, 22, 23])
    assert same(b.group, [20, 21, 22, 23], a.group, [1, 2, 3, 4])


def test_one_rank_writes_what_all_hold_and_each_reads_it(rank: Callable[..., Rank]) -> None:
    """MLA: eight ranks must not store eight copies."""
    config = [FakeConfig(tp_rank=i, tp_size=2, is_mla_model=True) for i in (0, 1)]
    first, second = (rank(plain(), config=one) for one in config)
    chain = keys(3)
    assert stored(second, chain, [1, 2, 3])
    assert second.counter("stored_objects") == 0
    assert stored(first, chain, [1, 2, 3])
    assert first.counter("stored_objects") == 3
    assert second.core.lookup("r", families(second.group, chain)) == [3]
    assert loaded(second, "r", chain, [4, 5, 6])
    assert same(second.group, [4, 5, 6], first.group, [1, 2, 3])


def test_ranks_that_hold_different_heads_share_nothing(rank: Callable[..., Rank]) -> None:
    config = [FakeConfig(tp_rank=i, tp_size=2) for i in (0, 1)]
    first, second = (rank(plain(), config=one) for one in config)
    assert stored(first, keys(3), [1, 2, 3])
    assert second.core.lookup("r", families(second.group, keys(3))) == []


def test_an_offload_beyond_the_bound_is_answered_in_its_turn(
    rank: Callable[..., Rank], store: Shared
) -> None:
    """Ranks compare answers one by one: one left out would confirm another's pages."""
    one = rank(plain(), bounds=Bounds(offload_share=5 / PAGES))
    store.gate.clear()
    for i in range(3):
        pages = [1 + 3 * i, 2 + 3 * i, 3 + 3 * i]
        assert one.core.offload(families(one.group, keys(3, chain=str(i)), pages), nothing)
    assert one.core.offload(families(one.group, keys(1, chain="3"), [20]), nothing)
    assert one.core.num_answers() == 0
    store.gate.set()
    until(lambda: one.core.num_answers() == 4)
    assert [one.core.pop_answer() for _ in range(4)] == [True, False, False, True]
    assert one.counter("offloads_refused") == 2
    assert one.core.lookup("r", families(one.group, keys(3, chain="1"))) == []


def test_pages_may_be_reused_as_soon_as_reset_returns(rank: Callable[..., Rank], store: Shared) -> None:
    """SGLang unlocks what was to be stored when it flushes; other KV may then be written there."""
    one, other = rank(plain()), rank(plain())
    store.gate.clear()
    store.entered.clear()
    for i in range(4):
        assert one.core.offload(families(one.group, keys(2, chain=str(i)), [2 * i, 2 * i + 1]), nothing)
    assert store.entered.wait(BOUND_S)
    one.core.reset()
    for part in one.group.pools["kv"].parts:
        for layer in part.layers:
            layer.zero_()
    store.gate.set()
    assert stored(one, keys(1, chain="later"), [9])
    assert one.core.num_answers() == 0
    for i in range(4):
        assert other.core.lookup(f"r{i}", families(other.group, keys(2, chain=str(i)))) == []


def test_an_offload_that_waited_too_long_is_dropped(rank: Callable[..., Rank], store: Shared) -> None:
    """The pages of a queued offload are locked on the device."""
    one = rank(plain(), bounds=Bounds(offload_s=0.05))
    store.gate.clear()
    assert one.core.offload(families(one.group, keys(1), [1]), nothing)
    assert one.core.offload(families(one.group, keys(1, chain="b"), [2]), nothing)
    threading.Timer(0.15, store.gate.set).start()
    until(lambda: one.core.num_answers() == 2)
    assert [one.core.pop_answer(), one.core.pop_answer()][1] is False
    assert one.counter("offloads_late") >= 1


def test_indices_that_are_no_pages_are_refused_and_logged(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong index would store one page's bytes under another's key."""
    one = rank(plain())
    wrong = [Transfer("kv", keys(2), torch.arange(PAGE + 1))]
    assert one.core.offload(wrong, nothing)
    until(lambda: one.core.num_answers() == 1)
    assert not one.core.pop_answer()
    assert not one.core.load("r", wrong)
    assert "an L3 offload failed" in caplog.text
    assert one.core.offload([], nothing) is False


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"weight_version": "1", "lookup_timeout_s": 0}, "lookup_timeout_s=0.* must be positive"),
        ({"weight_version": "1", "offload_share": 2.0}, "offload_share=2.0 is more than all"),
        ({"weight_version": "1", "transit_bytes": "much"}, "Expected `int`"),
        ({"weight_version": "1", "lookup_timeout": 1}, "no key 'lookup_timeout'"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_linker_settings(extra)


def test_settings_of_the_backend_pass_through() -> None:
    settings, bounds = read_linker_settings({"address": "h:1", "weight_version": "7", "promise_s": 3})
    assert (settings.backend, settings.backend_options, settings.weight_version) == (
        "grpc",
        {"address": "h:1"},
        "7",
    )
    assert (bounds.promise_s, bounds.lookup_timeout_s) == (3, 1.0)
