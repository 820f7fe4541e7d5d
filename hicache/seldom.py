"""When to say again what keeps happening: at once, then more and more seldom, with how often it was."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hicache.clock import Clock, SystemClock


@dataclass(slots=True)
class _Told:
    pause_s: float
    said_at: float
    last_at: float
    unsaid: int = 0


class Seldom:
    """Thread-safe; its lock is held for nothing but the clock.

    What happens again within a pause of having been said waits; each pause is four times the one before,
    up to `most_s`. After a pause without it, it is new again.
    """

    def __init__(self, clock: Clock | None = None, *, first_s: float = 60.0, most_s: float = 3600.0) -> None:
        self._clock = clock or SystemClock()
        self._first_s, self._most_s = first_s, most_s
        self._lock = threading.Lock()
        self._told: dict[str, _Told] = {}

    def due(self, what: str = "") -> str | None:
        """Note that `what` happened; return None, or the end of the line to say now: how often it was."""
        now = self._clock.now()
        with self._lock:
            told = self._told.get(what)
            if told is None or now - told.last_at > told.pause_s:
                self._told[what] = _Told(self._first_s, now, now)
                return ""
            told.last_at = now
            told.unsaid += 1
            if now - told.said_at < told.pause_s:
                return None
            times, told.unsaid = told.unsaid, 0
            told.said_at, told.pause_s = now, min(4 * told.pause_s, self._most_s)
            return f" ({times} times since this was last said)"
