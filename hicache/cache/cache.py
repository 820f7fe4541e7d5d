"""HiCache: the façade an engine talks to, and the only owner of the tree.

One per engine rank, used from the scheduler's thread only; it never blocks on I/O. The tree and the
policies decide, the executor performs, this module puts their decisions into effect.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from hicache.cache.accounts import Accounts
from hicache.cache.events import EventLog, Sink
from hicache.cache.fetch_plan import Outlook
from hicache.cache.jobs import Jobs, StorageAge
from hicache.cache.ownership import Private
from hicache.cache.places import Places
from hicache.cache.pools import Copies, PagePools
from hicache.cache.prefetch import Prefetcher
from hicache.cache.quarantine import Quarantine
from hicache.cache.sessions import Sessions
from hicache.cache.staging_only import StagingOnly
from hicache.cache.stats import CacheStats
from hicache.cache.tables import PageTables, Running, clear_tables
from hicache.cache.weighing import Weighing
from hicache.cache.writing import WriteDown
from hicache.clock import Clock
from hicache.config.cache import CacheConfig, HostMemoryMode
from hicache.errors import ConfigError, InvariantViolation
from hicache.request import Request
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobKind, Move
from hicache.tree.base import Lease, PathSlots, TreeCore, TreeRules
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


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
        self.rules = TreeRules(spec.page_size, spec.kinds, spec.window_pages, spec.align_pages)
        self.stats = CacheStats()
        write_back = config.hicache_write_policy.value == "write_back"
        copies = Copies.LAST if write_back else Copies.KEPT
        quarantine = Quarantine(executor.fence, executor.passed)
        self.pools = PagePools(tree, device, host, self.stats, copies=copies, quarantine=quarantine)
        self._places = Places(spec, config)
        self._accounts = Accounts(self.rules, self.stats, ceiling_pages=config.ceiling_pages)
        self._tables = PageTables(tree, self.pools, self.rules, self._places, self._accounts)
        self._check_islands()
        self._check_capacities(device)
        self._check_mirrors(host)
        self._jobs = Jobs()
        self._age = StorageAge(executor)
        self.weighing = Weighing(spec, config, clock)
        self._writing = WriteDown(tree, self.pools, executor, self._jobs, config, self.stats, spec, self._age)
        self._prefetcher = Prefetcher(
            *(tree, self.rules, self.pools, executor, self._jobs, config, clock, self.stats),
            *(spec, self._age, self.weighing),
        )
        staging = bool(host) and config.hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY
        self._staging_only = StagingOnly(tree, self.pools, self.stats) if staging else None
        self.sessions = Sessions(tree, executor, config, clock, self.stats)
        self._running: dict[Request, Running] = {}
        self._leaving: list[Running] = []  # ended while their load was in flight
        self._failing: set[Request] = set()  # to be admitted again once it is known what could be loaded
        self._step_time = clock.now()  # of all accesses of a step: how long it took decides nothing
        self._events: EventLog | None = None

    def _check_islands(self) -> None:
        if self.spec.islands and not self.tree.keeps_islands:
            raise ConfigError(
                "--enable-swa-islands: this tree core keeps all windows or none; use another core"
            )
        if self.config.swa_checkpoint_interval and not self.spec.islands:
            raise ConfigError(
                f"--swa-checkpoint-interval {self.config.swa_checkpoint_interval} has no effect without "
                "--enable-swa-islands, which needs a model with SWA"
            )

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

    def _check_mirrors(self, host: Mapping[Component, int]) -> None:
        """A family moves to the host whole or not at all (law 4)."""
        missing = [c.name for c in self.spec.kinds if host and host.get(c, 0) < 1]
        if missing:
            raise ConfigError(
                f"L2 has no page for {', '.join(missing)}: what it holds besides could never be resumed; "
                "raise --hicache-ratio or --hicache-size, or serve without --enable-hierarchical-cache"
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
        self.sessions.enter(request)
        self._prefetcher.start(request)

    def ready(self, request: Request) -> bool:
        """True if the prefetch policy allows scheduling the request now. Never blocks."""
        return self._prefetcher.ready(request)

    def next_deadline(self) -> float | None:
        """When ready() may change its answer without a transfer ending, by the clock; None if never."""
        return self._prefetcher.next_deadline()

    def withdraw(self, request: Request) -> None:
        """Forget a request that is still queued."""
        self._accounts.withdrawn(self._prefetcher.ended(request))
        self.sessions.leave(request)

    # -- admission -----------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Lock the deepest reusable prefix, reserve pages for all that may come, start the load.

        On success the page tables cover [0, request.computed) and accounting is set. On refusal
        nothing has changed. If nothing else runs, the hit shrinks until the request fits.
        """
        if request in self._failing:
            return False  # soon: how much of its hit could be loaded is not known yet
        if request.host_limit != 0 and self._admit_up_to(request, Tier.HOST):
            return True
        if self._admit_up_to(request, Tier.DEVICE):
            return True
        if self._running:
            return bool(self._writing.release_stores(overdue=True)) and self.admit(request)
        if self.release_waiting():
            return self.admit(request)
        return self._admit_up_to(request, None)

    def _admit_up_to(self, request: Request, deepest: Tier | None) -> bool:
        """Admit with what L1, or L1 and L2, have of the prompt; None admits without any hit."""
        found = self.tree.match(request.scope, request.tokens, len(request.tokens) - 1)
        if deepest is Tier.HOST:
            request.too_dear = not self.weighing.host_pays(found)
            deepest = Tier.DEVICE if request.too_dear else deepest
        boundary = {Tier.HOST: found.host, Tier.DEVICE: found.device, None: 0}[deepest]
        whole = found.host
        if deepest is Tier.HOST and request.host_limit is not None:
            found = self.tree.match(request.scope, request.tokens, request.host_limit * self.rules.page_size)
            boundary = found.host
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
        running = Running(total, Private(self.spec.kinds))
        self._running[request] = running
        self._tables.take_path(request, running.private, path, taken, holes)
        request.lease, request.branch = lease, found.branch
        hits = 0 if request.admissions else 1  # the same request again is no second access
        self.tree.touch(lease, self._step_time, priority=request.priority, hits=hits)
        request.admissions += 1
        ask = self._prefetcher.ended(request)
        self._accounts.admitted(request, ask, device=found.device, hit=boundary, whole=whole)
        self._start_load(request, running, path, taken, holes, host_lease)
        self._writing.committed(lease, request)  # a second access may be what a selective policy waits for
        return True

    def _promised(self) -> int:
        """FULL pages that running requests may still ask for."""
        return sum(r.total_pages - len(q.full) for q, r in self._running.items())

    def _start_load(
        self,
        request: Request,
        running: Running,
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
        first = path.boundary - len(path.full_host)
        running.loading = {FULL: range(first, path.boundary), SWA: [path.window_start + i for i in holes]}
        running.loading[MAMBA] = [path.boundary]
        job = self._jobs.open(JobKind.LOAD, lambda done: self._loaded(done, request, running))
        request.load = self.executor.start_load(job, moves)

    def _loaded(self, done: Done, request: Request, running: Running) -> None:
        moves, running.moves = running.moves, []
        if running.host_lease is not None:
            self.tree.release(running.host_lease)
            running.host_lease = None
        if done.failed:
            running.spoiled = True  # whoever still waits for a layer is told by the ticket
            self._failing.discard(request)
            request.host_limit = self._loadable(request, running, moves, done.flags)
        else:
            self.weighing.loaded(moves, done.seconds)
            for move in moves:
                self.stats.loaded_pages[move.component.name.lower()] += len(move.sources)
        if running.leaving is not None:
            self._leaving.remove(running)
            self._release(running, running.leaving)
        elif not done.failed:
            request.load = None

    def _loadable(self, request: Request, running: Running, moves: list[Move], flags: bytes) -> int:
        """The deepest boundary that takes nothing from the host which could not be loaded; 0 the second time.

        Pages whose copy failed may fail again; `flags` are of the load's pages, in order.
        """
        if request.host_limit is not None:
            return 0
        came = iter(flags.ljust(sum(len(move.sources) for move in moves), b"\0"))
        bad = {
            move.component: [p for p in running.loading[move.component] if not next(came)] for move in moves
        }
        end = running.loading[MAMBA][0]
        found = self.tree.match(request.scope, request.tokens, end * self.rules.page_size)
        presence = self.tree.presence(found)
        for position in bad.get(SWA, ()):
            if presence.swa is not None and position < len(presence.swa):
                presence.swa[position] = 0
        if presence.checkpoints is not None:
            presence.checkpoints = [b for b in presence.checkpoints if b not in bad.get(MAMBA, ())]
        run = min([found.full, end, *bad.get(FULL, ())])
        return Outlook(self.rules, run, presence, {}).deepest(run if any(bad.values()) else end - 1)

    # -- running -------------------------------------------------------------------------------

    def extend(self, request: Request, end: int, *, decode: bool = False) -> bool:
        """Give the request pages for tokens [0, end) and capture slots for the step up to `end`.

        `decode` says that the step computes sampled tokens only. False if L1 cannot give the pages now:
        nothing has changed, let transfers end and try again.
        """
        return self._tables.extend(request, self._running[request], end, decode=decode)

    def computed(self, request: Request, end: int, *, decode: bool = False) -> None:
        """The runner has computed tokens [0, end). Commits where a boundary is to be kept.

        Decode commits by progress since the last commit, however many tokens a step brings.
        """
        request.computed = end
        if request.track_position > end:
            request.track_position = -1  # the step ended before it came there
        progress = end // self.rules.page_size - request.committed
        if not decode or progress >= self._places.decode_interval:
            self._commit(request)
        elif self.spec.islands:
            self._tables.give_back(request, self._running[request])

    def _commit(self, request: Request) -> None:
        """Move whole computed pages into the tree, and the lease with them; then write down."""
        if (
            self._tables.commit(request, self._running[request], self._step_time)
            and request.lease is not None
        ):
            self._writing.committed(request.lease, request)

    def finish(self, request: Request) -> None:
        """Commit what is whole and let go of the rest."""
        self._commit(request)
        if request.lease is not None:
            self.sessions.finished(request, request.lease)
        self._end(request)
        self.sessions.leave(request)

    def abort(self, request: Request) -> None:
        """Let go of a running request at any time; whole computed pages stay in the tree."""
        self._break_off(request)
        self.sessions.leave(request)

    def _break_off(self, request: Request) -> None:
        running = self._running[request]
        if not running.moves and not running.spoiled:
            self._commit(request)
        self._end(request)

    def retract(self, request: Request) -> None:
        """Take a running request's pages back so that others can go on; it may be admitted again."""
        self.stats.retracted += 1
        self._break_off(request)

    def restart(self, request: Request) -> None:
        """Take back a running request whose load has failed; it may be admitted again, with less of a hit.

        Nothing it has reaches the tree, and its hit is not counted.
        """
        self.stats.failed_loads += 1
        self._accounts.load_failed(request)
        request.load_failed = True
        if self._running[request].moves:
            self._failing.add(request)
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
        clear_tables(request)

    def _release(self, running: Running, lease: Lease) -> None:
        self._tables.free(running)
        self.tree.release(lease)
        self._writing.let_go()

    # -- time ----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Let ended transfers take effect and start background writes; returns whether any ended.

        Called between steps: what the last one gave back may go to loads once its readers are done.
        """
        self._step_time = self.clock.now()
        self.pools.lapse()
        ended = self.executor.poll()
        for done in ended:
            self._jobs.close(done)
        if self._staging_only is not None:
            self._staging_only.sweep()  # what has ended makes room for what waits
        self.sessions.expire()
        self._writing.follow_storage()
        if ended:
            self._writing.catch_up()
        self._writing.keep_reserve()
        if self._events is not None:
            self._events.flush()
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

    def release_waiting(self) -> int:
        """Let go of what queued requests and stores in flight keep, so that others can go on; how much."""
        return self._prefetcher.release_leases() + self._writing.release_stores()

    # -- control -------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Drop L1 and L2; L3 stays. Returns False if something in use had to be kept."""
        self._prefetcher.release_leases()
        self.pools.free_all(self.tree.drop_all())
        return all(self.tree.resident(tier, c) == 0 for tier, c in self.pools.kinds)

    @property
    def event_batches(self) -> tuple[int, int] | None:
        """Batches of KV events handed out, and lost by a sink without room; None where nobody is told."""
        return None if self._events is None else (self._events.handed_out, self._events.lost_batches)

    def publish_events(self, sink: Sink | None) -> None:
        """Hand KV events to `sink` at each tick, everything held now first; None ends it."""
        if self._events is not None:
            self._events.stop()
        self._events = None if sink is None else EventLog(self.tree, sink)
        if self._events is not None:
            self._events.start()

    def storage_cleared(self) -> None:
        """Forget what storage held, writes and reads in flight included: somebody has cleared it."""
        self._age.clears += 1
        self.tree.forget_all_stored()

    def release_device(self) -> bool:
        """Drop L1 alone, so that its memory may be given away; L2 and L3 keep what they have.

        Returns False if something in use had to be kept. Pages that have no copy below are lost.
        """
        self.release_waiting()
        for component in self.spec.kinds:
            self.pools.drop(Tier.DEVICE, component)
        return not any(self.pools[Tier.DEVICE, c].num_taken for c in self.spec.kinds)

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
        host_held = [self._writing.held(), self._prefetcher.held(), self.pools.custody.kept_back()]
        for tier, component in self.pools.kinds:
            pool = self.pools[tier, component]
            holders = [self.tree.owned(tier, component)]
            if tier is Tier.HOST:
                holders += [held.get(component, array("i")) for held in host_held]
            else:
                everyone = [*self._running.values(), *self._leaving]
                holders += [r.private.slots(component) for r in everyone]
                holders.append(self.pools.quarantine.slots(component))
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
        kept |= self.sessions.remembered()
        kept |= self.pools.remembered()
        return {**kept, **self._prefetcher.remembered(), **self._writing.remembered()}

    def close(self) -> None:
        """Stop the executor's threads."""
        self.executor.close()
