"""Growing the tree: device pages that a request computed or loaded, host pages that storage gave.

Nodes split here, and only where token sequences diverge; a leaf that is extended grows in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hicache.errors import InvariantViolation
from hicache.tree.base import Inserted, Lease
from hicache.tree.eviction import Stats
from hicache.tree.forest import Forest, byte_view
from hicache.tree.islands import frontier, island_ranges, part
from hicache.tree.leases import checked, move, tell_device, touch_window
from hicache.tree.node import STORED, Node, State
from hicache.tree.observing import saw_written
from hicache.tree.reading import common_bytes
from hicache.tree.residency import tell_gained, tell_pages_gained, tell_state_gained
from hicache.tree.window import HOLE, Run
from hicache.types import NO_SLOT, Component, Slots, Tier, TokenBuffer


class _Offer:
    """What one call offers for pages [start, end), and what became of it so far."""

    __slots__ = (
        "end",
        "full",
        "now",
        "priority",
        "reach",
        "recover",
        "rejected",
        "start",
        "stored",
        "swa",
        "tier",
        "view",
    )

    def __init__(
        self,
        tier: Tier,
        view: memoryview,
        start: int,
        end: int,
        full: Slots,
        swa: Slots | None,
        now: float,
        priority: int,
        reach: int,
    ) -> None:
        self.tier = tier
        self.view = view
        self.start = start
        self.end = end
        self.full = full
        self.swa = swa
        self.now = now
        self.priority = priority
        self.reach = reach
        self.recover = start  # the page from which tombstones of pages that are there take offered SWA
        self.stored = False
        self.rejected: dict[Component, Slots] = {}

    def reject(self, component: Component, slots: Slots) -> None:
        held = self.rejected.get(component)
        if held is None:
            held = self.rejected[component] = array("i")
        held.extend(slot for slot in slots if slot >= 0)
        if not held:
            del self.rejected[component]

    def stats(self, hits: int) -> Stats:
        return Stats(self.now, self.now, hits, self.priority, self.reach)


def _check_offer(
    f: Forest,
    view: memoryview,
    start: int,
    end: int,
    full: Slots,
    swa: Slots | None,
    states: Sequence[tuple[int, int]],
) -> Slots | None:
    if not 0 <= start <= end or end * f.page_bytes > view.nbytes:
        raise ValueError(
            f"pages [{start}, {end}) are not within {view.nbytes // f.page_bytes} pages of tokens"
        )
    if len(full) != end - start:
        raise ValueError(f"{len(full)} FULL slots for pages [{start}, {end})")
    if states and not f.mamba:
        raise ValueError("states for a tree without MAMBA")
    for boundary, _ in states:
        if not start < boundary <= end:
            raise ValueError(f"state at {boundary} is not inside ({start}, {end}]")
    if not f.swa:
        if swa:
            raise ValueError("SWA slots for a tree without SWA")
        return None
    if swa is not None and len(swa) != end - start:
        raise ValueError(f"{len(swa)} SWA slots for pages [{start}, {end})")
    return swa


def insert(
    f: Forest,
    lease: Lease,
    tokens: TokenBuffer,
    start: int,
    end: int,
    *,
    full: Slots,
    swa: Slots | None = None,
    states: Sequence[tuple[int, int]] = (),
    places: Sequence[int] | None = None,
    now: float = 0.0,
    priority: int = 0,
) -> Inserted:
    """Add device pages at a lease and move the lease to their end."""
    held = checked(f, lease)
    view = byte_view(tokens)
    swa = _check_offer(f, view, start, end, full, swa, states)
    if held.tier is not Tier.DEVICE or held.depth < start:
        raise ValueError(
            f"pages from {start} on need a DEVICE lease that covers them, not depth {held.depth}"
        )
    node = held.node
    assert isinstance(node, Node)
    while node.start >= start and node.parent is not None:
        node = node.parent
    if node.device_end < start:
        raise InvariantViolation(f"pages up to {start} are not on the device, only {node.device_end}")
    offer = _Offer(Tier.DEVICE, view, start, end, full, swa, now, priority, end * f.page_size)
    if places is None:
        offer.recover = end - f.window_pages
    elif swa is not None:
        ranges = island_ranges(places, f.rules, start, end)
        offer.swa, dead = part(swa, start, ranges)
        offer.reject(Component.SWA, dead)
    out = Inserted(array("i"), array("i"), offer.rejected, 0)
    node = _extend_path(f, offer, node, out)
    if f.policy.reuse is not None:
        saw_written(f, f.policy.reuse, held.scope, view, start, end)
    if f.swa and f.swa_policy.marks_windows:
        touch_window(f, node, end, now, priority, 0)
    if states:
        _adopt_states(f, offer, node, states, end)
    if places is not None and held.depth < end:
        outgrow(f, node, held.depth, end)
    move(f, held, node, end)
    f.version += 1
    return out


def _extend_path(f: Forest, offer: _Offer, node: Node, out: Inserted) -> Node:
    """Lay device pages [start, end) along the tree from `node` on; return the node they end in."""
    at, end, view, step = offer.start, offer.end, offer.view, f.page_bytes
    while at < end:
        if at < node.end:
            agreed = common_bytes(node.tokens, (at - node.start) * step, view, at * step, end * step)
            stop = at + agreed // step
            if stop > at:
                _join_device(f, offer, node, at, stop, out)
                at = stop
            if at == end:
                break
            if at < node.end:
                node = f.split(node, at)
        key = bytes(view[at * step : (at + 1) * step])
        child = node.children.get(key)
        if child is None:
            return _grow_device(f, offer, node, at, key, out)
        node = child
    return node


def _join_device(f: Forest, offer: _Offer, node: Node, at: int, stop: int, out: Inserted) -> None:
    """Meet pages [at, stop) that a node has: return duplicates, adopt what the device lacks."""
    device_end = node.device_end
    base = offer.start
    shared = min(stop, device_end)
    if shared > at:
        offer.reject(Component.FULL, offer.full[at - base : shared - base])
        if offer.swa is not None:
            window = max(at, min(shared, offer.recover))
            offer.reject(Component.SWA, offer.swa[at - base : window - base])
            _adopt_swa(f, offer, node, window, shared)
    low = max(at, device_end)
    if stop > low:
        if not node.device and node.parent is not None:
            node.parent.device_children += 1
        node.device += offer.full[low - base : stop - base]
        f.resident[0][0] += stop - low
        if f.observer is not None:
            tell_gained(f, node, Tier.DEVICE, Component.FULL, low, stop)
        if node.host_count:
            f.copied[node] = None
        _adopt_swa(f, offer, node, low, stop)
        f.offer(node)
    out.full += node.device[at - node.start : stop - node.start]
    if node.swa is not None:
        out.swa += node.swa.device[at - node.start : stop - node.start]


def _adopt_swa(f: Forest, offer: _Offer, node: Node, low: int, high: int) -> None:
    """Adopt offered SWA slots of existing pages [low, high) where the tier has none."""
    if offer.swa is None:
        return
    swa = node.swa
    assert swa is not None
    tier = offer.tier
    at = low
    while at < high:
        slot = offer.swa[at - offer.start]
        if slot < 0:
            at += 1
            continue
        if swa.slot(tier, at) >= 0:
            offer.reject(Component.SWA, array("i", [slot]))
            at += 1
            continue
        stop = at + 1
        while stop < high and offer.swa[stop - offer.start] >= 0 and swa.slot(tier, stop) < 0:
            stop += 1
        swa.put(tier, at, offer.swa[at - offer.start : stop - offer.start])
        f.resident[tier][Component.SWA] += stop - at
        if f.observer is not None:
            tell_gained(f, node, tier, Component.SWA, at, stop)
        if tier is Tier.HOST and offer.stored:
            _believe(f, node, Component.SWA, at, stop)
        for run in swa.cover(at, stop, offer.stats(1)):
            f.offer_run(run)
        at = stop


def _grow_device(f: Forest, offer: _Offer, node: Node, at: int, key: bytes, out: Inserted) -> Node:
    """Append pages [at, end) to a leaf, or hang a new one under a node that has children."""
    count = offer.end - at
    if node.parent is None or node.children:
        leaf = f.new_leaf(node, key)
        node.device_children += 1
        if node.parent is not None:
            node.marks[-1].hits -= 1  # the new pages' first access is not one of their ancestors'
            node.beyond.hits += 1
    else:
        leaf = node
        leaf.marks[-1].hits -= 1
        if not leaf.device and leaf.parent is not None:
            raise InvariantViolation(f"device pages at {at} above host-only pages")
    base = offer.start
    leaf.extend(offer.view[at * f.page_bytes : offer.end * f.page_bytes], count)
    slots = offer.full if at == base else offer.full[at - base :]
    leaf.device += slots
    leaf.add_mark(offer.stats(1))
    f.resident[0][0] += count
    f.pages += count
    if f.observer is not None:
        tell_gained(f, leaf, Tier.DEVICE, Component.FULL, at, offer.end)
    out.full += slots
    out.new_pages = count
    swa = leaf.swa
    if swa is not None:
        if offer.swa is None:
            swa.extend_absent(count)
            out.swa += HOLE * count
        else:
            offered = offer.swa if at == base else offer.swa[at - base :]
            has = swa.extend_device(offered)
            out.swa += offered
            _add_runs(f, offer, leaf, at, has)
    f.offer(leaf)
    return leaf


def _add_runs(f: Forest, offer: _Offer, leaf: Node, at: int, has: bytes) -> None:
    """Make runs of the SWA pages among new pages that begin at `at`."""
    swa = leaf.swa
    assert swa is not None
    first = has.find(1)
    while first >= 0:
        stop = has.find(0, first)
        if stop < 0:
            stop = len(has)
        run = Run(leaf, at + first, at + stop, offer.stats(1))
        swa.runs.append(run)
        f.runs[0].offer(run)
        f.resident[0][Component.SWA] += stop - first
        if f.observer is not None:
            tell_gained(f, leaf, Tier.DEVICE, Component.SWA, run.start, run.end)
        first = has.find(1, stop)


def _adopt_states(
    f: Forest, offer: _Offer, node: Node, states: Sequence[tuple[int, int]], reached: int
) -> None:
    """Adopt the states (boundary, slot) up to `reached`, in `node`, that the tier lacks."""
    tier = offer.tier
    for boundary, slot in states:
        at = node
        while at.start >= boundary and at.parent is not None:
            at = at.parent
        if boundary > reached:
            offer.reject(Component.MAMBA, array("i", [slot]))
            continue
        state = at.state(boundary)
        if state is None:
            state = State(at, boundary, offer.stats(1))
            at.add_state(state)
        elif state.slots[tier] >= 0:
            offer.reject(Component.MAMBA, array("i", [slot]))
            continue
        state.slots[tier] = slot
        if f.observer is not None:
            tell_state_gained(f, state, tier)
        if tier is Tier.HOST and offer.stored:
            believe_state(f, state)
        f.resident[tier][Component.MAMBA] += 1
        f.states[tier].offer(state)


def believe_state(f: Forest, state: State) -> None:
    """Note that a state is in storage."""
    if f.observer is not None and not state.flags & STORED:
        tell_state_gained(f, state, Tier.STORAGE)
    state.flags |= STORED


def _believe(f: Forest, node: Node, component: Component, start: int, end: int) -> None:
    """Note that pages [start, end) of a node are in storage."""
    swa = node.swa
    flags = node.make_flags() if component is Component.FULL or swa is None else swa.make_flags()
    base = node.start
    if f.observer is not None:
        fresh = [page for page in range(start, end) if not flags[page - base] & STORED]
        tell_pages_gained(f, node, Tier.STORAGE, component, fresh)
    for i in range(start - base, end - base):
        flags[i] |= STORED


def outgrow(f: Forest, node: Node, before: int, end: int) -> None:
    """Let the island at `before` count as last used when it was made, if one line goes on from it to `end`.

    A conversation that goes on comes back at its new end. Where lines part, at the end of a node, its
    island is what the next branch begins from, and stays as recent as it is.
    """
    swa = node.swa
    low, high = max(node.start, frontier(before, f.rules)), min(before, frontier(end, f.rules))
    if swa is None or not node.start < before < node.end or low >= high or not swa.runs:
        return
    inside, fresh = swa.isolate(low, high, f.forget_run)
    for run in inside:
        run.stats.last = run.stats.created
    for run in inside + fresh:
        f.offer_run(run)


def insert_host(
    f: Forest,
    scope: bytes,
    tokens: TokenBuffer,
    start: int,
    end: int,
    *,
    full: Slots,
    swa: Slots | None = None,
    states: Sequence[tuple[int, int]] = (),
    now: float = 0.0,
    stored: bool = True,
) -> dict[Component, Slots]:
    """Publish host pages below a path that is there; give back what could not be adopted."""
    if not f.has_host:
        raise ValueError("this tree was built without a host tier")
    view = byte_view(tokens)
    swa = _check_offer(f, view, start, end, full, swa, states)
    offer = _Offer(Tier.HOST, view, start, end, full, swa, now, 0, end * f.page_size)
    offer.stored = stored
    node, at = _lay_host(f, offer, f.root(scope))
    done = max(at, start)
    offer.reject(Component.FULL, full[done - start :])
    if swa is not None:
        offer.reject(Component.SWA, swa[done - start :])
    if states and at >= start:
        _adopt_states(f, offer, node, states, done)
    else:
        offer.reject(Component.MAMBA, array("i", [slot for _, slot in states]))
    f.drop_idle_roots(scope)
    f.version += 1
    return offer.rejected


def _lay_host(f: Forest, offer: _Offer, node: Node) -> tuple[Node, int]:
    """Lay host pages along the tree from the root on; return the last node and the page reached."""
    at, start, end, view, step = 0, offer.start, offer.end, offer.view, f.page_bytes
    while at < end:
        key = bytes(view[at * step : (at + 1) * step])
        child = node.children.get(key) if at == node.end else node
        if child is None:
            grown = _grow_host(f, offer, node, at, key) if at >= start else None
            return (node, at) if grown is None else (grown, grown.end)
        node = child
        agreed = common_bytes(node.tokens, (at - node.start) * step, view, at * step, end * step)
        stop = at + agreed // step
        if stop > max(at, start):
            _join_host(f, offer, node, max(at, start), stop)
        at = stop
        if at < min(node.end, end):
            if at < start or offer.full[at - start] < 0:
                break
            node = f.split(node, at)
    return node, at


def _join_host(f: Forest, offer: _Offer, node: Node, at: int, stop: int) -> None:
    """Meet pages [at, stop) that a node has: adopt host copies of those that have none."""
    base = node.start
    for page in range(at, stop):
        slot = offer.full[page - offer.start]
        if slot < 0:
            continue
        host = node.make_host()
        if host[page - base] != NO_SLOT:
            offer.reject(Component.FULL, array("i", [slot]))
            continue
        host[page - base] = slot
        node.host_count += 1
        f.resident[1][0] += 1
        if f.observer is not None:
            tell_gained(f, node, Tier.HOST, Component.FULL, page, page + 1)
        if offer.stored:
            _believe(f, node, Component.FULL, page, page + 1)
    if node.host_count and node.device:
        f.copied[node] = None
        f.offer(node)  # a copy may be what its tail lacked to leave the device
    _adopt_swa(f, offer, node, at, stop)


def _grow_host(f: Forest, offer: _Offer, node: Node, at: int, key: bytes) -> Node | None:
    """Append host-only pages from `at` up to the first that is not offered; None if that is the first."""
    slots = offer.full[at - offer.start :]
    if NO_SLOT in slots:
        del slots[slots.index(NO_SLOT) :]
    count = len(slots)
    if count == 0:
        return None
    leaf = f.new_leaf(node, key) if node.parent is None or node.children else node
    first = leaf.end - leaf.start
    leaf.extend(offer.view[at * f.page_bytes : (at + count) * f.page_bytes], count)
    leaf.make_host()[first:] = slots
    leaf.host_count += count
    if f.observer is not None:
        tell_gained(f, leaf, Tier.HOST, Component.FULL, at, at + count)
    if offer.stored:
        _believe(f, leaf, Component.FULL, at, at + count)
    leaf.add_mark(Stats(offer.now, offer.now, 0, offer.priority, offer.reach))
    f.resident[1][0] += count
    f.pages += count
    if leaf.swa is not None:
        leaf.swa.extend_absent(count)
        _adopt_swa(f, offer, leaf, at, at + count)
    if leaf.device:
        f.copied[leaf] = None
    tell_device(f, leaf)
    f.offer(leaf)
    return leaf
