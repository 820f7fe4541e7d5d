"""How much of the directory is used, and what goes first when a limit is reached.

Recency is this process's own memory: times of files order only what was there when it started, so
mount options such as noatime change nothing. A belief: other processes add and remove objects.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hicache.storage_backends.file.directory import FANOUT, Directory
from hicache.storage_backends.file.options import Settings
from hicache.storage_backends.lru import Entry, LeasedLru
from hicache.storage_backends.pins import Pins

_RESCAN_S = 60.0  # the whole directory is listed anew over this time, a part at a time


class Index:
    """Objects by recency, within limits. Not thread-safe, does no I/O but in load(); the backend locks.

    Invariant: used_bytes is the sum of the sizes of the objects in it.
    """

    def __init__(self, settings: Settings) -> None:
        self.max_bytes = settings.max_bytes
        self.min_free_bytes = settings.min_free_bytes
        self._low_bytes = int(settings.max_bytes * settings.eviction_ratio)
        self._pins = Pins()
        self._lru: LeasedLru[Entry] = LeasedLru(
            lease_s=settings.lease_s, max_leased_bytes=settings.max_bytes // 2 or 1 << 62, pins=self._pins
        )
        self._next_part = 0
        self._next_scan_at = 0.0

    def __len__(self) -> int:
        return len(self._lru)

    @property
    def used_bytes(self) -> int:
        return self._lru.used_bytes

    def load(self, directory: Directory, now: float) -> None:
        """List everything, oldest first."""
        parts = [directory.listing(part) for part in range(FANOUT)]
        by_age = heapq.merge(
            *(sorted(part, key=lambda o: o.mtime_ns) for part in parts), key=lambda o: o.mtime_ns
        )
        for found in by_age:
            self._lru.add(found.key, Entry(found.size))
        self._next_scan_at = now + _RESCAN_S / FANOUT

    def part_to_rescan(self, now: float) -> int | None:
        """Return the part of the directory whose turn it is, None if it is nobody's."""
        if now < self._next_scan_at:
            return None
        self._next_scan_at = now + _RESCAN_S / FANOUT
        self._next_part = (self._next_part + 1) % FANOUT
        return self._next_part

    def unknown(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that are not in the index."""
        return [key for key in keys if key not in self._lru]

    def saw(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        """Take over what the filesystem said: a size, or less than 1 for an absent object."""
        for i in range(len(keys) - 1, -1, -1):
            entry = self._lru.get(keys[i])
            if entry is not None and entry.size != sizes[i]:
                self._lru.pop(keys[i])
                entry = None
            if entry is None and sizes[i] > 0:
                self._lru.add(keys[i], Entry(sizes[i]))

    def lease(self, keys: Sequence[str], now: float) -> None:
        """Protect objects from victims() for the lease time."""
        self._lru.lease(keys, now)

    def touch(self, keys: Sequence[str]) -> None:
        """Rank objects as the most recently used, the first of them highest."""
        self._lru.touch(keys)

    def pin(self, session: str, keys: Sequence[str], now: float, ttl_s: float) -> None:
        """Let a session keep keys from victims() while there are others; here or not, for `ttl_s` seconds."""
        self._lru.unpinned(self._pins.expire(now))
        self._lru.unpinned(self._pins.pin(session, keys, now + ttl_s))

    def close_session(self, session: str) -> None:
        """Let a session keep nothing."""
        self._lru.unpinned(self._pins.close(session))

    def forget(self, keys: Sequence[str]) -> None:
        """Drop objects that are gone."""
        for key in keys:
            self._lru.pop(key)

    def victims(self, size: int, *, reserved: int, free: int, now: float) -> list[tuple[str, int]] | None:
        """Take out the keys and sizes that must go before `size` bytes can be written; None if it cannot be.

        `reserved` bytes are being written; `free` is what the filesystem has left for all of them.
        Past max_bytes an eviction goes down to eviction_ratio of it, if leases let it.
        """
        self._lru.end_leases(now)
        self._lru.unpinned(self._pins.expire(now))
        over = 0
        if self.max_bytes:
            over = self._lru.used_bytes + reserved + size - self.max_bytes
        over = max(over, self.min_free_bytes + reserved + size - free if self.min_free_bytes else 0)
        if over <= 0:
            return []
        if over > self._lru.evictable_bytes:
            return None
        goal = max(over, self._lru.used_bytes + reserved + size - self._low_bytes if self.max_bytes else 0)
        taken: list[tuple[str, int]] = []
        while goal > 0:
            victim = self._lru.pop_coldest()
            if victim is None:
                break
            taken.append((victim[0], victim[1].size))
            goal -= victim[1].size
        return taken
