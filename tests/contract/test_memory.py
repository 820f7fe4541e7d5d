"""The memory backend keeps the contract."""

from __future__ import annotations

from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.backend_suite import BackendSuite, CapacitySuite


class TestMemory(BackendSuite, CapacitySuite):
    def make_backend(self) -> StorageBackend:
        return MemoryBackend(capacity_bytes=64 << 20)

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        return MemoryBackend(capacity_bytes=capacity_bytes, lease_s=0.0)
