"""Generate hicache/rpc/v1 from proto/; with --check only say whether the committed files are fresh.

Refuses any generator but that of the oldest supported grpcio: generated code refuses an older runtime.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = "1.66.2"
SOURCE = "hicache/rpc/v1/cache.proto"
TARGETS = ("cache_pb2.py", "cache_pb2.pyi", "cache_pb2_grpc.py")


def generate(out: Path) -> None:
    """Write the generated files below `out`."""
    found = version("grpcio-tools")
    if found != GENERATOR:
        raise SystemExit(f"proto/generate.py needs grpcio-tools=={GENERATOR}, found {found}")
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(ROOT / "proto"),
        *flags,
        SOURCE,
    ]
    subprocess.run(command, check=True, cwd=ROOT / "proto")


def stale() -> list[str]:
    """Return the committed files that a fresh run would change."""
    package = Path(SOURCE).parent
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [
            str(package / name)
            for name in TARGETS
            if not (ROOT / package / name).exists()
            or (ROOT / package / name).read_bytes() != (Path(folder) / package / name).read_bytes()
        ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if changed := stale():
            raise SystemExit(f"not fresh: {', '.join(changed)}; run make proto and commit")
    elif sys.argv[1:]:
        raise SystemExit("usage: python proto/generate.py [--check]")
    else:
        generate(ROOT)
