"""Spans of one long-lived block of memory, for clients that want memory they know.

Decides which bytes are free. Leaves to others whose memory it is and what is in it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass

from hicache.errors import DoubleFree

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + size_bytes) of the block."""

    offset: int
    size_bytes: int


class Arena:
    """First-fit allocator over [offset, offset + size_bytes) of a block.

    Thread-safe, one lock. Invariant: free spans and taken spans are disjoint and cover the arena; free
    spans are sorted, and no two touch.
    """

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        self._free = [(offset, size_bytes)] if size_bytes else []
        self._taken: dict[int, int] = {}  # offset -> bytes, rounded up

    @property
    def taken_bytes(self) -> int:
        """Bytes of all spans out, each rounded up to the alignment."""
        with self._changed:
            return sum(self._taken.values())

    def try_take(self, size_bytes: int) -> Span | None:
        """Take a span, or return None if no free one is large enough now."""
        with self._changed:
            return self._take(size_bytes)

    def take(self, size_bytes: int, *, deadline: float) -> Span | None:
        """Take a span, waiting for one until `time.monotonic()` reaches `deadline`; None if none came."""
        if _rounded(size_bytes) > self.size_bytes:
            return None
        with self._changed:
            while (span := self._take(size_bytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._take(size_bytes)
            return span

    def give_back(self, span: Span) -> None:
        """Return a span. Raises DoubleFree if it is not out."""
        with self._changed:
            size = self._taken.pop(span.offset, None)
            if size is None:
                raise DoubleFree(f"arena: no span is out at offset {span.offset}")
            at = bisect_left(self._free, (span.offset, 0))
            start, end = span.offset, span.offset + size
            if at < len(self._free) and self._free[at][0] == end:
                end += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, end - start))
            self._changed.notify_all()

    def _take(self, size_bytes: int) -> Span | None:
        need = _rounded(size_bytes)
        for at, (offset, size) in enumerate(self._free):
            if size < need:
                continue
            if size == need:
                del self._free[at]
            else:
                self._free[at] = (offset + need, size - need)
            self._taken[offset] = need
            return Span(offset, size_bytes)
        return None


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
