"""Bytes of a page through the store: the same object whatever the host layout and the way in."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.sglang_pools import (
    LAYOUTS,
    FakeConfig,
    FakePool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PackedPoolHost,
    Replicas,
    indices,
    page_bytes,
    scramble,
    wipe,
)

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(8)]


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_replicas_with_different_host_layouts_share_pages(
    replica: Replicas, writer: str, reader: str, dtype: torch.dtype
) -> None:
    """Two replicas tuned differently would otherwise load each other's KV with heads and layers swapped."""
    ours = MHATokenToKVPoolHost(writer, dtype=dtype)
    theirs = MHATokenToKVPoolHost(reader, dtype=dtype)
    scramble(ours, 1)
    a, b = replica({"kv": ours}), replica({"kv": theirs})
    assert a.batch_set_v1(KEYS[:3], indices(ours, 5, 2, 9)) == [True] * 3
    assert b.batch_exists(KEYS) == 3
    assert b.batch_get_v1(KEYS[:3], indices(theirs, 0, 15, 7)) == [True] * 3
    assert [page_bytes(theirs, page) for page in (0, 15, 7)] == [page_bytes(ours, page) for page in (5, 2, 9)]
    assert not any(page_bytes(theirs, 1))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((MHATokenToKVPoolHost, layout) for layout in LAYOUTS),
        *((MLATokenToKVPoolHost, layout) for layout in LAYOUTS if layout != "page_head"),  # it has no heads
    ],
)
def test_the_copying_calls_and_the_zero_copy_calls_share_objects(
    replica: Replicas, kind: type[MHATokenToKVPoolHost], layout: str
) -> None:
    """`interface_v1` is a matter of speed; with and without it replicas must understand each other."""
    ours, theirs = kind(layout), kind("layer_first")
    scramble(ours, 2)
    a, b = replica({"kv": ours}), replica({"kv": theirs})
    assert a.batch_set(KEYS[:2], [ours.get_data_page(4), ours.get_data_page(8)])
    assert b.batch_get_v1(KEYS[:2], indices(theirs, 3, 6)) == [True, True]
    assert [page_bytes(theirs, page) for page in (3, 6)] == [page_bytes(ours, page) for page in (1, 2)]
    wipe(theirs)
    assert b.batch_set_v1(KEYS[2:3], indices(theirs, 3)) == [True]
    pages = a.batch_get(KEYS[:4], [ours.get_dummy_flat_data_page() for _ in range(4)])
    assert [page is None for page in pages] == [False, False, False, True]
    ours.set_from_flat_data_page(0, pages[1])
    assert page_bytes(ours, 0) == page_bytes(ours, 2)


def test_a_pool_of_unknown_make_is_stored_in_its_own_order(
    replica: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes cannot be reordered, so a replica with another layout must miss instead of loading them."""
    ours, theirs = PackedPoolHost("page_first_direct"), PackedPoolHost("page_first_direct")
    other = PackedPoolHost("page_first_direct")
    other.layout = "page_unified"
    scramble(ours, 3)
    a, b, c = replica({"kv": ours}), replica({"kv": theirs}), replica({"kv": other})
    assert "only replicas with the same --hicache-mem-layout share them" in caplog.text
    assert a.batch_set_v1(KEYS[:2], indices(ours, 1, 2)) == [True, True]
    assert b.batch_get_v1(KEYS[:2], indices(theirs, 4, 5)) == [True, True]
    assert page_bytes(theirs, 5) == page_bytes(ours, 2)
    assert c.batch_exists(KEYS[:2]) == 0


def test_a_known_pool_that_is_laid_out_otherwise_keeps_l3_off(replica: Replicas) -> None:
    """A new SGLang may keep a class name and swap two axes; every page would be nonsense."""

    class Swapped(MHATokenToKVPoolHost):
        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            return super().get_data_page(index).flip(0)

    Swapped.__name__ = "MHATokenToKVPoolHost"
    pool = Swapped()
    scramble(pool, 4)
    backend = replica({"kv": pool})
    assert "not laid out as in the tested version" in backend.off_because
    assert backend.batch_set_v1(KEYS[:1], indices(pool, 0)) == [False]


FIELDS = {
    "model": {"model_name": "another"},
    "tp rank": {"tp_rank": 1, "tp_size": 2},
    "tp size": {"tp_size": 2},
    "pp": {"pp_size": 2},
    "cp": {"attn_cp_size": 2},
}
POOLS = {
    "dtype": MHATokenToKVPoolHost(dtype=torch.float16),
    "8-bit dtype": MHATokenToKVPoolHost(dtype=torch.float8_e5m2),
    "layers": MHATokenToKVPoolHost(layers=4),
    "heads": MHATokenToKVPoolHost(heads=4, dim=4),
    "page size": MHATokenToKVPoolHost(page_size=8),
    "latent": MLATokenToKVPoolHost(dim=32),
}
EXTRAS = {"weights": {"weight_version": "2"}, "own words": {"identity": {"rope": "yarn"}}}


@pytest.mark.parametrize("field", [*FIELDS, *POOLS, *EXTRAS])
def test_whatever_changes_the_bytes_changes_the_key(replica: Replicas, field: str) -> None:
    """One field less in the identity, and a server with another dtype or other weights loads our KV."""
    pool = MHATokenToKVPoolHost()
    a = replica({"kv": pool})
    other: FakePool = POOLS.get(field, pool)
    b = replica({"kv": other}, FakeConfig(**FIELDS.get(field, {})), **EXTRAS.get(field, {}))
    assert not b.off_because
    assert a.batch_set_v1(KEYS[:1], indices(pool, 0)) == [True]
    assert b.batch_exists(KEYS[:1]) == 0
    assert b.batch_set_v1(KEYS[:1], indices(other, 0)) == [True]
    assert b.batch_get_v1(KEYS[:1], indices(other, 1)) == [True]
    assert a.batch_exists(KEYS[:1]) == 1


def test_one_model_under_two_names_shares_when_told_so(replica: Replicas) -> None:
    """Two deployments serve one checkpoint under their own names; model_id says that it is one."""
    pool = MHATokenToKVPoolHost()
    a = replica({"kv": pool}, FakeConfig(model_name="left"), model_id="one")
    b = replica({"kv": pool}, FakeConfig(model_name="right"), model_id="one")
    assert a.batch_set_v1(KEYS[:1], indices(pool, 0)) == [True]
    assert b.batch_exists(KEYS[:1]) == 1


def test_ranks_with_their_own_heads_never_meet(replica: Replicas, store: MemoryBackend) -> None:
    """Four ranks write different bytes under one page hash; each must read its own back."""
    pools = [MHATokenToKVPoolHost() for _ in range(4)]
    ranks = [replica({"kv": pool}, FakeConfig(tp_rank=rank, tp_size=4)) for rank, pool in enumerate(pools)]
    for rank, (backend, pool) in enumerate(zip(ranks, pools, strict=True)):
        scramble(pool, rank)
        assert backend.batch_set_v1(KEYS[:1], indices(pool, 2)) == [True]
    assert store.stats().objects == 4
    for backend, pool in zip(ranks, pools, strict=True):
        assert backend.batch_get_v1(KEYS[:1], indices(pool, 7)) == [True]
        assert page_bytes(pool, 7) == page_bytes(pool, 2)
    assert len({page_bytes(pool, 7) for pool in pools}) == 4


def test_ranks_with_the_same_latent_kv_store_it_once(replica: Replicas, store: MemoryBackend) -> None:
    """Latent KV is the same on every rank: one writes, all read one object."""
    pools = [MLATokenToKVPoolHost() for _ in range(2)]
    ranks = [
        replica({"kv": pool}, FakeConfig(tp_rank=rank, tp_size=2, is_mla_model=True))
        for rank, pool in enumerate(pools)
    ]
    scramble(pools[0], 5)
    assert ranks[1].batch_set_v1(KEYS[:1], indices(pools[1], 2)) == [False]
    assert ranks[0].batch_set_v1(KEYS[:1], indices(pools[0], 2)) == [True]
    assert ranks[1].batch_get_v1(KEYS[:1], indices(pools[1], 3)) == [True]
    assert page_bytes(pools[1], 3) == page_bytes(pools[0], 2)
    assert store.stats().objects == 1
