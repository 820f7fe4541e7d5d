"""Who gets pages of L1 and L2: allocators and the tree's evictions, together.

Decides nothing about order (the tree does) and moves no bytes. Owned by the cache's thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from hicache.cache.stats import CacheStats
from hicache.tiers.slots import SlotAllocator
from hicache.tree.base import Freed, TreeCore
from hicache.types import Component, Slots, Tier

Capacities = Mapping[Component, int]  # pages (MAMBA: states)


class PagePools:
    """Slot allocators of every pool on device and host; allocation evicts from the tree.

    Invariant (law 3): per pool, free + owned by the tree + held by somebody = capacity.
    """

    def __init__(
        self, tree: TreeCore, device: Capacities, host: Capacities, stats: CacheStats, *, reclaim: bool
    ) -> None:
        self._tree = tree
        self._stats = stats
        self._reclaim = reclaim  # write_back: host copies of device pages are expendable
        self._pools: dict[tuple[Tier, Component], SlotAllocator] = {}
        for tier, capacities in ((Tier.DEVICE, device), (Tier.HOST, host)):
            for component, pages in capacities.items():
                self._pools[tier, component] = SlotAllocator(pages)

    def __getitem__(self, key: tuple[Tier, Component]) -> SlotAllocator:
        return self._pools[key]

    @property
    def kinds(self) -> list[tuple[Tier, Component]]:
        return list(self._pools)

    def capacity(self, tier: Tier, component: Component) -> int:
        pool = self._pools.get((tier, component))
        return pool.capacity if pool else 0

    def available(self, tier: Tier, component: Component) -> int:
        """Pages that allocate() could hand out now, by eviction if need be."""
        return self._pools[tier, component].num_free + self._tree.evictable(tier, component)

    def allocate(self, tier: Tier, wanted: Mapping[Component, int]) -> dict[Component, Slots] | None:
        """Take pages of several components on a tier, evicting as needed; all of them or none.

        A refusal evicts nothing.
        """
        short = {c: n - self._pools[tier, c].num_free for c, n in wanted.items()}
        short = {c: n for c, n in short.items() if n > 0}
        if any(self._evictable(tier, c) < n for c, n in short.items()):
            return None
        for component in sorted(short):  # FULL first: it takes the others along
            missing = wanted[component] - self._pools[tier, component].num_free
            if missing > 0:
                self._evict(tier, component, missing)
        taken: dict[Component, Slots] = {}
        for component, count in wanted.items():
            slots = self._pools[tier, component].allocate(count)
            if slots is None:  # the tree promised more than it could free
                for other, given in taken.items():
                    self._pools[tier, other].free(given)
                return None
            taken[component] = slots
        return taken

    def free(self, tier: Tier, component: Component, slots: Slots) -> None:
        if slots:
            self._pools[tier, component].free(slots)

    def free_all(self, freed: Freed) -> None:
        for (tier, component), slots in freed.items():
            self.free(tier, component, slots)

    def _evictable(self, tier: Tier, component: Component) -> int:
        count = self._tree.evictable(tier, component)
        if self._reclaim and tier is Tier.HOST and component is Component.FULL:
            count += self._tree.resident(Tier.DEVICE, component)  # an upper bound; allocate() rechecks
        return count

    def _evict(self, tier: Tier, component: Component, count: int) -> None:
        if self._reclaim and tier is Tier.HOST and component is Component.FULL:
            copies = self._tree.reclaim_duplicates(count)
            self.free(tier, component, copies)
            count -= len(copies)
            if count <= 0:
                return
        evicted = self._tree.evict(tier, component, count)
        self.free_all(evicted.freed)
        self._stats.demoted_pages += evicted.demoted
        self._stats.lost_pages += evicted.lost
        for (where, what), slots in evicted.freed.items():
            self._stats.evicted_pages[f"{where.name.lower()}.{what.name.lower()}"] += len(slots)
