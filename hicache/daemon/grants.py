"""Which clients read where: places that Locate granted, until they are released or lapse."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.daemon.arena_store import ArenaStore
from hicache.daemon.extents import Extent


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    extents: Sequence[Extent]  # each with a pin of this grant
    size: int
    ends_at: float


class Grants:
    """Grants by session and number. Guarded by its own lock, which is not held across store calls."""

    def __init__(
        self, store: ArenaStore, *, clock: Clock, seconds: float, session_bytes: int, most: int
    ) -> None:
        """`most` is the size of the largest object: one can always be read, however small the share."""
        self._store = store
        self._clock = clock
        self._seconds = seconds
        self._session_bytes = session_bytes
        self._most = most
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._of: dict[int, dict[int, _Grant]] = {}  # session: grants, oldest first; none is empty
        self.lapsed = 0  # grants that ended by time

    def room(self, session: int) -> int:
        """Return how many bytes a session may be granted now."""
        with self._lock:
            held = sum(grant.size for grant in self._of.get(session, {}).values())
        return max(0, self._session_bytes - held) if held else max(self._session_bytes, self._most)

    def add(self, session: int, extents: Sequence[Extent]) -> int:
        """Keep pinned extents until the grant ends; return its number, or 0 for none."""
        if not extents:
            return 0
        number = next(self._numbers)
        size = sum(extent.size for extent in extents)
        grant = _Grant(extents, size, self._clock.now() + self._seconds)
        with self._lock:
            self._of.setdefault(session, {})[number] = grant
        return number

    def release(self, session: int, numbers: Sequence[int]) -> None:
        """End grants of a session; unknown ones are ignored."""
        with self._lock:
            mine = self._of.get(session, {})
            ended = [mine.pop(number) for number in numbers if number in mine]
            if not mine:
                self._of.pop(session, None)
        self._unpin(ended)

    def expire(self) -> None:
        """End the grants whose time is up."""
        now = self._clock.now()
        ended = []
        with self._lock:
            for session, mine in list(self._of.items()):
                while mine and next(iter(mine.values())).ends_at <= now:
                    ended.append(mine.pop(next(iter(mine))))
                if not mine:
                    del self._of[session]
            self.lapsed += len(ended)
        self._unpin(ended)

    def drop(self, session: int | None = None) -> None:
        """End every grant of a session, or of all."""
        with self._lock:
            gone = [session] if session is not None else list(self._of)
            ended = [grant for one in gone for grant in self._of.pop(one, {}).values()]
        self._unpin(ended)

    def _unpin(self, ended: Sequence[_Grant]) -> None:
        for grant in ended:
            self._store.unpin(grant.extents)
