"""KV events for routers: what this cache gains and loses, in numbered batches, one per tick.

Routers that hear of every batch know exactly what the tree holds. Off unless somebody asks; then the tree
names pages as they come, which costs a hash per page.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hicache.tree.base import TreeCore
from hicache.tree.residency import Loss, Observer
from hicache.types import Component, Tier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Stored:
    """Pages came to a tier, each behind the one before it; a MAMBA state is named by the page it ends.

    `parent` is the digest before the first, None at the root; `tokens` are those of FULL pages.
    """

    tier: Tier
    component: Component
    digests: list[bytes]
    parent: bytes | None
    tokens: array[int]


@dataclass(slots=True)
class Removed:
    """Pages left a tier, for one reason."""

    tier: Tier
    component: Component
    digests: list[bytes]
    why: Loss


@dataclass(slots=True)
class Cleared:
    """The cache holds nothing any more, on any tier."""


Event: TypeAlias = "Stored | Removed | Cleared"


@dataclass(frozen=True, slots=True)
class Batch:
    """Events in order. `sequence` grows by one from batch to batch, from 0; a gap is a lost batch."""

    sequence: int
    at: float  # seconds since the epoch
    events: tuple[Event, ...]


class Sink(Protocol):
    """Takes batches. Never blocks."""

    def has_room(self) -> bool:
        """True if offer() will take the next batch."""

    def offer(self, batch: Batch) -> None:
        """Take a batch."""


@dataclass(slots=True)
class EventLog(Observer):
    """Collects what a tree tells between two ticks. Owned by the cache's thread.

    A sink without room loses batches; when it has room again it is told everything anew, behind a Cleared.
    """

    tree: TreeCore
    sink: Sink
    wall: Callable[[], float] = time.time
    lost_batches: int = 0  # that were there when a sink ran out of room
    _pending: list[Event] = field(default_factory=list)
    _sequence: int = 0
    _behind: bool = False  # the sink has lost a batch, and has not been told everything since

    @property
    def handed_out(self) -> int:
        return self._sequence - self.lost_batches

    def start(self) -> None:
        """Begin with everything that the tree holds."""
        self.tree.observe(self)

    def stop(self) -> None:
        self.tree.observe(None)
        self._pending.clear()

    def flush(self) -> None:
        """Hand what has happened to the sink."""
        if not self._pending and not self._behind:
            return
        if not self.sink.has_room():
            self._lose()
            return
        if self._behind:
            self._behind = False
            self._pending = [Cleared()]
            self.tree.observe(self)
        batch = Batch(self._sequence, self.wall(), tuple(self._pending))
        self._pending = []
        self._sequence += 1
        self.sink.offer(batch)

    def _lose(self) -> None:
        if not self._behind:
            logger.warning("KV events are not taken in time; everything is told again when they are")
            self._behind = True
            self._sequence += 1  # the gap that a subscriber sees
            self.lost_batches += 1
        self._pending = []

    # -- told by the tree ----------------------------------------------------------------------

    def gained(
        self, tier: Tier, component: Component, digests: Sequence[bytes], parent: bytes | None, tokens: bytes
    ) -> None:
        if self._behind:
            return  # all of it is told again
        named = array("I", tokens)
        last = self._pending[-1] if self._pending else None
        if (
            isinstance(last, Stored)
            and (last.tier, last.component) == (tier, component)
            and (component is not Component.FULL or last.digests[-1] == parent)
        ):
            last.digests += digests
            last.tokens += named
        else:
            self._pending.append(Stored(tier, component, list(digests), parent, named))

    def lost(self, tier: Tier, component: Component, digests: Sequence[bytes], why: Loss) -> None:
        if self._behind:
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(last, Removed) and (last.tier, last.component, last.why) == (tier, component, why):
            last.digests += digests
        else:
            self._pending.append(Removed(tier, component, list(digests), why))

    def cleared(self) -> None:
        if not self._behind:
            self._pending = [Cleared()]
