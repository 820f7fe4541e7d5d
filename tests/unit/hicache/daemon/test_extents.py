"""Extents of the arena never overlap, nothing of it is lost, and room comes back whole."""

from __future__ import annotations

import random

import pytest

from hicache.daemon.extents import GRAIN, Extent, ExtentMap
from hicache.errors import DoubleFree


def test_random_histories_never_overlap_and_lose_nothing() -> None:
    """Two objects in one place would be written over each other."""
    rng = random.Random(11)
    arena = ExtentMap(4096)
    arena.extend(256 * GRAIN)
    held: list[Extent] = []
    for step in range(6000):
        if held and rng.random() < 0.5:
            arena.give(held.pop(rng.randrange(len(held))))
        elif (extent := arena.take(rng.randrange(1, 9 * GRAIN), slot=0, generation=step)) is not None:
            held.append(extent)
        if step % 1500 == 700:
            arena.extend(64 * GRAIN)
        arena.check_integrity()
        assert sorted(one.offset for one in arena) == sorted(one.offset for one in held)
    for extent in held:
        arena.give(extent)
    arena.check_integrity()
    assert arena.largest == arena.free_bytes == arena.end - 4096 == (256 + 4 * 64) * GRAIN


def test_a_freed_place_goes_to_the_next_of_its_size() -> None:
    """Objects of a few sizes would cut the arena into gaps that none of them fits."""
    arena = ExtentMap(0)
    arena.extend(1000 * GRAIN)
    large = [arena.take(8 * GRAIN, slot=0, generation=0) for _ in range(20)]
    small = [arena.take(3 * GRAIN, slot=0, generation=0) for _ in range(20)]
    assert None not in (*large, *small)
    arena.give(large[7])
    arena.give(small[11])
    assert arena.take(3 * GRAIN, slot=0, generation=0).offset == small[11].offset
    assert arena.take(8 * GRAIN, slot=0, generation=0).offset == large[7].offset


def test_a_place_is_freed_once() -> None:
    """A place freed twice would be given to two writers."""
    arena = ExtentMap(0)
    arena.extend(4 * GRAIN)
    extent = arena.take(1, slot=0, generation=0)
    arena.give(extent)
    with pytest.raises(DoubleFree):
        arena.give(extent)
    again = arena.take(1, slot=0, generation=0)
    assert again.offset == extent.offset
    with pytest.raises(DoubleFree):
        arena.give(extent)
