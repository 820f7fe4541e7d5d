"""Checking what sessions refer to: a recount from where they end, and the ranks of the candidates."""

from __future__ import annotations

from collections import Counter

from hicache.errors import InvariantViolation
from hicache.tree.base import SessionRefs
from hicache.tree.forest import TIERS, Forest, run_refs, state_refs
from hicache.tree.node import Node


def check_references(f: Forest, nodes: list[Node]) -> None:
    """Raise InvariantViolation where a count differs from the sessions that there are."""
    windows: Counter[tuple[Node, int]] = Counter()
    for node in nodes:
        for session in node.covers:
            _check_cover(node, session)
        if node.parent is not None:
            _check_pages(node)
            _check_states(node)
            _add_windows(node, windows)
    for node in nodes:
        if node.swa is not None and node.swa.refs is not None:
            mine = [windows[node, page] for page in range(node.start, node.end)]
            _demand(mine == list(node.swa.refs), node, f"windows of {mine} sessions, counted {node.swa.refs}")
        elif f.swa:
            _demand(not any(windows[node, p] for p in range(node.start, node.end)), node, "windows uncounted")
        _check_ranks(f, node)


def _demand(holds: bool, node: Node, message: str) -> None:
    if not holds:
        raise InvariantViolation(f"node [{node.start}, {node.end}): {message}")


def _check_cover(node: Node, session: SessionRefs) -> None:
    cover = node.covers[session]
    parent = node.parent
    _demand(parent is not None, node, "a session refers to a root")
    assert parent is not None
    below = sum(session in child.covers for child in node.children.values())
    _demand(below == cover.below, node, f"a session goes on into {below} children, not {cover.below}")
    _demand((node in session.ends) == (not below), node, "a session ends elsewhere than it says")
    _demand(not below or cover.depth == node.end, node, f"a session goes on from {cover.depth}")
    _demand(cover.depth > node.start, node, f"a session refers to pages before {cover.depth}")
    _demand(cover.depth <= node.end or node.trimmed, node, f"a session ends at {cover.depth}")
    _demand(parent.parent is None or session in parent.covers, node, "a session skips the pages above")


def _check_pages(node: Node) -> None:
    _demand(not node.beyond.refs, node, f"{node.beyond.refs} sessions beyond the end")
    for i, at in enumerate(node.mark_at):
        mine = sum(min(cover.depth, node.end) >= at for cover in node.covers.values())
        counted = sum(mark.refs for mark in node.marks[i:])
        _demand(mine == counted, node, f"{mine} sessions refer to page {at - 1}, counted as {counted}")


def _check_states(node: Node) -> None:
    mine = Counter(cover.depth for cover in node.covers.values() if cover.state and cover.depth <= node.end)
    counted = {at: n for at, n in node.state_refs.items() if at <= node.end}
    _demand(dict(mine) == counted, node, f"states of {dict(mine)} sessions, counted {counted}")


def _add_windows(node: Node, windows: Counter[tuple[Node, int]]) -> None:
    for cover in node.covers.values():
        if cover.below:
            continue
        at: Node | None = node
        high = min(cover.depth, node.end)
        while at is not None and at.parent is not None:
            for page in range(max(cover.low, at.start), min(high, at.end)):
                windows[at, page] += 1
            at = at.parent


def _check_ranks(f: Forest, node: Node) -> None:
    """No candidate waits behind more sessions than refer to it."""
    for tier in TIERS:
        ends = (node.device_end, node.end)
        is_tail = (bool(node.device) and not node.device_children, not node.children and ends[0] < ends[1])
        if node.parent is not None and node.entries[tier] is not None and is_tail[tier]:
            rank, refs = f.full[tier].rank(node), node.refs(ends[tier])
            _demand(rank <= refs, node, f"its tail is ranked behind {rank} sessions, {refs} refer to it")
        for state in node.states:
            if state.entries[tier] is not None:
                rank, refs = f.states[tier].rank(state), state_refs(state)
                _demand(rank <= refs, node, f"state {state.at} is behind {rank} sessions, not {refs}")
        swa = node.swa
        for run in swa.runs if swa is not None else ():
            assert swa is not None
            if run.entries[tier] is not None and 1 in swa.has_in(tier, run.start, run.end):
                rank, refs = f.runs[tier].rank(run), run_refs(run)
                _demand(rank <= refs, node, f"run [{run.start}, {run.end}) is behind {rank}, not {refs}")
