"""Sessions: conversations that clients name, what each refers to, and when it is over.

A session comes to be with its first request, or by open(); it ends by close(), by its time-out, or
when there are too many. Then its pages are as any others. It protects nothing. Storage is told what open
sessions will ask for, and when they are over.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict

from hicache.cache.stats import CacheStats
from hicache.clock import Clock
from hicache.config.cache import CacheConfig
from hicache.errors import HiCacheError
from hicache.request import Request
from hicache.transfer.base import Executor, ObjectRef
from hicache.tree.base import Lease, SessionRefs, TreeCore
from hicache.types import Component

MAX_ID_BYTES = 1024  # UTF-8
_LONGEST_PIN_S = 86400.0


class SessionRefused(HiCacheError, ValueError):
    """A session id or a time-out that cannot be; the message says why."""


class Session:
    """One conversation. `active` are its requests between enqueue and their end; it never times out then."""

    __slots__ = ("active", "closed", "id", "last_used", "name", "pinned", "refs", "timeout_s")

    def __init__(self, session_id: str, timeout_s: float, now: float) -> None:
        self.id = session_id
        self.timeout_s = timeout_s
        self.last_used = now
        self.active = 0
        self.closed = False
        self.refs = SessionRefs()
        self.name = hashlib.sha256(session_id.encode()).hexdigest()[:32]  # to storage, which sees no ids
        # What storage was told last: pages, the digest of the last one, and which epoch of storage it was.
        self.pinned: tuple[int, bytes, int] = (0, b"", 0)


class Sessions:
    """All sessions of one cache. Owned by the cache's thread.

    A request belongs to the session that was open when it came: once that one is closed it refers to
    nothing, even if another has the id by then.
    """

    def __init__(
        self, tree: TreeCore, executor: Executor, config: CacheConfig, clock: Clock, stats: CacheStats
    ) -> None:
        self._tree, self._executor, self._clock, self._stats = tree, executor, clock, stats
        self.enabled = config.enable_session_radix_cache
        self._timeout_s = config.session_timeout
        self._limit = config.max_sessions
        self._open: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._of: dict[Request, Session] = {}
        self._due: list[tuple[float, int, Session]] = []  # heap: not before then, a serial number
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    # -- by clients ----------------------------------------------------------------------------

    def open(self, session_id: str, timeout_s: float | None = None) -> None:
        """Begin a session, perhaps with a time-out of its own. Raises SessionRefused."""
        self._check_enabled()
        check_id(session_id)
        if timeout_s is not None and not timeout_s > 0:
            raise SessionRefused(f"timeout={timeout_s}: a session lasts more than 0 seconds without requests")
        if session_id in self._open:
            raise SessionRefused(f"session_id {shown_id(session_id)} is open already; close it first")
        self._begin(session_id, self._timeout_s if timeout_s is None else timeout_s)

    def close(self, session_id: str) -> bool:
        """End a session now, whatever its requests do; False if there is none. Raises SessionRefused."""
        self._check_enabled()
        check_id(session_id)
        session = self._open.get(session_id)
        if session is not None:
            self._end(session, "closed")
        return session is not None

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise SessionRefused("sessions are off: start with --enable-session-radix-cache")

    # -- by requests ---------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A request was queued."""
        if request.session_id is None or not self.enabled:
            return
        session = self._open.get(request.session_id)
        if session is None:
            session = self._begin(request.session_id, self._timeout_s)
        session.active += 1
        self._use(session)
        self._of[request] = session

    def finished(self, request: Request, lease: Lease) -> None:
        """A request is about to end well: its session refers to the lease's path."""
        session = self._of.get(request)
        if session is not None and not session.closed:
            self._tree.refer(lease, session.refs)
            if lease.depth and self._executor.has_storage:
                self._pin(session, lease)

    def _pin(self, session: Session, lease: Lease) -> None:
        """Tell storage what the session will ask for: new FULL pages, and the window and state at the end."""
        known, digest, epoch = session.pinned
        on_path = 0 < known <= lease.depth and self._tree.page_hashes(lease, known - 1, known) == [digest]
        if not on_path or epoch != self._executor.storage_epoch:
            known = 0
        rules = self._tree.rules
        low = max(0, min(known, lease.depth - max(1, rules.window_pages)))
        digests = self._tree.page_hashes(lease, low, lease.depth)
        refs = [ObjectRef(Component.FULL, digest) for digest in digests[known - low :]]
        if Component.SWA in rules.kinds:
            refs += [ObjectRef(Component.SWA, digest) for digest in digests[-rules.window_pages :]]
        if Component.MAMBA in rules.kinds:
            refs.append(ObjectRef(Component.MAMBA, digests[-1]))
        session.pinned = (lease.depth, digests[-1], self._executor.storage_epoch)
        self._executor.pin(session.name, refs, min(session.timeout_s, _LONGEST_PIN_S))

    def leave(self, request: Request) -> None:
        """A request has ended, one way or another."""
        session = self._of.pop(request, None)
        if session is not None:
            session.active -= 1
            if not session.closed:
                self._use(session)
            if len(self._open) > self._limit:  # none was idle when there came to be too many
                self._displace()

    # -- time ----------------------------------------------------------------------------------

    def expire(self) -> None:
        """End the sessions that have been idle for their time-out."""
        now = self._clock.now()
        while self._due and self._due[0][0] <= now:
            _, _, session = heapq.heappop(self._due)
            if session.closed:
                continue
            over = session.last_used + session.timeout_s
            if session.active or over > now:
                self._wait(session, now + session.timeout_s if session.active else over)
            else:
                self._end(session, "expired")

    def remembered(self) -> dict[str, int]:
        return {"session_requests": len(self._of)}

    # -- within --------------------------------------------------------------------------------

    def _begin(self, session_id: str, timeout_s: float) -> Session:
        if len(self._open) >= self._limit:
            self._displace()
        session = self._open[session_id] = Session(session_id, timeout_s, self._clock.now())
        self._stats.sessions["opened"] += 1
        self._wait(session, session.last_used + timeout_s)
        if len(self._due) > 2 * len(self._open) + 64:
            self._due = [entry for entry in self._due if not entry[2].closed]
            heapq.heapify(self._due)
        return session

    def _displace(self) -> None:
        """End the least recently used session that is idle, if there is one."""
        idle = next((session for session in self._open.values() if not session.active), None)
        if idle is not None:
            self._end(idle, "displaced")

    def _wait(self, session: Session, until: float) -> None:
        self._serial += 1
        heapq.heappush(self._due, (until, self._serial, session))

    def _use(self, session: Session) -> None:
        session.last_used = self._clock.now()
        self._open.move_to_end(session.id)

    def _end(self, session: Session, why: str) -> None:
        session.closed = True
        del self._open[session.id]
        self._stats.sessions[why] += 1
        self._tree.unrefer(session.refs)
        if session.pinned[0]:
            self._executor.close_session(session.name)


def check_id(session_id: str) -> None:
    """Raise SessionRefused unless this can name a session: any text of 1 to MAX_ID_BYTES bytes of UTF-8.

    Texts that differ in any character are different, however alike they look.
    """
    if not session_id:
        raise SessionRefused("session_id is empty: leave it out, or name the conversation")
    size = len(session_id)
    if size <= MAX_ID_BYTES:
        try:
            size = len(session_id.encode())
        except UnicodeEncodeError:
            raise SessionRefused(f"session_id {shown_id(session_id)} has half a character in it") from None
    if size > MAX_ID_BYTES:
        raise SessionRefused(
            f"session_id {shown_id(session_id)} has {size} bytes or more; the most is {MAX_ID_BYTES}"
        )


def shown_id(session_id: str) -> str:
    """Return an id as a message may show it: escaped, and not too long."""
    return ascii(session_id if len(session_id) <= 40 else session_id[:40] + "...")
