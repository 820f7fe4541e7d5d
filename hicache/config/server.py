"""Settings of the reference server: SGLang's flags with its names, defaults and rewrites.

Decides what a combination of flags means; leaves to the server what it is put to work on.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from hicache.config.cache import CacheConfig, HostMemoryMode
from hicache.config.kv_events import KvEventsConfig, read_kv_events
from hicache.errors import ConfigError
from hicache.types import PrefetchPolicy, WritePolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

# Taken out of the extra config for the cache; what is left goes to the backend.
CACHE_KEYS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "prefetch_timeout_max",
)
# SGLang takes these out too; they have no meaning here.
_SGLANG_KEYS = ("hicache_storage_pass_prefix_keys", "tp_lcm_size")


class IoBackend(str, enum.Enum):
    """How pages are copied between device and host; names as in SGLang."""

    KERNEL = "kernel"
    DIRECT = "direct"


class MemLayout(str, enum.Enum):
    """The order of axes in host memory; names as in SGLang."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `hicache launch-server` can be told. Sizes in tokens, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 30000  # 0: any free one
    enable_metrics: bool = False
    drain_seconds: float = 10.0
    kv_events_config: Mapping[str, object] = {}

    model_preset: str = "hybrid"
    layers: str | None = None  # one letter per layer, over the preset
    sliding_window: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    context_length: int = 8192
    seed: int = 0  # of the weights: their version
    device: str = "cpu"

    page_size: int = 64
    max_total_tokens: int = 16384
    max_running_requests: int = 16
    chunked_prefill_size: int = 2048
    swa_full_tokens_ratio: float = 0.8
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    mamba_track_interval: int = 256
    enable_swa_islands: bool = False
    swa_checkpoint_interval: int = 0
    radix_eviction_policy: str = "adaptive"
    radix_eviction_policy_config: Mapping[str, float] = {}
    enable_session_radix_cache: bool = True
    session_timeout: float = 1800.0

    enable_hierarchical_cache: bool = False
    hicache_host_memory_mode: HostMemoryMode = HostMemoryMode.CACHE
    hicache_ratio: float | None = None  # 2.0, or 1.2 where the host is a buffer only
    hicache_size: float = 0.0  # GB; over the ratio
    hicache_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    hicache_io_backend: IoBackend = IoBackend.KERNEL
    hicache_mem_layout: MemLayout = MemLayout.PAGE_FIRST
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    hicache_storage_backend_extra_config: Mapping[str, object] = {}
    file_storage_path: str | None = None

    cache: Mapping[str, object] = {}  # [cache] of the file: CacheConfig's fields that are no flags

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} must be within 0..65535")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError(f"--drain-seconds {self.drain_seconds} must be a number of seconds, 0 or more")
        for name in ("page_size", "max_total_tokens", "max_running_requests", "context_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        if self.hicache_storage_backend and not self.enable_hierarchical_cache:
            raise ConfigError(
                f"--hicache-storage-backend {self.hicache_storage_backend} needs "
                "--enable-hierarchical-cache, since L3 fills and is filled from L2"
            )
        if self.buffer_only and not self.hicache_storage_backend:
            raise ConfigError(
                "--hicache-host-memory-mode buffer_only needs --hicache-storage-backend: the host only "
                "passes pages on to it"
            )
        if self.hicache_storage_backend_extra_config and not self.hicache_storage_backend:
            raise ConfigError("--hicache-storage-backend-extra-config needs --hicache-storage-backend")

    @property
    def buffer_only(self) -> bool:
        return self.hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY

    @property
    def host_ratio(self) -> float:
        """Host pages per device page, by default as in SGLang."""
        if self.hicache_ratio is not None:
            return self.hicache_ratio
        return 1.2 if self.buffer_only else 2.0

    def cache_config(self) -> CacheConfig:
        """Return the cache's part. Raises ConfigError."""
        generic, _ = split_extra_config(self.hicache_storage_backend_extra_config)
        config = _convert(
            {
                "hicache_host_memory_mode": self.hicache_host_memory_mode,
                "hicache_write_policy": self.hicache_write_policy,
                "hicache_storage_prefetch_policy": self.hicache_storage_prefetch_policy,
                "radix_eviction_policy": self.radix_eviction_policy,
                "radix_eviction_policy_config": self.radix_eviction_policy_config,
                "enable_session_radix_cache": self.enable_session_radix_cache,
                "session_timeout": self.session_timeout,
                "chunked_prefill_size": self.chunked_prefill_size,
                "mamba_track_interval": self.mamba_track_interval,
                "swa_checkpoint_interval": self.swa_checkpoint_interval,
                **self.cache,
                **generic,
            },
            CacheConfig,
            "--hicache-storage-backend-extra-config: ",
        )
        config.check_page_size(self.page_size)
        return config

    def storage_options(self) -> dict[str, object]:
        """Return what of the extra config goes to the backend."""
        _, options = split_extra_config(self.hicache_storage_backend_extra_config)
        if self.file_storage_path is not None and self.hicache_storage_backend == "file":
            options.setdefault("file_storage_path", self.file_storage_path)
        return options

    def kv_events(self) -> KvEventsConfig | None:
        """Return where KV events go, None for nowhere. Raises ConfigError."""
        return read_kv_events(self.kv_events_config)

    def rewritten(self) -> ServerConfig:
        """Return the settings as SGLang would put them in force; says what is rewritten or without effect."""
        for idle, switch in self._without_effect():
            logger.warning("%s has no effect without %s", idle, switch)
        io, layout = self.hicache_io_backend, self.hicache_mem_layout
        if self.hicache_storage_backend == "mooncake" and layout is MemLayout.LAYER_FIRST:
            layout = MemLayout.PAGE_FIRST_DIRECT if io is IoBackend.DIRECT else MemLayout.PAGE_FIRST
            logger.info("--hicache-mem-layout is %s: mooncake needs pages in one piece", layout.value)
        if layout is MemLayout.PAGE_FIRST_DIRECT and io is IoBackend.KERNEL:
            io = IoBackend.DIRECT
            logger.info("--hicache-io-backend is direct, as page_first_direct asks for")
        elif layout is MemLayout.PAGE_FIRST and io is IoBackend.DIRECT:
            layout = MemLayout.PAGE_FIRST_DIRECT
            logger.info("--hicache-mem-layout is page_first_direct, as --hicache-io-backend direct asks for")
        policy = self.hicache_write_policy
        if self.buffer_only and policy is WritePolicy.WRITE_BACK:
            policy = WritePolicy.WRITE_THROUGH
            logger.info("--hicache-write-policy is write_through: buffer_only keeps nothing to write back")
        return msgspec.structs.replace(
            self, hicache_io_backend=io, hicache_mem_layout=layout, hicache_write_policy=policy
        )

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that is not its default and of a feature that is off, and what turns that on."""
        features = {
            "enable_session_radix_cache": ("session_timeout",),
            "enable_hierarchical_cache": _OF_L2,
        }
        for switch, names in features.items():
            for name in names if not getattr(self, switch) else ():
                value = getattr(self, name)
                if value != getattr(_DEFAULTS, name):
                    yield (
                        f"{flag(name)} {value.value if isinstance(value, enum.Enum) else value}",
                        flag(switch),
                    )


_OF_L2 = (
    *("hicache_ratio", "hicache_size", "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout"),
    *("hicache_storage_prefetch_policy", "file_storage_path"),
)
_DEFAULTS = ServerConfig()


def server_config(flags: Mapping[str, object]) -> ServerConfig:
    """Combine defaults and flags (those not None). Raises ConfigError naming the flag."""
    given = {name: value for name, value in flags.items() if value is not None}
    return _convert(given, ServerConfig, "")


def load_server_config(path: Path | None, flags: Mapping[str, object]) -> ServerConfig:
    """Combine defaults, a file's [server] and [cache], and flags (those not None). Raises ConfigError."""
    if path is None:
        return server_config(flags)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    sections = {name: document.get(name, {}) for name in ("server", "cache")}
    allowed = {
        "server": set(ServerConfig.__struct_fields__) - {"cache"},
        "cache": set(CacheConfig.__struct_fields__) - set(ServerConfig.__struct_fields__),
    }
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"--config {path}: {name} must be a section, [{name}]")
        if unknown := sorted(set(section) - allowed[name]):
            raise ConfigError(
                f"--config {path}: [{name}] has no {', '.join(unknown)}; "
                f"it has {', '.join(sorted(allowed[name]))}"
            )
    _convert(sections["cache"], CacheConfig, f"--config {path}: [cache] ")
    given = {name: value for name, value in flags.items() if value is not None}
    return server_config({**sections["server"], "cache": sections["cache"], **given})


def split_extra_config(extra: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the cache's keys and the backend's."""
    generic = {k: v for k, v in extra.items() if k in CACHE_KEYS}
    return generic, {k: v for k, v in extra.items() if k not in (*CACHE_KEYS, *_SGLANG_KEYS)}


def read_mapping(text: str, *, flag: str) -> dict[str, object]:
    """Read a JSON object, or `@file` with one (.json) or with TOML (.toml). Raises ConfigError."""
    try:
        if not text.startswith("@"):
            return msgspec.json.decode(text, type=dict[str, object])
        path = Path(text[1:])
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(content)
        return msgspec.json.decode(content, type=dict[str, object])
    except (
        OSError,
        UnicodeDecodeError,
        tomllib.TOMLDecodeError,
        msgspec.DecodeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{flag} {text}: {error}; give a JSON object, or @FILE that ends in .json or .toml"
        ) from error


def flag(name: str) -> str:
    """Return the flag that sets a field."""
    return f"--{name.replace('_', '-')}"


_T = TypeVar("_T")


def _convert(values: Mapping[str, object], kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        if name in values:
            given = values[name]
            shown = given.value if isinstance(given, enum.Enum) else given
            label = flag(name) if name in ServerConfig.__struct_fields__ else f"{where}{name}"
            raise ConfigError(f"{label} {shown!r}: {message}") from error
        raise ConfigError(f"{where}{error}") from error
