"""Whether the installed SGLang speaks the interface that the adapter was written against.

A version it was not tested with is asked for every name and parameter the adapter uses. What differs is a
reason to stay off: a changed meaning under an old name is beyond this check, so the log says that too.
"""

from __future__ import annotations

import inspect
from types import ModuleType

from hicache.integrations.sglang import TESTED_VERSIONS

# Parameters after self that SGLang's class has, in order; ours takes the same.
METHODS: dict[str, tuple[str, ...]] = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info"),
    "clear": (),
    "get_stats": (),
}

FIELDS: dict[str, tuple[str, ...]] = {
    "HiCacheStorageConfig": (
        *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model"),
        *("enable_storage_metrics", "model_name", "should_split_heads", "extra_config", "dcp_size"),
    ),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy", "indices_from_pool"),
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
}

VALUES: dict[str, tuple[str, ...]] = {
    "PoolName": ("kv", "swa", "mamba"),
    "PoolHitPolicy": ("all_pages", "trailing_pages"),
}


def differences(hicache_storage: ModuleType) -> list[str]:
    """Return what SGLang's `hicache_storage` module lacks of what the adapter needs; empty if nothing."""
    found = []
    storage = getattr(hicache_storage, "HiCacheStorage", None)
    for name, expected in METHODS.items():
        method = getattr(storage, name, None)
        if method is None:
            found.append(f"HiCacheStorage.{name} is missing")
            continue
        actual = tuple(inspect.signature(method).parameters)[1:]
        if actual != expected:
            found.append(f"HiCacheStorage.{name} takes {actual}, not {expected}")
    for name, expected in FIELDS.items():
        fields = set(getattr(getattr(hicache_storage, name, None), "__dataclass_fields__", ()))
        found += [f"{name}.{field} is missing" for field in expected if field not in fields]
    for name, expected in VALUES.items():
        values = {str(member.value) for member in getattr(hicache_storage, name, ())}
        found += [f"{name} has no value {value!r}" for value in expected if value not in values]
    return found


def check(version: str, hicache_storage: ModuleType) -> tuple[str, str]:
    """Return (why L3 must stay off, what to say in the log); either may be empty."""
    if version in TESTED_VERSIONS:
        return "", ""
    tested = ", ".join(TESTED_VERSIONS)
    lacking = differences(hicache_storage)
    if lacking:
        return (
            f"SGLang {version} differs from {tested}, with which this adapter was tested: "
            f"{'; '.join(lacking)}. Install a tested version of SGLang, or a newer HiCache",
            "",
        )
    return "", (
        f"SGLang {version} was never tested with this adapter (tested: {tested}); it has all that the "
        "adapter needs, so L3 is on"
    )
