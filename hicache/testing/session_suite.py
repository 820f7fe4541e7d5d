"""What a storage backend that takes hints of sessions does with them, as tests beside BackendSuite.

class TestMine(BackendSuite, SessionSuite):
    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        return MyBackend(...)
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hicache.storage_backends.base import HoldsSessions, StorageBackend
from hicache.testing.backend_suite import pattern, write

_SIZE = 1000
_LONG_S = 600.0
_DEADLINE_S = 20.0


class SessionSuite:
    """For backends with a byte limit that drop last what open conversations will ask for."""

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        """Return an open backend that holds `capacity_bytes` and protects nothing by leases."""
        raise NotImplementedError

    @pytest.fixture
    def full(self) -> Iterator[StorageBackend]:
        """A backend with room for ten objects of these tests."""
        backend = self.make_small_backend(10 * _SIZE)
        yield backend
        backend.close()

    def test_what_a_session_pins_is_dropped_last_until_it_is_closed(self, full: StorageBackend) -> None:
        """A busy neighbour would throw out the conversation that comes back in a minute, or it would stay."""
        put(full, "a", "b", "c")
        hints(full).pin("s", ["a", "b", "later"], _LONG_S)
        flood(full, "x")
        put(full, "later")
        flood(full, "y")
        assert there(full, "a", "b", "c", "later") == [1, 1, 0, 1]
        for _ in range(2):
            hints(full).close_session("s")
        flood(full, "z")
        assert there(full, "a", "b", "later") == [0, 0, 0]

    def test_a_store_full_of_pinned_objects_takes_new_ones(self, full: StorageBackend) -> None:
        """Sessions that nobody closes would end the store's use for everybody."""
        keys = [f"k{i}" for i in range(30)]
        hints(full).pin("s", keys, _LONG_S)
        put(full, *keys)
        assert there(full, *keys) == [0] * 20 + [1] * 10

    def test_what_two_sessions_pin_stays_for_the_one_that_is_open(self, full: StorageBackend) -> None:
        """One goodbye would cost another user the common prompt."""
        put(full, "shared", "mine")
        hints(full).pin("one", ["shared", "mine"], _LONG_S)
        hints(full).pin("two", ["shared"], _LONG_S)
        hints(full).close_session("one")
        flood(full, "x")
        assert there(full, "shared", "mine") == [1, 0]

    def test_a_session_that_is_not_heard_of_lets_go(self, full: StorageBackend) -> None:
        """A client that died would keep a piece of the store for good."""
        put(full, "a", "b")
        hints(full).pin("gone", ["a"], 0.01)
        hints(full).pin("here", ["b"], _LONG_S)
        until = time.monotonic() + _DEADLINE_S
        while there(full, "a") == [1] and time.monotonic() < until:
            flood(full, "x")
        assert there(full, "a", "b") == [0, 1]

    def test_a_pinned_object_can_be_deleted_and_cleared(self, full: StorageBackend) -> None:
        """The store's sums would drift, or it would refuse what it has room for."""
        put(full, "a", "b", "c")
        hints(full).pin("s", ["a", "b", "c"], _LONG_S)
        flood(full, "x")
        assert full.delete(["a"]) == 1
        assert full.clear("b") == 1
        flood(full, "y")
        assert there(full, "a", "b", "c") == [0, 0, 1]
        assert full.stats().used_bytes == 10 * _SIZE


def hints(backend: StorageBackend) -> HoldsSessions:
    """Return the backend as one that takes hints."""
    assert isinstance(backend, HoldsSessions)
    return backend


def put(backend: StorageBackend, *keys: str) -> None:
    """Write small objects one after the other."""
    for key in keys:
        write(backend, {key: pattern(_SIZE)})


def flood(backend: StorageBackend, mark: str) -> None:
    """Write three times what the store holds, of no session; their names are the mark's."""
    backend.clear(mark)
    put(backend, *(f"{mark}{i}" for i in range(30)))


def there(backend: StorageBackend, *keys: str) -> list[int]:
    """Return 1 for what the store has, 0 for what it has not."""
    return list(backend.probe(keys))
