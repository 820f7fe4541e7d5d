"""Candidates for eviction by how many sessions refer to them; the policy orders those that have as many.

What no session refers to has a queue of its own, so that references cost it nothing and an eviction
never looks through what is referred to.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Generic

from hicache.tree.eviction import C, Candidates


class Ranked(Generic[C]):
    """The candidates of one component on one tier.

    A candidate that gains or loses sessions is offered again at once, so that no eviction pays for what
    was referred to before it; one that gained some on the quiet is moved when it comes up. Invariant: a
    candidate is queued under no more sessions than refer to it, and under one number only. `idle` says
    that no session has ever referred to anything: then all of this costs a look at it.
    """

    def __init__(self, make: Callable[[], Candidates[C]], refs_of: Callable[[C], int]) -> None:
        self.idle = True
        self._make = make
        self._refs_of = refs_of
        self._free = make()
        self._referred: dict[int, Candidates[C]] = {}  # by the number of sessions, above 0
        self._numbers: list[int] = []  # the keys of _referred, ascending
        self._rank: dict[C, int] = {}  # of those in _referred, and of those that it parked

    def __len__(self) -> int:
        return len(self._free) + sum(map(len, self._referred.values()))

    def offer(self, item: C) -> None:
        """Queue a candidate, or re-queue it if its key or its rank has sunk."""
        if self.idle:
            self._free.offer(item)
            return
        refs = self._refs_of(item)
        rank = self._rank.get(item, 0) if self._rank else 0
        if refs != rank:
            self._leave(item, rank)
        if refs:
            self._enter(item, refs)
        else:
            self._free.offer(item)

    def _enter(self, item: C, refs: int) -> None:
        queue = self._referred.get(refs)
        if queue is None:
            queue = self._referred[refs] = self._make()
            insort(self._numbers, refs)
        self._rank[item] = refs
        queue.offer(item)

    def _leave(self, item: C, rank: int) -> None:
        if not rank:
            self._free.withdraw(item)
            return
        del self._rank[item]
        queue = self._referred.get(rank)
        if queue is not None:  # it goes with its last candidate, even one that it had parked
            queue.withdraw(item)

    def withdraw(self, item: C) -> None:
        """Forget a candidate."""
        self._leave(item, self._rank.get(item, 0) if self._rank else 0)

    def pop(self) -> C | None:
        """Take the candidate out that goes first, or None if there is none."""
        if self.idle:
            return self._free.pop()
        while (item := self._free.pop()) is not None:
            refs = self._refs_of(item)
            if not refs:
                return item
            self._enter(item, refs)
        while self._numbers:
            number = self._numbers[0]
            item = self._referred[number].pop()
            if item is None:
                del self._referred[number], self._numbers[0]
                continue
            del self._rank[item]
            refs = self._refs_of(item)
            if refs <= number:
                return item
            self._enter(item, refs)
        return None

    def rank(self, item: C) -> int:
        """Return under how many sessions a candidate is queued."""
        return self._rank.get(item, 0)
