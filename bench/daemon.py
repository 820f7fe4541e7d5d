"""Throughput of the shared daemon over loopback, beside a raw socket and memcpy in the same run.

    python bench/daemon.py --json bench/results/daemon.json

The daemon is a process of its own. A "put" is begin_write and commit of a batch (filling the buffers
is not counted), a "get" is one read of the batch into memory that was touched before. The raw socket
sends the same bytes in pieces of 1 MiB to another process that answers one byte at the end.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np

from hicache.storage_backends.base import Reservation
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.daemon import DaemonProcess

KIB, MIB = 1 << 10, 1 << 20
BATCHES = ((1, 64 * KIB), (128, 64 * KIB), (128, 256 * KIB), (16, MIB))


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="Where the result goes.")
@click.option("--repeats", default=15, help="Measurements per number; the median is reported.")
def main(path: Path, repeats: int) -> None:
    """Measure and write JSON."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        DaemonProcess(Path(folder), arguments=["--capacity", "1GiB"]) as daemon,
    ):
        backend = GrpcBackend.from_options(Options(address=daemon.address))
        latency = {name: median_us(call, 50 * repeats) for name, call in calls(backend).items()}
        for count, size in BATCHES:
            rows.append(measure(backend, count, size, repeats))
            print(row_text(rows[-1]))
        backend.close()
    print("  ".join(f"{name} {value:.0f} us" for name, value in latency.items()))
    result = {"environment": environment(), "repeats": repeats, "latency_us": latency, "batches": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def calls(backend: GrpcBackend) -> dict[str, Callable[[], object]]:
    """Return small calls to time, by name."""
    keys = [f"{i:064x}" for i in range(312)]
    return {"probe_1": lambda: backend.probe(keys[:1]), "probe_312": lambda: backend.probe(keys)}


def measure(backend: GrpcBackend, count: int, size: int, repeats: int) -> dict[str, object]:
    """Time put, get, raw socket and memcpy of a batch in turn, so that other load hits them alike."""
    total = count * size
    source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    parts = [memoryview(target)[i * size : (i + 1) * size] for i in range(count)]
    keys = [f"bench/{count}/{size}/{i}" for i in range(count)]
    seconds: dict[str, list[float]] = {
        name: [] for name in ("begin", "commit", "get", "raw_socket", "memcpy")
    }
    with raw_peer(total) as send:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            held = [one for one in backend.begin_write(keys, [size] * count) if isinstance(one, Reservation)]
            begun = time.perf_counter()
            for index, one in enumerate(held):
                one.buffer[:] = memoryview(source)[index * size : (index + 1) * size]
            filled = time.perf_counter()
            backend.commit(held)
            committed = time.perf_counter()
            sizes = backend.read(keys, parts)
            read = time.perf_counter()
            if len(held) != count or sizes != [size] * count or not np.array_equal(source, target):
                raise SystemExit("the daemon did not give back what was stored")
            started = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            send(memoryview(source))
            sent = time.perf_counter()
            backend.delete(keys)
            for name, took in (
                ("begin", begun - began),
                ("commit", committed - filled),
                ("get", read - committed),
                ("memcpy", copied - started),
                ("raw_socket", sent - copied),
            ):
                seconds[name].append(took)
    seconds = {name: took[1:] for name, took in seconds.items()}  # the first warmed up
    seconds["put"] = [a + b for a, b in zip(seconds["begin"], seconds["commit"], strict=True)]
    rates = {
        name: {
            "median_gb_s": total / statistics.median(took) / 1e9,
            "best_gb_s": total / min(took) / 1e9,
            "median_ms": statistics.median(took) * 1e3,
        }
        for name, took in seconds.items()
    }
    return {"objects": count, "object_bytes": size, **rates}


@contextlib.contextmanager
def raw_peer(total: int) -> Iterator[Callable[[memoryview], None]]:
    """Give a function that sends `total` bytes over TCP loopback into another process's memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("spawn").Process(
            target=_drain, args=(server.getsockname()[1], total)
        )
        child.start()
        connection, _ = server.accept()

    def send(data: memoryview) -> None:
        for at in range(0, total, MIB):
            connection.sendall(data[at : at + MIB])
        connection.recv(1)

    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield send
    child.join()


def _drain(port: int, total: int) -> None:
    target = memoryview(bytearray(total))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            received = 0
            while received < total:
                got = connection.recv_into(target[received:])
                if not got:
                    return
                received += got
            connection.sendall(b"x")


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in microseconds."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def environment() -> dict[str, object]:
    """Return what the numbers depend on."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "kernel": platform.release(),
    }


def row_text(row: dict[str, Any]) -> str:
    """Return a line for people: medians, and the best in brackets."""
    rates = (
        f"  {name} {row[name]['median_gb_s']:.2f} ({row[name]['best_gb_s']:.2f})"
        for name in ("put", "get", "raw_socket", "memcpy")
    )
    return f"{row['objects']:>4} x {row['object_bytes'] >> 10:>5} KiB, GB/s:{''.join(rates)}"


if __name__ == "__main__":
    main()
