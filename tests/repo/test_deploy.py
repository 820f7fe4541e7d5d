"""What deploy/ starts is accepted by the program it starts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.cli.serve import serve
from hicache.config.serve import load_serve_config
from hicache.testing.daemon import running_daemon

DEPLOY = Path(__file__).parents[2] / "deploy"


def _daemon_arguments() -> list[list[str]]:
    """Argument lists of the daemon in compose.yaml and daemonset.yaml, commented ones too."""
    found = []
    for file, key in ((DEPLOY / "compose.yaml", "command"), (DEPLOY / "k8s" / "daemonset.yaml", "args")):
        text = re.sub(r",\n *#? *", ", ", file.read_text())
        for listed in re.findall(rf"{key}: \[(--.*)\]", text):
            found.append([word.strip().strip("'") for word in re.split(r", (?![^{]*\})", listed)])
    unit = (DEPLOY / "systemd" / "hicache.service").read_text()
    start = re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    assert start
    found.append(shlex.split(start[1].replace("/etc/hicache/hicache.toml", str(DEPLOY / "hicache.toml"))))
    return found


@pytest.mark.parametrize("arguments", _daemon_arguments(), ids=" ".join)
def test_the_daemon_accepts_how_it_is_started(arguments: list[str]) -> None:
    """A flag that was renamed would leave the unit or the container in a restart loop."""
    values = serve.make_context("serve", list(arguments)).params
    config = values.pop("config")
    for name in ("ready_file", "store_config", "no_metrics"):
        values.pop(name)
    assert load_serve_config(config, values).port == 7380


def test_all_ways_to_start_the_daemon_were_found() -> None:
    """Two in the compose file, one for Kubernetes, one unit."""
    assert len(_daemon_arguments()) == 4


def test_the_health_check_passes_while_the_daemon_serves() -> None:
    """A check that failed on a healthy daemon would have it restarted for ever."""
    with running_daemon() as daemon:
        command = [sys.executable, str(DEPLOY / "healthcheck.py"), daemon.address, "10"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_health_check_says_why_it_fails() -> None:
    """An operator reads this line in the container's health log."""
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), "127.0.0.1:1", "5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("127.0.0.1:1: UNAVAILABLE")
