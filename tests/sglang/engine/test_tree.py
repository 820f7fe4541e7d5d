"""SGLang's own tree and controller against our L3, in one process, with both of its tree cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.testing.daemon import running_daemon
from hicache.testing.sglang_driver import reported

DRIVER = Path(__file__).with_name("drive_tree.py")
TOKENS = 512


def drive(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = reported(str(DRIVER), *arguments)
    return report


@pytest.mark.parametrize(
    ("core", "components", "interface", "layout"),
    [
        ("python", "full", "1", "page_first_direct"),
        ("rust", "full", "1", "layer_first"),
        ("python", "full+swa", "0", "page_first_direct"),
        ("rust", "full+swa", "1", "page_first_direct"),
    ],
)
def test_a_prefix_comes_back_from_l3_byte_for_byte(
    core: str, components: str, interface: str, layout: str
) -> None:
    """A hit in L3 must be the bytes that were computed, in every layer of every pool."""
    with running_daemon() as daemon:
        report = drive("alone", core, components, interface, layout, daemon.address)
    assert report["core"] == ("RustUnifiedTreeCore" if core == "rust" else "UnifiedTreeCore")
    assert report["backend"] == "HiCacheStorageBackend"
    assert report["backed_up"]
    assert (report["cold"], report["from_storage"], report["loaded"]) == (0, TOKENS, TOKENS)
    assert len(report["equal"]) == 6
    assert all(report["equal"])
    windows = 2 if components == "full+swa" else 0
    assert report["counters"]["read_objects"] == 8 + windows
    assert report["after_clear"] == 0


def test_replicas_with_different_host_layouts_share_one_l3() -> None:
    """What a replica with one layout stored, another with another must read as its own."""
    with running_daemon() as daemon:
        first = drive("writer", "python", "full", "1", "layer_first", daemon.address)
        second = drive("reader", "rust", "full", "1", "page_first_direct", daemon.address)
    assert first["counters"]["stored_objects"] == 8
    assert second["counters"].get("stored_objects", 0) == 0
    assert (second["cold"], second["from_storage"]) == (0, TOKENS)
    assert second["equal"] == [True] * 6
