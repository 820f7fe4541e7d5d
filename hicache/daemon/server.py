"""The life of a daemon: bind, serve, drain. Owns every thread it starts and the store it is given."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass

import grpc
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hicache.clock import Clock, SystemClock
from hicache.config.serve import ServeConfig, is_loopback
from hicache.daemon.edge import Edge
from hicache.daemon.events import ChangeKind, EventHub
from hicache.daemon.misses import Fates
from hicache.daemon.plane import open_plane
from hicache.daemon.service import CacheService
from hicache.daemon.sessions import Sessions
from hicache.daemon.store import SharedStore, open_memory
from hicache.daemon.writes import Writes
from hicache.errors import ConfigError
from hicache.metrics import DaemonMetrics
from hicache.rpc import wire
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.seldom import Seldom
from hicache.storage_backends.base import StorageBackend

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 1.0
# A peer that answers no ping for so long is gone; its streams end and what it reserved comes back.
_PING_EVERY_MS, _PING_TIMEOUT_MS = 10_000, 5_000
# What is left for gRPC when every call has been answered: to send the last replies.
_LAST_REPLIES_S = 1.0


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of the calls that were running when the drain began."""

    finished: int
    cut_off: int
    seconds: float


class Daemon:
    """One serving daemon. start() once, then drain(), from any thread; draining again changes nothing."""

    def __init__(
        self, config: ServeConfig, *, backend: StorageBackend | None = None, clock: Clock | None = None
    ) -> None:
        """Serve `backend`, which the daemon then owns, or an embedded memory store if there is none."""
        clock = clock or SystemClock()
        self._config = config
        self.metrics = DaemonMetrics()
        fates = Fates()
        self._hub = EventHub(
            max_watchers=config.max_watchers,
            queue_limit=config.watch_queue,
            count=self._count_changes,
            note=fates.note,
        )
        self._store = (
            open_memory(config, self._hub, clock=clock)
            if backend is None
            else SharedStore(backend, self._hub, lease_seconds=config.lease_seconds, reports=False)
        )
        self._sessions = Sessions(
            clock=clock,
            limit=config.max_sessions,
            lease_bytes=config.session_lease_bytes,
            reservation_bytes=config.session_reservation_bytes,
        )
        self._writes = Writes(self._store, clock=clock, reservation_seconds=config.reservation_seconds)
        self._edge = Edge(self.metrics)
        self._service = CacheService(
            config,
            self._store,
            hub=self._hub,
            sessions=self._sessions,
            writes=self._writes,
            metrics=self.metrics,
            edge=self._edge,
            clock=clock,
            fates=fates,
        )
        self._plane = open_plane(
            config,
            self._store.backend,
            sessions=self._sessions,
            writes=self._writes,
            answers=self._service.local_answers(),
            clock=clock,
        )
        if self._plane is not None:
            self._service.use(self._plane)
        self._declare_gauges()
        self._health = health.HealthServicer()
        self._server = self._make_server()
        self._metrics_server: tuple[object, threading.Thread] | None = None
        self._stopping = threading.Event()
        self._housekeeper = threading.Thread(target=self._keep_house, name="hicache-housekeeper", daemon=True)
        self._drain_lock = threading.Lock()  # held for a whole drain
        self._drained: Drained | None = None
        self.port = 0
        self.metrics_port = -1

    @property
    def address(self) -> str:
        """host:port that clients dial, once started."""
        return _join(self._config.host, self.port)

    @property
    def epoch(self) -> int:
        return self._service.epoch

    def start(self) -> None:
        """Bind and serve. Raises ConfigError, with nothing left running, if a port cannot be had."""
        config = self._config
        if not is_loopback(config.host):
            logger.warning(
                "listening on %s, which other machines can reach; there is no authentication: "
                "whoever reaches it can read, replace and delete everything",
                config.host,
            )
        try:
            _check_free(config.host, config.port, flag="--port")
            self.port = self._bind()
            self._start_metrics()
        except ConfigError:
            self._server.stop(None)
            self._close_store()
            raise
        self._server.start()
        self._housekeeper.start()
        for name in ("", wire.SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def drain(self) -> Drained:
        """Say NOT_SERVING, refuse new calls, let running ones finish for the drain time, close the store."""
        with self._drain_lock:
            if self._drained is None:
                self._drained = self._drain()
            return self._drained

    def _drain(self) -> Drained:
        began = time.monotonic()
        # gRPC's own grace comes last and is short: a call that arrives as it begins hangs until its end.
        self._edge.close()
        self._health.enter_graceful_shutdown()
        self._hub.close()  # watchers would never end by themselves
        finished, cut_off = self._edge.finish(self._config.drain_seconds)
        self._server.stop(None if cut_off else _LAST_REPLIES_S).wait()
        self._stopping.set()
        self._housekeeper.join()
        if self._metrics_server is not None:
            server, thread = self._metrics_server
            server.shutdown()  # type: ignore[attr-defined]  # a WSGIServer
            server.server_close()  # type: ignore[attr-defined]
            thread.join()
        self._close_store()
        return Drained(finished=finished, cut_off=cut_off, seconds=time.monotonic() - began)

    def _close_store(self) -> None:
        if self._plane is not None:
            self._plane.close()
        self._writes.close()
        self._store.backend.close()

    def housekeep(self) -> None:
        """Take back what lapsed. Called every second; tests with a manual clock call it themselves."""
        self._writes.expire()
        if self._plane is not None:
            self._plane.grants.expire()
        self._sessions.drop_idle()

    def _keep_house(self) -> None:
        said = Seldom()
        while not self._stopping.wait(_HOUSEKEEPING_S):
            try:
                self.housekeep()
            except Exception:
                if (more := said.due()) is not None:
                    logger.exception("housekeeping failed; it is tried again%s", more)

    def _make_server(self) -> grpc.Server:
        config = self._config
        threads = config.max_calls + config.max_watchers
        most = int(config.max_message) + wire.MAX_CONTROL_BYTES
        server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="hicache-call"),
            options=[
                ("grpc.so_reuseport", 0),  # two daemons on one port would share the clients at random
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", most),
                ("grpc.keepalive_time_ms", _PING_EVERY_MS),
                ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ],
            maximum_concurrent_rpcs=threads + config.max_waiting,
        )
        server.add_generic_rpc_handlers((self._service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (
            pb.DESCRIPTOR.services_by_name["Cache"].full_name,
            health.SERVICE_NAME,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        return server

    def _bind(self) -> int:
        address = _join(self._config.host, self._config.port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        if not port:
            raise ConfigError(f"cannot listen on {address}")
        return int(port)

    def _start_metrics(self) -> None:
        config = self._config
        if config.metrics_port < 0:
            return
        _check_free(config.host, config.metrics_port, flag="--metrics-port")
        try:
            server, thread = prometheus_client.start_http_server(
                config.metrics_port, addr=config.host, registry=self.metrics.registry
            )
        except OSError as error:
            raise ConfigError(f"--metrics-port {config.metrics_port}: {error.strerror}") from error
        self._metrics_server = server, thread
        self.metrics_port = server.server_port

    def _count_changes(self, kind: ChangeKind, number: int) -> None:
        self.metrics.changes.labels(kind.value).inc(number)

    def _declare_gauges(self) -> None:
        backend, plane = self._store.backend, self._plane
        self.metrics.watch_gauges(
            {
                "objects": ("Objects in the store, -1 if it cannot tell", lambda: backend.stats().objects),
                "used_bytes": ("Bytes of objects", lambda: backend.stats().used_bytes),
                "capacity_bytes": ("Most bytes the store holds", lambda: backend.stats().capacity_bytes),
                "sessions": ("Clients known", lambda: len(self._sessions)),
                "leased_bytes": ("Bytes protected for sessions, each counted", self._sessions.leased),
                "reservations": ("Writes begun and not ended", lambda: len(self._writes)),
                "reserved_bytes": ("Bytes of those", self._writes.reserved_bytes),
                "lapsed_reservations": ("Writes taken back since the start", lambda: self._writes.lapsed),
                "attached": ("Clients that have the arena mapped", lambda: plane.attached if plane else 0),
                "arena_bytes": ("Shared memory taken", lambda: plane.ready_bytes if plane else 0),
                "lapsed_grants": ("Reads not done in time", lambda: plane.grants.lapsed if plane else 0),
                "watchers": ("Watchers connected", lambda: self._hub.watchers),
                "lost_changes": (
                    "Changes that slow watchers missed",
                    lambda: self._hub.lost,
                ),
            }
        )


def run(daemon: Daemon, stop: threading.Event, on_ready: Callable[[Daemon], None]) -> Drained:
    """Serve until `stop` is set, then drain. Raises ConfigError if it cannot start."""
    daemon.start()
    try:
        on_ready(daemon)
        stop.wait()
    finally:
        drained = daemon.drain()
    return drained


def _check_free(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError, in one line, if the port cannot be bound; the libraries say it less well."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"{flag} {port} of host {host} cannot be had: {error.strerror or error}") from error


def _join(host: str, port: int) -> str:
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
