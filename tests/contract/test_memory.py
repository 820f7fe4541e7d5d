"""The memory backend keeps the contract."""

from __future__ import annotations

from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.backend_suite import BackendSuite, CapacitySuite
from hicache.testing.session_suite import SessionSuite


class TestMemory(BackendSuite, CapacitySuite, SessionSuite):
    def make_backend(self) -> StorageBackend:
        return MemoryBackend(capacity_bytes=64 << 20)

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        return MemoryBackend(capacity_bytes=capacity_bytes, lease_s=0.0)
