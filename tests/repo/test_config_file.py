"""deploy/hicache.toml shows every option with its default, as the programs read it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hicache.config.serve import ServeConfig, load_serve_config

FILE = Path(__file__).parents[2] / "deploy" / "hicache.toml"


def _section(name: str) -> str:
    text = FILE.read_text()
    found = re.search(rf"^\[{name}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no [{name}]"
    return found[1]


def _fields(kind: type[msgspec.Struct]) -> list[str]:
    return list(kind.__struct_fields__)


SECTIONS = [("serve", ServeConfig)]


@pytest.mark.parametrize(("name", "kind"), SECTIONS)
def test_every_option_stands_in_the_file_and_no_other(name: str, kind: type[msgspec.Struct]) -> None:
    """The file is where an operator looks for what can be set; one without a default is a comment."""
    shown = re.findall(r"^(?:# )?([a-z_]+) = ", _section(name), re.MULTILINE)
    assert sorted(shown) == sorted(_fields(kind))


def test_the_daemon_reads_the_file_as_its_defaults() -> None:
    """A default that the file states wrongly misleads whoever copies it."""
    assert load_serve_config(FILE, {}) == ServeConfig()
