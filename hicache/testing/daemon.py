"""A daemon for tests: in this process on a free port, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc

from hicache.clock import Clock
from hicache.config.serve import load_serve_config
from hicache.daemon.server import Daemon
from hicache.rpc import wire
from hicache.rpc.v1 import cache_pb2, cache_pb2_grpc
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.services import HOST, Service

BOUND_S = 60.0  # of calls and waits; far more than any takes


class DaemonProcess(Service):
    """`hicache serve` as a child process; `arguments` are further flags."""

    executable = "hicache"

    def _command(self) -> list[str]:
        return [
            str(Path(sys.executable).with_name(self.executable)),
            *("serve", "--host", HOST, "--port", str(self.port), "--no-metrics"),
        ]


@contextlib.contextmanager
def running_daemon(
    *, backend: StorageBackend | None = None, clock: Clock | None = None, **settings: object
) -> Iterator[Daemon]:
    """Serve in this process on free ports until the block ends; `settings` are those of ServeConfig."""
    flags = {"port": 0, "metrics_port": -1, "capacity": "64MiB", "drain_seconds": 5.0} | settings
    daemon = Daemon(load_serve_config(None, flags), backend=backend, clock=clock)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.drain()


def connect(address: str, **options: object) -> GrpcBackend:
    """A backend whose calls have the time that a busy machine may need; `options` are those of Options."""
    return GrpcBackend.from_options(Options(**{"address": address, "timeout_s": BOUND_S, **options}))  # type: ignore[arg-type]


@contextlib.contextmanager
def generated_client(address: str) -> Iterator[cache_pb2_grpc.CacheStub]:
    """A client made of the generated code alone, as in another language."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]  # generated


def hello(stub: cache_pb2_grpc.CacheStub, **fields: object) -> cache_pb2.HelloReply:
    """Open a session; `fields` are those of HelloRequest that matter."""
    request = cache_pb2.HelloRequest(
        protocol_version=wire.PROTOCOL_VERSION, data_planes=[cache_pb2.DATA_PLANE_INLINE]
    )
    for name, value in fields.items():
        setattr(request, name, value)
    reply: cache_pb2.HelloReply = stub.Hello(request, timeout=BOUND_S)
    return reply


def begin(
    stub: cache_pb2_grpc.CacheStub, session: int, objects: Mapping[str, int]
) -> cache_pb2.BeginWriteReply:
    """Reserve room for objects of the given sizes."""
    request = cache_pb2.BeginWriteRequest(session=session, keys=list(objects), sizes=list(objects.values()))
    reply: cache_pb2.BeginWriteReply = stub.BeginWrite(request, timeout=BOUND_S)
    return reply


def present(stub: cache_pb2_grpc.CacheStub, session: int, *keys: str) -> list[int]:
    """Return a Probe's flags."""
    return list(stub.Probe(cache_pb2.ProbeRequest(session=session, keys=keys), timeout=BOUND_S).present)


def status(call: Callable[[], object]) -> grpc.StatusCode:
    """Return the status that a call fails with; AssertionError if it does not fail."""
    try:
        call()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    raise AssertionError("the call did not fail")


def poll(condition: Callable[[], bool]) -> None:
    """Wait until a condition of the other side holds. Raises AssertionError after BOUND_S."""
    pause = threading.Event()
    deadline = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition did not come true in {BOUND_S:g} s")
        pause.wait(0.01)
