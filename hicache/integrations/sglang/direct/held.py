"""Verified pages on their way from store to device, in bounded host memory.

Decides who still wants a page and when its room is free again. Not a cache tier: what nobody waits for is
gone at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hicache.integrations.sglang.direct.blocks import Block
from hicache.spec import PoolSpec
from hicache.types import Component

Key = tuple[Component, bytes]
"""A page: its component and hash."""

_BLOCK_BYTES = 4 << 20
_BLOCK_PAGES = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Pages `first` to `first + count` of an asked list, side by side in a block from `slot` on."""

    first: int
    count: int
    block: Block
    slot: int


class HeldPages:
    """Thread-safe; page bytes are copied outside `_lock`.

    Invariant: blocks have at most `max_bytes`; a page is kept exactly while an owner wants it.
    """

    def __init__(
        self, specs: Mapping[Component, Sequence[PoolSpec]], *, max_bytes: int, pinned: bool
    ) -> None:
        self._specs = specs
        self._max_bytes = max_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._wanted: dict[Key, int] = {}
        self._owned: dict[Hashable, set[Key]] = {}
        self._where: dict[Key, tuple[Block, int]] = {}
        self._blocks: dict[Component, list[Block]] = defaultdict(list)
        self._free: dict[Component, list[tuple[Block, int]]] = defaultdict(list)
        self._bytes = 0

    @property
    def used_bytes(self) -> int:
        """Memory of blocks, whether their pages are in use or not."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._where)

    def want(self, owner: Hashable, keys: Iterable[Key]) -> None:
        """Keep these pages, once they come, until the owner is done."""
        with self._lock:
            owned = self._owned.setdefault(owner, set())
            for key in set(keys) - owned:
                owned.add(key)
                self._wanted[key] = self._wanted.get(key, 0) + 1

    def hand_over(self, owner: Hashable, heir: Hashable) -> None:
        """Let another owner, new, want what this one did."""
        with self._lock:
            self._owned[heir] = self._owned.pop(owner, set())

    def done(self, owner: Hashable) -> None:
        """Free what nobody else wants."""
        with self._lock:
            for key in self._owned.pop(owner, ()):
                self._wanted[key] -= 1
                if self._wanted[key]:
                    continue
                del self._wanted[key]
                at = self._where.pop(key, None)
                if at is not None:
                    self._free[key[0]].append(at)

    def put(self, key: Key, parts: Sequence[memoryview]) -> bool:
        """Keep a page that was verified; False if nobody wants it, or without room."""
        with self._lock:
            if key in self._where:
                return True
            at = self._take_slot(key[0]) if key in self._wanted else None
        if at is None:
            return False
        at[0].put(at[1], parts)
        with self._lock:
            if key in self._wanted and key not in self._where:
                self._where[key] = at
            else:
                self._free[key[0]].append(at)
            return key in self._where

    def has(self, component: Component, page_hash: bytes) -> bool:
        return (component, page_hash) in self._where

    def room(self, component: Component) -> int:
        """Return about how many more pages fit."""
        with self._lock:
            free = len(self._free[component])
            return free + (self._max_bytes - self._bytes) // self._page_bytes(component)

    def runs(self, component: Component, hashes: Sequence[bytes]) -> list[Run] | None:
        """Return where these pages are; None if one is not. Valid while an owner wants them."""
        with self._lock:
            places = [self._where.get((component, page_hash)) for page_hash in hashes]
        found: list[Run] = []
        for i, place in enumerate(places):
            if place is None:
                return None
            last = found[-1] if found else None
            if last is not None and last.block is place[0] and last.slot + last.count == place[1]:
                found[-1] = Run(last.first, last.count + 1, last.block, last.slot)
            else:
                found.append(Run(i, 1, *place))
        return found

    def _page_bytes(self, component: Component) -> int:
        return sum(spec.page_bytes for spec in self._specs[component])

    def _take_slot(self, component: Component) -> tuple[Block, int] | None:
        if not self._free[component]:
            size = self._page_bytes(component)
            pages = max(1, min(_BLOCK_PAGES, _BLOCK_BYTES // size))
            pages = min(pages, self._make_room(component, pages * size) // size)
            if not pages:
                return None
            block = Block(self._specs[component], pages, pinned=self._pinned)
            self._bytes += block.nbytes
            self._blocks[component].append(block)
            self._free[component] = [(block, slot) for slot in reversed(range(pages))]
        return self._free[component].pop()

    def _make_room(self, component: Component, size: int) -> int:
        """Give up idle blocks of other components until `size` bytes fit; return what fits."""
        for other in [kind for kind in self._blocks if kind is not component]:
            for block in list(self._blocks[other]):
                if self._bytes + size <= self._max_bytes:
                    break
                free = self._free[other]
                if sum(one is block for one, _ in free) == block.pages:
                    self._free[other] = [at for at in free if at[0] is not block]
                    self._blocks[other].remove(block)
                    self._bytes -= block.nbytes
        return self._max_bytes - self._bytes
