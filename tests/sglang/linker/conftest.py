"""Linkers that share one store, as the ranks of several replicas do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.sglang_device import Rank, Shared, make_rank


@pytest.fixture
def store() -> Shared:
    return Shared(MemoryBackend(capacity_bytes=64 << 20))


@pytest.fixture
def rank(store: Shared) -> Iterator[Callable[..., Rank]]:
    """Return a function that makes a rank on the shared store."""
    made: list[Rank] = []

    def make(group: PoolGroup, *, backend: Any = None, **more: Any) -> Rank:
        made.append(make_rank(group, backend or store, **more))
        return made[-1]

    yield make
    store.gate.set()
    for one in made:
        one.core.close()
