"""What is remembered of one prefetch: how far it is, what it reads, and the host pages it holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.cache.accounts import Ask, marks_of
from hicache.cache.fetch_plan import Part
from hicache.request import Request
from hicache.transfer.base import JobId, ObjectRef, Why, name_objects
from hicache.tree.base import Lease
from hicache.types import NO_SLOT, Component


class Phase(enum.Enum):
    """How far a prefetch is."""

    PROBING = "probing"
    CROWDED = "crowded"  # other queued requests hold the host pages it needs; no job is open
    FETCHING = "fetching"
    ENDED = "ended"  # published or given up; a cut-off read may still hold its pages


@dataclass(slots=True)
class Prefetch:
    """One queued request's prefetch. Host pages in `parts` and `got` are held by it alone."""

    request: Request
    job: JobId
    known: int  # pages reachable without storage when it was planned (the host boundary)
    asked: int  # FULL pages below this were on device or host, and were not asked for
    limit: int  # pages
    hashes: list[bytes]  # of pages [0, limit)
    parts: list[Part]  # of the probe, then of the read in flight
    progress_at: float
    there: dict[Component, set[int]] = field(default_factory=dict)  # what storage has, as far as is known
    got: dict[Component, dict[int, int]] = field(default_factory=dict)  # arrived: position to host page
    full_held: int = 0  # FULL host pages, of `parts` and of `got`
    arrived: int = 0  # objects of the read in flight
    target: int = 0  # pages; the boundary it set out for
    phase: Phase = Phase.PROBING
    blocked_since: float | None = None
    reason: str = ""  # why it ended
    why: Why | None = None  # the first object of its reads, or of its probe, that did not come
    crowded: bool = False  # it ended while others held the host pages it needed
    run: int = 0  # pages; where storage's FULL ends, as it was planned
    reached: int = 0  # pages; the boundary it has published
    anchor: Lease | None = None  # keeps what the pages being fetched will hang on
    lease: Lease | None = None  # keeps what was published until admission
    age: tuple[int, int] = (0, 0)  # of storage when it was first asked

    def ask(self) -> Ask:
        """What it asked storage for, and what became of it."""
        marks = marks_of(
            self.reason,
            self.why,
            crowded=self.crowded,
            run=self.run,
            target=self.target,
            reached=self.reached,
            limit=self.limit,
        )
        return Ask(self.known, self.limit, self.reached, marks)

    def split(self, flags: bytes) -> list[tuple[Part, bytes]]:
        """Cut a job's flags into those of each part; a job that ended early lacks its last flags."""
        cut, at = [], 0
        for part in self.parts:
            count = len(part.positions)
            cut.append((part, flags[at : at + count].ljust(count, b"\0")))
            at += count
        return cut

    def collect(self, flags: bytes) -> list[tuple[Component, int]]:
        """Take over what has arrived of the read in flight; returns what has not."""
        missing: list[tuple[Component, int]] = []
        for part, whole in self.split(flags):
            got = self.got.setdefault(part.component, {})
            for i, position in enumerate(part.positions):
                if not whole[i]:
                    missing.append((part.component, position))
                elif part.slots[i] != NO_SLOT:
                    got[position], part.slots[i] = part.slots[i], NO_SLOT
        return missing

    def refs(self, periods: Mapping[Component, int]) -> list[ObjectRef]:
        """Names of all objects; a state is named by the page it ends. `periods` as of the spec."""
        refs: list[ObjectRef] = []
        for part in self.parts:
            behind = part.component is Component.MAMBA
            names = (self.hashes[p - behind] for p in part.positions)
            refs += name_objects(part.component, part.positions, names, periods[part.component])
        return refs
