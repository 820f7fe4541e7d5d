"""References of sessions: which pages the conversations that are still open came to, and will ask for.

Decides what a session refers to; `ranking` puts it behind everything else. Costs nodes, not pages.
"""

from __future__ import annotations

from hicache.tree.base import Lease, Match, SessionRefs
from hicache.tree.covers import count_window, leave
from hicache.tree.forest import TIERS, Forest
from hicache.tree.leases import checked
from hicache.tree.node import Cover, Node
from hicache.tree.reading import path_to, reach_of


def refer(f: Forest, lease: Lease, session: SessionRefs) -> None:
    """Let a session end where a lease does, unless it goes on from there already."""
    held = checked(f, lease)
    node, depth = held.node, held.depth
    assert isinstance(node, Node)
    if depth == 0:
        return
    if f.full[0].idle:
        for tier in TIERS:
            f.full[tier].idle = f.runs[tier].idle = f.states[tier].idle = False
    known = node.covers.get(session)
    if known is not None:
        node.clamp(known)
        if known.below or known.depth > depth:
            return
    _cover(f, node, depth, session)
    _end_at(f, node, session)


def _cover(f: Forest, node: Node, depth: int, session: SessionRefs) -> None:
    """Let a session refer to all pages before `depth`, which is in `node`."""
    at: Node | None = node
    end, below = depth, 0
    while at is not None and at.parent is not None:
        cover = at.covers.get(session)
        if cover is None:
            at.covers[session] = Cover(end, below)
            at.mark(end).refs += 1
            f.offer(at)
        else:  # and so everything above
            at.clamp(cover)
            if not cover.below:
                leave(f, at, cover, session)
            at.mark(cover.depth).refs -= 1
            at.mark(end).refs += 1
            cover.depth = end
            cover.below += below
            f.offer(at)
            return
        at, below = at.parent, 1
        end = at.end


def _end_at(f: Forest, node: Node, session: SessionRefs) -> None:
    """Count the window and the state where a session ends."""
    session.ends[node] = None
    cover = node.covers[session]
    cover.low = max(0, cover.depth - f.window_pages - 1) if f.swa else cover.depth
    cover.state = f.mamba
    if cover.state:
        node.state_refs[cover.depth] = node.state_refs.get(cover.depth, 0) + 1
        state = node.state(cover.depth)
        if state is not None:
            f.offer_state(state)
    count_window(f, node, cover.low, cover.depth, 1)


def unrefer(f: Forest, session: SessionRefs) -> None:
    """Let a session refer to nothing; its pages are as any others from here."""
    for end in list(session.ends):
        assert isinstance(end, Node)
        at: Node | None = end
        cover = end.covers[session]
        end.clamp(cover)
        leave(f, end, cover, session)
        while at is not None and at.parent is not None:
            cover = at.covers[session]
            if at is not end:
                cover.below -= 1
                if cover.below:
                    break
            at.clamp(cover)
            at.mark(cover.depth).refs -= 1
            del at.covers[session]
            f.offer(at)
            at = at.parent


def references(f: Forest, at: Match | Lease) -> list[int]:
    """Count the sessions of each page."""
    reach = reach_of(at)
    return [node.refs(page + 1) for node in path_to(at.node, reach) for page in range(node.start, node.end)][
        :reach
    ]
