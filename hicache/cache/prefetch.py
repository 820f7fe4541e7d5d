"""Bringing pages of queued requests from storage to the host, within the prefetch policy's bound.

Life of one prefetch: probe, then fetch into reserved host pages, then publish what has arrived whole
up to the deepest boundary that every component accepts. It may be cut off at any moment; pages that
a read still fills stay held until the read ends (law 9).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import compress

from hicache.cache.accounts import Ask, Shortfall
from hicache.cache.fetch_plan import Outlook, reading_order, wanted
from hicache.cache.jobs import Jobs, StorageAge
from hicache.cache.pools import Copies, PagePools
from hicache.cache.prefetch_state import Phase, Prefetch
from hicache.cache.stats import CacheStats
from hicache.cache.weighing import Weighing
from hicache.clock import Clock
from hicache.config.cache import CacheConfig
from hicache.keys import page_hashes
from hicache.policy.prefetch import PrefetchRule, PrefetchVerdict
from hicache.request import Request
from hicache.spec import ModelSpec
from hicache.transfer.base import Done, Executor, JobId, JobKind
from hicache.tree.base import Match, TreeCore, TreeRules
from hicache.types import NO_SLOT, TOKEN_BYTES, Component, PrefetchPolicy, Slots, Tier

# Reasons why a prefetch brought nothing that may be different once the host has lost pages.
_NOTHING_TO_FETCH = frozenset({"not_stored", "below_threshold"})
_MAX_LOOKS = 4


@dataclass(slots=True)
class _Found:
    """What a queued request had without storage when it was last looked at, and how often that was."""

    host: int  # pages
    looks: int = 1
    ask: Ask = field(default_factory=Ask)  # why there is no prefetch, where there might have been one


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
        spec: ModelSpec,
        age: StorageAge,
        weighing: Weighing,
    ) -> None:
        self._age = age
        self._weights = {c.component: c.page_bytes for c in spec.components}
        self._periods = spec.periods
        self._weighing = weighing
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
        self._by_rid: dict[str, Prefetch] = {}
        self._found: dict[str, _Found] = {}
        self._fetching: dict[JobId, Prefetch] = {}  # whose slots are (partly) ours

    # -- life of a request ---------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Look at a request that has just been queued; begin a prefetch if L3 may have enough."""
        usable = self._executor.has_storage
        if not self._pools.capacity(Tier.HOST, Component.FULL):
            return
        if not usable and not self._executor.storage_bypassed:
            return
        page, tokens = self._rules.page_size, request.tokens
        found = self._match(request)
        limit = (len(tokens) - 1) // page
        looks = self._found[request.rid].looks + 1 if request.rid in self._found else 1
        self._found[request.rid] = _Found(found.host, looks)
        before = self._by_rid.pop(request.rid, None)
        few = (limit - found.host) * page < self._threshold
        why = Shortfall.BELOW_THRESHOLD if few else None if usable else Shortfall.BREAKER_OPEN
        if why is None and not self._weighing.storage_pays(found, limit):
            why = Shortfall.RECOMPUTE
        if why is not None:
            self._stats.prefetch[why.value] += 1
            self._found[request.rid].ask = Ask(found.host, limit, 0, [(limit, why)])
            return
        known = self._tree.page_hashes(found, 0, found.full)
        rest = memoryview(tokens).cast("B")[found.full * page * TOKEN_BYTES : limit * page * TOKEN_BYTES]
        hashes = known + page_hashes(known[-1] if known else request.scope, rest, page)
        parts = wanted(self._rules, found.full, found.host, limit, self._tree.presence(found))
        job = self._jobs.open(JobKind.PROBE, lambda done: self._probed(done, prefetch))
        prefetch = Prefetch(request, job, found.host, found.full, limit, hashes, parts, self._clock.now())
        prefetch.age = self._age.now
        if before is not None:
            prefetch.blocked_since = before.blocked_since
            if before.phase is Phase.CROWDED:
                prefetch.progress_at = before.progress_at  # waiting for room is no progress
        if looks > 1 and self._reserved() + found.full <= self._room():
            # It has lost pages once: keep what is left until the answer is there.
            first = max(0, min(found.host, found.full) - self._rules.window_pages)
            prefetch.anchor = self._tree.lock(found, found.full, Tier.HOST, swa_start=first)
        self._by_rid[request.rid] = prefetch
        self._executor.start_probe(job, prefetch.refs(self._periods))

    def ready(self, request: Request) -> bool:
        """True if the prefetch policy lets the request be scheduled now. Publishes what is there."""
        prefetch = self._by_rid.get(request.rid)
        if prefetch is None or prefetch.phase is Phase.ENDED:
            prefetch = self._look_again(request)
            if prefetch is None:
                return True
        now = self._clock.now()
        if prefetch.blocked_since is None:
            prefetch.blocked_since = now
        if prefetch.phase is Phase.CROWDED and self._has_room(prefetch):
            self.start(request)
            prefetch = self._by_rid.get(request.rid)
            if prefetch is None:
                return True
        assert prefetch.blocked_since is not None
        if prefetch.phase is Phase.FETCHING:
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
        if prefetch.phase is Phase.FETCHING:
            prefetch.collect(self._executor.arrived(prefetch.job))
            self._publish(prefetch)
        self._cancel(prefetch)
        self._end(prefetch, "cut_off" if verdict is PrefetchVerdict.STOP else "deadline")
        return True

    def _look_again(self, request: Request) -> Prefetch | None:
        """Begin anew if what a request had on the host has been evicted while it was queued.

        A prefetch that failed, or was cut off, is not repeated: that would wait twice.
        """
        found, prefetch = self._found.get(request.rid), self._by_rid.get(request.rid)
        if found is None or found.looks >= _MAX_LOOKS or self._rule.policy is PrefetchPolicy.BEST_EFFORT:
            return None
        if prefetch is not None and prefetch.reason not in _NOTHING_TO_FETCH:
            return None
        if self._match(request).host >= found.host:
            return None
        self.start(request)
        return self._by_rid.get(request.rid)

    def _match(self, request: Request) -> Match:
        """Find what memory has of a prompt; its last token is always computed."""
        return self._tree.match(request.scope, request.tokens, len(request.tokens) - 1)

    def _cancel(self, prefetch: Prefetch) -> None:
        if prefetch.phase is not Phase.CROWDED:
            self._executor.cancel(prefetch.job)

    def _has_room(self, prefetch: Prefetch) -> bool:
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
            if p.blocked_since is not None and p.phase is not Phase.ENDED
        ]
        return min(times, default=None)

    def ended(self, request: Request) -> Ask:
        """Forget a request at admission or abort, letting go of what was published for it.

        Returns what storage was asked for. A read still in flight is cancelled and
        keeps its pages until it really ends.
        """
        looked = self._found.pop(request.rid, None)
        prefetch = self._by_rid.pop(request.rid, None)
        if prefetch is None:
            return Ask() if looked is None else looked.ask
        if prefetch.phase is not Phase.ENDED:
            self._cancel(prefetch)
            self._end(prefetch, "aborted")
        if prefetch.lease is not None:
            self._tree.release(prefetch.lease)
            prefetch.lease = None
        return prefetch.ask()

    def release_leases(self) -> int:
        """Let go of everything published for queued requests; returns how many leases that were."""
        leases = [lease for p in self._by_rid.values() for lease in (p.anchor, p.lease) if lease is not None]
        for prefetch in self._by_rid.values():
            prefetch.anchor = prefetch.lease = None
        for lease in leases:
            self._tree.release(lease)
        return len(leases)

    # -- continuations -------------------------------------------------------------------------

    def _probed(self, done: Done, prefetch: Prefetch) -> None:
        if prefetch.phase is Phase.ENDED:
            return
        if done.failed:
            prefetch.why = done.why
            self._end(prefetch, "store_failed")
            return
        request = prefetch.request
        found = self._tree.match(request.scope, request.tokens, prefetch.limit * self._rules.page_size)
        if found.full < prefetch.asked and self._found[request.rid].looks < _MAX_LOOKS:
            self._end(prefetch, "anchor_lost")  # evicted meanwhile: what lies between was not asked for
            self.start(request)
            return
        for part, flags in prefetch.split(done.flags):
            prefetch.there[part.component] = set(compress(part.positions, flags))
            # A probe is truth: what it did not find is not stored, whatever the tree believed (law 7).
            gone = [p for p, flag in zip(part.positions, flags, strict=True) if not flag]
            self._forget(found, part.component, gone)
        reason = self._plan(prefetch, found)
        if reason:
            self._end(prefetch, reason)
        elif prefetch.phase is Phase.PROBING:
            self._fetch(prefetch)

    def _fetch(self, prefetch: Prefetch) -> None:
        """Begin the read that has been planned."""
        prefetch.phase, prefetch.arrived = Phase.FETCHING, 0
        prefetch.job = self._jobs.open(JobKind.FETCH, lambda done: self._fetched(done, prefetch))
        self._fetching[prefetch.job] = prefetch
        slots = [s for part in prefetch.parts for s in part.slots]
        self._executor.start_fetch(prefetch.job, prefetch.refs(self._periods), slots)

    def _fetched(self, done: Done, prefetch: Prefetch) -> None:
        del self._fetching[done.job]
        brought = {part.component: sum(whole) for part, whole in prefetch.split(done.flags)}
        self._weighing.fetched(brought, done.seconds)
        fetching = prefetch.phase is Phase.FETCHING
        missing = prefetch.collect(done.flags) if fetching else []
        if missing:
            prefetch.why = prefetch.why or done.why
        for part in prefetch.parts:
            self._free(prefetch, part.component, part.slots)
        prefetch.parts = []
        if not fetching or (missing and not done.failed and self._read_on(prefetch, missing)):
            return
        self._publish(prefetch)
        whole = prefetch.reached >= prefetch.target
        self._end(prefetch, "complete" if whole else "store_failed" if done.failed else "incomplete")

    def _read_on(self, prefetch: Prefetch, missing: list[tuple[Component, int]]) -> bool:
        """Objects were gone or no good: read what the next boundary below lacks, if there is one.

        It ends, because storage is believed to have less each time.
        """
        request = prefetch.request
        found = self._tree.match(request.scope, request.tokens, prefetch.limit * self._rules.page_size)
        for component, position in missing:
            prefetch.there[component].discard(position)
            self._forget(found, component, [position])
        if self._plan(prefetch, found):
            return False
        prefetch.progress_at = self._clock.now()
        self._fetch(prefetch)
        return True

    def _forget(self, found: Match, component: Component, positions: list[int]) -> None:
        """Correct the tree's belief that pages of its own are stored."""
        end = found.full + (component is Component.MAMBA)
        gone = [p for p in positions if p < end]
        if gone:
            self._tree.forget_stored(found, component, gone)

    # -- decisions -----------------------------------------------------------------------------

    def _plan(self, prefetch: Prefetch, found: Match) -> str:
        """Choose what to read next, and take host pages for it; returns why not, or '' when there is work.

        Where others hold the pages for now it changes the phase to CROWDED instead.
        """
        first, presence, page = (
            prefetch.phase is Phase.PROBING,
            self._tree.presence(found),
            self._rules.page_size,
        )
        outlook = Outlook(self._rules, found.full, presence, prefetch.there)
        floor = found.host
        if first:
            prefetch.run = max(prefetch.run, outlook.run)
        else:
            floor = max(floor, Outlook(self._rules, found.full, presence, prefetch.got).deepest())
        path = self._tree.lock(found, found.full, Tier.HOST, swa_start=found.full, states=())
        try:
            own = prefetch.full_held + (prefetch.anchor.depth if prefetch.anchor is not None else 0)
            others = self._reserved() - own
            free = self._pools.available(Tier.HOST, Component.FULL, Copies.LAST)
            room = min(self._room() - others, free + prefetch.full_held)
            if outlook.run - found.full > room:
                if others and first:
                    prefetch.phase = Phase.CROWDED
                    self._let_go(prefetch)
                    return ""
                if room <= 0:
                    return "host_capacity"
            reason = "not_stored"
            refused: dict[Component, int] | None = None
            for target in outlook.descending(min(outlook.run, found.full + room), floor):
                if first and (target - found.host) * page < self._threshold:
                    return "below_threshold" if refused is None else reason
                needs = {c: len(positions) for c, positions in outlook.lacking(target).items()}
                if refused is not None and all(needs[c] >= count for c, count in refused.items()):
                    continue  # it would be refused, too
                if self._reserve(prefetch, found, outlook, target, floor):
                    if first:
                        prefetch.known, prefetch.target = found.host, target
                    return ""
                reason, refused = "host_capacity", needs
            return reason
        finally:
            self._tree.release(path)

    def _reserve(self, prefetch: Prefetch, found: Match, outlook: Outlook, target: int, floor: int) -> bool:
        """Take host pages for all that `target` lacks, and keep what they will hang on."""
        swa_start = min(outlook.window_start(target), found.full)
        anchor = self._tree.lock(
            found, found.full, Tier.HOST, swa_start=swa_start, states=outlook.states(target)
        )
        got = {component: pages.keys() for component, pages in prefetch.got.items()}
        for steps in (outlook.steps(target, floor, self._weights), [target]):
            parts = reading_order(outlook, steps, got)
            counts = dict.fromkeys((part.component for part in parts), 0)
            for part in parts:
                counts[part.component] += len(part.positions)
            taken = self._pools.allocate(Tier.HOST, counts, Copies.LAST)
            if taken is not None:
                break
        else:
            self._tree.release(anchor)
            return False
        for part in parts:
            count = len(part.positions)
            part.slots, taken[part.component] = taken[part.component][:count], taken[part.component][count:]
        self._let_go(prefetch)
        prefetch.anchor, prefetch.parts = anchor, parts
        prefetch.full_held += counts.get(Component.FULL, 0)
        return True

    def _publish(self, prefetch: Prefetch) -> None:
        """Put what has arrived into the tree, as far as the deepest boundary that it makes acceptable."""
        request, page = prefetch.request, self._rules.page_size
        found = self._tree.match(request.scope, request.tokens, prefetch.limit * page)
        outlook = Outlook(self._rules, found.full, self._tree.presence(found), prefetch.got)
        reach = outlook.deepest()
        if reach <= found.host:
            return
        first = {Component.SWA: outlook.window_start(reach), Component.MAMBA: reach}
        offered: dict[Component, dict[int, int]] = {c: {} for c in self._rules.kinds}  # position to slot
        for component, pages in prefetch.got.items():
            end = reach + (component is Component.MAMBA)
            for position in [p for p in pages if first.get(component, 0) <= p < end]:
                offered[component][position] = pages.pop(position)
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
            stored=prefetch.age == self._age.now,
        )
        prefetch.full_held -= len(offered[Component.FULL])
        for component, pages in offered.items():
            refused = unused.get(component, array("i"))
            self._pools.free(Tier.HOST, component, refused)
            self._stats.fetched_pages[component.name.lower()] += len(pages) - len(refused)
        prefetch.reached = reach
        after = self._tree.match(request.scope, request.tokens, prefetch.limit * page)
        prefetch.lease = self._tree.lock(after, after.host, Tier.HOST)

    def _end(self, prefetch: Prefetch, reason: str) -> None:
        """Publish no more: what arrived and was not needed goes back; a read in flight keeps its pages."""
        prefetch.crowded = prefetch.phase is Phase.CROWDED
        prefetch.phase, prefetch.reason = Phase.ENDED, reason
        self._let_go(prefetch)
        for component, pages in prefetch.got.items():
            self._free(prefetch, component, array("i", pages.values()))
        prefetch.got = {}
        self._stats.prefetch[reason] += 1

    def _free(self, prefetch: Prefetch, component: Component, slots: Slots) -> None:
        mine = array("i", (s for s in slots if s != NO_SLOT))
        self._pools.free(Tier.HOST, component, mine)
        if component is Component.FULL:
            prefetch.full_held -= len(mine)

    def _let_go(self, prefetch: Prefetch) -> None:
        if prefetch.anchor is not None:
            self._tree.release(prefetch.anchor)
            prefetch.anchor = None

    # -- accounting ----------------------------------------------------------------------------

    def _room(self) -> int:
        """FULL host pages that queued requests may hold altogether."""
        return int(self._pools.capacity(Tier.HOST, Component.FULL) * self._share)

    def _everyone(self) -> list[Prefetch]:
        """Every prefetch that may hold host pages; those of withdrawn requests until their read ends."""
        withdrawn = [p for p in self._fetching.values() if self._by_rid.get(p.request.rid) is not p]
        return [*self._by_rid.values(), *withdrawn]

    def _reserved(self) -> int:
        """FULL host pages that queued requests hold: reads in flight and what they hang on, and what was
        published for them."""
        reading = sum(p.full_held for p in self._everyone())
        anchored = sum(p.anchor.depth for p in self._by_rid.values() if p.anchor is not None)
        published = sum(p.lease.depth - p.known for p in self._by_rid.values() if p.lease is not None)
        return reading + anchored + published

    def remembered(self) -> dict[str, int]:
        return {"prefetches": len(self._by_rid), "looks": len(self._found), "fetches": len(self._fetching)}

    def held(self) -> dict[Component, Slots]:
        """Host slots of prefetches that are not in the tree, for the accounting check."""
        held: dict[Component, Slots] = {}
        for prefetch in self._everyone():
            for part in prefetch.parts:
                mine = array("i", (s for s in part.slots if s != NO_SLOT))
                held.setdefault(part.component, array("i")).extend(mine)
            for component, pages in prefetch.got.items():
                held.setdefault(component, array("i")).extend(pages.values())
        return held
