"""Runs a workload in virtual time: the real cache and scheduler, with a runner that only takes time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from hicache.bench.belady import Belady, Future
from hicache.bench.in_process import InProcessDriver
from hicache.bench.report import JSON, RunReport, TurnResult, by_round
from hicache.bench.system import SimulatedSystem, Tiers
from hicache.bench.traffic import Turn
from hicache.bench.workloads import Workload
from hicache.build import build_virtual
from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.engine.scheduler import FinalToken, Scheduler
from hicache.keys import NO_SCOPE
from hicache.request import Request
from hicache.transfer.virtual import VirtualStorage, VirtualTicket

_BELADY_REHEARSALS = 2


class VirtualRunner:
    """Cranks the clock by what computing would take, and invents the tokens it would sample.

    A load hides behind the compute layer by layer, so a step ends after the later of all its compute
    and the last layer's arrival plus that layer's compute.
    """

    def __init__(
        self,
        clock: ManualClock,
        *,
        prefill_tokens_per_s: float,
        decode_tokens_per_s: float,
        num_layers: int = 1,
    ) -> None:
        self._clock = clock
        self._prefill_s = 1.0 / prefill_tokens_per_s
        self._decode_s = 1.0 / decode_tokens_per_s
        self._layers = num_layers

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        """Take the time of tokens [start, end); the next token if they are the last."""
        self._compute(request, (end - start) * self._prefill_s)
        return invented_token(request.rid, end) if end == len(request.tokens) else None

    def decode(self, request: Request) -> int:
        """Take one token's share of a decode step."""
        self._compute(request, self._decode_s)
        return invented_token(request.rid, len(request.tokens))

    def _compute(self, request: Request, seconds: float) -> None:
        load = request.load
        arrives = load.finish_at if isinstance(load, VirtualTicket) else 0.0
        self._clock.advance(seconds)
        self._clock.advance_to(arrives + seconds / self._layers)


def invented_token(rid: str, position: int) -> int:
    """The token that virtual time samples: a fixed function of request and position, below 2**31."""
    mixed = (zlib.crc32(rid.encode()) ^ (position * 0x9E3779B1)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)) & 0x7FFFFFFF


def run_virtual(
    workload: Workload,
    system: SimulatedSystem,
    *,
    tiers: Tiers,
    eviction_policy: str,
    final_token: FinalToken,
    on_result: Callable[[TurnResult], None],
) -> RunReport:
    """Run a workload to its end, alone on a cold system, in virtual time.

    `belady` is run three times: what follows is recorded under lru, then under itself, then used.
    """
    started = time.perf_counter()
    future: list[Turn] | None = None
    if eviction_policy == Belady.name:
        for _ in range(_BELADY_REHEARSALS):
            sent: list[Turn] = []
            _run(workload, system, tiers, eviction_policy, final_token, lambda _: None, future, sent.append)
            future = sent
    driver, cache, duration = _run(workload, system, tiers, eviction_policy, final_token, on_result, future)
    return RunReport(
        tiers=tiers.value,
        eviction_policy=eviction_policy,
        engine="virtual",
        rounds=by_round(driver.results),
        duration_s=duration,
        wall_s=time.perf_counter() - started,
        details={"pools": _pools(cache), "cache": _counts(cache)},
    )


def _run(
    workload: Workload,
    system: SimulatedSystem,
    tiers: Tiers,
    eviction_policy: str,
    final_token: FinalToken,
    on_result: Callable[[TurnResult], None],
    future: list[Turn] | None,
    on_sent: Callable[[Turn], None] = lambda turn: None,
) -> tuple[InProcessDriver, HiCache, float]:
    """Run once; return the driver, the cache at the end, and the virtual seconds."""
    clock = ManualClock()
    spec = system.spec(workload.name)
    policy = None
    if eviction_policy == Belady.name:
        eviction_policy = "lru"
        if future is not None:
            policy = Belady(Future(((NO_SCOPE, turn.prompt) for turn in future), spec.page_size))
    cache = build_virtual(
        spec,
        system.sizes(tiers, spec),
        system.config(eviction_policy),
        clock,
        costs=system.costs(),
        storage=VirtualStorage(system.l3_bytes) if tiers is Tiers.L1_L2_L3 else None,
        policy=policy,
    )
    driver = InProcessDriver(workload, on_result, on_sent)
    scheduler = Scheduler(
        cache,
        VirtualRunner(
            clock,
            prefill_tokens_per_s=system.prefill_tokens_per_s,
            decode_tokens_per_s=system.decode_tokens_per_s,
            num_layers=len(spec.layers),
        ),
        max_running_requests=system.max_running_requests,
        final_token=final_token,
        on_finish=driver.finished,
    )
    return driver, cache, driver.drive(scheduler)


def _pools(cache: HiCache) -> dict[str, JSON]:
    """Capacities in pages (states), by tier and component."""
    return {
        f"{tier.name.lower()}.{component.name.lower()}": cache.pools.capacity(tier, component)
        for tier, component in cache.pools.kinds
    }


def _counts(cache: HiCache) -> dict[str, JSON]:
    """What the cache did: pages evicted by pool, retractions, and why prefetches ended."""
    stats = cache.stats
    return {
        "evicted_pages": dict(stats.evicted_pages),
        "lost_pages": stats.lost_pages,
        "stored_pages": dict(stats.stored_pages),
        "prefetches": dict(stats.prefetch),
        "retracted": stats.retracted,
    }
