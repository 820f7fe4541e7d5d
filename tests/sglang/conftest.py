"""SGLang's storage interface from its wheel, and backends that share one store as replicas do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing import sglang_wheel
from hicache.testing.sglang_pools import FakeConfig, FakePool, Replicas

if TYPE_CHECKING:
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

_MISSING = sglang_wheel.available()
if not _MISSING:
    sglang_wheel.install()


@pytest.fixture(autouse=True)
def _wheel() -> None:
    """Skip where the wheel could not be fetched."""
    if _MISSING:
        pytest.skip(_MISSING)


class Unclosed:
    """One store behind several backends: their close() leaves it open."""

    def __init__(self, store: StorageBackend) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Stays open for the others."""


@pytest.fixture
def store() -> MemoryBackend:
    """The store that all replicas of a test share."""
    return MemoryBackend(capacity_bytes=64 << 20)


@pytest.fixture
def replica(store: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    """Return a function that makes a backend with its pools registered, in the order SGLang does it."""
    from hicache.integrations.sglang import storage

    made: list[HiCacheStorageBackend] = []

    def make(
        pools: Mapping[str, FakePool],
        config: FakeConfig | None = None,
        *,
        backend: StorageBackend | None = None,
        **extra: object,
    ) -> HiCacheStorageBackend:
        opened = Unclosed(backend or store)
        monkeypatch.setattr(storage, "create_backend", lambda name, options: opened)
        config = config or FakeConfig()
        config.extra_config = {"backend": "memory", "weight_version": "1", **extra}
        made.append(storage.HiCacheStorageBackend(config, {}))
        made[-1].register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            made[-1].register_mem_host_pool_v2(pool, name)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield make
    for one in made:
        one.close()
