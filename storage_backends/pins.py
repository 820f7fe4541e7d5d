"""What conversations asked a store to keep: keys by session, until it is closed or not heard of for a while.

A hint about order, never a promise of room. Not thread-safe; the store locks.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

MOST_KEYS = 1 << 20  # over all sessions; beyond it the session that was pinned for least recently ends


class _Pinned:
    __slots__ = ("due", "ends_at", "keys")

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.ends_at = 0.0
        self.due = math.inf  # when it is looked at, which is not after its end


class Pins:
    """Keys that open sessions pin, whether objects of theirs are there (yet) or not.

    Invariant: `_counts` has the number of sessions of each key; `total` is the sum of these.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._sessions: OrderedDict[str, _Pinned] = OrderedDict()  # last pinned for last
        self._due: list[tuple[float, str]] = []  # heap; an entry that is not a session's `due` is void
        self._counts: dict[str, int] = {}
        self.total = 0

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._sessions)

    def pin(self, session: str, keys: Sequence[str], ends_at: float) -> list[str]:
        """Add keys to a session, which lasts until `ends_at`; return the keys that nobody pins any more."""
        pinned = self._sessions.setdefault(session, _Pinned())
        self._sessions.move_to_end(session)
        pinned.ends_at = ends_at
        if ends_at < pinned.due:
            self._look_at(session, pinned, ends_at)
        for key in keys:
            if key not in pinned.keys:
                pinned.keys[key] = None
                self._counts[key] = self._counts.get(key, 0) + 1
                self.total += 1
        let_go: list[str] = []
        while self.total > self._most_keys:
            let_go += self.close(next(iter(self._sessions)))
        return [key for key in let_go if key not in self._counts]

    def close(self, session: str) -> list[str]:
        """End a session; return the keys that nobody pins any more."""
        pinned = self._sessions.pop(session, None)
        return [] if pinned is None else list(self._let_go(pinned))

    def expire(self, now: float) -> list[str]:
        """End the sessions that have lasted until now; return the keys that nobody pins any more."""
        let_go: list[str] = []
        while self._due and self._due[0][0] <= now:
            due, session = heapq.heappop(self._due)
            pinned = self._sessions.get(session)
            if pinned is None or pinned.due != due:
                continue
            if pinned.ends_at <= now:
                let_go += self.close(session)
            else:
                self._look_at(session, pinned, pinned.ends_at)
        return [key for key in let_go if key not in self._counts]

    def _look_at(self, session: str, pinned: _Pinned, due: float) -> None:
        pinned.due = due
        heapq.heappush(self._due, (due, session))

    def _let_go(self, pinned: _Pinned) -> Iterator[str]:
        for key in pinned.keys:
            self.total -= 1
            left = self._counts.pop(key) - 1
            if left:
                self._counts[key] = left
            else:
                yield key
