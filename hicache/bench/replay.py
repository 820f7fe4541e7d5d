"""Replays a recorded trace against tiers of given sizes, in virtual time, one request after the other.

Only prompts are replayed: a trace does not tell which tokens a reply held, so a block counts as cached
once an earlier prompt has had it. Transfers take no time here, so the figures are of sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.bench.report import JSON, ByTier
from hicache.bench.traces import TokenExpander, TraceRequest
from hicache.bench.virtual import VirtualRunner
from hicache.build import TierSizes, build_virtual
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig
from hicache.engine.scheduler import Scheduler, Settle
from hicache.errors import ConfigError
from hicache.request import Request
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.transfer.virtual import VirtualStorage
from hicache.types import Component, PrefetchPolicy

_CHUNK_PAGES = 4096  # prompts are computed in few pieces: a replay is of the cache, not of a scheduler


@dataclass(frozen=True, slots=True)
class ReplaySizes:
    """Capacities in tokens; 0 leaves L2 or L3 out, and L3 may be infinite. L3 goes through L2."""

    l1_tokens: int
    l2_tokens: int
    l3_tokens: float
    page_size: int = 64

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"--page-size {self.page_size} must be at least 1")
        for flag, value in (("--l1-tokens", self.l1_tokens), ("--l2-tokens", self.l2_tokens)):
            if value < 0 or 0 < value < self.page_size:
                raise ConfigError(f"{flag} {value} must be 0, or at least one page of {self.page_size}")
        if math.isnan(self.l3_tokens) or self.l3_tokens < 0:
            raise ConfigError(f"--l3-tokens {self.l3_tokens} must be 0, more, or inf")
        if self.l3_tokens and not self.l2_tokens:
            raise ConfigError("--l3-tokens needs --l2-tokens: what comes from L3 arrives in L2")


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a trace found in the cache. Tokens are prompt tokens; rates are fractions of all of them.

    `missed` is the cache's own account of what lies between hit rate and ceiling, by reason.
    """

    requests: int
    input_tokens: int
    ceiling_tokens: int
    cached: ByTier
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        cached = self.cached
        return (cached.device + cached.host + cached.storage) / self.input_tokens

    @property
    def ceiling(self) -> float:
        """The hit rate of an infinite cache: whole pages, last token computed."""
        return self.ceiling_tokens / self.input_tokens

    def as_json(self) -> dict[str, JSON]:
        return {
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "hit_rate": self.hit_rate,
            "ceiling": self.ceiling,
            "by_tier": {
                "l1": self.cached.device / self.input_tokens,
                "l2": self.cached.host / self.input_tokens,
                "l3": self.cached.storage / self.input_tokens,
            },
            **({"missed_tokens": dict(self.missed)} if self.missed else {}),
        }


def replay(
    requests: Sequence[TraceRequest],
    sizes: ReplaySizes,
    *,
    eviction_policy: str = "adaptive",
    on_request: Callable[[int], None] = lambda tokens: None,
) -> ReplayReport:
    """Replay requests in their order. Raises ConfigError if L1 cannot hold the longest prompt."""
    longest = max(request.input_length for request in requests)
    room = sizes.l1_tokens // sizes.page_size * sizes.page_size
    if room <= longest:
        raise ConfigError(
            f"--l1-tokens {sizes.l1_tokens}: the longest prompt has {longest} tokens and one is computed "
            f"behind it; give L1 at least {(longest // sizes.page_size + 1) * sizes.page_size}"
        )
    clock = ManualClock()
    scheduler = _scheduler(sizes, eviction_policy, clock)
    expander, ceiling = TokenExpander(), _InfiniteCache(sizes.page_size)
    device = host = storage = ceiling_tokens = 0
    for number, recorded in enumerate(requests):
        clock.advance_to(recorded.time_s)
        request = Request(
            rid=str(number),
            tokens=expander.expand(recorded),
            prompt_length=recorded.input_length,
            max_new_tokens=1,
            scope=recorded.scope,
        )
        scheduler.submit(request)
        scheduler.run_until_idle()
        scheduler.cache.settle()
        device += request.cached.device
        host += request.cached.host
        storage += request.cached.storage
        ceiling_tokens += ceiling.visit(recorded)
        on_request(recorded.input_length)
    return ReplayReport(
        requests=len(requests),
        input_tokens=sum(request.input_length for request in requests),
        ceiling_tokens=ceiling_tokens,
        cached=ByTier(device=device, host=host, storage=storage),
        missed=+scheduler.cache.stats.missed_tokens,
    )


def _scheduler(sizes: ReplaySizes, eviction_policy: str, clock: ManualClock) -> Scheduler:
    page = sizes.page_size
    pool = PoolSpec("full", 1, (1,), "uint8", page)
    spec = ModelSpec("replay", page, (ComponentSpec(Component.FULL, (pool,)),))
    host_pages = sizes.l2_tokens // page
    storage = None
    if sizes.l3_tokens:
        storage = VirtualStorage(sizes.l3_tokens // page * spec[Component.FULL].page_bytes)
    cache = build_virtual(
        spec,
        TierSizes(
            device={Component.FULL: sizes.l1_tokens // page},
            host={Component.FULL: host_pages} if host_pages else {},
        ),
        CacheConfig(
            hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            prefetch_threshold=page,
            radix_eviction_policy=eviction_policy,
            chunked_prefill_size=_CHUNK_PAGES * page,
            mamba_track_interval=page,
        ),
        clock,
        storage=storage,
    )
    runner = VirtualRunner(clock, prefill_tokens_per_s=math.inf, decode_tokens_per_s=math.inf)
    return Scheduler(cache, runner, max_running_requests=1, settle=Settle.EVERY_STEP)


class _InfiniteCache:
    """What a cache that never forgets would have of each prompt: a trie of block ids per scope."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[tuple[int | bytes, int], int] = {}
        self._filled: list[int] = []  # by node: the most tokens of its block that were seen

    def visit(self, request: TraceRequest) -> int:
        """Return the prompt tokens that earlier prompts had, in whole pages, and remember this prompt."""
        at: int | bytes = request.scope
        common = True
        matched, left = 0, request.input_length
        for block in request.blocks:
            filled = min(left, request.block_size)
            left -= filled
            node = self._nodes.get((at, block))
            if node is None:
                node = self._nodes[at, block] = len(self._filled)
                self._filled.append(0)
            if common:
                matched += min(filled, self._filled[node])
                common = self._filled[node] == request.block_size
            self._filled[node] = max(self._filled[node], filled)
            at = node
        return min(matched, request.input_length - 1) // self._page_size * self._page_size
