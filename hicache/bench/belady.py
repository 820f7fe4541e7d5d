"""Offline Belady for virtual time: evicts what is used again last, by a future that was recorded before.

A reference for other policies, with the same tiers, locks and page grain. Not to be had while serving.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hicache.tree.adaptive import Anchors
from hicache.tree.base import TreeRules
from hicache.tree.eviction import Candidates, EvictionPolicy, Key, Queued, Stats
from hicache.tree.node import Node
from hicache.tree.reuse import ReuseAges
from hicache.types import TOKEN_BYTES, Component, Tier, TokenBuffer

NEVER = 1 << 60

C = TypeVar("C", bound=Queued)


class Future:
    """When each page is used, by the number of the request, counted from 1 in the order of admission."""

    def __init__(self, requests: Iterable[tuple[bytes, TokenBuffer]], page_size: int) -> None:
        """`requests` are the scope and prompt of each, in order."""
        self.page_bytes = page_size * TOKEN_BYTES
        self._uses: dict[int, array[int]] = {}
        for number, (scope, tokens) in enumerate(requests, start=1):
            view = memoryview(tokens).cast("B")
            seed = zlib.crc32(scope)
            for page in range(view.nbytes // self.page_bytes):
                at = page * self.page_bytes
                key = page << 32 | zlib.crc32(view[at : at + self.page_bytes], seed)
                self._uses.setdefault(key, array("i")).append(number)

    def next_use(self, scope: bytes, page: int, tokens: bytes, now: int) -> int:
        """Return the first request after number `now` whose prompt holds this page, or NEVER."""
        uses = self._uses.get(page << 32 | zlib.crc32(tokens, zlib.crc32(scope)))
        if uses is None:
            return NEVER
        i = bisect_right(uses, now)
        return uses[i] if i < len(uses) else NEVER


class _Admissions(ReuseAges):
    """Counts requests; a future that is known need not be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def access(self, now: float) -> None:
        self.count += 1

    def see(self, key: int, weight: int, kind: int) -> None:
        pass


class Belady(EvictionPolicy):
    """Last next use first; pages beyond the last place where a hit could end before all others."""

    name = "belady"
    follows_access = True
    spares_anchored = True

    def __init__(self, future: Future) -> None:
        self._future = future
        self.reuse = self._admissions = _Admissions()

    def key(self, stats: Stats, tokens_before: int) -> Key:
        return (1, stats.last)

    def unanchored_key(self, stats: Stats) -> Key:
        return (0, stats.last)

    def for_component(self, component: Component, rules: TreeRules) -> EvictionPolicy:
        return self if component is Component.FULL else Anchors(component, rules)

    def queue(
        self, tier: Tier, key_of: Callable[[C], Key], may_go: Callable[[C, Tier], bool] | None = None
    ) -> Candidates[C]:
        def key(item: Any) -> Any:
            useful, last = key_of(item)  # type: ignore[misc]
            return (useful, -self._next_use(item, tier), last)

        return Candidates(tier, key)

    def _next_use(self, node: Node, tier: Tier) -> int:
        end = node.device_end if tier is Tier.DEVICE else node.end
        size = self._future.page_bytes
        at = (end - 1 - node.start) * size
        root = node
        while root.parent is not None:
            root = root.parent
        page = bytes(node.tokens[at : at + size])
        return self._future.next_use(root.scope, end - 1, page, self._admissions.count)
