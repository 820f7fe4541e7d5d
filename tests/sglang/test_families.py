"""A page and its sidecars become visible together, although SGLang hands them over in separate calls."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.sglang_pools import (
    DSAIndexerPoolHost,
    FakeConfig,
    FakePool,
    LogicalHostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Replicas,
    indices,
    page_bytes,
    scramble,
    transfer,
)

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(16)]


def sparse(seed: int, layout: str = "page_first_direct") -> dict[str, FakePool]:
    """Latent KV with its indexer and a draft model's KV, all on the indices of KV."""
    pools: dict[str, FakePool] = {
        "kv": MLATokenToKVPoolHost(layout),
        "indexer": DSAIndexerPoolHost(layout),
        "draft": MHATokenToKVPoolHost(layout),
    }
    for i, pool in enumerate(pools.values()):
        scramble(pool, seed + i)
    return pools


def sidecars(
    pools: dict[str, FakePool], keys: list[str], *pages: int, names: str = "indexer draft"
) -> list[Any]:
    return [transfer(name, keys, indices(pools[name], *pages), source="kv") for name in names.split()]


def store_pages(backend: Any, pools: dict[str, FakePool], keys: list[str], *pages: int) -> None:
    """What SGLang's backup does: sidecars, then KV."""
    assert backend.batch_set_v2(sidecars(pools, keys, *pages)) == {
        name: [True] * len(keys) for name in ("draft", "indexer")
    }
    assert backend.batch_set_v1(keys, indices(pools["kv"], *pages)) == [True] * len(keys)


def same(ours: dict[str, FakePool], page: int, theirs: dict[str, FakePool], other: int) -> bool:
    return all(page_bytes(ours[name], page) == page_bytes(theirs[name], other) for name in ours)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_page_comes_back_with_all_its_sidecars(
    replica: Replicas, store: MemoryBackend, layout: str
) -> None:
    """KV without its indexer pages gives wrong text on a hit, and nothing in the log."""
    ours, theirs = sparse(1, layout), sparse(50)
    a, b = replica(ours), replica(theirs)
    store_pages(a, ours, KEYS[:3], 1, 2, 3)
    assert store.stats().objects == 3
    assert a._adapter.staged.used_bytes == 0
    query = [transfer(name, KEYS[:4], source="kv") for name in ("indexer", "draft")]
    found = b.batch_exists_v2(KEYS[:4], query)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    assert found.extra_pool_hit_pages == {"kv": 3, "indexer": 3, "draft": 3}
    reads = store.stats().details["reads"]
    assert b.batch_get_v1(KEYS[:3], indices(theirs["kv"], 7, 8, 9)) == [True] * 3
    got = b.batch_get_v2(sidecars(theirs, KEYS[:3], 7, 8, 9))
    assert got == {"indexer": [True] * 3, "draft": [True] * 3}
    assert store.stats().details["reads"] == reads + 3
    assert all(same(ours, page, theirs, page + 6) for page in (1, 2, 3))
    assert b._adapter.held.used_bytes == 0


def test_kv_alone_is_not_stored(replica: Replicas, store: MemoryBackend) -> None:
    """A sidecar write that failed must not leave a page behind that looks whole."""
    pools = sparse(2)
    a = replica(pools)
    assert a.batch_set_v1(KEYS[:2], indices(pools["kv"], 1, 2)) == [False, False]
    assert a.batch_set_v2(sidecars(pools, KEYS[:2], 1, 2, names="indexer")) == {"indexer": [True, True]}
    assert a.batch_set_v1(KEYS[:2], indices(pools["kv"], 1, 2)) == [False, False]
    assert store.stats().objects == 0
    assert store.stats().details["reservations"] == 0
    assert a.batch_exists(KEYS[:2]) == 0


def test_sidecars_alone_are_invisible_and_expire(
    replica: Replicas, store: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup cut off between its two calls must neither leak memory nor be completed by another's KV."""
    from hicache.clock import ManualClock
    from hicache.integrations.sglang import storage

    clock = ManualClock()
    monkeypatch.setattr(storage, "SystemClock", lambda: clock)
    pools = sparse(3)
    a = replica(pools, staged_seconds=10.0)
    a.batch_set_v2(sidecars(pools, KEYS[:2], 1, 2))
    assert store.stats().objects == 0
    assert a.batch_exists_v2(KEYS[:2], []).kv_hit_pages == 0
    clock.advance(10.5)
    assert a.batch_set_v1(KEYS[:2], indices(pools["kv"], 1, 2)) == [False, False]
    assert a._adapter.staged.used_bytes == 0
    assert a._adapter.staged.expired == 2
    store_pages(a, pools, KEYS[:2], 1, 2)


def test_what_waits_for_kv_is_bounded(replica: Replicas) -> None:
    """SGLang hands over the sidecars of a whole prompt before its first KV page."""
    pools = sparse(4)
    one = sum(len(page_bytes(pools[name], 0)) for name in ("indexer", "draft"))
    a = replica(pools, staged_bytes=2 * one)
    result = a.batch_set_v2(sidecars(pools, KEYS[:4], 1, 2, 3, 4))
    assert result["draft"] == result["indexer"] or sum(result["draft"]) + sum(result["indexer"]) < 8
    assert a._adapter.staged.used_bytes <= 2 * one
    done = a.batch_set_v1(KEYS[:4], indices(pools["kv"], 1, 2, 3, 4))
    assert done == sorted(done, reverse=True)
    assert a.batch_exists(KEYS[:4]) == sum(done)


def test_sidecars_staged_again_replace_the_older_ones(replica: Replicas) -> None:
    """The host page moved between two attempts; old bytes must not end up with the KV of the second."""
    ours, theirs = sparse(5), sparse(60)
    a, b = replica(ours), replica(theirs)
    a.batch_set_v2(sidecars(ours, KEYS[:1], 1))
    store_pages(a, ours, KEYS[:1], 6)
    b.batch_get_v1(KEYS[:1], indices(theirs["kv"], 0))
    b.batch_get_v2(sidecars(theirs, KEYS[:1], 0))
    assert same(ours, 6, theirs, 0)


def test_a_backup_of_stored_pages_writes_nothing_and_succeeds(
    replica: Replicas, store: MemoryBackend
) -> None:
    """The second replica that computed a prefix must not be told that its backup failed."""
    pools = sparse(6)
    a, b = replica(pools), replica(pools)
    store_pages(a, pools, KEYS[:3], 1, 2, 3)
    stored = store.stats().details["stored"]
    store_pages(b, pools, KEYS[:4], 1, 2, 3, 4)
    assert store.stats().details["stored"] == stored + 1
    assert b._adapter.staged.used_bytes == 0


def test_sidecars_read_without_their_kv_are_fetched(replica: Replicas) -> None:
    """Held pages may have been dropped for room; the sidecar call must then read for itself."""
    ours, theirs = sparse(7), sparse(70)
    a, b = replica(ours), replica(theirs, held_bytes=1)
    store_pages(a, ours, KEYS[:2], 1, 2)
    assert b.batch_get_v1(KEYS[:2], indices(theirs["kv"], 4, 5)) == [True, True]
    assert b.batch_get_v2(sidecars(theirs, KEYS[:3], 4, 5, 6)) == {
        "indexer": [True, True, False],
        "draft": [True, True, False],
    }
    assert same(ours, 2, theirs, 5)


def test_a_short_read_is_short_for_kv_and_sidecars_alike(replica: Replicas, store: MemoryBackend) -> None:
    """KV may not run ahead of its sidecars: the hit ends where the first of them does."""
    ours, theirs = sparse(8), sparse(80)
    a, b = replica(ours), replica(theirs)
    store_pages(a, ours, KEYS[:8], *range(1, 9))
    assert b.batch_exists(KEYS[:8]) == 8
    (gone,) = [key for key in store._objects if key.endswith(KEYS[5])]
    store.delete([gone])
    assert b.batch_get_v1(KEYS[:8], indices(theirs["kv"], *range(8))).index(False) == 5
    for done in b.batch_get_v2(sidecars(theirs, KEYS[:8], *range(8))).values():
        assert done.index(False) == 5


def test_a_model_without_kv_bytes_commits_with_its_anchor(replica: Replicas, store: MemoryBackend) -> None:
    """Some models keep everything in sidecars; their empty KV call is still what makes a page visible."""

    def pools() -> dict[str, FakePool]:
        return {
            "kv": LogicalHostPool(),
            "deepseek_v4_c4": MLATokenToKVPoolHost(),
            "deepseek_v4_c4_indexer": DSAIndexerPoolHost(),
        }

    ours, theirs = pools(), pools()
    scramble(ours["deepseek_v4_c4"], 9)
    scramble(ours["deepseek_v4_c4_indexer"], 10)
    names = "deepseek_v4_c4 deepseek_v4_c4_indexer"
    config = FakeConfig(is_mla_model=True)
    a, b = replica(ours, config), replica(theirs, config)
    a.batch_set_v2(sidecars(ours, KEYS[:2], 1, 2, names=names))
    assert store.stats().objects == 0
    assert a.batch_set_v1(KEYS[:2], indices(ours["kv"], 1, 2)) == [True, True]
    assert store.stats().objects == 2
    assert b.batch_get(KEYS[:2], [ours["kv"].get_dummy_flat_data_page()] * 2)[1] is not None
    assert b.batch_get_v2(sidecars(theirs, KEYS[:2], 3, 4, names=names)) == {
        name: [True, True] for name in names.split()
    }
    assert page_bytes(theirs["deepseek_v4_c4"], 4) == page_bytes(ours["deepseek_v4_c4"], 2)


def test_a_draft_pool_that_comes_late_changes_what_a_page_is(replica: Replicas) -> None:
    """A hit without the draft's KV halves the speed of speculative decoding, silently."""
    pools = sparse(11)
    plain = {name: pools[name] for name in ("kv", "indexer")}
    a, b = replica(plain), replica(plain)
    a.batch_set_v2(sidecars(pools, KEYS[:1], 1, names="indexer"))
    assert a.batch_set_v1(KEYS[:1], indices(pools["kv"], 1)) == [True]
    assert b.batch_exists(KEYS[:1]) == 1
    b.register_mem_host_pool_v2(pools["draft"], "draft")
    assert b.batch_exists(KEYS[:1]) == 0
    store_pages(b, pools, KEYS[:1], 1)
    assert b.batch_exists(KEYS[:1]) == 1


def test_a_pool_that_was_never_registered_is_a_miss(
    replica: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that needs a sidecar which the store cannot have must not get its KV alone."""
    pools = {"kv": MLATokenToKVPoolHost()}
    a = replica(pools)
    a.batch_set_v1(KEYS[:2], indices(pools["kv"], 1, 2))
    for _ in range(3):
        found = a.batch_exists_v2(KEYS[:2], [transfer("indexer", KEYS[:2], source="kv")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert caplog.text.count("pool 'indexer' was never registered") == 1


def test_a_hit_policy_that_is_not_supported_is_a_miss(
    replica: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """Counting pages by a rule we do not know could restore a state that is not there."""
    pools = sparse(12)
    a = replica(pools)
    store_pages(a, pools, KEYS[:2], 1, 2)
    found = a.batch_exists_v2(KEYS[:2], [transfer("indexer", KEYS[:2], policy="block_groups", source="kv")])
    assert found.kv_hit_pages == 0
    assert "asks for hit policy 'block_groups', which is not supported" in caplog.text


@pytest.mark.parametrize(
    ("pools", "config", "said"),
    [
        ({"kv": MHATokenToKVPoolHost(), "auxiliary_swa": MHATokenToKVPoolHost()}, {}, "'auxiliary_swa'"),
        (
            {"kv": MLATokenToKVPoolHost(), "draft": MHATokenToKVPoolHost()},
            {"is_mla_model": True, "tp_size": 2},
            "split over 2 TP ranks",
        ),
        ({"kv": MLATokenToKVPoolHost()}, {"dcp_size": 2}, "--dcp-size 1"),
        ({"kv": MHATokenToKVPoolHost()}, {"model_name": None}, "model_id"),
        ({"kv": LogicalHostPool()}, {}, "hold no bytes"),
    ],
)
def test_what_cannot_be_kept_apart_keeps_l3_off(
    replica: Replicas, pools: dict[str, FakePool], config: dict[str, object], said: str
) -> None:
    """Rather no L3 than pages that one rank or one model takes for its own."""
    backend = replica(pools, FakeConfig(**config))
    assert said in backend.off_because
    assert backend.batch_set_v1(KEYS[:1], indices(pools["kv"], 0)) == [False]


def hybrid(seed: int) -> dict[str, FakePool]:
    pools: dict[str, FakePool] = {
        "kv": MHATokenToKVPoolHost(),
        "swa": MHATokenToKVPoolHost("page_first", layers=3),
        "mamba": MambaPoolHost("layer_first"),
    }
    for i, pool in enumerate(pools.values()):
        scramble(pool, seed + i)
    return pools


def test_windows_and_states_are_their_own_objects(replica: Replicas, store: MemoryBackend) -> None:
    """Their pages are there at boundaries only; a hit must end where all of them are."""
    ours, theirs = hybrid(13), hybrid(90)
    theirs["mamba"] = MambaPoolHost("page_first")
    a, b = replica(ours), replica(theirs)
    a.batch_set_v2([transfer("swa", KEYS[2:4], indices(ours["swa"], 5, 6), policy="trailing_pages")])
    a.batch_set_v2([transfer("mamba", KEYS[3:4], indices(ours["mamba"], 9), policy="trailing_pages")])
    assert a.batch_set_v1(KEYS[:6], indices(ours["kv"], *range(6))) == [True] * 6
    assert store.stats().objects == 9
    query = [
        transfer("swa", KEYS[:2], policy="trailing_pages"),
        transfer("mamba", KEYS[:1], policy="trailing_pages"),
    ]
    found = b.batch_exists_v2(KEYS[:6], query)
    assert found.restorable_prefix_pages == [4]
    assert found.kv_hit_pages == 4
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 4, "mamba": 4}
    assert b.batch_get_v1(KEYS[:4], indices(theirs["kv"], *range(4))) == [True] * 4
    got = b.batch_get_v2(
        [
            transfer("swa", KEYS[2:4], indices(theirs["swa"], 1, 2), policy="trailing_pages"),
            transfer("mamba", KEYS[3:4], indices(theirs["mamba"], 3), policy="trailing_pages"),
        ]
    )
    assert got == {"swa": [True, True], "mamba": [True]}
    assert page_bytes(theirs["swa"], 2) == page_bytes(ours["swa"], 6)
    assert page_bytes(theirs["mamba"], 3) == page_bytes(ours["mamba"], 9)


@given(
    st.lists(st.booleans(), min_size=0, max_size=10),
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.integers(1, 4),
)
def test_the_boundaries_of_a_window_equal_the_definition(
    full: list[bool], swa: list[bool], window: int
) -> None:
    """One boundary too many restores a prefix whose window is not there."""
    from hicache.integrations.sglang.adapter import _boundaries

    present = bytearray(swa[: len(full)])
    asked = transfer("swa", KEYS[:window], policy="trailing_pages")
    accepted = _boundaries(present, asked).tolist()
    expected = [False] + [
        all(present[max(0, length - window) : length]) for length in range(1, len(present) + 1)
    ]
    assert accepted == expected


def test_a_recurrent_state_belongs_to_its_rank_even_where_kv_is_shared(
    replica: Replicas, store: MemoryBackend
) -> None:
    """Latent KV is written by one rank, recurrent states by each: their keys must differ."""
    ranks = []
    for rank in range(2):
        pools: dict[str, FakePool] = {"kv": MLATokenToKVPoolHost(), "mamba": MambaPoolHost()}
        scramble(pools["mamba"], rank)
        backend = replica(pools, FakeConfig(is_mla_model=True, tp_rank=rank, tp_size=2))
        ranks.append((backend, pools))
        state = transfer("mamba", KEYS[:1], indices(pools["mamba"], 3), policy="trailing_pages")
        assert backend.batch_set_v2([state]) == {"mamba": [True]}
    assert store.stats().objects == 2
    for backend, pools in ranks:
        state = transfer("mamba", KEYS[:1], indices(pools["mamba"], 8), policy="trailing_pages")
        assert backend.batch_get_v2([state]) == {"mamba": [True]}
        assert page_bytes(pools["mamba"], 8) == page_bytes(pools["mamba"], 3)
