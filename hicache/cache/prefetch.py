"""Bringing pages of queued requests from storage to the host, within the prefetch policy's bound.

Life of one prefetch: probe, then fetch into reserved host pages, then publish what has arrived whole
up to the deepest boundary that every component accepts. It may be cut off at any moment; pages that
a read still fills stay held until the read ends (law 9).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

from hicache import boundary
from hicache.cache.jobs import Jobs
from hicache.cache.pools import Copies, PagePools
from hicache.cache.stats import CacheStats
from hicache.clock import Clock
from hicache.config.cache import CacheConfig
from hicache.keys import page_hashes
from hicache.policy.prefetch import PrefetchRule, PrefetchVerdict
from hicache.request import Request
from hicache.transfer.base import Done, Executor, JobId, JobKind, ObjectRef
from hicache.tree.base import Lease, Match, PathPresence, TreeCore, TreeRules
from hicache.types import NO_SLOT, TOKEN_BYTES, Component, PrefetchPolicy, Slots, Tier

# Reasons why a prefetch brought nothing that may be different once the host has lost pages.
_NOTHING_TO_FETCH = frozenset({"not_stored", "below_threshold"})
_MAX_LOOKS = 4
_make_ref = tuple.__new__  # a prompt names thousands of objects: NamedTuple's own constructor is slow


class _Phase(enum.Enum):
    PROBING = "probing"
    CROWDED = "crowded"  # other queued requests hold the host pages it needs; no job is open
    FETCHING = "fetching"
    ENDED = "ended"  # published or given up; a cut-off read may still hold its pages


@dataclass(slots=True)
class _Part:
    """The objects of one component in a probe or fetch, in job order.

    Positions ascend: page indices (FULL, SWA) or boundaries (MAMBA). `slots` are host pages held by
    the fetch, NO_SLOT once the tree has them.
    """

    component: Component
    positions: Sequence[int]
    slots: Slots = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class _Prefetch:
    request: Request
    job: JobId
    known: int  # pages reachable without storage when it was planned (the host boundary)
    asked: int  # FULL pages below this were on device or host, and were not asked for
    limit: int  # pages
    hashes: list[bytes]  # of pages [0, limit)
    parts: list[_Part]
    progress_at: float
    arrived: int = 0
    phase: _Phase = _Phase.PROBING
    blocked_since: float | None = None
    reason: str = ""  # why it ended
    reached: int = 0  # pages; the boundary it has published
    anchor: Lease | None = None  # keeps what the pages being fetched will hang on
    lease: Lease | None = None  # keeps what was published until admission

    def split(self, flags: bytes) -> list[tuple[_Part, bytes]]:
        """Cut a job's flags into those of each part; a job that ended early lacks its last flags."""
        cut, at = [], 0
        for part in self.parts:
            count = len(part.positions)
            cut.append((part, flags[at : at + count].ljust(count, b"\0")))
            at += count
        return cut

    def refs(self) -> list[ObjectRef]:
        """Names of all objects; a state is named by the page it ends."""
        refs: list[ObjectRef] = []
        for part in self.parts:
            behind = part.component is Component.MAMBA
            names = zip(repeat(part.component), (self.hashes[p - behind] for p in part.positions))
            refs += map(_make_ref, repeat(ObjectRef), names)
        return refs


@dataclass(slots=True)
class _Found:
    """What a queued request had without storage when it was last looked at, and how often that was."""

    host: int  # pages
    looks: int = 1


class Prefetcher:
    """All prefetches of one cache. Owned by the cache's thread."""

    def __init__(
        self,
        tree: TreeCore,
        rules: TreeRules,
        pools: PagePools,
        executor: Executor,
        jobs: Jobs,
        config: CacheConfig,
        clock: Clock,
        stats: CacheStats,
    ) -> None:
        self._tree, self._rules, self._pools = tree, rules, pools
        self._executor, self._jobs, self._clock, self._stats = executor, jobs, clock, stats
        self._threshold = max(config.prefetch_threshold, rules.page_size)
        self._share = config.prefetch_host_share
        self._rule = PrefetchRule(
            config.hicache_storage_prefetch_policy,
            config.prefetch_timeout_base,
            config.prefetch_timeout_per_ki_token,
            config.prefetch_timeout_max,
        )
        self._by_rid: dict[str, _Prefetch] = {}
        self._found: dict[str, _Found] = {}
        self._fetching: dict[JobId, _Prefetch] = {}  # whose slots are (partly) ours

    # -- life of a request ---------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Look at a request that has just been queued; begin a prefetch if L3 may have enough."""
        if not self._executor.has_storage or not self._pools.capacity(Tier.HOST, Component.FULL):
            return
        page, tokens = self._rules.page_size, request.tokens
        found = self._tree.match(request.scope, tokens, len(tokens) - 1)
        limit = (len(tokens) - 1) // page
        looks = self._found[request.rid].looks + 1 if request.rid in self._found else 1
        self._found[request.rid] = _Found(found.host, looks)
        before = self._by_rid.pop(request.rid, None)
        if (limit - found.host) * page < self._threshold:
            self._stats.prefetch["below_threshold"] += 1
            return
        known = self._tree.page_hashes(found, 0, found.full)
        rest = memoryview(tokens).cast("B")[found.full * page * TOKEN_BYTES : limit * page * TOKEN_BYTES]
        hashes = known + page_hashes(known[-1] if known else request.scope, rest, page)
        parts = self._missing(found, self._tree.presence(found), limit)
        job = self._jobs.open(JobKind.PROBE, lambda done: self._probed(done, prefetch))
        prefetch = _Prefetch(request, job, found.host, found.full, limit, hashes, parts, self._clock.now())
        if before is not None:
            prefetch.blocked_since = before.blocked_since
            if before.phase is _Phase.CROWDED:
                prefetch.progress_at = before.progress_at  # waiting for room is no progress
        if looks > 1 and self._reserved() + found.full <= self._room():
            # It has lost pages once: keep what is left until the answer is there.
            first = max(0, min(found.host, found.full) - self._rules.window_pages)
            prefetch.anchor = self._tree.lock(found, found.full, Tier.HOST, swa_start=first)
        self._by_rid[request.rid] = prefetch
        self._executor.start_probe(job, prefetch.refs())

    def ready(self, request: Request) -> bool:
        """True if the prefetch policy lets the request be scheduled now. Publishes what is there."""
        prefetch = self._by_rid.get(request.rid)
        if prefetch is None or prefetch.phase is _Phase.ENDED:
            prefetch = self._look_again(request)
            if prefetch is None:
                return True
        now = self._clock.now()
        if prefetch.blocked_since is None:
            prefetch.blocked_since = now
        if prefetch.phase is _Phase.CROWDED and self._has_room(prefetch):
            self.start(request)
            prefetch = self._by_rid.get(request.rid)
            if prefetch is None:
                return True
        assert prefetch.blocked_since is not None
        if prefetch.phase is _Phase.FETCHING:
            arrived = self._executor.arrived(prefetch.job).count(1)
            if arrived > prefetch.arrived:
                prefetch.arrived, prefetch.progress_at = arrived, now
        verdict = self._rule.decide(
            now=now,
            blocked_since=prefetch.blocked_since,
            progress_at=prefetch.progress_at,
            tokens=(prefetch.limit - prefetch.known) * self._rules.page_size,
        )
        if verdict is PrefetchVerdict.WAIT:
            return False
        if prefetch.phase is _Phase.FETCHING:
            self._publish(prefetch, self._executor.arrived(prefetch.job))
        self._cancel(prefetch)
        self._end(prefetch, "cut_off" if verdict is PrefetchVerdict.STOP else "deadline")
        return True

    def _look_again(self, request: Request) -> _Prefetch | None:
        """Begin anew if what a request had on the host has been evicted while it was queued.

        A prefetch that failed, or was cut off, is not repeated: that would wait twice.
        """
        found, prefetch = self._found.get(request.rid), self._by_rid.get(request.rid)
        if found is None or found.looks >= _MAX_LOOKS or self._rule.policy is PrefetchPolicy.BEST_EFFORT:
            return None
        if prefetch is not None and (prefetch.lease is not None or prefetch.reason not in _NOTHING_TO_FETCH):
            return None
        tokens = request.tokens
        if self._tree.match(request.scope, tokens, len(tokens) - 1).host >= found.host:
            return None
        self.start(request)
        return self._by_rid.get(request.rid)

    def _cancel(self, prefetch: _Prefetch) -> None:
        if prefetch.phase is not _Phase.CROWDED:
            self._executor.cancel(prefetch.job)

    def _has_room(self, prefetch: _Prefetch) -> bool:
        """True if a crowded prefetch could get its pages, or nobody is left to wait for."""
        reserved, share = self._reserved(), self._room()
        return not reserved or share - reserved >= prefetch.limit - prefetch.known

    def next_deadline(self) -> float | None:
        """The earliest time at which ready() may change its mind without any job ending."""
        times = [
            self._rule.expires(
                blocked_since=p.blocked_since,
                progress_at=p.progress_at,
                tokens=(p.limit - p.known) * self._rules.page_size,
            )
            for p in self._by_rid.values()
            if p.blocked_since is not None and p.phase is not _Phase.ENDED
        ]
        return min(times, default=None)

    def ended(self, request: Request) -> range:
        """Forget a request at admission or abort, letting go of what was published for it.

        Returns the pages by which storage made its hit deeper. A read still in flight is cancelled and
        keeps its pages until it really ends.
        """
        self._found.pop(request.rid, None)
        prefetch = self._by_rid.pop(request.rid, None)
        if prefetch is None:
            return range(0)
        if prefetch.phase is not _Phase.ENDED:
            self._cancel(prefetch)
            self._end(prefetch, "aborted")
        if prefetch.lease is not None:
            self._tree.release(prefetch.lease)
            prefetch.lease = None
        return range(prefetch.known, max(prefetch.known, prefetch.reached))

    def release_leases(self) -> int:
        """Let go of everything published for queued requests; returns how many leases that were."""
        leases = [lease for p in self._by_rid.values() for lease in (p.anchor, p.lease) if lease is not None]
        for prefetch in self._by_rid.values():
            prefetch.anchor = prefetch.lease = None
        for lease in leases:
            self._tree.release(lease)
        return len(leases)

    # -- continuations -------------------------------------------------------------------------

    def _probed(self, done: Done, prefetch: _Prefetch) -> None:
        if prefetch.phase is _Phase.ENDED:
            return
        if done.failed:
            self._end(prefetch, "store_failed")
            return
        request = prefetch.request
        found = self._tree.match(request.scope, request.tokens, prefetch.limit * self._rules.page_size)
        if found.full < prefetch.asked and self._found[request.rid].looks < _MAX_LOOKS:
            self._end(prefetch, "anchor_lost")  # evicted meanwhile: what lies between was not asked for
            self.start(request)
            return
        there: dict[Component, set[int]] = {}
        for part, flags in prefetch.split(done.flags):
            there[part.component] = set(compress(part.positions, flags))
            # A probe is truth: what it did not find is not stored, whatever the tree believed (law 7).
            end = found.full + (part.component is Component.MAMBA)
            gone = [p for p, flag in zip(part.positions, flags, strict=True) if not flag and p < end]
            if gone:
                self._tree.forget_stored(found, part.component, gone)
        reason = self._plan(prefetch, found, there)
        if reason:
            self._end(prefetch, reason)
        if prefetch.phase is not _Phase.PROBING:
            return
        prefetch.phase = _Phase.FETCHING
        prefetch.job = self._jobs.open(JobKind.FETCH, lambda done: self._fetched(done, prefetch))
        self._fetching[prefetch.job] = prefetch
        slots = [s for part in prefetch.parts for s in part.slots]
        self._executor.start_fetch(prefetch.job, prefetch.refs(), slots)

    def _fetched(self, done: Done, prefetch: _Prefetch) -> None:
        del self._fetching[done.job]
        if prefetch.phase is _Phase.FETCHING:
            whole = sum(done.flags) == sum(len(part.positions) for part in prefetch.parts)
            self._publish(prefetch, done.flags)
            self._end(prefetch, "complete" if whole else "store_failed" if done.failed else "incomplete")
        for part in prefetch.parts:
            left = array("i", (s for s in part.slots if s != NO_SLOT))
            self._pools.free(Tier.HOST, part.component, left)

    # -- decisions -----------------------------------------------------------------------------

    def _missing(self, found: Match, presence: PathPresence, limit: int) -> list[_Part]:
        """Everything that could deepen the hit and is not on device or host."""
        parts = [_Part(Component.FULL, range(found.full, limit))]
        if presence.swa is not None:
            live = presence.swa
            first = max(0, found.host + 1 - self._rules.window_pages)
            holes = [i for i in range(first, len(live)) if not live[i]]
            parts.append(_Part(Component.SWA, holes + list(range(max(first, len(live)), limit))))
        if presence.checkpoints is not None:
            have = set(presence.checkpoints)
            parts.append(
                _Part(Component.MAMBA, [b for b in range(found.host + 1, limit + 1) if b not in have])
            )
        return parts

    def _plan(self, prefetch: _Prefetch, found: Match, there: dict[Component, set[int]]) -> str:
        """Choose the boundary and reserve host pages; returns why not, or '' when there is work.

        Where others hold the pages for now it changes the phase to CROWDED instead.
        """
        presence, page = self._tree.presence(found), self._rules.page_size
        run = _run(found.full, there[Component.FULL])
        others = self._reserved() - (prefetch.anchor.depth if prefetch.anchor is not None else 0)
        room = min(self._room() - others, self._pools.available(Tier.HOST, Component.FULL, Copies.LAST))
        if run - found.full > room:
            if others:
                prefetch.phase = _Phase.CROWDED
                self._let_go(prefetch)
                return ""
            if room <= 0:
                return "host_capacity"
            run = found.full + room
        target = self._deepest(run, presence, there)
        if (target - found.host) * page < self._threshold:
            return "not_stored" if target <= found.host else "below_threshold"
        parts = [_Part(Component.FULL, range(found.full, target))]
        window_start = max(0, target - self._rules.window_pages)
        if presence.swa is not None:
            live = presence.swa
            holes = [i for i in range(window_start, target) if i >= len(live) or not live[i]]
            parts.append(_Part(Component.SWA, holes))
        states: list[int] = []
        if presence.checkpoints is not None:
            states = [target] if target in presence.checkpoints else []
            parts.append(_Part(Component.MAMBA, [] if states else [target]))
        # What the fetched pages will hang on must survive until they are there.
        anchor = self._tree.lock(
            found, found.full, Tier.HOST, swa_start=min(window_start, found.full), states=states
        )
        taken = self._pools.allocate(Tier.HOST, {p.component: len(p.positions) for p in parts}, Copies.LAST)
        if taken is None:
            self._tree.release(anchor)
            return "host_capacity"
        if prefetch.anchor is not None:
            self._tree.release(prefetch.anchor)
        prefetch.anchor = anchor
        for part in parts:
            part.slots = taken[part.component]
        prefetch.parts, prefetch.known = parts, found.host
        return ""

    def _deepest(self, run: int, presence: PathPresence, there: dict[Component, set[int]]) -> int:
        """The deepest boundary <= run over what the tree has and what is `there` besides."""
        swa, checkpoints = presence.swa, presence.checkpoints
        if swa is not None:
            swa = swa[:run].ljust(run, b"\0")
            for i in there.get(Component.SWA, ()):
                if i < run:
                    swa[i] = 1
        if checkpoints is not None:
            checkpoints = sorted(there.get(Component.MAMBA, set()).union(checkpoints))
        return boundary.deepest(run, window_pages=self._rules.window_pages, swa=swa, checkpoints=checkpoints)

    def _publish(self, prefetch: _Prefetch, flags: bytes) -> None:
        """Put what arrived into the tree, up to the deepest boundary that it makes acceptable."""
        request, page = prefetch.request, self._rules.page_size
        found = self._tree.match(request.scope, request.tokens, prefetch.limit * page)
        arrived = {
            part.component: {p: i for i, p in enumerate(part.positions) if got[i]}
            for part, got in prefetch.split(flags)
        }
        run = _run(found.full, arrived[Component.FULL])
        there = {component: set(positions) for component, positions in arrived.items()}
        reach = self._deepest(run, self._tree.presence(found), there)
        if reach <= found.host:
            return
        offered: dict[Component, dict[int, int]] = {}  # position to slot
        for part in prefetch.parts:
            end = reach + (part.component is Component.MAMBA)
            for position, i in arrived[part.component].items():
                if position < end:
                    offered.setdefault(part.component, {})[position] = part.slots[i]
                    part.slots[i] = NO_SLOT
        paged = [offered.get(c, {}) for c in (Component.FULL, Component.SWA)]
        start = min((p for pages in paged for p in pages), default=reach - 1)
        full, swa = (array("i", (pages.get(p, NO_SLOT) for p in range(start, reach))) for pages in paged)
        unused = self._tree.insert_host(
            request.scope,
            request.tokens,
            start,
            reach,
            full=full,
            swa=swa if Component.SWA in self._rules.kinds else None,
            states=sorted(offered.get(Component.MAMBA, {}).items()),
            now=self._clock.now(),
        )
        for component, pages in offered.items():
            refused = unused.get(component, array("i"))
            self._pools.free(Tier.HOST, component, refused)
            self._stats.fetched_pages[component.name.lower()] += len(pages) - len(refused)
        prefetch.reached = reach
        after = self._tree.match(request.scope, request.tokens, prefetch.limit * page)
        prefetch.lease = self._tree.lock(after, after.host, Tier.HOST)

    def _end(self, prefetch: _Prefetch, reason: str) -> None:
        prefetch.phase, prefetch.reason = _Phase.ENDED, reason
        self._let_go(prefetch)
        self._stats.prefetch[reason] += 1

    def _let_go(self, prefetch: _Prefetch) -> None:
        if prefetch.anchor is not None:
            self._tree.release(prefetch.anchor)
            prefetch.anchor = None

    # -- accounting ----------------------------------------------------------------------------

    def _room(self) -> int:
        """FULL host pages that queued requests may hold altogether."""
        return int(self._pools.capacity(Tier.HOST, Component.FULL) * self._share)

    def _reserved(self) -> int:
        """FULL host pages that queued requests hold: reads in flight and what they hang on, and what was
        published for them."""
        reading = sum(len(p.parts[0].slots) for p in self._fetching.values() if p.lease is None)
        anchored = sum(p.anchor.depth for p in self._by_rid.values() if p.anchor is not None)
        published = sum(p.lease.depth - p.known for p in self._by_rid.values() if p.lease is not None)
        return reading + anchored + published

    def remembered(self) -> dict[str, int]:
        return {"prefetches": len(self._by_rid), "looks": len(self._found), "fetches": len(self._fetching)}

    def held(self) -> dict[Component, Slots]:
        """Host slots of reads in flight that are not in the tree, for the accounting check."""
        held: dict[Component, Slots] = {}
        for prefetch in self._fetching.values():
            for part in prefetch.parts:
                mine = array("i", (s for s in part.slots if s != NO_SLOT))
                held.setdefault(part.component, array("i")).extend(mine)
        return held


def _run(start: int, present: Container[int]) -> int:
    """Where the run of present pages from `start` ends."""
    while start in present:
        start += 1
    return start
