"""The radix-cache backend `hicache` of SGLang: which policy is meant, and what it cannot be combined with.

    --radix-cache-backend hicache                                  the adaptive policy
    --radix-cache-backend hicache --radix-eviction-policy lfu      SGLang's own, in its own tree

Imports SGLang only when it runs there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from hicache.errors import ConfigError
from hicache.integrations.sglang import TESTED_VERSIONS
from hicache.tree.policies import make_policy

logger = logging.getLogger(__name__)

NAME = "hicache"
OURS = "adaptive"
LIBRARY = ("fifo", "mru", "filo")  # SGLang has them, and does not offer them
CORE = "hicache-adaptive"
CORE_VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
COMPONENTS = ("FULL", "SWA", "MAMBA")


def register() -> None:
    """Make the name known to SGLang, and its flag take our policy. Once per process."""
    from sglang.srt.arg_groups import choices  # noqa: PLC0415
    from sglang.srt.mem_cache import registry  # noqa: PLC0415

    known = choices.RADIX_EVICTION_POLICY_CHOICES
    choices.add_radix_eviction_policy_choices([name for name in (OURS, *LIBRARY) if name not in known])
    registry.register_radix_cache_backend(NAME, make_cache)


def make_cache(context: Any) -> Any:
    """Make the cache of one scheduler from SGLang's TreeCacheBuildContext.

    Raises ConfigError, which ends SGLang's start, for a combination that would not do what it says.
    """
    from sglang.srt.environ import envs  # noqa: PLC0415
    from sglang.srt.mem_cache import registry  # noqa: PLC0415

    policy = chosen_policy(context.server_args)
    variable = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND
    reason = refusal(context, policy, core=variable.get() if variable.is_set() else "")
    if reason:
        raise ConfigError(reason)
    if policy != OURS:
        logger.info("HiCache: radix cache with SGLang's own policy %s, in SGLang's own tree", policy)
        return registry.create_unified_radix_cache(context)
    params = context.params
    options = params.eviction_policy_config or {}
    make_policy(OURS, **options)
    cache_class = install(params)
    cache = registry.create_unified_radix_cache(context, cache_class=cache_class)
    logger.info(
        "HiCache: radix cache with the adaptive policy%s, in SGLang's Python tree core",
        f" ({', '.join(f'{name} {value}' for name, value in options.items())})" if options else "",
    )
    return cache


def chosen_policy(arguments: Any) -> str:
    """Return the policy: the one of --radix-eviction-policy, or ours if that was not given."""
    policy = str(arguments.radix_eviction_policy).lower()
    given = bool(getattr(arguments, "_radix_eviction_policy_explicitly_set", False))
    return OURS if policy == "lru" and not given else policy


def refusal(context: Any, policy: str, *, core: str) -> str:
    """Return why this combination is refused, in one line that says what to change; empty if it is not.

    `core` is the tree core that the environment names, empty if it names none.
    """
    arguments = context.server_args
    version = metadata.version("sglang")
    flag = f"--radix-cache-backend {NAME}"
    if version not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        return (
            f"{flag} extends inner parts of SGLang and was never tested with {version} (tested: {tested}): "
            "drop the flag, or install a tested version"
        )
    if context.disable_radix_cache:
        return f"{flag} has nothing to evict with --disable-radix-cache: drop one of them"
    for other in ("lmcache", "flexkv"):
        if getattr(arguments, f"enable_{other}", False):
            return f"{flag} and --enable-{other} are both the cache: choose one of them"
    if context.is_hybrid_swa and context.full_tokens_per_layer == 0:
        return f"{flag} needs layers with FULL attention, which this model does not have: drop the flag"
    if policy != OURS:
        return ""
    if core not in ("", "python"):
        return (
            f"{flag} with the policy {OURS} needs SGLang's Python tree core, and {CORE_VARIABLE} is "
            f"{core!r}: unset it, or name another --radix-eviction-policy"
        )
    if getattr(arguments, "nnodes", 1) > 1:
        return (
            f"{flag} with the policy {OURS} decides by floating-point sums, which unlike machines may round "
            "differently: serve a replica on one node, or name another --radix-eviction-policy"
        )
    if hasattr(context.params.req_to_token_pool, "req_to_c128_sidecar"):
        return f"{flag} knows {', '.join(COMPONENTS)} only, and this model has others: drop the flag"
    return ""


def install(params: Any) -> type[Any]:
    """Put our tree core and component into SGLang's parameters; return the class of the cache."""
    from sglang.srt.mem_cache.unified_cache import tree_core_registry  # noqa: PLC0415

    # Heavy, and only there inside SGLang.
    from hicache.integrations.sglang.radix import tree  # noqa: PLC0415

    if tree_core_registry.get_tree_core_factory(CORE) is None:
        tree_core_registry.register_tree_core_backend(CORE, tree.AdaptiveTreeCore)
    params.tree_core_backend = CORE
    override: Mapping[Any, Any] = params.component_registry_override or {}
    params.component_registry_override = {**override, tree.FULL: tree.AdaptiveFull}
    return tree.AdaptiveRadixCache
