"""Hints about sessions to storage: they name the real objects, wait behind stores, and trouble nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hicache.errors import BackendUnavailable
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, scripted
from hicache.testing.pools import FULL
from hicache.testing.transfers import TransferWorld, faulty_memory, until
from hicache.transfer.base import ObjectRef

REFS = [ObjectRef(FULL, bytes([i]) * 32) for i in range(4)]


class Holding(FaultyBackend):
    """A store that takes hints and notes them; `dead` makes them fail."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.told: list[tuple[str, tuple[str, ...] | None]] = []
        self.dead = False

    def pin(self, session: str, keys: Sequence[str], ttl_s: float) -> None:
        self._tell(session, tuple(keys))

    def close_session(self, session: str) -> None:
        self._tell(session, None)

    def _tell(self, session: str, keys: tuple[str, ...] | None) -> None:
        if self.dead:
            raise BackendUnavailable("gone")
        self.told.append((session, keys))


def test_a_hint_names_the_objects_as_they_are_stored_and_comes_behind_their_stores() -> None:
    """Pins of other names keep nothing; pins that overtake would depend on luck."""
    store = Holding(MemoryBackend(capacity_bytes=1 << 20))
    gate = threading.Event()
    store.script = scripted(begin_write=[Fault(gate=gate)])
    with TransferWorld(store) as world:
        world.executor.start_store(world.job(), REFS, [0, 1, 2, 3])
        world.executor.pin("s", REFS, 60.0)
        world.executor.close_session("s")
        assert store.told == []
        gate.set()
        world.end()
        until(lambda: len(store.told) == 2)
    (session, keys), (other, closed) = store.told
    assert (session, other, closed) == ("s", "s", None)
    assert keys is not None
    assert store.inner.probe(keys) == b"\1" * 4


def test_hints_that_fail_are_counted_and_end_nothing() -> None:
    """A store that cannot take a hint would take the serving thread with it."""
    store = Holding(MemoryBackend(capacity_bytes=1 << 20))
    with TransferWorld(store) as world:
        store.dead = True
        world.executor.pin("s", REFS, 60.0)
        until(lambda: world.executor.counters().get("storage_errors") == 1)
        store.dead = False
        assert world.store(REFS, [0, 1, 2, 3]).flags == b"\1" * 4


def test_hints_behind_a_call_that_stands_still_are_bounded() -> None:
    """Each finished request would leave one more behind, until the memory is gone."""
    store = Holding(MemoryBackend(capacity_bytes=1 << 20))
    gate = threading.Event()
    store.script = scripted(begin_write=[Fault(gate=gate)])
    with TransferWorld(store) as world:
        world.executor.start_store(world.job(), REFS, [0, 1, 2, 3])
        for _ in range(1000):
            world.executor.close_session("s")
        gate.set()
        world.end()
        until(lambda: len(store.told) == 256)
        world.executor.close_session("last")
        until(lambda: store.told[-1] == ("last", None))


def test_a_store_without_sessions_gets_no_hints() -> None:
    """A backend that knows nothing of them must work as before."""
    with TransferWorld(faulty_memory()) as world:
        world.executor.pin("s", REFS, 60.0)
        world.executor.close_session("s")
        assert world.store(REFS, [0, 1, 2, 3]).flags == b"\1" * 4
