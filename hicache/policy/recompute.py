"""Whether a hit is worth loading: what loading it would take, against computing it, both as measured.

Pure decisions over measurements that are handed in; equal measurements give equal decisions. Without
enough evidence a hit is loaded, as SGLang does.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from hicache.types import Tier

_RECENT = 4  # measurements remembered per size, and of prefill
_ENOUGH = 3  # of them
_SIZE_STEP = 4  # sizes within this factor are alike: a small transfer says little about a large one


class Choice(enum.Enum):
    """What to do with a hit on a lower tier."""

    LOAD = "load"
    TRIAL = "trial"  # load it, to see whether loading has become faster
    RECOMPUTE = "recompute"


class TransferTimes:
    """Seconds per byte of recent transfers, apart by size."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        """Take in a transfer of `size` bytes; one that was not measured (0 s) says nothing."""
        if size > 0 and seconds > 0:
            self._by_size.setdefault(_size_class(size), deque(maxlen=_RECENT)).append(seconds / size)

    def seconds(self, size: int) -> float | None:
        """Estimate a transfer of `size` bytes from the fastest of its like; None without enough evidence.

        The fastest: a transfer that others held up once says nothing about the link.
        """
        around = _size_class(size)
        near = [self._by_size[c] for c in (around, around - 1, around + 1) if c in self._by_size]
        for times in near:
            if len(times) >= _ENOUGH:
                return min(times) * size
        return None

    @property
    def bytes_per_s(self) -> float | None:
        """The fastest rate among all that is remembered, for people."""
        fastest = min((min(times) for times in self._by_size.values()), default=None)
        return 1.0 / fastest if fastest else None


def _size_class(size: int) -> int:
    return (max(size, 1).bit_length() - 1) // (_SIZE_STEP.bit_length() - 1)


@dataclass(slots=True)
class _Way:
    """How pages of one tier come up."""

    times: TransferTimes = field(default_factory=TransferTimes)
    recomputes: bool = False  # the last decision
    loaded_at: float = 0.0  # when something was last loaded, or tried


class LoadOrRecompute:
    """One cache's measurements and decisions, tier by tier. Owned by the cache's thread."""

    def __init__(self, *, margin: float, retry_s: float) -> None:
        """A decision changes only if the other is better by `margin` (0.25: a quarter).

        A tier that is not loaded from is tried again every `retry_s` seconds.
        """
        self._margin, self._retry_s = margin, retry_s
        self._ways = {Tier.HOST: _Way(), Tier.STORAGE: _Way()}
        self._prefill: deque[float] = deque(maxlen=_RECENT)  # seconds per token

    def loaded(self, tier: Tier, size: int, seconds: float) -> None:
        """Take in a transfer from `tier`: bytes, and how long it took."""
        self._ways[tier].times.add(size, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in a step of prefill."""
        if tokens > 0 and seconds > 0:
            self._prefill.append(seconds / tokens)

    def choose(self, tier: Tier, *, size: int, tokens: int, now: float) -> Choice:
        """Decide about a hit of `tokens` that takes `size` bytes from `tier`.

        What waits in front of it is left out on both sides: whoever computes instead of loading joins
        another queue, and the one that gets through more tokens per second is shorter in the end.
        """
        way = self._ways[tier]
        load_s = way.times.seconds(size)
        if load_s is None or len(self._prefill) < _ENOUGH or size <= 0:
            way.recomputes, way.loaded_at = False, now
            return Choice.LOAD
        compute_s = median(self._prefill) * tokens
        if way.recomputes:
            way.recomputes = load_s * (1 + self._margin) >= compute_s
        else:
            way.recomputes = load_s > compute_s * (1 + self._margin)
        if not way.recomputes:
            way.loaded_at = now
            return Choice.LOAD
        if now - way.loaded_at >= self._retry_s:
            way.loaded_at = now
            return Choice.TRIAL
        return Choice.RECOMPUTE

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """As measured; None before anything was."""
        return 1.0 / median(self._prefill) if self._prefill else None

    def bytes_per_s(self, tier: Tier) -> float | None:
        """As measured; None before anything was."""
        return self._ways[tier].times.bytes_per_s
