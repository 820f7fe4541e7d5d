"""What the cache counts. Plain numbers; hicache.metrics and the servers publish them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStats:
    """Totals since the cache was built. Tokens unless named otherwise."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0
    ceiling_tokens: int = 0  # what an infinite cache would have had
    missed_tokens: Counter[str] = field(default_factory=Counter)  # ceiling less cached, by reason
    asked_tokens: int = 0  # of storage
    failed_tokens: Counter[str] = field(default_factory=Counter)  # asked less storage_tokens, by reason
    evicted_pages: Counter[str] = field(default_factory=Counter)  # by "tier.component"
    demoted_pages: int = 0
    lost_pages: int = 0  # evicted from L1 or L2 without a copy below
    written_pages: Counter[str] = field(default_factory=Counter)  # device to host, by component
    stored_pages: Counter[str] = field(default_factory=Counter)  # host to storage, by component
    loaded_pages: Counter[str] = field(default_factory=Counter)  # host to device, by component
    fetched_pages: Counter[str] = field(default_factory=Counter)  # storage to host, by component
    store_failed_pages: int = 0
    orphaned_pages: int = 0  # stored behind a page that storage did not take; of no use until it does
    prefetch: Counter[str] = field(default_factory=Counter)  # ended prefetches by reason
    sessions: Counter[str] = field(default_factory=Counter)  # opened, and ended: closed, expired, displaced
    retracted: int = 0
    failed_loads: int = 0  # host to device; their requests were computed instead
