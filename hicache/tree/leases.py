"""Leases: lock, release, touch, and how much they leave for eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache.errors import InvariantViolation
from hicache.tree.base import Lease, Match
from hicache.tree.forest import Forest
from hicache.tree.node import Node, TreeLease
from hicache.tree.observing import saw_read
from hicache.tree.reading import check_boundary
from hicache.tree.window import presence
from hicache.types import Component, Tier


def lock(
    f: Forest,
    at: Match | Lease,
    boundary: int,
    tier: Tier,
    *,
    swa_start: int | None = None,
    states: Sequence[int] | None = None,
) -> Lease:
    """Protect a path; its FULL pages are protected by the lease's end alone."""
    check_boundary(at, boundary)
    if tier is not Tier.DEVICE and tier is not Tier.HOST:
        raise ValueError(f"a lease is on DEVICE or HOST, not on {tier!r}")
    node = at.node
    if node is None:
        if not isinstance(at, Match):
            raise InvariantViolation("the lease was released")
        node = f.root(at.scope)
    assert isinstance(node, Node)
    while node.start >= boundary and node.parent is not None:
        node = node.parent
    lease = TreeLease()
    lease.node = node
    lease.scope = at.scope
    lease.tier = tier
    lease.depth = boundary
    lease.parked = []
    _set_ranges(f, lease, swa_start, states)
    f.leases[lease] = None
    f.register(lease)
    f.version += 1
    return lease


def _set_ranges(
    f: Forest, lease: TreeLease, swa_start: int | None = None, states: Sequence[int] | None = None
) -> None:
    depth = lease.depth
    if not f.swa:
        lease.swa_start = depth
    elif swa_start is None:
        lease.swa_start = max(0, depth - f.window_pages)
    else:
        lease.swa_start = min(max(0, swa_start), depth)
    if not f.mamba:
        lease.states = ()
    elif states is None:
        lease.states = (depth,) if depth else ()
    else:
        lease.states = tuple(sorted(set(states)))
        if lease.states and not 0 < lease.states[0] <= lease.states[-1] <= depth:
            raise ValueError(f"states {lease.states} are not inside (0, {depth}]")


def checked(f: Forest, lease: Lease) -> TreeLease:
    """Return the core's own view of an active lease."""
    if not isinstance(lease, TreeLease) or lease not in f.leases:
        raise InvariantViolation(f"the lease of depth {lease.depth} was released, or belongs to another tree")
    return lease


def release(f: Forest, lease: Lease) -> None:
    """End a lease and queue again what it kept from eviction."""
    held = checked(f, lease)
    del f.leases[held]
    f.unregister(held)
    node = held.node
    held.node = None
    if held.parked:
        f.reoffer(held)
    assert isinstance(node, Node)
    if node.parent is None:
        f.drop_idle_roots(held.scope)
    f.version += 1


def move(f: Forest, lease: TreeLease, node: Node, depth: int) -> None:
    """Let a lease protect [0, depth), ending in `node`, with the default ranges."""
    f.unregister(lease)
    lease.node = node
    lease.depth = depth
    _set_ranges(f, lease)
    f.register(lease)
    if lease.parked:
        f.reoffer(lease)


def hold_windows(f: Forest, lease: Lease, swa_start: int) -> None:
    """Let a lease's SWA range begin at `swa_start`."""
    held = checked(f, lease)
    if not f.swa:
        return
    f.unregister(held)
    held.swa_start = min(max(0, swa_start), held.depth)
    f.register(held)
    if held.parked:
        f.reoffer(held)
    f.version += 1


def touch(f: Forest, lease: Lease, now: float, *, priority: int = 0, hits: int = 1) -> None:
    """Record one access: a mark where it ends, hits on the ancestors, the last window, the state."""
    held = checked(f, lease)
    node = held.node
    assert isinstance(node, Node)
    depth = held.depth
    if hits and f.policy.reuse is not None:
        saw_read(f, f.policy.reuse, node, depth, now)
    if depth == 0:
        return
    reach = depth * f.page_size
    stats = node.mark(depth)
    stats.hits += hits
    stats.raise_to(now, priority, reach)
    above = node.parent
    while above is not None and above.parent is not None:
        above.beyond.hits += hits
        above = above.parent
    tell_device(f, node)
    if f.policy.follows_access:
        f.offer(node)
    if f.swa:
        touch_window(f, node, depth, now, priority, hits)
    if f.mamba:
        state = node.state(depth)
        if state is not None:
            state.stats.hits += hits
            state.stats.raise_to(now, priority, reach)
            if f.mamba_policy.follows_access:
                f.offer_state(state)


def tell_device(f: Forest, node: Node) -> None:
    """Report an access in host-only nodes up to the device page whose tail they hang from."""
    while not node.device and node.parent is not None and node.parent.parent is not None:
        node.report()
        node = node.parent
        if f.policy.follows_access:
            f.offer(node)


def touch_window(f: Forest, node: Node, depth: int, now: float, priority: int, hits: int) -> None:
    """Stamp the runs of the last window and of one page before it."""
    low = max(0, depth - f.window_pages - 1)
    high = depth
    at: Node | None = node
    while at is not None and at.parent is not None and at.end > low:
        swa = at.swa
        assert swa is not None
        if swa.runs:
            inside, fresh = swa.isolate(max(low, at.start), min(high, at.end), f.forget_run)
            for run in inside:
                run.stats.hits += hits
                run.stats.raise_to(now, priority, depth * f.page_size)
            for run in fresh + inside if f.swa_policy.follows_access else fresh:
                f.offer_run(run)
        at = at.parent


# -- counting ------------------------------------------------------------------------------------


def evictable(f: Forest, tier: Tier, component: Component) -> int:
    """Return what evict() could free now; remembered until the tree changes."""
    if tier not in (Tier.DEVICE, Tier.HOST) or component not in f.rules.kinds:
        return 0
    known = f.counts.get((tier, component))
    if known is not None and known[0] == f.version:
        return known[1]
    if component is Component.FULL:
        if tier is Tier.DEVICE:
            count = f.resident[0][0] - _protected_device(f)
        else:
            count = f.pages - f.resident[0][0] - _protected_host_only(f)
    elif component is Component.SWA:
        count = f.resident[tier][component] - _protected_swa(f, tier)
    else:
        count = f.resident[tier][component] - _protected_states(f, tier)
    f.counts[(tier, component)] = (f.version, count)
    return count


def _reached(leases: Iterable[Lease]) -> dict[Node, int]:
    """Return, per node on a path of these leases, the depth up to which one of them covers it."""
    reached: dict[Node, int] = {}
    for lease in leases:
        node = lease.node
        assert isinstance(node, Node)
        depth = lease.depth
        while node.parent is not None:
            known = reached.get(node, 0)
            if known >= depth:
                break
            reached[node] = depth
            if known:
                break  # the ancestors of a node once reached are covered whole
            node = node.parent
            depth = node.end
    return reached


def _protected_device(f: Forest) -> int:
    """Count device pages that cannot leave: covered on DEVICE, or below them a page that cannot.

    A page without a host copy would leave the tree, so a lease of any tier that covers it holds it;
    and the device part of a path shrinks from its end only.
    """
    reached = _reached(lease for lease in f.leases if lease.tier is Tier.DEVICE)
    total = sum(min(depth, node.device_end) - node.start for node, depth in reached.items())
    host_only = [lease for lease in f.leases if lease.tier is Tier.HOST]
    if not host_only:
        return total
    for node, depth in _reached(host_only).items():
        i = min(depth, node.device_end) - node.start  # pages [0, i) of the node are covered
        if node.host is not None:
            i = len(presence(node.host[:i]).rstrip(b"\1"))
        if i > 0:
            at: Node | None = node
            end = node.start + i
            while at is not None and at.parent is not None:
                held = max(min(reached.get(at, at.start), at.device_end), at.start)
                if end > held:
                    total += end - held
                    reached[at] = end
                at = at.parent
                end = at.end if at is not None else 0
    return total


def reclaimable(f: Forest) -> int:
    """Return how many FULL host copies of device pages no HOST lease covers."""
    host_only = f.pages - f.resident[0][0]
    copies = f.resident[1][0] - host_only
    for node, depth in _reached(lease for lease in f.leases if lease.tier is Tier.HOST).items():
        if node.host_count and node.host is not None:
            end = max(min(depth, node.device_end) - node.start, 0)
            copies -= presence(node.host[:end]).count(1)
    return copies


def _protected_host_only(f: Forest) -> int:
    return sum(max(depth - max(node.device_end, node.start), 0) for node, depth in _reached(f.leases).items())


def _protected_swa(f: Forest, tier: Tier) -> int:
    spans: dict[Node, list[tuple[int, int]]] = {}
    for lease in f.leases:
        if lease.tier is not tier:
            continue
        node = lease.node
        assert isinstance(node, Node)
        while node.parent is not None and node.end > lease.swa_start:
            low, high = max(lease.swa_start, node.start), min(lease.depth, node.end)
            if low < high:
                spans.setdefault(node, []).append((low, high))
            node = node.parent
    total = 0
    for node, ranges in spans.items():
        assert node.swa is not None
        has = node.swa.has(tier)
        at = node.start
        for low, high in sorted(ranges):
            if high > at:
                total += has.count(1, max(low, at) - node.start, high - node.start)
                at = high
    return total


def _protected_states(f: Forest, tier: Tier) -> int:
    held: set[object] = set()
    for lease in f.leases:
        if lease.tier is tier:
            node = lease.node
            assert isinstance(node, Node)
            for at in reversed(lease.states):
                while node.start >= at and node.parent is not None:
                    node = node.parent
                state = node.state(at)
                if state is not None and state.slots[tier] >= 0:
                    held.add(state)
    return len(held)
