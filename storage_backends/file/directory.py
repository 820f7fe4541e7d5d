"""The directory: names, staging, publishing, listing. The only code of this backend that touches files.

    DIR/objects/3f/<quoted key>.hco    visible objects, fanned out by a checksum of the key
    DIR/staging/<id>/owner             locked while the process that owns the folder lives
    DIR/staging/<id>/<n>               being written; renamed into objects/

Nothing else under DIR is read or removed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import stat
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4

from hicache.errors import ConfigError
from hicache.storage_backends.base import MISS
from hicache.storage_backends.file.options import Fsync

logger = logging.getLogger(__name__)

FANOUT = 256
_SUFFIX = ".hco"
_PLAIN = re.compile(r"[A-Za-z0-9._~=/-]*")  # what quoting leaves as it is, but for '/'
_YOUNG_S = 60.0  # a staging folder may be without its lock for this long after it was made


class Listed(NamedTuple):
    """One object found by listing."""

    key: str
    size: int
    mtime_ns: int


class Directory:
    """One process's view of the shared directory. Thread-safe. Methods raise OSError unless they say not."""

    def __init__(self, root: Path, *, fsync: Fsync) -> None:
        """Create what is missing, remove what dead processes left half written. Raises ConfigError."""
        self.root = root
        self._fsync = fsync
        self._objects = os.path.join(root, "objects")
        self._staging = os.path.join(root, "staging")
        self._counter = itertools.count()
        self._renewing = threading.Lock()  # guards _own and _owner_fd once open
        try:
            for path in (self._objects, self._staging):
                os.makedirs(path, exist_ok=True)
            self._remove_orphans()
            self._own, self._owner_fd = self._claim_staging()
        except OSError as error:
            raise ConfigError(
                f"file: cannot use the directory {root} ({error.strerror or error}); set file_storage_path "
                f"to a directory that this user may write"
            ) from error

    # -- names ---------------------------------------------------------------------------------

    def path(self, key: str) -> str:
        """Return where the object of a key lies; injective, whatever the key holds."""
        name = key.replace("/", "%2F") if _PLAIN.fullmatch(key) else quote(key, safe="=")
        return f"{self._objects}/{zlib.crc32(key.encode()) % FANOUT:02x}/{name}{_SUFFIX}"

    # -- objects -------------------------------------------------------------------------------

    def size(self, key: str) -> int:
        """Return an object's size, or MISS. A file without bytes is no object."""
        try:
            found = os.stat(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return MISS
        return found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else MISS

    def read(self, key: str, buffer: memoryview) -> int:
        """Read an object if it fits; return its size, or MISS if it is absent or ends early."""
        try:
            # O_NONBLOCK: opening a pipe that somebody put there must not block.
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return MISS
        try:
            found = os.fstat(fd)
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", self.path(key))
            if not size or size > len(buffer):
                return size or MISS
            done = 0
            while done < size:
                count = os.readv(fd, [buffer[done:size]])
                if not count:
                    return MISS
                done += count
            return size
        finally:
            os.close(fd)

    def write(self, key: str, data: memoryview) -> None:
        """Store an object: staged, then renamed over whatever is there. Leaves nothing if it fails."""
        own = self._own
        try:
            self._write_staged(own, key, data)
        except FileNotFoundError:
            self._renew_staging(own)
            self._write_staged(self._own, key, data)

    def _write_staged(self, folder: str, key: str, data: memoryview) -> None:
        staged = f"{folder}/{next(self._counter)}"
        try:
            fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(fd, data)
                if self._fsync is not Fsync.NEVER:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            self._publish(staged, self.path(key))
        except OSError:
            with suppress(OSError):
                os.unlink(staged)
            raise

    def _publish(self, staged: str, target: str) -> None:
        try:
            os.rename(staged, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(staged, target)
        if self._fsync is Fsync.FULL:
            fd = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def remove(self, key: str) -> bool:
        """Remove an object; return whether it was there. Readers that have it open keep it."""
        try:
            os.unlink(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    # -- listing -------------------------------------------------------------------------------

    def keys(self, part: int) -> list[str]:
        """Return the keys of the visible objects of one of FANOUT parts, in no order."""
        return [unquote(entry.name[: -len(_SUFFIX)]) for entry in self._scan(part)]

    def listing(self, part: int) -> list[Listed]:
        """Return the objects of one of FANOUT parts; files that vanish meanwhile are left out."""
        listed = []
        for entry in self._scan(part):
            with suppress(OSError):
                found = entry.stat()
                listed.append(Listed(unquote(entry.name[: -len(_SUFFIX)]), found.st_size, found.st_mtime_ns))
        return listed

    def _scan(self, part: int) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(f"{self._objects}/{part:02x}") as entries:
                return [e for e in entries if e.name.endswith(_SUFFIX) and e.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def free_bytes(self) -> int:
        """Return what this user may still write on the filesystem."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    # -- staging -------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove this process's staging folder and let go of its lock. Never raises."""
        shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._owner_fd)

    def _renew_staging(self, lost: str) -> None:
        """Claim a new folder if somebody removed the directory under this process."""
        with self._renewing:
            if self._own != lost:
                return
            os.close(self._owner_fd)
            self._own, self._owner_fd = self._claim_staging()

    def _claim_staging(self) -> tuple[str, int]:
        """Make a folder whose `owner` file stays locked for as long as this process lives."""
        while True:
            own = os.path.join(self._staging, uuid4().hex)
            os.makedirs(own)
            fd = os.open(f"{own}/owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)  # a sweeper has it
                continue
            except OSError as error:
                logger.warning("file: %s has no file locks (%s); half-written files may stay", own, error)
            if os.path.exists(f"{own}/owner"):
                return own, fd
            os.close(fd)  # a sweeper had it

    def _remove_orphans(self) -> None:
        with os.scandir(self._staging) as folders:
            for folder in folders:
                with suppress(FileNotFoundError):
                    _remove_if_orphan(folder)


def _remove_if_orphan(folder: os.DirEntry[str]) -> None:
    """Remove a staging folder if nobody holds its lock; in doubt, somebody does."""
    try:
        fd = os.open(f"{folder.path}/owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime > _YOUNG_S:
            shutil.rmtree(folder.path, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder.path, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte, however many calls it takes."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
