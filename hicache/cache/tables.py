"""Page tables of running requests: the slots they hold privately, and how those become the tree's.

Decides which MAMBA boundaries a step leaves behind; the cache decides when to commit, and what then.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.cache.accounts import Accounts
from hicache.cache.ownership import Private
from hicache.cache.places import Places
from hicache.cache.pools import PagePools, Use
from hicache.request import Capture, Request
from hicache.transfer.base import Move
from hicache.tree.base import Lease, PathSlots, TreeCore, TreeRules
from hicache.tree.islands import frontier
from hicache.tree.window import HOLE
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


@dataclass(slots=True)
class Running:
    """What the cache keeps of an admitted request besides its page tables."""

    total_pages: int  # the most FULL pages it may ever need
    private: Private  # slots that are not the tree's
    states: list[tuple[int, int]] = field(default_factory=list)  # captured (boundary, slot), to be committed
    host_lease: Lease | None = None  # source of a load in flight
    moves: list[Move] = field(default_factory=list)  # of the load in flight
    loading: dict[Component, Sequence[int]] = field(default_factory=dict)  # positions of its pages
    spoiled: bool = False  # its load failed: nothing it has may reach the tree
    given_back: int = 0  # SWA pages before this are no longer in its table
    leaving: Lease | None = None  # ended while loading: the device lease, released when the load ends


class PageTables:
    """The tables of all running requests of one cache. Owned by the cache's thread.

    Invariant: a slot in a table is the tree's, under the request's lease, or in `Running.private`. The
    table names it for the runner; the other one owns it.
    """

    def __init__(
        self,
        tree: TreeCore,
        pools: PagePools,
        rules: TreeRules,
        places: Places,
        accounts: Accounts,
    ) -> None:
        self._tree, self._pools, self._rules = tree, pools, rules
        self._places, self._accounts = places, accounts

    def take_path(
        self,
        request: Request,
        private: Private,
        path: PathSlots,
        taken: dict[Component, Slots],
        holes: list[int],
    ) -> None:
        """Begin with a path of the tree: its leased slots, and `taken` where the host has to fill in.

        `holes` are the window's pages that the device lacks. Afterwards the tables cover [0, computed).
        """
        request.full = path.full_device + taken[FULL]
        private.put(FULL, range(len(path.full_device), path.boundary), taken[FULL])
        if SWA in taken:
            private.put(SWA, (path.window_start + i for i in holes), taken[SWA])
            window = array("i", path.swa_device)
            for i, slot in zip(holes, taken[SWA], strict=True):
                window[i] = slot
            request.swa = array("i", [NO_SLOT]) * path.window_start + window
        if MAMBA in taken:
            private.put_states(taken[MAMBA])
            request.state, request.track = taken[MAMBA]
            request.track_position = -1
        request.computed = path.boundary * self._rules.page_size
        # The tree adopts what was loaded at the first commit, once every layer has been read.
        request.committed = len(path.full_device)

    def extend(self, request: Request, running: Running, end: int, *, decode: bool) -> bool:
        """Give the request pages for tokens [0, end) and capture slots for the step up to `end`.

        False if L1 cannot give the pages now: nothing has changed, let transfers end and try again.
        """
        first = len(request.full)
        more = -(-end // self._rules.page_size) - first
        if more > 0:
            wanted = {FULL: more, SWA: more} if SWA in self._rules.kinds else {FULL: more}
            taken = self._pools.allocate(Tier.DEVICE, wanted, use=Use.COMPUTE)
            if taken is None:
                return False
            for component, slots in taken.items():
                table = request.full if component is FULL else request.swa
                table += slots
                running.private.put(component, range(first, first + more), slots)
        if request.state != NO_SLOT:
            self._plan_captures(request, running, end, decode=decode)
        return True

    def _plan_captures(self, request: Request, running: Running, end: int, *, decode: bool) -> None:
        """Choose the boundaries whose MAMBA state the coming step must leave behind."""
        page, start = self._rules.page_size, request.computed
        last = end // page * page
        request.captures = []
        if last <= start:
            return
        request.captures.append(Capture(last, request.track))
        request.track_position = last
        if decode:
            return  # only the rolling capture
        for place in self._places.of_prefill(request, start // page, last // page):
            taken = self._pools.allocate(Tier.DEVICE, {MAMBA: 1})
            if taken is None:
                break  # a full pool drops the cheapest
            slot = taken[MAMBA][0]
            running.private.put_states(taken[MAMBA])
            running.states.append((place, slot))
            request.captures.append(Capture(place * page, slot))
        request.captures.sort(key=lambda c: c.position)

    def commit(self, request: Request, running: Running, now: float) -> bool:
        """Move whole computed pages into the tree, and the lease with them; False if there are none.

        `now` is the time of this access, in the clock's seconds.
        """
        end = request.computed // self._rules.page_size
        start = request.committed
        if end <= start or request.lease is None:
            return False
        if request.track != NO_SLOT and request.track_position == end * self._rules.page_size:
            spare = self._pools.allocate(Tier.DEVICE, {MAMBA: 1})
            if spare is not None:
                running.states.append((end, request.track))
                request.track = spare[MAMBA][0]
                request.track_position = -1
                running.private.put_states(spare[MAMBA])
        states = sorted(s for s in running.states if s[0] <= end)
        running.states = [s for s in running.states if s[0] > end]
        private = running.private
        full = private.take(FULL, start, end)
        swa = private.take(SWA, start, end) if SWA in self._rules.kinds else None
        if states:
            private.take_states(slot for _, slot in states)
        inserted = self._tree.insert(
            request.lease,
            request.tokens,
            start,
            end,
            full=full,
            swa=swa,
            states=states,
            places=self._places.of_commit(request, start, end, (at for at, _ in states)),
            now=now,
            priority=request.priority,
        )
        for component, slots in inserted.duplicates.items():
            if component is SWA and self._places.islands:
                self._pools.retire(component, slots)
            else:
                self._pools.free(Tier.DEVICE, component, slots)
        request.full[start:end] = inserted.full
        if SWA in self._rules.kinds:
            request.swa[start:end] = inserted.swa
            self._leave_windows(request, running, end, end - self._rules.window_pages)
        request.committed = end
        self._accounts.committed(request, start, end, [at for at, _ in states])
        return True

    def give_back(self, request: Request, running: Running) -> None:
        """Let a request that decodes go of SWA that no later token looks at, in the tree and beside it.

        What the next island will be made of stays.
        """
        reached = request.computed // self._rules.page_size
        first = reached - self._rules.window_pages
        if SWA not in self._rules.kinds or first <= running.given_back:
            return
        if request.lease is not None and first > request.lease.swa_start:
            self._tree.hold_windows(request.lease, first)
        self._leave_windows(request, running, frontier(reached, self._rules), first)

    def _leave_windows(self, request: Request, running: Running, end: int, first: int) -> None:
        """Give private SWA pages before `end` back, and forget all pages before `first`, if that is later.

        The tree's own are no longer leased there, and may be anybody's from now on.
        """
        old = running.private.take_before(SWA, min(end, max(0, first)))
        if self._places.islands:
            self._pools.retire(SWA, old)
        else:
            self._pools.free(Tier.DEVICE, SWA, old)
        if first > running.given_back:
            request.swa[running.given_back : first] = HOLE * (first - running.given_back)
            running.given_back = first

    def free(self, running: Running) -> None:
        """Give back every private slot."""
        for component, slots in running.private.drain().items():
            self._pools.free(Tier.DEVICE, component, slots)


def clear_tables(request: Request) -> None:
    """Make a request hold nothing; its slots have been freed, or will be by whoever keeps its Running."""
    request.lease, request.load = None, None
    request.full, request.swa = array("i"), array("i")
    request.state = request.track = NO_SLOT
    request.captures, request.committed = [], 0
    request.computed = 0
