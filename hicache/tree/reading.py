"""Reading the tree: match, gather, presence and page hashes. Nothing here changes what is cached."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from hicache.boundary import deepest
from hicache.errors import InvariantViolation
from hicache.keys import page_hashes as chained
from hicache.tree.base import Lease, Match, PathPresence, PathSlots
from hicache.tree.forest import Forest, byte_view
from hicache.tree.node import Node
from hicache.tree.window import HOLE
from hicache.types import Component, Slots, Tier, TokenBuffer

_NUMPY_FROM = 4096  # bytes from which numpy finds a mismatch faster than bisection


def common_bytes(held: bytearray, offset: int, view: memoryview, start: int, end: int) -> int:
    """Return how many bytes of held[offset:] and view[start:end] agree from their beginning."""
    count = min(len(held) - offset, end - start)
    if held.startswith(view[start : start + count], offset):
        return count
    if count >= _NUMPY_FROM:
        whole = count // 8 * 8
        left = np.frombuffer(held, np.uint64, whole // 8, offset)
        differs = left != np.frombuffer(view, np.uint64, whole // 8, start)
        first = int(differs.argmax())
        low = first * 8 if differs[first] else whole
        count = min(count, low + 8)
    else:
        low = 0
    while low < count:  # held and view agree on [0, low) and differ somewhere in [low, count)
        middle = (low + count + 1) // 2
        if held.startswith(view[start + low : start + middle], offset + low):
            low = middle
        else:
            count = middle - 1
    return low


class _Checkpoints(Sequence[int]):
    """The boundaries that have a state, deepest first without listing the others."""

    def __init__(self, path: Sequence[Node], tier: Tier | None) -> None:
        self._path = path
        self._tier = tier

    def __reversed__(self) -> Iterator[int]:
        tier = self._tier
        for node in reversed(self._path):
            for state in reversed(node.states):
                if tier is None or state.slots[tier] >= 0:
                    yield state.at

    def __len__(self) -> int:
        return sum(1 for _ in reversed(self))

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return list(reversed(list(reversed(self))))[index]


class TreeMatch(Match):
    """The core's match: it remembers the nodes that it came by."""

    __slots__ = ("path",)

    path: Sequence[Node]


def match(f: Forest, scope: bytes, tokens: TokenBuffer, limit: int) -> Match:
    """Walk down as long as tokens agree; a node may be left in its middle."""
    view = byte_view(tokens)
    step = f.page_bytes
    pages = min(limit // f.page_size, view.nbytes // step)
    if pages < 0:
        raise ValueError(f"limit {limit} must not be negative")
    found = TreeMatch()
    found.path = ()
    found.scope = scope
    found.limit = pages
    found.branch = ()
    node = f.roots.get(scope)
    found.node = node
    if node is None:
        found.full = found.full_device = found.device = found.host = 0
        return found
    path, full, device = _walk(f, node, view, pages)
    if path:
        found.node = path[-1]
        found.path = path
    found.full = full
    found.full_device = device
    if not (f.swa or f.mamba or f.align_pages > 1):
        found.device = device
        found.host = full
        return found
    found.device = _deepest(f, path, device, Tier.DEVICE)
    found.host = _deepest(f, path, full, None) if any(f.resident[Tier.HOST]) else found.device
    cut = full - full % f.align_pages
    if cut > found.host:
        found.branch = (cut,)
    return found


def _walk(f: Forest, node: Node, view: memoryview, pages: int) -> tuple[list[Node], int, int]:
    """Return the nodes of a path, how many pages agree, and how many of those are on the device."""
    step = f.page_bytes
    full = device = 0
    path: list[Node] = []
    while full < pages:
        at = full * step
        child = node.children.get(bytes(view[at : at + step]))
        if child is None:
            break
        path.append(child)
        node = child
        held = child.tokens
        if device == full:
            device += len(child.device)
        if held.startswith(view[at : at + len(held)]) and child.end <= pages:
            full = child.end
            continue
        full += common_bytes(held, 0, view, at, pages * step) // step
        if device > full:
            device = full
        break
    return path, full, device


def _deepest(f: Forest, path: list[Node], limit: int, tier: Tier | None) -> int:
    """Apply the boundary rule to a path; `tier` None means device or host, page by page."""
    limit -= limit % f.align_pages
    if limit == 0:
        return 0
    while path and path[-1].start >= limit:
        path = path[:-1]
    swa: bytes | bytearray | None = None
    if f.swa:
        last = path[-1]
        assert last.swa is not None
        held = last.swa.device_has if tier is not None else last.swa.any
        low = limit - f.window_pages
        if not f.mamba and low >= last.start and held.find(0, low - last.start, limit - last.start) < 0:
            return limit
        if len(path) == 1:
            swa = held
        elif tier is not None:
            swa = b"".join([node.swa.device_has for node in path])  # type: ignore[union-attr]
        else:
            swa = b"".join([node.swa.any for node in path])  # type: ignore[union-attr]
    return deepest(
        limit,
        window_pages=f.window_pages,
        swa=swa,
        checkpoints=_Checkpoints(path, tier) if f.mamba else None,
        align=f.align_pages,
    )


def path_to(at: object, boundary: int) -> list[Node]:
    """Return the nodes that hold pages [0, boundary), root first, without the root itself."""
    node = at
    if not isinstance(node, Node):
        if node is None and boundary == 0:
            return []
        raise InvariantViolation("a released lease, or an empty match, has no path")
    while node.parent is not None and node.start >= boundary:
        node = node.parent
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def reach_of(at: Match | Lease) -> int:
    """Return how many pages of the path `at` stands for."""
    return at.full if isinstance(at, Match) else at.depth


def check_boundary(at: Match | Lease, boundary: int) -> None:
    """Raise ValueError unless `at` reaches `boundary`."""
    if not 0 <= boundary <= reach_of(at):
        raise ValueError(f"boundary {boundary} is outside of [0, {reach_of(at)}]")


def slots(f: Forest, at: Match | Lease, boundary: int) -> PathSlots:
    """Gather the slots of a path."""
    check_boundary(at, boundary)
    path: Sequence[Node]
    if isinstance(at, TreeMatch) and at.path and at.path[-1].start < boundary:
        path = at.path
    else:
        path = path_to(at.node, boundary)
    if len(path) == 1:
        full_device = path[0].device[:boundary]
    else:
        full_device = array("i", b"".join([node.device for node in path]))
        del full_device[boundary:]
    full_host: Slots = array("i")
    if len(full_device) < boundary:
        full_host = _host_slots(path, len(full_device), boundary)
    found = PathSlots(boundary, full_device, full_host)
    if f.swa:
        found.window_start = low = max(0, boundary - f.window_pages)
        found.swa_device, found.swa_host = _window_slots(path, low, boundary)
    if f.mamba and path:
        state = path[-1].state(boundary)
        if state is not None:
            found.state_device, found.state_host = state.slots
    return found


def _host_slots(path: Sequence[Node], start: int, end: int) -> Slots:
    out: Slots = array("i")
    for node in path:
        if node.end > start:
            i, j = max(start, node.start) - node.start, min(end, node.end) - node.start
            out += node.host[i:j] if node.host is not None else HOLE * (j - i)
    return out


def _window_slots(path: Sequence[Node], start: int, end: int) -> tuple[Slots, Slots]:
    device: Slots = array("i")
    host: Slots = array("i")
    for node in path[_first_reaching(path, start) :]:
        swa = node.swa
        assert swa is not None
        i, j = max(start, node.start) - node.start, min(end, node.end) - node.start
        device += swa.device[i:j]
        host += swa.host[i:j] if swa.host is not None else HOLE * (j - i)
    return device, host


def _first_reaching(path: Sequence[Node], start: int) -> int:
    i = len(path)
    while i > 0 and path[i - 1].end > start:
        i -= 1
    return i


def presence(f: Forest, at: Match) -> PathPresence:
    """Copy out what is on device or host."""
    path = path_to(at.node, at.full)
    swa: bytearray | None = None
    if f.swa:
        swa = bytearray(b"".join([node.swa.any for node in path]))  # type: ignore[union-attr]
        del swa[at.full :]
    checkpoints: list[int] | None = None
    if f.mamba:
        checkpoints = [state.at for node in path for state in node.states]
        del checkpoints[bisect_right(checkpoints, at.full) :]
    return PathPresence(at.full, swa, checkpoints)


def page_hashes(f: Forest, at: Match | Lease, start: int, end: int) -> list[bytes]:
    """Return digests of pages [start, end), computing and keeping those not known yet."""
    check_boundary(at, end)
    if not 0 <= start <= end:
        raise ValueError(f"pages [{start}, {end}) are no range")
    if start == end:
        return []
    path = path_to(at.node, end)
    out: list[bytes] = []
    previous = at.scope
    for node in path:
        need = min(end, node.end) - node.start
        known = len(node.hashes)
        if known < need:
            tokens = memoryview(node.tokens)[known * f.page_bytes : need * f.page_bytes]
            node.hashes += chained(node.hashes[-1] if known else previous, tokens, f.page_size)
        previous = node.hashes[need - 1]
        if node.end > start:
            out += node.hashes[max(start - node.start, 0) : need]
    return out


def resident(f: Forest, tier: Tier, component: Component) -> int:
    """Return how many pages of a component the tree has on a tier; storage is not the tree's to count."""
    return f.resident[tier][component] if tier in (Tier.DEVICE, Tier.HOST) else 0
