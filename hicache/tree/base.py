"""The contract of a tree core: metadata of one unified prefix tree. It decides; it moves no bytes.

No torch, no threads, no I/O and no clock: times come in as arguments. Every position is counted in
pages from the root unless a name says tokens. `hicache.testing.oracle` is the naive second
implementation that every core is compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hicache.types import NO_SLOT, Component, Slots, Tier, TokenBuffer

if TYPE_CHECKING:
    from hicache.tree.residency import Observer

Freed = dict[tuple[Tier, Component], Slots]  # slots that left the tree; the caller frees them in their pools


@dataclass(frozen=True, slots=True)
class TreeRules:
    """What a tree must know of a model. `kinds` begins with FULL; `window_pages` is 0 without SWA.

    Only multiples of `align_pages` are boundaries: see ModelSpec.
    """

    page_size: int
    kinds: tuple[Component, ...]
    window_pages: int = 0
    align_pages: int = 1


class Match:
    """What the tree holds of one token path; valid until the tree changes, so use or lock it at once.

    Laws: device <= host <= full <= limit; full_device <= full. All in pages.
    """

    __slots__ = ("branch", "device", "full", "full_device", "host", "limit", "node", "scope")

    node: object  # the core's own: where `full` ends
    scope: bytes
    limit: int
    full_device: int  # FULL pages on the device; they are a prefix of the path
    full: int  # FULL pages on device or host
    device: int  # deepest boundary every component accepts on the device
    host: int  # ... on device or host, component by component and page by page
    branch: tuple[
        int, ...
    ]  # boundaries to cut a prefill at, so that a shared prefix gets its window and state


class Lease:
    """What keeps pages of one path alive on one tier; made by lock(), ended by release().

    Protects on `tier`: FULL pages [0, depth), SWA pages [swa_start, depth), and the MAMBA states at
    the boundaries in `states`. Stays valid when nodes split or merge. Pages of the range that are
    absent on the tier are not protected until something puts them there.
    """

    __slots__ = ("depth", "node", "scope", "states", "swa_start", "tier")

    node: object  # the core's own; None once released
    scope: bytes
    tier: Tier
    depth: int
    swa_start: int
    states: tuple[int, ...]


class SessionRefs:
    """What one session refers to: the paths that its requests ended with, made by refer().

    A tree forgets it with unrefer(), or as the pages go; it serves one tree.
    """

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: dict[object, None] = {}  # the core's own; empty: it refers to nothing


@dataclass(slots=True)
class PathSlots:
    """Slots of a path up to `boundary`, copied out: the caller owns the arrays.

    full_device covers pages [0, d), full_host pages [d, boundary) with d = min(full_device, boundary);
    the two SWA arrays cover pages [window_start, boundary). NO_SLOT marks absence.
    """

    boundary: int
    full_device: Slots
    full_host: Slots
    window_start: int = 0
    swa_device: Slots = field(default_factory=lambda: array("i"))
    swa_host: Slots = field(default_factory=lambda: array("i"))
    state_device: int = NO_SLOT
    state_host: int = NO_SLOT


@dataclass(slots=True)
class PathPresence:
    """Residency on device or host of one path, for planning a prefetch with `boundary.deepest`.

    swa has one byte per page of [0, full), None without SWA; checkpoints ascend, None without MAMBA.
    """

    full: int
    swa: bytearray | None
    checkpoints: list[int] | None


@dataclass(slots=True)
class Inserted:
    """Outcome of insert(): what the request must use from now on, and what it must give back."""

    full: Slots  # the tree's slots for [start, end)
    swa: Slots  # the tree's SWA slots for [start, end), NO_SLOT at tombstones; empty without SWA
    duplicates: dict[Component, Slots]  # offered slots that were not adopted; the caller frees them
    new_pages: int  # FULL pages the tree did not hold on any tier before


@dataclass(slots=True)
class WritePlan:
    """Pages of one path to write from `source` to the tier below, root first; slots are the source's.

    Positions are page indices (FULL, SWA) or page boundaries (MAMBA states), absolute on the path,
    ascending. `hashes` holds 32 bytes per entry of each component when the target is STORAGE.
    """

    source: Tier
    pages: dict[Component, Slots]  # positions
    slots: dict[Component, Slots]  # source slots, same length
    hashes: dict[Component, list[bytes]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(p) for p in self.pages.values())


@dataclass(slots=True)
class Evicted:
    """Outcome of an eviction. `freed` may name both tiers: a page whose ancestor goes cannot stay."""

    freed: Freed
    demoted: int = 0  # FULL pages that left the device and stay on the host
    lost: int = 0  # FULL pages that left the tree without a copy on the tier below


class TreeCore(ABC):
    """One unified prefix tree. Single-threaded: its owner holds the only lock.

    Laws checked by check_integrity(): FULL pages on the device are a prefix of each path; every page
    of a path is on device or host; a component's slot appears at most once per tier; leased pages are
    there; per-tier counters equal a recount; eviction candidates are exactly the unprotected tails.
    """

    rules: TreeRules
    keeps_islands: ClassVar[bool] = False  # whether insert() takes `places`

    # -- reading; none of these changes anything -----------------------------------------------

    @abstractmethod
    def match(self, scope: bytes, tokens: TokenBuffer, limit: int) -> Match:
        """Find the deepest boundaries <= `limit` TOKENS of this path. Does not split, stamp or count."""

    @abstractmethod
    def slots(self, at: Match | Lease, boundary: int) -> PathSlots:
        """Copy out the slots of the path up to `boundary` (<= at.full, or <= at.depth)."""

    @abstractmethod
    def presence(self, at: Match) -> PathPresence:
        """Return what is on device or host along the path."""

    @abstractmethod
    def page_hashes(self, at: Match | Lease, start: int, end: int) -> list[bytes]:
        """Return the chained SHA-256 digests (hicache.keys) of pages [start, end); cached per page."""

    @abstractmethod
    def resident(self, tier: Tier, component: Component) -> int:
        """Pages (states) of a component on a tier."""

    @abstractmethod
    def evictable(self, tier: Tier, component: Component) -> int:
        """Pages that evict() could free now; what leases protect is not among them."""

    # -- leases --------------------------------------------------------------------------------

    @abstractmethod
    def lock(
        self,
        at: Match | Lease,
        boundary: int,
        tier: Tier,
        *,
        swa_start: int | None = None,
        states: Sequence[int] | None = None,
    ) -> Lease:
        """Protect the path up to `boundary` on a tier.

        Default: the last SWA window, [max(0, boundary - window_pages), boundary), and the state at
        `boundary`; transfers name the SWA start and the states they touch instead.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """End a lease. Releasing twice raises InvariantViolation."""

    @abstractmethod
    def hold_windows(self, lease: Lease, swa_start: int) -> None:
        """Let the lease's SWA range begin at `swa_start`; what it no longer covers may be evicted."""

    @abstractmethod
    def touch(self, lease: Lease, now: float, *, priority: int = 0, hits: int = 1) -> None:
        """Record one request's access to the lease's path: recency, a hit, priority (the maximum).

        `hits` is 0 where the same request comes again.

        FULL: all of [0, depth). SWA: the last window and one page. MAMBA: the state at depth.
        """

    # -- sessions ------------------------------------------------------------------------------

    @abstractmethod
    def refer(self, lease: Lease, session: SessionRefs) -> None:
        """Let a session refer to the lease's path, in place of shorter paths of it that it referred to.

        Entries that no session refers to are evicted first, then those with the fewest sessions; among
        equals the policy decides. Nothing is protected. FULL: all of [0, depth). SWA: the last window and
        one page, MAMBA: the state at depth, of paths that the session does not refer to beyond.
        """

    @abstractmethod
    def unrefer(self, session: SessionRefs) -> None:
        """Let a session refer to nothing. Idempotent; frees nothing."""

    @abstractmethod
    def references(self, at: Match | Lease) -> list[int]:
        """Return how many sessions refer to each FULL page of the path."""

    # -- growing -------------------------------------------------------------------------------

    @abstractmethod
    def insert(
        self,
        lease: Lease,
        tokens: TokenBuffer,
        start: int,
        end: int,
        *,
        full: Slots,
        swa: Slots | None = None,
        states: Sequence[tuple[int, int]] = (),
        places: Sequence[int] | None = None,
        now: float = 0.0,
        priority: int = 0,
    ) -> Inserted:
        """Add device pages [start, end) of the path `tokens` and move the lease to `end`.

        The lease is a DEVICE lease with start <= its FULL device pages on the path, and it covers
        [0, start). `full` and `swa` hold one slot per page of [start, end); `states` are (boundary,
        slot) pairs inside (start, end]. Pages new to the device are adopted, with their SWA where
        offered; where the page is there already the offered slot comes back as a duplicate, except
        that a tombstone inside the last window before `end` takes the offered SWA slot (recovery).
        With `places` (boundaries; a core that `keeps_islands`), only the island before each of them, its
        window and `align_pages` more, is adopted or recovered; every other offered SWA slot comes back as
        a duplicate.
        Afterwards the lease protects [0, end), the last window, and the state at `end` if there is one.
        Counts as the path's first access where pages are new; touch() is separate.
        """

    @abstractmethod
    def insert_host(
        self,
        scope: bytes,
        tokens: TokenBuffer,
        start: int,
        end: int,
        *,
        full: Slots,
        swa: Slots | None = None,
        states: Sequence[tuple[int, int]] = (),
        now: float = 0.0,
        stored: bool = True,
    ) -> dict[Component, Slots]:
        """Publish host pages that came from storage; return offered slots that were not adopted.

        `full` and `swa` hold one slot per page of [start, end), NO_SLOT where nothing is offered.
        A page is adopted where its component is absent from the host and its ancestors are on device
        or host; the rest comes back. Adopted pages are believed stored if `stored`.
        """

    # -- writing down --------------------------------------------------------------------------

    @abstractmethod
    def plan_write(
        self, lease: Lease, target: Tier, *, min_hits: int = 0, unstored: bool = False
    ) -> WritePlan:
        """List what of the lease's path the target lacks and nobody is writing; FULL ancestors first.

        Target HOST reads device slots, STORAGE host slots. Considers FULL pages [0, depth) with at
        least `min_hits` hits, SWA pages present on the source and every state on the source. With
        `unstored` pages that storage is believed to have are left out, also of a write to the host.
        """

    @abstractmethod
    def begin_write(self, lease: Lease, plan: WritePlan) -> Lease:
        """Mark the plan as being written and return a lease on its source pages for the transfer."""

    @abstractmethod
    def end_write(
        self, lease: Lease, plan: WritePlan, outcome: Mapping[Component, Slots]
    ) -> dict[Component, Slots]:
        """End what begin_write began, releasing its lease.

        `outcome` has one entry per planned position: for HOST the new host slot, for STORAGE 0;
        NO_SLOT where the write failed. Returns host slots not adopted (the caller frees them).
        """

    @abstractmethod
    def forget_stored(self, at: Match | Lease, component: Component, positions: Sequence[int]) -> None:
        """Correct the belief that pages (states) are in storage, after a probe found them missing."""

    @abstractmethod
    def forget_all_stored(self) -> None:
        """Drop every belief about storage, after it may have lost everything; walks the whole tree."""

    @abstractmethod
    def coldest_unwritten(self, tier: Tier, count: int) -> list[Lease]:
        """Lock (on `tier`) the paths that would be evicted next and lack a copy on the tier below.

        Covers about `count` FULL pages; for write_back's clean reserve. The caller releases them.
        """

    @abstractmethod
    def unstored(self) -> tuple[list[Lease], int]:
        """Lock (HOST) every path that holds anything storage lacks; count the FULL pages that do.

        For writing everything down before the tiers go; walks the whole tree. The caller releases them.
        """

    # -- shrinking -----------------------------------------------------------------------------

    @abstractmethod
    def evict(self, tier: Tier, component: Component, count: int) -> Evicted:
        """Free exactly `count` pages of a component on a tier, or all that are evictable if fewer.

        FULL leaves from the tails, page by page, and takes SWA and states of the page on that tier
        with it; a device page with a host copy is demoted. SWA and MAMBA go alone (tombstones).
        """

    @abstractmethod
    def reclaim_duplicates(self, count: int) -> Slots:
        """Free up to `count` FULL host copies of pages that the device holds too."""

    @abstractmethod
    def reclaimable(self) -> int:
        """FULL host copies of device pages that reclaim_duplicates() could free now."""

    @abstractmethod
    def drop_all(self) -> Freed:
        """Drop everything that no lease protects, on both tiers."""

    # -- checking ------------------------------------------------------------------------------

    @abstractmethod
    def observe(self, observer: Observer | None) -> None:
        """Tell `observer` what is held now and every change from then on; None ends it. At most one."""

    @abstractmethod
    def owned(self, tier: Tier, component: Component) -> Slots:
        """Every slot the tree owns of a pool, in no order."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Walk everything; raise InvariantViolation, with numbers, at the first broken law."""
