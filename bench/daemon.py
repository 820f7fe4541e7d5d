"""Throughput of the shared daemon over loopback, beside a raw socket and memcpy in the same run.

    python bench/daemon.py --json bench/results/daemon.json

The daemon is a process of its own. A "put" is begin_write and commit of a batch (filling the buffers
is not counted), a "get" is one read of the batch into memory that was touched before. The raw socket
sends the same bytes in messages of 1 MiB to another process that answers one byte at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
    """Return GB/s of put, get, raw socket and memcpy for a batch, and put's two calls in ms."""
    total = count * size
    source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    parts = [memoryview(target)[i * size : (i + 1) * size] for i in range(count)]
    keys = [f"bench/{count}/{size}/{i}" for i in range(count)]
    begins, commits, reads, copies = [], [], [], []
    for repeat in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
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
        copied = time.perf_counter()
        np.copyto(target, source)
        copied = time.perf_counter() - copied
        backend.delete(keys)
        if repeat:
            begins.append(begun - started)
            commits.append(committed - filled)
            reads.append(read - committed)
            copies.append(copied)
    puts = [a + b for a, b in zip(begins, commits, strict=True)]
    return {
        "objects": count,
        "object_bytes": size,
        "put_gb_s": gb_s(total, puts),
        "put_begin_ms": statistics.median(begins) * 1e3,
        "put_commit_ms": statistics.median(commits) * 1e3,
        "get_gb_s": gb_s(total, reads),
        "get_ms": statistics.median(reads) * 1e3,
        "raw_socket_gb_s": gb_s(total, raw_socket(total, repeats)),
        "memcpy_gb_s": gb_s(total, copies),
    }


def raw_socket(total: int, repeats: int) -> list[float]:
    """Return the seconds that `total` bytes took over TCP loopback into another process's memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("spawn").Process(
            target=_drain, args=(server.getsockname()[1], total, repeats + 1)
        )
        child.start()
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytes(total))
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            for at in range(0, total, MIB):
                connection.sendall(data[at : at + MIB])
            connection.recv(1)
            seconds.append(time.perf_counter() - started)
    child.join()
    return seconds[1:]


def _drain(port: int, total: int, times: int) -> None:
    target = memoryview(bytearray(total))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(times):
            received = 0
            while received < total:
                received += connection.recv_into(target[received:])
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


def gb_s(total: int, seconds: list[float]) -> float:
    """Return the median throughput."""
    return total / statistics.median(seconds) / 1e9


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


def row_text(row: dict[str, object]) -> str:
    """Return a line for people."""
    text = f"{row['objects']:>4} x {int(row['object_bytes']) >> 10:>5} KiB"
    return text + "".join(
        f"  {name} {row[f'{name}_gb_s']:.2f} GB/s" for name in ("put", "get", "raw_socket", "memcpy")
    )


if __name__ == "__main__":
    main()
