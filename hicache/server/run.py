"""From settings to a served port and back: bind, build, serve, drain, flush, report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch
import uvicorn

from hicache.build import TierSizes
from hicache.config.kv_events import KvEventsConfig
from hicache.config.server import ServerConfig, read_mapping, split_extra_config
from hicache.engine.architecture import ReferenceConfig, parse_layers, preset_config, reference_spec
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import Scheduler
from hicache.engine.sizing import device_capacities
from hicache.errors import ConfigError, SpecError
from hicache.registry import available_backends
from hicache.server.app import Service, create_app
from hicache.server.drain import Drain
from hicache.server.engine_thread import EngineThread
from hicache.server.generate import Limits
from hicache.server.metrics import ServerMetrics
from hicache.server.storage import StorageChoice, StorageControl
from hicache.server.tokenizer import MAX_VOCAB
from hicache.spec import ModelSpec
from hicache.tiers.layouts import HostLayout
from hicache.tiers.sizing import host_capacities
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from hicache.server.kv_events import ZmqPublisher

logger = logging.getLogger(__name__)

_STOP_S = 10.0  # for what must end behind the drain: the engine's last step, the executor's threads


@dataclass(slots=True)
class Report:
    """How serving ended. `lost_pages`: dirty pages that no tier below took in time (write_back)."""

    failed: bool = False
    lost_pages: int = 0
    flushed: bool = False
    cut_off: int = 0  # requests that the drain had no time for

    @property
    def text(self) -> str:
        if self.failed:
            return "stopped: the engine has failed, see the log"
        said = ["stopped"]
        if self.cut_off:
            said.append(f"{self.cut_off} requests were cut off")
        if self.lost_pages:
            said.append(f"{self.lost_pages} dirty pages were lost, no tier below took them in time")
        elif self.flushed:
            said.append("every dirty page is written down")
        return "; ".join(said)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises ConfigError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error.strerror or error}; "
            "take another port, or 0 for any free one"
        ) from error
    return listener


def model_config(config: ServerConfig) -> ReferenceConfig:
    """Return the model that the flags describe. Raises ConfigError."""
    preset = preset_config(config.model_preset)
    if config.vocab_size is not None and config.vocab_size > MAX_VOCAB:
        raise ConfigError(f"--vocab-size {config.vocab_size} must be at most {MAX_VOCAB}")
    return replace(
        preset,
        layers=parse_layers(config.layers) if config.layers is not None else preset.layers,
        window=preset.window if config.sliding_window is None else config.sliding_window,
        hidden=preset.hidden if config.hidden_size is None else config.hidden_size,
        vocab=preset.vocab if config.vocab_size is None else config.vocab_size,
        context_length=config.context_length,
        seed=config.seed,
    )


def engine_settings(config: ServerConfig) -> EngineSettings:
    """Return what the engine is built from: pools from flags, policies from flags. Raises ConfigError."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {config.device}: torch {torch.__version__} sees no CUDA device; use --device cpu, "
            "or install a torch built for CUDA"
        )
    model, cache = model_config(config), config.cache_config()
    try:
        spec = reference_spec(model, config.page_size, islands=config.enable_swa_islands)
    except SpecError as error:
        raise ConfigError(f"--page-size {config.page_size}: {error}") from error
    device = device_capacities(
        spec,
        max_total_tokens=config.max_total_tokens,
        swa_full_tokens_ratio=config.swa_full_tokens_ratio,
        mamba_full_memory_ratio=config.mamba_full_memory_ratio,
        max_mamba_cache_size=config.max_mamba_cache_size,
    )
    host = {}
    if config.enable_hierarchical_cache:
        host = host_capacities(
            spec,
            device,
            ratio=config.host_ratio,
            size_gb=config.hicache_size,
            staging_only=config.buffer_only,
        )
    return EngineSettings(
        model=model,
        page_size=config.page_size,
        sizes=TierSizes(device, host),
        cache=cache,
        layout=HostLayout(config.hicache_mem_layout.value),
        device=config.device,
        max_running_requests=config.max_running_requests,
        islands=config.enable_swa_islands,
    )


def open_publisher(config: KvEventsConfig, page_size: int) -> ZmqPublisher:
    """Return a running publisher of KV events. Raises ConfigError."""
    from hicache.server.kv_events import ZmqPublisher

    return ZmqPublisher(config, page_size)


class Server:
    """One server, from settings to its end. The constructor refuses bad settings, binds, then builds.

    serve() is called once. SIGTERM and SIGINT end it if it runs on the main thread; stop() does from
    any thread.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError: settings that cannot work, or a port that is taken."""
        if config.hicache_storage_backend and config.hicache_storage_backend not in available_backends():
            raise ConfigError(
                f"--hicache-storage-backend {config.hicache_storage_backend}: no such backend; there are "
                f"{', '.join(available_backends())}"
            )
        settings = engine_settings(config)
        events = config.kv_events()
        self._config = config
        self._report = Report()
        self._listener = bind(config.host, config.port)
        self._publisher: ZmqPublisher | None = None
        try:
            if events is not None:
                self._publisher = open_publisher(events, config.page_size)
            self._build(settings)
        except BaseException:
            self._listener.close()
            if self._publisher is not None:
                self._publisher.stop()
            raise

    def _build(self, settings: EngineSettings) -> None:
        engines: list[ReferenceEngine] = []

        def make(on_token: Callable[..., None], on_finish: Callable[..., None]) -> Scheduler:
            engines.append(ReferenceEngine(settings, on_token=on_token, on_finish=on_finish))
            return engines[0].scheduler

        self._engine = EngineThread(make, on_failure=self._engine_failed)
        self._reference = engines[0]
        if self._publisher is not None:
            self._reference.scheduler.cache.publish_events(self._publisher)
        self._storage = (
            StorageControl(self._reference.spec, self._reference.executor, self._engine)
            if self._config.enable_hierarchical_cache
            else None
        )
        self._drain = Drain(create_app(self._service()))
        options = uvicorn.Config(
            self._drain,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            # Requests are cut off before; this is for answers that nobody reads.
            timeout_graceful_shutdown=round(self._config.drain_seconds + _STOP_S),
        )
        self._uvicorn = _Uvicorn(options)
        self._uvicorn.on_shutdown = self._cut_off

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve(self, on_ready: Callable[[str], None] = lambda url: None) -> Report:
        """Serve until stopped; calls on_ready(url) once requests are taken. Drains and flushes at the end."""
        self._engine.start()
        url = self.url
        self._uvicorn.on_started = lambda: on_ready(url)
        try:
            if self._storage is not None and self._config.hicache_storage_backend:
                self._storage.start(
                    StorageChoice(self._config.hicache_storage_backend, self._config.storage_options())
                )
            asyncio.run(self._uvicorn.serve(sockets=[self._listener]))
        finally:
            self._listener.close()
            self._stop()
        return self._report

    def stop(self) -> None:
        """Ask serve() to drain and return."""
        self._uvicorn.should_exit = True

    async def _cut_off(self) -> None:
        """Give running requests their time; then say how many are cut off, and end them."""
        drain_s = self._config.drain_seconds
        await asyncio.sleep(drain_s)
        self._report.cut_off = self._drain.cut(
            f"cut off: the server is shutting down, and --drain-seconds {drain_s:g} are over; "
            "send the request again"
        )
        self._engine.cut("the server is shutting down")
        if self._report.cut_off:
            logger.warning(
                "%d requests are cut off: --drain-seconds %g are over", self._report.cut_off, drain_s
            )

    def _stop(self) -> None:
        drain_s = self._config.drain_seconds
        stopped = self._engine.stop(self._flush, timeout_s=drain_s + _STOP_S)
        self._report.failed |= not stopped
        if not stopped:
            logger.error("the engine did not stop within %g s", drain_s + _STOP_S)
            return
        self._reference.close()
        if self._publisher is not None:
            self._publisher.stop()
        if self._storage is not None:
            self._storage.close()

    def _flush(self, scheduler: Scheduler) -> None:
        """Under write_back, L1 and L2 hold the only copies: write them down before they go."""
        write_back = self._config.hicache_write_policy is WritePolicy.WRITE_BACK
        if write_back and scheduler.cache.executor.has_storage:
            self._report.lost_pages = scheduler.cache.flush_dirty(self._config.drain_seconds)
            self._report.flushed = True

    def _engine_failed(self) -> None:
        self._report.failed = True
        self._uvicorn.should_exit = True

    def _service(self) -> Service:
        config, spec = self._config, self._reference.spec
        return Service(
            engine=self._engine,
            storage=self._storage,
            limits=Limits(self._reference.settings.model.vocab, config.context_length),
            model_info=_model_info(config, spec),
            server_info=_server_info(config, self._listener.getsockname()[1], spec)
            | {"kv_events": None if self._publisher is None else self._publisher.described},
            metrics=ServerMetrics() if config.enable_metrics else None,
            executor_counters=self._reference.executor.counters,
            read_choice=_read_choice,
        )


class _Uvicorn(uvicorn.Server):
    """Says when it takes requests."""

    on_started: Callable[[], None] = staticmethod(lambda: None)
    on_shutdown: Callable[[], Coroutine[object, object, None]]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, beside `on_shutdown`, which ends when they have ended."""
        beside = asyncio.create_task(self.on_shutdown())
        try:
            await super().shutdown(sockets)
        finally:
            beside.cancel()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """As uvicorn does, but a signal that was handled is not raised again: the drain is not over."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def _model_info(config: ServerConfig, spec: ModelSpec) -> dict[str, object]:
    return {
        "model_path": spec.model_id,
        "tokenizer_path": "bytes",
        "is_generation": True,
        "weight_version": spec.weight_version,
        "context_length": config.context_length,
        "model_fingerprint": spec.fingerprint,
    }


def _server_info(config: ServerConfig, port: int, spec: ModelSpec) -> dict[str, object]:
    """Every setting as it is in force; of the backend's options only the names: they may hold passwords."""
    shown = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(config).items()}
    options = shown.pop("hicache_storage_backend_extra_config")
    return shown | {
        "port": port,
        "hicache_storage_backend_extra_config_keys": sorted(options),
        "model_fingerprint": spec.fingerprint,
    }


def _read_choice(name: str, extra: object) -> StorageChoice:
    """Read a PUT: the extra config is a JSON text, as SGLang sends it, or an object."""
    if isinstance(extra, str):
        extra = read_mapping(extra, flag="hicache_storage_backend_extra_config_json")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError("hicache_storage_backend_extra_config_json must be a JSON object")
    generic, options = split_extra_config(extra or {})
    if generic:
        raise ConfigError(
            f"{', '.join(sorted(generic))}: set at start with --hicache-storage-backend-extra-config"
        )
    return StorageChoice(name, options)
