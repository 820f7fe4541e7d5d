"""What the tree holds, told as it changes: which pages came to a tier, which left it, and why.

An observer gets digests in batches, in the order of the changes. Without one nothing here runs: whoever
changes residency looks at `Forest.observer` first.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hicache.keys import page_hashes
from hicache.tree.node import STORED, Node, State
from hicache.types import Component, Slots, Tier

if TYPE_CHECKING:
    from hicache.tree.forest import Forest


class Loss(enum.Enum):
    """Why a page left a tier."""

    EVICTED = "evicted"  # for room
    DEMOTED = "demoted"  # off the device, the host keeps it
    RECLAIMED = "reclaimed"  # a host copy, for room, of a page that the device keeps
    FLUSHED = "flushed"
    MISSING = "missing"  # storage was asked and does not have it
    RESET = "reset"  # storage may have lost everything it held
    UNTRACKED = "untracked"  # the page left device and host; whether storage keeps it is not followed


class Observer(ABC):
    """Is told every change of residency, by the tree's thread, in order. Must not call the tree.

    A page is named by its own digest (32 bytes), a MAMBA state by that of the page it ends. STORAGE
    stands for what the tree believes to be stored.
    """

    @abstractmethod
    def gained(
        self, tier: Tier, component: Component, digests: Sequence[bytes], parent: bytes | None, tokens: bytes
    ) -> None:
        """Neighbouring pages came to a tier.

        `parent` is the digest before the first, None at the root; `tokens` (LE u32) are given for FULL.
        """

    @abstractmethod
    def lost(self, tier: Tier, component: Component, digests: Sequence[bytes], why: Loss) -> None:
        """Pages left a tier."""

    @abstractmethod
    def cleared(self) -> None:
        """The tree holds nothing any more, on any tier."""


def observe(f: Forest, observer: Observer | None) -> None:
    """Tell `observer` all that is held now, and every change from now on; None ends it."""
    f.observer = observer
    if observer is None:
        return
    for root in f.roots.values():
        waiting = list(root.children.values())
        for node in waiting:
            waiting += node.children.values()
            _tell_node(f, node)


def _tell_node(f: Forest, node: Node) -> None:
    tell_gained(f, node, Tier.DEVICE, Component.FULL, node.start, node.device_end)
    told = [
        (Component.FULL, Tier.HOST, _present(node.host)),
        (Component.FULL, Tier.STORAGE, _stored(node.flags)),
    ]
    if node.swa is not None:
        told.append((Component.SWA, Tier.DEVICE, _present(node.swa.device)))
        told.append((Component.SWA, Tier.HOST, _present(node.swa.host)))
        told.append((Component.SWA, Tier.STORAGE, _stored(node.swa.flags)))
    for component, tier, indices in told:
        tell_pages_gained(f, node, tier, component, (node.start + i for i in indices))
    for state in node.states:
        for tier in (Tier.DEVICE, Tier.HOST):
            if state.slots[tier] >= 0:
                tell_state_gained(f, state, tier)
        if state.flags & STORED:
            tell_state_gained(f, state, Tier.STORAGE)


def _present(slots: Slots | None) -> list[int]:
    return [i for i, slot in enumerate(slots or ()) if slot >= 0]


def _stored(flags: bytearray | None) -> list[int]:
    return [i for i, flag in enumerate(flags or b"") if flag & STORED]


# -- gains ---------------------------------------------------------------------------------------


def tell_gained(f: Forest, node: Node, tier: Tier, component: Component, start: int, end: int) -> None:
    """Pages [start, end) of a node came to a tier."""
    if start >= end or f.observer is None:
        return
    digests = _digests(f, node, start, end)
    if component is Component.FULL:
        i, size = start - node.start, f.page_bytes
        tokens = bytes(node.tokens[i * size : (end - node.start) * size])
        f.observer.gained(tier, component, digests, _digest_before(node, start), tokens)
    else:
        f.observer.gained(tier, component, digests, None, b"")


def tell_pages_gained(f: Forest, node: Node, tier: Tier, component: Component, pages: Iterable[int]) -> None:
    """Ascending pages of a node came to a tier."""
    for start, end in _runs(pages):
        tell_gained(f, node, tier, component, start, end)


def tell_state_gained(f: Forest, state: State, tier: Tier) -> None:
    """A state came to a tier."""
    if f.observer is not None and state.node is not None:
        digests = _digests(f, state.node, state.at - 1, state.at)
        f.observer.gained(tier, Component.MAMBA, digests, None, b"")


# -- losses --------------------------------------------------------------------------------------


def tell_lost(
    f: Forest, node: Node, tier: Tier, component: Component, pages: Iterable[int], why: Loss
) -> None:
    """Pages of a node left a tier; the node still has their tokens."""
    digests = [_digests(f, node, page, page + 1)[0] for page in pages]
    if digests and f.observer is not None:
        f.observer.lost(tier, component, digests, why)


def tell_state_lost(f: Forest, state: State, tier: Tier, why: Loss) -> None:
    """A state left a tier; it still has its node."""
    if state.node is not None:
        tell_lost(f, state.node, tier, Component.MAMBA, (state.at - 1,), why)


def tell_windows_lost(f: Forest, node: Node, tier: Tier, start: int, end: int) -> None:
    """The SWA pages in [start, end) of a node are about to leave a tier."""
    if node.swa is not None:
        has = node.swa.has_in(tier, start, end)
        tell_lost(f, node, tier, Component.SWA, (start + i for i, flag in enumerate(has) if flag), f.loss)


def tell_cut(f: Forest, node: Node, at: int) -> None:
    """Pages from `at` on are about to leave a node: FULL of both tiers, and beliefs about storage."""
    i = at - node.start
    tell_lost(f, node, Tier.DEVICE, Component.FULL, range(max(at, node.start), node.device_end), f.loss)
    held = (node.start + j for j in _present(node.host) if j >= i)
    tell_lost(f, node, Tier.HOST, Component.FULL, held, f.loss)
    _tell_beliefs_lost(f, node, i, Loss.UNTRACKED)


def tell_storage_forgotten(f: Forest, node: Node) -> None:
    """Every belief about storage is about to leave a node."""
    _tell_beliefs_lost(f, node, 0, Loss.RESET)
    for state in node.states:
        if state.flags & STORED:
            tell_state_lost(f, state, Tier.STORAGE, Loss.RESET)


def _tell_beliefs_lost(f: Forest, node: Node, first: int, why: Loss) -> None:
    """Beliefs about pages from the first-th of a node on, states aside."""
    for component, flags in (
        (Component.FULL, node.flags),
        (Component.SWA, node.swa.flags if node.swa is not None else None),
    ):
        believed = (node.start + j for j in _stored(flags) if j >= first)
        tell_lost(f, node, Tier.STORAGE, component, believed, why)


# -- names ---------------------------------------------------------------------------------------


def _digests(f: Forest, node: Node, start: int, end: int) -> list[bytes]:
    """Digests of pages [start, end) of a node, made if they are new; all above were told and have theirs."""
    known, need = len(node.hashes), end - node.start
    if known < need:
        above = node.parent
        assert above is not None
        before = (node.hashes or above.hashes or (above.scope,))[-1]
        tokens = memoryview(node.tokens)[known * f.page_bytes : need * f.page_bytes]
        node.hashes += page_hashes(before, tokens, f.page_size)
    return node.hashes[start - node.start : need]


def _digest_before(node: Node, page: int) -> bytes | None:
    if page > node.start:
        return node.hashes[page - node.start - 1]
    parent = node.parent
    return None if parent is None or parent.parent is None else parent.hashes[-1]


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Cut ascending pages into neighbouring ones."""
    start = end = -1
    for page in pages:
        if page != end:
            if start < end:
                yield start, end
            start = page
        end = page + 1
    if start < end:
        yield start, end
