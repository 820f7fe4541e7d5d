"""SGLang's factory makes our linker on its real device pools, and says what a config lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.testing.daemon import DaemonProcess
from hicache.testing.sglang_driver import reported

DRIVER = Path(__file__).with_name("drive_linker.py")
BUFFERS = {"mha": 6, "mla": 3, "dsa": 6, "swa": 6}  # K and V, or KV, or KV and indexer, of three layers


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver saw."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), arguments=["--capacity", "64MiB"]) as daemon:
        said: dict[str, Any] = reported(str(DRIVER), daemon.address)
    return said


@pytest.mark.parametrize("kind", list(BUFFERS))
def test_every_buffer_of_a_pool_comes_back_as_it_was(report: dict[str, Any], kind: str) -> None:
    """A buffer left out would be restored as whatever was there before."""
    assert report[kind] == {
        "stored": True,
        "found": [3],
        "loads": True,
        "landed": True,
        "equal": True,
        "buffers": BUFFERS[kind],
    }


def test_the_installed_sglang_asks_what_the_linker_answers(report: dict[str, Any]) -> None:
    """A method that SGLang renamed would show as a crash in a serving scheduler."""
    assert report["differences"] == []


def test_what_is_missing_is_said_once_and_the_server_goes_on(report: dict[str, Any]) -> None:
    """SGLang ends its start when a linker's constructor raises; without L3 it can serve all the same."""
    why, found = report["unversioned"]
    assert why.startswith('SGLang does not say which weights it serves: add "weight_version" to linker_extra')
    assert found == []
    assert report["offloads when off"] is False
    assert "No matching HiCache strategy" in report["strange"]
    assert report["away"] == ["", []]
    off, strange, *away = report["heard"]
    assert why in off
    assert report["strange"] in strange
    assert any(
        "serving without L3 until it answers again: open failed: grpc: stats at 127.0.0.1:1" in line
        for line in away
    )


def test_a_misspelt_key_names_what_exists(report: dict[str, Any]) -> None:
    """A key that is silently ignored leaves an operator with a bound that is not there."""
    assert "no key 'lookup_timeout'; valid are" in report["misspelt"]
    assert "lookup_timeout_s" in report["misspelt"]
