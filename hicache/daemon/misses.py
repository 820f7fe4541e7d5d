"""Why an object was not there: never stored, evicted, deleted, or lost by the store.

Remembers what became of names, so that misses which a larger store would have served can be told from
those that no store could: the hit ceiling.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from hicache.daemon.events import Change, ChangeKind

_REMEMBERED = 1 << 19  # names, at about 100 bytes each


class Fate(enum.Enum):
    """What is known of a name that is not there."""

    NEVER_STORED = "never_stored"  # not since this daemon started, as far as it remembers
    EVICTED = "evicted"  # for want of room
    DELETED = "deleted"  # by a client, as it does with what does not verify
    LOST = "lost"  # it was stored: cleared, expired, or dropped by the store itself


_ORDER = tuple(Fate)  # NEVER_STORED is 0: what no name is known by
_AFTER = {ChangeKind.STORED: Fate.LOST, ChangeKind.EVICTED: Fate.EVICTED, ChangeKind.DELETED: Fate.DELETED}
_FATES = {kind: _ORDER.index(fate) for kind, fate in _AFTER.items()}


class Fates:
    """What became of names, by their hash; the oldest are forgotten beyond `limit`. Thread-safe."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._half = max(1, limit // 2)
        self._lock = threading.Lock()
        self._young: dict[int, int] = {}  # to the fate's place in the order of fates
        self._old: dict[int, int] = {}

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
        young, old = self._young.get, self._old.get
        counts = Counter([young(key) or old(key, 0) for key in map(hash, names)])
        return {_ORDER[fate]: count for fate, count in counts.items()}
