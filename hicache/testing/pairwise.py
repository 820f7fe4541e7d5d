"""All pairs of settings in few runs: a small covering array, the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows, one value per factor, such that every two values of two factors meet in a row.

    Greedy: each row starts from a pair not covered yet and takes, factor by factor, the value that
    covers most of what is left. At least as many rows as the two longest factors have combinations.
    """
    names = list(factors)
    left: dict[Pair, None] = dict.fromkeys(
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    )
    rows: list[dict[str, Any]] = []
    uses = {name: [0] * len(factors[name]) for name in names}
    while left:
        chosen = dict(next(iter(left)))
        for name in names:
            if name not in chosen:
                chosen[name] = min(
                    range(len(factors[name])),
                    key=lambda value: (-_gain(left, names, chosen, name, value), uses[name][value]),
                )
        for pair in itertools.combinations(((name, chosen[name]) for name in names), 2):
            left.pop(pair, None)
        for name in names:
            uses[name][chosen[name]] += 1
        rows.append({name: factors[name][chosen[name]] for name in names})
    return rows


def _gain(
    left: Mapping[Pair, None], names: list[str], chosen: Mapping[str, int], name: str, value: int
) -> int:
    """How many uncovered pairs `name`=value would make with what is chosen."""
    at = names.index(name)
    count = 0
    for other, taken in chosen.items():
        one, two = (other, taken), (name, value)
        count += ((one, two) if names.index(other) < at else (two, one)) in left
    return count
