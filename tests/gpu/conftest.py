"""Every test here needs a CUDA device; without one it is skipped and says so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder; skip it where there is no device."""
    here = [item for item in items if "tests/gpu/" in item.nodeid]
    missing = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False")
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
