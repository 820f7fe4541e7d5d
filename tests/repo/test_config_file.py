"""deploy/hicache.toml shows every option with its default, as the programs read it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hicache.config.cache import CacheConfig
from hicache.config.serve import ServeConfig, load_serve_config
from hicache.config.server import ServerConfig, load_server_config
from hicache.errors import ConfigError
from hicache.registry import available_backends, describe_options

FILE = Path(__file__).parents[2] / "deploy" / "hicache.toml"
OWN_OF_CACHE = set(CacheConfig.__struct_fields__) - set(ServerConfig.__struct_fields__)
SECTIONS = {
    "serve": set(ServeConfig.__struct_fields__),
    "server": set(ServerConfig.__struct_fields__) - {"cache"},
    "cache": OWN_OF_CACHE,
}


def _section(header: str) -> str:
    """The lines below a header, up to the next header or rule."""
    pattern = rf"^{header}\n(.*?)(?=^(?:# )?\[|^# ---|\Z)"
    found = re.search(pattern, FILE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"no {header}"
    return found[1]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_option_stands_in_the_file_and_no_other(name: str) -> None:
    """The file is where an operator looks for what can be set; one without a plain default is a comment."""
    shown = re.findall(r"^(?:# )?([a-z_0-9]+) = ", _section(rf"\[{name}\]"), re.MULTILINE)
    assert sorted(shown) == sorted(SECTIONS[name])


@pytest.mark.parametrize("name", available_backends())
def test_every_option_of_a_backend_stands_in_the_file_with_its_default(name: str) -> None:
    """A backend is configured through one mapping; nobody finds its keys by reading code."""
    lines = re.findall(r"^# ([a-z_]+) = (none|\S+)", _section(rf"# \[{name}\]"), re.MULTILINE)
    words = {"None": "none", "True": "true", "False": "false"}
    expected = {}
    for option, what in describe_options(name).items():
        default = what.rpartition(" = ")[2].replace("'", '"')
        member = re.search(r": (\".*\")>$", default)  # of an enum
        expected[option] = member[1] if member else words.get(default, default)
    assert dict(lines) == expected


def test_the_daemon_reads_the_file_as_its_defaults() -> None:
    """A default that the file states wrongly misleads whoever copies it."""
    assert load_serve_config(FILE, {}) == ServeConfig()


def test_the_server_reads_the_file_as_its_defaults() -> None:
    """The same for launch-server, the cache's settings included."""
    config = load_server_config(FILE, {})
    assert config.cache_config() == CacheConfig()
    assert msgspec.structs.replace(config, cache={}) == ServerConfig()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[server]\npage_sice = 16\n", r"\[server\] has no page_sice; it has .*page_size"),
        ("[cache]\nchunked_prefill_size = 512\n", r"\[cache\] has no chunked_prefill_size"),
        ("[cache]\nstore_attempts = 'many'\n", r"\[cache\] store_attempts 'many': Expected `int`"),
        ("[server]\nhicache_size = 'x'\n", "--hicache-size 'x': Expected `float`"),
        ("server = 1\n", r"server must be a section, \[server\]"),
        ("[server\n", r"hicache\.toml"),
    ],
)
def test_a_file_that_the_server_cannot_use_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """A misspelt option that was ignored would leave a default in force that nobody wanted."""
    path = tmp_path / "hicache.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_server_config(path, {})


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    """The file is for the host, a flag for one run."""
    path = tmp_path / "hicache.toml"
    path.write_text("[server]\npage_size = 16\nport = 1234\n[cache]\nprefetch_threshold = 512\n")
    flags = {
        "page_size": 32,
        "port": None,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "memory",
        "hicache_storage_backend_extra_config": {"prefetch_threshold": 1024},
    }
    config = load_server_config(path, flags)
    assert (config.page_size, config.port, config.cache_config().prefetch_threshold) == (32, 1234, 1024)
