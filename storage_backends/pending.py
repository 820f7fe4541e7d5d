"""Writes that were begun in this process and have neither been committed nor aborted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from hicache.storage_backends.base import Reservation

D = TypeVar("D", bound=Sized)


@dataclass(frozen=True, slots=True, eq=False)
class Pending(Generic[D]):
    """The token of a reservation: its memory, whose length is the object's size, and when it ends."""

    data: D
    ends_at: float


class PendingWrites(Generic[D]):
    """Reservations by key, each with memory of its own. Not thread-safe; the store locks.

    Invariant: reserved_bytes is the sum of the sizes; `_pending` is ordered by `ends_at`.
    """

    def __init__(
        self, *, ttl_s: float, allocate: Callable[[int], D], view: Callable[[D], memoryview]
    ) -> None:
        """`allocate` gives memory of a size or raises MemoryError; `view` shows it as writable bytes."""
        self._ttl_s = ttl_s
        self._allocate = allocate
        self._view = view
        self._pending: OrderedDict[str, Pending[D]] = OrderedDict()
        self.reserved_bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: str) -> bool:
        return key in self._pending

    def begin(self, key: str, size: int, now: float) -> Reservation:
        """Reserve memory for a key that has no reservation. Raises MemoryError."""
        data = self._allocate(size)
        pending = Pending(data, now + self._ttl_s)
        self._pending[key] = pending
        self.reserved_bytes += size
        return Reservation(key, self._view(data), pending)

    def take(self, reservation: Reservation) -> D | None:
        """End a reservation and return its memory; None if it had already ended."""
        pending = self._pending.get(reservation.key)
        if pending is None or pending is not reservation.token:
            return None
        del self._pending[reservation.key]
        self.reserved_bytes -= len(pending.data)
        return pending.data

    def expire(self, now: float) -> list[tuple[str, D]]:
        """End the reservations whose time is up; return their keys and memory."""
        ended = []
        while self._pending:
            key, pending = next(iter(self._pending.items()))
            if pending.ends_at > now:
                break
            del self._pending[key]
            self.reserved_bytes -= len(pending.data)
            ended.append((key, pending.data))
        return ended

    def drop_all(self) -> None:
        """End every reservation; the writers keep the memory they were given."""
        self._pending.clear()
        self.reserved_bytes = 0
