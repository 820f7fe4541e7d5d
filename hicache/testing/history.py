"""Random histories of a tree core: every step is mirrored by the oracle and followed by a full check.

A history is decided by its seed alone, so a failure is repeated by its seed and step.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hicache.errors import InvariantViolation
from hicache.keys import page_hashes
from hicache.testing.history_shape import HistoryShape
from hicache.testing.oracle import Oracle
from hicache.testing.oracle_pages import Held
from hicache.tiers.slots import SlotAllocator
from hicache.tree.base import Lease, SessionRefs, TreeCore, TreeRules, WritePlan
from hicache.tree.eviction import EvictionPolicy
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST = Tier.DEVICE, Tier.HOST

TreeFactory = Callable[[TreeRules, Mapping[Component, EvictionPolicy]], TreeCore]


@dataclass(eq=False)
class _Active:
    """A lease in both worlds, with the tokens it was taken for."""

    scope: bytes
    tokens: array[int]
    lease: Lease
    held: Held


@dataclass
class TreeHistory:
    """One random history of one core. run() raises with seed and step at the first difference."""

    factory: TreeFactory
    rules: TreeRules
    policies: Mapping[Component, EvictionPolicy]
    seed: int
    shape: HistoryShape = field(default_factory=HistoryShape)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tree = self.factory(self.rules, self.policies)
        self.oracle = Oracle(self.rules, self.policies)
        sizes = {DEVICE: self.shape.device_slots, HOST: self.shape.host_slots}
        self.pools = {
            (tier, component): SlotAllocator(sizes[tier])
            for tier in (DEVICE, HOST)
            for component in self.rules.kinds
        }
        self.active: list[_Active] = []
        self.writes: list[tuple[_Active, WritePlan]] = []
        self.sessions = [SessionRefs() for _ in range(4)]
        self.scopes = [b"", *(bytes([i]) * 32 for i in range(1, self.shape.scopes))]
        self.now = 0.0
        self.done: Counter[str] = Counter()
        self.trail: list[str] = []
        self._steps: list[tuple[Callable[[], None], int]] = [
            (self._look, 4),
            (self._admit, 6),
            (self._grow, 14),
            (self._finish, 5),
            (self._hold_windows, 3 if self.shape.islands else 0),
            (self._evict, 10),
            (self._fetch, 6),
            (self._pin_host, 2),
            (self._write, 5),
            (self._written, 5),
            (self._forget, 1),
            (self._reserve, 1),
            (self._flush, 1),
            (self._reclaim, 1),
            (self._hash, 1),
            (self._refer, 4),
            (self._close, 1),
        ]

    # -- running -------------------------------------------------------------------------------

    def run(self, steps: int) -> Counter[str]:
        """Take `steps` random steps, then wind down; return how often each kind happened."""
        choices = [step for step, _ in self._steps]
        weights = [weight for _, weight in self._steps]
        for number in range(steps):
            step = self.random.choices(choices, weights)[0]
            if self.random.random() < 0.004:
                step = self._drop_all
            self.now += 1.0
            try:
                step()
                self.done[step.__name__] += 1
                self._check()
            except Exception as error:
                trail = "\n  ".join(self.trail[-12:])
                raise AssertionError(
                    f"seed {self.seed}, step {number} ({step.__name__}): {error}\n  {trail}"
                ) from error
        self._wind_down()
        return self.done

    def _wind_down(self) -> None:
        """End everything: no slot may be left anywhere."""
        while self.writes:
            self._written()
        while self.active:
            self._release(self.active.pop())
        for session in self.sessions[::2]:
            self.tree.unrefer(session)
            self.oracle.sessions.unrefer(self.oracle.pages(), session)
        self._drop_all()
        self._check()
        if any(session.ends for session in self.sessions):
            raise AssertionError("sessions refer to an empty tree")
        for (tier, component), pool in self.pools.items():
            if pool.num_taken:
                raise AssertionError(f"{pool.num_taken} {component.name} slots leaked on {tier.name}")

    def _check(self) -> None:
        self.tree.check_integrity()
        for (tier, component), pool in self.pools.items():
            owned = self.tree.owned(tier, component)
            mine = sorted(
                page.slots[component][tier] for page in self.oracle.pages() if page.has(component, tier)
            )
            _equal(sorted(owned), mine, f"{component.name} on {tier.name}")
            _equal(len(owned), pool.num_taken, f"slots taken of {component.name} on {tier.name}")
            _equal(self.tree.resident(tier, component), len(mine), "resident")
            _equal(
                self.tree.evictable(tier, component),
                self.oracle.evictable(tier, component),
                f"evictable {component.name} on {tier.name}",
            )

    # -- small things --------------------------------------------------------------------------

    def _path(self) -> tuple[bytes, array[int]]:
        """A random path; often one that extends or repeats a live one."""
        scope = self.random.choice(self.scopes)
        pages = self.random.randint(1, self.shape.longest)
        count = pages * self.rules.page_size + self.random.randrange(self.rules.page_size)
        tokens = array("I", [self.random.randint(1, self.shape.alphabet) for _ in range(count)])
        if self.active and self.random.random() < 0.4:
            base = self.random.choice(self.active)
            keep = self.random.randint(0, len(base.tokens))
            return base.scope, (base.tokens[:keep] + tokens)[:count]
        return scope, tokens

    def _take(self, tier: Tier, component: Component, count: int) -> Slots | None:
        return self.pools[(tier, component)].allocate(count)

    def _give(self, tier: Tier, slots: Mapping[Component, Slots]) -> None:
        for component, given in slots.items():
            self.pools[(tier, component)].free(given)

    def _offered(self, tier: Tier, component: Component, count: int, chance: float) -> Slots:
        """A slot per page, NO_SLOT at random or where the pool is empty."""
        out = array("i")
        for _ in range(count):
            slot = self._take(tier, component, 1) if self.random.random() < chance else None
            out.append(slot[0] if slot is not None else NO_SLOT)
        return out

    def _states(self, tier: Tier, start: int, end: int) -> list[tuple[int, int]]:
        out = []
        if MAMBA in self.rules.kinds:
            for at in range(start + 1, end + 1):
                if self.random.random() < 0.4:
                    slot = self._take(tier, MAMBA, 1)
                    if slot is not None:
                        out.append((at, slot[0]))
        return out

    def _lock(self, scope: bytes, tokens: array[int], tier: Tier, boundary: int, at: object) -> _Active:
        lease = self.tree.lock(at, boundary, tier)  # type: ignore[arg-type]
        path = self.oracle.path(scope, tokens.tobytes())[:boundary]
        active = _Active(scope, tokens, lease, self.oracle.lock(path, tier))
        self.active.append(active)
        return active

    def _release(self, active: _Active) -> None:
        self.tree.release(active.lease)
        self.oracle.release(active.held)

    def _one(self, tier: Tier | None = None) -> _Active | None:
        fitting = [a for a in self.active if tier is None or a.lease.tier is tier]
        return self.random.choice(fitting) if fitting else None

    # -- steps ---------------------------------------------------------------------------------

    def _look(self) -> None:
        scope, tokens = self._path()
        limit = self.random.randint(0, len(tokens) + 2)
        raw = tokens.tobytes()
        form: object = self.random.choice([tokens, raw, bytearray(raw), memoryview(tokens)])
        found = self.tree.match(scope, form, limit)  # type: ignore[arg-type]
        full, on_device, device, host = self.oracle.match(scope, raw, limit)
        self.trail.append(f"match {list(tokens)} to {limit}: {full} {on_device} {device} {host}")
        _equal((found.full, found.full_device, found.device, found.host), (full, on_device, device, host))
        cut = full - full % self.rules.align_pages
        _equal(found.branch, (cut,) if cut > host else (), "branch")
        path = self.oracle.path(scope, raw)[:full]
        _equal(self.tree.references(found), [len(page.sessions) for page in path], "references")
        boundary = self.random.randint(0, full)
        _equal(self.tree.slots(found, boundary), self.oracle.slots(path, boundary), f"slots to {boundary}")
        seen = self.tree.presence(found)
        _equal(seen.full, full, "presence")
        if SWA in self.rules.kinds:
            _equal(seen.swa, bytearray(page.on_any(SWA) for page in path), "SWA presence")
        if MAMBA in self.rules.kinds:
            _equal(seen.checkpoints, [page.depth for page in path if page.on_any(MAMBA)], "checkpoints")

    def _admit(self) -> None:
        if len(self.active) >= self.shape.most_leases:
            return self._finish()
        scope, tokens = self._path()
        found = self.tree.match(scope, tokens, len(tokens))
        boundary = self.random.choice([found.device, found.device, found.host, found.full])
        active = self._lock(scope, tokens, DEVICE, boundary, found)
        priority = self.random.randint(-1, 2)
        self.tree.touch(active.lease, self.now, priority=priority)
        self.oracle.touch(active.held, self.now, priority)
        self.trail.append(f"admit {list(tokens)} at {boundary}")
        return None

    def _grow(self) -> None:
        active = self._one(DEVICE)
        if active is None:
            return self._admit()
        size = self.rules.page_size
        reach = 0
        for page in active.held.path:
            reach += page.has(FULL, DEVICE)
        start = reach if self.random.random() < 0.7 else self.random.randint(0, reach)
        if self.random.random() < 0.5:
            extra = self.random.randint(1, 3) * size
            active.tokens = active.tokens + array(
                "I", [self.random.randint(1, self.shape.alphabet) for _ in range(extra)]
            )
        last = len(active.tokens) // size
        end = self.random.randint(start, last) if self.random.random() < 0.3 else last
        full = self._take(DEVICE, FULL, end - start)
        if full is None:
            self._shrink(DEVICE, FULL, end - start)
            return None
        swa = None
        if SWA in self.rules.kinds and self.random.random() < 0.9:
            swa = self._offered(DEVICE, SWA, end - start, self.random.choice([0.3, 0.8, 1.0]))
        states = self._states(DEVICE, start, end)
        places = None
        if self.shape.islands and self.random.random() < 0.8:
            places = [at for at in range(1, end + 2) if self.random.random() < 0.3] + [end]
        priority = self.random.randint(-1, 2)
        self.trail.append(
            f"insert {list(active.tokens)} [{start}, {end}) swa {swa} states {states} places {places}"
        )
        done = self.tree.insert(
            active.lease,
            active.tokens,
            start,
            end,
            full=full,
            swa=swa,
            states=states,
            places=places,
            now=self.now,
            priority=priority,
        )
        mine = self.oracle.insert(
            active.held,
            active.scope,
            active.tokens.tobytes(),
            (start, end),
            full=full,
            swa=swa,
            states=states,
            places=places,
            now=self.now,
            priority=priority,
        )
        _equal((done.full, done.swa, done.new_pages), (mine.full, mine.swa, mine.new_pages), "inserted")
        _equal(_sorted(done.duplicates), _sorted(mine.duplicates), "duplicates")
        _equal((active.lease.depth, active.lease.swa_start), (end, active.held.swa_start), "lease")
        self._give(DEVICE, done.duplicates)
        return None

    def _finish(self) -> None:
        if self.active:
            active = self.active.pop(self.random.randrange(len(self.active)))
            self.trail.append(f"release depth {active.lease.depth} on {active.lease.tier.name}")
            self._release(active)

    def _refer(self) -> None:
        """A session's request ends: mostly where it grew to, sometimes on the host alone."""
        active = self._one()
        if active is not None:
            number = self.random.randrange(len(self.sessions))
            self.trail.append(f"session {number} refers to depth {active.lease.depth}")
            self.tree.refer(active.lease, self.sessions[number])
            self.oracle.sessions.refer(active.held.path, self.sessions[number])

    def _close(self) -> None:
        number = self.random.randrange(len(self.sessions))
        self.trail.append(f"session {number} closes")
        self.tree.unrefer(self.sessions[number])
        self.oracle.sessions.unrefer(self.oracle.pages(), self.sessions[number])

    def _hold_windows(self) -> None:
        """A running request moves on: its lease needs another part of the window."""
        active = self._one()
        if active is None:
            return
        start = self.random.randint(0, active.lease.depth + 2)
        self.trail.append(f"hold windows of depth {active.lease.depth} from {start}")
        self.tree.hold_windows(active.lease, start)
        self.oracle.hold_windows(active.held, start)

    def _evict(self) -> None:
        tier = self.random.choice((DEVICE, HOST))
        component = self.random.choice((FULL, *self.rules.kinds))
        self._shrink(tier, component, self.random.choice((1, 1, 2, 3, 5)))

    def _shrink(self, tier: Tier, component: Component, count: int) -> None:
        self.trail.append(f"evict {count} {component.name} on {tier.name}")
        outcome = self.tree.evict(tier, component, count)
        self.oracle.evicted(tier, component, count, outcome)
        for (where, what), slots in outcome.freed.items():
            self.pools[(where, what)].free(slots)

    def _fetch(self) -> None:
        scope, tokens = self._path()
        last = len(tokens) // self.rules.page_size
        known = len(self.oracle.path(scope, tokens.tobytes()))
        start = self.random.choice([min(known, last), self.random.randint(0, last)])
        end = self.random.randint(start, last)
        full = self._offered(HOST, FULL, end - start, 0.9)
        swa = self._offered(HOST, SWA, end - start, 0.6) if SWA in self.rules.kinds else None
        states = self._states(HOST, start, end)
        stored = self.random.random() < 0.7
        self.trail.append(f"fetch {list(tokens)} [{start}, {end}) full {full} swa {swa} states {states}")
        left = self.tree.insert_host(
            scope, tokens, start, end, full=full, swa=swa, states=states, now=self.now, stored=stored
        )
        mine = self.oracle.insert_host(
            scope,
            tokens.tobytes(),
            (start, end),
            full=full,
            swa=swa,
            states=states,
            now=self.now,
            stored=stored,
        )
        _equal(_sorted(left), _sorted(mine), "refused by insert_host")
        self._give(HOST, left)

    def _pin_host(self) -> None:
        if len(self.active) < self.shape.most_leases:
            scope, tokens = self._path()
            found = self.tree.match(scope, tokens, len(tokens))
            boundary = self.random.randint(0, found.full)
            self.trail.append(f"host lease {list(tokens)} at {boundary}")
            self._lock(scope, tokens, HOST, boundary, found)

    def _write(self) -> None:
        active = self._one()
        if active is None or len(self.writes) >= 3:
            return self._written()
        target = self.random.choice((HOST, Tier.STORAGE))
        hits = self.random.choice((0, 0, 1, 2))
        unstored = self.random.random() < 0.3
        plan = self.tree.plan_write(active.lease, target, min_hits=hits, unstored=unstored)
        mine = self.oracle.plan_write(active.held, target, hits, unstored=unstored)
        self.trail.append(f"plan to {target.name} of depth {active.lease.depth}, hits {hits}: {plan.pages}")
        _equal((plan.source, plan.pages, plan.slots), (mine.source, mine.pages, mine.slots), "plan")
        if target is Tier.STORAGE and plan.count:
            digests = page_hashes(active.scope, active.tokens, self.rules.page_size)
            for component, positions in plan.pages.items():
                named = [digests[at - (component is MAMBA)] for at in positions]
                _equal(plan.hashes[component], named, "hashes")
        cover = self.tree.begin_write(active.lease, plan)
        held = self.oracle.begin_write(active.held.path, plan)
        _equal((cover.depth, cover.tier), (held.depth, held.tier), "transfer lease")
        self.writes.append((_Active(active.scope, active.tokens, cover, held), plan))
        return None

    def _written(self) -> None:
        if not self.writes:
            return
        active, plan = self.writes.pop(self.random.randrange(len(self.writes)))
        chance = self.random.choice((0.0, 0.5, 1.0, 1.0))
        outcome: dict[Component, Slots] = {}
        for component, positions in plan.pages.items():
            if plan.source is DEVICE:
                outcome[component] = self._offered(HOST, component, len(positions), chance)
            else:
                done = [0 if self.random.random() < chance else NO_SLOT for _ in positions]
                outcome[component] = array("i", done)
        self.trail.append(f"written from {plan.source.name}: {plan.pages} as {outcome}")
        left = self.tree.end_write(active.lease, plan, outcome)
        mine = self.oracle.end_write(active.held, plan, outcome)
        _equal(_sorted(left), _sorted(mine), "refused by end_write")
        self._give(HOST, left)

    def _forget(self) -> None:
        if self.random.random() < 0.2:
            self.trail.append("forget all that is stored")
            self.tree.forget_all_stored()
            for page in self.oracle.pages():
                page.stored.clear()
        active = self._one()
        if active is None or not active.held.path:
            return
        component = self.random.choice(self.rules.kinds)
        shift = component is MAMBA
        positions = [i + shift for i in range(active.lease.depth) if self.random.random() < 0.5]
        self.tree.forget_stored(active.lease, component, positions)
        for at in positions:
            active.held.path[at - shift].stored.discard(component)

    def _reserve(self) -> None:
        """The coldest page, if nobody else has a copy, must be under one of the leases."""
        tier = self.random.choice((DEVICE, HOST))
        target = Tier(tier + 1)
        first = self.oracle.next_full(tier) if self.oracle.evictable(tier, FULL) else None
        leases = self.tree.coldest_unwritten(tier, self.random.randint(1, 4))
        self.trail.append(f"reserve on {tier.name}: {[lease.depth for lease in leases]}")
        covered = set()
        for lease in leases:
            slots = self.tree.slots(lease, lease.depth)
            last = (slots.full_device if tier is DEVICE else slots.full_host)[-1]
            at = next(page for page in self.oracle.pages() if page.slots[FULL][tier] == last)
            while at.depth:
                covered.add(at)
                assert at.parent is not None
                at = at.parent
        if first is not None:
            copied = FULL in first.stored if tier is HOST else first.has(FULL, HOST)
            if not copied and (FULL, target) not in first.busy and first not in covered:
                raise InvariantViolation(f"the coldest page, at depth {first.depth}, is not locked")
        for lease in leases:
            self.tree.release(lease)

    def _flush(self) -> None:
        """Paths that storage lacks are locked; those that it has whole need not be."""
        leases, count = self.tree.unstored()
        missing = [page for page in self.oracle.pages() if FULL not in page.stored]
        _equal(count, len(missing), "unstored pages")
        deepest = max((page.depth for page in missing), default=0)
        _equal(max((lease.depth for lease in leases), default=0) >= deepest, True, "depth locked to flush")
        for lease in leases:
            self.tree.release(lease)

    def _reclaim(self) -> None:
        count = self.random.randint(1, 4)
        self.trail.append(f"reclaim {count}")
        kept = self.oracle.covered(HOST)
        copies = [
            p for p in self.oracle.pages() if p.has(FULL, HOST) and p.has(FULL, DEVICE) and p not in kept
        ]
        _equal(self.tree.reclaimable(), len(copies), "reclaimable")
        slots = self.tree.reclaim_duplicates(count)
        self.oracle.reclaimed(count, slots)
        self.pools[(HOST, FULL)].free(slots)

    def _hash(self) -> None:
        active = self._one()
        if active is not None:
            end = self.random.randint(0, active.lease.depth)
            start = self.random.randint(0, end)
            digests = page_hashes(active.scope, active.tokens, self.rules.page_size)
            _equal(self.tree.page_hashes(active.lease, start, end), digests[start:end], "digests")

    def _drop_all(self) -> None:
        self.trail.append("drop all")
        freed = self.tree.drop_all()
        self.oracle.dropped(freed)
        for (tier, component), slots in freed.items():
            self.pools[(tier, component)].free(slots)


def _sorted(slots: Mapping[Component, Slots]) -> dict[Component, list[int]]:
    return {component: sorted(given) for component, given in slots.items() if given}


def _equal(given: object, expected: object, what: str = "answer") -> None:
    if given != expected:
        raise InvariantViolation(f"{what}: the core says {given}, the oracle {expected}")
