"""The demo as people run it, at a smaller scale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    """`make demo` is the first thing a newcomer types; it must not be found broken there."""
    out = tmp_path / "demo"
    result = subprocess.run(
        [sys.executable, "-m", "hicache.bench.demo", "--block-tokens", "2", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-2000:]}"
    assert "✗" not in result.stdout
    assert (out / "multi-turn.png").stat().st_size > 10_000
    for name in ("daemon", "replica-a", "replica-b", "cold"):
        assert "Traceback" not in (out / f"{name}.log").read_text()
