"""Writes that were begun in this process and have neither been committed nor aborted."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from hicache.storage_backends.base import Reservation


class _Pending(NamedTuple):
    data: bytearray
    ends_at: float


class PendingWrites:
    """Reservations by key, each with memory of its own. Not thread-safe; the store locks.

    Invariant: reserved_bytes is the sum of the sizes; `_pending` is ordered by `ends_at`.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self.reserved_bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: str) -> bool:
        return key in self._pending

    def begin(self, key: str, size: int, now: float) -> Reservation:
        """Reserve memory for a key that has no reservation. Raises MemoryError."""
        data = bytearray(size)
        pending = _Pending(data, now + self._ttl_s)
        self._pending[key] = pending
        self.reserved_bytes += size
        return Reservation(key, memoryview(data), pending)

    def take(self, reservation: Reservation) -> bytearray | None:
        """End a reservation and return its memory; None if it had already ended."""
        pending = self._pending.get(reservation.key)
        if pending is None or pending is not reservation.token:
            return None
        del self._pending[reservation.key]
        self.reserved_bytes -= len(pending.data)
        return pending.data

    def expire(self, now: float) -> list[tuple[str, int]]:
        """End the reservations whose time is up; return their keys and sizes."""
        ended = []
        while self._pending:
            key, pending = next(iter(self._pending.items()))
            if pending.ends_at > now:
                break
            del self._pending[key]
            self.reserved_bytes -= len(pending.data)
            ended.append((key, len(pending.data)))
        return ended

    def drop_all(self) -> None:
        """End every reservation; the writers keep the memory they were given."""
        self._pending.clear()
        self.reserved_bytes = 0
