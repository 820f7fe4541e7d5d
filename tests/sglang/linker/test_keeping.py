"""What is kept, queued or read has a bound and an end; answers to offloads come in order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hicache.errors import ConfigError
from hicache.integrations.sglang.direct.settings import Bounds, read_linker_settings
from hicache.testing.sglang_device import (
    BOUND_S,
    PAGE,
    PAGES,
    HoldStores,
    Rank,
    Shared,
    Transfer,
    families,
    keys,
    loaded,
    nothing,
    page_bytes,
    plain,
    same,
    stored,
    until,
)


def test_what_is_cancelled_reset_or_closed_leaves_nothing_behind(rank: Callable[..., Rank]) -> None:
    """Host memory of requests that went away must not add up."""
    a, b = rank(plain()), rank(plain())
    chain = keys(4)
    assert stored(a, chain, [1, 2, 3, 4])
    before = page_bytes(b.group, "kv", 9)
    assert b.core.lookup("r", families(b.group, chain)) == [4]
    assert b.core.load("r", families(b.group, chain, [9, 10, 11, 12]))
    assert b.core.cancel("r")
    assert not b.core.cancel("r")
    assert b.core.start(nothing) == -1
    assert b.core.held_pages == 0
    assert b.core.lookup("s", families(b.group, chain)) == [4]
    assert b.core.lookup("t", families(b.group, chain)) == [4]
    assert b.core.held_pages == 4
    assert b.core.load("s", families(b.group, chain, [9, 10, 11, 12]))
    b.core.reset()
    assert b.core.held_pages == 0
    assert page_bytes(b.group, "kv", 9) == before
    assert b.core.lookup("t", families(b.group, chain)) == [4]
    b.core.close()
    assert b.core.held_pages == 0
    assert not b.core._fetcher._thread.is_alive()
    assert not b.core._offloader._thread.is_alive()
    assert not b.core._loader._thread.is_alive()


def test_transit_memory_is_bounded(rank: Callable[..., Rank]) -> None:
    """A prefix larger than the bound is promised as far as it fits."""
    a = rank(plain())
    chain = keys(8)
    assert stored(a, chain, range(1, 9))
    page = len(page_bytes(a.group, "kv", 1))
    b = rank(plain(), bounds=Bounds(transit_bytes=3 * page + 10))
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    assert b.core.lookup("s", families(b.group, keys(8, chain="b"))) == []
    assert b.core._held.used_bytes <= 3 * page
    assert loaded(b, "r", chain[:3], [10, 11, 12])
    assert same(b.group, [10, 11, 12], a.group, [1, 2, 3])


def test_an_offload_beyond_the_bound_is_answered_in_its_turn(
    rank: Callable[..., Rank], store: Shared
) -> None:
    """Ranks compare answers one by one: one left out would confirm another's pages."""
    one = rank(plain(), bounds=Bounds(offload_share=5 / PAGES))
    store.gate.clear()
    for i in range(3):
        pages = [1 + 3 * i, 2 + 3 * i, 3 + 3 * i]
        assert one.core.offload(families(one.group, keys(3, chain=str(i)), pages), nothing)
    assert one.core.offload(families(one.group, keys(1, chain="3"), [20]), nothing)
    assert one.core.num_answers() == 0
    store.gate.set()
    until(lambda: one.core.num_answers() == 4)
    assert [one.core.pop_answer() for _ in range(4)] == [True, False, False, True]
    assert one.counter("offloads_refused") == 2
    assert one.core.lookup("r", families(one.group, keys(3, chain="1"))) == []


def test_pages_may_be_reused_as_soon_as_reset_returns(rank: Callable[..., Rank], store: Shared) -> None:
    """SGLang unlocks what was to be stored when it flushes; other KV may then be written there."""
    one, other = rank(plain()), rank(plain())
    store.gate.clear()
    store.entered.clear()
    for i in range(4):
        assert one.core.offload(families(one.group, keys(2, chain=str(i)), [2 * i, 2 * i + 1]), nothing)
    assert store.entered.wait(BOUND_S)
    one.core.reset()
    for part in one.group.pools["kv"].parts:
        for layer in part.layers:
            layer.zero_()
    store.gate.set()
    assert stored(one, keys(1, chain="later"), [9])
    assert one.core.num_answers() == 0
    for i in range(4):
        assert other.core.lookup(f"r{i}", families(other.group, keys(2, chain=str(i)))) == []


def test_reset_waits_for_a_device_page_that_is_being_read(rank: Callable[..., Rank]) -> None:
    """Half of what was computed before a flush and half of what came after would be stored as one page."""
    one, other = rank(plain()), rank(plain())
    hold = one.core._offloader._copier = HoldStores(one.core._offloader._copier, 1)
    assert one.core.offload(families(one.group, keys(2), [1, 2]), nothing)
    assert hold.entered.wait(BOUND_S)
    done = threading.Event()

    def flush() -> None:
        one.core.reset()
        done.set()

    thread = threading.Thread(target=flush)
    thread.start()
    assert not done.wait(0.1)
    hold.go.set()
    assert done.wait(BOUND_S)
    thread.join()
    assert one.core.num_answers() == 0
    assert stored(one, keys(1, chain="later"), [9])
    assert other.core.lookup("r", families(other.group, keys(1, chain="later"))) == [1]


def test_an_offload_that_waited_too_long_is_dropped(rank: Callable[..., Rank], store: Shared) -> None:
    """The pages of a queued offload are locked on the device."""
    one = rank(plain(), bounds=Bounds(offload_s=0.05))
    store.gate.clear()
    assert one.core.offload(families(one.group, keys(1), [1]), nothing)
    assert one.core.offload(families(one.group, keys(1, chain="b"), [2]), nothing)
    threading.Timer(0.15, store.gate.set).start()
    until(lambda: one.core.num_answers() == 2)
    assert [one.core.pop_answer(), one.core.pop_answer()][1] is False
    assert one.counter("offloads_late") >= 1


def test_indices_that_are_no_pages_are_refused_and_logged(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong index would store one page's bytes under another's key."""
    one = rank(plain())
    wrong = [Transfer("kv", keys(2), torch.arange(PAGE + 1))]
    assert one.core.offload(wrong, nothing)
    until(lambda: one.core.num_answers() == 1)
    assert not one.core.pop_answer()
    assert not one.core.load("r", wrong)
    assert "an L3 offload failed" in caplog.text
    assert one.core.offload([], nothing) is False


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"weight_version": "1", "lookup_timeout_s": 0}, "lookup_timeout_s=0.* must be positive"),
        ({"weight_version": "1", "offload_share": 2.0}, "offload_share=2.0 is more than all"),
        ({"weight_version": "1", "transit_bytes": "much"}, "Expected `int`"),
        ({"weight_version": "1", "lookup_timeout": 1}, "no key 'lookup_timeout'"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_linker_settings(extra)


def test_settings_of_the_backend_pass_through() -> None:
    settings, bounds = read_linker_settings({"address": "h:1", "weight_version": "7", "promise_s": 3})
    assert (settings.backend, settings.backend_options, settings.weight_version) == (
        "grpc",
        {"address": "h:1"},
        "7",
    )
    assert (bounds.promise_s, bounds.lookup_timeout_s) == (3, 1.0)


def test_changed_weights_end_all_sharing_and_no_offload_is_left_unanswered(
    rank: Callable[..., Rank], store: Shared
) -> None:
    """What is stored belongs to the old weights; SGLang keeps pages locked until it has its answer."""
    a, b = rank(plain()), rank(plain())
    chain = keys(3)
    assert stored(a, chain, [1, 2, 3])
    assert b.core.lookup("r", families(b.group, chain)) == [3]
    b.core.turn_off()
    assert b.core.held_pages == 0
    assert not b.core.load("r", families(b.group, chain, [4, 5, 6]))
    assert b.core.lookup("r", families(b.group, chain)) == []
    asked = len(store.calls)
    assert not stored(b, keys(2, chain="new"), [7, 8])
    assert len(store.calls) == asked
