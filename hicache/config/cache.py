"""The cache's own settings, as frozen values with SGLang's names and defaults."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from hicache.errors import ConfigError
from hicache.types import PrefetchPolicy, WritePolicy


class StateCheckpoints(str, enum.Enum):
    """Where a prefill leaves MAMBA checkpoints behind."""

    INTERVAL = "interval"  # ends and branching points, and every mamba_track_interval tokens
    ENDS = "ends"  # chunk ends, the prompt's last reusable boundary and branching points only


class HitLoading(str, enum.Enum):
    """Whether what L2 or L3 has of a prompt is loaded."""

    MEASURED = "measured"  # unless computing it is faster, as measured
    ALWAYS = "always"


class HostMemoryMode(str, enum.Enum):
    """What the host's memory is for; names and meaning as in SGLang."""

    CACHE = "cache"  # L2
    BUFFER_ONLY = "buffer_only"  # staging between L1 and L3, nothing stays


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything HiCache decides by. Times in seconds, sizes in tokens unless named otherwise."""

    hicache_host_memory_mode: HostMemoryMode = HostMemoryMode.CACHE
    hicache_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    hicache_storage_prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    prefetch_timeout_max: float = 30.0
    radix_eviction_policy: str = "adaptive"
    radix_eviction_policy_config: Mapping[str, float] = {}
    enable_session_radix_cache: bool = True
    session_timeout: float = 1800.0  # idle; inf: until closed
    max_sessions: int = 65536  # open at once; beyond it the least recently used idle one ends
    chunked_prefill_size: int = 2048
    mamba_track_interval: int = 256
    swa_checkpoint_interval: int = 0  # with islands: windows (and states) every so many tokens; 0: chunk ends
    mamba_prefill_checkpoints: StateCheckpoints = StateCheckpoints.INTERVAL
    # Shares of a tier's FULL pages: what queued prefetches may hold of L2 (law 11: under half), what
    # stores in flight may hold of L2, and the reserve of next victims that write_back keeps clean.
    prefetch_host_share: float = 0.5
    store_host_share: float = 0.25
    clean_reserve_share: float = 0.125
    store_attempts: int = 3
    ceiling_pages: int = 1 << 20  # remembered to tell the hit ceiling; 0: it is not told
    load_or_recompute: HitLoading = HitLoading.MEASURED
    recompute_margin: float = 0.25  # by how much the other way must be faster for a change
    recompute_retry_seconds: float = 30.0  # between trials of a tier that is not loaded from

    def __post_init__(self) -> None:
        for name in (
            "prefetch_threshold",
            "chunked_prefill_size",
            "mamba_track_interval",
            "store_attempts",
            "max_sessions",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_named(name)} {getattr(self, name)} must be at least 1")
        for name in ("ceiling_pages", "recompute_margin"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} {getattr(self, name):g} must be 0 or more")
        if self.swa_checkpoint_interval < 0:
            raise ConfigError(f"--swa-checkpoint-interval {self.swa_checkpoint_interval} must be 0 or more")
        buffer_only = self.hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY
        if buffer_only and self.hicache_write_policy is WritePolicy.WRITE_BACK:
            raise ConfigError(
                "--hicache-host-memory-mode buffer_only keeps nothing on the host that could be written back "
                "later; use --hicache-write-policy write_through or write_through_selective"
            )
        self._check_times()
        for name in ("prefetch_host_share", "store_host_share", "clean_reserve_share"):
            if not 0 < getattr(self, name) <= 0.5:
                raise ConfigError(f"{name} {getattr(self, name):g} must be above 0 and at most 0.5")

    def _check_times(self) -> None:
        for name in (
            "prefetch_timeout_base",
            "prefetch_timeout_per_ki_token",
            "prefetch_timeout_max",
            "recompute_retry_seconds",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} {getattr(self, name):g} must be a number of seconds, 0 or more")
        if not self.session_timeout > 0:
            raise ConfigError(
                f"{_named('session_timeout')} {self.session_timeout:g} must be a number of seconds above 0"
            )

    def check_page_size(self, page_size: int) -> None:
        """Refuse a page size that the chunk and the track interval are not multiples of."""
        for flag, value in (
            ("--chunked-prefill-size", self.chunked_prefill_size),
            ("--mamba-track-interval", self.mamba_track_interval),
            ("--swa-checkpoint-interval", self.swa_checkpoint_interval),
        ):
            if value % page_size:
                raise ConfigError(
                    f"--page-size {page_size} does not divide {flag} {value}; "
                    f"use a multiple such as {max(1, round(value / page_size)) * page_size}"
                )


def _named(name: str) -> str:
    """Return a setting as it is typed: some of them are flags of every program that has a cache."""
    flags = ("chunked_prefill_size", "mamba_track_interval", "session_timeout")
    return f"--{name.replace('_', '-')}" if name in flags else name
