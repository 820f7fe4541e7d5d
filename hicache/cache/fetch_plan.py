"""What to read of what storage has, so that a read that ends anywhere leaves as deep a hit as it can.

Plans over what the tree and storage hold of one path; touches neither tree, pools nor executor.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from hicache import boundary
from hicache.tree.base import PathPresence, TreeRules
from hicache.types import Component, Slots

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA

# Boundaries on the way are read whole, too, as long as that makes a read longer by so much of FULL's bytes.
_STEPS_SHARE = 0.125
_MOST_STEPS = 3

Holdings = Mapping[Component, Collection[int]]  # positions: page indices (FULL, SWA), boundaries (MAMBA)


@dataclass(slots=True)
class Part:
    """Objects of one component, in the order they are asked for.

    Positions ascend: page indices (FULL, SWA) or boundaries (MAMBA). `slots` are host pages held by
    the fetch, NO_SLOT once somebody else has them.
    """

    component: Component
    positions: Sequence[int]
    slots: Slots = field(default_factory=lambda: array("i"))


class Outlook:
    """The boundaries of one path that tree and storage together make acceptable.

    `start` is the end of the tree's FULL run; `there` is what is to be had, or has come, besides.
    """

    def __init__(self, rules: TreeRules, start: int, presence: PathPresence, there: Holdings) -> None:
        self.start = start
        self._rules = rules
        self.run = run_end(start, there.get(FULL, ()))  # where FULL ends
        self._swa = None if presence.swa is None else presence.swa[: self.run].ljust(self.run, b"\0")
        self._holes = None if self._swa is None else bytes(self._swa)  # before `there` fills them
        if self._swa is not None:
            for i in there.get(SWA, ()):
                if i < self.run:
                    self._swa[i] = 1
        self._states = presence.checkpoints
        self._checkpoints = None
        if presence.checkpoints is not None:
            self._checkpoints = sorted({*there.get(MAMBA, ()), *presence.checkpoints})

    def deepest(self, limit: int | None = None) -> int:
        """Return the deepest acceptable boundary, of those up to `limit` pages."""
        return boundary.deepest(
            self.run if limit is None else min(limit, self.run),
            window_pages=self._rules.window_pages,
            swa=self._swa,
            checkpoints=self._checkpoints,
            align=self._rules.align_pages,
        )

    def _acceptable(self, limit: int) -> list[int]:
        return boundary.acceptable(
            limit,
            window_pages=self._rules.window_pages,
            swa=self._swa,
            checkpoints=self._checkpoints,
            align=self._rules.align_pages,
        )

    def descending(self, limit: int, floor: int) -> Iterator[int]:
        """Yield acceptable boundaries in (floor, limit], deepest first."""
        found = self.deepest(limit)
        if found > floor:
            yield found
            yield from (b for b in reversed(self._acceptable(found - 1)) if b > floor)

    def window_start(self, end: int) -> int:
        return max(0, end - self._rules.window_pages)

    def lacking(self, end: int) -> dict[Component, list[int]]:
        """Positions of windows and states that boundary `end` needs and the tree has not."""
        needs: dict[Component, list[int]] = {}
        if self._holes is not None:
            needs[SWA] = [i for i in range(self.window_start(end), end) if not self._holes[i]]
        if self._states is not None:
            needs[MAMBA] = [] if end in self._states else [end]
        return needs

    def states(self, end: int) -> list[int]:
        """The state that boundary `end` takes from the tree, if it does."""
        return [end] if self._states is not None and end in self._states else []

    def steps(self, target: int, floor: int, weights: Mapping[Component, int]) -> list[int]:
        """Choose boundaries to complete on the way to `target`, ascending, `target` last.

        A read that is cut off ends at the last of them. `weights` are bytes of a page per component.
        """
        if self._swa is None and self._checkpoints is None:
            return [target]  # every page, or group of pages, is a step
        window = min(self._rules.window_pages, target) if self._swa is not None else 0
        each = window * weights.get(SWA, 0) + weights.get(MAMBA, 0)
        room = int((target - self.start) * weights[FULL] * _STEPS_SHARE)
        count = _MOST_STEPS if not each else min(_MOST_STEPS, room // each)
        span = target - floor
        found = {self.deepest(floor + span * i // (count + 1)) for i in range(1, count + 1)}
        return [*sorted(b for b in found if floor < b < target), target]


def wanted(rules: TreeRules, start: int, host: int, limit: int, presence: PathPresence) -> list[Part]:
    """Everything that could deepen a hit of `host` pages and is not on device or host."""
    parts = [Part(FULL, range(start, limit))]
    if presence.swa is not None:
        live = presence.swa
        first = max(0, host + 1 - rules.window_pages)
        holes = [i for i in range(first, len(live)) if not live[i]]
        parts.append(Part(SWA, holes + list(range(max(first, len(live)), limit))))
    if presence.checkpoints is not None:
        have = set(presence.checkpoints)
        parts.append(Part(MAMBA, [b for b in range(host + 1, limit + 1) if b not in have]))
    return parts


def reading_order(outlook: Outlook, steps: Sequence[int], got: Mapping[Component, Set[int]]) -> list[Part]:
    """List what is still to be read for these boundaries, each complete before the next begins."""
    parts: list[Part] = []
    named: dict[Component, set[int]] = {c: set(got.get(c, ())) for c in (SWA, MAMBA)}
    have, at = got.get(FULL, frozenset[int]()), outlook.start
    for end in steps:
        pages: Sequence[int] = range(at, end)
        parts.append(Part(FULL, [p for p in pages if p not in have] if have else pages))
        at = max(at, end)
        for component, positions in outlook.lacking(end).items():
            new = [p for p in positions if p not in named[component]]
            named[component].update(new)
            parts.append(Part(component, new))
    return [part for part in parts if len(part.positions)]


def run_end(start: int, present: Container[int]) -> int:
    """Where the run of present pages from `start` ends."""
    while start in present:
        start += 1
    return start
