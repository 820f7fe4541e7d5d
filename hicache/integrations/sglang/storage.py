"""The class that SGLang loads for `--hicache-storage-backend dynamic`: HiCacheStorageBackend.

Decides when L3 is on, and that no call of SGLang ever raises or waits long for our sake. What the calls
mean is the adapter's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TypeVar

import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from hicache.clock import SystemClock
from hicache.errors import BackendUnavailable
from hicache.integrations.sglang import guard, live
from hicache.integrations.sglang.adapter import KV, Adapter
from hicache.integrations.sglang.contract import ExtraInfo, HostPool, Refused, StorageConfig, Transfer, text
from hicache.integrations.sglang.identity import Identity, freeze
from hicache.integrations.sglang.metrics import OperationMetrics
from hicache.integrations.sglang.pages import open_pool
from hicache.integrations.sglang.server_facts import server_facts
from hicache.integrations.sglang.settings import read_settings
from hicache.integrations.sglang.store import ObjectStore
from hicache.registry import create_backend, describe_options
from hicache.storage_backends.base import StorageBackend
from hicache.transfer.counters import Counters

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HiCacheStorageBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's L3 on any HiCache storage backend.

    Made by SGLang as `cls(storage_config, {})` on the scheduler's thread; queries, reads and writes come
    from three further threads, the first of them before the pools are registered. `_lock` guards what
    registration changes; no call to a store is made under it. Until the pools are known, and whenever L3
    is off, everything is a miss and nothing is stored.
    """

    def __init__(self, storage_config: StorageConfig, kwargs: Mapping[str, object] | None = None) -> None:
        """Raises ConfigError for an extra config that cannot be right."""
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config)
        self._clock = SystemClock()
        self._counters = Counters()
        self._metrics = OperationMetrics(enabled=storage_config.enable_storage_metrics)
        self._lock = threading.Lock()
        self._host_pools: dict[str, HostPool] = {}
        self._adapter: Adapter | None = None
        self._registered = False
        self._closed = False
        self._off, notice = guard.check(_sglang_version(), hicache_storage)
        if notice:
            logger.warning("HiCache: %s", notice)
        live.add(self)
        if storage_config.should_split_heads:
            logger.warning(
                "HiCache: tp_lcm_size does not widen sharing here: objects are those of one TP width"
            )

    # -- registration, on the scheduler's thread -------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the KV pool. The other pools follow, then on_host_pools_registered."""
        self._register(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Take another pool. One that comes late, as a draft model's, changes what an object is."""
        self._register(host_pool, text(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Freeze the identity and open the store. Raises ConfigError for options the backend refuses."""
        self._registered = True
        self._start()

    def weights_changed(self) -> None:
        """Turn L3 off before the weights are another's; what is stored belongs to the old ones."""
        self._off = (
            "the weights are being changed at run time: attach L3 anew with another weight_version, by "
            "DELETE and PUT of /hicache/storage-backend"
        )
        if self._registered and not self._closed:
            self._start()

    def _register(self, pool: HostPool, name: str) -> None:
        known = self._host_pools.get(name)
        self._host_pools[name] = pool
        if self._registered and known is not pool:
            self._start()

    def _start(self) -> None:
        with self._lock:
            before, self._adapter = self._adapter, None
        if before is not None:
            before.close()
        if self._closed:
            return
        adapter: Adapter | None = None
        try:
            adapter = self._make_adapter()
        except Refused as refusal:
            self._off = str(refusal)
        if adapter is None:
            logger.error("HiCache: L3 is off, SGLang serves without it: %s", self._off)
            return
        with self._lock:
            self._adapter = adapter
        identity = adapter.identity
        logger.info(
            "HiCache: L3 on %s; pools %s; objects of %d bytes; fingerprint %s, shard %s",
            self._settings.backend,
            ", ".join(identity.by_pool),
            sum(adapter.store.object_bytes(component) for component in identity.families),
            identity.spec.fingerprint,
            identity.shard,
        )

    def _make_adapter(self) -> Adapter:
        if self._off:
            raise Refused(self._off)
        pools = {name: open_pool(name, pool) for name, pool in self._host_pools.items()}
        kv = self._host_pools.get(KV)
        identity = freeze(
            self._config,
            self._settings,
            pools,
            facts=server_facts(),
            layers=(int(getattr(kv, "start_layer", 0) or 0), int(getattr(kv, "end_layer", 0) or 0)),
        )
        whole = sorted(name for name, pages in pools.items() if not pages.canonical)
        if whole:
            logger.warning(
                "HiCache: pools %s are stored in the order of their host layout; only replicas with the same "
                "--hicache-mem-layout share them",
                ", ".join(whole),
            )
        store = ObjectStore(
            identity,
            lambda: self._open_backend(identity),
            clock=self._clock,
            counters=self._counters,
            call_timeout_s=self._settings.prefetch_timeout_max,
        )
        return Adapter(
            identity, pools, store, config=self._config, settings=self._settings, clock=self._clock
        )

    def _open_backend(self, identity: Identity) -> StorageBackend:
        """Open the backend, telling it who we are where it wants to know."""
        ours = {
            "fingerprint": identity.spec.fingerprint,
            "shard": identity.shard,
            "model_name": self._settings.model_id or self._config.model_name or "",
        }
        known = describe_options(self._settings.backend)
        told = {name: value for name, value in ours.items() if name in known}
        return create_backend(self._settings.backend, {**told, **self._settings.backend_options})

    # -- queries -------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: ExtraInfo | None = None) -> int:
        return self._ask("query", lambda adapter: adapter.leading_pages(keys), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[Transfer] | None = None,
        extra_info: ExtraInfo | None = None,
    ) -> PoolTransferResult:
        miss: tuple[dict[str, int], list[int]] = ({}, [])
        boundaries, lengths = self._ask(
            "query", lambda adapter: adapter.restorable(keys, pool_transfers or []), miss
        )
        return PoolTransferResult(lengths[-1] if lengths else 0, boundaries, lengths)

    # -- reading -------------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: ExtraInfo | None = None
    ) -> list[bool]:
        return self._read(len(keys), lambda adapter: adapter.read_kv(keys, host_indices))

    def batch_get_v2(
        self, transfers: list[Transfer], extra_info: ExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._ask("read", lambda adapter: adapter.read_pools(transfers), _none_of(transfers))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        done = self._read(len(keys), lambda adapter: adapter.read_flat(keys, targets))
        return [targets[i] if good else None for i, good in enumerate(done)]

    # -- writing -------------------------------------------------------------------------------

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: ExtraInfo | None = None
    ) -> list[bool]:
        return self._write(len(keys), lambda adapter: adapter.write_kv(keys, host_indices))

    def batch_set_v2(
        self, transfers: list[Transfer], extra_info: ExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._ask("write", lambda adapter: adapter.write_pools(transfers), _none_of(transfers))

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        return all(self._write(len(keys), lambda adapter: adapter.write_flat(keys, values or [])))

    # -- the rest --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete what this rank stored of this model. Raises BackendError, so that SGLang reports it."""
        if self._adapter is None:
            raise BackendUnavailable(f"L3 is off: {self._off or 'its pools are not registered yet'}")
        logger.info("HiCache: cleared %d objects of this rank and model from L3", self._adapter.clear())

    def get_stats(self) -> object:
        """Return SGLang's StorageMetrics of what happened since the last call; None without metrics."""
        return self._metrics.take()

    def close(self) -> None:
        """Release the store. Idempotent."""
        with self._lock:
            self._closed = True
            adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()
            counters = ", ".join(f"{name} {value:g}" for name, value in sorted(self.counters.items()))
            logger.info("HiCache: L3 closed; %s", counters or "it was never used")

    @property
    def counters(self) -> Mapping[str, float]:
        """What was done so far: objects and bytes read and stored, misses, mismatches, failures."""
        return self._counters.snapshot()

    @property
    def off_because(self) -> str:
        """Why L3 is off; empty while it is on or not registered yet."""
        return self._off

    def _read(self, count: int, call: Callable[[Adapter], list[bool]]) -> list[bool]:
        started = self._clock.now()
        done = self._ask("read", call, [False] * count)
        self._metrics.read(sum(done), self._kv_page_bytes(), self._clock.now() - started)
        return done

    def _write(self, count: int, call: Callable[[Adapter], list[bool]]) -> list[bool]:
        started = self._clock.now()
        done = self._ask("write", call, [False] * count)
        self._metrics.wrote(sum(done), self._kv_page_bytes(), self._clock.now() - started)
        return done

    def _kv_page_bytes(self) -> int:
        adapter = self._adapter
        if adapter is None:
            return 0
        return adapter.store.object_bytes(adapter.identity.by_pool[KV].component)

    def _ask(self, operation: str, call: Callable[[Adapter], T], otherwise: T) -> T:
        """Make a call of SGLang; whatever goes wrong in it is a miss, and logged."""
        adapter = self._adapter
        if adapter is None or not adapter.store.usable:
            return otherwise
        try:
            return call(adapter)
        except Exception:
            self._counters.add(f"{operation}_crashed")
            logger.exception("HiCache: an L3 %s failed; it counts as a miss", operation)
            return otherwise


def _none_of(transfers: Sequence[Transfer]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


def _sglang_version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "of unknown version"
