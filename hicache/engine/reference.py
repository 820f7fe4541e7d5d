"""A whole reference engine: model, pools of L1 and L2, executor, cache and scheduler, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from hicache.build import TierSizes, build_cache
from hicache.cache import HiCache
from hicache.clock import Clock, SystemClock
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import WHOLE, ReferenceConfig, reference_spec
from hicache.engine.island_plan import ratio_warning
from hicache.engine.layers import Ranks
from hicache.engine.model import ReferenceModel
from hicache.engine.ranks import GlooRanks
from hicache.engine.runner import LogitsObserver, TorchRunner
from hicache.engine.scheduler import AcceptLength, FinalToken, Scheduler, Settle
from hicache.request import Request
from hicache.storage_backends.base import StorageBackend
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostMemory, HostPools
from hicache.tiers.layouts import HostLayout
from hicache.transfer.agreed import AgreedExecutor, agree_at_start
from hicache.transfer.agreement import Collective
from hicache.transfer.executor import TransferExecutor
from hicache.types import Component

logger = logging.getLogger(__name__)

FULL, SWA = Component.FULL, Component.SWA


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made of. `sizes` in pages; an empty `sizes.host` means L1 only."""

    model: ReferenceConfig
    page_size: int
    sizes: TierSizes
    cache: CacheConfig
    layout: HostLayout = HostLayout.PAGE_FIRST
    device: str = "cpu"
    max_running_requests: int = 16
    final_token: FinalToken = FinalToken.SKIP
    settle: Settle = Settle.ASYNC
    islands: bool = False  # SWA is kept where a path may be resumed only
    accept_length: AcceptLength | None = None  # tokens of a decode step; one without it


def warn_about_ratio(settings: EngineSettings) -> None:
    """Log a pool split that assumes islands where they are off; hits would be lost in silence."""
    device = settings.sizes.device
    if settings.islands or SWA not in device:
        return
    warning = ratio_warning(
        full_tokens=device[FULL] * settings.page_size,
        swa_tokens=device[SWA] * settings.page_size,
        chunk=settings.cache.chunked_prefill_size,
        running=settings.max_running_requests,
        window=settings.model.window,
        page_size=settings.page_size,
    )
    if warning is not None:
        logger.warning("%s", warning)


class ReferenceEngine:
    """Owns everything but the storage backend, which its caller opens and closes.

    Used by one thread at a time; `executor` starts the threads that move bytes. close() ends them. With
    `ranks` it is one rank of a tensor-parallel replica: it holds its shard of every page, and takes every
    decision together with the others, in step().
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        storage: StorageBackend | None = None,
        clock: Clock | None = None,
        observer: LogitsObserver | None = None,
        on_token: Callable[[Request, int], None] | None = None,
        on_finish: Callable[[Request], None] | None = None,
        ranks: GlooRanks | None = None,
    ) -> None:
        shard = ranks.shard if ranks is not None else WHOLE
        self.spec = reference_spec(settings.model, settings.page_size, shard, islands=settings.islands)
        if ranks is not None:
            settings = _agreed(settings, ranks)
        self.settings, self.ranks = settings, ranks
        warn_about_ratio(settings)
        clock = clock or SystemClock()
        self.device_pools = DevicePools(self.spec, settings.sizes.device, settings.device)
        self.host_pools = (
            HostPools(self.spec, settings.sizes.host, settings.layout, HostMemory.for_device(settings.device))
            if settings.sizes.host
            else None
        )
        self.executor = TransferExecutor(
            self.spec, self.device_pools, self.host_pools, storage=storage, shard=shard.id, clock=clock
        )
        self.agreed = AgreedExecutor(self.executor, ranks, clock) if ranks is not None else None
        executor, clock = (self.executor, clock) if self.agreed is None else (self.agreed, self.agreed.clock)
        self.cache: HiCache = build_cache(self.spec, settings.sizes, settings.cache, executor, clock)
        self.model = ReferenceModel(
            settings.model,
            device=settings.device,
            ranks=Ranks(shard, ranks.columns) if ranks is not None else None,
        )
        self.runner = TorchRunner(
            self.model,
            self.device_pools,
            page_size=settings.page_size,
            observer=observer,
            any_rank=ranks.any if ranks is not None else None,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.runner,
            max_running_requests=settings.max_running_requests,
            context_length=settings.model.context_length,
            settle=settings.settle,
            final_token=settings.final_token,
            accept_length=settings.accept_length,
            on_token=on_token,
            on_finish=on_finish,
        )

    def release_memory(self) -> bool:
        """Give L1's memory away until resume_memory(); no request may be submitted in between.

        Refused (False) while requests are queued or running. What L1 alone had is lost.
        """
        released = self.scheduler.release_device()
        if released:
            self.device_pools.release()
        return released

    def resume_memory(self) -> None:
        """Have L1's memory again, empty; hits come from L2 and L3."""
        self.device_pools.resume()

    def close(self) -> None:
        """Stop the executor's threads, and leave the other ranks. The storage backend stays open."""
        self.cache.close()


def _agreed(settings: EngineSettings, ranks: Collective) -> EngineSettings:
    """Refuse settings that differ between ranks; take the smallest pools of all. Raises ConfigError."""
    facts = {
        "model": settings.model.model_id,
        "seed": settings.model.seed,
        "context_length": settings.model.context_length,
        "page_size": settings.page_size,
        "max_running_requests": settings.max_running_requests,
        "final_token": settings.final_token.value,
        "settle": settings.settle.value,
        "islands": settings.islands,
        **msgspec.to_builtins(settings.cache),
    }
    device, host = agree_at_start(ranks, [settings.sizes.device, settings.sizes.host], facts)
    return replace(settings, sizes=TierSizes(device, host))
