"""Watchers get what they asked for, in order, and know when something is missing."""

from __future__ import annotations

import threading

import pytest

from hicache.daemon.events import Change, ChangeKind, EventHub, Lost, TooManyWatchers


def stored(*names: str) -> list[Change]:
    return [Change(ChangeKind.STORED, name, 1) for name in names]


def test_a_slow_watcher_is_told_how_much_it_lost_where_it_lost_it() -> None:
    """A router would believe its picture of the store complete, or a slow one would stall every writer."""
    hub = EventHub(max_watchers=1, queue_limit=3)
    watcher = hub.subscribe([""])
    for name in "abcde":
        hub.publish(stored(name))
    batches = watcher.batches(2)
    assert next(batches) == stored("a", "b")
    hub.publish(stored("f"))  # there is room again, but the gap has not been told yet
    assert next(batches) == stored("c")
    assert next(batches) == Lost(3)
    hub.publish(stored("g"))
    assert next(batches) == stored("g")
    assert hub.lost == 3


def test_one_slow_watcher_costs_the_others_nothing() -> None:
    """A router that hangs would blind all routers."""
    hub = EventHub(max_watchers=2, queue_limit=2)
    slow, quick = hub.subscribe([""]), hub.subscribe([""])
    seen = []
    batches = quick.batches(10)
    for name in "abcd":
        hub.publish(stored(name))
        seen += next(batches)
    assert seen == stored(*"abcd")
    assert next(slow.batches(10)) == stored("a", "b")


def test_a_clear_reaches_watchers_above_and_below_its_prefix() -> None:
    """A router that watches a/b would go on believing in what a clear of a/ removed."""
    hub = EventHub(max_watchers=9, queue_limit=9)
    watchers = {prefix: hub.subscribe([prefix]) for prefix in ("", "a/", "a/b", "c")}
    hub.publish([Change(ChangeKind.CLEARED, "a/")])
    hub.close()
    told = {prefix for prefix, watcher in watchers.items() if list(watcher.batches(9))}
    assert told == {"", "a/", "a/b"}


def test_closing_delivers_what_is_queued_and_wakes_who_waits() -> None:
    """A drain would hang on a watcher, or swallow the last changes."""
    hub = EventHub(max_watchers=2, queue_limit=9)
    full, waiting = hub.subscribe([""]), hub.subscribe(["x"])
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (list(waiting.batches(9)), ended.set()))
    thread.start()
    hub.publish(stored("a"))
    hub.close()
    assert list(full.batches(9)) == [stored("a")]
    assert ended.wait(60)
    thread.join()
    with pytest.raises(TooManyWatchers):
        hub.subscribe([""])


def test_places_of_watchers_that_left_are_free_again() -> None:
    """Routers that reconnect would use up all places."""
    hub = EventHub(max_watchers=1, queue_limit=9)
    for _ in range(3):
        watcher = hub.subscribe([""])
        with pytest.raises(TooManyWatchers):
            hub.subscribe([""])
        hub.unsubscribe(watcher)
    assert hub.watchers == 0


def test_publishing_counts_even_when_nobody_watches() -> None:
    """Evictions would be missing from the metrics of a daemon without routers."""
    counts: dict[ChangeKind, int] = {}
    hub = EventHub(max_watchers=1, queue_limit=9, count=lambda kind, n: counts.update({kind: n}))
    hub.publish([*stored("a", "b"), Change(ChangeKind.EVICTED, "a")])
    assert counts == {ChangeKind.STORED: 2, ChangeKind.EVICTED: 1}
