"""The daemon, seen through its client over loopback, keeps the contract of a backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.config.serve import ServeConfig
from hicache.config.sizes import ByteSize
from hicache.daemon.server import Daemon
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.backend_suite import BackendSuite, CapacitySuite


class TestGrpc(BackendSuite, CapacitySuite):
    """Clients of one model: they name a fingerprint, which the suite's keys do not begin with."""

    @pytest.fixture(autouse=True)
    def _daemons(self) -> Iterator[None]:
        self.daemons: list[Daemon] = []
        yield
        for daemon in self.daemons:
            daemon.drain()

    def start(self, **settings: object) -> Daemon:
        daemon = Daemon(ServeConfig(port=0, metrics_port=-1, **settings))
        daemon.start()
        self.daemons.append(daemon)
        return daemon

    def client(self, daemon: Daemon) -> StorageBackend:
        return GrpcBackend.from_options(Options(address=daemon.address, fingerprint="f0"))

    def make_backend(self) -> StorageBackend:
        return self.client(self.start(capacity=ByteSize(64 << 20)))

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        return self.client(self.daemons[-1])

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        capacity = ByteSize(capacity_bytes)
        return self.client(self.start(capacity=capacity, reservation_bytes=capacity, lease_seconds=0.0))
