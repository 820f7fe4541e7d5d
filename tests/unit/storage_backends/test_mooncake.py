"""What each code of Mooncake's means, with a store that answers as scripted."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import cast

import pytest

import hicache.storage_backends.mooncake as module
from hicache.config.mooncake import resolve
from hicache.errors import BackendTimeout, BackendUnavailable
from hicache.storage_backends.arena import Arena
from hicache.storage_backends.base import MISS, WriteOutcome
from hicache.storage_backends.mooncake import MooncakeBackend, Options
from hicache.storage_backends.mooncake_connection import Connection, MooncakeLink, address_of
from hicache.testing.backend_suite import reserve

HALF = 1 << 20


class ScriptedStore:
    """Answers every call with the codes it was given, in order of the keys; notes what was asked."""

    def __init__(self) -> None:
        self.exist: list[int] = []
        self.get: list[int] = []
        self.put: list[int] = []
        self.sizes: dict[str, int] = {}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.exist.pop(0) for _ in keys]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self.get.pop(0) for _ in keys]

    def get_size(self, key: str) -> int:
        return self.sizes[key]

    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object
    ) -> list[int]:
        return [self.put.pop(0) for _ in keys]


class SteadyLink:
    """A link that is up, and notes when it was suspected."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.suspicions: list[str] = []

    def connection(self) -> Connection:
        return self._connection

    def suspect(self, reason: str) -> None:
        self.suspicions.append(reason)

    def close(self, timeout_s: float, *, idle: bool) -> None:
        assert idle


class Config:
    replica_num = 1


class Library:
    ReplicateConfig = Config


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def link(store: ScriptedStore) -> SteadyLink:
    memory = memoryview(mmap.mmap(-1, 2 * HALF))
    return SteadyLink(Connection(store, memory, address_of(memory), Arena(0, HALF), Arena(HALF, HALF)))


@pytest.fixture
def backend(link: SteadyLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeBackend]:
    monkeypatch.setattr(module, "load_library", Library)
    options = Options(master_server_address="m:1", staging_bytes=2 * HALF, timeout_s=30)
    backend = MooncakeBackend(options, resolve(options.explicit(), {}), cast(MooncakeLink, link))
    yield backend
    backend.close()


def test_an_error_in_place_of_an_answer_is_not_a_yes(backend: MooncakeBackend, store: ScriptedStore) -> None:
    """Errors are negative and so count as true: pages that are not there would be prefetched."""
    store.exist = [1, -1, 0, -900]
    assert backend.probe(list("abcd")) == b"\x01\x00\x00\x00"


@pytest.mark.parametrize("code", [-703, -704, -706, -707, -800, -900, -1])
def test_a_read_that_failed_is_a_miss_and_writes_nothing(
    backend: MooncakeBackend, store: ScriptedStore, code: int
) -> None:
    """What was left in the staging memory would be served as KV."""
    store.get = [4, code]
    buffers = [bytearray(b"...."), bytearray(b"....")]
    assert backend.read(["a", "b"], [memoryview(b) for b in buffers]) == [4, MISS]
    assert buffers[1] == b"...."


def test_an_object_larger_than_its_buffer_is_told_by_its_size(
    backend: MooncakeBackend, store: ScriptedStore
) -> None:
    """Mooncake only says that a parameter was bad."""
    store.get = [-600, -600, -600]
    store.sizes = {"hicache/a": 5000, "hicache/b": -704, "hicache/c": 3}
    buffers = [memoryview(bytearray(4)) for _ in range(3)]
    assert backend.read(["a", "b", "c"], buffers) == [5000, MISS, MISS]


def test_each_put_has_its_own_outcome(
    backend: MooncakeBackend, store: ScriptedStore, link: SteadyLink
) -> None:
    """Objects that were refused would count as stored, or stored ones be sent again for ever."""
    store.exist = [0] * 6
    held = [reserve(backend, key, 10) for key in "abcdef"]
    store.put = [0, 0, -200, -705, -900, -800]
    store.exist = [1, 0]  # what looking up the two good puts says
    assert backend.commit(held) == [
        WriteOutcome.STORED,
        WriteOutcome.BUSY,
        WriteOutcome.NO_SPACE,
        WriteOutcome.EXISTS,
        WriteOutcome.FAILED,
        WriteOutcome.FAILED,
    ]
    assert link.connection().writes.taken_bytes == 0
    assert not link.suspicions


@pytest.mark.parametrize(
    ("codes", "error"),
    [([-900, -900], BackendUnavailable), ([-901, -901], BackendTimeout), ([-900, -901], BackendUnavailable)],
)
def test_a_master_that_answers_nothing_is_an_outage_and_suspected(
    backend: MooncakeBackend, store: ScriptedStore, link: SteadyLink, codes: list[int], error: type[Exception]
) -> None:
    """An outage would look like misses, and every further call wait for it again."""
    store.get = codes
    with pytest.raises(error):
        backend.read(["a", "b"], [memoryview(bytearray(4))] * 2)
    assert len(link.suspicions) == 1
    assert link.connection().reads.taken_bytes == 0


def test_a_write_of_the_same_key_in_this_process_is_told_before_it_costs_memory(
    backend: MooncakeBackend, store: ScriptedStore, link: SteadyLink
) -> None:
    """Two requests with one prefix would both hold registered memory."""
    store.exist = [0] * 2
    held = reserve(backend, "a", 10)
    taken = link.connection().writes.taken_bytes
    assert backend.begin_write(["a"], [HALF]) == [WriteOutcome.EXISTS]
    assert link.connection().writes.taken_bytes == taken
    backend.abort([held])
    assert link.connection().writes.taken_bytes == 0
