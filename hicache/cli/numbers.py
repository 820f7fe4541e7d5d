"""Flags that take several numbers, separated by commas."""

from __future__ import annotations

from typing import TypeVar

from hicache.errors import ConfigError

_EXAMPLES = {int: "96,24", float: "0.32,0.17"}
_N = TypeVar("_N", int, float)


def numbers(flag: str, text: str, kind: type[_N]) -> list[_N]:
    """Read a flag's value. Raises ConfigError."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{flag} {text!r}: write numbers, separated by commas, as in {_EXAMPLES[kind]}"
        ) from error
