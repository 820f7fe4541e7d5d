"""Who gets pages of L1 and L2: allocators and the tree's evictions, together.

Decides nothing about order (the tree does) and moves no bytes. Owned by the cache's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from hicache.cache.custody import Custody
from hicache.cache.quarantine import Quarantine
from hicache.cache.stats import CacheStats
from hicache.errors import InvariantViolation
from hicache.tiers.slots import SlotAllocator
from hicache.tree.base import Freed, TreeCore
from hicache.types import Component, Slots, Tier

Capacities = Mapping[Component, int]  # pages (MAMBA: states)


class Copies(enum.Enum):
    """What host copies of device pages are to somebody who needs FULL pages of the host."""

    KEPT = "kept"  # out of reach
    LAST = "last"  # taken when nothing else is left


class Use(enum.Enum):
    """Who will write device slots first."""

    ANY = "any"  # whoever comes, loads among them
    COMPUTE = "compute"  # the compute stream, behind everything issued to it before


class PagePools:
    """Slot allocators of every pool on device and host; allocation evicts from the tree.

    Invariant (law 3): per pool, free + owned by the tree + held by somebody = capacity.
    """

    def __init__(
        self,
        tree: TreeCore,
        device: Capacities,
        host: Capacities,
        stats: CacheStats,
        *,
        copies: Copies,
        quarantine: Quarantine,
    ) -> None:
        """`copies` is what holds where a caller does not say LAST."""
        self.quarantine = quarantine
        self.custody = Custody()
        self._tree = tree
        self._stats = stats
        self._copies = copies
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

    def available(self, tier: Tier, component: Component, copies: Copies = Copies.KEPT) -> int:
        """Pages that allocate() could hand out now, by eviction if need be."""
        free = self._pools[tier, component].num_free
        return free + self._evictable(tier, component, self._mode(tier, component, copies))

    def allocate(
        self,
        tier: Tier,
        wanted: Mapping[Component, int],
        copies: Copies = Copies.KEPT,
        *,
        use: Use = Use.ANY,
    ) -> dict[Component, Slots] | None:
        """Take pages of several components on a tier, evicting as needed; all of them or none.

        A refusal evicts nothing. Slots in quarantine are for COMPUTE only, which gets them first.
        """
        early = dict.fromkeys(wanted, 0)
        if use is Use.COMPUTE and self.quarantine:
            early = {c: min(n, self.quarantine.count(c)) for c, n in wanted.items()}
            wanted = {c: n - early[c] for c, n in wanted.items()}
        short = {c: n - self._pools[tier, c].num_free for c, n in wanted.items()}
        short = {c: n for c, n in short.items() if n > 0}
        if any(self._evictable(tier, c, self._mode(tier, c, copies)) < n for c, n in short.items()):
            return None
        for component in sorted(short):  # FULL first: it takes the others along
            missing = wanted[component] - self._pools[tier, component].num_free
            if missing > 0:
                self._evict(tier, component, missing, self._mode(tier, component, copies))
        taken: dict[Component, Slots] = {}
        for component, count in wanted.items():
            slots = self._pools[tier, component].allocate(count)
            if slots is None:
                raise InvariantViolation(
                    f"{tier.name} {component.name}: the tree promised {short.get(component, 0)} pages it "
                    f"could not free"
                )
            taken[component] = slots + self.quarantine.take(component, early[component])
        return taken

    def drop(self, tier: Tier, component: Component) -> None:
        """Evict all of a pool that may go."""
        self._evict(tier, component, self._tree.evictable(tier, component), Copies.KEPT)

    def retire(self, component: Component, slots: Slots) -> None:
        """Take device slots back that work already issued may still read."""
        self.quarantine.put(component, slots)

    def lapse(self) -> None:
        """End a step: free what was retired and has no reader left."""
        for component, slots in self.quarantine.lapse().items():
            self.free(Tier.DEVICE, component, slots)

    def guard(self, slots: Mapping[Component, Slots]) -> None:
        """Keep host slots from being reused, whoever drops them, until unguard() is called with the same."""
        self.custody.take(slots)

    def unguard(self, slots: Mapping[Component, Slots]) -> None:
        """Whoever read these host slots has ended."""
        for component, free in self.custody.end(slots).items():
            self._pools[Tier.HOST, component].free(free)

    def held(self, tier: Tier, component: Component) -> int:
        """Pages that neither are free nor could be evicted: what leases, requests and readers keep."""
        return self._pools[tier, component].num_taken - self._evictable(tier, component, Copies.KEPT)

    def remembered(self) -> dict[str, int]:
        """Slots kept for readers that have not ended."""
        return {"quarantined": len(self.quarantine), "in custody": len(self.custody)}

    def free(self, tier: Tier, component: Component, slots: Slots) -> None:
        if tier is Tier.HOST and self.custody:
            slots = self.custody.keep_back(component, slots)
        if slots:
            self._pools[tier, component].free(slots)

    def free_all(self, freed: Freed) -> None:
        for (tier, component), slots in freed.items():
            self.free(tier, component, slots)

    def _mode(self, tier: Tier, component: Component, copies: Copies) -> Copies:
        if tier is not Tier.HOST or component is not Component.FULL:
            return Copies.KEPT
        return Copies.LAST if self._copies is Copies.LAST else copies

    def _evictable(self, tier: Tier, component: Component, mode: Copies) -> int:
        """Pages that would be free if all that may go were dropped."""
        count = self._tree.evictable(tier, component)
        if mode is Copies.LAST:
            count += self._tree.reclaimable()
        if tier is Tier.HOST and self.custody:
            count = max(0, count - self.custody.owned(component))
        return count

    def _evict(self, tier: Tier, component: Component, count: int, mode: Copies) -> None:
        """Evict until `count` more pages are free, or all that may go is gone."""
        pool = self._pools[tier, component]
        goal = pool.num_free + count
        while pool.num_free < goal:
            evicted = self._tree.evict(tier, component, goal - pool.num_free)
            if not evicted.freed.get((tier, component)):
                break
            self.free_all(evicted.freed)
            self._stats.demoted_pages += evicted.demoted
            self._stats.lost_pages += evicted.lost
            for (where, what), slots in evicted.freed.items():
                self._stats.evicted_pages[f"{where.name.lower()}.{what.name.lower()}"] += len(slots)
        while pool.num_free < goal and mode is Copies.LAST:
            copies = self._tree.reclaim_duplicates(goal - pool.num_free)
            if not copies:
                break
            self.free(tier, component, copies)
