"""Device and host pools: shapes, canonical bytes in every layout, poison."""

from __future__ import annotations

import random

import pytest
import torch

from hicache.errors import ConfigError, InvariantViolation
from hicache.testing.pools import FULL, MAMBA, SWA, fill, hybrid_spec, page_bytes
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostMemory, HostPools
from hicache.tiers.layouts import HostLayout, PageGeometry, word_dtype

CAPACITIES = {FULL: 6, SWA: 5, MAMBA: 3}
layouts = pytest.mark.parametrize("layout", list(HostLayout))
page_sizes = pytest.mark.parametrize("page_size", [1, 16, 64])


def test_the_shape_of_each_layout_is_what_its_name_says() -> None:
    """Engines index these tensors; an axis in another place reads other tokens."""
    pool = hybrid_spec(16).components[0].pools[0]
    shapes = {layout: PageGeometry(pool, 6, layout).shape for layout in HostLayout}
    assert shapes == {
        HostLayout.LAYER_FIRST: (2, 6, 16, 2, 2, 8),
        HostLayout.PAGE_FIRST: (6, 16, 2, 2, 2, 8),
        HostLayout.PAGE_FIRST_DIRECT: (6, 2, 16, 2, 2, 8),
    }


def test_device_pools_are_layer_first_in_the_dtype_of_the_spec() -> None:
    """The engine takes one layer of a pool as a view."""
    pools = DevicePools(hybrid_spec(16), CAPACITIES)
    assert pools.pool("full_kv").shape == (2, 6, 16, 2, 2, 8)
    assert pools.pool("full_kv").dtype is torch.bfloat16
    assert [pool.name for pool, _ in pools.component_pools(FULL)] == ["full_kv", "full_index", "full_draft"]
    assert pools.size_bytes == sum(CAPACITIES[c.component] * c.page_bytes for c in pools.spec.components)


@layouts
@page_sizes
def test_a_page_reads_in_canonical_order_whatever_the_layout(layout: HostLayout, page_size: int) -> None:
    """Objects in L3 are shared between instances with different host layouts."""
    spec = hybrid_spec(page_size)
    pools = HostPools(spec, CAPACITIES, layout)
    rng = random.Random(page_size)
    for component in spec.kinds:
        for slot in rng.sample(range(CAPACITIES[component]), 3):
            written = [rng.randbytes(pool.page_bytes) for pool in spec[component].pools]
            pools.write_page(component, slot, [memoryview(part) for part in written])
            read = [bytearray(len(part)) for part in written]
            pools.read_page(component, slot, [memoryview(part) for part in read])
            assert read == written
            truth = page_bytes(pools, component, slot)
            assert [truth[pool.name] for pool in spec[component].pools] == written


@layouts
def test_writing_a_page_leaves_its_neighbours_alone(layout: HostLayout) -> None:
    """A stray row would corrupt another conversation."""
    spec = hybrid_spec(16)
    pools = HostPools(spec, CAPACITIES, layout)
    before = {slot: page_bytes(pools, FULL, slot) for slot in range(6) if slot != 3}
    parts = [memoryview(b"\x5a" * pool.page_bytes) for pool in spec[FULL].pools]
    pools.write_pages(FULL, [3], [parts])
    assert {slot: page_bytes(pools, FULL, slot) for slot in before} == before
    assert set(page_bytes(pools, FULL, 3)["full_kv"]) == {0x5A}


@layouts
def test_parts_may_begin_at_any_address(layout: HostLayout) -> None:
    """A third-party backend may hand out buffers that are not aligned to words."""
    spec = hybrid_spec(1)
    pools = HostPools(spec, CAPACITIES, layout)
    raw = [bytes(range(pool.page_bytes)) for pool in spec[MAMBA].pools]
    pools.write_page(MAMBA, 2, [memoryview(b"x" + part)[1:] for part in raw])
    read = [bytearray(len(part) + 1) for part in raw]
    pools.read_page(MAMBA, 2, [memoryview(part)[1:] for part in read])
    assert [bytes(part[1:]) for part in read] == raw


def test_parts_of_the_wrong_size_or_number_are_refused() -> None:
    """A sidecar left out of an object must not pass as a page."""
    spec = hybrid_spec(1)
    pools = HostPools(spec, CAPACITIES)
    parts = [memoryview(bytearray(pool.page_bytes)) for pool in spec[FULL].pools]
    with pytest.raises(ValueError, match="zip"):
        pools.read_page(FULL, 0, parts[:-1])
    with pytest.raises(ValueError, match="reshape"):
        pools.write_page(FULL, 0, [parts[0], parts[1], parts[2][:-2]])


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_slot_outside_the_pool_breaks_a_law(slot: int) -> None:
    """numpy would wrap -1 round to the last page: somebody else's."""
    spec = hybrid_spec(1)
    pools = HostPools(spec, CAPACITIES)
    parts = [memoryview(bytearray(pool.page_bytes)) for pool in spec[FULL].pools]
    with pytest.raises(InvariantViolation, match="host FULL"):
        pools.read_page(FULL, slot, parts)


@layouts
def test_poison_covers_every_pool_of_the_family_and_nothing_else(layout: HostLayout) -> None:
    """Tests of the cache rely on a released page being unreadable in every sidecar."""
    spec = hybrid_spec(16)
    host, device = HostPools(spec, CAPACITIES, layout), DevicePools(spec, CAPACITIES)
    for pools in (host, device):
        pools.poison(FULL, [4, 1])
        for slot in range(6):
            poisoned = {set(part) == {0xFF} for part in page_bytes(pools, FULL, slot).values()}
            assert poisoned == {slot in (1, 4)}


def test_a_state_copy_takes_every_pool_and_layer_along() -> None:
    """Copy-on-write of half a state makes the next token wrong, not the current one."""
    pools = DevicePools(hybrid_spec(16), CAPACITIES)
    fill(pools, 1)
    assert page_bytes(pools, MAMBA, 0) != page_bytes(pools, MAMBA, 2)
    pools.copy_state(0, 2)
    assert page_bytes(pools, MAMBA, 0) == page_bytes(pools, MAMBA, 2)


def test_a_pool_without_pages_is_refused() -> None:
    """A tier with an empty component could never make a hit."""
    with pytest.raises(ConfigError, match="SWA"):
        DevicePools(hybrid_spec(16), {**CAPACITIES, SWA: 0})


def test_an_unknown_layout_lists_what_exists() -> None:
    """An operator who copies SGLang's page_head must learn what to write instead."""
    with pytest.raises(ConfigError, match=r"page_head.*layer_first, page_first, page_first_direct"):
        HostLayout.parse("page_head")
    assert HostLayout.parse("page_first") is HostLayout.PAGE_FIRST


def test_memory_is_pinned_exactly_where_a_gpu_copies_from_it() -> None:
    """Pinning without a GPU fails; not pinning with one makes copies synchronous."""
    assert HostMemory.for_device("cpu") is HostMemory.PLAIN
    assert HostMemory.for_device("cuda:1") is HostMemory.PINNED


def test_words_divide_every_row() -> None:
    """A word that straddles two rows would move a neighbour's bytes."""
    assert [word_dtype(n).itemsize for n in (64, 12, 6, 5)] == [8, 4, 2, 1]
    assert word_dtype(64, 12).itemsize == 4
