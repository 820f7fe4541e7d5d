"""A daemon's arena as its clients see it: attached over a Unix socket, mapped, copied out of and checked.

Decides whether a copy is the object; leaves to the daemon what lies where.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from hicache.rpc import local, mapping
from hicache.rpc.bulk import ProtocolViolation
from hicache.rpc.v1 import cache_pb2 as pb

_SESSION = struct.Struct("<Q")
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PAGE = mmap.PAGESIZE
_CHUNK = 256 << 10  # bytes copied before they are hashed: in the cache, where hashing is almost free
_MAX_KEPT_RELEASES = 1024


class CannotAttach(Exception):
    """The arena is not to be had here: another host, another user, no memory."""


@dataclass(slots=True)
class Copied:
    """What became of the places of one LocateReply."""

    sizes: list[int]  # as told
    stale: list[int]  # indices whose place was given to another object before the copy was done
    damaged: list[int]  # indices whose bytes are not what their writer wrote


class SharedArena:
    """One attachment. Thread-safe, one lock, under which nothing is copied.

    The memory stays valid for as long as a view of it is held, also when the daemon is gone. Reads go
    through a read-only mapping; a writable one is made for the first write.
    """

    def __init__(self, offer: pb.Arena, connection: socket.socket, fd: int) -> None:
        """Map the arena; owns `connection` and `fd` from here. Raises CannotAttach."""
        self._connection = connection
        self.channel = local.Channel(connection)
        self._fd = fd
        self._table_bytes = offer.table_bytes
        self._lock = threading.Lock()
        self._releases: list[int] = []
        self._writable: memoryview | None = None
        self._wanted_bytes = 0
        self._wake = threading.Condition(self._lock)
        self._closed = False
        try:
            if os.fstat(fd).st_size != offer.size_bytes or not 0 < offer.table_bytes < offer.size_bytes:
                raise CannotAttach(f"a file of {os.fstat(fd).st_size} bytes, not {offer.size_bytes}")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise CannotAttach("a file that others can shorten")
            shared = mmap.mmap(fd, offer.size_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            self.close()
            raise CannotAttach(str(error)) from error
        except CannotAttach:
            self.close()
            raise
        self._memory = memoryview(shared)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(shared, dtype=np.uint8)
        self._generations = np.frombuffer(shared, dtype="<u8", count=offer.table_bytes // 8)
        self._populator: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    # -- reading -------------------------------------------------------------------------------

    def copy_out(self, reply: pb.LocateReply, buffers: Sequence[memoryview]) -> Copied:
        """Copy every granted object to its buffer, verify the copies, and then look at the generations.

        In this order a copy is the object even if this process stood still between any two steps.
        Raises ProtocolViolation.
        """
        self.want(reply.ready_bytes)
        sizes = list(reply.sizes)
        columns = (reply.offsets, reply.slots, reply.generations, reply.checksums)
        if len(sizes) > len(buffers) or any(len(column) != len(sizes) for column in columns):
            raise ProtocolViolation(f"a LocateReply of {len(sizes)} sizes for {len(buffers)} keys")
        damaged = []
        total = self._bytes.size
        digest = xxhash.xxh3_64_intdigest
        memory, copyto, frombuffer = self._bytes, np.copyto, np.frombuffer
        for index, (size, offset, checksum) in enumerate(
            zip(sizes, reply.offsets, reply.checksums, strict=True)
        ):
            if not offset:
                continue
            if not 0 < size <= min(len(buffers[index]), total - offset):
                raise ProtocolViolation(f"{size} bytes at {offset} of {total} for {len(buffers[index])}")
            target = frombuffer(buffers[index], dtype=np.uint8, count=size)
            if size <= _CHUNK:
                copyto(target, memory[offset : offset + size])
                good = digest(target.data) == checksum
            else:
                good = _copy_large(target, memory[offset : offset + size]) == checksum
            if not good:
                damaged.append(index)
        now = self._generations[np.array(reply.slots, dtype=np.int64)]
        moved = now != np.array(reply.generations, dtype=np.uint64)
        moved &= np.array(reply.offsets, dtype=np.uint64) != 0
        stale = np.flatnonzero(moved).tolist()
        return Copied(sizes, stale, [index for index in damaged if index not in stale])

    def note_release(self, grant: int) -> None:
        """Tell the daemon with a later call that a grant is done with."""
        if grant:
            with self._lock:
                self._releases.append(grant)
                del self._releases[:-_MAX_KEPT_RELEASES]  # the daemon ends older ones by itself

    def take_releases(self) -> list[int]:
        """Return the grants to release with a call that is about to be made."""
        with self._lock:
            releases, self._releases = self._releases, []
        return releases

    # -- writing -------------------------------------------------------------------------------

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a reservation, to be written to. Raises CannotAttach without address space."""
        with self._lock:
            if self._closed:
                raise CannotAttach("closed meanwhile")
            if self._writable is None:
                try:
                    shared = mmap.mmap(
                        self._fd, self._bytes.size - self._table_bytes, offset=self._table_bytes
                    )
                except (OSError, ValueError) as error:
                    raise CannotAttach(f"not writable: {error}") from error
                self._writable = memoryview(shared)
        start = offset - self._table_bytes
        return self._writable[start : start + size]

    # -- pages ---------------------------------------------------------------------------------

    def want(self, ready_bytes: int) -> None:
        """Have the arena's first `ready_bytes` mapped in the background, so that copies meet no faults."""
        if ready_bytes <= self._wanted_bytes:
            return
        with self._wake:
            self._wanted_bytes = max(ready_bytes, self._wanted_bytes)
            if self._populator is None and not self._closed:
                self._populator = threading.Thread(target=self._populate, name="hicache-pages", daemon=True)
                self._populator.start()
            self._wake.notify()

    def _populate(self) -> None:
        done = {mapping.Populate.READ: self._table_bytes, mapping.Populate.WRITE: self._table_bytes}
        while (work := self._next_pages(done)) is not None:
            what, memory, start, size = work
            if not mapping.populate(memory, start, size, what):
                return
            done[what] += size

    def _next_pages(
        self, done: Mapping[mapping.Populate, int]
    ) -> tuple[mapping.Populate, memoryview, int, int] | None:
        """Wait for pages to map; return what for, in which mapping, where, how much; None at the end."""
        with self._wake:
            while not self._closed:
                for what, memory, skipped in (
                    (mapping.Populate.WRITE, self._writable, self._table_bytes),
                    (mapping.Populate.READ, self._memory, 0),
                ):
                    left = self._wanted_bytes - done[what]
                    if memory is not None and left > 0:
                        return what, memory, done[what] - skipped, min(mapping.STEP_BYTES, left)
                self._wake.wait()
        return None

    def close(self) -> None:
        """Tell the daemon that this client is done; views that are held stay valid memory. Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
            local.close(self._connection)
            os.close(self._fd)


def attach(offer: pb.Arena, session: int, *, timeout_s: float) -> SharedArena:
    """Attach to a daemon's arena. Raises CannotAttach."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(b"\0" + offer.socket.encode())
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            raise CannotAttach(f"it is another user's, {uid}")
        connection.sendall(_SESSION.pack(session))
        answer, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if answer != b"\1" or len(fds) != 1:
            raise CannotAttach("the daemon gave nothing")
    except OSError as error:
        connection.close()
        raise CannotAttach(str(error)) from error
    except BaseException:
        connection.close()
        raise
    os.set_inheritable(fds[0], False)
    return SharedArena(offer, connection, fds[0])


def checksum(buffer: memoryview) -> int:
    """Return what a commit says of the bytes that it makes visible."""
    return xxhash.xxh3_64_intdigest(buffer)


def _copy_large(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> int:
    """Copy piece by piece and return the checksum of the copy."""
    digest = xxhash.xxh3_64()
    for start in range(0, source.size, _CHUNK):
        piece = target[start : start + _CHUNK]
        np.copyto(piece, source[start : start + _CHUNK])
        digest.update(piece.data)
    return digest.intdigest()
