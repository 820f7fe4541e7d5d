"""Objects as files of one directory, which several processes and hosts may share."""

from hicache.storage_backends.file.backend import FileBackend
from hicache.storage_backends.file.options import Fsync, Options

__all__ = ["FileBackend", "Fsync", "Options"]
