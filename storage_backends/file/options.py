"""What `file` can be told, by option or by the environment variables that SGLang reads.

The directory: the variable wins over the option, as in SGLang. Everything else: the option wins.
"""

from __future__ import annotations

import enum
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hicache.config import env
from hicache.config.sizes import ByteSize
from hicache.errors import ConfigError

_PREFIX = "SGLANG_HICACHE_FILE_BACKEND_"


class Fsync(str, enum.Enum):
    """What is forced to the disk before an object is visible. A crash of a process needs none of it."""

    NEVER = "never"  # after a power loss recent objects may be damaged: readers refuse those
    DATA = "data"  # the object's bytes
    FULL = "full"  # the bytes and the directory entry


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None means: the environment variable, else the default. Sizes: 4096, 200G, 1Gi, 4GiB; 0 is no limit."""

    file_storage_path: str | None = None  # SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR wins over it
    max_size: int | str | None = None  # bytes of objects in the directory; 0
    min_free_space: int | str | None = None  # bytes to leave free on the filesystem; 0
    eviction_ratio: float | None = None  # of max_size: how far an eviction goes; 0.9
    fsync: Fsync = Fsync.NEVER
    lease_s: float = 10.0  # how long an object probed or read here is safe from eviction here
    reservation_ttl_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Options and environment, resolved. Sizes in bytes, 0 is no limit."""

    directory: Path
    is_default_directory: bool
    max_bytes: int
    min_free_bytes: int
    eviction_ratio: float
    fsync: Fsync
    lease_s: float
    reservation_ttl_s: float


def resolve(options: Options) -> Settings:
    """Put options and environment together. Raises ConfigError naming the setting that is wrong."""
    if options.lease_s < 0 or options.reservation_ttl_s <= 0:
        raise ConfigError(
            f"file: lease_s={options.lease_s} must not be negative, "
            f"reservation_ttl_s={options.reservation_ttl_s} must be positive"
        )
    path = env.read(_PREFIX + "STORAGE_DIR") or options.file_storage_path
    return Settings(
        directory=Path(path) if path else Path(tempfile.gettempdir()) / "hicache",
        is_default_directory=not path,
        max_bytes=_size("max_size", options.max_size, "MAX_SIZE"),
        min_free_bytes=_size("min_free_space", options.min_free_space, "MIN_FREE_SPACE"),
        eviction_ratio=_ratio(options.eviction_ratio),
        fsync=options.fsync,
        lease_s=options.lease_s,
        reservation_ttl_s=options.reservation_ttl_s,
    )


def _size(name: str, value: int | str | None, variable: str) -> int:
    if value is None:
        name = _PREFIX + variable
        value = env.read(name)
    if value is None:
        return 0
    # SGLang's suffixes, 200G and 1Gi, are ours without the B.
    short = re.fullmatch(r"\s*([\d.]+)\s*([kKMGT]i?)\s*", str(value))
    try:
        return ByteSize.parse(f"{short[1]}{short[2][0].upper()}{short[2][1:]}B" if short else value)
    except ConfigError as error:
        raise ConfigError(f"file: {name}={value!r}: {error}") from error


def _ratio(value: float | None) -> float:
    name = "eviction_ratio"
    text = None
    if value is None:
        name = _PREFIX + "EVICTION_RATIO"
        text = env.read(name)
    try:
        ratio = 0.9 if value is None and text is None else float(text if value is None else value)  # type: ignore[arg-type]
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise ConfigError(f"file: {name}={text if value is None else value} must be above 0 and at most 1")
    return ratio
