"""buffer_only: the host holds pages on their way between device and storage, and keeps none of them.

A page is on the host while something holds it there: a copy or store in flight, or a queued request it was
fetched for. What nothing holds leaves at the next tick.
"""

from __future__ import annotations

from hicache.cache.pools import PagePools
from hicache.cache.stats import CacheStats
from hicache.tree.base import TreeCore
from hicache.types import Component, Tier


class StagingOnly:
    """Clears the host of what nothing holds. Owned by the cache's thread."""

    def __init__(self, tree: TreeCore, pools: PagePools, stats: CacheStats) -> None:
        self._tree, self._pools, self._stats = tree, pools, stats
        self._components = [c for tier, c in pools.kinds if tier is Tier.HOST]

    def sweep(self) -> None:
        """Give back every host page that no lease protects; what storage has not taken is lost."""
        tree = self._tree
        if Component.FULL in self._components:
            self._pools.free(Tier.HOST, Component.FULL, tree.reclaim_duplicates(tree.reclaimable()))
        for component in self._components:
            count = tree.evictable(Tier.HOST, component)
            if count:
                evicted = tree.evict(Tier.HOST, component, count)
                self._pools.free_all(evicted.freed)
                self._stats.lost_pages += evicted.lost
