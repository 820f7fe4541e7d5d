"""The order in which the adaptive policy gives up the leaves of a tree that is not ours.

Holds what is known of a node, and for the time of one eviction the leaves that may go. Needs no SGLang.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from hicache.tree.adaptive import USELESS, Adaptive, Worth
from hicache.tree.eviction import Stats
from hicache.tree.reuse import FRESH, REUSED

L = TypeVar("L")

Place: TypeAlias = "tuple[int, int]"  # how many sessions refer to a leaf, kind of its last access
_Queue: TypeAlias = "list[tuple[float, int, L]]"  # last access, id, leaf; oldest first

_KINDS = (FRESH, REUSED, USELESS)


class LeafOrder(Generic[L]):
    """Leaves by references and kind; of the fewest references, what the policy holds worth least goes first.

    Worths stand still while one eviction lasts, so the ends of sorted lists are all that has to be looked at.
    """

    def __init__(
        self,
        policy: Adaptive,
        leaves: Iterable[L],
        *,
        identity: Callable[[L], int],
        stats: Callable[[L], Stats],
        references: Callable[[L], int],
        reachable: Callable[[L], bool],
    ) -> None:
        """`reachable` says whether a hit can end in a leaf, `identity` tells equally old leaves apart."""
        self._policy = policy
        self._identity = identity
        self._stats = stats
        self._references = references
        self._reachable = reachable
        self._queues: dict[Place, _Queue[L]] = {}
        for leaf in leaves:
            place, entry = self._entry(leaf)
            self._queues.setdefault(place, []).append(entry)
        for queue in self._queues.values():
            queue.sort(key=lambda entry: entry[:2])

    def add(self, leaf: L) -> None:
        """Let a node that has become a leaf take part."""
        place, entry = self._entry(leaf)
        insort(self._queues.setdefault(place, []), entry, key=lambda entry: entry[:2])

    def pop(self) -> L | None:
        """Take out what goes next; None if nothing is left."""
        if not self._queues:
            return None
        fewest = min(references for references, _ in self._queues)
        lowest: Worth | None = None
        chosen: tuple[Place, int] | None = None
        for kind in _KINDS:
            queue = self._queues.get((fewest, kind))
            if not queue:
                continue
            worth, is_newest = self._policy.lesser_end((kind, queue[0][0]), (kind, queue[-1][0]))
            if lowest is None or worth < lowest:
                lowest, chosen = worth, ((fewest, kind), -1 if is_newest else 0)
        assert chosen is not None  # a queue that becomes empty is dropped
        place, end = chosen
        leaf = self._queues[place].pop(end)[2]
        if not self._queues[place]:
            del self._queues[place]
        return leaf

    def _entry(self, leaf: L) -> tuple[Place, tuple[float, int, L]]:
        stats = self._stats(leaf)
        key = self._policy.key(stats, 0) if self._reachable(leaf) else self._policy.unanchored_key(stats)
        assert isinstance(key, tuple)
        kind, last = key
        return (self._references(leaf), int(kind)), (last, self._identity(leaf), leaf)
