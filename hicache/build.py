"""The composition root: settings to a running HiCache. The one module that names concrete parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hicache.cache import HiCache
from hicache.clock import Clock, ManualClock
from hicache.config.cache import CacheConfig
from hicache.spec import ModelSpec
from hicache.transfer.base import Executor
from hicache.transfer.virtual import VirtualCosts, VirtualExecutor, VirtualStorage
from hicache.tree.base import TreeCore, TreeRules
from hicache.tree.eviction import EvictionPolicy
from hicache.tree.policies import make_policy
from hicache.tree.unified import UnifiedTree
from hicache.types import Component


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Capacities in pages (MAMBA: states); an empty `host` means no L2, and so no L3."""

    device: Mapping[Component, int]
    host: Mapping[Component, int]


def build_tree(
    spec: ModelSpec, sizes: TierSizes, config: CacheConfig, policy: EvictionPolicy | None = None
) -> TreeCore:
    """Build the tree core for a spec. Raises ConfigError for an unknown policy or policy option.

    `policy` stands in for the configured one.
    """
    rules = TreeRules(spec.page_size, spec.kinds, spec.window_pages, spec.align_pages)
    if policy is None:
        policy = make_policy(config.radix_eviction_policy, **config.radix_eviction_policy_config)
    return UnifiedTree(rules, policy, host=bool(sizes.host))


def build_cache(
    spec: ModelSpec,
    sizes: TierSizes,
    config: CacheConfig,
    executor: Executor,
    clock: Clock,
    *,
    policy: EvictionPolicy | None = None,
) -> HiCache:
    """Put a cache together around an executor. Raises ConfigError for settings that cannot work."""
    tree = build_tree(spec, sizes, config, policy)
    return HiCache(spec, tree, executor, device=sizes.device, host=sizes.host, config=config, clock=clock)


def build_virtual(
    spec: ModelSpec,
    sizes: TierSizes,
    config: CacheConfig,
    clock: ManualClock,
    *,
    costs: VirtualCosts | None = None,
    storage: VirtualStorage | None = None,
    policy: EvictionPolicy | None = None,
) -> HiCache:
    """Build a cache in virtual time: the same tree, policies and allocators, costs instead of copies."""
    executor = VirtualExecutor(spec, clock, costs=costs, storage=storage)
    return build_cache(spec, sizes, config, executor, clock, policy=policy)
