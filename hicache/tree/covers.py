"""What becomes of sessions' references when their ends move: on to longer paths, back as pages go.

The other half of `referring`, for the moves that `forest` makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.tree.base import SessionRefs
from hicache.tree.node import Cover, Node

if TYPE_CHECKING:
    from hicache.tree.forest import Forest


def leave(f: Forest, node: Node, cover: Cover, session: SessionRefs) -> None:
    """A session does not end here any more: its window and state are of less use now."""
    del session.ends[node]
    if cover.state:
        left = node.state_refs.pop(cover.depth) - 1
        if left:
            node.state_refs[cover.depth] = left
        state = node.state(cover.depth)
        if state is not None:
            f.offer_state(state)
        cover.state = False
    count_window(f, node, cover.low, cover.depth, -1)
    cover.low = cover.depth


def count_window(f: Forest, node: Node, low: int, high: int, sessions: int) -> None:
    """Count sessions of the window [low, high), which ends in `node`; queue again what has lost one."""
    at: Node | None = node
    while at is not None and at.parent is not None and at.end > low:
        start, end = max(low, at.start), min(high, at.end)
        swa = at.swa
        if swa is not None and start < end:
            swa.refer(start, end, sessions)
            if sessions < 0:
                for run in swa.overlapping(start, end):
                    f.offer_run(run)
            elif swa.runs:
                inside, fresh = swa.isolate(start, end, f.forget_run)
                for run in fresh + inside:
                    f.offer_run(run)
        at = at.parent


def bequeath(f: Forest, node: Node) -> None:
    """A childless node is about to go: sessions that ended there end with its parent, or elsewhere."""
    parent = node.parent
    assert parent is not None
    for session, cover in node.covers.items():
        del session.ends[node]
        if parent.parent is None:
            continue
        above = parent.covers[session]
        above.below -= 1
        low = min(cover.low, parent.end)
        if above.below:
            count_window(f, parent, low, parent.end, -1)
        else:
            session.ends[parent] = None
            above.low = low
    node.covers.clear()
