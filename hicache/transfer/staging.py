"""Buffers that objects are read into before they are verified; some are never seen again (law 9)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np


class StagingPool:
    """Equally large buffers, made on demand, page-aligned and touched. Thread-safe.

    A buffer that a timed-out call may still write to is quarantined: kept alive, never reused.
    Invariant: quarantined <= limit; once it is reached no buffer is handed out.
    """

    def __init__(
        self, size: int, *, limit: int, register: Callable[[memoryview], None] | None = None
    ) -> None:
        self.size = size
        self._limit = limit
        self._register = register
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._quarantine: list[memoryview] = []

    def take(self) -> memoryview | None:
        """Return a buffer of `size` bytes, or None when the quarantine is full."""
        with self._lock:
            if self.exhausted:
                return None
            if self._free:
                return self._free.pop()
        return self._make()

    def prepare(self, count: int) -> None:
        """Make buffers ahead of their first use."""
        made = [self._make() for _ in range(count)]
        with self._lock:
            self._free.extend(made)

    def _make(self) -> memoryview:
        buffer = memoryview(mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        np.frombuffer(buffer, dtype=np.uint8)[:: mmap.PAGESIZE] = 0  # fault every page in now
        if self._register is not None:
            self._register(buffer)
        return buffer

    def give(self, buffer: memoryview) -> None:
        """Return a buffer that nothing touches any more."""
        with self._lock:
            self._free.append(buffer)

    def quarantine(self, buffer: memoryview) -> None:
        """Put away a buffer that an abandoned call may still write to."""
        with self._lock:
            self._quarantine.append(buffer)

    @property
    def exhausted(self) -> bool:
        return len(self._quarantine) >= self._limit

    @property
    def quarantined_bytes(self) -> int:
        return len(self._quarantine) * self.size
