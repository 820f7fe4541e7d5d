"""The state of a tree core and the moves that keep its structure whole: split, join, cut, remove.

Everything else in this package is a function over a `Forest`. Decides nothing about what to keep.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import partial

from hicache.errors import InvariantViolation
from hicache.tree.base import Freed, TreeRules
from hicache.tree.covers import bequeath
from hicache.tree.eviction import EvictionPolicy, Key
from hicache.tree.node import STORED, Node, State, TreeLease
from hicache.tree.protection import may_go
from hicache.tree.ranking import Ranked
from hicache.tree.residency import Loss, Observer, tell_state_lost, tell_windows_lost
from hicache.tree.window import Run
from hicache.types import NO_SLOT, TOKEN_BYTES, Component, Slots, Tier, TokenBuffer

TIERS = (Tier.DEVICE, Tier.HOST)


def byte_view(tokens: TokenBuffer) -> memoryview:
    """See tokens as bytes without copying them; they must be C-contiguous LE u32."""
    view = memoryview(tokens)
    if view.format not in ("B", "I", "<I", "b", "c", "i", "<i"):
        raise ValueError(f"tokens must be a buffer of u32, not of {view.format!r}")
    if view.nbytes % TOKEN_BYTES:
        raise ValueError(f"tokens take {view.nbytes} bytes, not a multiple of {TOKEN_BYTES}")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Forest:
    """One tree per scope. Single-threaded.

    Invariants: `resident[tier][component]` and `pages` equal a recount; every candidate for eviction
    is queued in its heap, or parked on a lease that protects it.
    """

    def __init__(
        self, rules: TreeRules, policies: Mapping[Component, EvictionPolicy] | EvictionPolicy, *, host: bool
    ) -> None:
        self.rules = rules
        self.has_host = host
        self.page_size = rules.page_size
        self.page_bytes = rules.page_size * TOKEN_BYTES
        self.window_pages = rules.window_pages
        self.align_pages = rules.align_pages
        self.swa = Component.SWA in rules.kinds
        self.mamba = Component.MAMBA in rules.kinds
        self.roots: dict[bytes, Node] = {}
        self.leases: dict[TreeLease, None] = {}
        self.resident = [[0, 0, 0], [0, 0, 0]]
        self.pages = 0  # FULL pages on any tier
        self.version = 0  # moves with every change, so that counts can be remembered
        self.counts: dict[tuple[Tier, Component], tuple[int, int]] = {}
        self.joinable: list[Node] = []  # lost a child lately
        self.copied: dict[Node, None] = {}  # may hold FULL host copies of device pages, oldest first
        self.observer: Observer | None = None
        self.loss = Loss.EVICTED  # why pages leave just now

        if isinstance(policies, EvictionPolicy):
            policies = {component: policies.for_component(component, rules) for component in rules.kinds}
        full = self._policy(policies, Component.FULL)
        size = rules.page_size
        spares_anchored = full.spares_anchored and (self.swa or self.mamba)
        self.spares_anchored = spares_anchored

        def device_key(node: Node) -> Key:
            end = node.start + len(node.device)
            return key_at(node, end)

        def key_at(node: Node, end: int) -> Key:
            stats = node.tail_stats(end or 1)
            if spares_anchored and not self.anchored(node, end):
                return full.unanchored_key(stats)
            return full.key(stats, (end - 1) * size)

        def host_key(node: Node) -> Key:
            return key_at(node, node.end)

        self.policy = full
        self.full: tuple[Ranked[Node], ...] = (
            Ranked(
                lambda: full.queue(Tier.DEVICE, device_key, may_go),
                lambda node: node.refs(node.device_end) if node.covers else 0,
            ),
            Ranked(
                lambda: full.queue(Tier.HOST, host_key, may_go),
                lambda node: node.refs(node.end) if node.covers else 0,
            ),
        )
        window = self._policy(policies, Component.SWA) if self.swa else full
        self.swa_policy = window
        self.runs: tuple[Ranked[Run], ...] = tuple(
            Ranked(partial(window.queue, tier, lambda run: window.key(run.stats, run.start * size)), run_refs)
            for tier in TIERS
        )
        recurrent = self._policy(policies, Component.MAMBA) if self.mamba else full
        self.mamba_policy = recurrent
        self.states: tuple[Ranked[State], ...] = tuple(
            Ranked(
                partial(
                    recurrent.queue,
                    tier,
                    lambda state: recurrent.key(state.stats, (state.at - 1) * size),
                ),
                state_refs,
            )
            for tier in TIERS
        )

    @staticmethod
    def _policy(policies: Mapping[Component, EvictionPolicy], component: Component) -> EvictionPolicy:
        if component not in policies:
            raise ValueError(f"no eviction policy for {component.name}")
        return policies[component]

    # -- candidates ----------------------------------------------------------------------------

    def offer(self, node: Node) -> None:
        """Queue a node's tails wherever they are candidates."""
        if node.parent is None:
            return
        if node.device and not node.device_children:
            self.full[0].offer(node)
        if not node.children and len(node.device) < node.end - node.start:
            self.full[1].offer(node)

    def anchored(self, node: Node, end: int) -> bool:
        """Tell whether every other component has something, on any tier, where page `end` ends."""
        if self.mamba and node.state(end) is None:
            return False
        return node.swa is None or node.swa.any.find(1, end - 1 - node.start, end - node.start) >= 0

    def alike_from(self, node: Node, low: int, end: int) -> int:
        """Return the first of the pages ending at `end`, not below `low`, whose keys equal the last one's."""
        if self.policy.per_page:
            return max(low, end - 1)
        low = max(low, node.run_start(end))
        if not self.spares_anchored:
            return low
        at, anchored = end, self.anchored(node, end)
        while at > low and self.anchored(node, at) is anchored:
            at -= 1
        return at

    def lost_anchor(self, node: Node) -> None:
        """Follow a window's or a state's leaving: pages may be of less use now."""
        if self.spares_anchored:
            self.offer(node)

    def offer_run(self, run: Run) -> None:
        node = run.node
        if node is None or node.swa is None:
            return
        i, j = run.start - node.start, run.end - node.start
        if node.swa.device_has.find(1, i, j) >= 0:
            self.runs[0].offer(run)
        if node.swa.host is not None and node.swa.has_in(Tier.HOST, run.start, run.end).find(1) >= 0:
            self.runs[1].offer(run)

    def offer_state(self, state: State) -> None:
        if state.node is None:
            return
        for tier in TIERS:
            if state.slots[tier] >= 0:
                self.states[tier].offer(state)

    def forget_run(self, run: Run) -> None:
        self.runs[0].withdraw(run)
        self.runs[1].withdraw(run)

    def forget_state(self, state: State) -> None:
        state.node = None
        self.states[0].withdraw(state)
        self.states[1].withdraw(state)

    def reoffer(self, lease: TreeLease) -> None:
        """Queue again what a lease, now moved or ended, kept from eviction."""
        parked, lease.parked = lease.parked, []
        for item in parked:
            if isinstance(item, Node):
                self.offer(item)
            elif isinstance(item, Run):
                self.offer_run(item)
            elif isinstance(item, State):
                self.offer_state(item)

    # -- leases --------------------------------------------------------------------------------

    def register(self, lease: TreeLease) -> None:
        """Enter a lease, whose fields are set, where it ends and where its SWA range or states lie."""
        node: Node | None = lease.node  # type: ignore[assignment]
        self._pin(node, lease.tier)
        assert node is not None
        node.leases[lease] = None
        first = lease.first
        while node.start > first and node.parent is not None:
            node = node.parent
            node.leases[lease] = None

    def unregister(self, lease: TreeLease) -> None:
        node: Node | None = lease.node  # type: ignore[assignment]
        self._unpin(node, lease.tier)
        while node is not None and lease in node.leases:
            del node.leases[lease]
            node = node.parent

    @staticmethod
    def _pin(node: Node | None, tier: Tier) -> None:
        at = node
        while at is not None:
            at.pins += 1
            if at.pins > 1:
                break
            at = at.parent
        if tier is Tier.DEVICE:
            while node is not None:
                node.device_pins += 1
                if node.device_pins > 1:
                    break
                node = node.parent

    @staticmethod
    def _unpin(node: Node | None, tier: Tier) -> None:
        at = node
        while at is not None:
            at.pins -= 1
            if at.pins:
                break
            at = at.parent
        if tier is Tier.DEVICE:
            while node is not None:
                node.device_pins -= 1
                if node.device_pins:
                    break
                node = node.parent

    # -- structure -----------------------------------------------------------------------------

    def root(self, scope: bytes) -> Node:
        found = self.roots.get(scope)
        if found is None:
            found = self.roots[scope] = Node(None, 0, swa=self.swa, scope=scope)
        return found

    def first_page(self, node: Node) -> bytes:
        return bytes(node.tokens[: self.page_bytes])

    def new_leaf(self, parent: Node, key: bytes) -> Node:
        """Hang an empty node under `parent`; the caller fills it at once."""
        leaf = Node(parent, parent.end, swa=self.swa)
        parent.children[key] = leaf
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Split a node at page `at`, inside it; return the new upper node, [start, at).

        The existing object stays the lower part, so the children's parents and deeper leases do.
        """
        parent = node.parent
        if parent is None or not node.start < at < node.end:
            raise InvariantViolation(f"cannot split node [{node.start}, {node.end}) at {at}")
        upper = Node(parent, node.start, swa=self.swa)
        parent.children[self.first_page(node)] = upper
        node.split_into(upper, at, self.forget_run)
        upper.children[self.first_page(node)] = node
        node.parent = upper
        upper.device_children = 1 if node.device else 0
        for lease in list(node.leases):
            if lease.node is node and lease.depth <= at:
                lease.node = upper
                del node.leases[lease]
                upper.leases[lease] = None
                node.pins -= 1
                upper.pins += 1
                if lease.tier is Tier.DEVICE:
                    node.device_pins -= 1
                    upper.device_pins += 1
            elif lease.first < at:
                upper.leases[lease] = None
        upper.pins += 1 if node.pins else 0
        upper.device_pins += 1 if node.device_pins else 0
        if upper.host_count and upper.device:
            self.copied[upper] = None
        self.offer(upper)
        self.offer(node)
        if node.swa is not None and upper.swa is not None:
            for run in upper.swa.runs[-1:] + node.swa.runs[:1]:
                self.offer_run(run)
        return upper

    def join_idle(self) -> None:
        """Join every node that lost a child lately and has a single one left with that child."""
        while self.joinable:
            upper = self.joinable.pop()
            if upper.parent is None or len(upper.children) != 1:
                continue
            (lower,) = upper.children.values()
            parent = upper.parent
            parent.children[self.first_page(upper)] = lower
            lower.parent = parent
            for lease in upper.leases:
                if lease.node is upper:
                    lease.node = lower
                    lower.pins += 1
                    lower.device_pins += 1 if lease.tier is Tier.DEVICE else 0
                lower.leases[lease] = None
            self._bury(upper)
            lower.absorb(upper)
            if lower.host_count and lower.device:
                self.copied[lower] = None
            self.offer(lower)

    def _bury(self, node: Node) -> None:
        node.parent = None
        self.full[0].withdraw(node)
        self.full[1].withdraw(node)
        self.copied.pop(node, None)

    def lost_device(self, node: Node) -> None:
        """Follow a node's last device page leaving: its parent's tail may be a candidate now."""
        self.full[0].withdraw(node)
        self.copied.pop(node, None)
        node.report()
        parent = node.parent
        if parent is not None:
            parent.device_children -= 1
            self.offer(parent)

    def remove(self, node: Node) -> None:
        """Take a childless node, whose slots are taken and that no lease names, out of the tree."""
        parent = node.parent
        if parent is None or node.children or node.leases or node.device:
            raise InvariantViolation(f"node [{node.start}, {node.end}) cannot be removed")
        node.report()
        if node.covers:
            bequeath(self, node)
        del parent.children[self.first_page(node)]
        self._bury(node)
        self.offer(parent)
        self.joinable.append(parent)
        if parent.parent is None:
            self.drop_idle_roots(parent.scope)

    def drop_idle_roots(self, scope: bytes) -> None:
        root = self.roots.get(scope)
        if root is not None and not root.children and not root.leases:
            del self.roots[scope]

    # -- taking slots out ----------------------------------------------------------------------

    def take_windows(self, node: Node, tier: Tier, start: int, end: int, freed: Freed) -> None:
        """Take a tier's SWA pages and states of pages [start, end) out of a node into `freed`."""
        if node.swa is not None:
            if self.observer is not None:
                tell_windows_lost(self, node, tier, start, end)
            taken = node.swa.take(tier, start, end)
            if taken:
                self.resident[tier][Component.SWA] -= len(taken)
                put(freed, tier, Component.SWA, taken)
                node.swa.prune(start, end, self.forget_run)
        states = node.states
        i = len(states) - 1
        while i >= 0 and states[i].at > start:
            if states[i].at <= end:
                self.take_state(states[i], tier, freed)
            i -= 1

    def take_state(self, state: State, tier: Tier, freed: Freed) -> None:
        """Take a state's slot on a tier into `freed`; the state goes with its last slot."""
        slot = state.slots[tier]
        if slot < 0:
            return
        state.slots[tier] = NO_SLOT
        gone = state.slots[0] < 0 and state.slots[1] < 0
        if self.observer is not None:
            tell_state_lost(self, state, tier, self.loss)
            if gone and state.flags & STORED:
                tell_state_lost(self, state, Tier.STORAGE, Loss.UNTRACKED)
        self.resident[tier][Component.MAMBA] -= 1
        put(freed, tier, Component.MAMBA, array("i", [slot]))
        self.states[tier].withdraw(state)
        if gone and state.node is not None:
            node = state.node
            node.states.remove(state)
            self.forget_state(state)
            self.lost_anchor(node)


def run_refs(run: Run) -> int:
    """Return how many sessions refer to a run."""
    node = run.node
    return 0 if node is None or node.swa is None or node.swa.refs is None else node.swa.run_refs(run)


def state_refs(state: State) -> int:
    """Return how many sessions refer to a state."""
    node = state.node
    return 0 if node is None or not node.state_refs else node.state_refs.get(state.at, 0)


def put(freed: Freed, tier: Tier, component: Component, slots: Slots) -> None:
    """Add slots to what a call gives back."""
    held = freed.get((tier, component))
    if held is None:
        freed[(tier, component)] = slots
    else:
        held += slots
