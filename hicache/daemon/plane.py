"""The shm data plane, daemon's side: an arena, who is attached to it, and what each may look at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import grpc

from hicache.clock import Clock
from hicache.config.serve import DataPlane, ServeConfig
from hicache.daemon.arena_store import ArenaStore, Place
from hicache.daemon.attach import Answer, Attachments
from hicache.daemon.edge import Refusal
from hicache.daemon.grants import Grants
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.writes import WriterState, Writes
from hicache.rpc.v1 import cache_pb2 as pb

logger = logging.getLogger(__name__)


class ArenaPlane:
    """Thread-safe. Owns the attachments; the store is the daemon's."""

    def __init__(
        self,
        config: ServeConfig,
        store: ArenaStore,
        *,
        sessions: Sessions,
        writes: Writes,
        answers: Mapping[str, Answer],
        clock: Clock,
    ) -> None:
        """Let clients attach from now on. Raises OSError where they cannot."""
        self._store = store
        self._sessions = sessions
        self._writes = writes
        self.grants = Grants(
            store,
            clock=clock,
            seconds=config.lease_seconds,
            session_bytes=config.session_lease_bytes,
            most=int(config.max_object),
        )
        self._attachments = Attachments(
            store.segment.fd, most=config.max_sessions, answers=answers, on_gone=self._client_gone
        )
        sessions.is_attached = self._attachments.__contains__

    @property
    def attached(self) -> int:
        """Clients that have the arena mapped."""
        return len(self._attachments)

    @property
    def ready_bytes(self) -> int:
        return self._store.ready_bytes

    def offer(self) -> pb.Arena:
        """Return what a client needs to attach."""
        segment = self._store.segment
        return pb.Arena(
            socket=self._attachments.name, size_bytes=segment.size_bytes, table_bytes=segment.table_bytes
        )

    def check_attached(self, session: Session) -> None:
        """Raise Refusal unless the session's client is attached."""
        if session.id not in self._attachments:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION, "the client is not attached to the arena; go on inline"
            )

    def locate(
        self, session: Session, names: Sequence[str], limits: Sequence[int]
    ) -> tuple[int, list[Place]]:
        """Grant leading objects as far as the session's share goes; return the grant's number and places."""
        places = self._store.locate(names, limits, most_bytes=self.grants.room(session.id))
        return self.grants.add(session.id, [one.extent for one in places if one.extent is not None]), places

    def close(self) -> None:
        """Let nobody attach any more and end all grants; what clients have mapped stays valid memory."""
        self._attachments.close()
        self.grants.drop()

    def _client_gone(self, session_id: int, has_ended: Callable[[], bool]) -> None:
        self.grants.drop(session_id)
        session = self._sessions.find(session_id)
        if session is None:
            return
        ended = has_ended()
        if self._writes.in_arena(session):
            self._writes.client_gone(session, WriterState.ENDED if ended else WriterState.LIVES)
        if ended:
            self._sessions.end(session_id)


def open_plane(
    config: ServeConfig,
    store: object,
    *,
    sessions: Sessions,
    writes: Writes,
    answers: Mapping[str, Answer],
    clock: Clock,
) -> ArenaPlane | None:
    """Return the plane where the store has an arena and clients can attach, else None."""
    if DataPlane.SHM not in config.data_planes or not isinstance(store, ArenaStore):
        return None
    try:
        return ArenaPlane(config, store, sessions=sessions, writes=writes, answers=answers, clock=clock)
    except OSError as error:
        logger.warning("no shared memory, bytes travel inline: %s", error)
        return None
