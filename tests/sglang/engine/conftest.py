"""The real SGLang, where it is installed; see `make test-sglang`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from hicache.testing.sglang_server import make_model

try:
    _INSTALLED = metadata.version("sglang")
except metadata.PackageNotFoundError:
    _INSTALLED = ""


@pytest.fixture(autouse=True, scope="session")
def _real_engine() -> None:
    """Skip without SGLang, before any fixture of a module starts a server."""
    if not _INSTALLED:
        pytest.skip("SGLang is not installed here; `make test-sglang` has its own environment")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for all servers."""
    return make_model("llama", tmp_path_factory.mktemp("model") / "llama")
