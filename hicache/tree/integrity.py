"""Checking the laws: a walk over everything that recounts what the core believes."""

from __future__ import annotations

from array import array
from collections import Counter

from hicache.errors import InvariantViolation
from hicache.tree.forest import TIERS, Forest
from hicache.tree.leases import evictable
from hicache.tree.node import Node, TreeLease
from hicache.tree.protection import device_floor, tree_floor
from hicache.tree.recount import check_references
from hicache.tree.window import Window
from hicache.types import NO_SLOT, Component, Slots, Tier


def all_nodes(f: Forest) -> list[Node]:
    """Return every node, parents first, roots included."""
    nodes = list(f.roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def owned(f: Forest, tier: Tier, component: Component) -> Slots:
    """Collect the slots of a pool that the tree holds."""
    out: Slots = array("i")
    for node in all_nodes(f):
        if component is Component.FULL:
            vector = node.device if tier is Tier.DEVICE else node.host
        elif component is Component.SWA:
            swa = node.swa
            vector = None if swa is None else swa.device if tier is Tier.DEVICE else swa.host
        else:
            vector = array("i", [state.slots[tier] for state in node.states])
        if vector is not None:
            out.extend(slot for slot in vector if slot != NO_SLOT)
    return out


def check_integrity(f: Forest) -> None:
    """Raise InvariantViolation at the first law that does not hold."""
    nodes = all_nodes(f)
    for node in nodes:
        _check_links(f, node)
        if node.parent is not None:
            _check_pages(f, node)
            _check_statistics(node)
            _check_windows(node)
    _check_counters(f, nodes)
    _check_leases(f, nodes)
    _check_candidates(f, nodes)
    check_references(f, nodes)
    for tier in TIERS:
        for component in f.rules.kinds:
            free, there = evictable(f, tier, component), f.resident[tier][component]
            _demand(0 <= free <= there, f"{free} of {there} {component.name} pages on {tier.name} evictable")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})"


def _check_links(f: Forest, node: Node) -> None:
    parent = node.parent
    if parent is None:
        _demand(node.end == 0 and not node.device, f"a root holds pages up to {node.end}")
        _demand(f.roots.get(node.scope) is node, "a root is listed under another scope")
        _demand(bool(node.children or node.leases), "a root that nobody needs is kept")
    else:
        _demand(parent.end == node.start, f"{_name(node)} hangs below page {parent.end}")
        _demand(parent.children.get(f.first_page(node)) is node, f"{_name(node)} has another key")
        if node.device:
            _demand(parent.device_end == parent.end, f"{_name(node)} is on the device below host-only pages")
    on_device = sum(1 for child in node.children.values() if child.device)
    _demand(on_device == node.device_children, f"{_name(node)}: {on_device} device children")


def _check_pages(f: Forest, node: Node) -> None:
    length = node.end - node.start
    _demand(length > 0, f"{_name(node)} is empty")
    page = len(node.tokens) // length
    _demand(page * length == len(node.tokens), f"{_name(node)} has {len(node.tokens)} token bytes")
    _demand(len(node.device) <= length and NO_SLOT not in node.device, f"{_name(node)}: device slots")
    named = len(node.hashes)
    _demand(named == length if f.observer else named <= length, f"{_name(node)} has {named} hashes")
    _demand(node.flags is None or len(node.flags) == length, f"{_name(node)}: flags")
    host = node.host if node.host is not None else array("i")
    _demand(not host or len(host) == length, f"{_name(node)} has {len(host)} host slots")
    _demand(node.host_count == len(host) - host.count(NO_SLOT), f"{_name(node)}: host count")
    rest = host[len(node.device) :] if host else ()
    absent = length - len(node.device) if not host else rest.count(NO_SLOT)
    _demand(absent == 0, f"{_name(node)} has {absent} pages on no tier")


def _check_statistics(node: Node) -> None:
    at = node.mark_at
    _demand(len(at) == len(node.marks) > 0, f"{_name(node)}: marks")
    _demand(at == sorted(set(at)) and at[0] > node.start and at[-1] == node.end, f"{_name(node)}: marks {at}")
    hits = [node.hits(depth) for depth in at]
    _demand(min(hits) >= 0, f"{_name(node)}: hits {hits}")


def _check_windows(node: Node) -> None:
    if node.swa is not None:
        node.swa.check()
        reach = len(node.device)
        _demand(node.swa.device_has.find(1, reach) < 0, f"{_name(node)}: SWA on the device without FULL")
    last = node.start
    for state in node.states:
        _demand(last < state.at <= node.end and state.node is node, f"{_name(node)}: state at {state.at}")
        _demand(max(state.slots) >= 0, f"the state at {state.at} is on no tier")
        gone = state.slots[0] >= 0 and state.at > node.device_end
        _demand(not gone, f"the state at {state.at} is on the device without FULL")
        last = state.at


def _check_counters(f: Forest, nodes: list[Node]) -> None:
    pages = sum(node.end - node.start for node in nodes)
    _demand(pages == f.pages, f"{pages} pages, counted as {f.pages}")
    for tier in TIERS:
        for component in f.rules.kinds:
            slots = owned(f, tier, component)
            counted = f.resident[tier][component]
            _demand(len(slots) == counted, f"{len(slots)} {component.name} on {tier.name}, not {counted}")
            twice = [slot for slot, n in Counter(slots).items() if n > 1]
            _demand(not twice, f"{component.name} slots {twice} on {tier.name} stand twice")


def _check_leases(f: Forest, nodes: list[Node]) -> None:
    alive = set(nodes)
    expected: dict[Node, set[TreeLease]] = {}
    ends: Counter[Node] = Counter()
    device_ends: Counter[Node] = Counter()
    for lease in f.leases:
        node = lease.node
        _demand(isinstance(node, Node) and node in alive, f"a lease of depth {lease.depth} ends nowhere")
        assert isinstance(node, Node)
        _demand(
            node.start < lease.depth <= node.end or lease.depth == node.end == 0,
            f"a lease of depth {lease.depth} ends in {_name(node)}",
        )
        ends[node] += 1
        device_ends[node] += lease.tier is Tier.DEVICE
        at: Node | None = node
        while at is not None and (at is node or (at.parent is not None and at.end > lease.first)):
            expected.setdefault(at, set()).add(lease)
            at = at.parent
    for node in reversed(nodes):
        _demand(expected.get(node, set()) == set(node.leases), f"{_name(node)}: leases entered wrongly")
        _demand(ends[node] == node.pins, f"{_name(node)}: {node.pins} pins, not {ends[node]}")
        _demand(device_ends[node] == node.device_pins, f"{_name(node)}: {node.device_pins} device pins")
        if node.parent is not None:
            ends[node.parent] += ends[node] > 0
            device_ends[node.parent] += device_ends[node] > 0


def _check_candidates(f: Forest, nodes: list[Node]) -> None:
    """What could be taken now is queued; what a lease keeps is queued, or parked on a lease."""
    parked = {id(item) for lease in f.leases for item in lease.parked}
    for node in nodes:
        if node.parent is not None:
            _check_tails(node, parked)
            for tier in TIERS:
                for state in node.states:
                    if state.slots[tier] >= 0:
                        kept = any(x.tier is tier and state.at in x.states for x in node.leases)
                        queued = state.entries[tier] is not None
                        _demand(queued or (kept and id(state) in parked), f"state {state.at} is not queued")
                if node.swa is not None:
                    _check_runs(node, node.swa, tier, parked)


def _check_tails(node: Node, parked: set[int]) -> None:
    end = node.device_end
    if node.device and not node.device_children and node.entries[0] is None:
        kept = device_floor(node, end)[0] >= end
        if node.host is None or node.host[end - 1 - node.start] == NO_SLOT:
            kept = kept or tree_floor(node, end)[0] >= end
        _demand(kept and id(node) in parked, f"{_name(node)}: its device tail is not queued")
    if not node.children and end < node.end and node.entries[1] is None:
        kept = tree_floor(node, node.end)[0] >= node.end
        _demand(kept and id(node) in parked, f"{_name(node)}: its host tail is not queued")


def _check_runs(node: Node, window: Window, tier: Tier, parked: set[int]) -> None:
    has = window.has(tier)
    guards = [lease for lease in node.leases if lease.tier is tier]
    for run in window.runs:
        if run.entries[tier] is not None:
            continue
        for page in range(run.start, run.end):
            if has[page - node.start]:
                kept = id(run) in parked and any(x.swa_start <= page < x.depth for x in guards)
                _demand(kept, f"SWA run [{run.start}, {run.end}) is not queued for page {page}")
