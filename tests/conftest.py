"""What every test gets: a clean environment and the hypothesis profiles."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

_OWN_PREFIXES = ("HICACHE_", "SGLANG_", "MOONCAKE_", "MC_")

settings.register_profile(
    "fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "thorough", max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the shell that runs the tests must not leak into them."""
    for name in list(os.environ):
        if name.startswith(_OWN_PREFIXES):
            monkeypatch.delenv(name)
