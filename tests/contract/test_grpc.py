"""The daemon, seen through its client over loopback, keeps the contract of a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.daemon.arena_store import ArenaStore
from hicache.daemon.server import Daemon
from hicache.registry import create_backend
from hicache.storage_backends.base import StorageBackend
from hicache.testing.backend_suite import BackendSuite, CapacitySuite
from hicache.testing.daemon import connect, running_daemon
from hicache.testing.session_suite import SessionSuite


class _OverLoopback(BackendSuite):
    """Clients of one model: they name a fingerprint, with which the suite's keys do not begin."""

    fingerprint = "f0"
    data_planes = "inline"

    @pytest.fixture(autouse=True)
    def _daemons(self) -> Iterator[None]:
        self.daemons: list[Daemon] = []
        with contextlib.ExitStack() as self.stack:
            yield

    def start(self, **settings: object) -> StorageBackend:
        self.daemons.append(self.stack.enter_context(running_daemon(**settings)))
        return self.client()

    def client(self) -> StorageBackend:
        backend = connect(
            self.daemons[-1].address, fingerprint=self.fingerprint, data_planes=self.data_planes
        )
        assert backend.stats().details["data_plane"] == self.data_planes.partition(",")[0]
        return backend

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        return self.client()


class TestGrpc(_OverLoopback, CapacitySuite, SessionSuite):
    def make_backend(self) -> StorageBackend:
        return self.start()

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        return self.start(capacity=capacity_bytes, reservation_bytes=capacity_bytes, lease_seconds=0.0)


class TestGrpcOverSharedMemory(TestGrpc):
    """Bytes go through the daemon's arena; the peer is attached to it too."""

    data_planes = "shm,inline"

    @pytest.fixture(autouse=True)
    def _sound(self, _daemons: None) -> Iterator[None]:
        yield
        for daemon in self.daemons:
            store = daemon._store.backend
            assert isinstance(store, ArenaStore)
            store.check_integrity()


class TestGrpcInlineBesideSharedMemory(_OverLoopback):
    """What one replica writes through shared memory, another reads inline, and the reverse."""

    data_planes = "shm,inline"

    def make_backend(self) -> StorageBackend:
        return self.start()

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        self.data_planes = "inline"
        return self.client()


class TestGrpcWithSmallMessages(_OverLoopback):
    """Objects and batches are cut into many messages, and keys have no prefix of their own."""

    fingerprint = ""

    def make_backend(self) -> StorageBackend:
        return self.start(max_message="4KiB")


class TestGrpcOverFiles(_OverLoopback, SessionSuite):
    """The daemon serves a store that it can neither look into nor be told about."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_backend(self) -> StorageBackend:
        return self.start(backend=create_backend("file", {"file_storage_path": str(self.folder)}))

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        limits = {"max_size": capacity_bytes, "eviction_ratio": 1.0, "lease_s": 0.0}
        return self.start(backend=create_backend("file", {"file_storage_path": str(self.folder), **limits}))
