"""The Python tree core: the contract of `base`, over a `Forest` and the functions of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.tree import flushing, growing, integrity, leases, reading, referring, shrinking, writing
from hicache.tree.base import (
    Evicted,
    Freed,
    Inserted,
    Lease,
    Match,
    PathPresence,
    PathSlots,
    SessionRefs,
    TreeCore,
    TreeRules,
    WritePlan,
)
from hicache.tree.eviction import EvictionPolicy
from hicache.tree.forest import Forest
from hicache.tree.residency import Observer, observe
from hicache.types import Component, Slots, Tier, TokenBuffer


class UnifiedTree(TreeCore):
    """One prefix tree per scope over FULL, SWA and MAMBA. Single-threaded.

    `policies` is one policy for all components or one for each. A page that any lease covers stays
    in the tree; a lease on a tier also keeps it on that tier. Times passed in must not go back.
    """

    keeps_islands = True

    def __init__(
        self,
        rules: TreeRules,
        policies: Mapping[Component, EvictionPolicy] | EvictionPolicy,
        *,
        host: bool = True,
    ) -> None:
        if not rules.kinds or rules.kinds[0] is not Component.FULL or rules.page_size < 1:
            raise ValueError(f"a tree needs FULL first and a positive page size, not {rules}")
        if (Component.SWA in rules.kinds) != (rules.window_pages > 0):
            raise ValueError(f"a window of {rules.window_pages} pages contradicts {rules.kinds}")
        self.rules = rules
        self._forest = Forest(rules, policies, host=host)

    def match(self, scope: bytes, tokens: TokenBuffer, limit: int) -> Match:
        return reading.match(self._forest, scope, tokens, limit)

    def slots(self, at: Match | Lease, boundary: int) -> PathSlots:
        return reading.slots(self._forest, at, boundary)

    def presence(self, at: Match) -> PathPresence:
        return reading.presence(self._forest, at)

    def page_hashes(self, at: Match | Lease, start: int, end: int) -> list[bytes]:
        return reading.page_hashes(self._forest, at, start, end)

    def resident(self, tier: Tier, component: Component) -> int:
        return reading.resident(self._forest, tier, component)

    def evictable(self, tier: Tier, component: Component) -> int:
        return leases.evictable(self._forest, tier, component)

    def lock(
        self,
        at: Match | Lease,
        boundary: int,
        tier: Tier,
        *,
        swa_start: int | None = None,
        states: Sequence[int] | None = None,
    ) -> Lease:
        return leases.lock(self._forest, at, boundary, tier, swa_start=swa_start, states=states)

    def release(self, lease: Lease) -> None:
        leases.release(self._forest, lease)

    def hold_windows(self, lease: Lease, swa_start: int) -> None:
        leases.hold_windows(self._forest, lease, swa_start)

    def touch(self, lease: Lease, now: float, *, priority: int = 0, hits: int = 1) -> None:
        leases.touch(self._forest, lease, now, priority=priority, hits=hits)

    def refer(self, lease: Lease, session: SessionRefs) -> None:
        referring.refer(self._forest, lease, session)

    def unrefer(self, session: SessionRefs) -> None:
        referring.unrefer(self._forest, session)

    def references(self, at: Match | Lease) -> list[int]:
        return referring.references(self._forest, at)

    def insert(
        self,
        lease: Lease,
        tokens: TokenBuffer,
        start: int,
        end: int,
        *,
        full: Slots,
        swa: Slots | None = None,
        states: Sequence[tuple[int, int]] = (),
        places: Sequence[int] | None = None,
        now: float = 0.0,
        priority: int = 0,
    ) -> Inserted:
        return growing.insert(
            self._forest,
            lease,
            tokens,
            start,
            end,
            full=full,
            swa=swa,
            states=states,
            places=places,
            now=now,
            priority=priority,
        )

    def insert_host(
        self,
        scope: bytes,
        tokens: TokenBuffer,
        start: int,
        end: int,
        *,
        full: Slots,
        swa: Slots | None = None,
        states: Sequence[tuple[int, int]] = (),
        now: float = 0.0,
        stored: bool = True,
    ) -> dict[Component, Slots]:
        return growing.insert_host(
            self._forest,
            scope,
            tokens,
            start,
            end,
            full=full,
            swa=swa,
            states=states,
            now=now,
            stored=stored,
        )

    def plan_write(
        self, lease: Lease, target: Tier, *, min_hits: int = 0, unstored: bool = False
    ) -> WritePlan:
        return writing.plan_write(self._forest, lease, target, min_hits=min_hits, unstored=unstored)

    def begin_write(self, lease: Lease, plan: WritePlan) -> Lease:
        return writing.begin_write(self._forest, lease, plan)

    def end_write(
        self, lease: Lease, plan: WritePlan, outcome: Mapping[Component, Slots]
    ) -> dict[Component, Slots]:
        return writing.end_write(self._forest, lease, plan, outcome)

    def forget_stored(self, at: Match | Lease, component: Component, positions: Sequence[int]) -> None:
        writing.forget_stored(self._forest, at, component, positions)

    def coldest_unwritten(self, tier: Tier, count: int) -> list[Lease]:
        return writing.coldest_unwritten(self._forest, tier, count)

    def forget_all_stored(self) -> None:
        flushing.forget_all_stored(self._forest)

    def unstored(self) -> tuple[list[Lease], int]:
        return flushing.unstored(self._forest)

    def evict(self, tier: Tier, component: Component, count: int) -> Evicted:
        return shrinking.evict(self._forest, tier, component, count)

    def reclaim_duplicates(self, count: int) -> Slots:
        return shrinking.reclaim_duplicates(self._forest, count)

    def reclaimable(self) -> int:
        return leases.reclaimable(self._forest)

    def drop_all(self) -> Freed:
        return shrinking.drop_all(self._forest)

    def observe(self, observer: Observer | None) -> None:
        observe(self._forest, observer)

    def owned(self, tier: Tier, component: Component) -> Slots:
        return integrity.owned(self._forest, tier, component)

    def check_integrity(self) -> None:
        integrity.check_integrity(self._forest)
