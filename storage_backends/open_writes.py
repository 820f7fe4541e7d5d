"""The writes that this process has begun and not ended, at most one per key.

For backends whose server knows nothing of a write before its commit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from hicache.storage_backends.base import Reservation

H = TypeVar("H")


def check_sizes(keys: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise ValueError if a begin_write names sizes that fit neither its keys nor any object."""
    if len(keys) != len(sizes):
        raise ValueError(f"{len(keys)} keys, but {len(sizes)} sizes")
    if sizes and min(sizes) < 1:
        raise ValueError(f"an object has at least one byte, not {min(sizes)}")


class OpenWrites(Generic[H]):
    """Reservation to what the backend holds for it. Thread-safe, one lock.

    Invariant: a key is open at most once, and a held value leaves exactly once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._held: dict[int, tuple[str, H]] = {}
        self._keys: set[str] = set()

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._keys

    def add(self, key: str, held: H) -> int | None:
        """Open a write and return its token, or None if the key is open already."""
        with self._lock:
            if key in self._keys:
                return None
            token = next(self._tokens)
            self._held[token] = (key, held)
            self._keys.add(key)
            return token

    def end(self, reservation: Reservation) -> H | None:
        """Close a write and return what was held for it, or None if it is not open."""
        with self._lock:
            token = reservation.token
            found = self._held.pop(token, None) if isinstance(token, int) else None
            if found is None:
                return None
            self._keys.discard(found[0])
            return found[1]
