"""Who is connected: sessions, the model each speaks for, and what each has protected and reserved."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.daemon.scope import Scope

SESSION_IDLE_S = 600.0  # of a client that is connected to this host's arena: it is alive
SILENT_S = 60.0  # of any other: nobody says when it dies, and a live one that lost its session says Hello


class UnknownSession(Exception):
    """No session has this id: the daemon restarted, or the session idled out."""


class TooManySessions(Exception):
    """Every session is in use."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a client said of itself. `fingerprint` decides what it can see, the rest is for people."""

    client_id: str = ""
    model_name: str = ""
    fingerprint: str = ""
    shard: str = ""


class Session:
    """One client. Guarded by its own lock, taken after no other; ids and identity never change."""

    def __init__(self, identity: Identity, *, clock: Clock, lease_bytes: int, reservation_bytes: int) -> None:
        self.id = secrets.randbelow((1 << 63) - 1) + 1
        self.identity = identity
        self.scope = Scope(identity.fingerprint)
        self.last_seen = clock.now()
        self._clock = clock
        self._lock = threading.Lock()
        self._lease_limit = lease_bytes
        self._leases: OrderedDict[str, tuple[float, int]] = OrderedDict()  # name: (end, bytes), by end
        self._leased = 0  # Invariant: sum of bytes in _leases
        self._reservation_limit = reservation_bytes
        self._reserved = 0  # Invariant: 0 <= _reserved <= _reservation_limit

    @property
    def reserved(self) -> int:
        return self._reserved

    def leased(self) -> int:
        """Bytes protected for this session now."""
        with self._lock:
            self._drop_ended()
            return self._leased

    def lease(self, names: Sequence[str], sizes: Sequence[int], *, seconds: float) -> int:
        """Count leading objects as protected while they fit this session's share; return how many did.

        An object that is protected already is renewed and counts once. Sizes below 0 (misses) count nothing.
        """
        with self._lock:
            self._drop_ended()
            end = self._clock.now() + seconds
            for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
                if size < 0:
                    continue
                counted = self._leases.get(name, (0.0, 0))[1]
                if self._leased - counted + size > self._lease_limit:
                    return index
                self._leases[name] = (end, size)
                self._leases.move_to_end(name)
                self._leased += size - counted
        return len(names)

    def reserve(self, sizes: Sequence[int]) -> list[bool]:
        """Count bytes as reserved, as far as this session's share goes; return which of them were."""
        with self._lock:
            granted = []
            for size in sizes:
                granted.append(self._reserved + size <= self._reservation_limit)
                self._reserved += size if granted[-1] else 0
            return granted

    def unreserve(self, size: int) -> None:
        with self._lock:
            self._reserved -= size

    def _drop_ended(self) -> None:
        now = self._clock.now()
        while self._leases and next(iter(self._leases.values()))[0] <= now:
            self._leased -= self._leases.popitem(last=False)[1][1]


class Sessions:
    """All sessions. Guarded by its own lock, then a Session's."""

    def __init__(self, *, clock: Clock, limit: int, lease_bytes: int, reservation_bytes: int) -> None:
        self._clock = clock
        self._limit = limit
        self._lease_bytes = lease_bytes
        self._reservation_bytes = reservation_bytes
        self._lock = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self.is_attached: Callable[[int], bool] = lambda session_id: False

    def __len__(self) -> int:
        return len(self._sessions)

    def leased(self) -> int:
        """Bytes protected over all sessions; an object that several protect counts for each."""
        with self._lock:
            sessions = tuple(self._sessions.values())
        return sum(session.leased() for session in sessions)

    def open(self, identity: Identity) -> Session:
        """Register a client. Raises TooManySessions."""
        session = Session(
            identity,
            clock=self._clock,
            lease_bytes=self._lease_bytes,
            reservation_bytes=self._reservation_bytes,
        )
        with self._lock:
            if len(self._sessions) >= self._limit:
                self._drop_idle()
            if len(self._sessions) >= self._limit:
                raise TooManySessions(f"{self._limit} sessions are open, and that is the most")
            self._sessions[session.id] = session
        return session

    def get(self, session_id: int) -> Session:
        """Return a session and mark it as seen. Raises UnknownSession."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                raise UnknownSession(f"no session {session_id}; say Hello")
            session.last_seen = self._clock.now()
            return session

    def find(self, session_id: int) -> Session | None:
        """Return a session without marking it as seen; None if there is none of this id."""
        with self._lock:
            return self._sessions.get(session_id)

    def drop_idle(self) -> None:
        """Forget sessions without reservations, not seen for SILENT_S, or SESSION_IDLE_S if attached."""
        with self._lock:
            self._drop_idle()

    def _drop_idle(self) -> None:
        now = self._clock.now()
        patience = {True: SESSION_IDLE_S, False: SILENT_S}
        silent = [
            id
            for id, one in self._sessions.items()
            if not one.reserved and now - one.last_seen > patience[self.is_attached(id)]
        ]
        for session_id in silent:
            del self._sessions[session_id]

    def end(self, session_id: int) -> None:
        """Forget a session whose client is known to be gone."""
        with self._lock:
            self._sessions.pop(session_id, None)

    def other_fingerprints(self, identity: Identity) -> list[str]:
        """Return fingerprints other than `identity`'s that sessions under its model name have."""
        if not identity.model_name:
            return []
        with self._lock:
            found = {
                one.identity.fingerprint
                for one in self._sessions.values()
                if one.identity.model_name == identity.model_name
            }
        return sorted(found - {identity.fingerprint})
