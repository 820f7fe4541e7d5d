"""Where clients on this host get the arena, make small calls fast, and are noticed when they are gone.

An abstract Unix socket: reachable from where this daemon's loopback is, no file to leave behind. The
kernel says which user is at the other end, and ends the connection of a process that is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping

from hicache.rpc import local
from hicache.seldom import Seldom

logger = logging.getLogger(__name__)

_SESSION = struct.Struct("<Q")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_BACKLOG = 64
_GREETING_S = 5.0
_DYING_S = 2.0  # from the end of a killed process's connections to its own

Answer = Callable[[bytes], tuple[int, bytes]]  # a request's bytes to a status code and a reply's, or why not


class Attachments:
    """Attached clients, a connection and a thread each. `_lock` guards the tables; no call runs under it."""

    def __init__(
        self,
        fd: int,
        *,
        most: int,
        answers: Mapping[str, Answer],
        on_gone: Callable[[int, Callable[[], bool]], None],
    ) -> None:
        """Listen at once, hand `fd` to clients and answer their calls.

        `on_gone` is called with each session whose connection ended, from that client's thread, and with a
        function that says whether its process has ended too, which may take _DYING_S. Raises OSError where
        there are no such sockets.
        """
        self.name = f"hicache-{os.getpid()}-{secrets.token_hex(8)}"
        self._fd = fd
        self._most = most
        self._answers = [answers[name] for name in local.METHODS]
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._sessions: set[int] = set()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._said = Seldom()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(b"\0" + self.name.encode())
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept_all, name="hicache-attach", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def close(self) -> None:
        """Finish calls at work and end every connection. Idempotent."""
        with self._lock:
            self._closed = True
        local.close(self._listener)
        self._thread.join()
        with self._lock:
            clients = dict(self._clients)
        for connection in clients:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # a reply on its way still goes out
        for thread in clients.values():
            thread.join(_GREETING_S)

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # no descriptor left, or a client that gave up
                    if (more := self._said.due("accept")) is not None:
                        logger.warning("a client could not be accepted at the arena: %s%s", error, more)
                    threading.Event().wait(0.1)
                continue
            if not self._welcome(connection):
                connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(peer)
        if uid != os.geteuid():
            if (more := self._said.due(f"user {uid}")) is not None:
                logger.warning("a client of user %d is not given the arena%s", uid, more)
            return False
        thread = threading.Thread(
            target=self._serve, args=(connection, pid), name="hicache-client", daemon=True
        )
        with self._lock:
            if len(self._clients) >= self._most or self._closed:
                return False
            self._clients[connection] = thread
        thread.start()
        return True

    def _serve(self, connection: socket.socket, pid: int) -> None:
        session = None
        process = _open_process(pid)
        try:
            session = self._greet(connection)
            frames = local.Frames(connection)
            while True:
                number, method, request = frames.receive()
                if method >= len(self._answers):
                    break
                frames.send(number, *self._answers[method](request))
        except (local.ChannelLost, OSError) as error:
            logger.debug("a client of the arena is gone: %s", error)
        except Exception:
            logger.exception("a client of the arena is given up")
        finally:
            self._forget(connection, session, process)
            if process is not None:
                os.close(process)

    def _greet(self, connection: socket.socket) -> int:
        connection.settimeout(_GREETING_S)
        said = connection.recv(_SESSION.size, socket.MSG_WAITALL)
        if len(said) != _SESSION.size:
            raise local.ChannelLost("no session")
        session: int = _SESSION.unpack(said)[0]
        with self._lock:
            self._sessions.add(session)
        socket.send_fds(connection, [b"\1"], [self._fd])
        return session

    def _forget(self, connection: socket.socket, session: int | None, process: int | None) -> None:
        with self._lock:
            self._clients.pop(connection, None)
            if session is not None:
                self._sessions.discard(session)
        connection.close()
        if session is None or self._closed:
            return
        try:
            self._on_gone(session, lambda: _has_ended(process))
        except Exception:
            logger.exception("what session %d held could not be taken back", session)


def _open_process(pid: int) -> int | None:
    """Return a descriptor of a process, or None where it cannot be seen from here."""
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _has_ended(process: int | None) -> bool:
    """Return whether a process has ended, waiting for one that is being killed."""
    if process is None:
        return False
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_DYING_S * 1000))
