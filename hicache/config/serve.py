"""Settings of the daemon: flags over the [serve] section of a TOML file over defaults."""

from __future__ import annotations

import enum
import ipaddress
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hicache.config.sizes import ByteSize
from hicache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_YEAR_S = 365 * 86400.0
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65535),
    ("metrics_port", -1, 65535),
    ("capacity", ByteSize(1), ByteSize(1 << 60)),
    ("lease_seconds", 0, _YEAR_S),
    ("reservation_seconds", 0.01, _YEAR_S),
    ("drain_seconds", 0, _YEAR_S),
    ("max_message", ByteSize(4 * KIB), ByteSize(64 * MIB)),
    ("max_calls", 1, 1024),
    ("max_watchers", 1, 1024),
    ("max_waiting", 1, 1 << 20),
    ("max_sessions", 1, 1 << 20),
    ("watch_queue", 1, 1 << 24),
)


class DataPlane(enum.Enum):
    """How an object's bytes travel between daemon and client."""

    SHM = "shm"  # through memory that both map, on one host; for the memory store
    INLINE = "inline"  # in gRPC messages


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the daemon can be told. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 7380  # 0: any free one
    metrics_port: int = 7381  # of the same host; 0: any free one, -1: no metrics
    allow_remote: bool = False  # needed for a host that is not loopback: there is no authentication
    store: str = "memory"
    store_config: Mapping[str, Any] = {}
    capacity: ByteSize = ByteSize(4 * GIB)  # of the memory store
    # Offered to clients, which choose by their own order. Inline is there for every client.
    data_planes: tuple[DataPlane, ...] = (DataPlane.SHM, DataPlane.INLINE)
    lease_seconds: float = 10.0
    lease_bytes: ByteSize | None = None  # protected per session; none: a quarter of the capacity
    reservation_seconds: float = 30.0
    reservation_bytes: ByteSize | None = None  # reserved per session; none: half of the capacity
    max_message: ByteSize = ByteSize(MIB)
    max_object: ByteSize = ByteSize(256 * MIB)
    max_calls: int = 16  # at work at once; more wait
    max_watchers: int = 16
    max_waiting: int = 256  # calls waiting; more are pushed back
    max_sessions: int = 1024
    watch_queue: int = 4096  # changes a watcher may lag behind
    drain_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)} must be within {low}..{high}")
        if DataPlane.INLINE not in self.data_planes:
            raise ConfigError("--data-planes must have inline: it is what clients elsewhere have left")
        if self.max_object < self.max_message:
            raise ConfigError(
                f"--max-object {self.max_object} must be at least --max-message {self.max_message}"
            )
        if not self.allow_remote and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines and the daemon has no "
                f"authentication: anyone there could read, replace and delete what it holds. "
                f"Add --allow-remote if that is wanted"
            )

    @property
    def session_lease_bytes(self) -> int:
        return int(self.capacity) // 4 if self.lease_bytes is None else int(self.lease_bytes)

    @property
    def session_reservation_bytes(self) -> int:
        return int(self.capacity) // 2 if self.reservation_bytes is None else int(self.reservation_bytes)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches `host`. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def load_serve_config(path: Path | None, flags: Mapping[str, object]) -> ServeConfig:
    """Combine defaults, the [serve] section of a TOML file, and flags not None. Raises ConfigError."""
    settings: dict[str, object] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--config {path}: {error}") from error
        section = document.get("serve", {})
        if not isinstance(section, dict):
            raise ConfigError(f"--config {path}: serve must be a section, [serve]")
        settings |= section
    settings |= {name: value for name, value in flags.items() if value is not None}
    if isinstance(planes := settings.get("data_planes"), str):
        given, known = planes.split(","), [plane.value for plane in DataPlane]
        if not set(given) <= set(known):
            raise ConfigError(f"--data-planes {planes!r} must be of {', '.join(known)}, separated by commas")
        settings["data_planes"] = given
    unknown = sorted(set(settings) - set(ServeConfig.__struct_fields__))
    if unknown:
        raise ConfigError(
            f"[serve] has no {', '.join(unknown)}; it has {', '.join(sorted(ServeConfig.__struct_fields__))}"
        )
    try:
        return msgspec.convert(settings, ServeConfig, dec_hook=_decode)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(str(error)) from error
        raise ConfigError(f"[serve] {error}") from error


def _decode(kind: type, value: object) -> object:
    if kind is ByteSize and isinstance(value, (str, int)):
        return ByteSize.parse(value)
    raise ConfigError(f"{value!r} is not a size")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
