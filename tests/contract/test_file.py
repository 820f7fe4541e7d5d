"""The file backend keeps the contract, with and without a limit, and between two clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.file import FileBackend, Options
from hicache.testing.backend_suite import BackendSuite, CapacitySuite
from hicache.testing.session_suite import SessionSuite


class TestFile(BackendSuite, CapacitySuite, SessionSuite):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = str(tmp_path)

    def make_backend(self) -> StorageBackend:
        return FileBackend.from_options(Options(file_storage_path=self.directory))

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        return self.make_backend()

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        options = Options(
            file_storage_path=self.directory, max_size=capacity_bytes, eviction_ratio=1.0, lease_s=0.0
        )
        return FileBackend.from_options(options)


class TestFileWithALimit(BackendSuite):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.options = Options(file_storage_path=str(tmp_path), max_size="64MiB")

    def make_backend(self) -> StorageBackend:
        return FileBackend.from_options(self.options)

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        return self.make_backend()
