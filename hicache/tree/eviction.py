"""Which entry goes first: access statistics, the base policies over them, and the heap of candidates.

Decides order only. What may leave at all, and how, is decided in `shrinking`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from hicache.errors import ConfigError
from hicache.tree.base import TreeRules
from hicache.tree.reuse import ReuseAges
from hicache.types import Component, Tier

Key: TypeAlias = "float | tuple[float, float]"

LOWEST_PRIORITY = -(1 << 31)


class Stats:
    """What the policies look at: access and creation times, hits, priority, and reach.

    `hits` of a single mark may be negative; sums over a suffix of marks never are. `reach` is the
    longest path, in tokens, that an access through here went. `refs` of a mark counts the sessions that
    refer to pages before it and to none behind it.
    """

    __slots__ = ("created", "hits", "last", "priority", "reach", "refs")

    def __init__(
        self,
        created: float = 0.0,
        last: float = float("-inf"),
        hits: int = 0,
        priority: int = LOWEST_PRIORITY,
        reach: int = 0,
    ) -> None:
        self.created = created
        self.last = last
        self.hits = hits
        self.priority = priority
        self.reach = reach
        self.refs = 0

    def copy(self) -> Stats:
        return Stats(self.created, self.last, self.hits, self.priority, self.reach)

    def raise_to(self, last: float, priority: int, reach: int) -> None:
        """Take the maxima; hits and creation stay."""
        if last > self.last:
            self.last = last
        if priority > self.priority:
            self.priority = priority
        if reach > self.reach:
            self.reach = reach

    def within(self, other: Stats) -> bool:
        """True if absorbing this into `other` would change nothing."""
        return not self.hits and (
            self.last <= other.last and self.priority <= other.priority and self.reach <= other.reach
        )

    def absorb(self, other: Stats) -> None:
        """Add another entry's accesses and references to this one's."""
        self.hits += other.hits
        self.refs += other.refs
        self.raise_to(other.last, other.priority, other.reach)


class EvictionPolicy(ABC):
    """Orders entries; the lowest key goes first.

    `follows_access` says that an access may lower a key, so entries are re-queued on every touch;
    `per_page` that the key differs between neighbouring pages with equal statistics; `spares_anchored`
    that a FULL page beyond the last window or state has another key; `marks_windows` that the last window
    of what is inserted is an entry of its own. `reuse` is what learns from the accesses, if anything does.
    """

    name: ClassVar[str]
    follows_access: ClassVar[bool] = False
    per_page: ClassVar[bool] = False
    marks_windows: ClassVar[bool] = False
    spares_anchored: ClassVar[bool] = False
    reuse: ReuseAges | None = None

    @abstractmethod
    def key(self, stats: Stats, tokens_before: int) -> Key:
        """Return the key of an entry that has `tokens_before` tokens of its path in front of it."""

    def unanchored_key(self, stats: Stats) -> Key:
        """Return the key of a FULL page beyond the last place that a hit could end at."""
        raise NotImplementedError

    def queue(
        self, tier: Tier, key_of: Callable[[C], Key], may_go: Callable[[C, Tier], bool] | None = None
    ) -> Candidates[C]:
        """Return an empty queue of candidates for a tier.

        `may_go` says whether a candidate can be taken now, and sees to it that one that cannot is offered
        again when it can; without it, the taker finds out.
        """
        return Candidates(tier, key_of)

    def for_component(self, component: Component, rules: TreeRules) -> EvictionPolicy:
        """Return the policy for a component of a tree that was given this one alone."""
        return self


class Lru(EvictionPolicy):
    """Least recently used."""

    name = "lru"

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return stats.last


class Lfu(EvictionPolicy):
    """Fewest hits; least recent among equals."""

    name = "lfu"

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return (stats.hits, stats.last)


class Slru(EvictionPolicy):
    """Segmented LRU: entries with fewer than `protected_threshold` hits go before all others."""

    name = "slru"

    def __init__(self, *, protected_threshold: int = 2) -> None:
        if protected_threshold < 1:
            raise ConfigError(f"slru: protected_threshold={protected_threshold} must be at least 1")
        self.protected_threshold = protected_threshold

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return (1 if stats.hits >= self.protected_threshold else 0, stats.last)


class Priority(EvictionPolicy):
    """Lowest request priority; least recent among equals."""

    name = "priority"

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return (stats.priority, stats.last)


class Fifo(EvictionPolicy):
    """First created."""

    name = "fifo"

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return stats.created


class Mru(EvictionPolicy):
    """Most recently used."""

    name = "mru"
    follows_access = True

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return -stats.last


class Filo(EvictionPolicy):
    """Last created."""

    name = "filo"

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return -stats.created


class Tlru(EvictionPolicy):
    """Tail-optimised LRU: pages that a follow-up can lose and still meet its budget go first.

    A follow-up prompt is expected to have the branch's longest history plus `next_prompt_estimate`
    tokens, and may recompute `threshold` of them; what remains in front of an entry decides.
    """

    name = "tlru"
    per_page = True

    def __init__(self, *, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        for option, value in (("threshold", threshold), ("next_prompt_estimate", next_prompt_estimate)):
            if value < 0:
                raise ConfigError(f"tlru: {option}={value} must not be negative")
        self.threshold = threshold
        self.next_prompt_estimate = next_prompt_estimate

    def key(self, stats: Stats, tokens_before: int) -> Key:
        needed = max(stats.reach + self.next_prompt_estimate - self.threshold, 0)
        return (0 if tokens_before >= needed else 1, stats.last)


Entry: TypeAlias = "tuple[Any, int, Any]"  # key, serial, candidate


class Queued(Protocol):
    """A candidate: it knows its valid heap entry on each tier, None where it is not queued."""

    entries: list[Entry | None]


C = TypeVar("C", bound=Queued)


class Candidates(Generic[C]):
    """The heap of one component on one tier.

    Keys are lazy: an entry whose key has grown is re-queued when it comes up, so an access costs
    nothing here. Keys that sink are offered again at once. Invariant: at most one valid entry a
    candidate; stale ones are compacted away before they outnumber the valid ones.
    """

    def __init__(self, tier: Tier, key_of: Callable[[C], Key]) -> None:
        self._tier = int(tier)
        self._key_of = key_of
        self._heap: list[Entry] = []
        self._live = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._live

    def offer(self, item: C) -> None:
        """Queue a candidate, or re-queue it if its key has sunk."""
        key = self._key_of(item)
        entry = item.entries[self._tier]
        if entry is None:
            self._live += 1
        elif not key < entry[0]:
            return
        self._serial += 1
        entry = (key, self._serial, item)
        item.entries[self._tier] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 2 * self._live + 64:
            self._compact()

    def withdraw(self, item: C) -> None:
        """Forget a candidate."""
        if item.entries[self._tier] is not None:
            item.entries[self._tier] = None
            self._live -= 1

    def pop(self) -> C | None:
        """Take the candidate with the lowest current key out, or None if there is none."""
        heap, tier = self._heap, self._tier
        while heap:
            entry = heap[0]
            item: C = entry[2]
            if item.entries[tier] is not entry:
                heappop(heap)
                continue
            key = self._key_of(item)
            if entry[0] < key:
                self._serial += 1
                entry = (key, self._serial, item)
                item.entries[tier] = entry
                heapreplace(heap, entry)
                continue
            heappop(heap)
            item.entries[tier] = None
            self._live -= 1
            return item
        return None

    def _compact(self) -> None:
        tier = self._tier
        self._heap = [entry for entry in self._heap if entry[2].entries[tier] is entry]
        heapify(self._heap)
