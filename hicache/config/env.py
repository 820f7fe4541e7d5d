"""Environment variables that other systems' users already set; HiCache's own settings have flags."""

from __future__ import annotations

import os


def read(name: str) -> str | None:
    """Return a variable's value; None if it is unset or empty."""
    return os.environ.get(name) or None
