"""Page tables of running requests: the slots they hold privately, and how those become the tree's.

Decides which MAMBA boundaries a step leaves behind; the cache decides when to commit, and what then.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hicache.cache.accounts import Accounts
from hicache.cache.pools import PagePools
from hicache.clock import Clock
from hicache.config.cache import CacheConfig, StateCheckpoints
from hicache.request import Capture, Request
from hicache.transfer.base import Move
from hicache.tree.base import Lease, PathSlots, TreeCore, TreeRules
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


@dataclass(slots=True)
class Running:
    """What the cache keeps of an admitted request besides its page tables."""

    total_pages: int  # the most FULL pages it may ever need
    owned: dict[Component, set[int]] = field(default_factory=dict)  # private slots, not in the tree
    states: list[tuple[int, int]] = field(default_factory=list)  # captured (boundary, slot), to be committed
    host_lease: Lease | None = None  # source of a load in flight
    moves: list[Move] = field(default_factory=list)  # of the load in flight
    spoiled: bool = False  # its load failed: nothing it has may reach the tree
    leaving: Lease | None = None  # ended while loading: the device lease, released when the load ends


class PageTables:
    """The tables of all running requests of one cache. Owned by the cache's thread.

    Invariant: a slot in a table is the tree's, under the request's lease, or in `Running.owned`.
    """

    def __init__(
        self,
        tree: TreeCore,
        pools: PagePools,
        rules: TreeRules,
        config: CacheConfig,
        clock: Clock,
        accounts: Accounts,
    ) -> None:
        self._tree, self._pools, self._rules = tree, pools, rules
        self._config, self._clock, self._accounts = config, clock, accounts

    def take_path(
        self, request: Request, path: PathSlots, taken: dict[Component, Slots], holes: list[int]
    ) -> None:
        """Begin with a path of the tree: its leased slots, and `taken` where the host has to fill in.

        `holes` are the window's pages that the device lacks. Afterwards the tables cover [0, computed).
        """
        request.full = path.full_device + taken[FULL]
        if SWA in taken:
            window = array("i", path.swa_device)
            for i, slot in zip(holes, taken[SWA], strict=True):
                window[i] = slot
            request.swa = array("i", [NO_SLOT]) * path.window_start + window
        if MAMBA in taken:
            request.state, request.track = taken[MAMBA]
            request.track_position = -1
        request.computed = path.boundary * self._rules.page_size
        # The tree adopts what was loaded at the first commit, once every layer has been read.
        request.committed = len(path.full_device)

    def extend(self, request: Request, running: Running, end: int) -> bool:
        """Give the request pages for tokens [0, end) and capture slots for the step up to `end`.

        False if L1 cannot give the pages now: nothing has changed, let transfers end and try again.
        """
        more = -(-end // self._rules.page_size) - len(request.full)
        if more > 0:
            wanted = {FULL: more, SWA: more} if SWA in self._rules.kinds else {FULL: more}
            taken = self._pools.allocate(Tier.DEVICE, wanted)
            if taken is None:
                return False
            request.full += taken[FULL]
            running.owned[FULL].update(taken[FULL])
            if SWA in taken:
                request.swa += taken[SWA]
                running.owned[SWA].update(taken[SWA])
        if request.state != NO_SLOT:
            self._plan_captures(request, running, end)
        return True

    def _plan_captures(self, request: Request, running: Running, end: int) -> None:
        """Choose the boundaries whose MAMBA state the coming step must leave behind."""
        page, start = self._rules.page_size, request.computed
        last = end // page * page
        request.captures = []
        if last <= start:
            return
        request.captures.append(Capture(last, request.track))
        request.track_position = last
        if end - start == 1:
            return  # decode: only the rolling capture
        grid = page * self._rules.align_pages
        wanted = [b * page for b in request.branch] + [(request.prompt_length - 1) // grid * grid]
        if self._config.mamba_prefill_checkpoints is StateCheckpoints.INTERVAL:
            step = self._config.mamba_track_interval
            wanted += range((start // step + 1) * step, end, step)
        for position in dict.fromkeys(wanted):  # dearest first: a full pool drops the rest
            if not start < position <= end or position == last:
                continue
            taken = self._pools.allocate(Tier.DEVICE, {MAMBA: 1})
            if taken is None:
                break
            slot = taken[MAMBA][0]
            running.owned[MAMBA].add(slot)
            running.states.append((position // page, slot))
            request.captures.append(Capture(position, slot))
        request.captures.sort(key=lambda c: c.position)

    def commit(self, request: Request, running: Running) -> bool:
        """Move whole computed pages into the tree, and the lease with them; False if there are none."""
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
                running.owned[MAMBA].add(request.track)
        states = sorted(s for s in running.states if s[0] <= end)
        running.states = [s for s in running.states if s[0] > end]
        offered = {
            FULL: request.full[start:end],
            SWA: request.swa[start:end],
            MAMBA: array("i", (slot for _, slot in states)),
        }
        inserted = self._tree.insert(
            request.lease,
            request.tokens,
            start,
            end,
            full=offered[FULL],
            swa=offered[SWA] if SWA in self._rules.kinds else None,
            states=states,
            now=self._clock.now(),
            priority=request.priority,
        )
        for component in self._rules.kinds:
            running.owned[component].difference_update(offered[component])
            self._pools.free(Tier.DEVICE, component, inserted.duplicates.get(component, array("i")))
        request.full[start:end] = inserted.full
        if SWA in self._rules.kinds:
            request.swa[start:end] = inserted.swa
            self._drop_old_window(request, running, end)
        request.committed = end
        self._accounts.committed(request, start, end, [at for at, _ in states])
        return True

    def _drop_old_window(self, request: Request, running: Running, end: int) -> None:
        """Forget SWA pages that no token from `end` on looks at; the private ones among them are freed.

        The tree's own are no longer leased there, and may be anybody's from now on.
        """
        owned = running.owned[SWA]
        first = max(0, end - self._rules.window_pages)
        # Pages loaded for the admission window may be private; those from `committed` on were offered.
        old = array("i", (s for s in request.swa[: min(first, request.committed)] if s in owned))
        owned.difference_update(old)
        self._pools.free(Tier.DEVICE, SWA, old)
        request.swa[:first] = array("i", [NO_SLOT]) * first

    def free(self, running: Running) -> None:
        """Give back every private slot."""
        for component, slots in running.owned.items():
            self._pools.free(Tier.DEVICE, component, array("i", slots))


def clear_tables(request: Request) -> None:
    """Make a request hold nothing; its slots have been freed, or will be by whoever keeps its Running."""
    request.lease, request.load = None, None
    request.full, request.swa = array("i"), array("i")
    request.state = request.track = NO_SLOT
    request.captures, request.committed = [], 0
    request.computed = 0
