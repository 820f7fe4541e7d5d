"""When storage is left alone, and when it is tried again."""

from __future__ import annotations

import pytest

from hicache.clock import ManualClock
from hicache.transfer.breaker import Breaker, BreakerState


def opened(clock: ManualClock, *, threshold: int = 3, backoff_s: float = 1.0, max_s: float = 4.0) -> Breaker:
    breaker = Breaker(clock, threshold=threshold, backoff_s=backoff_s, max_backoff_s=max_s)
    assert [breaker.failure() for _ in range(threshold)] == [False] * (threshold - 1) + [True]
    return breaker


def test_it_opens_after_that_many_failures_in_a_row_and_says_so_once() -> None:
    """One lost packet must not switch L3 off; a dead store must not cost every request its bound."""
    breaker = Breaker(ManualClock(), threshold=3)
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.allows
    assert [breaker.failure() for _ in range(4)] == [False, False, True, False]
    assert not breaker.allows
    assert breaker.times_opened == 1


def test_a_late_success_of_an_old_call_does_not_close_it() -> None:
    """A call that began before the outage says nothing of now."""
    breaker = opened(ManualClock())
    assert not breaker.success()
    assert breaker.state is BreakerState.OPEN


def test_one_trial_is_let_through_when_the_back_off_is_over() -> None:
    """Two trials at once would block two threads on a dead store."""
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(0.75)
    assert not breaker.try_trial()
    assert breaker.seconds_to_trial() == 0.25
    clock.advance(0.25)
    assert breaker.try_trial()
    assert not breaker.try_trial()
    assert not breaker.allows
    assert breaker.seconds_to_trial() is None


def test_a_good_trial_closes_it_and_a_bad_one_doubles_the_wait_up_to_a_bound() -> None:
    """L3 comes back by itself, and a store that stays dead is asked ever more rarely."""
    clock = ManualClock()
    breaker = opened(clock)
    waits = []
    clock.advance(1)
    for _ in range(4):
        assert breaker.try_trial()
        breaker.failure()
        waits.append(breaker.seconds_to_trial())
        clock.advance(waits[-1] or 0)
    assert waits == [2, 4, 4, 4]
    assert breaker.try_trial()
    assert breaker.success()
    assert breaker.allows
    assert [breaker.failure() for _ in range(3)] == [False, False, True]
    assert breaker.seconds_to_trial() == 1


@pytest.mark.parametrize(
    "bad", [{"threshold": 0}, {"backoff_s": 0.0}, {"backoff_s": 2.0, "max_backoff_s": 1.0}]
)
def test_settings_that_could_never_work_are_refused(bad: dict[str, float]) -> None:
    """A threshold of nought would bypass storage for ever."""
    with pytest.raises(ValueError, match="breaker"):
        Breaker(ManualClock(), **bad)  # type: ignore[arg-type]
