"""SGLang's prefix tree, in which the adaptive policy says which leaf goes next; all else is SGLang's.

What SGLang counts cannot teach the policy: it stamps nodes whenever it looks at a queued request, and counts
no hits under write_back. So requests are observed where they publish what they computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from hicache.integrations.sglang.radix.order import LeafOrder
from hicache.tree.adaptive import Adaptive
from hicache.tree.eviction import Stats
from hicache.tree.observing import see_request
from hicache.tree.policies import make_policy

TOKEN_BYTES = 8  # SGLang's token arrays

FULL = ComponentType.FULL


class AdaptiveTreeCore(UnifiedTreeCore):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's Python tree core with what the policy has to know of each node.

    Every node has `hicache_stats`; those of a split node are its child's. What the policy has learned
    outlives a flush: it is about requests, not about the cache.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        """`params` are SGLang's CacheInitParams. Raises ConfigError for options the policy does not have."""
        policy = make_policy("adaptive", **(params.eviction_policy_config or {}))
        assert isinstance(policy, Adaptive)
        self.policy = policy
        self.now = 0.0  # counts what was observed; the same on every rank
        theirs = dataclasses.replace(params, eviction_policy="lru", eviction_policy_config=None)
        super().__init__(theirs, components)
        self._others = tuple(kind for kind in self.component_types if kind is not FULL)

    def _new_node(self, priority: int = 0) -> Any:
        node = super()._new_node(priority)
        node.hicache_stats = Stats(created=self.now, last=self.now, hits=1)
        return node

    def _split_node(self, key: Any, child: Any, split_len: int) -> tuple[Any, Any]:
        node, action = super()._split_node(key, child, split_len)
        node.hicache_stats = child.hicache_stats.copy()
        return node, action

    def reachable(self, node: Any) -> bool:
        """Whether a hit can end in this node: the other components have something there."""
        data = node.component_data
        return all(data[kind].value is not None or data[kind].host_value is not None for kind in self._others)

    def order(self, leaves: set[Any], references: Any) -> LeafOrder[Any]:
        """Return these leaves in the order in which they go."""
        return LeafOrder(
            self.policy,
            leaves,
            identity=lambda node: int(node.id),
            stats=lambda node: node.hicache_stats,
            references=references,
            reachable=self.reachable,
        )

    def saw(
        self, node_id: int, scope: bytes, tokens: memoryview, *, found: int, start: int, end: int, room: int
    ) -> None:
        """A request published tokens [start, end), and now holds the path down to `node_id`, where end is.

        Page-aligned. It had found [0, found) when it was admitted; its first publication has start 0.
        `room` is how many tokens can be cached at once.
        """
        self.now += 1.0
        page = self.page_size
        see_request(
            self.policy.learned,
            scope,
            tokens,
            page * TOKEN_BYTES,
            now=self.now,
            found=min(found, end) // page,
            start=start // page,
            end=end // page,
            cached=room // page,
        )
        node, upto = self.node_by_id(node_id), end
        while node is not self.root_node:
            stats = node.hicache_stats
            stats.last = self.now
            if start == 0 and upto <= found:
                stats.hits += 1
            upto -= len(node.key)
            node = node.parent


class AdaptiveFull(FullComponent):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's FULL component with the walks over evictable leaves in our order."""

    tree_core: AdaptiveTreeCore
    _order: LeafOrder[Any] | None = None

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._previous: Any = None
        self._order = self.tree_core.order(self.tree_core.evictable_device_leaves, self.session_ref)

    def _evict_device_next_node(
        self, tracker: dict[Any, int], device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        order, leaves = self._order, self.tree_core.evictable_device_leaves
        assert order is not None
        if self._previous is not None and self._previous.parent in leaves:
            order.add(self._previous.parent)
        self._previous = None
        while tracker[FULL] < self._evict_device_request_cnt:
            leaf = order.pop()
            if leaf is None:
                return None
            if leaf in leaves:
                self._previous = leaf
                return int(leaf.id)
        return None

    def _evict_device_end(self) -> None:
        self._order = self._previous = None

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: dict[Any, int],
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any,
    ) -> None:
        core = self.tree_core
        leaves = core.evictable_host_leaves
        order = core.order(leaves, self.session_ref)
        while tracker[FULL] < num_tokens:
            leaf = order.pop()
            if leaf is None:
                return
            if leaf not in leaves:
                continue
            # As SGLang's own walk does.
            core._evict_host_leaf(  # noqa: SLF001
                leaf, tracker, device_frees, host_frees, cache_actions=cache_actions
            )
            if leaf.parent in leaves:
                order.add(leaf.parent)


class AdaptiveRadixCache(UnifiedRadixCache):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's cache, which tells its tree of every request that publishes something."""

    tree_core: AdaptiveTreeCore

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        # What it had found is told once: afterwards SGLang counts what the request computed as its prefix.
        found = vars(req).setdefault("hicache_found", req.prefix_len)
        start = req.kv.cache_inserted_len
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        end = req.kv.cache_inserted_len
        if end <= start:
            return
        self.tree_core.saw(
            req.last_node,
            repr((req.extra_key, req.cache_salt)).encode(),
            memoryview(req.full_untruncated_fill_ids[:end].tobytes()),
            found=found,
            start=start,
            end=end,
            room=self._room(),
        )

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        vars(req).pop("hicache_found", None)
        super().on_release(req, checkpointed=checkpointed)

    def _room(self) -> int:
        """How many tokens of FULL can be cached, on the device and on the host."""
        host = self.cache_controller.mem_pool_host.size if self.cache_controller is not None else 0
        return int(self.token_to_kv_pool_allocator.size) + int(host)
