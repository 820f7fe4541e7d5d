"""The four processes of the demo: a daemon, two replicas that share it, and one server without tiers."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from hicache.bench.demo.processes import HOST, DemoFailed, Fleet, Program, free_port

PAGE_SIZE = 16
VOCAB = 512
_L1_TOKENS = 6144
_CONTEXT = 8192
_START_S = 180.0
_SETTLE_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Replica:
    """One server of the reference engine."""

    program: Program
    url: str

    def metric(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """Return the sum of a metric's series that carry `labels`."""
        return read_metric(f"{self.url}/metrics", name, labels)

    def flush(self) -> None:
        """Forget everything that is cached. Raises DemoFailed if the server is busy."""
        request = urllib.request.Request(f"{self.url}/flush_cache", method="POST")
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except OSError as error:
            raise DemoFailed(f"{self.url}/flush_cache: {error}") from error


class Cluster:
    """Nothing runs before start(); leaving the context ends every process."""

    def __init__(self, folder: Path) -> None:
        self._fleet = Fleet(folder)
        port, metrics_port = free_port(), free_port()
        self._daemon_metrics = f"http://{HOST}:{metrics_port}/metrics"
        self.daemon = self._fleet.add(
            "daemon",
            ["serve", "--port", str(port), "--metrics-port", str(metrics_port), "--capacity", "1GiB"],
            ready_url=self._daemon_metrics,
        )
        shared = [
            "--enable-hierarchical-cache",
            *("--hicache-ratio", "2"),
            *("--hicache-storage-backend", "grpc"),
            *("--hicache-storage-backend-extra-config", json.dumps({"address": f"{HOST}:{port}"})),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ]
        self.a = self._server("replica-a", shared)
        self.b = self._server("replica-b", shared)
        self.cold = self._server("cold", [])

    def _server(self, name: str, flags: list[str]) -> Replica:
        port = free_port()
        url = f"http://{HOST}:{port}"
        arguments = [
            "launch-server",
            *("--port", str(port)),
            *("--vocab-size", str(VOCAB)),
            *("--context-length", str(_CONTEXT)),
            *("--page-size", str(PAGE_SIZE)),
            *("--max-total-tokens", str(_L1_TOKENS)),
            *("--chunked-prefill-size", "512"),
            "--enable-metrics",
        ]
        program = self._fleet.add(name, [*arguments, *flags], ready_url=f"{url}/health")
        return Replica(program, url)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    @property
    def replicas(self) -> list[tuple[str, Replica]]:
        """The two that share the daemon, by the names they are shown with."""
        return [("A", self.a), ("B", self.b)]

    @property
    def programs(self) -> list[Program]:
        return self._fleet.programs

    def start(self) -> None:
        """Start all, then wait for all. Raises DemoFailed if one does not come up."""
        for program in self.programs:
            program.start()
        for program in self.programs:
            program.wait_ready(_START_S)
        self.wait_attached()

    def restart_daemon(self) -> None:
        """Start the daemon again, empty, and wait until both replicas use it."""
        self.daemon.start()
        self.daemon.wait_ready(_START_S)
        self.wait_attached()

    def wait_attached(self) -> None:
        """Return once both replicas reach their storage."""
        deadline = time.monotonic() + _SETTLE_S
        while any(r.metric("hicache_storage_usable") != 1 for _, r in self.replicas):
            if time.monotonic() > deadline:
                raise DemoFailed(f"a replica did not reach the daemon within {_SETTLE_S:.0f} s")
            time.sleep(_POLL_S)

    def stored_objects(self) -> int:
        """Objects that the daemon has taken in since it started."""
        labels = {"operation": "write", "outcome": "stored"}
        return int(read_metric(self._daemon_metrics, "hicache_daemon_keys_total", labels))

    def wait_stored(self) -> int:
        """Return the stored objects once that number stands still: what was written through has arrived."""
        deadline = time.monotonic() + _SETTLE_S
        before, still = self.stored_objects(), 0
        while still < 3:
            if time.monotonic() > deadline:
                raise DemoFailed(f"replicas still wrote to the daemon after {_SETTLE_S:.0f} s")
            time.sleep(_POLL_S)
            now = self.stored_objects()
            before, still = now, still + 1 if now == before else 0
        return before


def read_metric(url: str, name: str, labels: Mapping[str, str] | None = None) -> float:
    """Return the sum of the series called `name` that carry `labels`; 0 without any. Raises DemoFailed."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            page = reply.read().decode()
    except OSError as error:
        raise DemoFailed(f"{url}: {error}") from error
    wanted = (labels or {}).items()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and wanted <= sample.labels.items()
    )
