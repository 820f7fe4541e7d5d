"""Taking pages away: which tails, runs and states go, in the order that the policies give.

Every loop takes the next candidate from a heap, takes what it may of it, and queues the rest again;
a candidate that a lease protects is parked on that lease instead.
"""

from __future__ import annotations

from array import array

from hicache.tree.base import Evicted, Freed
from hicache.tree.forest import TIERS, Forest, put
from hicache.tree.node import STORED, Node, TreeLease
from hicache.tree.protection import device_floor, tree_floor
from hicache.tree.residency import Loss, tell_cut, tell_lost
from hicache.tree.window import Run, Window
from hicache.types import NO_SLOT, Component, Slots, Tier

_EVERYTHING = 1 << 62


def evict(f: Forest, tier: Tier, component: Component, count: int) -> Evicted:
    """Free exactly `count` pages, or as many as can be freed."""
    if tier not in TIERS or component not in f.rules.kinds:
        raise ValueError(f"this tree has no {component!r} on {tier!r}")
    out = Evicted({})
    if count > 0:
        if component is Component.FULL:
            _evict_full(f, tier, count, out)
        elif component is Component.SWA:
            _evict_swa(f, tier, count, out)
        else:
            _evict_states(f, tier, count, out)
        f.join_idle()
        f.version += 1
    return out


# -- FULL ----------------------------------------------------------------------------------------


def _evict_full(f: Forest, tier: Tier, count: int, out: Evicted) -> None:
    heap = f.full[tier]
    trim = _trim_device if tier is Tier.DEVICE else _trim_host
    while count > 0:
        node = heap.pop()
        if node is None:
            return
        count -= trim(f, node, count, out)


def _trim_device(f: Forest, node: Node, count: int, out: Evicted) -> int:
    """Take up to `count` pages with equal statistics off a node's device tail; return how many."""
    end = node.device_end
    if node.parent is None or end == node.start or node.device_children:
        return 0
    held, holder = device_floor(node, end)
    low = f.alike_from(node, max(held, end - count), end)
    keeper: TreeLease | None = None
    at = end
    while at > low:
        stop = _copied_from(node, low, at)
        if stop < at:
            _demote(f, node, stop, out)
            at = stop
            continue
        kept, keeper = tree_floor(node, at)
        if kept >= at:
            break
        keeper = None
        stop = max(_uncopied_from(node, low, at), kept)
        cut(f, node, stop, out)
        at = stop
    if node.parent is None or not node.device:
        return end - at
    if keeper is None and at <= held:
        keeper = holder
    if keeper is not None:
        f.full[0].withdraw(node)
        keeper.parked.append(node)
    elif node.entries[0] is None:
        f.full[0].offer(node)
    return end - at


def _copied_from(node: Node, low: int, end: int) -> int:
    """Return the start of the pages ending at `end`, not below `low`, that have host copies."""
    host, base = node.host, node.start
    if host is None:
        return end
    if node.host_count == node.end - base:
        return low
    while end > low and host[end - 1 - base] != NO_SLOT:
        end -= 1
    return end


def _uncopied_from(node: Node, low: int, end: int) -> int:
    """Return the start of the pages ending at `end`, not below `low`, that have no host copy."""
    host, base = node.host, node.start
    if host is None:
        return low
    while end > low and host[end - 1 - base] == NO_SLOT:
        end -= 1
    return end


def _demote(f: Forest, node: Node, at: int, out: Evicted) -> None:
    """Take the device pages from `at` on, which all have host copies, off the device."""
    end = node.device_end
    if f.observer is not None:
        why = Loss.DEMOTED if f.loss is Loss.EVICTED else f.loss
        tell_lost(f, node, Tier.DEVICE, Component.FULL, range(at, end), why)
    taken = node.device[at - node.start :]
    del node.device[at - node.start :]
    put(out.freed, Tier.DEVICE, Component.FULL, taken)
    out.demoted += end - at
    f.resident[0][0] -= end - at
    f.take_windows(node, Tier.DEVICE, at, end, out.freed)
    if not node.device:
        f.lost_device(node)
    if not node.children:
        f.full[1].offer(node)


def cut(f: Forest, node: Node, at: int, out: Evicted) -> None:
    """Drop everything from page `at` of a node on, on both tiers, and the host-only subtree below it."""
    if node.children:
        subtree = [node]
        for below in subtree:
            subtree.extend(below.children.values())
        for below in reversed(subtree[1:]):
            _cut_pages(f, below, below.start, out)
            f.remove(below)
    _cut_pages(f, node, at, out)
    if at == node.start:
        f.remove(node)
    elif not node.children:
        f.offer(node)


def _cut_pages(f: Forest, node: Node, at: int, out: Evicted) -> None:
    """Take the slots of pages [at, end) of a childless node, and shorten it unless nothing would remain."""
    end, i = node.end, at - node.start
    out.lost += _unsaved(node, i)
    if f.observer is not None:
        tell_cut(f, node, at)
    f.take_windows(node, Tier.DEVICE, at, end, out.freed)
    f.take_windows(node, Tier.HOST, at, end, out.freed)
    if len(node.device) > i:
        taken = node.device[i:]
        del node.device[i:]
        f.resident[0][0] -= len(taken)
        put(out.freed, Tier.DEVICE, Component.FULL, taken)
        if i == 0:
            f.lost_device(node)
    if node.host is not None:
        _cut_host(f, node, i, out)
    f.pages -= end - at
    if i:
        node.end = at
        del node.tokens[i * f.page_bytes :], node.hashes[i:]
        if node.flags is not None:
            del node.flags[i:]
        if node.swa is not None:
            _cut_windows(f, node.swa, at)
        node.cut_marks(at)


def _cut_host(f: Forest, node: Node, i: int, out: Evicted) -> None:
    assert node.host is not None
    taken = node.host[i:]
    del node.host[i:]
    if node.host_count:
        if NO_SLOT in taken:
            taken = array("i", [slot for slot in taken if slot >= 0])
        if taken:
            node.host_count -= len(taken)
            f.resident[1][0] -= len(taken)
            put(out.freed, Tier.HOST, Component.FULL, taken)


def _cut_windows(f: Forest, swa: Window, at: int) -> None:
    swa.cut(at, f.forget_run)
    if swa.refs is not None and swa.runs:
        f.offer_run(swa.runs[-1])  # fewer sessions may refer to what is left of it


def _unsaved(node: Node, i: int) -> int:
    """Count pages from the i-th on that will have no copy below the tier they are the last on."""
    total = node.end - node.start - i
    return total - sum(1 for flag in node.flags[i:] if flag & STORED) if node.flags is not None else total


def _trim_host(f: Forest, node: Node, count: int, out: Evicted) -> int:
    """Take up to `count` host-only pages with equal statistics off a leaf's end; return how many."""
    end, device_end = node.end, node.device_end
    if node.parent is None or node.children or device_end == end:
        return 0
    held, holder = tree_floor(node, end)
    if held >= end:
        assert holder is not None
        holder.parked.append(node)
        return 0
    low = f.alike_from(node, max(held, device_end, end - count), end)
    cut(f, node, low, out)
    return end - low


# -- SWA and MAMBA -------------------------------------------------------------------------------


def _evict_swa(f: Forest, tier: Tier, count: int, out: Evicted) -> None:
    """Tombstone SWA pages, run by run, from the front of each: farthest from the boundary it serves."""
    heap = f.runs[tier]
    while count > 0:
        run = heap.pop()
        if run is None:
            return
        if run.node is None:
            continue
        node, start, end = run.node, run.start, run.end
        taken, holders, left = _tombstone(f, run, tier, count, out.freed)
        count -= taken
        assert node.swa is not None
        if taken:
            node.swa.prune(start, end, f.forget_run)
            f.lost_anchor(node)
        if run.node is not None and left:
            if holders and count > 0:
                for holder in holders:  # each guards other pages, so the end of any one matters
                    holder.parked.append(run)
            else:
                heap.offer(run)


def _tombstone(
    f: Forest, run: Run, tier: Tier, count: int, freed: Freed
) -> tuple[int, list[TreeLease], bool]:
    """Take up to `count` unprotected pages of a run; return (taken, leases in the way, any left)."""
    node = run.node
    assert node is not None
    assert node.swa is not None
    base, end = run.start, run.end
    has = node.swa.has_in(tier, base, end)
    guards = sorted(
        (
            (lease.swa_start, lease.depth, lease)
            for lease in node.leases
            if lease.tier is tier and lease.swa_start < end and lease.depth > base
        ),
        key=lambda guard: guard[0],
    )
    taken = 0
    holders: list[TreeLease] = []
    at = has.find(1)
    while at >= 0 and taken < count:
        page = at + base
        stop = min(end, page + count - taken)
        blocked = False
        for low, high, lease in guards:
            if low <= page < high:
                blocked, stop = True, high
                holders.append(lease)
                break
            if page < low < stop:
                stop = low
        if not blocked:
            hole = has.find(0, at, stop - base)
            if hole >= 0:
                stop = hole + base
            if f.observer is not None:
                tell_lost(f, node, tier, Component.SWA, range(page, stop), f.loss)
            slots = node.swa.take(tier, page, stop)
            f.resident[tier][Component.SWA] -= stop - page
            put(freed, tier, Component.SWA, slots)
            taken += stop - page
        at = has.find(1, stop - base) if stop < end else -1
    left = node.swa.has_in(tier, base, end).find(1) >= 0
    return taken, holders, left


def _evict_states(f: Forest, tier: Tier, count: int, out: Evicted) -> None:
    heap = f.states[tier]
    while count > 0:
        state = heap.pop()
        if state is None:
            return
        node = state.node
        if node is None or state.slots[tier] < 0:
            continue
        holder = next((x for x in node.leases if x.tier is tier and state.at in x.states), None)
        if holder is not None:
            holder.parked.append(state)
            continue
        f.take_state(state, tier, out.freed)
        count -= 1


# -- the rest ------------------------------------------------------------------------------------


def reclaim_duplicates(f: Forest, count: int) -> Slots:
    """Free host copies of device pages, oldest nodes first and root side first."""
    freed: Slots = array("i")
    if count <= 0 or not f.copied:
        return freed
    held: dict[Node, int] = {}
    for lease in f.leases:
        if lease.tier is Tier.HOST:
            node = lease.node
            assert isinstance(node, Node)
            depth = lease.depth
            while node.parent is not None:
                held[node] = max(held.get(node, 0), depth)
                node = node.parent
                depth = node.end
    spent: list[Node] = []
    for node in f.copied:
        if len(freed) >= count:
            break
        low = max(held.get(node, 0), node.start)
        _reclaim_node(f, node, low, count, freed)
        if low == node.start and len(freed) < count:
            spent.append(node)
    for node in spent:
        del f.copied[node]
    f.version += 1
    return freed


def _reclaim_node(f: Forest, node: Node, low: int, count: int, freed: Slots) -> None:
    host = node.host
    if host is None:
        return
    taken: list[int] = []
    for i in range(low - node.start, len(node.device)):
        if len(freed) >= count:
            break
        if host[i] != NO_SLOT:
            freed.append(host[i])
            host[i] = NO_SLOT
            node.host_count -= 1
            f.resident[1][0] -= 1
            taken.append(node.start + i)
    if f.observer is not None:
        why = Loss.RECLAIMED if f.loss is Loss.EVICTED else f.loss
        tell_lost(f, node, Tier.HOST, Component.FULL, taken, why)


def drop_all(f: Forest) -> Freed:
    """Drop what no lease protects: tails first, then windows, states and host copies above them."""
    observer = f.observer
    if f.leases or observer is None:
        f.loss = Loss.FLUSHED
        freed = _drop_all(f)
        f.loss = Loss.EVICTED
        return freed
    f.observer = None  # everything goes: that is one change
    freed = _drop_all(f)
    f.observer = observer
    observer.cleared()
    return freed


def _drop_all(f: Forest) -> Freed:
    out = Evicted({})
    for component in f.rules.kinds:
        for tier in TIERS:
            for key, slots in evict(f, tier, component, _EVERYTHING).freed.items():
                put(out.freed, *key, slots)
    copies = reclaim_duplicates(f, _EVERYTHING)
    if copies:
        put(out.freed, Tier.HOST, Component.FULL, copies)
    for scope in list(f.roots):
        f.drop_idle_roots(scope)
    return out.freed
