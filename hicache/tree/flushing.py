"""What storage has and lacks of the whole tree: to forget it, or to write it before memory goes."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.tree.base import Lease, Match
from hicache.tree.forest import Forest
from hicache.tree.leases import lock
from hicache.tree.node import STORED, Node
from hicache.tree.residency import tell_storage_forgotten
from hicache.types import Tier

_NOT_STORED = bytes(flag & ~STORED for flag in range(256))


def unstored(f: Forest) -> tuple[list[Lease], int]:
    """Lock (HOST) the paths that hold anything storage lacks; count the FULL pages that do."""
    leases: list[Lease] = []
    count = 0
    for root in list(f.roots.values()):
        for node in list(_below(root)):
            pages = _unstored_pages(node)
            if pages or _holds_other_unstored(node):
                count += pages
                leases.append(_lock_path(f, root, node))
    return leases, count


def forget_all_stored(f: Forest) -> None:
    """Clear every belief that something is in storage; writes in flight go on."""
    for root in f.roots.values():
        for node in _below(root):
            if f.observer is not None:
                tell_storage_forgotten(f, node)
            for flags in (node.flags, node.swa.flags if node.swa is not None else None):
                if flags is not None:
                    flags[:] = flags.translate(_NOT_STORED)
            for state in node.states:
                state.flags &= ~STORED
    f.version += 1


def _below(root: Node) -> Iterator[Node]:
    """Every node of a tree, parents first."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _unstored_pages(node: Node) -> int:
    pages = node.end - node.start
    return pages if node.flags is None else sum(not flag & STORED for flag in node.flags)


def _holds_other_unstored(node: Node) -> bool:
    """True if SWA pages or states of the node are on some tier and not in storage."""
    if any(not state.flags & STORED for state in node.states):
        return True
    swa = node.swa
    if swa is None:
        return False
    flags = swa.flags
    for tier in (Tier.DEVICE, Tier.HOST):
        has = swa.has(tier)
        if flags is None:
            if 1 in has:
                return True
        elif any(here and not flag & STORED for here, flag in zip(has, flags, strict=False)):
            return True
    return False


def _lock_path(f: Forest, root: Node, node: Node) -> Lease:
    at = Match()
    at.node, at.full, at.scope = node, node.end, root.scope
    return lock(f, at, node.end, Tier.HOST)
