"""The circuit breaker around storage: when to leave it alone, and when to try it again. Pure logic."""

from __future__ import annotations

import enum
import threading

from hicache.clock import Clock


class BreakerState(enum.Enum):
    """CLOSED lets everything through, OPEN nothing, PROBING one trial whose outcome decides."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after `threshold` failures in a row; the back-off doubles with each failed trial.

    Thread-safe; its lock is never held while anything else is called but the clock.
    """

    def __init__(
        self, clock: Clock, *, threshold: int = 3, backoff_s: float = 1.0, max_backoff_s: float = 30.0
    ) -> None:
        if threshold < 1 or not 0 < backoff_s <= max_backoff_s:
            raise ValueError(f"breaker: threshold={threshold}, backoff_s={backoff_s}, max={max_backoff_s}")
        self._clock = clock
        self._threshold = threshold
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._backoff_s = backoff_s
        self._retry_at = 0.0
        self._opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def times_opened(self) -> int:
        return self._opened

    @property
    def allows(self) -> bool:
        """True while ordinary calls may go through."""
        return self._state is BreakerState.CLOSED

    def seconds_to_trial(self) -> float | None:
        """Return how long until a trial is due; None while CLOSED or while a trial is under way."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                return None
            return max(0.0, self._retry_at - self._clock.now())

    def try_trial(self) -> bool:
        """Claim the trial if one is due. The claimer must report success or failure."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock.now() < self._retry_at:
                return False
            self._state = BreakerState.PROBING
            return True

    def success(self) -> bool:
        """Record a call that worked; return True if this closed the breaker.

        While OPEN it changes nothing: a call that began before the failures says little.
        """
        with self._lock:
            self._failures = 0
            if self._state is not BreakerState.PROBING:
                return False
            self._state = BreakerState.CLOSED
            self._backoff_s = self._first_backoff_s
            return True

    def failure(self) -> bool:
        """Record a call that failed or timed out; return True if this opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.PROBING:
                self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)
                self._state = BreakerState.OPEN
                self._retry_at = self._clock.now() + self._backoff_s
                return False
            if self._state is BreakerState.OPEN or self._failures < self._threshold:
                return False
            self._state = BreakerState.OPEN
            self._opened += 1
            self._retry_at = self._clock.now() + self._backoff_s
            return True
