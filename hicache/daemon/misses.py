"""Why an object was not there: never stored, evicted, deleted, or lost by the store.

Remembers what became of names, so that misses which a larger store would have served can be told from
those that no store could: the hit ceiling.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence

from hicache.daemon.events import Change, ChangeKind

_REMEMBERED = 1 << 19  # names, at about 100 bytes each


class Fate(enum.Enum):
    """What is known of a name that is not there."""

    NEVER_STORED = "never_stored"  # not since this daemon started, as far as it remembers
    EVICTED = "evicted"  # for want of room
    DELETED = "deleted"  # by a client, as it does with what does not verify
    LOST = "lost"  # it was stored: cleared, expired, or dropped by the store itself


_FATES = {ChangeKind.STORED: Fate.LOST, ChangeKind.EVICTED: Fate.EVICTED, ChangeKind.DELETED: Fate.DELETED}


class Fates:
    """What became of names, by their hash; the oldest are forgotten beyond `limit`. Thread-safe."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._half = max(1, limit // 2)
        self._lock = threading.Lock()
        self._young: dict[int, Fate] = {}
        self._old: dict[int, Fate] = {}

    def note(self, changes: Sequence[Change]) -> None:
        """Follow changes of the store. A clear needs no note: what it took is LOST when it is asked for."""
        with self._lock:
            for change in changes:
                fate = _FATES.get(change.kind)
                if fate is None:
                    continue
                self._young[hash(change.name)] = fate
                if len(self._young) > self._half:
                    self._young, self._old = {}, self._young

    def of(self, names: Iterable[str]) -> dict[Fate, int]:
        """Count the fates of names that were asked for in vain."""
        counts: dict[Fate, int] = {}
        young, old = self._young, self._old
        for name in names:
            key = hash(name)
            fate = young.get(key) or old.get(key) or Fate.NEVER_STORED
            counts[fate] = counts.get(fate, 0) + 1
        return counts
