"""Objects in this process's memory: the reference backend, and the daemon's embedded store.

Each object lies in memory of its own on the heap; leaves what is kept to `object_store`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from hicache.errors import ConfigError
from hicache.storage_backends.base import MISS, check_lengths
from hicache.storage_backends.object_store import Change, ObjectStore, Observer, StoreEvent, Turn

__all__ = ["Change", "MemoryBackend", "Observer", "Options", "StoreEvent"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `memory` can be told."""

    capacity_bytes: int = 1 << 30
    lease_s: float = 10.0  # how long a probed or read object is safe from eviction
    max_leased_fraction: float = 0.5  # of the capacity; beyond it the oldest leases end early
    reservation_ttl_s: float = 60.0  # a write neither committed nor aborted for so long ends

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1:
            raise ConfigError(f"memory: capacity_bytes={self.capacity_bytes} must be positive")
        if self.lease_s < 0 or self.reservation_ttl_s <= 0 or not 0 <= self.max_leased_fraction <= 1:
            raise ConfigError(
                f"memory: lease_s={self.lease_s} must not be negative, "
                f"reservation_ttl_s={self.reservation_ttl_s} must be positive, "
                f"max_leased_fraction={self.max_leased_fraction} must lie in [0, 1]"
            )


class MemoryBackend(ObjectStore[bytearray]):
    """See ObjectStore. A reader that holds an object's bytearray keeps it alive past a delete, so memory
    can exceed the limit by what is being read.
    """

    name: ClassVar[str] = "memory"

    @classmethod
    def from_options(cls, options: Options) -> MemoryBackend:
        return cls(
            capacity_bytes=options.capacity_bytes,
            lease_s=options.lease_s,
            max_leased_fraction=options.max_leased_fraction,
            reservation_ttl_s=options.reservation_ttl_s,
        )

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        check_lengths(keys, buffers)
        with self._lock:
            found = self._lease_data(keys)
        sizes = []
        for data, buffer in zip(found, buffers, strict=True):
            if data is None:
                sizes.append(MISS)
                continue
            size = len(data)
            if size <= len(buffer):
                buffer[:size] = data
            sizes.append(size)
        return sizes

    def views(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Return read-only views of objects, None where absent, with a lease like read().

        A view stays valid for as long as it is held, whatever becomes of the object.
        """
        with self._lock:
            found = self._lease_data(keys)
        return [None if data is None else memoryview(data).toreadonly() for data in found]

    @contextlib.contextmanager
    def holding(self, keys: Sequence[str]) -> Iterator[list[memoryview | None]]:
        """Yield views() of objects, valid until the block ends."""
        yield self.views(keys)

    def _allocate(self, size: int) -> bytearray:
        return bytearray(size)

    def _view(self, data: bytearray) -> memoryview:
        return memoryview(data)

    def _let_go(self, turn: Turn[bytearray], data: bytearray) -> None:
        turn.dropped.append(data)
