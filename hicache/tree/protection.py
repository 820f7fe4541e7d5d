"""What leases keep of a node's FULL pages, and whether its tail may go now."""

from __future__ import annotations

from hicache.tree.node import Node, TreeLease
from hicache.types import NO_SLOT, Tier


def device_floor(node: Node, end: int) -> tuple[int, TreeLease | None]:
    """Return how far DEVICE leases cover a node's device part, and one that does."""
    if not node.device_pins:
        return node.start, None
    floor, holder = node.start, None
    for lease in node.leases:
        if lease.node is node and lease.tier is Tier.DEVICE and lease.depth > floor:
            floor, holder = lease.depth, lease
    if floor < end:
        for child in node.children.values():
            if child.device_pins:
                return end, _lease_below(child, Tier.DEVICE)
    return min(floor, end), holder


def tree_floor(node: Node, end: int) -> tuple[int, TreeLease | None]:
    """Return how far leases of any tier cover a node, and one that does."""
    if not node.pins:
        return node.start, None
    floor, holder = node.start, None
    for lease in node.leases:
        if lease.node is node and lease.depth > floor:
            floor, holder = lease.depth, lease
    if floor < end:
        for child in node.children.values():
            if child.pins:
                return end, _lease_below(child, None)
    return min(floor, end), holder


def _lease_below(node: Node, tier: Tier | None) -> TreeLease:
    """Return a lease that ends in a pinned subtree."""
    while True:
        for lease in node.leases:
            if lease.node is node and (tier is None or lease.tier is tier):
                return lease
        node = next(c for c in node.children.values() if (c.device_pins if tier is not None else c.pins))


def may_go(node: Node, tier: Tier) -> bool:
    """Tell whether a node's tail on a tier can be taken; if a lease protects it, park it there."""
    if node.parent is None:
        return False
    if tier is Tier.DEVICE:
        end = node.device_end
        if not node.device or node.device_children:
            return False
        held, holder = device_floor(node, end)
        if held < end and (node.host is None or node.host[end - 1 - node.start] == NO_SLOT):
            held, holder = tree_floor(node, end)
    else:
        end = node.end
        if node.children or node.device_end == end:
            return False
        held, holder = tree_floor(node, end)
    if held < end:
        return True
    if holder is not None:
        holder.parked.append(node)
    return False
