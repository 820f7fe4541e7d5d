"""`--kv-events-config`: where KV events go, with SGLang's keys and defaults."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hicache.errors import ConfigError

_COMPONENTS = ("full", "swa", "mamba")
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys are SGLang's but `components`.

    SGLang's routers know no components, and would take a dropped window for a dropped page: only FULL
    is told unless others are asked for.
    """

    publisher: str = "null"  # null | zmq
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None  # None: bind wildcards, ipc and inproc, connect to anything else
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # messages that wait for one slow subscriber
    max_queue_size: int = 100_000  # batches that wait for the publisher
    topic: str = ""
    format: str = "default"
    components: tuple[str, ...] = ("full",)

    def __post_init__(self) -> None:
        if self.publisher not in ("null", "zmq"):
            raise ConfigError(f"{_FLAG}: publisher {self.publisher!r} must be null or zmq")
        if self.format != "default":
            raise ConfigError(f"{_FLAG}: format {self.format!r} is not there; leave it out for SGLang's own")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not value.startswith(_TRANSPORTS):
                raise ConfigError(f"{_FLAG}: {name} {value!r} must begin with {', '.join(_TRANSPORTS)}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_FLAG}: {name} {getattr(self, name)} must be at least 1")
        unknown = [name for name in self.components if name not in _COMPONENTS]
        if unknown or not self.components:
            raise ConfigError(
                f"{_FLAG}: components {', '.join(unknown) or '[]'}: name some of {', '.join(_COMPONENTS)}"
            )

    @property
    def binds(self) -> bool:
        """Whether the endpoint is bound, not connected to."""
        if self.bind is not None:
            return self.bind
        wildcard = any(word in self.endpoint for word in ("*", "::", "0.0.0.0"))
        return wildcard or not self.endpoint.startswith("tcp://")


_FLAG = "--kv-events-config"


def read_kv_events(values: Mapping[str, object]) -> KvEventsConfig | None:
    """Return the settings, or None if nothing is to be published. Raises ConfigError."""
    try:
        config = msgspec.convert(dict(values), KvEventsConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{_FLAG}: {error}") from error
    return None if config.publisher == "null" else config
