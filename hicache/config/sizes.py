"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from hicache.errors import ConfigError

_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


class ByteSize(int):
    """A number of bytes; its text form is what `parse` reads."""

    @classmethod
    def parse(cls, text: str | int) -> ByteSize:
        """Read `4GiB`, `1.5 GB`, `4096` (bytes). Raises ConfigError, which names the units."""
        if isinstance(text, int) and not isinstance(text, bool):
            size = float(text)
        else:
            found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
            unit = found and _UNITS.get(found[2] or "B")
            if not found or not unit:
                raise ConfigError(
                    f"{text!r} is not a size; write a number and one of {', '.join(_UNITS)}, as in 4GiB"
                )
            size = float(found[1]) * unit
        if size < 0:
            raise ConfigError(f"{text!r} is not a size: it is negative")
        return cls(size)

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self and self % _UNITS[unit] == 0:
                return f"{self // _UNITS[unit]}{unit}"
        return f"{int(self)}B"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
