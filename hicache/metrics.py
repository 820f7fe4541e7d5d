"""The numbers to watch: every metric's name, labels and meaning, declared once, on a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_CALL_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class DaemonMetrics:
    """What `hicache serve` counts. Thread-safe; one per daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "hicache_daemon_calls", "Calls that ended", ["method", "code"], registry=self.registry
        )
        self.call_seconds = Histogram(
            "hicache_daemon_call_seconds",
            "Time from a call's start on its thread to its end; streams whole",
            ["method"],
            buckets=_CALL_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "hicache_daemon_calls_in_flight", "Calls at work", ["method"], registry=self.registry
        )
        self.keys = Counter(
            "hicache_daemon_keys",
            "Objects asked for: probe hit|miss, read hit|miss|too_large, write stored|exists|no_space|failed",
            ["operation", "outcome"],
            registry=self.registry,
        )
        self.misses = Counter(
            "hicache_daemon_misses",
            "Objects asked for in vain, by why: never_stored, evicted, deleted, lost",
            ["operation", "reason"],
            registry=self.registry,
        )
        self.ceiling = Counter(
            "hicache_daemon_ceiling_keys",
            "Objects asked for that a store which drops nothing would have had",
            ["operation"],
            registry=self.registry,
        )
        self.sent_bytes = Counter(
            "hicache_daemon_sent_bytes", "Object bytes read out", registry=self.registry
        )
        self.received_bytes = Counter(
            "hicache_daemon_received_bytes", "Object bytes uploaded, visible or not", registry=self.registry
        )
        self.changes = Counter(
            "hicache_daemon_changes",
            "Changes of the store: stored, evicted, deleted; a clear counts once",
            ["kind"],
            registry=self.registry,
        )
        self.hellos = Counter(
            "hicache_daemon_hellos",
            "Sessions asked for: shared, isolated, refused",
            ["outcome"],
            registry=self.registry,
        )

    def watch_gauges(self, sources: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """Declare gauges that are read when asked for: name to (meaning, source)."""
        for name, (meaning, source) in sources.items():
            Gauge(f"hicache_daemon_{name}", meaning, registry=self.registry).set_function(source)

    def counters(self) -> dict[str, float]:
        """Return every counter's value by its name and labels, as Prometheus writes them."""
        found = {}
        for family in self.registry.collect():
            if family.type != "counter":
                continue
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found
