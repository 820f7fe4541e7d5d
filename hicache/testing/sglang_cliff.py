"""One multi-turn workload on real SGLang servers with one, two and three tiers, and in virtual time.

Both sides are `hicache bench multi-turn`, as an operator runs it; decides only how servers are started.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.bench.report import RoundReport, RunReport
from hicache.bench.system import Tiers
from hicache.testing.daemon import DaemonProcess
from hicache.testing.sglang_server import ADMIN_KEY, START_S, SglangServer

RUN_S = 900.0
LRU = ("--radix-eviction-policy", "lru")
ADAPTIVE = ("--radix-cache-backend", "hicache")


@dataclass(frozen=True, slots=True)
class Shape:
    """Traffic and sizes, the same for SGLang and for virtual time. Lengths and sizes in tokens."""

    clients: int = 16
    rounds: int = 10
    question: int = 128
    reply: int = 16
    parallel: int = 1
    rate: float = math.inf  # requests a second
    page: int = 16
    l1: int = 6144
    ratio: float = 2.0  # L2 over L1
    chunk: int = 2048
    running: int = 8
    seed: int = 1  # L3 outlives a flush: another run on the same servers needs other tokens

    @property
    def traffic(self) -> tuple[str, ...]:
        """The flags of `hicache bench multi-turn` that say what is asked."""
        return (
            *("--num-clients", str(self.clients), "--num-rounds", str(self.rounds)),
            *("--request-length", str(self.question), "--output-length", str(self.reply)),
            *("--max-parallel", str(self.parallel), "--request-rate", str(self.rate)),
            *("--vocab-size", "500", "--seed", str(self.seed)),
            *("--enable-round-barrier", "--ready-queue-policy", "fifo"),
        )

    @property
    def sizes(self) -> tuple[str, ...]:
        """The flags of virtual time that say what is there; SGLang's have the same names."""
        return (
            *("--page-size", str(self.page), "--max-total-tokens", str(self.l1)),
            *("--hicache-ratio", str(self.ratio), "--chunked-prefill-size", str(self.chunk)),
            *("--max-running-requests", str(self.running)),
        )


class TierServer(SglangServer):
    """A server with a choice of tiers; L3 is a dynamic backend that `extra_config` leads to."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        shape: Shape,
        tiers: Tiers,
        *,
        daemon: DaemonProcess | None = None,
        eviction: Sequence[str] = LRU,
    ) -> None:
        config: dict[str, object] = {
            "backend_name": "hicache",
            "module_path": "hicache.integrations.sglang.storage",
            "class_name": "HiCacheStorageBackend",
            "interface_v1": 1,
            "weight_version": "1",
        }
        if daemon is not None:
            config["address"] = daemon.address
        policies = (
            *("--hicache-write-policy", "write_through", *eviction),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        )
        super().__init__(directory, model, extra_config=config, arguments=(*shape.sizes, *policies))
        self._tiers = tiers

    def _command(self) -> list[str]:
        whole = super()._command()
        host, storage = whole.index("--enable-hierarchical-cache"), whole.index("--hicache-storage-backend")
        rest = whole[whole.index("--hicache-storage-backend-extra-config") + 2 :]
        ends = {Tiers.L1: host, Tiers.L1_L2: storage}
        return [*whole[: ends[self._tiers]], *rest] if self._tiers in ends else whole


@contextlib.contextmanager
def serving(
    folder: Path, model: Path, shape: Shape, tiers: Tiers, *, eviction: Sequence[str] = LRU
) -> Iterator[TierServer]:
    """Run a server on its own, with a daemon of its own if it has L3, until the block ends."""
    with contextlib.ExitStack() as stack:
        daemon = None
        if tiers is Tiers.L1_L2_L3:
            daemon = stack.enter_context(DaemonProcess(folder / "daemon", arguments=["--capacity", "256MiB"]))
        place = folder / tiers.value
        server = TierServer(place, model, shape, tiers, daemon=daemon, eviction=eviction)
        stack.callback(server.kill)
        yield server.start(timeout_s=START_S)


def url_flags(server: TierServer, shape: Shape, tiers: Tiers) -> list[str]:
    """What is measured on a server: flags of `hicache bench multi-turn`."""
    keys = ("--admin-api-key", ADMIN_KEY)
    return ["--url", f"http://{server.address}", *keys, "--tiers", tiers.value, *shape.traffic]


def virtual_flags(shape: Shape, tiers: Tiers, *, policy: str = "lru") -> list[str]:
    """What predicts it. The final token's KV is not computed: SGLang does not either."""
    run = ["--engine", "virtual", "--tiers", tiers.value, "--eviction-policy", policy]
    return [*run, *shape.traffic, *shape.sizes]


def multi_turn(flags: Sequence[str], result: Path) -> RunReport:
    """Run `hicache bench multi-turn` and return what it wrote to `result`. Raises CalledProcessError."""
    program = str(Path(sys.executable).with_name("hicache"))
    command = [program, "bench", "multi-turn", *flags, "--json", str(result)]
    subprocess.run(command, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL)
    (run,) = json.loads(result.read_text())["runs"]
    return RunReport(
        tiers=run["tiers"],
        eviction_policy=run["eviction_policy"],
        engine=run["engine"],
        rounds=tuple(map(RoundReport.from_json, run["rounds"])),
        duration_s=run["duration_s"],
        wall_s=run["wall_s"],
    )


def largest_gap(measured: RunReport, predicted: RunReport) -> float:
    """The largest difference of two hit rates of the same round, in points."""
    pairs = zip(measured.rounds, predicted.rounds, strict=True)
    return max(100 * abs(ours.hit_rate - theirs.hit_rate) for ours, theirs in pairs)
