"""L1 capacities from SGLang's memory flags: one token budget for FULL, shares of it for the others."""

from __future__ import annotations

from hicache.errors import ConfigError
from hicache.spec import ModelSpec
from hicache.types import Component


def device_capacities(
    spec: ModelSpec,
    *,
    max_total_tokens: int,
    swa_full_tokens_ratio: float = 0.8,
    mamba_full_memory_ratio: float = 0.9,
    max_mamba_cache_size: int | None = None,
) -> dict[Component, int]:
    """Return pages (MAMBA: states) per component of L1.

    FULL gets `max_total_tokens`, SWA `swa_full_tokens_ratio` of that in tokens, MAMBA as many states
    as fit `mamba_full_memory_ratio` of FULL's bytes, or exactly `max_mamba_cache_size`. Raises ConfigError.
    """
    full = max_total_tokens // spec.page_size
    if full < 1:
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens} is less than one page of {spec.page_size} tokens"
        )
    if not 0 < swa_full_tokens_ratio <= 1:
        raise ConfigError(f"--swa-full-tokens-ratio {swa_full_tokens_ratio} must be in (0, 1]")
    if not 0 < mamba_full_memory_ratio < float("inf"):
        raise ConfigError(f"--mamba-full-memory-ratio {mamba_full_memory_ratio} must be above 0")
    if max_mamba_cache_size is not None and max_mamba_cache_size < 1:
        raise ConfigError(f"--max-mamba-cache-size {max_mamba_cache_size} must be at least 1")
    capacities = {Component.FULL: full}
    if Component.SWA in spec.kinds:
        capacities[Component.SWA] = int(max_total_tokens * swa_full_tokens_ratio) // spec.page_size
    if Component.MAMBA in spec.kinds:
        share = full * spec[Component.FULL].page_bytes * mamba_full_memory_ratio
        states = max_mamba_cache_size or int(share / spec[Component.MAMBA].page_bytes)
        capacities[Component.MAMBA] = states
    return capacities
