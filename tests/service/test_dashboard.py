"""The Grafana dashboard asks for what the programs really show: every metric, and every label."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.testing.daemon import poll, running_daemon
from hicache.testing.served import running_server

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "hicache.json").read_text())
TARGET_LABELS = {"instance", "job"}  # given by Prometheus


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]


def labels_of(pages: list[str]) -> dict[str, set[str]]:
    """The labels of every series, and every declared name that has no series yet."""
    found: dict[str, set[str]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """What a daemon and a replica show after traffic that touches everything: hits, evictions, misses."""
    with (
        running_daemon(metrics_port=0) as daemon,
        running_server(
            enable_metrics=True,
            enable_hierarchical_cache=True,
            hicache_storage_backend="grpc",
            hicache_storage_backend_extra_config={"address": daemon.address, "prefetch_threshold": 16},
            hicache_storage_prefetch_policy="wait_complete",
            max_total_tokens=512,
        ) as server,
    ):
        for seed in (1, 2, 3, 4, 1):
            body = {
                "input_ids": [(seed * 31 + 7 * i) % 256 for i in range(400)],
                "sampling_params": {"max_new_tokens": 2},
            }
            httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
        poll(lambda: daemon.metrics.counters().get('hicache_daemon_changes_total{kind="stored"}', 0) > 0)
        addresses = [f"http://127.0.0.1:{daemon.metrics_port}/metrics", f"{server.url}/metrics"]
        pages = []
        for address in addresses:
            with urllib.request.urlopen(address, timeout=60) as reply:
                pages.append(reply.read().decode())
    return labels_of(pages)


@pytest.mark.parametrize(("panel", "query"), list(queries()))
def test_a_panel_asks_for_metrics_and_labels_that_exist(
    panel: str, query: str, shown: dict[str, set[str]]
) -> None:
    """An empty panel looks like a system at rest."""
    names = re.findall(r"\b(?:sglang:|hicache_)[a-z0-9_]+", query)
    assert names, f"{panel} asks for nothing of ours"
    labels: set[str] = set()
    for name in names:
        assert name in shown, f"{panel}: there is no {name}"
        labels |= shown[name]
    used = {label for listed in re.findall(r"by \(([^)]*)\)", query) for label in listed.split(", ")}
    used |= set(re.findall(r'([a-z_]+)\s*(?:=~|!~|!=|=)\s*"', query))
    assert used - TARGET_LABELS <= labels, f"{panel}: no label {used - TARGET_LABELS - labels}"


def test_the_dashboard_can_be_imported() -> None:
    """Grafana drops panels that share an id or lie on each other."""
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(panels))) - {"__rate_interval"}
    assert used <= variables
