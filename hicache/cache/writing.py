"""Writing down: device to host, host to storage, by policy; a write that fails leaves nothing visible.

Decides what to write and when; the executor moves it and the tree records it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from hicache.cache.jobs import Jobs, StorageAge
from hicache.cache.pools import PagePools
from hicache.cache.stats import CacheStats
from hicache.config.cache import CacheConfig, HostMemoryMode
from hicache.policy.writing import hits_to_write
from hicache.request import Request
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobKind, Move, ObjectRef, name_objects
from hicache.tree.base import Lease, TreeCore, WritePlan
from hicache.types import NO_SLOT, Component, Slots, Tier

_MOST_OWED = 1024  # paths
_PATIENCE = 64  # ticks for which a request that could be admitted waits for a store
_HOST_TRIES = 8  # for a path that the host had no room for, or did not get


@dataclass(slots=True)
class _Path:
    """Pages of a request's path that have a claim to be written down, whether the tree has them or not."""

    scope: bytes
    tokens: array[int]  # the request's own; grows with it
    depth: int  # pages
    tries: int = 0  # to get it to the host, in vain
    first: int = -1  # page that was missing below when it was last tried


@dataclass(slots=True)
class _HostWrite:
    """Pages on their way to the host. `targets` are held by the job until the tree adopts them."""

    lease: Lease
    plan: WritePlan
    targets: dict[Component, Slots]
    path: _Path | None
    store_hits: int | None  # to be stored afterwards, from so many hits on


@dataclass(slots=True)
class _StoreWrite:
    """Pages on their way to storage; without a lease, the pools guard the slots it reads."""

    lease: Lease | None
    plan: WritePlan
    order: list[Component]  # components in the order their entries were handed to the executor
    attempt: int
    age: tuple[int, int]  # of storage when it began
    tick: int  # when it began


class WriteDown:
    """The write policies of both hops. Owned by the cache's thread."""

    def __init__(
        self,
        tree: TreeCore,
        pools: PagePools,
        executor: Executor,
        jobs: Jobs,
        config: CacheConfig,
        stats: CacheStats,
        spec: ModelSpec,
        age: StorageAge,
    ) -> None:
        self._age = age
        self._periods = spec.periods
        self._tree, self._pools, self._executor, self._jobs = tree, pools, executor, jobs
        self._config, self._stats = config, stats
        self._hits = hits_to_write(config.hicache_write_policy)
        self._storing = 0  # FULL pages of stores in flight
        self._stores: dict[int, _StoreWrite] = {}
        self._tick = 0
        self._writes: dict[int, _HostWrite] = {}
        # What storage or the host had no room for, first come first served; keyed by the tokens' identity.
        self._owed: dict[int, _Path] = {}
        self._epoch = executor.storage_epoch
        self._stored_before = -1  # pages stored in all when the last round of restocking began
        self._restock_due = False  # storage may have lost what write_through had put there
        self._reserve_due = False  # something was committed or admitted since the last round
        host = pools.capacity(Tier.HOST, Component.FULL)
        self._has_host = host > 0
        self._staging = config.hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY
        self._store_limit = max(1, int(host * config.store_host_share))
        self._reserve = {
            tier: max(1, int(pools.capacity(tier, Component.FULL) * config.clean_reserve_share))
            for tier in (Tier.DEVICE, Tier.HOST)
        }

    # -- triggers ------------------------------------------------------------------------------

    def committed(self, lease: Lease, request: Request) -> None:
        """Pages of a request reached the tree: write what the policy wants below them."""
        self._reserve_due = True
        if self._has_host and self._hits is not None:
            path = _Path(request.scope, request.tokens, lease.depth)
            if not self._write_to_host(lease, self._hits, path=path, store_hits=self._hits):
                self._store(lease, self._hits, attempt=1, path=path)  # what storage did not take before

    def let_go(self) -> None:
        """A request has ended: its pages may be the next victims."""
        self._reserve_due = True

    def catch_up(self) -> None:
        """Transfers have ended: write what had to wait for room, oldest first, as long as there is some."""
        if not self._owed or self._storing >= self._store_limit:
            return
        page = self._tree.rules.page_size
        waiting, self._owed = self._owed, {}
        while waiting and self._storing < self._store_limit and not self._owed:
            path = waiting.pop(next(iter(waiting)))
            found = self._tree.match(path.scope, path.tokens, path.depth * page)
            lease = self._tree.lock(found, found.full, Tier.HOST)
            self._write_to_host(lease, self._hits or 0, path=path, store_hits=self._hits)
            self._store(lease, self._hits or 0, attempt=1, path=path)
            self._tree.release(lease)
        for key, path in waiting.items():
            self._owed.setdefault(key, path)

    def _note_progress(self, path: _Path | None, plan: WritePlan) -> None:
        """Staged pages make room for the next: a path that gets on, a part at a time, is not in vain."""
        full = plan.pages.get(Component.FULL)
        if self._staging and path is not None and full and full[0] > path.first:
            path.first, path.tries = full[0], 0

    def _owe_host(self, path: _Path | None) -> None:
        if path is not None and path.tries < _HOST_TRIES:
            path.tries += 1
            self._owe(path)

    def _owe(self, path: _Path | None) -> None:
        """Come back to a path; what is not the tree's any more by then is forgotten."""
        if path is None:
            return  # the caller comes round by itself
        known = self._owed.get(id(path.tokens))
        if known is not None:
            known.depth = max(known.depth, path.depth)
            known.tries = max(known.tries, path.tries)
        elif len(self._owed) < _MOST_OWED:
            self._owed[id(path.tokens)] = path

    def keep_reserve(self) -> None:
        """write_back: write the next victims of each tier before they must go.

        One round per change of the tree from outside: a write into a full host takes the copies of other
        device pages, which another round would want to write again, and so on for ever.
        """
        if self._hits is not None or not self._has_host or not self._reserve_due or self._writes:
            return
        self._reserve_due = False
        for lease in self._tree.coldest_unwritten(Tier.DEVICE, self._reserve[Tier.DEVICE]):
            self._write_to_host(lease, 0)
            self._tree.release(lease)
        if self._executor.has_storage and self._storing < self._store_limit:
            for lease in self._tree.coldest_unwritten(Tier.HOST, self._reserve[Tier.HOST]):
                if not self._store(lease, 0, attempt=1):  # an ancestor may be on the device only
                    self._write_to_host(lease, 0, store_hits=0)
                self._tree.release(lease)

    def follow_storage(self) -> None:
        """Once a tick: where storage may have started anew, empty, forget what it held, and stock it again.

        Restocking is for the policies that keep L3 complete; it goes on, one round of bounded stores
        after another, while a round gets anything stored.
        """
        self._tick += 1
        if self._executor.storage_epoch != self._epoch:
            self._epoch = self._executor.storage_epoch
            self._tree.forget_all_stored()
            self._restock_due = self._hits is not None
            self._stored_before = -1
        busy = self._storing or (self._staging and self._writes)
        if not self._restock_due or busy or not self._executor.has_storage:
            return
        stored = sum(self._stats.stored_pages.values())
        self._restock_due = stored != self._stored_before
        if self._restock_due:
            self._stored_before = stored
            leases, _ = self._tree.unstored()
            for lease in leases:
                if self._staging:
                    self._write_to_host(lease, self._hits or 0, store_hits=self._hits)
                else:
                    self._store(lease, self._hits or 0, attempt=self._config.store_attempts)
                self._tree.release(lease)

    def flush(self) -> int:
        """Start writing whatever storage lacks, through the host; returns how many jobs were started."""
        before = len(self._jobs)
        leases, _ = self._tree.unstored()
        for lease in leases:
            self._store(lease, 0, attempt=1)
            self._write_to_host(lease, 0)
            self._tree.release(lease)
        return len(self._jobs) - before

    def lacking(self) -> int:
        """FULL pages that storage lacks."""
        leases, count = self._tree.unstored()
        for lease in leases:
            self._tree.release(lease)
        return count

    # -- device to host ------------------------------------------------------------------------

    def _write_to_host(
        self, lease: Lease, min_hits: int, *, path: _Path | None = None, store_hits: int | None = None
    ) -> bool:
        """Begin writing what the host lacks of a path; store it afterwards from `store_hits` hits on.

        Returns whether a copy was begun or waits for storage; if not, what the host has may be stored.
        """
        if self._staging and not self._executor.has_storage:
            return False
        plan = self._tree.plan_write(lease, Tier.HOST, min_hits=min_hits, unstored=self._staging)
        if not plan.count:
            return False
        if self._staging and not self._may_stage(plan):
            self._owe(path)
            return True
        write_lease = self._tree.begin_write(lease, plan)
        targets = self._host_slots(plan)
        if targets is None:
            self._tree.end_write(write_lease, plan, {c: _nothing(len(p)) for c, p in plan.pages.items()})
            self._owe_host(path)
            return False
        if sum(map(len, targets.values())) < plan.count:
            self._note_progress(path, plan)
            self._owe_host(path)
        moves, outcome = [], {}
        for component, sources in plan.slots.items():
            given = targets.get(component, array("i"))
            outcome[component] = given + _nothing(len(sources) - len(given))
            if given:
                moves.append(Move(component, sources[: len(given)], given))
        job = self._jobs.open(JobKind.WRITE, self._host_written)
        self._writes[job] = _HostWrite(write_lease, plan, outcome, path, store_hits)
        self._executor.start_write(job, moves)
        return True

    def _may_stage(self, plan: WritePlan) -> bool:
        """True if what is copied to the host now can be stored at once: it does not wait there."""
        ahead = self._storing + sum(len(w.plan.pages.get(Component.FULL, ())) for w in self._writes.values())
        return not ahead or ahead + len(plan.pages.get(Component.FULL, ())) <= self._store_limit

    def _host_slots(self, plan: WritePlan) -> dict[Component, Slots] | None:
        """Host pages for a plan: as much of FULL as fits, root first; SWA and states only in whole.

        None if nothing fits: a job without pages would lock the path, and at every tick a new one.
        """
        full = len(plan.pages.get(Component.FULL, ()))
        if full:
            full = min(full, self._pools.available(Tier.HOST, Component.FULL))
            if not full:
                return None
        taken = self._pools.allocate(Tier.HOST, {Component.FULL: full} if full else {})
        if taken is None:
            return None
        for component, positions in plan.pages.items():
            if component is not Component.FULL and full == len(plan.pages.get(Component.FULL, ())):
                taken.update(self._pools.allocate(Tier.HOST, {component: len(positions)}) or {})
        return taken if any(taken.values()) else None

    def _host_written(self, done: Done) -> None:
        write = self._writes.pop(done.job)
        if done.failed:
            for component, slots in write.targets.items():
                self._pools.free(Tier.HOST, component, _present(slots))
            write.targets = {c: _nothing(len(s)) for c, s in write.targets.items()}
            self._owe_host(write.path)
        # The host lease is taken before end_write lets go of the path.
        host_lease = self._tree.lock(write.lease, write.lease.depth, Tier.HOST)
        for component, slots in write.targets.items():
            self._stats.written_pages[component.name.lower()] += len(_present(slots))
        unused = self._tree.end_write(write.lease, write.plan, write.targets)
        for component, slots in unused.items():
            self._pools.free(Tier.HOST, component, slots)
        if write.store_hits is not None:
            self._store(host_lease, write.store_hits, attempt=1, path=write.path)
        self._tree.release(host_lease)

    # -- host to storage -----------------------------------------------------------------------

    def _store(self, lease: Lease, min_hits: int, *, attempt: int, path: _Path | None = None) -> bool:
        """Begin storing what storage lacks of a path; returns whether there was anything to store."""
        if not self._executor.has_storage:
            return False
        plan = self._tree.plan_write(lease, Tier.STORAGE, min_hits=min_hits)
        if not plan.count:
            return False
        full = len(plan.pages.get(Component.FULL, ()))
        if self._storing and self._storing + full > self._store_limit:
            self._owe(path)
            return True
        store_lease = self._tree.begin_write(lease, plan)
        order = sorted(plan.pages)  # FULL ancestors first (law 7)
        refs: list[ObjectRef] = []
        for c in order:
            refs += name_objects(c, plan.pages[c], plan.hashes[c], self._periods[c])
        slots = [s for c in order for s in plan.slots[c]]
        self._storing += full
        job = self._jobs.open(JobKind.STORE, self._stored)
        self._stores[job] = _StoreWrite(store_lease, plan, order, attempt, self._age.now, self._tick)
        self._executor.start_store(job, refs, slots)
        return True

    def release_stores(self, *, overdue: bool = False) -> int:
        """Let go of the device pages that cannot leave because of stores in flight; how many FULL pages.

        They lie before what is stored and have no copy on the host. What a store reads is guarded until it
        ends; that its pages are stored will not be known. `overdue` spares the stores that began lately.
        """
        count = 0
        for store in self._stores.values():
            if store.lease is None or (overdue and self._tick - store.tick < _PATIENCE):
                continue
            hanging = len(self._tree.plan_write(store.lease, Tier.HOST).pages[Component.FULL])
            if hanging:
                count += hanging
                self._pools.guard(store.plan.slots)
                nothing = {c: _nothing(len(pages)) for c, pages in store.plan.pages.items()}
                self._tree.end_write(store.lease, store.plan, nothing)
                store.lease = None
        return count

    def _stored(self, done: Done) -> None:
        store = self._stores.pop(done.job)
        self._storing -= len(store.plan.pages.get(Component.FULL, ()))
        if store.age != self._age.now:
            done = replace(done, flags=b"")  # it may have gone with the store that took it
        outcome: dict[Component, Slots] = {}
        at = 0
        for component in store.order:
            count = len(store.plan.pages[component])
            flags = done.flags[at : at + count].ljust(count, b"\0")
            outcome[component] = array("i", (0 if flag else NO_SLOT for flag in flags))
            self._stats.stored_pages[component.name.lower()] += sum(flags)
            at += count
        missing = store.plan.count - sum(done.flags)
        if store.lease is None:
            self._pools.unguard(store.plan.slots)
        elif missing and store.attempt < self._config.store_attempts:
            again = self._tree.lock(store.lease, store.lease.depth, Tier.HOST)
            self._tree.end_write(store.lease, store.plan, outcome)
            self._store(again, 0, attempt=store.attempt + 1)
            self._tree.release(again)
            return
        else:
            self._tree.end_write(store.lease, store.plan, outcome)
        if missing:
            self._stats.store_failed_pages += missing
            self._stats.orphaned_pages += _orphans(store.plan, outcome)

    def remembered(self) -> dict[str, int]:
        return {"writes": len(self._writes), "stores": self._storing}

    def held(self) -> dict[Component, Slots]:
        """Host slots that writes in flight hold, for the accounting check."""
        held: dict[Component, Slots] = {}
        for write in self._writes.values():
            for component, slots in write.targets.items():
                held.setdefault(component, array("i")).extend(_present(slots))
        return held


def _orphans(plan: WritePlan, outcome: dict[Component, Slots]) -> int:
    """Count what was stored behind the first FULL page that was not: nobody else can reach it (law 7).

    It stays: storing the path again skips it, and storage drops what is not used.
    """
    full = zip(plan.pages.get(Component.FULL, ()), outcome.get(Component.FULL, ()), strict=True)
    hole = next((page for page, slot in full if slot == NO_SLOT), None)
    if hole is None:
        return 0
    return sum(
        page >= hole + (component is Component.MAMBA) and slot != NO_SLOT
        for component, slots in outcome.items()
        for page, slot in zip(plan.pages[component], slots, strict=True)
    )


def _nothing(count: int) -> Slots:
    return array("i", [NO_SLOT]) * count


def _present(slots: Slots) -> Slots:
    return array("i", (s for s in slots if s != NO_SLOT))
