"""Where Mooncake's settings come from: extra config, a JSON file, or MOONCAKE_* variables, as in SGLang.

Decides precedence, defaults and units, and what Mooncake itself reads from the environment. Leaves to
the backend what the settings are used for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import msgspec

from hicache.errors import ConfigError

CONFIG_PATH_VARIABLE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
VARIABLES = {
    "master_server_address": "MOONCAKE_MASTER",
    "client_server_address": "MOONCAKE_CLIENT",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
    "check_server": "MOONCAKE_CHECK_SERVER",
    "standalone_storage": "MOONCAKE_STANDALONE_STORAGE",
    "enable_ssd_offload": "MOONCAKE_ENABLE_SSD_OFFLOAD",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
}
ADDRESSES = ("master_server_address", "client_server_address")
UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


class MooncakeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a Mooncake client is set up with; names and defaults as in SGLang."""

    master_server_address: str = ""
    client_server_address: str = ""
    local_hostname: str = "localhost"
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int | str = "4gb"  # after resolve(): bytes
    protocol: str = "rdma"
    device_name: str = ""
    master_metrics_port: int = 9003
    check_server: bool = False
    standalone_storage: bool = False
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"

    @property
    def segment_bytes(self) -> int:
        """Memory this process gives to the store; 0 for a pure client."""
        return parse_size("global_segment_size", self.global_segment_size)

    @property
    def master_host(self) -> str | None:
        """The master's host, or None where the address is not host:port (`etcd://...` for several)."""
        host, _, port = self.master_server_address.rpartition(":")
        return host.strip("[]") if host and port.isdigit() and "//" not in host else None

    @property
    def master_port(self) -> int:
        return int(self.master_server_address.rpartition(":")[2])


def resolve(explicit: Mapping[str, object], environ: Mapping[str, str] | None = None) -> MooncakeSettings:
    """Return the settings in force.

    The base is, in this order: the defaults if `explicit` names a master or client address; the JSON file
    that SGLANG_HICACHE_MOONCAKE_CONFIG_PATH names; the MOONCAKE_* variables. What `explicit` holds wins
    over the base. Two exceptions, as in SGLang: the host name of the environment wins over everything, so
    that nodes can share one config, and a missing protocol is taken from the environment. Raises
    ConfigError naming the setting.
    """
    env = os.environ if environ is None else environ
    base, source = _base(explicit, env)
    for name, variable in (("protocol", "MOONCAKE_PROTOCOL"), ("local_hostname", "LOCAL_HOSTNAME")):
        if env.get(variable):
            base.setdefault(name, env[variable])
    merged = base | dict(explicit)
    for variable in ("LOCAL_HOSTNAME", "MOONCAKE_LOCAL_HOSTNAME"):
        if env.get(variable):
            merged["local_hostname"] = env[variable]
    try:
        settings = msgspec.convert(merged, MooncakeSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"mooncake: settings from {source}: {error}") from error
    _check(settings, source)
    return settings


def prepare_environment(timeout_s: float, environ: MutableMapping[str, str] | None = None) -> None:
    """Give Mooncake's own time-outs values below `timeout_s` where the operator has set none.

    Without them a stopped master or segment owner holds a call for 30 s, and set-up with a dead address
    takes 90 s. Must run before the library is imported, and holds for the whole process.
    """
    env = os.environ if environ is None else environ
    env.setdefault("MC_RPC_TIMEOUT_MS", str(max(100, int(timeout_s * 500))))
    env.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", str(max(1, int(timeout_s))))
    env.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")


def parse_size(name: str, value: int | str) -> int:
    """Return bytes for 4294967296, "4294967296", "4gb" or "512 MB". Raises ConfigError naming `name`."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", str(value).lower())
    if match is None or match[2] not in UNITS:
        raise ConfigError(
            f"mooncake: {name}={value!r} is not a size; write bytes, or a number and {list(UNITS)[1:]}"
        )
    return int(match[1]) * UNITS[match[2]]


def _base(explicit: Mapping[str, object], env: Mapping[str, str]) -> tuple[dict[str, object], str]:
    if any(explicit.get(name) for name in ADDRESSES):
        return {}, "the extra config"
    if path := env.get(CONFIG_PATH_VARIABLE):
        try:
            loaded = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, object])
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"mooncake: {CONFIG_PATH_VARIABLE}={path}: {error}") from error
        return {k: v for k, v in loaded.items() if v is not None}, path
    return {name: env[v] for name, v in VARIABLES.items() if env.get(v)}, "MOONCAKE_* variables"


def _check(settings: MooncakeSettings, source: str) -> None:
    if not settings.master_server_address and not settings.client_server_address:
        raise ConfigError(
            "mooncake: no server is named; set master_server_address (or, with standalone_storage, "
            f"client_server_address) in the extra config, or {VARIABLES['master_server_address']}, "
            f"or {CONFIG_PATH_VARIABLE}"
        )
    if settings.standalone_storage and not settings.client_server_address:
        raise ConfigError(f"mooncake: standalone_storage needs client_server_address (from {source})")
    if not settings.standalone_storage and not settings.master_server_address:
        raise ConfigError(
            f"mooncake: client_server_address (from {source}) is used with standalone_storage=true only; "
            "set that, or master_server_address"
        )
    if settings.metadata_server.lower().startswith(("redis:", "rediss:")):
        raise ConfigError(
            f"mooncake: metadata_server={settings.metadata_server!r}: Mooncake's wheels are built without "
            "Redis metadata and end the process; use P2PHANDSHAKE, http://.../metadata or etcd://..."
        )
    if settings.device_name.strip().startswith("{"):
        raise ConfigError(
            "mooncake: device_name as a table by rank is not supported; name this rank's devices"
        )
    settings.segment_bytes  # noqa: B018  # raises if it is not a size
