"""What is promised is loaded, byte for byte, whatever became of the store meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.testing.sglang_device import (
    Rank,
    Shared,
    families,
    keys,
    loaded,
    nothing,
    object_of,
    page_bytes,
    plain,
    same,
    stored,
    until,
    window,
    zero,
)
from hicache.testing.sglang_pools import FakeConfig


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
    key = object_of(b, "kv", chain[3])
    zero(store, key)
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.counter("mismatch_bad_magic") == 1
    assert store.probe(key) == b"\0"
    assert loaded(b, "r", chain[:3], [10, 11, 12])
    assert same(b.group, [10, 11, 12], a.group, [1, 2, 3])


@pytest.mark.parametrize("how", ["lost", "damaged"])
@pytest.mark.parametrize("pool", ["swa", "mamba"])
def test_a_window_that_is_not_whole_moves_the_promise_to_a_boundary_that_has_one(
    rank: Callable[..., Rank], store: Shared, how: str, pool: str
) -> None:
    """A prefix whose window is not there would be computed on stale rows of the pool."""
    a, b = rank(window()), rank(window())
    chain = keys(8)
    assert stored(a, chain[:4], [1, 2, 3, 4])
    assert stored(a, chain, range(1, 9))
    assert b.core.lookup("before", families(b.group, chain)) == [8]
    key = object_of(b, pool, chain[7])
    if how == "lost":
        store.delete(key)
    else:
        zero(store, key)
    b.core.reset()
    assert b.core.lookup("after", families(b.group, chain)) == [4]
    assert loaded(b, "after", chain[:4], [20, 21, 22, 23])
    assert same(b.group, [20, 21, 22, 23], a.group, [1, 2, 3, 4])


def test_a_request_that_grew_is_promised_anew(rank: Callable[..., Rank]) -> None:
    """A request that was taken back comes again with what it had said; the old answer is not about that."""
    a, b = rank(plain()), rank(plain())
    chain = keys(6)
    assert stored(a, chain, range(1, 7))
    assert b.core.lookup("r", families(b.group, chain[:2])) == [2]
    assert b.core.lookup("r", families(b.group, chain)) == [6]
    assert b.core.lookup("r", families(b.group, chain[3:])) == [3]
    assert b.core.held_pages == 3
    assert loaded(b, "r", chain[3:], [20, 21, 22])
    assert same(b.group, [20, 21, 22], a.group, [4, 5, 6])


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
