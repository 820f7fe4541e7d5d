"""Sidecar pages between the two calls that SGLang makes for a page: one for its KV, one for its sidecars.

Written pages wait here for their KV, for some time and up to some bytes; read ones for the sidecar call
of the same batch. Both are keyed by page, and nothing here is visible to anyone else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hicache.clock import Clock
from hicache.types import Component

Key = tuple[Component, bytes]
"""A page: its component and hash."""


@dataclass(slots=True)
class _Page:
    """What is kept of one page: the parts of each pool."""

    since: float
    pools: dict[str, tuple[bytearray, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(part) for parts in self.pools.values() for part in parts)


class SidecarPages:
    """Thread-safe. Invariant: at most `max_bytes` are kept, and nothing longer than `max_seconds`."""

    def __init__(self, clock: Clock, *, max_bytes: int, max_seconds: float) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._pages: OrderedDict[Key, _Page] = OrderedDict()  # oldest first
        self._bytes = 0
        self.expired = 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._pages)

    def put(self, key: Key, pool: str, parts: Sequence[bytearray]) -> bool:
        """Keep a pool's part of a page; what was there of that pool goes. False if there is no room."""
        with self._lock:
            self._expire()
            page = self._pages.pop(key, None) or _Page(self._clock.now())
            self._bytes -= page.size
            page.pools.pop(pool, None)
            size = page.size + sum(len(part) for part in parts)
            if self._bytes + size > self._max_bytes:
                return False
            page.pools[pool] = tuple(parts)
            page.since = self._clock.now()
            self._pages[key] = page
            self._bytes += size
            return True

    def take(self, key: Key, pools: Collection[str]) -> dict[str, tuple[bytearray, ...]] | None:
        """Return and forget the parts of these pools; None if any of them is not here."""
        if not pools:
            return {}
        with self._lock:
            self._expire()
            page = self._pages.get(key)
            if page is None or not all(pool in page.pools for pool in pools):
                return None
            self._bytes -= page.size
            taken = {pool: page.pools.pop(pool) for pool in pools}
            if page.pools:
                self._bytes += page.size
            else:
                del self._pages[key]
            return taken

    def forget(self, component: Component | None = None) -> None:
        """Drop what is kept, or what is kept of one component."""
        with self._lock:
            for key in [key for key in self._pages if component in (None, key[0])]:
                self._bytes -= self._pages.pop(key).size

    def _expire(self) -> None:
        oldest = self._clock.now() - self._max_seconds
        while self._pages:
            key, page = next(iter(self._pages.items()))
            if page.since >= oldest:
                return
            del self._pages[key]
            self._bytes -= page.size
            self.expired += 1
