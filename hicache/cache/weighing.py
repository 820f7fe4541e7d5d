"""What a hit on L2 or L3 would move, put before the policy that decides whether to load or to compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.clock import Clock
from hicache.config.cache import CacheConfig, HitLoading
from hicache.policy.recompute import Choice, LoadOrRecompute
from hicache.spec import ModelSpec
from hicache.transfer.base import Move
from hicache.tree.base import Match
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


class Weighing:
    """One cache's decisions between loading and computing. Owned by the cache's thread."""

    def __init__(self, spec: ModelSpec, config: CacheConfig, clock: Clock) -> None:
        self._page, self._window = spec.page_size, spec.window_pages
        self._bytes = {c.component: c.page_bytes for c in spec.components}
        self._on = config.load_or_recompute is HitLoading.MEASURED
        self._clock = clock
        self.measured = LoadOrRecompute(
            margin=config.recompute_margin, retry_s=config.recompute_retry_seconds
        )

    # -- measurements --------------------------------------------------------------------------

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that loaded nothing has computed `tokens` of prompts."""
        self.measured.computed(tokens, seconds)

    def loaded(self, moves: Sequence[Move], seconds: float) -> None:
        """A load from the host has ended well."""
        self.measured.loaded(
            Tier.HOST, sum(self._bytes[m.component] * len(m.sources) for m in moves), seconds
        )

    def fetched(self, counts: Mapping[Component, int], seconds: float) -> None:
        """A read from storage has ended with so many objects."""
        self.measured.loaded(Tier.STORAGE, self._size(counts), seconds)

    # -- decisions -----------------------------------------------------------------------------

    def host_pays(self, found: Match) -> bool:
        """Whether to load the host's part of a hit."""
        tokens = (found.host - found.device) * self._page
        if tokens <= 0:
            return True
        counts = {
            FULL: max(0, found.host - found.full_device),
            SWA: min(self._window, found.host),
            MAMBA: 1,
        }
        return self._pays(Tier.HOST, counts, tokens)

    def storage_pays(self, found: Match, limit: int) -> bool:
        """Whether to ask storage for pages beyond the host's, up to `limit`."""
        counts = {FULL: limit - found.full, SWA: min(self._window, limit), MAMBA: 1}
        return self._pays(Tier.STORAGE, counts, (limit - found.host) * self._page)

    def _pays(self, tier: Tier, counts: Mapping[Component, int], tokens: int) -> bool:
        if not self._on:
            return True
        now, size = self._clock.now(), self._size(counts)
        choice = self.measured.choose(tier, size=size, tokens=tokens, now=now)
        return choice is not Choice.RECOMPUTE

    def _size(self, counts: Mapping[Component, int]) -> int:
        return sum(self._bytes[c] * n for c, n in counts.items() if c in self._bytes)
