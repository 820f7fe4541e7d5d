"""SGLang's own storage interface without its server: the modules of an unpacked wheel, and nothing else.

    python -m hicache.testing.sglang_wheel FOLDER      fetches the tested version's wheel and unpacks them

Importing `sglang` as it is takes a GPU stack; the storage interface needs torch alone, so the package
around it is replaced by an empty one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import types
import zipfile
from importlib import util
from pathlib import Path

from hicache.integrations.sglang import TESTED_VERSIONS

FOLDER = Path(__file__).parents[2] / ".venv-sglang-wheel"
_WANTED = (
    "sglang/srt/environ.py",
    "sglang/srt/mem_cache/hicache_storage.py",
    "sglang/srt/mem_cache/storage/",
    "sglang/srt/mem_cache/pool_host/",
    "sglang/srt/mem_cache/hybrid_cache/",
    "sglang/srt/arg_groups/",
    "sglang/srt/plugins/",
    "sglang/srt/managers/scheduler_components/weight_updater.py",
    "sglang/srt/observability/metrics_collector.py",
    "sglang/version.py",
)


def unpack(folder: Path) -> None:
    """Download the wheel with pip and unpack what tests read. Raises CalledProcessError without a network."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", scratch, f"sglang=={TESTED_VERSIONS[-1]}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(_WANTED) and name.endswith(".py")]
            archive.extractall(folder, names)


def available(folder: Path = FOLDER) -> str:
    """Return why SGLang's storage interface cannot be imported here; empty if it can."""
    if "sglang" in sys.modules or util.find_spec("sglang") is not None:
        return ""
    if (folder / "sglang/srt/mem_cache/hicache_storage.py").exists():
        return ""
    return "no SGLang wheel; `make test` fetches it"


def install(folder: Path = FOLDER) -> None:
    """Make `sglang.srt.mem_cache.hicache_storage` importable, unless SGLang itself is installed."""
    if "sglang" in sys.modules or util.find_spec("sglang") is not None:
        return
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder / "sglang")]
    sys.modules["sglang"] = package
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_server_args = _no_server  # type: ignore[attr-defined]
    sys.modules["sglang.srt.runtime_context"] = context


def _no_server() -> None:
    raise ValueError("Global server args is not set yet!")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
