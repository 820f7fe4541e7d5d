"""`hicache serve`: flags to settings, signals to a drain."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hicache.config.outputs import OutputFile, write_ready
from hicache.config.serve import ServeConfig, load_serve_config
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.daemon.server import Daemon
    from hicache.storage_backends.base import StorageBackend

logger = logging.getLogger(__name__)


@click.command(help="Run the shared L3 daemon: one store for any number of replicas, over gRPC.")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with a [serve] section.")
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--allow-remote", is_flag=True, default=None, help="Allow a --host that others can reach.")
@click.option("--port", type=int, help="0 takes any free one.  [7380]")
@click.option("--metrics-port", type=int, help="Prometheus /metrics; 0 takes any free one.  [7381]")
@click.option("--no-metrics", is_flag=True, help="Serve no /metrics.")
@click.option("--capacity", help="Bytes that the memory store may hold, as in 4GiB.  [4GiB]")
@click.option("--store", help="Backend that keeps the objects: memory or any other L3 backend.  [memory]")
@click.option("--store-config", help="Options of that backend: JSON, or @file.")
@click.option("--data-planes", help="How bytes may travel: shm, inline.  [shm,inline]")
@click.option("--lease-seconds", type=float, help="What a probe finds stays that long.  [10]")
@click.option("--lease-bytes", help="Most bytes that one session protects.  [a quarter of the capacity]")
@click.option("--reservation-seconds", type=float, help="A write idle that long is taken back.  [30]")
@click.option("--reservation-bytes", help="Most bytes that one session reserves.  [half of the capacity]")
@click.option("--max-message", help="Data in one message.  [1MiB]")
@click.option("--max-object", help="Largest object.  [256MiB]")
@click.option("--max-calls", type=int, help="Calls at work at once.  [16]")
@click.option("--max-watchers", type=int, help="Watchers at once.  [16]")
@click.option("--max-waiting", type=int, help="Calls that wait; more are pushed back.  [256]")
@click.option("--max-sessions", type=int, help="Clients at once.  [1024]")
@click.option("--watch-queue", type=int, help="Changes that a watcher may lag behind.  [4096]")
@click.option("--drain-seconds", type=float, help="How long running calls may take after SIGTERM.  [10]")
@click.option("--ready-file", type=OutputFile(replaced=True), help="JSON with the ports, when ready.")
def serve(
    config: Path | None, ready_file: Path | None, store_config: str | None, no_metrics: bool, **flags: object
) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    if no_metrics:
        flags["metrics_port"] = -1
    if store_config is not None:
        flags["store_config"] = _read_json(store_config, flag="--store-config")
    settings = load_serve_config(config, flags)
    _warn_if_larger_than_memory(settings)
    _run(settings, ready_file)


def _run(settings: ServeConfig, ready_file: Path | None) -> None:
    from hicache.daemon.heap import keep_freed_memory
    from hicache.daemon.server import Daemon, run

    keep_freed_memory()

    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # whoever cannot wait says it twice
        logger.info("%s: draining for at most %g s", signal.Signals(number).name, settings.drain_seconds)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    def on_ready(daemon: Daemon) -> None:
        if ready_file is not None:
            _write_ready(ready_file, daemon)
        metrics = f", metrics on port {daemon.metrics_port}" if daemon.metrics_port >= 0 else ""
        click.echo(f"listening on {daemon.address}{metrics}")

    drained = run(Daemon(settings, backend=_open_store(settings)), stop, on_ready)
    click.echo(
        f"drained in {drained.seconds:.1f} s: "
        f"{drained.finished} running calls finished, {drained.cut_off} cut off"
    )


def _open_store(settings: ServeConfig) -> StorageBackend | None:
    if settings.store == "memory":
        if settings.store_config:
            raise ConfigError("--store-config is for other stores; memory takes --capacity")
        return None
    from hicache.errors import BackendError
    from hicache.registry import create_backend

    store = create_backend(settings.store, settings.store_config)
    try:
        store.probe(["hicache-is-it-there"])
    except BackendError as error:
        logger.warning("serving misses until --store %s answers: %s", settings.store, error)
    return store


def _write_ready(path: Path, daemon: Daemon) -> None:
    address, port, metrics_port = daemon.address, daemon.port, daemon.metrics_port
    content = {"address": address, "port": port, "metrics_port": metrics_port, "pid": os.getpid()}
    write_ready(path, json.dumps(content))


def _read_json(text: str, *, flag: str) -> Mapping[str, object]:
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {text}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text}: must be a JSON object")
    return value


def _warn_if_larger_than_memory(settings: ServeConfig) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.store == "memory" and settings.capacity > total:
        logger.warning(
            "--capacity %s is more than this machine's memory of %d MiB", settings.capacity, total >> 20
        )
