"""Scripts that use SGLang's classes run in a process of their own, and print what they saw as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

RUN_S = 240.0


def reported(*arguments: str) -> Any:
    """Run this interpreter with arguments; return the JSON of the last line that it printed.

    Raises AssertionError with the end of its stderr if it failed.
    """
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
