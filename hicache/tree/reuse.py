"""When used pages are used again: learned from a sample of all accesses, of pages cached or long gone.

Keeps its own bounded records, whatever the cache holds, so that no decision of the cache can hide what
another would have given. Deterministic; advice only, never a promise.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_PER_OCTAVE = 4  # age bins per doubling
_BINS = 96
_DENSE = 16  # all pages of a path before twice this are sampled, then this many per doubling
_REFRESH = 16  # accesses between two estimates
_COHORTS = 1024
_SURE = 0.999  # no estimate says that a page returns for certain

Kind = int  # what the last access of a page was
FRESH, REUSED = 0, 1  # written; read again since it was written
KINDS = (FRESH, REUSED)


def _floor(bin_: int) -> int:
    octave, rest = divmod(bin_, _PER_OCTAVE)
    return rest if octave == 0 else (1 << (octave - 1)) * (_PER_OCTAVE + rest)


_FLOORS = np.array([_floor(b) for b in range(_BINS + 1)], np.float64)
_WIDTHS = np.diff(_FLOORS)
_EDGES: list[int] = [int(x) for x in _FLOORS[1:-1]]


def age_bin(age: int) -> int:
    """Return the bin of an age in accesses; the last one is open."""
    return bisect_right(_EDGES, age)


@dataclass(slots=True)
class _Record:
    last: int  # access number
    weight: int  # pages that it stands for
    kind: Kind


class ReuseAges:
    """Estimates, by kind and age since the last access, how much keeping a page is worth.

    Ages count accesses (requests), not seconds: an idle night makes nothing older. Evidence halves in as
    many accesses as the records reach back, and in no fewer than `half_life`: what is remembered for longer
    takes longer to be learned. Times handed in must not go back.
    """

    def __init__(self, *, half_life: int = 256) -> None:
        self._half_life = half_life
        self._now = 0
        self._refreshed = 0
        self._records: dict[int, _Record] = {}  # least recently used first
        self._weight = 0
        # Cohorts of pages by the access that was their last one, oldest first, and their weight by kind.
        self._born: list[int] = [0]
        self._times: list[float] = [float("-inf")]
        self._alive: list[list[int]] = [[0], [0]]
        self._returns = np.zeros((len(KINDS), _BINS))  # weight used again, by age
        self._exposure = np.zeros((len(KINDS), _BINS))  # weight x accesses spent at an age
        self._worth: list[list[float]] = [[0.0] * _BINS, [0.0] * _BINS]

    # -- what is observed ----------------------------------------------------------------------

    def access(self, now: float) -> None:
        """Begin one more access, at time `now`."""
        self._now += 1
        self._born.append(self._now)
        self._times.append(now)
        for alive in self._alive:
            alive.append(0)
        if len(self._born) > _COHORTS:
            self._thin()
        if self._now - self._refreshed >= _REFRESH:
            self._refresh()

    def see(self, key: int, weight: int, kind: Kind) -> None:
        """Record that the sampled page `key` was used by the current access: read (REUSED) or written.

        A page written that is known already was lost and computed again: it would have been a hit.
        """
        record = self._records.pop(key, None)
        if record is None:
            record = _Record(self._now, weight, kind)
            self._weight += weight
        else:
            self._returns[record.kind, age_bin(self._now - record.last)] += weight
            self._leave(record)
            record.last, record.kind = self._now, kind
        self._records[key] = record
        self._alive[kind][-1] += weight

    def bound(self, weight: int) -> None:
        """Forget the least recently used records above a total weight."""
        while self._weight > weight:
            record = self._records.pop(next(iter(self._records)))
            self._weight -= record.weight
            self._leave(record)

    @property
    def remembered(self) -> int:
        """Records and cohorts held; bounded by bound() and by a constant."""
        return len(self._records) + len(self._born)

    def _leave(self, record: _Record) -> None:
        self._alive[record.kind][bisect_right(self._born, record.last) - 1] -= record.weight

    def _thin(self) -> None:
        """Join the older half of the cohorts pairwise: what is old need not be known to the access."""
        half = _COHORTS // 4 * 2
        for alive in self._alive:
            alive[:half] = [a + b for a, b in zip(alive[:half:2], alive[1:half:2], strict=True)]
        self._born[:half] = self._born[:half:2]
        self._times[:half] = self._times[:half:2]

    # -- what follows from it ------------------------------------------------------------------

    def worth(self, kind: Kind, last: float) -> float:
        """Hits per access of room, at best, from keeping a page whose last access was at time `last`."""
        age = self._now - self._born[bisect_right(self._times, last) - 1]
        return self._worth[kind][age_bin(age)]

    def _refresh(self) -> None:
        passed, self._refreshed = self._now - self._refreshed, self._now
        oldest = next(iter(self._records.values()), None)
        reach = self._now - oldest.last if oldest is not None else 0
        faded = 0.5 ** (passed / max(self._half_life, reach))
        bins = np.searchsorted(_FLOORS[1:-1], self._now - np.array(self._born), side="right")
        for kind in KINDS:
            spent = np.bincount(bins, np.array(self._alive[kind], np.float64), _BINS) * passed
            self._returns[kind] *= faded
            self._exposure[kind] *= faded
            self._exposure[kind] += spent
            self._worth[kind] = _best_rates(self._returns[kind], self._exposure[kind]).tolist()


def _best_rates(
    returns: npt.NDArray[np.float64], exposure: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return for each age the best of returns over time spent, over all ages to give up at (Gittins)."""
    rates = np.divide(returns, exposure, out=np.zeros(_BINS), where=exposure > 0)
    risk = rates * _WIDTHS
    chance = np.minimum(-np.expm1(-risk), _SURE)
    time = np.divide(chance, rates, out=_WIDTHS.copy(), where=risk > 1e-9)
    left = np.concatenate(([1.0], np.cumprod(1.0 - chance)))
    spent = np.concatenate(([0.0], np.cumsum(left[:-1] * time)))
    gained = left[:-1, None] - left[None, 1:]
    cost = spent[None, 1:] - spent[:-1, None]
    usable = (np.arange(_BINS)[:, None] <= np.arange(_BINS)[None, :]) & (exposure > 0)[None, :] & (cost > 0)
    best: npt.NDArray[np.float64] = np.divide(gained, cost, out=np.zeros_like(cost), where=usable).max(axis=1)
    return best


class Sampler:
    """Names the sampled pages of paths: each one by the chain of those before it, in its scope."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._weights: list[int] = []

    def weight(self, index: int) -> int:
        return self._weights[index]

    def positions(self, depth: int) -> list[int]:
        """Return the sampled pages before `depth`, densest at the front; the same for every path."""
        at = self._at
        while not at or at[-1] < depth:
            last = at[-1] + self._weights[-1] if at else 0
            at.append(last)
            self._weights.append(max(1, 1 << (last // _DENSE).bit_length() >> 1))
        return at[: bisect_left(at, depth)]

    @staticmethod
    def keys(scope: bytes, pages: Iterator[bytes | memoryview]) -> Iterator[int]:
        """Chain the contents of sampled pages, in order from the root."""
        chain = zlib.crc32(scope)
        for number, page in enumerate(pages):
            chain = zlib.crc32(page, chain)
            yield number << 32 | chain
