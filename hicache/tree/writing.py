"""Writing down: what a tier lacks of a path, what is in flight, and what became of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import InvariantViolation
from hicache.tree.base import Lease, Match, WritePlan
from hicache.tree.forest import Forest
from hicache.tree.growing import believe_state
from hicache.tree.leases import checked, lock, release
from hicache.tree.node import STORED, Node, TreeLease, writing_bit
from hicache.tree.protection import device_floor, tree_floor
from hicache.tree.reading import check_boundary, page_hashes, path_to, reach_of
from hicache.tree.residency import (
    Loss,
    tell_lost,
    tell_pages_gained,
    tell_state_gained,
    tell_state_lost,
)
from hicache.types import NO_SLOT, Component, Slots, Tier

Mask: TypeAlias = "npt.NDArray[np.bool_]"
Indices: TypeAlias = "npt.NDArray[np.int32]"


def source_of(target: Tier) -> Tier:
    """Return the tier above a write's target."""
    if target is Tier.HOST:
        return Tier.DEVICE
    if target is Tier.STORAGE:
        return Tier.HOST
    raise ValueError(f"nothing is written down to {target!r}")


def plan_write(
    f: Forest, lease: Lease, target: Tier, *, min_hits: int = 0, unstored: bool = False
) -> WritePlan:
    """List what the target lacks; only below a FULL run that the target has or will have."""
    held = checked(f, lease)
    source = source_of(target)
    path = path_to(held.node, held.depth)
    pages: dict[Component, Slots] = {component: array("i") for component in f.rules.kinds}
    slots: dict[Component, Slots] = {component: array("i") for component in f.rules.kinds}
    plan = WritePlan(source, pages, slots)
    depth = _worth(path, held.depth, min_hits)
    busy = writing_bit(target) | (STORED if unstored or target is Tier.STORAGE else 0)
    for node in path:
        end = min(node.end, depth)
        if end <= node.start:
            break
        reach = _plan_full(node, end, target, busy, pages[Component.FULL], slots[Component.FULL])
        if f.swa:
            _plan_swa(node, reach, target, busy, pages[Component.SWA], slots[Component.SWA])
        if f.mamba:
            _plan_states(node, reach, target, busy, pages[Component.MAMBA], slots[Component.MAMBA])
        if reach < end:
            break
    if target is Tier.STORAGE and plan.count:
        _add_hashes(f, held, plan)
    return plan


def _worth(path: Sequence[Node], depth: int, min_hits: int) -> int:
    """Return how many leading pages have at least `min_hits` hits."""
    if min_hits <= 0:
        return depth
    for node in path:
        cold = node.first_colder(min_hits)
        if cold < min(node.end, depth):
            return cold
    return depth


def _idle(flags: bytearray | None, count: int, busy: int) -> Mask:
    """Return, per page, whether none of the `busy` bits is set."""
    if flags is None:
        return np.ones(count, np.bool_)
    idle: Mask = (np.frombuffer(flags, np.uint8, count) & busy) == 0
    return idle


def _absent(slots: Slots | None, count: int) -> Mask:
    """Return, per page, whether there is no slot."""
    if slots is None:
        return np.ones(count, np.bool_)
    return np.frombuffer(slots, np.int32, count) < 0


def _add(wanted: Mask, base: int, source: Slots, pages: Slots, slots: Slots) -> None:
    """Add the wanted pages of a node that starts at `base`."""
    if not wanted.any():
        return
    found = np.flatnonzero(wanted)
    pages.frombytes((found + base).astype(np.int32).tobytes())
    slots.frombytes(np.frombuffer(source, np.int32)[found].tobytes())


def _plan_full(node: Node, end: int, target: Tier, busy: int, pages: Slots, slots: Slots) -> int:
    """Add a node's FULL pages before `end`; return where the run that the target can have ends."""
    base = node.start
    if target is Tier.HOST:
        count = min(end, node.device_end) - base
        wanted = _absent(node.host, count) & _idle(node.flags, count, busy)
        _add(wanted, base, node.device, pages, slots)
        return end
    count = end - base
    wanted = _idle(node.flags, count, busy)
    absent = wanted & _absent(node.host, count)
    if absent.any():
        # A page that cannot be read from the host cannot be sent, nor can what follows it.
        end = base + int(absent.argmax())
        wanted = wanted[: end - base]
    if node.host is not None:
        _add(wanted, base, node.host, pages, slots)
    return end


def _plan_swa(node: Node, end: int, target: Tier, busy: int, pages: Slots, slots: Slots) -> None:
    swa = node.swa
    assert swa is not None
    source = swa.device if target is Tier.HOST else swa.host
    if source is None:
        return
    count = end - node.start
    wanted = ~_absent(source, count) & _idle(swa.flags, count, busy)
    if target is Tier.HOST:
        wanted &= _absent(swa.host, count)
    _add(wanted, node.start, source, pages, slots)


def _plan_states(node: Node, end: int, target: Tier, busy: int, pages: Slots, slots: Slots) -> None:
    source = source_of(target)
    for state in node.states:
        if state.at > end:
            break
        there = target is Tier.HOST and state.slots[Tier.HOST] >= 0
        if state.slots[source] >= 0 and not there and not state.flags & busy:
            pages.append(state.at)
            slots.append(state.slots[source])


def _add_hashes(f: Forest, lease: TreeLease, plan: WritePlan) -> None:
    """Name each planned object: a page by its own digest, a state by that of the page it ends."""
    last = max(
        (positions[-1] + (component is not Component.MAMBA))
        for component, positions in plan.pages.items()
        if positions
    )
    first = min(
        (positions[0] - (component is Component.MAMBA))
        for component, positions in plan.pages.items()
        if positions
    )
    digests = page_hashes(f, lease, first, last)
    for component, positions in plan.pages.items():
        shift = first + (component is Component.MAMBA)
        plan.hashes[component] = [digests[at - shift] for at in positions]


def begin_write(f: Forest, lease: Lease, plan: WritePlan) -> Lease:
    """Mark a plan as in flight, and protect its source pages for as long as it is."""
    held = checked(f, lease)
    if plan.source not in (Tier.DEVICE, Tier.HOST):
        raise ValueError(f"nothing is written down from {plan.source!r}")
    none = array("i")
    full = plan.pages.get(Component.FULL, none)
    swa = plan.pages.get(Component.SWA, none)
    states = plan.pages.get(Component.MAMBA, none)
    depth = max((full[-1] + 1) if full else 0, (swa[-1] + 1) if swa else 0, states[-1] if states else 0)
    cover = lock(f, held, depth, plan.source, swa_start=swa[0] if swa else depth, states=tuple(states))
    bit = writing_bit(Tier(plan.source + 1))
    path = path_to(cover.node, depth)
    _flag_pages(path, full, Component.FULL, bit)
    _flag_pages(path, swa, Component.SWA, bit)
    for state_at in states:
        state = _node_of(path, state_at - 1).state(state_at)
        if state is None:
            raise InvariantViolation(f"the planned state at {state_at} is gone")
        state.flags |= bit
    return cover


def _node_of(path: Sequence[Node], page: int) -> Node:
    for node in reversed(path):
        if node.start <= page < node.end:
            return node
    raise InvariantViolation(f"page {page} is not on the path")


def _flags(node: Node, component: Component) -> bytearray:
    if component is Component.FULL:
        return node.make_flags()
    assert node.swa is not None
    return node.swa.make_flags()


def _by_node(path: Sequence[Node], pages: Slots) -> Iterator[tuple[Node, slice, Indices]]:
    """Cut ascending pages by the nodes that hold them: node, which pages, their indices in the node."""
    positions = np.array(pages, np.int32)
    first = 0
    for node in path:
        stop = bisect_left(pages, node.end, first)
        if stop > first:
            yield node, slice(first, stop), positions[first:stop] - node.start
            first = stop


def _flag_pages(path: Sequence[Node], pages: Slots, component: Component, bit: int) -> None:
    for node, _, indices in _by_node(path, pages):
        np.frombuffer(_flags(node, component), np.uint8)[indices] |= bit


def end_write(
    f: Forest, lease: Lease, plan: WritePlan, outcome: Mapping[Component, Slots]
) -> dict[Component, Slots]:
    """Publish what was written, clear what was in flight, and release the transfer's lease."""
    held = checked(f, lease)
    target = Tier(plan.source + 1)
    path = path_to(held.node, held.depth)
    refused: dict[Component, Slots] = {}
    for component, positions in plan.pages.items():
        results = outcome.get(component, ())
        if len(results) != len(positions):
            raise ValueError(f"{len(results)} outcomes for {len(positions)} pages of {component.name}")
    for component, positions in plan.pages.items():
        if not positions:
            continue
        left = array("i")
        results = outcome[component]
        if component is Component.MAMBA:
            for at, result in zip(positions, results, strict=True):
                _end_state(f, _node_of(path, at - 1), at, target, result, left)
        else:
            _end_pages(f, path, component, target, positions, results, left)
        if left:
            refused[component] = left
    release(f, held)
    return refused


def _end_pages(
    f: Forest,
    path: Sequence[Node],
    component: Component,
    target: Tier,
    positions: Slots,
    results: Slots,
    left: Slots,
) -> None:
    keep = 0xFF & ~writing_bit(target)
    for node, part, indices in _by_node(path, positions):
        given = np.array(results[part], np.int32)
        flags = np.frombuffer(_flags(node, component), np.uint8)
        flags[indices] &= keep
        done = given >= 0
        if target is Tier.STORAGE:
            if f.observer is not None:
                fresh = indices[done & (flags[indices] & STORED == 0)] + node.start
                tell_pages_gained(f, node, target, component, fresh.tolist())
            flags[indices[done]] |= STORED
        else:
            left.frombytes(_publish(f, node, component, indices[done], given[done]).tobytes())


def _publish(f: Forest, node: Node, component: Component, indices: Indices, slots: Indices) -> Indices:
    """Give pages their host slots; return those of pages that got one meanwhile or lost their source."""
    if not len(indices):
        return slots
    if component is Component.FULL:
        host = np.frombuffer(node.make_host(), np.int32)
        fits = host[indices] < 0
    else:
        assert node.swa is not None
        host = np.frombuffer(node.swa.make_host(), np.int32)
        fits = (host[indices] < 0) & (np.frombuffer(node.swa.device, np.int32)[indices] >= 0)
    host[indices[fits]] = slots[fits]
    count = int(fits.sum())
    if f.observer is not None:
        tell_pages_gained(f, node, Tier.HOST, component, (indices[fits] + node.start).tolist())
    f.resident[Tier.HOST][component] += count
    if component is Component.FULL:
        node.host_count += count
        if node.device and count:
            f.copied[node] = None
        f.offer(node)
    elif node.swa is not None:
        for run in node.swa.overlapping(node.start + int(indices[0]), node.start + int(indices[-1]) + 1):
            f.offer_run(run)
    return slots[~fits]


def _end_state(f: Forest, node: Node, at: int, target: Tier, result: int, left: Slots) -> None:
    state = node.state(at)
    if state is None:
        raise InvariantViolation(f"the state at {at} vanished while it was being written")
    state.flags &= ~writing_bit(target)
    if result < 0:
        return
    if target is Tier.STORAGE:
        believe_state(f, state)
    elif state.slots[Tier.HOST] >= 0:
        left.append(result)
    else:
        state.slots[Tier.HOST] = result
        if f.observer is not None:
            tell_state_gained(f, state, Tier.HOST)
        f.resident[Tier.HOST][Component.MAMBA] += 1
        f.states[Tier.HOST].offer(state)


def forget_stored(f: Forest, at: Match | Lease, component: Component, positions: Sequence[int]) -> None:
    """Clear the belief that pages or states are in storage."""
    mamba = component is Component.MAMBA
    path = path_to(at.node, reach_of(at))
    for position in positions:
        page = position - 1 if mamba else position
        check_boundary(at, page + 1)
        node = _node_of(path, page)
        if mamba:
            state = node.state(position)
            if state is not None:
                if f.observer is not None and state.flags & STORED:
                    tell_state_lost(f, state, Tier.STORAGE, Loss.MISSING)
                state.flags &= ~STORED
            continue
        flags = node.flags if component is Component.FULL or node.swa is None else node.swa.flags
        if flags is not None:
            if f.observer is not None and flags[page - node.start] & STORED:
                tell_lost(f, node, Tier.STORAGE, component, (page,), Loss.MISSING)
            flags[page - node.start] &= ~STORED
    f.version += 1


def coldest_unwritten(f: Forest, tier: Tier, count: int) -> list[Lease]:
    """Lock the coldest tails, up to `count` pages in all, that hold a page without a copy below.

    Walks whole nodes in eviction order; pages that are clean already count towards `count`.
    """
    target = Tier(tier + 1)
    heap = f.full[tier]
    seen: list[Node] = []
    leases: list[Lease] = []
    left = count
    while left > 0:
        node = heap.pop()
        if node is None:
            break
        seen.append(node)
        if tier is Tier.DEVICE:
            end, first = node.device_end, node.start
            candidate = not node.device_children
            held = device_floor(node, end)[0]
            if node.device and (node.host is None or node.host[end - 1 - node.start] == NO_SLOT):
                held = max(held, tree_floor(node, end)[0])
        else:
            end, first = node.end, node.device_end
            candidate = not node.children
            held = tree_floor(node, end)[0]
        low = max(first, held, end - left)
        if node.parent is None or not candidate or low >= end:
            continue
        left -= end - low
        if _lacks_copy(node, low, end, target):
            leases.append(_lock_tail(f, node, end, tier))
    for node in seen:
        f.offer(node)
    return leases


def _lacks_copy(node: Node, start: int, end: int, target: Tier) -> bool:
    base = node.start
    if target is Tier.HOST:
        host = node.host[start - base : end - base] if node.host is not None else (NO_SLOT,)
        if NO_SLOT not in host:
            return False
        flags = node.flags
        return flags is None or any(
            (node.host is None or node.host[i] == NO_SLOT) and not flags[i] & writing_bit(target)
            for i in range(start - base, end - base)
        )
    busy = STORED | writing_bit(target)
    flags = node.flags
    return flags is None or any(not flag & busy for flag in flags[start - base : end - base])


def _lock_tail(f: Forest, node: Node, depth: int, tier: Tier) -> Lease:
    at = Match()
    at.node = node
    at.full = depth
    root = node
    while root.parent is not None:
        root = root.parent
    at.scope = root.scope
    return lock(f, at, depth, tier)
