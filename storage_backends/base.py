"""The contract between HiCache and a system that keeps objects outside the process (L3).

A backend stores opaque, immutable objects under text keys. It knows nothing of pages, models or
trees. `hicache.testing.backend_suite` proves that a backend keeps this contract.

A key is printable ASCII without blanks, 1 to 200 characters, with '/' between its parts. An object
has at least one byte. The keys of one call belong together and stand in the order in which they are
of use: a system that ranks by use ranks the first as the most recently used, so that what it evicts
first is the end of a chain and not its root.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

MISS = -1  # in read(): the object is not there, or is not readable right now


class WriteOutcome(enum.Enum):
    """What became of one object of a write."""

    STORED = "stored"  # visible, whole
    EXISTS = "exists"  # already there, or another writer is storing it: nothing to do
    NO_SPACE = "no_space"  # refused; nothing is visible
    FAILED = "failed"  # the store failed; nothing is visible
    BUSY = "busy"  # commit only: not there, though the store took it; perhaps another writer is in the middle


@dataclass(slots=True)
class Reservation:
    """Room for one object between begin_write and commit or abort.

    `buffer` has exactly the asked size, is writable, belongs to the backend, and may be used by the
    caller from begin_write until commit or abort returns; its first content is undefined.
    """

    key: str
    buffer: memoryview
    token: object = field(default=None, repr=False)  # the backend's own


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A snapshot. Bytes and objects are what this client can know; -1 where the system cannot tell."""

    objects: int
    used_bytes: int
    capacity_bytes: int
    details: Mapping[str, float | int | str] = field(default_factory=dict)


class StorageBackend(ABC):
    """A place for objects. Every method is thread-safe and returns within the backend's time bound.

    A method raises BackendTimeout or BackendUnavailable when the whole call failed, ValueError when it
    was called wrongly (lists of different lengths, an object without bytes), and nothing else on
    purpose; an outcome of a single object is in the return value. A batch may name a key twice. No
    method keeps a reference to memory that the caller passed once it has returned or raised
    BackendUnavailable; after BackendTimeout the call may still be running (law 9), so the caller must
    not reuse that memory until the backend is closed, unless `settles_on_timeout` is true.
    """

    name: ClassVar[str]
    # True if memory passed to a call that raised BackendTimeout is never touched afterwards.
    settles_on_timeout: ClassVar[bool] = True

    @abstractmethod
    def probe(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 1 if the object is there and whole, else 0.

        Keys found are protected from the backend's own eviction for its lease time where it has one,
        and may count as used. Changes nothing else. May block on I/O.
        """

    @abstractmethod
    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """Read each object into the buffer beside it; return its true size, or MISS.

        A size larger than the buffer means that nothing was written to it; a smaller one leaves the
        rest of the buffer as it was; after MISS its content is undefined. The caller owns the buffers
        (contiguous, writable, of format 'B') and verifies what is in them: a backend need not check
        payloads.
        """

    @abstractmethod
    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        """Reserve room per key, or say why not (EXISTS, NO_SPACE, FAILED). Nothing is visible yet.

        The second of two equal keys in a batch is EXISTS. A backend may end reservations that are
        neither committed nor aborted for long.
        """

    @abstractmethod
    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        """Make filled reservations visible, each atomically; all of them end, whatever the outcome.

        A reservation that had already ended is FAILED and changes nothing.
        """

    @abstractmethod
    def abort(self, reservations: Sequence[Reservation]) -> None:
        """End reservations without a trace. Never raises for a reservation that already ended."""

    @abstractmethod
    def touch(self, keys: Sequence[str]) -> None:
        """Mark keys as recently used where the system ranks by use; a hint, unknown keys are fine."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> int:
        """Delete objects; return how many were there. One being read stays readable to that reader."""

    @abstractmethod
    def clear(self, prefix: str) -> int:
        """Delete every object whose key begins with `prefix` ('' is all); return how many went."""

    @abstractmethod
    def stats(self) -> BackendStats:
        """Return a snapshot."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; other methods raise BackendUnavailable afterwards."""


def check_lengths(keys: Sequence[str], others: Sequence[object]) -> None:
    """Raise ValueError unless there is one of `others` per key."""
    if len(keys) != len(others):
        raise ValueError(f"{len(keys)} keys, but {len(others)} values beside them")


def check_sizes(keys: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise ValueError unless every key of a write has a positive size."""
    check_lengths(keys, sizes)
    if sizes and min(sizes) < 1:
        raise ValueError(f"an object has at least one byte, not {min(sizes)}")


@runtime_checkable
class HasEpoch(Protocol):
    """Implemented by backends that can tell when the system behind them started anew, empty."""

    @property
    def epoch(self) -> int:
        """Names the run of the system that answered last; 0 before the first answer."""


@runtime_checkable
class HoldsSessions(Protocol):
    """Implemented by backends that can drop what open conversations will ask for after everything else.

    Hints: nothing is promised, and a session that is not heard of for its time is over by itself.
    `hicache.testing.session_suite` proves it.
    """

    def pin(self, session: str, keys: Sequence[str], ttl_s: float) -> None:
        """Let a session keep objects, those under these keys now or later, for `ttl_s` from its last call.

        `session` is a name like a key; equal names are one session.
        """

    def close_session(self, session: str) -> None:
        """Let a session keep nothing. An unknown one is fine."""


@runtime_checkable
class RegistersMemory(Protocol):
    """Implemented by backends that move bytes fastest from memory they know (RDMA registration)."""

    def register(self, memory: memoryview) -> None:
        """Register long-lived memory; the caller keeps it alive until close()."""
