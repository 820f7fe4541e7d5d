"""The contract of a transfer executor: the only code that moves bytes or waits for them.

The cache plans in slots; an executor performs and reports. Real bytes: `transfer.executor`. Virtual
time: `transfer.virtual`, where slots are real, tensors are absent and copies cost time instead.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, NewType, Protocol

from hicache.types import Component, Slots

JobId = NewType("JobId", int)

_make_ref = tuple.__new__  # a prompt names thousands of objects: NamedTuple's own constructor is slow


class Move(NamedTuple):
    """Copy whole families of one component: page `sources[i]` to page `targets[i]`."""

    component: Component
    sources: Slots
    targets: Slots


class ObjectRef(NamedTuple):
    """One L3 object: a page of a family, or a MAMBA state named by the hash of the page it ends."""

    component: Component
    page_hash: bytes  # 32 bytes
    phase: int = 0  # which pools have a part of it: see ModelSpec.phase


def name_objects(
    component: Component, positions: Sequence[int], hashes: Iterable[bytes], period: int
) -> list[ObjectRef]:
    """Name the objects of pages (MAMBA: of states at boundaries); `period` as of the spec."""
    behind = component is Component.MAMBA
    phases: Iterable[int] = repeat(0) if period == 1 else ((p - behind) % period for p in positions)
    return list(map(_make_ref, repeat(ObjectRef), zip(repeat(component), hashes, phases)))


class JobKind(enum.Enum):
    """What a job moves, and from where to where."""

    WRITE = "write"  # device to host
    PROBE = "probe"  # which objects are in storage
    FETCH = "fetch"  # storage to host
    STORE = "store"  # host to storage
    LOAD = "load"  # host to device, layer by layer


class Why(enum.Enum):
    """Why an object did not come."""

    MISSING = "missing"  # it is not there
    SHORT = "short"  # it has fewer bytes or parts than its family
    CORRUPT = "corrupt"  # it does not verify
    TIMEOUT = "timeout"
    ERROR = "error"
    BYPASSED = "bypassed"  # the store is left alone after failures
    DETACHED = "detached"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job. From here on nothing touches the job's slots any more.

    `flags` has one byte per entry of the job: 1 = present (PROBE), whole and verified (FETCH),
    stored or already there (STORE). A LOAD that failed may have one per page, in the order of its moves:
    1 = every layer of it can be copied. WRITE has no flags. `failed` says that the store itself
    failed, so flags are no evidence of absence; of a WRITE or LOAD, that its targets hold nothing.
    `seconds` is how long the work itself took, without what it waited for; 0 if it was not measured.
    `why` is that of the first object of a FETCH that did not come, or of a PROBE that failed.
    """

    job: JobId
    kind: JobKind
    flags: bytes = b""
    failed: bool = False
    seconds: float = 0.0
    why: Why | None = None


class LoadTicket(Protocol):
    """A load in progress. wait_layer is called from the compute thread, in ascending layer order."""

    def wait_layer(self, layer: int) -> None:
        """Make the caller's stream (on CPU: the caller) wait until every pool of a model layer is there.

        Raises LoadFailed if the load failed, at whichever layer, and however long ago.
        """

    def done(self) -> bool:
        """True once every layer has arrived."""


class Executor(ABC):
    """Performs jobs. Every start_ method returns at once; called from the cache's thread only."""

    @property
    @abstractmethod
    def has_storage(self) -> bool:
        """True while a storage backend is attached and not bypassed."""

    @property
    def storage_bypassed(self) -> bool:
        """True while a backend is attached and left alone after failures."""
        return False

    @property
    @abstractmethod
    def storage_epoch(self) -> int:
        """Grows when storage may have lost what it held: attached anew, or back after a failure."""

    @abstractmethod
    def copy_state(self, source: int, target: int) -> None:
        """Copy one MAMBA family on the device, ordered with the compute stream (copy-on-write)."""

    @abstractmethod
    def fence(self) -> object:
        """Mark what the compute stream holds so far: everything issued, done or not."""

    @abstractmethod
    def passed(self, fence: object) -> bool:
        """True once everything before a fence has happened. Never blocks."""

    @abstractmethod
    def start_load(self, job: JobId, moves: Sequence[Move]) -> LoadTicket:
        """Copy host pages to device pages layer by layer; a gate per layer. Reported as Done too."""

    @abstractmethod
    def start_write(self, job: JobId, moves: Sequence[Move]) -> None:
        """Copy device pages, as the compute stream leaves them now, to host pages."""

    @abstractmethod
    def start_probe(self, job: JobId, refs: Sequence[ObjectRef]) -> None:
        """Ask storage which objects it holds."""

    @abstractmethod
    def start_fetch(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        """Read objects into host slots in order, verifying each."""

    @abstractmethod
    def start_store(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        """Write host slots as objects in order, stopping at the first that fails."""

    def pin(self, session: str, refs: Sequence[ObjectRef], ttl_s: float) -> None:
        """Hint that an open session, named by printable ASCII, will ask for these objects; not a job.

        Storage that ranks by sessions evicts them last, for `ttl_s` from the last hint.
        """
        del session, refs, ttl_s

    def close_session(self, session: str) -> None:
        """Hint that a session is over."""
        del session

    @abstractmethod
    def arrived(self, job: JobId) -> bytes:
        """Return the flags of a FETCH so far: entries whose page is whole and verified in its slot."""

    @abstractmethod
    def cancel(self, job: JobId) -> None:
        """Ask a FETCH or PROBE to end early. Its slots stay busy until its Done is polled."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the jobs that ended since the last poll, in the order they ended. Never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block until poll() would return something, or the time is up; return whether it would."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads this executor started."""
