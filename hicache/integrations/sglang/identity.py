"""Who may share an object with whom: model fingerprint, shard ids, and which pools make one object.

Everything that decides the bytes of a page is in the fingerprint; which part of the model a rank holds is
in the shard id. What SGLang does not tell comes from the extra config, and is missed in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hicache.errors import SpecError
from hicache.integrations.sglang.contract import Refused, StorageConfig
from hicache.integrations.sglang.settings import Settings
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

LEADS = {"kv": Component.FULL, "swa": Component.SWA, "mamba": Component.MAMBA}
"""The pool of each component that SGLang writes last and reads first."""

# Sidecars by the pool whose indices they share.
_FOLLOW_KV = frozenset(
    {
        *("indexer", "draft", "draft_indexer"),
        *(f"deepseek_v4_c{n}{part}" for n in (1, 2) for part in ("", "_indexer", "_indexer_scale")),
        *(f"deepseek_v4_c4{part}" for part in ("", "_rope", "_indexer", "_indexer_scale")),
        *("deepseek_v4_c128", "deepseek_v4_c128_rope"),
    }
)
_FOLLOW_SWA = frozenset({"deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "deepseek_v4_c128_state"})
_DRAFTS = frozenset({"draft", "draft_swa"})


class DescribedPool(Protocol):
    """What the identity needs of a pool, on the host or on the device: one spec per part."""

    @property
    def specs(self) -> tuple[PoolSpec, ...]: ...

    @property
    def page_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Family:
    """The pools that make one object. Invariant: `lead` is first, and an object has all of them."""

    component: Component
    shard: str
    pools: tuple[str, ...]
    parts: Mapping[str, slice]  # where in the object's parts a pool's are

    @property
    def lead(self) -> str:
        return self.pools[0]

    @property
    def sidecars(self) -> tuple[str, ...]:
        return self.pools[1:]


@dataclass(frozen=True, slots=True)
class Identity:
    """Frozen when SGLang has registered its pools."""

    spec: ModelSpec
    families: Mapping[Component, Family]
    by_pool: Mapping[str, Family]

    @property
    def shard(self) -> str:
        """The shard id of FULL."""
        return self.families[Component.FULL].shard


def freeze(
    config: StorageConfig,
    settings: Settings,
    pools: Mapping[str, DescribedPool],
    *,
    facts: Mapping[str, str],
    layers: tuple[int, int],
) -> Identity:
    """Return the identity of what this rank stores.

    `facts` are server settings that change the bytes and are seen nowhere else; `layers` is the range
    that this pipeline stage holds. Raises Refused where L3 could mix up what must stay apart.
    """
    model = settings.model_id or config.model_name or ""
    _check_facts(config, settings, model)
    grouped = _group(pools)
    _check_drafts(config, pools)
    families: dict[Component, Family] = {}
    components = []
    for component, names in grouped.items():
        parts, at = {}, 0
        for name in names:
            parts[name] = slice(at, at + len(pools[name].specs))
            at = parts[name].stop
        shard = _shard(config, component, layers)
        families[component] = Family(component, shard, tuple(names), parts)
        specs = tuple(spec for name in names for spec in pools[name].specs)
        if not specs:
            raise Refused(f"the pools {names} hold no bytes; there is nothing to keep in L3")
        # SGLang keeps the window to itself; no byte of a page depends on it.
        components.append(ComponentSpec(component, specs, window=int(component is Component.SWA)))
    described = {"engine": "sglang", "model": model, **facts, **settings.identity}
    try:
        spec = ModelSpec(
            model_id=json.dumps(described, sort_keys=True),
            page_size=pools["kv"].page_size,
            components=tuple(components),
            weight_version=settings.weight_version,
        )
    except SpecError as error:
        raise Refused(f"the pools {sorted(pools)} make no model: {error}") from error
    by_pool = {name: family for family in families.values() for name in family.pools}
    return Identity(spec, families, by_pool)


def _check_facts(config: StorageConfig, settings: Settings, model: str) -> None:
    if not settings.weight_version:
        raise Refused(
            'SGLang does not say which weights it serves: add "weight_version" to '
            "--hicache-storage-backend-extra-config, any text that changes when the weights do"
        )
    if not model:
        raise Refused('SGLang gave no model name: add "model_id" to --hicache-storage-backend-extra-config')
    if config.dcp_size > 1:
        raise Refused("decode context parallelism is not supported; serve with --dcp-size 1 for L3")


def _group(pools: Mapping[str, DescribedPool]) -> dict[Component, list[str]]:
    """Put each pool to its component, leads first, sidecars in the order of their names."""
    if "kv" not in pools:
        raise Refused("SGLang registered no KV pool")
    grouped: dict[Component, list[str]] = {
        component: [name] for name, component in LEADS.items() if name in pools
    }
    for name in sorted(pools.keys() - LEADS.keys()):
        source = "kv" if name in _FOLLOW_KV else "swa" if name in _FOLLOW_SWA else ""
        if name == "draft_swa":
            source = "swa" if "swa" in pools else "kv"
        if source not in pools:
            raise Refused(
                f"SGLang keeps a pool {name!r} that the adapter does not know how to store with its KV; "
                "serve without the feature that needs it, or without L3"
            )
        grouped[LEADS[source]].append(name)
    return grouped


def _check_drafts(config: StorageConfig, pools: Mapping[str, DescribedPool]) -> None:
    """Draft heads are split over TP ranks: with one writer for all, ranks would read each other's."""
    drafts = sorted(
        name for name in _DRAFTS & pools.keys() if any(spec.name.endswith(".k") for spec in pools[name].specs)
    )
    if config.is_mla_model and config.tp_size > 1 and drafts:
        raise Refused(
            f"the draft pools {drafts} are split over {config.tp_size} TP ranks, while SGLang lets one rank "
            "write for all; serve without speculative decoding, or without L3"
        )


def _shard(config: StorageConfig, component: Component, layers: tuple[int, int]) -> str:
    """Name what part of the model this rank holds. Ranks with the same bytes have the same name."""
    replicated = config.is_mla_model and component is not Component.MAMBA
    names = ["tp-all" if replicated else f"tp{config.tp_rank}of{config.tp_size}"]
    if config.pp_size > 1:
        names.append(f"pp{config.pp_rank}of{config.pp_size}-{layers[0]}-{layers[1]}")
    if config.attn_cp_size > 1:
        names.append(f"cp{config.attn_cp_rank}of{config.attn_cp_size}")
    return ".".join(names)


def check_source(identity: Identity, pool: str, source: str | None) -> None:
    """Refuse a transfer that takes a pool's indices from another pool than its object has as lead."""
    family = identity.by_pool.get(pool)
    if family is None or source is None or family.lead == source:
        return
    raise Refused(
        f"SGLang lets pool {pool!r} follow {source!r}, but it is stored with {family.lead!r}; "
        "serve without the feature that needs it, or without L3"
    )
