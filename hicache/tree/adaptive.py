"""The adaptive policy: keeps what it has learned to return soonest, for the room it takes until then.

Where use is recent-friendly that is LRU, in a loop larger than the cache it trims the newest tails, and
what has stayed away longer than such pages ever did goes before both.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias, TypeVar

from hicache.errors import ConfigError
from hicache.tree.base import TreeRules
from hicache.tree.eviction import Candidates, Entry, EvictionPolicy, Key, Queued, Stats
from hicache.tree.reuse import FRESH, REUSED, Kind, ReuseAges
from hicache.types import Component, Tier

_DOUBT = 1.3  # the newest goes before the oldest only if the oldest is worth this many times as much

USELESS = -1  # besides the kinds of accesses: a place where no hit can or will end
_QUEUES = (FRESH, REUSED, USELESS)  # as indices

C = TypeVar("C", bound=Queued)
Worth: TypeAlias = "tuple[float, float]"  # what keeping is worth, last access; the lowest goes first


class Adaptive(EvictionPolicy):
    """Evicts, of the oldest and the newest entries, fresh and reused, the one worth least to keep.

    This is for FULL; windows and states have `Anchors`. An instance learns from one tree's accesses and
    serves no other.
    """

    name = "adaptive"
    follows_access = True
    spares_anchored = True

    def __init__(self, *, half_life: int = 256) -> None:
        if half_life < 1:
            raise ConfigError(f"adaptive: half_life={half_life} must be at least 1")
        self.learned = ReuseAges(half_life=half_life)
        self.reuse = self.learned

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return (REUSED if stats.hits >= 2 else FRESH, stats.last)

    def unanchored_key(self, stats: Stats) -> Key:
        return (USELESS, stats.last)

    def queue(
        self, tier: Tier, key_of: Callable[[C], Key], may_go: Callable[[C, Tier], bool] | None = None
    ) -> Candidates[C]:
        return TwoEnded(tier, key_of, self, may_go)

    def for_component(self, component: Component, rules: TreeRules) -> EvictionPolicy:
        if component is Component.FULL:
            return self
        return Anchors(component, rules)

    def lesser_end(self, oldest: Any, newest: Any) -> tuple[Worth, bool]:
        """Judge the keys at both ends of one kind: what goes first, and whether that is the newest.

        The lowest worth over all kinds goes first.
        """
        kind, old = oldest
        if kind == USELESS:
            return (-1.0, old), False
        young = newest[1]
        proven = _DOUBT if kind == REUSED else 1.0
        at_old = (self.learned.worth(kind, old) * proven, old)
        at_young = (self.learned.worth(kind, young) * proven * _DOUBT, young)
        return (at_young, True) if at_young < at_old else (at_old, False)


class Anchors(EvictionPolicy):
    """For windows and states: first those at no place where a request has ended or gone on from.

    Least recently used first, among these and then among the others.
    """

    name = "anchors"
    marks_windows = True

    def __init__(self, component: Component, rules: TreeRules) -> None:
        # A window that ends where an access does begins so many tokens before, one page more at most.
        self._reach = (1 if component is Component.MAMBA else rules.window_pages + 1) * rules.page_size

    def key(self, stats: Stats, tokens_before: int) -> Key:
        anchored = stats.hits >= 2 or stats.reach <= tokens_before + self._reach
        return (REUSED if anchored else USELESS, stats.last)


class TwoEnded(Candidates[C]):
    """Candidates that are taken from either end of their order in time, for each kind.

    Invariant: as for the base; an entry is in the two heaps of its kind.
    """

    def __init__(
        self,
        tier: Tier,
        key_of: Callable[[C], Key],
        policy: Adaptive,
        may_go: Callable[[C, Tier], bool] | None,
    ) -> None:
        super().__init__(tier, key_of)
        self._policy = policy
        self._may_go = may_go
        self._oldest: tuple[list[Entry], ...] = ([], [], [])
        self._newest: tuple[list[tuple[float, int, Entry]], ...] = ([], [], [])

    def offer(self, item: C) -> None:
        key: Any = self._key_of(item)
        entry = item.entries[self._tier]
        if entry is None:
            self._live += 1
        elif entry[0] == key:
            return
        self._enter(item, key)

    def _enter(self, item: C, key: Any) -> None:
        self._serial += 1
        entry = (key, self._serial, item)
        item.entries[self._tier] = entry
        kind, last = key
        heappush(self._oldest[kind], entry)
        heappush(self._newest[kind], (-last, self._serial, entry))
        if (
            sum(map(len, self._oldest)) > 2 * self._live + 64
            or sum(map(len, self._newest)) > 2 * self._live + 64
        ):
            self._compact()

    def pop(self) -> C | None:
        serial = -1
        while serial != self._serial:  # what was found outdated may have entered any end anew
            serial = self._serial
            for kind in _QUEUES:
                self._settle(kind)
        lowest: Worth | None = None
        chosen: Entry | None = None
        for kind in _QUEUES:
            if not self._oldest[kind]:
                continue
            old, young = self._oldest[kind][0], self._newest[kind][0][2]
            found, is_newest = self._policy.lesser_end(old[0], young[0])
            if lowest is None or found < lowest:
                lowest, chosen = found, young if is_newest else old
        if chosen is None:
            return None
        item: C = chosen[2]
        item.entries[self._tier] = None
        self._live -= 1
        return item

    def _settle(self, kind: Kind) -> None:
        """Bring entries that are in force to both ends of a kind, where there are any."""
        oldest, newest = self._oldest[kind], self._newest[kind]
        while oldest:
            entry = heappop(oldest)
            if self._in_force(entry):
                heappush(oldest, entry)
                break
        while newest:
            back = heappop(newest)
            if self._in_force(back[2]):
                heappush(newest, back)
                break

    def _in_force(self, entry: Entry) -> bool:
        """Tell whether an entry is valid, its key right and its item free to go.

        A valid one with another key enters anew; one that cannot go would hide the end behind it.
        """
        item: C = entry[2]
        if item.entries[self._tier] is not entry:
            return False
        if self._may_go is not None and not self._may_go(item, Tier(self._tier)):
            self.withdraw(item)
            return False
        key = self._key_of(item)
        if key == entry[0]:
            return True
        self._enter(item, key)
        return False

    def _compact(self) -> None:
        tier = self._tier
        for oldest, newest in zip(self._oldest, self._newest, strict=True):
            oldest[:] = [entry for entry in oldest if entry[2].entries[tier] is entry]
            newest[:] = [(-entry[0][1], entry[1], entry) for entry in oldest]
            heapify(oldest)
            heapify(newest)
