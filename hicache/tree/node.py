"""A node of the tree: a span of any number of pages, and what is true of each of them.

Pure data with the operations that keep it consistent (growing, splitting, joining, statistics).
Positions are absolute, in pages from the root, so they survive splits and joins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from hicache.tree.base import Lease, SessionRefs
from hicache.tree.eviction import Entry, Stats
from hicache.tree.window import HOLE, Run, Window
from hicache.types import NO_SLOT, Slots, Tier

# Bits of what is known of one page (or state) of one component.
WRITING_HOST = 1  # a device-to-host copy is in flight
WRITING_STORE = 2  # a host-to-storage write is in flight
STORED = 4  # believed to be in storage

_WRITING = {Tier.HOST: WRITING_HOST, Tier.STORAGE: WRITING_STORE}


def writing_bit(target: Tier) -> int:
    """Return the flag that says a write to `target` is in flight."""
    return _WRITING[target]


class TreeLease(Lease):
    """The core's lease. `parked` are eviction candidates that this lease keeps from being taken."""

    __slots__ = ("parked",)

    parked: list[object]

    @property
    def first(self) -> int:
        """The first page that the SWA range or a state of this lease touches."""
        return min(self.swa_start, self.states[0] - 1) if self.states else self.swa_start


class State:
    """A MAMBA checkpoint at page boundary `at`. Invariant: it has a slot on some tier."""

    __slots__ = ("at", "entries", "flags", "node", "slots", "stats")

    def __init__(self, node: Node | None, at: int, stats: Stats) -> None:
        self.node = node  # None once the state is gone
        self.at = at
        self.slots = [NO_SLOT, NO_SLOT]  # by tier
        self.flags = 0
        self.stats = stats
        self.entries: list[Entry | None] = [None, None]


class Cover:
    """How far one session refers to a node's pages: [start, depth), as far as they are there.

    `below` counts the children that it refers to as well. Where there are none the session ends: its window
    is [low, depth), perhaps with pages of nodes above, and if `state`, the state at depth is its own.
    """

    __slots__ = ("below", "depth", "low", "state")

    def __init__(self, depth: int, below: int) -> None:
        self.depth = depth
        self.below = below
        self.low = depth
        self.state = False


class Node:
    """Pages [start, end) of one path.

    FULL: the first len(device) pages are on the device; `host` has a slot or NO_SLOT per page.
    Statistics: `marks[i]` are accesses that ended at depth `mark_at[i]`; page p's are the sum of the
    marks deeper than p and of `beyond`, the accesses that went on into children.
    Invariants: mark_at ascends, its last is `end`; every page is on the device or on the host;
    `pins` and `device_pins` are the leases (of any tier, of DEVICE) that end here plus the children
    that have any. `covers` are the sessions that refer to pages here; of their depths, those behind the
    end say no more than the end (`trimmed`: there may be some).
    """

    __slots__ = (
        "beyond",
        "children",
        "covers",
        "device",
        "device_children",
        "device_pins",
        "end",
        "entries",
        "flags",
        "hashes",
        "host",
        "host_count",
        "leases",
        "mark_at",
        "marks",
        "parent",
        "pins",
        "scope",
        "start",
        "state_refs",
        "states",
        "swa",
        "tokens",
        "trimmed",
    )

    def __init__(self, parent: Node | None, start: int, *, swa: bool, scope: bytes = b"") -> None:
        self.scope = scope  # of a root
        self.parent = parent  # None for a root, and for a node that is gone
        self.start = start
        self.end = start
        self.tokens = bytearray()  # LE u32
        self.children: dict[bytes, Node] = {}  # by the exact bytes of their first page
        self.device_children = 0  # children with a FULL page on the device
        self.device: Slots = array("i")
        self.host: Slots | None = None  # allocated with the first host page
        self.host_count = 0
        self.flags: bytearray | None = None  # FULL, per page
        self.hashes: list[bytes] = []  # digests of a prefix of the pages
        self.swa = Window(self) if swa else None
        self.states: list[State] = []  # ascending
        self.mark_at: list[int] = []
        self.marks: list[Stats] = []
        self.beyond = Stats()
        self.leases: dict[TreeLease, None] = {}  # those that end here, or whose SWA range or states do
        self.pins = 0
        self.device_pins = 0
        self.entries: list[Entry | None] = [None, None]
        self.covers: dict[SessionRefs, Cover] = {}
        self.trimmed = False
        self.state_refs: dict[int, int] = {}  # sessions that end at a boundary, with its state

    @property
    def device_end(self) -> int:
        return self.start + len(self.device)

    # -- growing -------------------------------------------------------------------------------

    def extend(self, tokens: memoryview, count: int) -> None:
        """Append `count` pages; device slots, SWA and a mark at the new end are the caller's to add."""
        if self.trimmed:
            self.clamp_covers()  # what is new now, no session has seen
        if self.beyond.hits or self.beyond.reach:
            # Children that are gone went on from the old end: what is new now never saw them.
            self.marks[-1].absorb(self.beyond)
            self.beyond = Stats()
        self.tokens += tokens
        self.end += count
        if self.host is not None:
            self.host += HOLE * count
        if self.flags is not None:
            self.flags += bytes(count)

    def make_host(self) -> Slots:
        if self.host is None:
            self.host = HOLE * (self.end - self.start)
        return self.host

    def make_flags(self) -> bytearray:
        if self.flags is None:
            self.flags = bytearray(self.end - self.start)
        return self.flags

    # -- states --------------------------------------------------------------------------------

    def state(self, at: int) -> State | None:
        states = self.states
        if states and states[-1].at == at:
            return states[-1]
        i = bisect_left(states, at, key=_state_at)
        return states[i] if i < len(states) and states[i].at == at else None

    def add_state(self, state: State) -> None:
        if not self.states or self.states[-1].at < state.at:
            self.states.append(state)
        else:
            self.states.insert(bisect_left(self.states, state.at, key=_state_at), state)

    # -- statistics ----------------------------------------------------------------------------

    def mark(self, depth: int) -> Stats:
        """Return the statistics of accesses that end at `depth`, in (start, end]."""
        at = self.mark_at
        if at[-1] == depth:
            return self.marks[-1]
        i = bisect_left(at, depth)
        if at[i] != depth:
            at.insert(i, depth)
            self.marks.insert(i, Stats(self.marks[i].created))
        return self.marks[i]

    def add_mark(self, stats: Stats) -> None:
        """Append the mark of pages just appended."""
        self.mark_at.append(self.end)
        self.marks.append(stats)

    def tail_stats(self, depth: int) -> Stats:
        """Return the statistics of page depth - 1; not to be changed by the caller."""
        at, marks = self.mark_at, self.marks
        beyond = self.beyond
        last = marks[-1]
        if (len(at) == 1 or at[-2] < depth) and beyond.within(last):
            return last
        i = bisect_left(at, depth)
        total = marks[i].copy()
        for stats in marks[i + 1 :]:
            total.absorb(stats)
        total.absorb(beyond)
        return total

    def hits(self, depth: int) -> int:
        """Return the hits of page depth - 1."""
        return sum(m.hits for m in self.marks[bisect_left(self.mark_at, depth) :]) + self.beyond.hits

    def refs(self, depth: int) -> int:
        """Return how many sessions refer to page depth - 1."""
        if not self.covers:
            return 0
        if self.mark_at[-1] == depth:
            return self.marks[-1].refs
        return sum(m.refs for m in self.marks[bisect_left(self.mark_at, depth) :])

    def first_colder(self, hits: int) -> int:
        """Return the first page with fewer than `hits` hits, or `end`."""
        at, total, found = self.mark_at, self.beyond.hits, self.end
        for i in range(len(at) - 1, -1, -1):
            total += self.marks[i].hits
            if total < hits:
                found = at[i - 1] if i else self.start
        return found

    def run_start(self, depth: int) -> int:
        """Return the first page whose statistics equal those of page depth - 1."""
        i = bisect_left(self.mark_at, depth)
        return self.mark_at[i - 1] if i else self.start

    def cut_marks(self, depth: int) -> None:
        """Fold the marks beyond `depth`, and what went beyond the node, into the mark at `depth`."""
        self.trimmed = True
        self.mark(depth).absorb(self.beyond)
        i = bisect_left(self.mark_at, depth)
        for stats in self.marks[i + 1 :]:
            self.marks[i].absorb(stats)
        del self.mark_at[i + 1 :], self.marks[i + 1 :]
        self.beyond = Stats()

    def report(self) -> None:
        """Tell the parent how recently this subtree was used; hits it knows already."""
        parent = self.parent
        if parent is not None and parent.parent is not None:
            total = self.tail_stats(self.start + 1)
            parent.beyond.raise_to(total.last, total.priority, total.reach)

    # -- sessions ------------------------------------------------------------------------------

    def clamp(self, cover: Cover) -> None:
        """Take note of what a session has lost of this node: pages that were trimmed off."""
        if cover.depth > self.end:
            cover.depth = self.end
            cover.low = min(cover.low, self.end)
            cover.state = False

    def clamp_covers(self) -> None:
        """Take note of what all sessions have lost."""
        for cover in self.covers.values():
            self.clamp(cover)
        for boundary in [b for b in self.state_refs if b > self.end]:
            del self.state_refs[boundary]
        self.trimmed = False

    def _split_covers(self, upper: Node, at: int) -> None:
        self.clamp_covers()
        for session, cover in list(self.covers.items()):
            if cover.depth <= at:
                upper.covers[session] = self.covers.pop(session)
                del session.ends[self]
                session.ends[upper] = None
            else:
                upper.covers[session] = Cover(at, 1)
        upper.state_refs = {b: n for b, n in self.state_refs.items() if b <= at}
        self.state_refs = {b: n for b, n in self.state_refs.items() if b > at}

    def _absorb_covers(self, upper: Node) -> None:
        upper.clamp_covers()
        upper.marks[-1].refs -= self.refs(self.start + 1)
        for session, cover in upper.covers.items():
            if session not in self.covers:
                self.covers[session] = cover
                del session.ends[upper]
                session.ends[self] = None
        self.state_refs.update(upper.state_refs)

    # -- structure -----------------------------------------------------------------------------

    def split_into(self, upper: Node, at: int, gone: Callable[[Run], None]) -> None:
        """Give pages [start, at) to the empty node `upper`. Links, leases and pins are the caller's."""
        k = at - self.start
        page = len(self.tokens) // (self.end - self.start)
        upper.end = at
        if self.swa is not None and upper.swa is not None:
            self.swa.split_into(upper.swa, at, gone)
        upper.tokens, self.tokens = self.tokens, self.tokens[k * page :]
        del upper.tokens[k * page :]
        upper.device, self.device = self.device, self.device[k:]
        del upper.device[k:]
        if self.host is not None:
            upper.host, self.host = self.host[:k], self.host[k:]
            upper.host_count = k - upper.host.count(NO_SLOT)
            self.host_count -= upper.host_count
        if self.flags is not None:
            upper.flags, self.flags = self.flags[:k], self.flags[k:]
        upper.hashes, self.hashes = self.hashes[:k], self.hashes[k:]
        i = bisect_right(self.states, at, key=_state_at)
        upper.states, self.states = self.states[:i], self.states[i:]
        for state in upper.states:
            state.node = upper
        self.mark(at)
        i = bisect_right(self.mark_at, at)
        upper.mark_at, self.mark_at = self.mark_at[:i], self.mark_at[i:]
        upper.marks, self.marks = self.marks[:i], self.marks[i:]
        for stats in self.marks:
            upper.beyond.absorb(stats)
        upper.marks[-1].refs += upper.beyond.refs
        upper.beyond.refs = 0
        upper.beyond.absorb(self.beyond)
        if self.covers:
            self._split_covers(upper, at)
        self.start = at

    def absorb(self, upper: Node) -> None:
        """Take over the pages of `upper`, whose only child this is. Links, leases and pins: the caller."""
        rest = upper.beyond
        rest.hits -= self.hits(self.start + 1)
        upper.marks[-1].absorb(rest)
        if upper.covers:
            self._absorb_covers(upper)
        if self.swa is not None and upper.swa is not None:
            self.swa.absorb(upper.swa)
        if self.host is not None or upper.host is not None:
            self.host = upper.make_host() + self.make_host()
            self.host_count += upper.host_count
        if self.flags is not None or upper.flags is not None:
            self.flags = upper.make_flags() + self.make_flags()
        if len(upper.hashes) == upper.end - upper.start:
            self.hashes = upper.hashes + self.hashes
        else:
            self.hashes = upper.hashes
        upper.tokens += self.tokens
        upper.device += self.device
        self.tokens, self.device = upper.tokens, upper.device
        for state in upper.states:
            state.node = self
        self.states = upper.states + self.states
        self.mark_at = upper.mark_at + self.mark_at
        self.marks = upper.marks + self.marks
        self.start = upper.start


def _state_at(state: State) -> int:
    return state.at
