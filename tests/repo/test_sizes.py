"""A file is one sitting: nobody should need search to read one."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 500


def test_no_file_is_longer_than_one_sitting() -> None:
    """Longer files are where a newcomer gives up; generated code is not read and not counted."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    too_long = {
        name: lines
        for name in tracked
        if "_pb2" not in name and (ROOT / name).exists()
        if (lines := len((ROOT / name).read_text().splitlines())) > MAX_LINES
    }
    assert tracked
    assert not too_long
