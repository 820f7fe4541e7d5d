"""The memory behind the arena: an anonymous file that clients map, given memory step by step.

The file has its full length from the start and can neither shrink nor grow, so no client can take
pages away under others; `posix_fallocate` gives a part its pages before anything lies there, so a
host without memory is an error here and not a SIGBUS in whoever writes. The kernel frees all of it with
the last process that has it: a daemon that is killed leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

from hicache.rpc import mapping

SLOT_BYTES = 8
_PAGE = mmap.PAGESIZE


class Segment:
    """One anonymous shared file and this process's mapping of it. grow() and close() by one thread at a time.

    [0, table_bytes) is the table of generations, [table_bytes, size_bytes) the data, of which
    [table_bytes, ready_bytes) has memory.
    """

    def __init__(self, data_bytes: int, *, slots: int) -> None:
        """Raises OSError where the system has no such files or no memory for the table."""
        if sys.byteorder != "little":
            raise OSError("the table of generations is little-endian")
        self.table_bytes = _pages(slots * SLOT_BYTES)
        self.size_bytes = self.table_bytes + _pages(data_bytes)
        self.ready_bytes = self.table_bytes
        self.fd = os.memfd_create("hicache-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.size_bytes)
            os.posix_fallocate(self.fd, 0, self.table_bytes)
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = memoryview(self._map)
        # An aligned 8-byte store is whole to every reader.
        self.generations = self.memory[: slots * SLOT_BYTES].cast("Q")

    def grow(self, size: int) -> int:
        """Give memory to at most `size` more bytes; return how many got it, a multiple of the page size.

        Zeroes them, at about 1 GB/s. Raises OSError, with nothing changed, if there is no memory.
        """
        size = min(_pages(size), self.size_bytes - self.ready_bytes)
        if size:
            os.posix_fallocate(self.fd, self.ready_bytes, size)
            mapping.populate(self.memory, self.ready_bytes, size, mapping.Populate.WRITE)
            self.ready_bytes += size
        return size

    def close(self) -> None:
        """Close the file; the memory goes when the last view of it does."""
        os.close(self.fd)
        self.fd = -1


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
