"""What keeps happening is said, and not all the time."""

from __future__ import annotations

from hicache.clock import ManualClock
from hicache.seldom import Seldom


def test_what_goes_on_for_a_day_is_said_a_few_dozen_times_with_how_often_it_was() -> None:
    """A log would be full of one line, or silent about an outage that lasts."""
    clock = ManualClock()
    seldom = Seldom(clock, first_s=60, most_s=3600)
    said = []
    for _ in range(24 * 3600 // 5):
        if (more := seldom.due()) is not None:
            said.append((clock.now(), more))
        clock.advance(5)
    assert said[:3] == [
        (0, ""),
        (60, " (12 times since this was last said)"),
        (300, " (48 times since this was last said)"),
    ]
    assert len(said) == 27


def test_each_thing_is_new_once_and_new_again_after_it_was_over() -> None:
    """The second outage of a day, or another fault, would go unsaid."""
    clock = ManualClock()
    seldom = Seldom(clock, first_s=60)
    assert seldom.due("read") == ""
    assert seldom.due("write") == ""
    assert seldom.due("read") is None
    clock.advance(61)
    assert seldom.due("read") == ""
