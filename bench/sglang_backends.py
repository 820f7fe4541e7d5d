"""SGLang's real tree and controller with our L3 beside its own: tokens hit, time to the hit, bytes.

    .venv-sglang/bin/python bench/sglang_backends.py --json bench/results/sglang-backends.json

Needs the environment of `make sglang-venv`, and for Mooncake also mooncake-transfer-engine-non-cuda in it.
For every backend one process computes (that is: fills with random KV) and stores some prompts, and another,
which never saw them, fetches each one from storage into host memory, as SGLang does when a request arrives:
its UnifiedRadixCache and HybridCacheController are the real ones, on CPU tensors. "time to hit" is from
`prefetch_from_storage` to the moment SGLang may use the prefix, "to device" until its bytes are in the
device pool as well. The external linker has no host tier: its hit is SGLang's look-up, which reads and
verifies, and what is left is the copy. Backends take turns in every round, so that
a noisy machine is noisy for all. At the end one prompt is loaded to the device and its bytes are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from hicache.bench.report import percentile
from hicache.testing.daemon import DaemonProcess
from hicache.testing.services import HOST, MooncakeMaster, MooncakeOwner

REPLICA = Path(__file__).with_name("sglang_replica.py")
PAGE = 64
TOKEN_BYTES = 2 * 8 * 4 * 64 * 2  # K and V, layers, heads, dim, bfloat16: what the replica has


class Child:
    """A replica in a process of its own."""

    def __init__(self, folder: Path, task: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._log = (folder / f"replica-{time.monotonic_ns()}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(REPLICA), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            text=True,
        )
        self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"a replica ended:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


HICACHE = {
    "backend_name": "hicache",
    "module_path": "hicache.integrations.sglang.storage",
    "class_name": "HiCacheStorageBackend",
    "interface_v1": 1,
    "model_id": "bench",
    "weight_version": "1",
    "prefetch_threshold": PAGE,
}


@contextlib.contextmanager
def hicache_daemon(folder: Path, plane: str) -> Iterator[tuple[str, dict[str, object], dict[str, str], Any]]:
    """Our daemon; SGLang speaks to it over one of its data planes."""
    with DaemonProcess(folder, arguments=["--capacity", "1GiB"]) as daemon:
        yield "dynamic", {**HICACHE, "address": daemon.address, "data_planes": plane}, {}, None


@contextlib.contextmanager
def hicache_linker(folder: Path) -> Iterator[tuple[str, dict[str, object], dict[str, str], Any]]:
    """Our external linker on our daemon, over shared memory: no host tier between L3 and the device."""
    extra = {"model_id": "bench", "weight_version": "1"}
    with DaemonProcess(folder, arguments=["--capacity", "1GiB"]) as daemon:
        yield "linker", {**extra, "address": daemon.address, "data_planes": "shm,inline"}, {}, None


@contextlib.contextmanager
def hicache_file(folder: Path) -> Iterator[tuple[str, dict[str, object], dict[str, str], Any]]:
    """Our files, without a daemon."""
    extra = {**HICACHE, "backend": "file", "file_storage_path": str(folder / "objects")}
    yield "dynamic", extra, {}, lambda: files_bytes(folder / "objects")


@contextlib.contextmanager
def sglang_file(folder: Path) -> Iterator[tuple[str, dict[str, object], dict[str, str], Any]]:
    """SGLang's own files."""
    root = folder / "objects"
    root.mkdir(parents=True)
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(root)}
    yield "file", {"prefetch_threshold": PAGE}, environment, lambda: files_bytes(root)


@contextlib.contextmanager
def sglang_mooncake(folder: Path) -> Iterator[tuple[str, dict[str, object], dict[str, str], Any]]:
    """SGLang's own Mooncake store over TCP; a process of its own holds the memory, as the daemon does."""
    master = MooncakeMaster(folder / "master").start()
    owner = MooncakeOwner(folder / "owner", master, segment_bytes=1 << 30).start()
    extra = {
        "prefetch_threshold": PAGE,
        "master_server_address": master.address,
        "local_hostname": HOST,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": 0,
    }

    def allocated() -> int:
        with urllib.request.urlopen(f"http://{HOST}:{master.metrics_port}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return int(float(next(x for x in lines if x.startswith("master_allocated_bytes")).split()[-1]))

    try:
        yield "mooncake", extra, {"MC_TCP_BIND_ADDRESS": HOST}, allocated
    finally:
        owner.kill()
        master.kill()


def files_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


BACKENDS = {
    "hicache daemon (shm)": lambda folder: hicache_daemon(folder, "shm,inline"),
    "hicache daemon (inline)": lambda folder: hicache_daemon(folder, "inline"),
    "hicache linker (shm)": hicache_linker,
    "hicache file": hicache_file,
    "sglang file": sglang_file,
    "sglang mooncake (tcp)": sglang_mooncake,
}


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where the result goes.")
@click.option("--prompts", default=6, help="Prompts, stored and fetched one after the other.")
@click.option("--pages", default=32, help=f"Pages of {PAGE} tokens in each.")
@click.option("--rounds", default=5, help="How often each prompt is fetched.")
@click.option("--only", multiple=True, type=click.Choice(list(BACKENDS)), help="Leave the others out.")
def main(path: Path | None, prompts: int, pages: int, rounds: int, only: tuple[str, ...]) -> None:
    """Measure, print a table and write JSON."""
    rows: list[dict[str, Any]] = []
    readers: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in only or BACKENDS:
            folder = root / name.replace(" ", "-")
            folder.mkdir()
            storage, extra, environment, stored_bytes = stack.enter_context(BACKENDS[name](folder))
            task = {"storage": storage, "extra": extra, "prompts": prompts, "pages": pages}
            writer = Child(folder, task, environment)
            written = writer.ask("write")["seconds"]
            counters = writer.ask("counters")
            writer.close()
            stored = stored_bytes() if stored_bytes else int(counters["stored_bytes"])
            rows.append({"backend": name, "store_seconds": written, "stored_bytes": stored})
            readers[name] = Child(folder, task, environment)
            stack.callback(readers[name].close)
            readers[name].ask("read")  # compiles SGLang's hash extension and touches memory
        for row in rows:
            row.update(hit_seconds=[], hit_tokens=[], device_seconds=[])
        for _ in range(rounds):
            for row in rows:
                answer = readers[row["backend"]].ask("read")
                row["hit_seconds"] += answer["seconds"]
                row["hit_tokens"] += answer["tokens"]
                row["device_seconds"] += answer["device_seconds"]
        for row in rows:
            row["read_bytes"] = int(readers[row["backend"]].ask("counters").get("read_bytes", 0))
            row.update(readers[row["backend"]].ask("compare"))
    asked = prompts * rounds * pages * PAGE
    print(f"{prompts} prompts x {pages * PAGE} tokens x {rounds} rounds, {TOKEN_BYTES} bytes a token")
    print(
        f"{'backend':25}{'hit tokens':>12}{'to hit, ms':>12}{'p90':>8}{'to device':>11}{'p90':>8}"
        f"{'store, ms':>11}{'stored':>13}  equal"
    )
    for row in rows:
        hit = sorted(1000 * s for s in row["hit_seconds"])
        device = sorted(1000 * s for s in row["device_seconds"])
        row["hit_share"] = sum(row["hit_tokens"]) / asked
        print(
            f"{row['backend']:25}{sum(row['hit_tokens']):>12,}{statistics.median(hit):>12.1f}"
            f"{percentile(hit, 0.9):>8.1f}{statistics.median(device):>11.1f}{percentile(device, 0.9):>8.1f}"
            f"{1000 * statistics.median(row['store_seconds']):>11.1f}{row['stored_bytes']:>13,}"
            f"  {row['equal']}"
        )
    if path is not None:
        payload = prompts * pages * PAGE * TOKEN_BYTES
        shape = {"prompts": prompts, "tokens": pages * PAGE, "rounds": rounds, "payload_bytes": payload}
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        path.write_text(json.dumps({"shape": shape, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
