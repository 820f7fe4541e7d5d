"""The SWA pages of one node: slots on both tiers, presence bytes, and runs that share statistics.

Positions are absolute, in pages. Decides nothing: what to adopt, protect or evict is the caller's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import InvariantViolation
from hicache.tree.eviction import Entry, Stats
from hicache.types import NO_SLOT, Slots, Tier

if TYPE_CHECKING:
    from hicache.tree.node import Node

HOLE = array("i", [NO_SLOT])


def presence(slots: Slots) -> bytes:
    """One byte per slot, 1 where it is not NO_SLOT."""
    if len(slots) < 24:
        return bytes([slot >= 0 for slot in slots])
    return (np.frombuffer(slots, np.int32) >= 0).tobytes()


class Run:
    """Neighbouring SWA pages [start, end) of one node with the same statistics.

    Invariant: every SWA page on any tier lies in exactly one run; a run has a page on some tier.
    """

    __slots__ = ("end", "entries", "node", "start", "stats")

    def __init__(self, node: Node | None, start: int, end: int, stats: Stats) -> None:
        self.node = node  # None once the run is gone
        self.start = start
        self.end = end
        self.stats = stats
        self.entries: list[Entry | None] = [None, None]


class Window:
    """SWA residency of a node's pages. Invariant: all vectors are as long as the node."""

    __slots__ = ("any", "device", "device_has", "flags", "host", "node", "refs", "runs")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.device: Slots = array("i")
        self.host: Slots | None = None  # allocated with the first host page
        self.device_has = bytearray()  # 1 where `device` has a slot
        self.any = bytearray()  # 1 where either tier has one
        self.flags: bytearray | None = None
        self.refs: array[int] | None = None  # sessions whose last window a page is in; made on first use
        self.runs: list[Run] = []

    # -- growing -------------------------------------------------------------------------------

    def extend_absent(self, count: int) -> None:
        """Follow the node's growth by pages without SWA."""
        self.device += HOLE * count
        self.device_has += bytes(count)
        self.any += bytes(count)
        self._extend_lazy(count)

    def extend_device(self, slots: Slots) -> bytes:
        """Follow the node's growth by pages with these device slots; return their presence."""
        has = presence(slots)
        self.device += slots
        self.device_has += has
        self.any += has
        self._extend_lazy(len(slots))
        return has

    def _extend_lazy(self, count: int) -> None:
        if self.host is not None:
            self.host += HOLE * count
        if self.flags is not None:
            self.flags += bytes(count)
        if self.refs is not None:
            self.refs.frombytes(bytes(count * self.refs.itemsize))

    def put(self, tier: Tier, at: int, slots: Slots) -> None:
        """Set the slots of absent pages [at, at + len); none of `slots` is NO_SLOT."""
        i = at - self.node.start
        j = i + len(slots)
        ones = b"\1" * len(slots)
        if tier is Tier.DEVICE:
            self.device[i:j] = slots
            self.device_has[i:j] = ones
        else:
            self.make_host()[i:j] = slots
        self.any[i:j] = ones

    def make_host(self) -> Slots:
        """Return the host slots, made on first use."""
        if self.host is None:
            self.host = HOLE * len(self.any)
        return self.host

    # -- reading -------------------------------------------------------------------------------

    def slot(self, tier: Tier, at: int) -> int:
        """Return a page's slot on a tier, or NO_SLOT."""
        vector = self.device if tier is Tier.DEVICE else self.host
        return NO_SLOT if vector is None else vector[at - self.node.start]

    def has(self, tier: Tier) -> bytes | bytearray:
        """Presence on one tier, one byte per page of the node."""
        if tier is Tier.DEVICE:
            return self.device_has
        return bytes(len(self.any)) if self.host is None else presence(self.host)

    def has_in(self, tier: Tier, start: int, end: int) -> bytes | bytearray:
        """Presence on one tier, one byte per page of [start, end)."""
        i, j = start - self.node.start, end - self.node.start
        if tier is Tier.DEVICE:
            return self.device_has[i:j]
        return bytes(j - i) if self.host is None else presence(self.host[i:j])

    def make_flags(self) -> bytearray:
        """Return the flags, made on first use."""
        if self.flags is None:
            self.flags = bytearray(len(self.any))
        return self.flags

    # -- sessions ------------------------------------------------------------------------------

    def refer(self, start: int, end: int, sessions: int) -> None:
        """Count `sessions` more (or less) that have the pages [start, end) in their last window."""
        if self.refs is None:
            self.refs = array("i", bytes(4 * len(self.any)))
        base = self.node.start
        np.frombuffer(self.refs, np.int32)[start - base : end - base] += sessions

    def run_refs(self, run: Run) -> int:
        """Return how many sessions refer to a run: to its first page or its last, whichever more do."""
        if self.refs is None:
            return 0
        base = self.node.start
        return max(self.refs[run.start - base], self.refs[run.end - 1 - base])

    # -- shrinking -----------------------------------------------------------------------------

    def take(self, tier: Tier, start: int, end: int) -> Slots:
        """Remove a tier's pages in [start, end) and return their slots; runs are left as they are."""
        i, j = start - self.node.start, end - self.node.start
        vector = self.device if tier is Tier.DEVICE else self.host
        if vector is None:
            return array("i")
        taken = vector[i:j]
        vector[i:j] = HOLE * (j - i)
        if tier is Tier.DEVICE:
            self.device_has[i:j] = bytes(j - i)
            self.any[i:j] = bytes(j - i) if self.host is None else presence(self.host[i:j])
        else:
            self.any[i:j] = self.device_has[i:j]
        if NO_SLOT in taken:
            taken = array("i", [slot for slot in taken if slot >= 0])
        return taken

    def cut(self, end: int, gone: Callable[[Run], None]) -> None:
        """Forget everything from `end` on; the slots have been taken before. Reports runs that are gone."""
        i = end - self.node.start
        del self.device[i:], self.device_has[i:], self.any[i:]
        if self.host is not None:
            del self.host[i:]
        if self.flags is not None:
            del self.flags[i:]
        if self.refs is not None:
            del self.refs[i:]
        runs = self.runs
        while runs and runs[-1].start >= end:
            run = runs.pop()
            run.node = None
            gone(run)
        if runs and runs[-1].end > end:
            runs[-1].end = end
            self.prune(runs[-1].start, end, gone)

    def prune(self, start: int, end: int, gone: Callable[[Run], None]) -> None:
        """Drop the runs overlapping [start, end) that have no page left."""
        base, runs = self.node.start, self.runs
        i = self._starting_before(end) - 1
        while i >= 0 and runs[i].end > start:
            run = runs[i]
            if self.any.find(1, run.start - base, run.end - base) < 0:
                del runs[i]
                run.node = None
                gone(run)
            i -= 1

    # -- runs ----------------------------------------------------------------------------------

    def overlapping(self, start: int, end: int) -> list[Run]:
        """Return the runs that overlap [start, end)."""
        i = stop = self._starting_before(end)
        while i > 0 and self.runs[i - 1].end > start:
            i -= 1
        return self.runs[i:stop]

    def cover(self, start: int, end: int, stats: Stats) -> list[Run]:
        """Make runs for the parts of [start, end) that have none; return all runs that overlap."""
        runs = self.runs
        if not runs or runs[-1].end <= start:
            run = Run(self.node, start, end, stats)
            runs.append(run)
            return [run]
        i = self._starting_before(end)
        while i > 0 and runs[i - 1].end > start:
            i -= 1
        found: list[Run] = []
        at = start
        while at < end:
            if i < len(runs) and runs[i].start <= at:
                found.append(runs[i])
                at = runs[i].end
            else:
                stop = min(end, runs[i].start) if i < len(runs) else end
                runs.insert(i, Run(self.node, at, stop, stats.copy()))
                found.append(runs[i])
                at = stop
            i += 1
        return found

    def isolate(self, start: int, end: int, gone: Callable[[Run], None]) -> tuple[list[Run], list[Run]]:
        """Split runs at `start` and `end`; return (the runs inside, the runs to be queued for it).

        A part without pages is dropped.
        """
        inside: list[Run] = []
        fresh: list[Run] = []
        runs = self.runs
        i = self._starting_before(end) - 1
        while i >= 0 and runs[i].end > start:
            run = runs[i]
            if run.end > end:
                fresh.append(self._split_run(i, end))
            if run.start < start:
                fresh.append(run)
                run = self._split_run(i, start)
            inside.append(run)
            i -= 1
        if fresh:
            touched = inside + fresh
            low = min(run.start for run in touched)
            self.prune(low, max(run.end for run in touched), gone)
            inside = [run for run in inside if run.node is not None]
            fresh = [run for run in touched if run.node is not None]
        return inside, fresh

    def _starting_before(self, end: int) -> int:
        """Return how many runs start before `end`."""
        runs = self.runs
        if not runs or runs[-1].start < end:
            return len(runs)
        return bisect_left(runs, end, key=_run_start)

    def _split_run(self, i: int, at: int) -> Run:
        """Split run i at `at`; the existing object keeps the front. Returns the back."""
        run = self.runs[i]
        back = Run(self.node, at, run.end, run.stats.copy())
        run.end = at
        self.runs.insert(i + 1, back)
        return back

    # -- following the node --------------------------------------------------------------------

    def split_into(self, upper: Window, at: int, gone: Callable[[Run], None]) -> None:
        """Give [start, at) to `upper`; called before the node's own start moves."""
        k = at - self.node.start
        runs = self.runs
        i = self._starting_before(at)
        if i and runs[i - 1].end > at:
            self._split_run(i - 1, at)
        upper.device, self.device = self.device, self.device[k:]
        upper.device_has, self.device_has = self.device_has, self.device_has[k:]
        upper.any, self.any = self.any, self.any[k:]
        del upper.device[k:], upper.device_has[k:], upper.any[k:]
        if self.host is not None:
            upper.host, self.host = self.host[:k], self.host[k:]
        if self.flags is not None:
            upper.flags, self.flags = self.flags[:k], self.flags[k:]
        if self.refs is not None:
            upper.refs, self.refs = self.refs[:k], self.refs[k:]
        upper.runs, self.runs = runs[:i], runs[i:]
        for run in upper.runs:
            run.node = upper.node
        if upper.runs:
            _drop_empty(upper, upper.runs[-1], upper.node.start, gone)
        if self.runs:
            _drop_empty(self, self.runs[0], at, gone)

    def absorb(self, upper: Window) -> None:
        """Take over the pages in front of this node; called before the node's own start moves."""
        if self.host is not None or upper.host is not None:
            head = upper.host if upper.host is not None else HOLE * len(upper.any)
            self.host = head + (self.host if self.host is not None else HOLE * len(self.any))
        if self.flags is not None or upper.flags is not None:
            flags = upper.flags if upper.flags is not None else bytearray(len(upper.any))
            self.flags = flags + (self.flags if self.flags is not None else bytes(len(self.any)))
        if self.refs is not None or upper.refs is not None:
            head = upper.refs if upper.refs is not None else array("i", bytes(4 * len(upper.any)))
            self.refs = head + (self.refs if self.refs is not None else array("i", bytes(4 * len(self.any))))
        upper.device += self.device
        upper.device_has += self.device_has
        upper.any += self.any
        self.device, self.device_has, self.any = upper.device, upper.device_has, upper.any
        for run in upper.runs:
            run.node = self.node
        self.runs = upper.runs + self.runs

    def check(self) -> None:
        """Raise InvariantViolation if the vectors or runs contradict each other."""
        node = self.node
        length = node.end - node.start
        lengths = {len(self.device), len(self.device_has), len(self.any), length}
        lengths |= {len(v) for v in (self.host, self.flags, self.refs) if v is not None}
        if lengths != {length}:
            raise InvariantViolation(f"SWA vectors of node [{node.start}, {node.end}) have lengths {lengths}")
        host = presence(self.host) if self.host is not None else bytes(length)
        if presence(self.device) != self.device_has:
            raise InvariantViolation(
                f"SWA presence of node [{node.start}, {node.end}) differs from its slots"
            )
        if bytes(a | b for a, b in zip(self.device_has, host, strict=True)) != self.any:
            raise InvariantViolation(f"SWA union of node [{node.start}, {node.end}) differs from its slots")
        at = node.start
        for run in self.runs:
            if run.node is not node or not at <= run.start < run.end <= node.end:
                raise InvariantViolation(f"SWA run [{run.start}, {run.end}) is out of place in its node")
            if self.any.find(1, at - node.start, run.start - node.start) >= 0:
                raise InvariantViolation(f"an SWA page in [{at}, {run.start}) is in no run")
            if self.any.find(1, run.start - node.start, run.end - node.start) < 0:
                raise InvariantViolation(f"SWA run [{run.start}, {run.end}) has no page")
            at = run.end
        if self.any.find(1, at - node.start) >= 0:
            raise InvariantViolation(f"an SWA page from {at} on is in no run")


def _run_start(run: Run) -> int:
    return run.start


def _drop_empty(window: Window, run: Run, base: int, gone: Callable[[Run], None]) -> None:
    if window.any.find(1, run.start - base, run.end - base) < 0:
        window.runs.remove(run)
        run.node = None
        gone(run)
