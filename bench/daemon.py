"""Throughput of the shared daemon over each data plane, beside a raw socket and memcpy in the same run.

    python bench/daemon.py --json bench/results/daemon.json

The daemon is a process of its own. A "put" is begin_write, filling the buffers from memory, and commit;
"put_without_fill" leaves the filling out. A "get" is one read of the batch into memory that was touched
before. The raw socket sends the same bytes in pieces of 1 MiB to another process that answers one byte at
the end; memcpy copies them once, in the same process. The copies of a small batch stay in the
processor's cache, which no other number here has to itself; the largest batch is larger than the cache.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import numpy.typing as npt

from hicache.storage_backends.base import Reservation
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.daemon import DaemonProcess

KIB, MIB = 1 << 10, 1 << 20
BATCHES = ((1, 64 * KIB), (128, 64 * KIB), (128, 256 * KIB), (16, MIB), (64, 4 * MIB))
PLANES = {"shm": "shm,inline", "inline": "inline"}


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="Where the result goes.")
@click.option("--repeats", default=15, help="Measurements per number; median and best are reported.")
def main(path: Path, repeats: int) -> None:
    """Measure and write JSON."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        DaemonProcess(Path(folder), arguments=["--capacity", "1GiB"]) as daemon,
    ):
        clients = {
            plane: GrpcBackend.from_options(Options(address=daemon.address, data_planes=offered))
            for plane, offered in PLANES.items()
        }
        for plane, client in clients.items():
            if client.stats().details["data_plane"] != plane:
                raise SystemExit(f"the data plane {plane} cannot be had here")
        latency = {
            plane: {name: median_us(call, 50 * repeats) for name, call in calls(client).items()}
            for plane, client in clients.items()
        }
        for count, size in BATCHES:
            rows.append(measure(clients, count, size, repeats))
            print(row_text(rows[-1]))
        for client in clients.values():
            client.close()
    for plane, times in latency.items():
        print(f"{plane:>7}:  " + "  ".join(f"{name} {value:.0f} us" for name, value in times.items()))
    result = {"environment": environment(), "repeats": repeats, "latency_us": latency, "batches": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def calls(backend: GrpcBackend) -> dict[str, Callable[[], object]]:
    """Return small calls to time, by name."""
    keys = [f"{i:064x}" for i in range(312)]
    return {"probe_1": lambda: backend.probe(keys[:1]), "probe_312": lambda: backend.probe(keys)}


def measure(clients: Mapping[str, GrpcBackend], count: int, size: int, repeats: int) -> dict[str, Any]:
    """Time each plane, raw socket and memcpy with a batch in turn, so that other load hits them alike."""
    total = count * size
    source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*clients, "raw_socket", "memcpy")}
    with raw_peer(total) as send:
        for _ in range(repeats + 1):
            for plane, client in clients.items():
                target[:] = 0
                rounds[plane].append(put_and_get(client, count, source, target))
            started = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            send(memoryview(source))
            sent = time.perf_counter()
            rounds["memcpy"].append({"copy": copied - started})
            rounds["raw_socket"].append({"send": sent - copied})
    row: dict[str, Any] = {"objects": count, "object_bytes": size}
    for name, taken in rounds.items():
        taken = taken[1:]  # the first warmed up
        row[name] = {what: rate(total, [one[what] for one in taken]) for what in taken[0]}
    copy = row["memcpy"]["copy"]
    for name in (*clients, "raw_socket"):
        for numbers in row[name].values():
            numbers["of_memcpy_median"] = copy["median_ms"] / numbers["median_ms"]
            numbers["of_memcpy_best"] = numbers["best_gb_s"] / copy["best_gb_s"]
    return row


def put_and_get(
    backend: GrpcBackend, count: int, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]
) -> dict[str, float]:
    """Store a batch, read it back and delete it; return the seconds of each step."""
    size = len(source) // count
    keys = [f"bench/{count}/{size}/{i}" for i in range(count)]
    parts = [memoryview(target)[i * size : (i + 1) * size] for i in range(count)]
    began = time.perf_counter()
    held = [one for one in backend.begin_write(keys, [size] * count) if isinstance(one, Reservation)]
    begun = time.perf_counter()
    for index, one in enumerate(held):
        np.copyto(np.frombuffer(one.buffer, dtype=np.uint8), source[index * size : (index + 1) * size])
    filled = time.perf_counter()
    backend.commit(held)
    committed = time.perf_counter()
    sizes = backend.read(keys, parts)
    read = time.perf_counter()
    if len(held) != count or sizes != [size] * count or not np.array_equal(source, target):
        raise SystemExit("the daemon did not give back what was stored")
    backend.delete(keys)
    return {
        "begin": begun - began,
        "commit": committed - filled,
        "put_without_fill": begun - began + committed - filled,
        "put": committed - began,
        "get": read - committed,
    }


def rate(total: int, seconds: Sequence[float]) -> dict[str, float]:
    """Return how fast `total` bytes went."""
    return {
        "median_gb_s": total / statistics.median(seconds) / 1e9,
        "best_gb_s": total / min(seconds) / 1e9,
        "median_ms": statistics.median(seconds) * 1e3,
    }


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
    """Return a line for people: medians in GB/s, and the best in brackets."""
    shown = [(plane, what) for plane in PLANES for what in ("put", "get")]
    shown += [("raw_socket", "send"), ("memcpy", "copy")]
    rates = (
        f"  {name} {what} {row[name][what]['median_gb_s']:.2f} ({row[name][what]['best_gb_s']:.2f})"
        for name, what in shown
    )
    return f"{row['objects']:>4} x {row['object_bytes'] >> 10:>5} KiB:{''.join(rates)}"


if __name__ == "__main__":
    main()
