"""What the naive cache is made of: one record per page of each path, and leases as it knows them."""

from __future__ import annotations

from hicache.tree.eviction import Stats
from hicache.types import NO_SLOT, Component, Tier


class Page:
    """One page of one path: its slots by component and tier, and what is known of it."""

    __slots__ = ("busy", "children", "depth", "parent", "sessions", "slots", "state_stats", "stats",
                 "stored", "tokens")  # fmt: skip

    def __init__(self, parent: Page | None, tokens: bytes, stats: Stats) -> None:
        self.parent = parent
        self.tokens = tokens  # of this page
        self.depth: int = parent.depth + 1 if parent is not None else 0  # the boundary at its end
        self.children: dict[bytes, Page] = {}
        self.slots = {c: [NO_SLOT, NO_SLOT] for c in Component}
        self.busy: set[tuple[Component, Tier]] = set()
        self.stored: set[Component] = set()
        self.sessions: set[object] = set()  # those that refer to it
        self.stats = stats
        self.state_stats = stats.copy()

    def has(self, component: Component, tier: Tier) -> bool:
        return self.slots[component][tier] != NO_SLOT

    def on_any(self, component: Component) -> bool:
        return self.slots[component] != [NO_SLOT, NO_SLOT]


class Held:
    """A lease as the oracle knows it: the path, and what of it is protected."""

    def __init__(self, path: list[Page], tier: Tier, swa_start: int, states: tuple[int, ...]) -> None:
        self.path = path
        self.tier = tier
        self.swa_start = swa_start
        self.states = states

    @property
    def depth(self) -> int:
        return len(self.path)
