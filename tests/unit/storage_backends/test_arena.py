"""Spans of a block never overlap, and nothing of the block is lost."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest

from hicache.errors import DoubleFree
from hicache.storage_backends.arena import ALIGNMENT, Arena, Span


def test_random_histories_never_overlap_and_lose_nothing() -> None:
    """Two objects in one place would be written over each other."""
    rng = random.Random(7)
    arena = Arena(ALIGNMENT, 64 * ALIGNMENT)
    held: list[Span] = []
    for _ in range(5000):
        if held and rng.random() < 0.5:
            arena.give_back(held.pop(rng.randrange(len(held))))
        elif (span := arena.try_take(rng.randrange(1, 9 * ALIGNMENT))) is not None:
            held.append(span)
        ends = sorted((s.offset, s.offset + s.size_bytes) for s in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        assert all(start >= ALIGNMENT and end <= 65 * ALIGNMENT for start, end in ends)
    for span in held:
        arena.give_back(span)
    assert arena.taken_bytes == 0
    assert arena.try_take(64 * ALIGNMENT) == Span(ALIGNMENT, 64 * ALIGNMENT)


def test_what_does_not_fit_is_refused_and_costs_nothing() -> None:
    """An oversized object would block the ones that fit."""
    arena = Arena(0, 4 * ALIGNMENT)
    assert arena.try_take(4 * ALIGNMENT + 1) is None
    assert arena.take(4 * ALIGNMENT + 1, deadline=time.monotonic() + 60) is None
    assert arena.try_take(4 * ALIGNMENT) is not None
    assert arena.take(1, deadline=time.monotonic()) is None


def test_a_waiting_taker_gets_the_span_given_back() -> None:
    """A read would time out beside free memory."""
    arena = Arena(0, ALIGNMENT)
    span = arena.try_take(1)
    assert span is not None
    got: list[Span | None] = []
    taker = threading.Thread(target=lambda: got.append(arena.take(1, deadline=time.monotonic() + 60)))
    taker.start()
    arena.give_back(span)
    taker.join(60)
    assert got == [span]


def test_giving_back_twice_is_refused() -> None:
    """The span would be handed to two owners."""
    arena = Arena(0, 4 * ALIGNMENT)
    span = arena.try_take(10)
    assert span is not None
    arena.give_back(span)
    with pytest.raises(DoubleFree):
        arena.give_back(span)
