"""The class that SGLang loads for `--unified-cache-external-linker-backend dynamic`: HiCacheLinker.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "HiCacheLinker",
        "linker_module_path": "hicache.integrations.sglang.linker",
        "linker_extra_config": {"address": "127.0.0.1:9480", "weight_version": "1"}}'

Decides when L3 is on, who this rank is, and whom it must agree with. What the calls mean is the core's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel, get_serving

from hicache.clock import SystemClock
from hicache.integrations.sglang import TESTED_VERSIONS, guard, live
from hicache.integrations.sglang.contract import Refused
from hicache.integrations.sglang.direct.assemble import device_pools
from hicache.integrations.sglang.direct.core import DeviceTransfer, LinkerCore
from hicache.integrations.sglang.direct.loads import LayerGates
from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.integrations.sglang.direct.settings import read_linker_settings
from hicache.integrations.sglang.identity import Identity, freeze
from hicache.integrations.sglang.server_facts import server_facts
from hicache.integrations.sglang.store import ObjectStore
from hicache.registry import create_backend, describe_options
from hicache.storage_backends.base import StorageBackend
from hicache.transfer.counters import Counters
from hicache.types import Component

logger = logging.getLogger(__name__)

# Parameters after self of SGLang's class; ours takes the same.
METHODS: dict[str, tuple[str, ...]] = {
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "record_offload_ready": (),
    "reset": (),
    "close": (),
}


class HiCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's device pools on any HiCache storage backend, without a host tier between them.

    Made by SGLang once per rank, on the scheduler's thread, which makes all calls. While L3 is off every
    lookup is a miss and nothing is stored.
    """

    def __init__(
        self,
        server_args: object,
        params: Any,
        *,
        components: Collection[object],
        extra_config: Mapping[str, object] | None = None,
        forward_stream: object = None,
    ) -> None:
        """`params` are SGLang's CacheInitParams. Raises ConfigError for a config that cannot be right."""
        self.forward_stream = forward_stream
        self._settings, self._bounds = read_linker_settings(extra_config)
        self._clock = SystemClock()
        self._counters = Counters()
        self._core: LinkerCore | None = None
        self._on_stream = False
        self._off = ""
        self.pools: dict[object, object] = {}
        self.layer_done_counter = LayerGates(1, timeout_s=self._bounds.layer_timeout_s)
        try:
            self._core = self._make_core(params, components)
        except Refused as refusal:
            # The messages name the flag of the storage backend, for which they were written.
            self._off = str(refusal).replace(
                "--hicache-storage-backend-extra-config",
                "linker_extra_config in --unified-cache-external-linker-config",
            )
        if self._core is None:
            logger.error("HiCache: L3 is off, SGLang serves without it: %s", self._off)
            return
        self.layer_done_counter = self._core.gates
        live.add(self)
        if hicache_storage.PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _make_core(self, params: Any, components: Collection[object]) -> LinkerCore:
        self._check_version()
        if params.pp_size > 1:
            raise Refused(
                "pipeline stages of SGLang do not agree on what a linker restores; serve with --pp-size 1, "
                "or with --enable-hierarchical-cache and the dynamic storage backend"
            )
        group, replicated = device_pools(params, components)
        config = self._storage_config(params, replicated=replicated)
        identity = freeze(config, self._settings, group.pools, facts=server_facts(), layers=(0, 0))
        store = ObjectStore(
            identity,
            lambda: self._open_backend(identity, config),
            clock=self._clock,
            counters=self._counters,
            call_timeout_s=self._settings.prefetch_timeout_max,
        )
        ranks = _groups(params)
        core = LinkerCore(
            identity,
            group,
            store,
            bounds=self._bounds,
            writes=lambda kind: not replicated or config.tp_rank == 0 or kind is Component.MAMBA,
            agree=(lambda good: _on_all(good, ranks)) if ranks else None,
            clock=self._clock,
            counters=self._counters,
        )
        names = {hicache_storage.PoolName(name): pool for name, pool in group.pools.items()}
        self.pools = {name: pool for name, pool in names.items() if pool.parts or str(name.value) == "kv"}
        self._on_stream = group.device.type != "cpu"
        self._say(identity, group, store)
        return core

    def _check_version(self) -> None:
        version = metadata.version("sglang")
        refused, notice = guard.check(version, hicache_storage)
        lacking = differences(UnifiedCacheLinker) if version not in TESTED_VERSIONS else []
        if refused or lacking:
            raise Refused("; ".join([*([refused] if refused else []), *lacking]))
        if notice:
            logger.warning("HiCache: %s", notice)

    def _storage_config(self, params: Any, *, replicated: bool) -> HiCacheStorageConfig:
        rank, size = 0, 1
        group = params.attn_tp_cache_group or params.tp_cache_group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank(group=group)
            size = torch.distributed.get_world_size(group=group)
        if get_parallel().attn_dcp_size > 1:
            raise Refused("decode context parallelism is not supported; serve with --dcp-size 1 for L3")
        return HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            is_mla_model=replicated,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=get_serving().served_model_name,
        )

    def _open_backend(self, identity: Identity, config: HiCacheStorageConfig) -> StorageBackend:
        """Open the backend, telling it who we are where it wants to know."""
        ours = {
            "fingerprint": identity.spec.fingerprint,
            "shard": identity.shard,
            "model_name": self._settings.model_id or config.model_name or "",
        }
        known = describe_options(self._settings.backend)
        told = {name: value for name, value in ours.items() if name in known}
        return create_backend(self._settings.backend, {**told, **self._settings.backend_options})

    def _say(self, identity: Identity, group: PoolGroup, store: ObjectStore) -> None:
        logger.info(
            "HiCache: external linker on %s; pools %s on %s; objects of %d bytes; fingerprint %s, shard %s",
            self._settings.backend,
            ", ".join(identity.by_pool),
            group.device,
            sum(store.object_bytes(component) for component in identity.families),
            identity.spec.fingerprint,
            identity.shard,
        )

    # -- what SGLang calls -----------------------------------------------------------------------

    def lookup(self, rid: str, transfers: Sequence[DeviceTransfer]) -> list[int]:
        return self._core.lookup(rid, transfers) if self._core else []

    def load(self, rid: str, transfers: Sequence[DeviceTransfer]) -> bool:
        return self._core is not None and self._core.load(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        return self._core.start(self._ready) if self._core else -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._core is None or self._core.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._core is not None and self._core.cancel(rid)

    def offload(self, transfers: Sequence[DeviceTransfer], session_id: str | None = None) -> bool:
        return self._core is not None and self._core.offload(transfers, self._ready)

    def num_completed_offloads(self) -> int:
        return self._core.num_answers() if self._core else 0

    def pop_completed_offload(self) -> bool:
        return self._core is not None and self._core.pop_answer()

    def reset(self) -> None:
        if self._core:
            self._core.reset()

    def close(self) -> None:
        """Release everything. Idempotent."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
            counters = ", ".join(f"{name} {value:g}" for name, value in sorted(self.counters.items()))
            logger.info("HiCache: L3 closed; %s", counters or "it was never used")

    def weights_changed(self) -> None:
        """Turn L3 off before the weights are another's; what is stored belongs to the old ones."""
        self._off = "the weights are being changed at run time: start again with another weight_version"
        if self._core is not None:
            self._core.turn_off()
            logger.error("HiCache: L3 is off, SGLang serves without it: %s", self._off)

    @property
    def counters(self) -> Mapping[str, float]:
        """What was done so far: lookups, loads, offloads, objects and bytes, misses, failures."""
        return self._counters.snapshot()

    @property
    def off_because(self) -> str:
        """Why L3 is off; empty while it is on."""
        return self._off

    def _ready(self) -> Sequence[object]:
        """Return events behind which device pages may be touched; a CPU has none and needs none."""
        if not self._on_stream:
            return ()
        events: Sequence[object] = self.record_offload_ready()
        return events


def differences(linker: type) -> list[str]:
    """Return what SGLang's class has that ours was not written for; empty if nothing."""
    found = []
    for name, expected in METHODS.items():
        method = getattr(linker, name, None)
        actual = tuple(inspect.signature(method).parameters)[1:] if method else None
        if actual != expected:
            found.append(f"UnifiedCacheLinker.{name} takes {actual}, not {expected}")
    new: set[str] = set(getattr(linker, "__abstractmethods__", ())) - METHODS.keys()
    return found + [f"UnifiedCacheLinker.{name} is new" for name in sorted(new)]


def _groups(params: Any) -> list[Any]:
    """Return the groups of ranks that must restore the same, as SGLang's tree reduces over them."""

    def wide(group: Any) -> bool:
        return group is not None and torch.distributed.get_world_size(group=group) > 1

    inner = [group for group in (params.attn_cp_cache_group, params.attn_tp_cache_group) if wide(group)]
    return inner or [group for group in (params.tp_cache_group,) if wide(group)]


def _on_all(good: bool, groups: Sequence[Any]) -> bool:
    flag = torch.tensor([int(good)], dtype=torch.int)
    for group in groups:
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(flag.item())
