"""HiCache: the façade an engine talks to, and the only owner of the tree.

One per engine rank, used from the scheduler's thread only; it never blocks on I/O. The tree and the
policies decide, the executor performs, this module puts their decisions into effect.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.cache.jobs import Jobs
from hicache.cache.pools import Copies, PagePools
from hicache.cache.prefetch import Prefetcher
from hicache.cache.stats import CacheStats
from hicache.cache.writing import WriteDown
from hicache.clock import Clock
from hicache.config.cache import CacheConfig, StateCheckpoints
from hicache.errors import ConfigError, InvariantViolation
from hicache.request import Capture, Request
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobKind, Move
from hicache.tree.base import Lease, Match, PathSlots, TreeCore, TreeRules
from hicache.types import NO_SLOT, CachedTokens, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


@dataclass(slots=True)
class _Running:
    """What the cache keeps of an admitted request besides its page tables."""

    total_pages: int  # the most FULL pages it may ever need
    owned: dict[Component, set[int]] = field(default_factory=dict)  # private slots, not in the tree
    states: list[tuple[int, int]] = field(default_factory=list)  # captured (boundary, slot), to be committed
    host_lease: Lease | None = None  # source of a load in flight
    moves: list[Move] = field(default_factory=list)  # of the load in flight
    spoiled: bool = False  # its load failed: nothing it has may reach the tree
    leaving: Lease | None = None  # ended while loading: the device lease, released when the load ends


class HiCache:
    """Tiered cache of one rank.

    Life of a request: enqueue, ready?, admit, then repeatedly extend, (compute), commit; at the end
    finish or abort. tick() between steps lets transfers take effect.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tree: TreeCore,
        executor: Executor,
        *,
        device: Mapping[Component, int],
        host: Mapping[Component, int],
        config: CacheConfig,
        clock: Clock,
    ) -> None:
        """`device` and `host` are capacities in pages (MAMBA: states); an empty `host` means no L2."""
        config.check_page_size(spec.page_size)
        self.spec, self.config, self.clock = spec, config, clock
        self.tree, self.executor = tree, executor
        self.rules = TreeRules(spec.page_size, spec.kinds, spec.window_pages)
        self.stats = CacheStats()
        write_back = config.hicache_write_policy.value == "write_back"
        copies = Copies.LAST if write_back else Copies.KEPT
        self.pools = PagePools(tree, device, host, self.stats, copies=copies)
        self._check_capacities(device)
        self._jobs = Jobs()
        self._writing = WriteDown(tree, self.pools, executor, self._jobs, config, self.stats)
        self._prefetcher = Prefetcher(
            tree, self.rules, self.pools, executor, self._jobs, config, clock, self.stats
        )
        self._running: dict[Request, _Running] = {}
        self._leaving: list[_Running] = []  # ended while their load was in flight

    def _check_capacities(self, device: Mapping[Component, int]) -> None:
        """The oldest request must be able to run alone (law 11)."""
        needs = {FULL: 1, SWA: self._swa_need(), MAMBA: 2}
        for component in self.spec.kinds:
            if device.get(component, 0) < needs[component]:
                raise ConfigError(
                    f"L1 has {device.get(component, 0)} {component.name} pages of {self.spec.page_size} "
                    f"tokens, one request needs {needs[component]}; raise --max-total-tokens, "
                    f"--swa-full-tokens-ratio or --max-mamba-cache-size, or lower --chunked-prefill-size"
                )

    def _swa_need(self) -> int:
        step = max(self.config.chunked_prefill_size, self.config.mamba_track_interval)
        return self.rules.window_pages + -(-step // self.rules.page_size) + 1

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt plus output that can run at all."""
        return self.pools.capacity(Tier.DEVICE, FULL) * self.rules.page_size

    # -- queue ---------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Take note of a queued request; starts a prefetch from L3 where that may pay."""
        request.enqueued_at = self.clock.now()
        self._prefetcher.start(request)

    def ready(self, request: Request) -> bool:
        """True if the prefetch policy allows scheduling the request now. Never blocks."""
        return self._prefetcher.ready(request)

    def next_deadline(self) -> float | None:
        """When ready() may change its answer without a transfer ending, by the clock; None if never."""
        return self._prefetcher.next_deadline()

    def withdraw(self, request: Request) -> None:
        """Forget a request that is still queued."""
        self._prefetcher.ended(request)

    # -- admission -----------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Lock the deepest reusable prefix, reserve pages for all that may come, start the load.

        On success the page tables cover [0, request.computed) and accounting is set. On refusal
        nothing has changed. If nothing else runs, the hit shrinks until the request fits.
        """
        if not request.load_failed and self._admit_up_to(request, Tier.HOST):
            return True
        if self._admit_up_to(request, Tier.DEVICE):
            return True
        if self._running:
            return False
        if self._prefetcher.release_leases():
            return self.admit(request)
        return self._admit_up_to(request, None)

    def _admit_up_to(self, request: Request, deepest: Tier | None) -> bool:
        """Admit with what L1, or L1 and L2, have of the prompt; None admits without any hit."""
        found = self.tree.match(request.scope, request.tokens, len(request.tokens) - 1)
        boundary = {Tier.HOST: found.host, Tier.DEVICE: found.device, None: 0}[deepest]
        path = self.tree.slots(found, boundary)
        lease = self.tree.lock(found, boundary, Tier.DEVICE)
        host_lease = self.tree.lock(found, boundary, Tier.HOST)
        # Once loaded, pages [len(full_device), boundary) and the holes of the window are private.
        holes = [i for i, s in enumerate(path.swa_device) if s == NO_SLOT]
        load = {FULL: len(path.full_host)}
        if SWA in self.spec.kinds:
            load[SWA] = len(holes)
        if MAMBA in self.spec.kinds:
            load[MAMBA] = 2  # the working state and the last page boundary's
        total = -(-(request.prompt_length + request.max_new_tokens) // self.rules.page_size)
        private = total - len(path.full_device)
        fits = self.pools.available(Tier.DEVICE, FULL) >= private + self._promised()
        taken = self.pools.allocate(Tier.DEVICE, load) if fits else None
        if taken is None:
            self.tree.release(lease)
            self.tree.release(host_lease)
            return False
        running = _Running(total, {c: set(taken[c]) for c in load})
        self._running[request] = running
        self._take_path(request, path, taken, holes)
        request.lease, request.branch = lease, found.branch
        hits = 0 if request.admissions else 1  # the same request again is no second access
        self.tree.touch(lease, self.clock.now(), priority=request.priority, hits=hits)
        request.admissions += 1
        self._account(request, found, boundary)
        self._start_load(request, running, path, taken, holes, host_lease)
        self._writing.committed(lease, request)  # a second access may be what a selective policy waits for
        return True

    def _promised(self) -> int:
        """FULL pages that running requests may still ask for."""
        return sum(r.total_pages - len(q.full) for q, r in self._running.items())

    def _take_path(
        self, request: Request, path: PathSlots, taken: dict[Component, Slots], holes: list[int]
    ) -> None:
        request.full = path.full_device + taken[FULL]
        if SWA in taken:
            window = array("i", path.swa_device)
            for i, slot in zip(holes, taken[SWA], strict=True):
                window[i] = slot
            request.swa = array("i", [NO_SLOT]) * path.window_start + window
        if MAMBA in taken:
            request.state, request.track = taken[MAMBA]
            request.track_position = -1
        request.computed = path.boundary * self.rules.page_size
        # The tree adopts what was loaded at the first commit, once every layer has been read.
        request.committed = len(path.full_device)

    def _start_load(
        self,
        request: Request,
        running: _Running,
        path: PathSlots,
        taken: dict[Component, Slots],
        holes: list[int],
        host_lease: Lease,
    ) -> None:
        moves = []
        if path.full_host:
            moves.append(Move(FULL, path.full_host, taken[FULL]))
        if holes:
            moves.append(Move(SWA, array("i", (path.swa_host[i] for i in holes)), taken[SWA]))
        if path.boundary and path.state_device != NO_SLOT:
            self.executor.copy_state(path.state_device, request.state)
        elif path.boundary and MAMBA in self.spec.kinds:
            moves.append(Move(MAMBA, array("i", [path.state_host]), array("i", [request.state])))
        if not moves:
            self.tree.release(host_lease)
            return
        running.host_lease, running.moves = host_lease, moves
        job = self._jobs.open(JobKind.LOAD, lambda done: self._loaded(done, request, running))
        request.load = self.executor.start_load(job, moves)

    def _loaded(self, done: Done, request: Request, running: _Running) -> None:
        moves, running.moves = running.moves, []
        if running.host_lease is not None:
            self.tree.release(running.host_lease)
            running.host_lease = None
        if done.failed:
            running.spoiled = True  # whoever still waits for a layer is told by the ticket
        else:
            for move in moves:
                self.stats.loaded_pages[move.component.name.lower()] += len(move.sources)
        if running.leaving is not None:
            self._leaving.remove(running)
            self._release(running, running.leaving)
        elif not done.failed:
            request.load = None

    def _account(self, request: Request, found: Match, boundary: int) -> None:
        """Tokens by the tier that made them reusable: the device's own boundary, the host's, storage."""
        page = self.rules.page_size
        fetched = self._prefetcher.ended(request)
        device = min(found.device, boundary)
        storage = min(boundary - device, max(0, min(boundary, fetched.stop) - fetched.start))
        cached = request.cached
        if cached.computed:
            return  # admitted again after a retraction: counted once
        cached.device, cached.storage = device * page, storage * page
        cached.host = (boundary - device - storage) * page
        cached.computed = len(request.tokens) - boundary * page
        self.stats.prompt_tokens += len(request.tokens)
        self.stats.device_tokens += cached.device
        self.stats.host_tokens += cached.host
        self.stats.storage_tokens += cached.storage

    # -- running -------------------------------------------------------------------------------

    def extend(self, request: Request, end: int) -> bool:
        """Give the request pages for tokens [0, end) and capture slots for the step up to `end`.

        False if L1 cannot give the pages now: nothing has changed, let transfers end and try again.
        """
        running = self._running[request]
        more = -(-end // self.rules.page_size) - len(request.full)
        if more > 0:
            wanted = {FULL: more, SWA: more} if SWA in self.spec.kinds else {FULL: more}
            taken = self.pools.allocate(Tier.DEVICE, wanted)
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

    def _plan_captures(self, request: Request, running: _Running, end: int) -> None:
        """Choose the boundaries whose MAMBA state the coming step must leave behind."""
        page, start = self.rules.page_size, request.computed
        last = end // page * page
        request.captures = []
        if last <= start:
            return
        request.captures.append(Capture(last, request.track))
        request.track_position = last
        if end - start == 1:
            return  # decode: only the rolling capture
        wanted = [b * page for b in request.branch] + [(request.prompt_length - 1) // page * page]
        if self.config.mamba_prefill_checkpoints is StateCheckpoints.INTERVAL:
            step = self.config.mamba_track_interval
            wanted += range((start // step + 1) * step, end, step)
        for position in dict.fromkeys(wanted):  # dearest first: a full pool drops the rest
            if not start < position <= end or position == last:
                continue
            taken = self.pools.allocate(Tier.DEVICE, {MAMBA: 1})
            if taken is None:
                break
            slot = taken[MAMBA][0]
            running.owned[MAMBA].add(slot)
            running.states.append((position // page, slot))
            request.captures.append(Capture(position, slot))
        request.captures.sort(key=lambda c: c.position)

    def computed(self, request: Request, end: int) -> None:
        """The runner has computed tokens [0, end). Commits where a boundary is to be kept."""
        request.computed = end
        page = self.rules.page_size
        prefill = end < len(request.tokens) or len(request.tokens) == request.prompt_length
        if prefill or (end // page - request.committed) * page >= self.config.mamba_track_interval:
            self._commit(request)

    def _commit(self, request: Request) -> None:
        """Move whole computed pages into the tree, and the lease with them; then write down."""
        running, end = self._running[request], request.computed // self.rules.page_size
        start = request.committed
        if end <= start or request.lease is None:
            return
        if request.track != NO_SLOT and request.track_position == end * self.rules.page_size:
            spare = self.pools.allocate(Tier.DEVICE, {MAMBA: 1})
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
        inserted = self.tree.insert(
            request.lease,
            request.tokens,
            start,
            end,
            full=offered[FULL],
            swa=offered[SWA] if SWA in self.spec.kinds else None,
            states=states,
            now=self.clock.now(),
            priority=request.priority,
        )
        for component in self.spec.kinds:
            running.owned[component].difference_update(offered[component])
            self.pools.free(Tier.DEVICE, component, inserted.duplicates.get(component, array("i")))
        request.full[start:end] = inserted.full
        if SWA in self.spec.kinds:
            request.swa[start:end] = inserted.swa
            self._drop_old_window(request, running, end)
        request.committed = end
        self._writing.committed(request.lease, request)

    def _drop_old_window(self, request: Request, running: _Running, end: int) -> None:
        """Forget SWA pages that no token from `end` on looks at; the private ones among them are freed.

        The tree's own are no longer leased there, and may be anybody's from now on.
        """
        owned = running.owned[SWA]
        first = max(0, end - self.rules.window_pages)
        # Pages loaded for the admission window may be private; those from `committed` on were offered.
        old = array("i", (s for s in request.swa[: min(first, request.committed)] if s in owned))
        owned.difference_update(old)
        self.pools.free(Tier.DEVICE, SWA, old)
        request.swa[:first] = array("i", [NO_SLOT]) * first

    def finish(self, request: Request) -> None:
        """Commit what is whole and let go of the rest."""
        self._commit(request)
        self._end(request)

    def abort(self, request: Request) -> None:
        """Let go of a running request at any time; whole computed pages stay in the tree."""
        running = self._running[request]
        if not running.moves and not running.spoiled:
            self._commit(request)
        self._end(request)

    def retract(self, request: Request) -> None:
        """Take a running request's pages back so that others can go on; it may be admitted again."""
        self.stats.retracted += 1
        self.abort(request)

    def restart(self, request: Request) -> None:
        """Take back a running request whose load has failed; it may be admitted again, and then computes.

        Nothing it has reaches the tree, and its hit is not counted.
        """
        self.stats.failed_loads += 1
        cached, request.cached = request.cached, CachedTokens()
        self.stats.prompt_tokens -= cached.cached + cached.computed
        self.stats.device_tokens -= cached.device
        self.stats.host_tokens -= cached.host
        self.stats.storage_tokens -= cached.storage
        request.load_failed = True
        self._end(request)

    def _end(self, request: Request) -> None:
        running, lease = self._running.pop(request), request.lease
        if lease is None:
            raise InvariantViolation(f"{request.rid} is running without a lease")
        if running.moves:
            running.leaving = lease  # the copy thread still writes into its pages
            self._leaving.append(running)
        else:
            self._release(running, lease)
        request.lease, request.load = None, None
        request.full, request.swa = array("i"), array("i")
        request.state = request.track = NO_SLOT
        request.captures, request.committed = [], 0
        request.computed = 0

    def _release(self, running: _Running, lease: Lease) -> None:
        for component, slots in running.owned.items():
            self.pools.free(Tier.DEVICE, component, array("i", slots))
        self.tree.release(lease)
        self._writing.let_go()

    # -- time ----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Let ended transfers take effect and start background writes; returns whether any ended."""
        ended = self.executor.poll()
        for done in ended:
            self._jobs.close(done)
        self._writing.follow_storage()
        if ended:
            self._writing.catch_up()
        self._writing.keep_reserve()
        return bool(ended)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until no transfer is in flight; returns False if the time is up before."""
        until = self.clock.now() + timeout_s
        while True:
            self.tick()
            if not self._jobs:
                return True
            if not self.executor.wait(until - self.clock.now()):
                return False

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    @property
    def copying(self) -> int:
        """Copies between host and device in flight. They end soon, and may free pages; storage may hang."""
        return self._jobs.count(JobKind.LOAD) + self._jobs.count(JobKind.WRITE)

    def release_queued(self) -> int:
        """Let go of what is kept for queued requests, so that running ones can go on; how much that was."""
        return self._prefetcher.release_leases()

    # -- control -------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Drop L1 and L2; L3 stays. Returns False if something in use had to be kept."""
        self._prefetcher.release_leases()
        self.pools.free_all(self.tree.drop_all())
        return all(self.tree.resident(tier, c) == 0 for tier, c in self.pools.kinds)

    def flush_dirty(self, timeout_s: float) -> int:
        """Write everything down to storage; returns the FULL pages it still lacks when the time is up.

        Ends early where rounds bring nothing more, as when the host is too small to pass all through.
        """
        until = self.clock.now() + timeout_s
        fewest, stale = self._writing.lacking(), 0
        while stale < 3 and self.executor.has_storage and self._writing.flush():
            if not self.settle(until - self.clock.now()):
                break
            lacking = self._writing.lacking()
            stale = 0 if lacking < fewest else stale + 1
            fewest = min(fewest, lacking)
        return self._writing.lacking()

    def check_integrity(self) -> None:
        """Check the tree's laws and that every slot of every pool has exactly one owner (law 3)."""
        self.tree.check_integrity()
        host_held = [self._writing.held(), self._prefetcher.held()]
        for tier, component in self.pools.kinds:
            pool = self.pools[tier, component]
            holders = [self.tree.owned(tier, component)]
            if tier is Tier.HOST:
                holders += [held.get(component, array("i")) for held in host_held]
            else:
                everyone = [*self._running.values(), *self._leaving]
                holders += [array("i", r.owned.get(component, ())) for r in everyone]
            slots = [s for held in holders for s in held]
            if len(set(slots)) != len(slots) or len(slots) != pool.num_taken:
                raise InvariantViolation(
                    f"{tier.name} {component.name}: {len(slots)} slots owned, {len(set(slots))} distinct, "
                    f"{pool.num_taken} are taken of {pool.capacity}"
                )
            for slot in slots:
                if not pool.is_taken(slot):
                    raise InvariantViolation(f"{tier.name} {component.name}: slot {slot} is owned but free")

    def remembered(self) -> dict[str, int]:
        """Entries kept for requests and transfers, by what they are; all 0 when nothing is going on."""
        kept = {"running": len(self._running), "leaving": len(self._leaving), "jobs": len(self._jobs)}
        return {**kept, **self._prefetcher.remembered(), **self._writing.remembered()}

    def close(self) -> None:
        """Stop the executor's threads."""
        self.executor.close()
