"""`linker_extra_config` of SGLang's linker config: the keys of the storage extra config, and ours."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hicache.errors import ConfigError
from hicache.integrations.sglang.settings import Settings, read_settings


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long SGLang's scheduler waits and how much is kept on the way. Times are seconds."""

    lookup_timeout_s: float = 1.0  # most that lookups and loads of one scheduler tick wait, together
    retry_s: float = 2.0  # a request whose prefix was not all there is looked up again after this
    promise_s: float = 30.0  # verified pages wait this long for a request that is not looked up again
    transit_bytes: int = 1 << 30  # most host memory of pages between store and device
    layer_timeout_s: float = 10.0  # a layer that is not on the device by then fails its requests
    offload_share: float = 0.25  # most of the device pool that waits to be stored
    offload_s: float = 30.0  # what waited longer is not stored

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"linker_extra_config: {name}={value} must be positive")
        if self.offload_share > 1:
            raise ConfigError(f"linker_extra_config: offload_share={self.offload_share} is more than all")


def read_linker_settings(extra_config: Mapping[str, object] | None) -> tuple[Settings, Bounds]:
    """Return the settings in SGLang's linker config.

    Raises ConfigError for a key that neither we nor the backend know, and for a value that cannot be.
    """
    given = dict(extra_config or {})
    own = {name: given.pop(name) for name in Bounds.__struct_fields__ if name in given}
    try:
        bounds = msgspec.convert(own, Bounds)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"linker_extra_config: {error}") from error
    try:
        return read_settings(given), bounds
    except ConfigError as error:
        own_keys = ", ".join(sorted(Bounds.__struct_fields__))
        raise ConfigError(f"linker_extra_config: {error}; keys of the linker alone are {own_keys}") from None
