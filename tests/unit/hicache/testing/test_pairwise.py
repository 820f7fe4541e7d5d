"""The covering array covers, stays small, and is the same every time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hicache.testing.pairwise import pairwise


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_every_two_values_meet(sizes: list[int]) -> None:
    """A pair of settings that nobody runs together could be broken for years."""
    factors = {f"f{i}": range(size) for i, size in enumerate(sizes)}
    rows = pairwise(factors)
    for a, b in itertools.combinations(factors, 2):
        met = {(row[a], row[b]) for row in rows}
        assert met == set(itertools.product(factors[a], factors[b]))


def test_it_is_small_and_deterministic() -> None:
    """The default run would take as long as the full product, or test something else each day."""
    factors = {"a": range(4), "b": range(6), "c": range(3), "d": range(3), "e": range(3), "f": range(3)}
    rows = pairwise(factors)
    assert len(rows) <= 30
    assert rows == pairwise(factors)
