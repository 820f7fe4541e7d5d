"""What changes in the store, told to watchers: bounded per watcher, never waited for.

Writers publish and go on. A watcher that lags more than its bound loses changes and is told how many.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


class ChangeKind(enum.Enum):
    """What happened to an object."""

    STORED = "stored"
    EVICTED = "evicted"  # removed for want of room
    DELETED = "deleted"  # removed by a client
    CLEARED = "cleared"  # every name that begins with `name` is removed


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a stored name; `size_bytes` is 0 where the store does not say."""

    kind: ChangeKind
    name: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """So many changes were not told to this watcher."""

    changes: int


class TooManyWatchers(Exception):
    """The hub has no room for another watcher."""


class Watcher:
    """One subscriber's queue. Guarded by its own condition; taken after no other lock."""

    def __init__(self, *, prefixes: Sequence[str], limit: int) -> None:
        self._prefixes = tuple(prefixes)
        self._limit = limit
        self._ready = threading.Condition()
        self._queue: deque[Change] = deque()  # Invariant: at most _limit long
        self._lost = 0  # changes dropped behind the last of the queue
        self._closed = False

    def wants(self, change: Change) -> bool:
        if change.name.startswith(self._prefixes):
            return True
        return change.kind is ChangeKind.CLEARED and any(p.startswith(change.name) for p in self._prefixes)

    def offer(self, changes: Sequence[Change]) -> int:
        """Queue what fits and return how many were dropped. Never blocks on the subscriber."""
        with self._ready:
            # Once something is lost, what follows is lost too until the subscriber has been told,
            # so that the gap stands where it happened.
            room = 0 if self._lost or self._closed else self._limit - len(self._queue)
            self._queue.extend(changes[:room])
            dropped = 0 if self._closed else len(changes[room:])
            self._lost += dropped
            self._ready.notify()
            return dropped

    def close(self) -> None:
        """End `batches` once it has delivered what is queued."""
        with self._ready:
            self._closed = True
            self._ready.notify()

    def batches(self, size: int) -> Iterator[list[Change] | Lost]:
        """Yield changes as they come, at most `size` at once, Lost where some are missing; ends on close."""
        while True:
            with self._ready:
                while not (self._queue or self._lost or self._closed):
                    self._ready.wait()
                batch = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
                lost = 0
                if not batch:
                    lost, self._lost = self._lost, 0
                    if not lost:
                        return
            yield batch or Lost(lost)


class EventHub:
    """All watchers. Guarded by its own lock; publish calls nobody back, so a caller may hold a lock."""

    def __init__(
        self,
        *,
        max_watchers: int,
        queue_limit: int,
        count: Callable[[ChangeKind, int], object] | None = None,
        note: Callable[[Sequence[Change]], object] | None = None,
    ) -> None:
        """`count` is told how many changes of a kind were published, `note` which; they must not block."""
        self._count, self._note = count, note
        self._max_watchers = max_watchers
        self._queue_limit = queue_limit
        self._lock = threading.Lock()  # then a Watcher's condition, never the reverse
        self._watchers: set[Watcher] = set()
        self._closed = False
        self.lost = 0  # changes dropped over all watchers

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def subscribe(self, prefixes: Sequence[str]) -> Watcher:
        """Return a new watcher of names that begin with one of `prefixes`. Raises TooManyWatchers."""
        watcher = Watcher(prefixes=prefixes, limit=self._queue_limit)
        with self._lock:
            if self._closed or len(self._watchers) >= self._max_watchers:
                raise TooManyWatchers(f"{len(self._watchers)} watchers are at work, and that is the most")
            self._watchers.add(watcher)
        return watcher

    def unsubscribe(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)
        watcher.close()

    def publish(self, changes: Sequence[Change]) -> None:
        """Tell every watcher that wants to know. Never blocks on a subscriber."""
        if self._count is not None:
            for kind, number in Counter(change.kind for change in changes).items():
                self._count(kind, number)
        if self._note is not None:
            self._note(changes)
        if not self._watchers:
            return
        with self._lock:
            for watcher in self._watchers:
                wanted = [change for change in changes if watcher.wants(change)]
                if wanted:
                    self.lost += watcher.offer(wanted)

    def close(self) -> None:
        """End every watcher after what it has queued; refuse new ones."""
        with self._lock:
            self._closed = True
            for watcher in self._watchers:
                watcher.close()
