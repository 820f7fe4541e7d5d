"""Settings of the file backend: SGLang's names, and no silent fallback."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.storage_backends.file import FileBackend, Options
from hicache.storage_backends.file.options import resolve

PREFIX = "SGLANG_HICACHE_FILE_BACKEND_"


def test_the_variable_for_the_directory_wins_over_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that moved the directory by variable for SGLang would find two stores."""
    monkeypatch.setenv(PREFIX + "STORAGE_DIR", "/from/variable")
    assert resolve(Options(file_storage_path="/from/option")).directory == Path("/from/variable")
    monkeypatch.setenv(PREFIX + "STORAGE_DIR", "")
    assert resolve(Options(file_storage_path="/from/option")).directory == Path("/from/option")


def test_options_win_over_the_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica could not be given a limit of its own."""
    monkeypatch.setenv(PREFIX + "MAX_SIZE", "1Gi")
    monkeypatch.setenv(PREFIX + "MIN_FREE_SPACE", "2G")
    monkeypatch.setenv(PREFIX + "EVICTION_RATIO", "0.5")
    from_environment = resolve(Options())
    assert (from_environment.max_bytes, from_environment.min_free_bytes) == (1 << 30, 2 * 10**9)
    assert from_environment.eviction_ratio == 0.5
    own = resolve(Options(max_size=0, min_free_space="4KiB", eviction_ratio=1.0))
    assert (own.max_bytes, own.min_free_bytes, own.eviction_ratio) == (0, 4096, 1.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("25.6k", 25_600), ("3Ki", 3072), ("2M", 2_000_000), ("1TiB", 1 << 40)],
)
def test_sizes_are_read_as_sglang_writes_them(text: int | str, size: int) -> None:
    """A limit of 200G would be refused, or read as 200 bytes."""
    assert resolve(Options(max_size=text)).max_bytes == size


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_SIZE", "much"), ("MIN_FREE_SPACE", "-1"), ("EVICTION_RATIO", "2")]
)
def test_a_malformed_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A misspelt limit would silently be no limit, and fill the disk."""
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ConfigError, match=PREFIX + name):
        resolve(Options())


def test_malformed_options_are_named() -> None:
    """The operator would have to guess which setting is wrong."""
    for wrong in (Options(max_size="?"), Options(eviction_ratio=0.0), Options(lease_s=-1.0)):
        with pytest.raises(ConfigError, match=r"max_size|eviction_ratio|lease_s"):
            resolve(wrong)


def test_the_default_directory_says_that_nobody_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes would be believed to share a cache that neither does."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.INFO):
        FileBackend.from_options(Options()).close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "hicache") in record.getMessage()
    assert "local to this node and shared with nobody" in record.getMessage()
    assert os.stat(tmp_path / "hicache").st_mode & 0o777 == 0o700
    caplog.clear()
    FileBackend.from_options(Options(file_storage_path=str(tmp_path / "other"))).close()
    assert not caplog.records


def test_a_default_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of the machine could plant KV for our prompts."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "hicache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="file_storage_path"):
        FileBackend.from_options(Options())


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The engine would start without a store and never say why."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file_storage_path"):
        FileBackend.from_options(Options(file_storage_path=str(tmp_path / "file" / "store")))
