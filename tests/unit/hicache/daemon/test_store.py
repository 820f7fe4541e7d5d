"""The store behind the daemon, where threads and order matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.daemon.events import Change, ChangeKind, EventHub
from hicache.daemon.store import SharedStore, _InOrder, _spans
from hicache.errors import BackendTimeout
from hicache.storage_backends import memory
from hicache.storage_backends.file import FileBackend, Options


def test_events_that_threads_hand_in_late_are_told_in_order() -> None:
    """A router would believe an evicted object present because its removal was told before its storing."""
    hub = EventHub(max_watchers=1, queue_limit=9)
    watcher = hub.subscribe([""])
    pass_on = _InOrder(hub)
    pass_on([memory.StoreEvent(2, memory.Change.EVICTED, "a", 5)])
    pass_on(
        [
            memory.StoreEvent(3, memory.Change.EXPIRED, "b", 5),
            memory.StoreEvent(5, memory.Change.DELETED, "c", 1),
        ]
    )
    pass_on([memory.StoreEvent(1, memory.Change.STORED, "a", 5)])
    assert next(watcher.batches(9)) == [Change(ChangeKind.STORED, "a", 5), Change(ChangeKind.EVICTED, "a", 5)]
    pass_on([memory.StoreEvent(4, memory.Change.STORED, "c", 1)])
    assert next(watcher.batches(9)) == [Change(ChangeKind.STORED, "c", 1), Change(ChangeKind.DELETED, "c", 1)]


def test_scratch_memory_is_bounded_and_every_object_is_read_once() -> None:
    """A request for many large objects would take all memory of the daemon."""
    mib = 1 << 20
    limits = [3 * mib, 3 * mib, 3 * mib, 20 * mib, 1, 8 * mib, 0]
    spans = list(_spans(limits))
    assert spans == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 7)]
    assert list(_spans([])) == []


class _LateReader(FileBackend):
    """A store whose reads time out, and go on."""

    settles_on_timeout = False

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        raise BackendTimeout("late")


def test_memory_that_a_late_read_may_still_write_to_is_not_freed(tmp_path: Path) -> None:
    """A store's native thread would write into memory that has become something else's."""
    backend = _LateReader.from_options(Options(file_storage_path=str(tmp_path)))
    hub = EventHub(max_watchers=1, queue_limit=9)
    store = SharedStore(backend, hub, lease_seconds=1.0, reports=False)
    for _ in range(2):
        with pytest.raises(BackendTimeout):
            next(iter(store.read(["a", "b"], [5, 7])))
    assert [[len(buffer) for buffer in held] for held in store._unsettled] == [[5, 7]] * 2
    backend.close()
