"""A reference server in this process, on a free port, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hicache.config.server import server_config
from hicache.server.run import Report, Server

_READY_S = 60.0


@dataclass(slots=True)
class Served:
    """A running server; stop() begins its drain, `report` is there once the block has ended."""

    url: str
    stop: Callable[[], None]
    report: Report | None = None


@contextlib.contextmanager
def running_server(**flags: object) -> Iterator[Served]:
    """Serve until the block ends; `flags` are fields of ServerConfig, over a small and quick model."""
    defaults: dict[str, object] = {
        "port": 0,
        "page_size": 16,
        "max_total_tokens": 2048,
        "chunked_prefill_size": 128,
        "context_length": 1024,
        "sliding_window": 32,
        "drain_seconds": 1.0,
    }
    server = Server(server_config(defaults | flags).rewritten())
    ready = threading.Event()
    served = Served(server.url, server.stop)

    def serve() -> None:
        served.report = server.serve(lambda url: ready.set())

    thread = threading.Thread(target=serve, name="served")
    thread.start()
    try:
        if not ready.wait(_READY_S):
            raise TimeoutError(f"the server is not ready after {_READY_S} s")
        yield served
    finally:
        server.stop()
        thread.join()
