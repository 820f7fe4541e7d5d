"""From a storage backend's name and options to an open backend.

Decides which names exist and what a refused option is told; imports a backend only when it is asked
for, so that a client library that is not installed concerns nobody else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.storage_backends.base import StorageBackend

ENTRY_POINT_GROUP = "hicache.storage_backends"

# name: (module, class, extra that installs what it needs)
_BUILT_IN = {
    "memory": ("hicache.storage_backends.memory", "MemoryBackend", None),
    "file": ("hicache.storage_backends.file", "FileBackend", None),
    "redis": ("hicache.storage_backends.redis", "RedisBackend", "redis"),
    "mooncake": ("hicache.storage_backends.mooncake", "MooncakeBackend", "mooncake"),
    "grpc": ("hicache.storage_backends.grpc", "GrpcBackend", None),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a backend class is found. `extra` is ours; `distribution` names somebody else's package."""

    module: str
    attribute: str
    extra: str | None = None
    distribution: str | None = None


def available_backends() -> tuple[str, ...]:
    """Return the names that create_backend knows, built-in ones first. Imports none of them."""
    return tuple(_sources())


def create_backend(name: str, options: Mapping[str, object]) -> StorageBackend:
    """Open a storage backend.

    Raises ConfigError, naming what exists, for an unknown name, an unknown or malformed option, or a
    client library that is not installed. Reaching the system behind it is the backend's own affair.
    """
    source = _sources().get(name)
    if source is None:
        raise ConfigError(f"storage backend {name!r} does not exist; there are {', '.join(_sources())}")
    backend, options_type = _load(name, source)
    settings = _convert(name, options_type, options)
    try:
        opened: StorageBackend = backend.from_options(settings)
    except ImportError as error:
        raise _not_installed(name, source, error) from error
    return opened


def describe_options(name: str) -> dict[str, str]:
    """Return a backend's options and, for each, its type and default as text."""
    source = _sources().get(name)
    if source is None:
        raise ConfigError(f"storage backend {name!r} does not exist; there are {', '.join(_sources())}")
    return _described(_load(name, source)[1])


@cache
def _sources() -> dict[str, _Source]:
    sources = {name: _Source(module, cls, extra) for name, (module, cls, extra) in _BUILT_IN.items()}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist.name if point.dist else "an unnamed distribution"
        if point.name in sources:
            first = sources[point.name].distribution or "HiCache"
            raise ConfigError(
                f"storage backend {point.name!r} is provided by {first} and by {distribution}; "
                f"uninstall or rename one of them"
            )
        sources[point.name] = _Source(point.module, point.attr, distribution=distribution)
    return sources


def _load(name: str, source: _Source) -> tuple[Any, type[msgspec.Struct]]:
    try:
        module = importlib.import_module(source.module)
    except ImportError as error:
        raise _not_installed(name, source, error) from error
    backend = getattr(module, source.attribute, None)
    options_type = getattr(backend, "Options", None) or getattr(module, "Options", None)
    if backend is None or not hasattr(backend, "from_options") or options_type is None:
        raise ConfigError(
            f"storage backend {name!r}: {source.module} must have a class {source.attribute!r} with "
            f"from_options() and a msgspec.Struct Options beside it"
        )
    return backend, options_type


def how_to_install(extra: str) -> str:
    """Return what to do about a missing extra; HiCache is on no package index."""
    return f"in the folder of HiCache: pip install -e '.[{extra}]'"


def _not_installed(name: str, source: _Source, error: ImportError) -> ConfigError:
    if source.extra:
        remedy = how_to_install(source.extra)
    else:
        remedy = f"reinstall {source.distribution or 'hicache-tiered'}"
    return ConfigError(f"storage backend {name!r} needs something that is not installed ({error}); {remedy}")


def _convert(name: str, options_type: type[msgspec.Struct], options: Mapping[str, object]) -> msgspec.Struct:
    known = _described(options_type)
    valid = "; ".join(f"{key}: {what}" for key, what in known.items()) or "none"
    for key in options:
        if key not in known:
            raise ConfigError(f"storage backend {name!r} has no option {key!r}; valid are {valid}")
    try:
        return msgspec.convert(dict(options), options_type)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(
            f"storage backend {name!r}: {_at_option(error, options)}; valid are {valid}"
        ) from error


def _at_option(error: msgspec.ValidationError, options: Mapping[str, object]) -> str:
    """Name the option; its value is left out, for it may be a password."""
    message, _, path = str(error).partition(" - at `$.")
    key = path.rstrip("`").split(".")[0].split("[")[0]
    return f"option {key!r}: {message}" if key in options else str(error)


def _described(options_type: type[msgspec.Struct]) -> dict[str, str]:
    described = {}
    for field in msgspec.structs.fields(options_type):
        plain = isinstance(field.type, type) and not get_args(field.type)  # list[str] is a type in 3.10
        kind = field.type.__name__ if plain else str(field.type)
        if field.default is not msgspec.NODEFAULT:
            kind += f" = {field.default!r}"
        elif field.default_factory is msgspec.NODEFAULT:
            kind += ", required"
        described[field.encode_name] = kind
    return described
