"""The committed protocol code is what the proto file gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_fresh() -> None:
    """The daemon would speak another protocol than the one documented."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed; make dev installs it")
    done = subprocess.run(
        [sys.executable, str(ROOT / "proto/generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
