"""A tree with pools behind it, driven by whole conversations."""

from __future__ import annotations

from array import array

import pytest

from hicache.tiers.slots import SlotAllocator
from hicache.tree import Inserted, Lease, Match, TreeRules, UnifiedTree, make_policy
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


class Bed:
    """Page size 1 unless told otherwise: page i of a path is its i-th token. Slots come from real pools."""

    def __init__(
        self,
        kinds: tuple[Component, ...] = (FULL,),
        policy: str = "lru",
        *,
        page: int = 1,
        window: int = 2,
        slots: int = 1000,
        **options: int,
    ) -> None:
        rules = TreeRules(page, kinds, window if SWA in kinds else 0)
        self.kinds = kinds
        self.tree = UnifiedTree(rules, make_policy(policy, **options))
        self.pools = {(t, k): SlotAllocator(slots) for t in (Tier.DEVICE, Tier.HOST) for k in kinds}
        self.now = 0.0

    def take(self, tier: Tier, kind: Component, count: int) -> Slots:
        slots = self.pools[(tier, kind)].allocate(count)
        assert slots is not None
        return slots

    def match(self, tokens: str, limit: int | None = None) -> Match:
        ids = array("I", map(ord, tokens))
        return self.tree.match(b"", ids, len(ids) if limit is None else limit)

    def lock(self, tokens: str, boundary: int | None = None, tier: Tier = Tier.DEVICE) -> Lease:
        found = self.match(tokens)
        return self.tree.lock(found, found.full if boundary is None else boundary, tier)

    def grow(self, lease: Lease, tokens: str, start: int, *, states: tuple[int, ...] = ()) -> Inserted:
        """Insert pages from `start` to the end, SWA on all, states where named; time moves."""
        self.now += 1
        ids = array("I", map(ord, tokens))
        end = len(ids) // self.tree.rules.page_size
        done = self.tree.insert(
            lease,
            ids,
            start,
            end,
            full=self.take(Tier.DEVICE, FULL, end - start),
            swa=self.take(Tier.DEVICE, SWA, end - start) if SWA in self.kinds else None,
            states=[(at, self.take(Tier.DEVICE, MAMBA, 1)[0]) for at in states],
            now=self.now,
        )
        for kind, slots in done.duplicates.items():
            self.pools[(Tier.DEVICE, kind)].free(slots)
        self.tree.check_integrity()
        return done

    def serve(self, tokens: str, *, states: tuple[int, ...] = ()) -> None:
        """One request: match, lock, touch, insert the rest, release."""
        self.now += 1
        found = self.match(tokens)
        lease = self.tree.lock(found, found.full_device, Tier.DEVICE)
        self.tree.touch(lease, self.now)
        self.grow(lease, tokens, found.full_device, states=states)
        self.tree.release(lease)
        self.tree.check_integrity()

    def back_up(self, tokens: str, target: Tier = Tier.HOST) -> None:
        """Write down all of a path."""
        lease = self.lock(tokens, tier=Tier.DEVICE if target is Tier.HOST else Tier.HOST)
        plan = self.tree.plan_write(lease, target)
        cover = self.tree.begin_write(lease, plan)
        outcome = {
            kind: self.take(Tier.HOST, kind, len(at))
            if target is Tier.HOST
            else array("i", bytes(4 * len(at)))
            for kind, at in plan.pages.items()
        }
        assert self.tree.end_write(cover, plan, outcome) == {}
        self.tree.release(lease)
        self.tree.check_integrity()

    def evict(
        self, count: int, kind: Component = FULL, tier: Tier = Tier.DEVICE
    ) -> dict[tuple[Tier, Component], int]:
        """Evict and free; return how many slots went from each pool."""
        freed = self.tree.evict(tier, kind, count).freed
        for key, slots in freed.items():
            assert NO_SLOT not in slots
            self.pools[key].free(slots)
        self.tree.check_integrity()
        return {key: len(slots) for key, slots in freed.items()}

    def full(self, tokens: str) -> int:
        """How many pages of a path the tree holds on any tier."""
        return self.match(tokens).full


@pytest.fixture
def bed() -> type[Bed]:
    """The class, so that a test picks components and policy."""
    return Bed
