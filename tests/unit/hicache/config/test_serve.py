"""Settings of the daemon: what is read, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config.serve import ServeConfig, is_loopback, load_serve_config
from hicache.config.sizes import ByteSize
from hicache.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]


def test_the_deployed_file_holds_the_defaults() -> None:
    """An operator who edits one line of it would change others without knowing."""
    assert load_serve_config(ROOT / "deploy/hicache.toml", {}) == ServeConfig()


def test_flags_win_over_the_file_and_absent_flags_do_not(tmp_path: Path) -> None:
    """What was typed would be ignored, or every flag not typed would reset the file."""
    path = tmp_path / "c.toml"
    path.write_text('[serve]\nport = 1\ncapacity = "2MiB"\nlease_bytes = 100\n[other]\nx = 1\n')
    config = load_serve_config(path, {"port": 2, "capacity": None, "max_calls": None})
    assert (config.port, config.capacity, config.session_lease_bytes) == (2, 2 << 20, 100)
    assert config.session_reservation_bytes == 1 << 20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\nporto = 1\n", "has no porto; it has allow_remote, capacity"),
        ('[serve]\nport = "x"\n', "Expected `int`"),
        ('[serve]\ncapacity = "4Gi"\n', "write a number and one of B, KB"),
        ("[serve]\ncapacity = 1.5\n", "is not a size"),
        ("[serve]\ncapacity = 0\n", "--capacity 0B must be within 1B"),
        ("[serve]\nport = 65536\n", "--port 65536 must be within 0..65535"),
        ("[serve]\nlease_seconds = nan\n", "--lease-seconds nan"),
        ('[serve]\nmax_message = "128MiB"\n', "--max-message 128MiB must be within 4KiB..64MiB"),
        ('[serve]\nmax_object = "4KiB"\n', "--max-object 4KiB must be at least --max-message 1MiB"),
        ('[serve]\nhost = "0.0.0.0"\n', "Add --allow-remote"),
        ("serve = 3\n", "must be a section"),
        ("[serve\n", "--config"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    """A typo would run with a default for months."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_serve_config(path, {})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("4GiB", 4 << 30),
        ("1.5 GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("3B", 3),
    ],
)
def test_sizes_are_read_as_written(text: str | int, size: int) -> None:
    """GB and GiB would be mixed up, and the store be 7 % off."""
    assert ByteSize.parse(text) == size
    assert ByteSize.parse(str(ByteSize.parse(text))) == size


@pytest.mark.parametrize("text", ["", "4G", "4gib", "-1", "GiB", "1e9", "1 2", "4GiB2", True])
def test_sizes_that_are_unclear_are_refused(text: str) -> None:
    """4G would be read as one of two sizes."""
    with pytest.raises(ConfigError, match="is not a size"):
        ByteSize.parse(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_only_this_machines_own_addresses_count_as_loopback(host: str, loopback: bool) -> None:
    """The store would be open to the network without anybody having said so."""
    assert is_loopback(host) is loopback
