"""Private slots leave their owner once, and retired ones reach loads only behind their readers."""

from __future__ import annotations

from array import array

import pytest

from hicache.cache.ownership import Private
from hicache.cache.quarantine import Quarantine
from hicache.errors import InvariantViolation
from hicache.types import NO_SLOT, Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


def test_what_was_taken_cannot_be_taken_again() -> None:
    """A slot that two holders give back belongs to two requests soon after."""
    private = Private((FULL, SWA, MAMBA))
    private.put(SWA, range(3, 8), range(30, 35))
    assert list(private.take_before(SWA, 5)) == [30, 31]
    assert list(private.take_before(SWA, 5)) == []
    assert list(private.take(SWA, 4, 7)) == [NO_SLOT, 32, 33]
    assert list(private.take(SWA, 4, 7)) == [NO_SLOT] * 3
    private.put_states([9])
    assert list(private.take_states([9])) == [9]
    with pytest.raises(KeyError):
        private.take_states([9])
    assert {c: list(slots) for c, slots in private.drain().items()} == {FULL: [], SWA: [34], MAMBA: []}
    assert not any(private.drain().values())


def test_a_page_has_one_slot() -> None:
    """The first slot would be lost."""
    private = Private((FULL,))
    private.put(FULL, [2], [5])
    with pytest.raises(InvariantViolation, match="page 2 has slot 5, not 6"):
        private.put(FULL, [2], [6])


class Stream:
    """A compute stream that has done everything up to `done`."""

    def __init__(self) -> None:
        self.issued = self.done = 0

    def fence(self) -> object:
        self.issued += 1
        return self.issued

    def passed(self, fence: object) -> bool:
        return isinstance(fence, int) and fence <= self.done


def test_retired_slots_come_free_in_order_behind_their_fences() -> None:
    """A load would overwrite a page that a forward pass still reads."""
    stream = Stream()
    held = Quarantine(stream.fence, stream.passed)
    held.put(SWA, array("i", [1, 2]))
    assert held.lapse() == {}  # the step has ended, its readers have not
    held.put(SWA, array("i", [3]))
    assert held.lapse() == {}
    assert sorted(held.slots(SWA)) == [1, 2, 3]
    stream.done = 1
    assert held.lapse() == {SWA: array("i", [1, 2])}
    assert held.count(SWA) == len(held) == 1
    stream.done = 2
    assert held.lapse() == {SWA: array("i", [3])}
    assert len(held) == 0
    assert stream.issued == 2  # no fence where nothing was given back


def test_the_compute_stream_has_retired_slots_at_once_and_nobody_gets_them_twice() -> None:
    """Decode would stall for want of pages that it has just given back itself."""
    stream = Stream()
    held = Quarantine(stream.fence, stream.passed)
    held.put(SWA, array("i", [1, 2]))
    held.lapse()
    held.put(SWA, array("i", [3]))
    taken = held.take(SWA, 2)
    assert len(held.take(FULL, 2)) == 0
    taken += held.take(SWA, 9)
    assert sorted(taken) == [1, 2, 3]
    stream.done = 9
    assert not any(held.lapse().values())
