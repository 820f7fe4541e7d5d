"""The store behind the daemon, where threads and order matter."""

from __future__ import annotations

from hicache.daemon.events import Change, ChangeKind, EventHub
from hicache.daemon.store import _InOrder, _spans
from hicache.storage_backends import memory


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
