"""Checks and times everything that needs a CUDA device, in under five minutes: python bench/gpu_check.py

Runs tests/gpu, then times copies between pinned host pools and the device for every layout and page
size, and how much of a load hides behind compute. Without a device it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostMemory, HostPools
from hicache.tiers.layouts import HostLayout
from hicache.transfer.base import JobId, LoadTicket, Move
from hicache.transfer.executor import TransferExecutor
from hicache.types import Component

ROOT = Path(__file__).parents[1]
FULL = Component.FULL
LAYERS = 16
ROW = (2, 8, 128)  # K and V, eight heads of 128, bfloat16: 4 KiB per token and layer


class Rig:
    """One FULL pool of `size_bytes` on the device, and its like on the host."""

    def __init__(self, device: str, page_size: int, layout: HostLayout, size_bytes: int) -> None:
        self.cuda = device != "cpu"
        pool = PoolSpec("kv", LAYERS, ROW, "bfloat16", page_size)
        spec = ModelSpec("gpu-check", page_size, (ComponentSpec(FULL, (pool,)),))
        self.pages = max(1, size_bytes // pool.page_bytes)
        self.bytes = self.pages * pool.page_bytes
        self.device = DevicePools(spec, {FULL: self.pages}, device)
        self.host = HostPools(spec, {FULL: self.pages}, layout, HostMemory.for_device(device))
        self.executor = TransferExecutor(spec, self.device, self.host)
        in_order = list(range(self.pages))
        mixed = torch.randperm(self.pages, generator=torch.Generator().manual_seed(0)).tolist()
        self.slots = {"in order": array("i", in_order), "scattered": array("i", mixed)}

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def write(self, order: str) -> None:
        self.executor.start_write(JobId(1), [Move(FULL, self.slots["in order"], self.slots[order])])
        self.end()

    def load(self, order: str) -> LoadTicket:
        return self.executor.start_load(JobId(1), [Move(FULL, self.slots[order], self.slots["in order"])])

    def finish_load(self, order: str) -> None:
        self.load(order).wait_layer(LAYERS - 1)
        self.synchronize()
        self.end()

    def end(self) -> None:
        assert self.executor.wait(60), "a copy did not end within 60 s"
        assert not any(done.failed for done in self.executor.poll()), "a copy failed"

    def close(self) -> None:
        self.executor.close()
        self.host.close()


def timed(action: Callable[[], None], repeats: int) -> float:
    """Median seconds, after one run to warm up."""
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copies(device: str, size_bytes: int, repeats: int) -> list[dict[str, object]]:
    """GB/s of whole jobs by layout, page size and order of slots; bytes are compared once per case."""
    rows = []
    for layout in HostLayout:
        for page_size in (1, 16, 64):
            rig = Rig(device, page_size, layout, size_bytes if page_size > 1 else size_bytes // 4)
            kv = rig.device.pool("kv")
            kv.copy_(torch.randn(kv.shape[1:], dtype=kv.dtype, device=kv.device))
            truth = kv[:, -1].clone()
            for order in rig.slots:
                write_s = timed(lambda rig=rig, order=order: rig.write(order), repeats)
                kv.fill_(float("nan"))
                load_s = timed(lambda rig=rig, order=order: rig.finish_load(order), repeats)
                assert torch.equal(kv[:, -1], truth), (
                    f"{layout.value}, page {page_size}, {order}: bytes differ"
                )
                down, up = rig.bytes / write_s / 1e9, rig.bytes / load_s / 1e9
                rows.append(
                    {
                        "layout": layout.value,
                        "page_size": page_size,
                        "slots": order,
                        "bytes": rig.bytes,
                        "device_to_host_gb_s": down,
                        "host_to_device_gb_s": up,
                    }
                )
                case = f"{layout.value:18} page {page_size:3} {order:10}"
                print(f"{case} D2H {down:7.2f} GB/s  H2D {up:7.2f} GB/s")
            rig.close()
    return rows


def overlap(device: str, size_bytes: int, repeats: int) -> list[dict[str, object]]:
    """Layer-wise against load-then-compute, with a load half, once and twice as long as the compute."""
    rig = Rig(device, 64, HostLayout.LAYER_FIRST, size_bytes)
    rig.write("in order")
    load_s = timed(lambda: rig.finish_load("in order"), repeats)
    width = 4096 if rig.cuda else 512
    left = torch.randn(width, width, device=device, dtype=torch.bfloat16 if rig.cuda else torch.float32)
    one_s = timed(lambda: (left @ left, rig.synchronize())[1], 20)
    rows = []
    for ratio in (0.5, 1.0, 2.0):
        products = max(1, round(load_s / ratio / LAYERS / one_s))

        def compute(ticket: LoadTicket | None, *, whole: bool, products: int = products) -> None:
            for layer in range(LAYERS):
                if ticket is not None:
                    ticket.wait_layer(LAYERS - 1 if whole else layer)
                for _ in range(products):
                    torch.mm(left, left)
            rig.synchronize()

        def run(*, whole: bool) -> None:
            compute(rig.load("in order"), whole=whole)
            rig.end()

        compute_s = timed(lambda: compute(None, whole=False), repeats)
        then_s = timed(lambda: run(whole=True), repeats)
        layered_s = timed(lambda: run(whole=False), repeats)
        hideable_s = min(load_s, compute_s) * (LAYERS - 1) / LAYERS
        rows.append(
            {
                "load_over_compute": load_s / compute_s,
                "load_s": load_s,
                "no_load_s": compute_s,
                "load_then_compute_s": then_s,
                "layer_wise_s": layered_s,
                "hidden_share": (then_s - layered_s) / hideable_s,
            }
        )
        print(
            f"load/compute {load_s / compute_s:4.2f}: load {1e3 * load_s:.1f}, none {1e3 * compute_s:.1f}, "
            f"then {1e3 * then_s:.1f}, layer-wise {1e3 * layered_s:.1f} ms; "
            f"hidden {100 * (then_s - layered_s) / hideable_s:.0f} %"
        )
    rig.close()
    return rows


def main() -> int:
    """Parse the command line and run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu tries out this script; its numbers say nothing")
    parser.add_argument("--size-mib", type=int, default=1024, help="bytes of one copy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("skipped: no CUDA device (torch.cuda.is_available() is False)")
        return 0
    started = time.perf_counter()
    status = 0
    if arguments.device != "cpu":
        status = int(pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]))
    size_bytes = arguments.size_mib << 20
    report = {
        "benchmark": "gpu_check",
        "environment": {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if arguments.device != "cpu" else "cpu",
        },
        "tests_exit_status": status,
        "copies": copies(arguments.device, size_bytes, arguments.repeats),
        "overlap": overlap(arguments.device, size_bytes, arguments.repeats),
        "seconds": time.perf_counter() - started,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'FAILED' if status else 'passed'} in {report['seconds']:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
