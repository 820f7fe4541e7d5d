"""`--hicache-storage-backend-extra-config`: what of it is ours, and what goes to the storage backend."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hicache.errors import ConfigError
from hicache.registry import describe_options

# SGLang reads these itself and passes them on.
_SGLANG_KEYS = ("backend_name", "module_path", "class_name", "interface_v1")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Our keys. Any other key is an option of `backend`, as `address` is of grpc."""

    backend: str = "grpc"  # any name that hicache.registry knows
    backend_options: dict[str, object] = {}  # its options; those given beside `backend` go here too
    weight_version: str = ""  # names the weights; without it L3 stays off
    model_id: str = ""  # instead of the served model name, where replicas serve one model under two names
    identity: dict[str, str] = {}  # whatever else tells two models apart that SGLang names alike
    prefetch_timeout_max: float = 30.0  # seconds any one call may take, several reads included
    staged_bytes: int = 512 << 20  # most memory of sidecar pages whose KV has not come yet
    staged_seconds: float = 30.0  # how long they wait for it
    held_bytes: int = 512 << 20  # most memory of sidecar pages that were read with their KV

    def __post_init__(self) -> None:
        for name in ("prefetch_timeout_max", "staged_bytes", "staged_seconds", "held_bytes"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"extra config: {name}={value} must be positive")


def read_settings(extra_config: Mapping[str, object] | None) -> Settings:
    """Return the settings in SGLang's extra config.

    Raises ConfigError, naming what exists, for a key that neither we nor the backend know, for a value
    of the wrong type, and for an unknown backend.
    """
    given = {key: value for key, value in (extra_config or {}).items() if key not in _SGLANG_KEYS}
    own = {field.encode_name for field in msgspec.structs.fields(Settings)}
    options = {key: given.pop(key) for key in list(given) if key not in own}
    try:
        settings = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"extra config: {error}") from error
    if settings.backend != "file":
        options.pop("file_storage_path", None)  # SGLang adds it for --file-storage-path, whatever the backend
    known = describe_options(settings.backend)
    for key in options:
        if key not in known:
            raise ConfigError(
                f"extra config: no key {key!r}; valid are {', '.join(sorted(own))}, and for backend "
                f"{settings.backend!r} {', '.join(sorted(known))}"
            )
    return msgspec.structs.replace(settings, backend_options={**settings.backend_options, **options})
