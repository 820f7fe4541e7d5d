"""The naive cache: one record per page, keyed by its whole prefix; every answer by brute force.

The second implementation that every tree core is compared with. It predicts what match, slots,
insert, insert_host and plan_write must answer and which FULL pages and states an eviction must take.
Which SWA pages go is the core's choice; the oracle checks that each was allowed to go.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from hicache.errors import InvariantViolation
from hicache.testing.conversations import Conversations
from hicache.testing.oracle_pages import Held, Page
from hicache.testing.victims import next_full
from hicache.tree.base import Evicted, Freed, Inserted, PathSlots, TreeRules, WritePlan
from hicache.tree.eviction import EvictionPolicy, Stats
from hicache.types import NO_SLOT, TOKEN_BYTES, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


class Oracle:
    """The naive cache. `policies` as for the core under test."""

    def __init__(self, rules: TreeRules, policies: Mapping[Component, EvictionPolicy]) -> None:
        self.rules = rules
        self.policies = policies
        self.roots: dict[bytes, Page] = {}
        self.held: set[Held] = set()
        self.sessions = Conversations()

    # -- reading -------------------------------------------------------------------------------

    def pages(self) -> Iterator[Page]:
        """Every page in the tree, parents first."""
        waiting = list(self.roots.values())
        for page in waiting:
            waiting.extend(page.children.values())
            if page.depth:
                yield page

    def split(self, tokens: bytes) -> list[bytes]:
        size = self.rules.page_size * TOKEN_BYTES
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]

    def path(self, scope: bytes, tokens: bytes) -> list[Page]:
        """The pages of a path that are in the tree."""
        at = self.roots.get(scope)
        found: list[Page] = []
        for part in self.split(tokens):
            at = at.children.get(part) if at is not None else None
            if at is None:
                break
            found.append(at)
        return found

    def accepts(self, path: Sequence[Page], boundary: int, tiers: Sequence[Tier]) -> bool:
        """The rule at one boundary, word for word."""
        if boundary == 0:
            return True
        if boundary % self.rules.align_pages:
            return False
        if not all(any(page.has(FULL, t) for t in tiers) for page in path[:boundary]):
            return False
        if SWA in self.rules.kinds:
            window = path[max(0, boundary - self.rules.window_pages) : boundary]
            if not all(any(page.has(SWA, t) for t in tiers) for page in window):
                return False
        return MAMBA not in self.rules.kinds or any(path[boundary - 1].has(MAMBA, t) for t in tiers)

    def match(self, scope: bytes, tokens: bytes, limit: int) -> tuple[int, int, int, int]:
        """Return (full, full_device, device, host)."""
        path = self.path(scope, tokens)[: limit // self.rules.page_size]
        on_device = 0
        while on_device < len(path) and path[on_device].has(FULL, DEVICE):
            on_device += 1
        device = max(b for b in range(len(path) + 1) if self.accepts(path, b, (DEVICE,)))
        host = max(b for b in range(len(path) + 1) if self.accepts(path, b, (DEVICE, HOST)))
        return len(path), on_device, device, host

    def slots(self, path: Sequence[Page], boundary: int) -> PathSlots:
        """Gather a path."""
        path = path[:boundary]
        device = [page.slots[FULL][DEVICE] for page in path if page.has(FULL, DEVICE)]
        host = [page.slots[FULL][HOST] for page in path[len(device) :]]
        out = PathSlots(boundary, array("i", device), array("i", host))
        if SWA in self.rules.kinds:
            out.window_start = max(0, boundary - self.rules.window_pages)
            out.swa_device = array("i", [p.slots[SWA][DEVICE] for p in path[out.window_start :]])
            out.swa_host = array("i", [p.slots[SWA][HOST] for p in path[out.window_start :]])
        if MAMBA in self.rules.kinds and path:
            out.state_device, out.state_host = path[-1].slots[MAMBA]
        return out

    # -- growing -------------------------------------------------------------------------------

    def _page(self, scope: bytes, path: list[Page], part: bytes, stats: Stats) -> Page:
        parent = path[-1] if path else self.roots.setdefault(scope, Page(None, b"", Stats()))
        page = parent.children[part] = Page(parent, part, stats)
        for above in path:
            above.stats.raise_to(stats.last, stats.priority, stats.reach)
        path.append(page)
        return page

    def _adopt(
        self, page: Page, component: Component, tier: Tier, slot: int, refused: dict[Component, Slots]
    ) -> bool:
        if slot == NO_SLOT:
            return False
        if page.has(component, tier):
            refused.setdefault(component, array("i")).append(slot)
            return False
        page.slots[component][tier] = slot
        return True

    def insert(
        self,
        held: Held,
        scope: bytes,
        tokens: bytes,
        span: tuple[int, int],
        *,
        full: Slots,
        swa: Slots | None,
        states: Sequence[tuple[int, int]],
        places: Sequence[int] | None,
        now: float,
        priority: int,
    ) -> Inserted:
        """Grow by device pages, page by page, and move the lease."""
        start, end = span
        parts = self.split(tokens)
        path = self.path(scope, tokens)[:end]
        out = Inserted(array("i"), array("i"), {}, 0)
        reach = end * self.rules.page_size
        for i in range(start, end):
            offered = swa[i - start] if swa is not None else NO_SLOT
            known = i < len(path)
            page = path[i] if known else None
            if page is None:
                page = self._page(scope, path, parts[i], Stats(now, now, 1, priority, reach))
                out.new_pages += 1
            there = page.has(FULL, DEVICE)
            self._adopt(page, FULL, DEVICE, full[i - start], out.duplicates)
            unwanted = there and i < end - self.rules.window_pages
            if places is not None:  # an island is the window before a place, and one boundary more
                before = self.rules.window_pages + self.rules.align_pages
                unwanted = not any(at - before <= i < at for at in places)
            if unwanted and offered != NO_SLOT:
                out.duplicates.setdefault(SWA, array("i")).append(offered)
            else:
                self._adopt(page, SWA, DEVICE, offered, out.duplicates)
            out.full.append(page.slots[FULL][DEVICE])
            if SWA in self.rules.kinds:
                out.swa.append(page.slots[SWA][DEVICE])
        self._adopt_states(path, DEVICE, states, out.duplicates, Stats(now, now, 1, priority, reach))
        held.path = path
        held.swa_start = max(0, end - self.rules.window_pages) if SWA in self.rules.kinds else end
        held.states = (end,) if end and MAMBA in self.rules.kinds else ()
        return out

    def _adopt_states(
        self,
        path: Sequence[Page],
        tier: Tier,
        states: Sequence[tuple[int, int]],
        refused: dict[Component, Slots],
        stats: Stats,
    ) -> None:
        for at, slot in states:
            if at > len(path):
                refused.setdefault(MAMBA, array("i")).append(slot)
                continue
            page = path[at - 1]
            fresh = not page.on_any(MAMBA)
            if self._adopt(page, MAMBA, tier, slot, refused) and fresh:
                page.state_stats = stats.copy()
                page.stored.discard(MAMBA)
                page.busy -= {(MAMBA, HOST), (MAMBA, STORAGE)}

    def insert_host(
        self,
        scope: bytes,
        tokens: bytes,
        span: tuple[int, int],
        *,
        full: Slots,
        swa: Slots | None,
        states: Sequence[tuple[int, int]],
        now: float,
        stored: bool,
    ) -> dict[Component, Slots]:
        """Publish host pages; return what was refused."""
        start, end = span
        parts = self.split(tokens)
        path = self.path(scope, tokens)[:end]
        refused: dict[Component, Slots] = {}
        reach = end * self.rules.page_size
        for i in range(start, end):
            offered = {FULL: full[i - start], SWA: swa[i - start] if swa is not None else NO_SLOT}
            if i == len(path) and offered[FULL] != NO_SLOT:
                self._page(scope, path, parts[i], Stats(now, now, 0, 0, reach))
            for component, slot in offered.items():
                if i >= len(path):
                    if slot != NO_SLOT:
                        refused.setdefault(component, array("i")).append(slot)
                elif self._adopt(path[i], component, HOST, slot, refused) and stored:
                    path[i].stored.add(component)
        before = {at: len(path) >= at and path[at - 1].has(MAMBA, HOST) for at, _ in states}
        self._adopt_states(path, HOST, states, refused, Stats(now, now, 1, 0, reach))
        for at, _ in states:
            if stored and at <= len(path) and not before[at]:
                path[at - 1].stored.add(MAMBA)
        return refused

    # -- leases --------------------------------------------------------------------------------

    def lock(
        self,
        path: list[Page],
        tier: Tier,
        *,
        swa_start: int | None = None,
        states: Sequence[int] | None = None,
    ) -> Held:
        """Protect a path."""
        depth = len(path)
        low = max(0, depth - self.rules.window_pages) if swa_start is None else swa_start
        kept = ((depth,) if depth else ()) if states is None else tuple(states)
        held = Held(
            path,
            tier,
            low if SWA in self.rules.kinds else depth,
            kept if MAMBA in self.rules.kinds else (),
        )
        self.held.add(held)
        return held

    def release(self, held: Held) -> None:
        """End a protection."""
        self.held.remove(held)

    def hold_windows(self, held: Held, swa_start: int) -> None:
        """Move the start of a protected window."""
        if SWA in self.rules.kinds:
            held.swa_start = min(swa_start, held.depth)

    def touch(self, held: Held, now: float, priority: int) -> None:
        """Stamp every page of a path, and the state at its end."""
        reach = held.depth * self.rules.page_size
        for page in held.path:
            page.stats.hits += 1
            page.stats.raise_to(now, priority, reach)
        if held.path:
            held.path[-1].state_stats.hits += 1
            held.path[-1].state_stats.raise_to(now, priority, reach)

    def covered(self, tier: Tier | None) -> set[Page]:
        """Pages of leases on one tier, or on any."""
        return {page for held in self.held if tier in (None, held.tier) for page in held.path}

    def protected(self, tier: Tier, component: Component) -> set[Page]:
        """Pages whose entry of a component on a tier must stay."""
        if component is SWA:
            return {
                page
                for held in self.held
                if held.tier is tier
                for page in held.path[held.swa_start :]
                if page.has(SWA, tier)
            }
        if component is MAMBA:
            pages = {held.path[at - 1] for held in self.held if held.tier is tier for at in held.states}
            return {page for page in pages if page.has(MAMBA, tier)}
        if tier is HOST:
            return {page for page in self.covered(None) if not page.has(FULL, DEVICE)}
        kept = self.covered(DEVICE) | {page for page in self.covered(None) if not page.has(FULL, HOST)}
        for page in [page for page in kept if page.has(FULL, DEVICE)]:
            above: Page | None = page
            while above is not None and above.depth:
                kept.add(above)
                above = above.parent
        return {page for page in kept if page.has(FULL, DEVICE)}

    def resident(self, tier: Tier, component: Component) -> int:
        """Count entries."""
        return sum(page.has(component, tier) for page in self.pages())

    def evictable(self, tier: Tier, component: Component) -> int:
        """Count what could go."""
        there = {page for page in self.pages() if page.has(component, tier)}
        if component is FULL and tier is HOST:
            there = {page for page in there if not page.has(FULL, DEVICE)}
        return len(there - self.protected(tier, component))

    # -- writing down --------------------------------------------------------------------------

    def plan_write(self, held: Held, target: Tier, min_hits: int, *, unstored: bool = False) -> WritePlan:
        """List what a target lacks."""
        source = Tier(target - 1)
        plan = WritePlan(
            source, {c: array("i") for c in self.rules.kinds}, {c: array("i") for c in self.rules.kinds}
        )
        path = []
        for page in held.path:
            if page.stats.hits < min_hits:
                break
            if target is STORAGE and not (
                page.has(FULL, HOST) or FULL in page.stored or (FULL, STORAGE) in page.busy
            ):
                break
            path.append(page)
        for component in self.rules.kinds:
            for page in path:
                stored = component in page.stored
                there = stored if target is STORAGE else page.has(component, HOST) or (unstored and stored)
                if page.has(component, source) and not there and (component, target) not in page.busy:
                    plan.pages[component].append(page.depth - (component is not MAMBA))
                    plan.slots[component].append(page.slots[component][source])
        return plan

    def begin_write(self, path: list[Page], plan: WritePlan) -> Held:
        """Mark a plan as in flight and protect what it reads."""
        target = Tier(plan.source + 1)
        depth = max([at + (c is not MAMBA) for c, positions in plan.pages.items() for at in positions] or [0])
        swa = plan.pages.get(SWA)
        held = self.lock(
            path[:depth],
            plan.source,
            swa_start=swa[0] if swa else depth,
            states=tuple(plan.pages.get(MAMBA, ())),
        )
        for component, positions in plan.pages.items():
            for at in positions:
                path[at - (component is MAMBA)].busy.add((component, target))
        return held

    def end_write(
        self, held: Held, plan: WritePlan, outcome: Mapping[Component, Slots]
    ) -> dict[Component, Slots]:
        """Publish what was written."""
        target = Tier(plan.source + 1)
        refused: dict[Component, Slots] = {}
        for component, positions in plan.pages.items():
            for at, result in zip(positions, outcome[component], strict=True):
                page = held.path[at - (component is MAMBA)]
                page.busy.discard((component, target))
                if result != NO_SLOT and target is STORAGE:
                    page.stored.add(component)
                elif target is HOST:
                    self._adopt(page, component, HOST, result, refused)
        self.release(held)
        return refused

    # -- shrinking -----------------------------------------------------------------------------

    def evicted(self, tier: Tier, component: Component, count: int, outcome: Evicted) -> None:
        """Check an eviction that happened, and follow it; raises InvariantViolation if it was wrong."""
        expected: Freed = {}
        demoted = lost = 0
        wanted = min(count, self.evictable(tier, component))
        if component is FULL:
            for _ in range(wanted):
                victim = self.next_full(tier)
                if tier is DEVICE and victim.has(FULL, HOST):
                    self._take(victim, DEVICE, expected)
                    demoted += 1
                else:
                    lost += self._drop(victim, expected)
        else:
            given = outcome.freed.get((tier, component), array("i"))
            self._check_chosen(tier, component, given, wanted)
            by_slot = {page.slots[component][tier]: page for page in self.pages()}
            for slot in given:
                by_slot[slot].slots[component][tier] = NO_SLOT
            if given:
                expected[(tier, component)] = given
        _same_slots(expected, outcome.freed, f"eviction of {count} {component.name} on {tier.name}")
        if (demoted, lost) != (outcome.demoted, outcome.lost):
            raise InvariantViolation(f"demoted and lost {outcome.demoted, outcome.lost}, not {demoted, lost}")

    def _state_key(self, page: Page) -> object:
        return self.policies[MAMBA].key(page.state_stats, (page.depth - 1) * self.rules.page_size)

    def next_full(self, tier: Tier) -> Page:
        """The unprotected tail that the policy puts first."""
        return next_full(self.pages(), self.protected(tier, FULL), tier, self.policies[FULL], self.rules)

    def _check_chosen(self, tier: Tier, component: Component, given: Slots, wanted: int) -> None:
        kept = self.protected(tier, component)
        free = {
            page.slots[component][tier]: page
            for page in self.pages()
            if page.has(component, tier) and page not in kept
        }
        if len(given) != wanted or len(set(given)) != wanted or not set(given) <= set(free):
            raise InvariantViolation(f"{component.name} {list(given)} went; {wanted} of {sorted(free)} could")
        if component is MAMBA:
            keys = {slot: (self.sessions.state_refs(p), self._state_key(p)) for slot, p in free.items()}
            best = sorted(keys.values())[:wanted]
            if sorted(keys[slot] for slot in given) != best:
                raise InvariantViolation(f"states {list(given)} went before colder ones")

    def _take(self, page: Page, tier: Tier, freed: Freed) -> None:
        for component in self.rules.kinds:
            if page.has(component, tier):
                freed.setdefault((tier, component), array("i")).append(page.slots[component][tier])
                page.slots[component][tier] = NO_SLOT

    def _drop(self, page: Page, freed: Freed) -> int:
        """Take a page and what is below it out of the tree; return how many had no copy in storage."""
        lost = 0
        gone = [page]
        for below in gone:
            gone.extend(below.children.values())
            lost += FULL not in below.stored
            self._take(below, DEVICE, freed)
            self._take(below, HOST, freed)
        for below in reversed(gone):
            self.sessions.lose(below)
            assert below.parent is not None
            del below.parent.children[below.tokens]
        return lost

    def reclaimed(self, count: int, given: Slots) -> None:
        """Check and follow a reclaim of host copies."""
        kept = self.covered(HOST)
        free = {
            page.slots[FULL][HOST]: page
            for page in self.pages()
            if page.has(FULL, HOST) and page.has(FULL, DEVICE) and page not in kept
        }
        if len(set(given)) != min(count, len(free)) or not set(given) <= set(free):
            raise InvariantViolation(f"host copies {list(given)} went; {count} of {sorted(free)} could")
        for slot in given:
            free[slot].slots[FULL][HOST] = NO_SLOT

    def dropped(self, freed: Freed) -> None:
        """Check and follow drop_all()."""
        expected: Freed = {}
        for tier in (DEVICE, HOST):
            for _ in range(self.evictable(tier, FULL)):
                victim = self.next_full(tier)
                if tier is DEVICE and victim.has(FULL, HOST):
                    self._take(victim, DEVICE, expected)
                else:
                    self._drop(victim, expected)
        for component in self.rules.kinds[1:]:
            for tier in (DEVICE, HOST):
                kept = self.protected(tier, component)
                for page in self.pages():
                    if page.has(component, tier) and page not in kept:
                        expected.setdefault((tier, component), array("i")).append(page.slots[component][tier])
                        page.slots[component][tier] = NO_SLOT
        covered = self.covered(HOST)
        for page in self.pages():
            if page.has(FULL, HOST) and page.has(FULL, DEVICE) and page not in covered:
                expected.setdefault((HOST, FULL), array("i")).append(page.slots[FULL][HOST])
                page.slots[FULL][HOST] = NO_SLOT
        _same_slots(expected, freed, "drop_all")


def _same_slots(expected: Freed, given: Freed, what: str) -> None:
    left = {key: sorted(slots) for key, slots in expected.items() if slots}
    right = {key: sorted(slots) for key, slots in given.items() if slots}
    if left != right:
        raise InvariantViolation(f"{what} freed {right}, not {left}")
