"""The numbers a server shows: SGLang's names where they mean the same, `hicache_` for what only we have.

A scrape reads one snapshot that the engine thread took between two steps, so its numbers agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hicache.cache.accounts import Shortfall
from hicache.cache.stats import CacheStats
from hicache.engine.scheduler import Scheduler
from hicache.types import Component, Tier

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_POOLS = {Component.FULL: "full", Component.SWA: "swa", Component.MAMBA: "mamba"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: `labels` empty or one pair of name and value each."""

    name: str
    meaning: str
    value: float
    labels: Mapping[str, str]
    counter: bool


def snapshot(scheduler: Scheduler, executor_counters: Mapping[str, float]) -> list[Sample]:
    """Read everything there is to show; called on the engine thread."""
    return [
        *_requests(scheduler),
        *_occupancy(scheduler),
        *_transfers(scheduler),
        *_executor(executor_counters),
    ]


class ServerMetrics:
    """What /metrics shows. observe() is called from the event loop, render() with a fresh snapshot."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._live = _Live()
        self._registry.register(self._live)
        self._requests = Counter(
            "sglang:num_requests", "Requests that ended, by how", ["outcome"], registry=self._registry
        )
        self._generated = Counter("sglang:generation_tokens", "Tokens sampled", registry=self._registry)
        self._ttft = Histogram(
            "sglang:time_to_first_token_seconds",
            "Arrival to first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._latency = Histogram(
            "sglang:e2e_request_latency_seconds",
            "Arrival to last token",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, *, outcome: str, tokens: int, ttft_s: float | None, latency_s: float) -> None:
        """Count a request that ended."""
        self._requests.labels(outcome).inc()
        self._generated.inc(tokens)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        self._latency.observe(latency_s)

    def render(self, samples: list[Sample]) -> bytes:
        """Return the page in Prometheus' text format."""
        self._live.samples = samples
        return generate_latest(self._registry)


class _Live(Collector):
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for sample in self.samples:
            if sample.name not in families:
                kind = CounterMetricFamily if sample.counter else GaugeMetricFamily
                families[sample.name] = kind(sample.name, sample.meaning, labels=list(sample.labels))
            families[sample.name].add_metric(list(sample.labels.values()), sample.value)
        yield from families.values()


def _count(name: str, meaning: str, value: float, **labels: str) -> Sample:
    return Sample(name, meaning, value, labels, counter=True)


def _gauge(name: str, meaning: str, value: float, **labels: str) -> Sample:
    return Sample(name, meaning, value, labels, counter=False)


def _requests(scheduler: Scheduler) -> Iterable[Sample]:
    stats = scheduler.cache.stats
    yield _gauge("sglang:num_running_reqs", "Requests running", scheduler.num_running)
    yield _gauge("sglang:num_queue_reqs", "Requests queued", scheduler.num_waiting)
    yield _count("sglang:prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens)
    sources = {"device": stats.device_tokens, "host": stats.host_tokens, "storage": stats.storage_tokens}
    for source, tokens in sources.items():
        yield _count(
            "sglang:cached_tokens", "Prompt tokens by the tier that had them", tokens, cache_source=source
        )
    cached = sum(sources.values())
    rate = cached / stats.prompt_tokens if stats.prompt_tokens else 0.0
    yield _gauge("sglang:cache_hit_rate", "Cached / prompt tokens since the start", rate)
    yield from _accounts(stats)
    batches = scheduler.cache.event_batches
    if batches is not None:
        yield _count("hicache_kv_event_batches", "Batches of KV events given to the publisher", batches[0])
        yield _count("hicache_kv_event_batches_lost", "Batches it had no room for", batches[1])
    yield _gauge("hicache_open_sessions", "Sessions that pages are kept for", len(scheduler.cache.sessions))
    for event, number in sorted(stats.sessions.items()):
        yield _count("hicache_sessions", "Sessions opened, closed, expired, displaced", number, event=event)
    yield _count("hicache_retracted_requests", "Running requests sent back to the queue", stats.retracted)


def _accounts(stats: CacheStats) -> Iterable[Sample]:
    """Two sums that reconcile: ceiling = cached + missed, asked = cached from storage + failed."""
    yield _count(
        "hicache_computed_tokens", "Prompt tokens that no tier had: prompt less cached", stats.computed_tokens
    )
    yield _count(
        "hicache_ceiling_tokens", "Prompt tokens that an infinite cache would have had", stats.ceiling_tokens
    )
    yield _count("hicache_storage_asked_tokens", "Tokens that L3 was asked for", stats.asked_tokens)
    for shortfall in Shortfall:
        reason = shortfall.value
        yield _count(
            "hicache_missed_tokens",
            "Tokens below the ceiling that were computed again, by what kept them back",
            stats.missed_tokens[reason],
            reason=reason,
        )
        yield _count(
            "hicache_storage_failed_tokens",
            "Tokens that L3 was asked for and that did not come from it, by why",
            stats.failed_tokens[reason],
            reason=reason,
        )


def _occupancy(scheduler: Scheduler) -> Iterable[Sample]:
    cache = scheduler.cache
    page = cache.spec.page_size
    usage_names = {
        Component.FULL: "full_token_usage",
        Component.SWA: "swa_token_usage",
        Component.MAMBA: "mamba_usage",
    }
    for tier, component in cache.pools.kinds:
        pool, name = cache.pools[tier, component], _POOLS[component]
        unit = 1 if component is Component.MAMBA else page
        if tier is Tier.DEVICE:
            share = pool.num_taken / pool.capacity
            yield _gauge(f"sglang:{usage_names[component]}", f"Share of L1's {name} pool in use", share)
            if component is Component.FULL:
                yield _gauge("sglang:token_usage", "Share of L1's token pool in use", share)
                evictable = cache.tree.evictable(tier, component) * page
                yield _gauge(
                    "sglang:kv_evictable_tokens", "FULL tokens on L1 that eviction could free", evictable
                )
        elif component is Component.FULL:
            yield _gauge("sglang:hicache_host_used_tokens", "FULL tokens on L2", pool.num_taken * page)
            yield _gauge("sglang:hicache_host_total_tokens", "FULL tokens L2 can hold", pool.capacity * page)
        elif component is Component.MAMBA:
            yield _gauge("sglang:hicache_host_mamba_used_states", "MAMBA states on L2", pool.num_taken)
            yield _gauge("sglang:hicache_host_mamba_total_states", "MAMBA states L2 can hold", pool.capacity)
        resident = cache.tree.resident(tier, component) * unit
        yield _gauge(
            "hicache_resident",
            "What the tree holds: tokens, or states for mamba",
            resident,
            tier=tier.name.lower(),
            pool=name,
        )


def _transfers(scheduler: Scheduler) -> Iterable[Sample]:
    stats, page = scheduler.cache.stats, scheduler.cache.spec.page_size
    moved = {
        "sglang:load_back_tokens": ("Host to device", stats.loaded_pages),
        "sglang:hicache_backup_tokens": ("Device to host", stats.written_pages),
        "sglang:prefetched_tokens": ("Storage to host", stats.fetched_pages),
        "sglang:backuped_tokens": ("Host to storage", stats.stored_pages),
    }
    for name, (meaning, pages) in moved.items():
        for component in scheduler.cache.spec.kinds:
            pool = _POOLS[component]
            unit = 1 if component is Component.MAMBA else page
            yield _count(name, f"{meaning}; tokens, or states for mamba", pages[pool] * unit, pool=pool)
    for where, evicted in sorted(stats.evicted_pages.items()):
        tier, _, pool = where.partition(".")
        unit = 1 if pool == "mamba" else page
        yield _count(
            "sglang:evicted_tokens",
            "Evicted; tokens, or states for mamba",
            evicted * unit,
            tier=tier,
            pool=pool,
        )
    yield _count(
        "hicache_demoted_tokens", "FULL tokens that left L1 and stayed on L2", stats.demoted_pages * page
    )
    yield _count("hicache_lost_tokens", "FULL tokens evicted without a copy below", stats.lost_pages * page)
    yield _count("hicache_store_failed_objects", "Objects storage did not take", stats.store_failed_pages)
    yield _count("hicache_orphaned_objects", "Objects stored behind one that was not", stats.orphaned_pages)
    measured = scheduler.cache.weighing.measured
    for lower in (Tier.HOST, Tier.STORAGE):
        yield _gauge(
            "hicache_measured_load_bytes_per_second",
            "What loads are weighed by; 0 before any was measured",
            measured.bytes_per_s(lower) or 0.0,
            cache_source=lower.name.lower(),
        )
    yield _gauge(
        "hicache_measured_prefill_tokens_per_second",
        "What computing is weighed by; 0 before any was measured",
        measured.prefill_tokens_per_s or 0.0,
    )
    for reason, count in sorted(stats.prefetch.items()):
        yield _count("hicache_prefetches", "Prefetches by how they ended", count, reason=reason)


def _executor(counters: Mapping[str, float]) -> Iterable[Sample]:
    sums = dict(counters)
    yield _gauge(
        "hicache_storage_usable",
        "1 while L3 is attached, not bypassed, and answered the last call",
        sums.pop("storage_answers", 0),
    )
    for name, value in sorted(sums.items()):
        yield _count("hicache_transfer", "Sums of the transfer executor, by name", value, sum=name)
