"""The serving system that a workload meets in virtual time: pools, rates, and where each number is from.

Published numbers are used as they are. What was not published is an assumption: an option with a
default and its reason. Rates that were fitted to a published throughput say so.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hicache.bench.report import JSON
from hicache.build import TierSizes
from hicache.config.cache import CacheConfig, StateCheckpoints
from hicache.engine.island_plan import ratio_warning
from hicache.engine.sizing import device_capacities
from hicache.errors import ConfigError
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.transfer.virtual import VirtualCosts
from hicache.types import Component, PrefetchPolicy, WritePolicy

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA

GIB = 1024**3
# Layers that the bytes of a token are spread over: the granularity of overlap, not of any model.
_LAYERS = 8
_RATES = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "host_bytes_per_s",
    "storage_load_bytes_per_s",
    "storage_store_bytes_per_s",
)


class Tiers(str, enum.Enum):
    """Which tiers a run has."""

    L1 = "l1"
    L1_L2 = "l1+l2"
    L1_L2_L3 = "l1+l2+l3"


class Source(str, enum.Enum):
    """Where a number of a simulated system comes from."""

    PUBLISHED = "published"
    ASSUMED = "assumed"
    FITTED = "fitted"
    GIVEN = "given"  # by a flag


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one setting comes from, and why it has its value."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class SimulatedSystem:
    """One replica. Sizes in tokens unless named otherwise; rates per second."""

    components: tuple[Component, ...] = (FULL,)
    page_size: int = 64
    max_running_requests: int = 16
    chunked_prefill_size: int = 8192
    max_total_tokens: int = 100_000  # FULL, on L1
    swa_full_tokens_ratio: float = 0.8
    sliding_window: int = 1024
    enable_swa_islands: bool = False
    swa_checkpoint_interval: int = 0
    mamba_prefill_checkpoints: StateCheckpoints = StateCheckpoints.INTERVAL
    mamba_full_memory_ratio: float = 0.9  # bytes of L1's states per byte of its FULL pages
    hicache_ratio: float = 2.0
    l3_bytes: float = 500.0 * GIB
    full_token_bytes: int = 10_240
    swa_token_bytes: int = 10_240
    mamba_state_bytes: int = 1_310_720
    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 2_000.0
    host_bytes_per_s: float = 50e9
    storage_load_bytes_per_s: float = 5e9
    storage_store_bytes_per_s: float = 50e9
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if FULL not in self.components:
            raise ConfigError("--components must name full")
        if self.enable_swa_islands and SWA not in self.components:
            raise ConfigError("--enable-swa-islands needs swa among --components")
        if not 0 < self.swa_full_tokens_ratio <= 1:
            raise ConfigError(f"--swa-full-tokens-ratio {self.swa_full_tokens_ratio} must be in (0, 1]")
        if self.hicache_ratio <= 1:
            raise ConfigError(
                f"--hicache-ratio {self.hicache_ratio} must be above 1: L2 holds L1's pages too"
            )
        if SWA in self.components and self.sliding_window < 1:
            raise ConfigError(f"--sliding-window {self.sliding_window} must be at least 1")
        for name in _RATES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be above 0")
        for name in ("page_size", "max_running_requests", "max_total_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")

    def given(self, **settings: object) -> SimulatedSystem:
        """Return a copy with settings from flags, recorded as such."""
        origins = {**self.origins, **{name: Origin(Source.GIVEN, "set by a flag") for name in settings}}
        return replace(self, origins=origins, **settings)  # type: ignore[arg-type]

    def spec(self, model_id: str) -> ModelSpec:
        """Describe the pools; bytes only matter for L3's capacity and for what transfers cost."""
        return ModelSpec(model_id, self.page_size, tuple(map(self._component, self.components)))

    def _component(self, component: Component) -> ComponentSpec:
        per_row = {
            FULL: self.full_token_bytes,
            SWA: self.swa_token_bytes,
            MAMBA: self.mamba_state_bytes,
        }[component]
        rows = 1 if component is MAMBA else self.page_size
        pool = PoolSpec(component.name.lower(), _LAYERS, (max(1, per_row // _LAYERS),), "uint8", rows)
        if component is not SWA:
            return ComponentSpec(component, (pool,))
        return ComponentSpec(component, (pool,), window=self.sliding_window, islands=self.enable_swa_islands)

    def sizes(self, tiers: Tiers, spec: ModelSpec) -> TierSizes:
        """Pages (states) per pool and tier; L2's pools are `hicache_ratio` times L1's."""
        device = device_capacities(
            spec,
            max_total_tokens=self.max_total_tokens,
            swa_full_tokens_ratio=self.swa_full_tokens_ratio,
            mamba_full_memory_ratio=self.mamba_full_memory_ratio,
        )
        host = {} if tiers is Tiers.L1 else {c: int(n * self.hicache_ratio) for c, n in device.items()}
        return TierSizes(device=device, host=host)

    @property
    def ratio_warning(self) -> str | None:
        """Why the pools assume islands, if they do and there are none."""
        if self.enable_swa_islands or SWA not in self.components:
            return None
        return ratio_warning(
            full_tokens=self.max_total_tokens,
            swa_tokens=int(self.max_total_tokens * self.swa_full_tokens_ratio),
            chunk=self.chunked_prefill_size,
            running=self.max_running_requests,
            window=self.sliding_window,
            page_size=self.page_size,
        )

    def config(self, eviction_policy: str) -> CacheConfig:
        """The published system's policies; only the eviction policy is free."""
        return CacheConfig(
            hicache_write_policy=WritePolicy.WRITE_THROUGH,
            hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            radix_eviction_policy=eviction_policy,
            chunked_prefill_size=self.chunked_prefill_size,
            swa_checkpoint_interval=self.swa_checkpoint_interval,
            mamba_prefill_checkpoints=self.mamba_prefill_checkpoints,
        )

    def costs(self) -> VirtualCosts:
        """What transfers cost; both directions of the host link have the same bandwidth."""
        return VirtualCosts(
            write_bandwidth=self.host_bytes_per_s,
            load_bandwidth=self.host_bytes_per_s,
            fetch_bandwidth=self.storage_load_bytes_per_s,
            store_bandwidth=self.storage_store_bytes_per_s,
        )

    def as_json(self) -> dict[str, JSON]:
        """Every setting by where it comes from: {"published": {name: {"value", "reason"}}, ...}."""
        groups: dict[str, dict[str, JSON]] = {source.value: {} for source in Source}
        for name, origin in self.origins.items():
            value = getattr(self, name)
            if name == "components":
                value = [c.name.lower() for c in self.components]
            if value == float("inf"):
                value = "inf"
            groups[origin.source.value][name] = {"value": value, "reason": origin.reason}
        return {name: group for name, group in groups.items() if group}


def _published(reason: str) -> Origin:
    return Origin(Source.PUBLISHED, reason)


def _assumed(reason: str) -> Origin:
    return Origin(Source.ASSUMED, reason)


def _fitted(reason: str) -> Origin:
    return Origin(Source.FITTED, reason)


_OUTLINE = "command outline of the published benchmark"
_CHUNK = "not published; SGLang's default on GPUs of this memory size"
_HOST_LINK = "not published; one PCIe 5 x16 link"
_STORE_LINK = "not published; one 400 Gb/s link, so that background writes keep up"
_DECODE = (
    "derived from Inkling-Small with L3: 16 requests at once through 1,920 in 566 s are 4.7 s each, of which "
    "1.23 s is TTFT, so 55 ms per token of a reply"
)
_PREFILL_FIT = "fitted to the published effective throughput of L1 alone"
_STORAGE_FIT = "fitted to the published effective throughput with L3"

SYSTEMS: Mapping[str, SimulatedSystem] = {
    "deepseek-v4-flash": SimulatedSystem(
        components=(FULL, SWA),
        max_total_tokens=3_744_000,
        sliding_window=128,
        full_token_bytes=3_600,
        swa_token_bytes=14_656,
        prefill_tokens_per_s=8_540.0,
        decode_tokens_per_s=300.0,
        storage_load_bytes_per_s=0.5e9,
        origins={
            "components": _published(_OUTLINE),
            "page_size": _published(_OUTLINE),
            "max_running_requests": _published(_OUTLINE),
            "hicache_ratio": _published(_OUTLINE),
            "l3_bytes": _published(f"{_OUTLINE}: 500 GiB"),
            "chunked_prefill_size": _assumed(_CHUNK),
            "max_total_tokens": _assumed(
                "not published; 3.6 to 3.9 M tokens put both published cliffs where they are"
            ),
            "swa_full_tokens_ratio": _assumed("not in the command outline; SGLang's default"),
            "sliding_window": _assumed("not in the sources of the benchmark; the model's attention window"),
            "full_token_bytes": _assumed("Mooncake on hybrid L3: 3.6 GB per 1 M tokens without SWA"),
            "swa_token_bytes": _assumed("Mooncake on hybrid L3: 18.25 GB per 1 M tokens with dense SWA"),
            "decode_tokens_per_s": _assumed(_DECODE),
            "host_bytes_per_s": _assumed(_HOST_LINK),
            "storage_store_bytes_per_s": _assumed(_STORE_LINK),
            "prefill_tokens_per_s": _fitted(_PREFILL_FIT),
            "storage_load_bytes_per_s": _fitted(_STORAGE_FIT),
        },
    ),
    "inkling-small": SimulatedSystem(
        components=(FULL, SWA, MAMBA),
        max_total_tokens=750_080,
        swa_full_tokens_ratio=0.1,
        mamba_full_memory_ratio=0.1,
        sliding_window=512,
        full_token_bytes=9_504,
        swa_token_bytes=95_000,
        mamba_state_bytes=1_216_512,
        prefill_tokens_per_s=18_560.0,
        decode_tokens_per_s=300.0,
        storage_load_bytes_per_s=1.07e9,
        origins={
            "components": _published(_OUTLINE),
            "page_size": _published(_OUTLINE),
            "max_running_requests": _published(_OUTLINE),
            "max_total_tokens": _published(_OUTLINE),
            "swa_full_tokens_ratio": _published(_OUTLINE),
            "mamba_full_memory_ratio": _published(_OUTLINE),
            "hicache_ratio": _published(_OUTLINE),
            "l3_bytes": _published(f"{_OUTLINE}: 500 GiB"),
            "chunked_prefill_size": _assumed(_CHUNK),
            "sliding_window": _assumed(
                "not published; what a round touches per client, the turn's 20 pages and the window and page "
                "before it, must fit L2's SWA pool, as the published curve with L2 shows: at most 960 does"
            ),
            "full_token_bytes": _assumed("not published; 9.5 KB as in a comparable hybrid model"),
            "swa_token_bytes": _assumed("not published; 95 KB as in a comparable hybrid model"),
            "mamba_state_bytes": _assumed(
                "not published; as much as 128 tokens of FULL, so that the published memory ratio gives L1 "
                "586 states and L2 the states of two rounds, as the published curve with L2 needs"
            ),
            "decode_tokens_per_s": _assumed(_DECODE),
            "host_bytes_per_s": _assumed(_HOST_LINK),
            "storage_store_bytes_per_s": _assumed(_STORE_LINK),
            "prefill_tokens_per_s": _fitted(_PREFILL_FIT),
            "storage_load_bytes_per_s": _fitted(_STORAGE_FIT),
        },
    ),
}
