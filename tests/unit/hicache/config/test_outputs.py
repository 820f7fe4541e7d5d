"""Files that commands write: refused when flags are read, or told in one line."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from hicache.config.outputs import OutputFile, write_json, write_ready
from hicache.errors import ConfigError

_FLAG = click.Option(["--json"])


def read(path: Path | str, kind: OutputFile | None = None) -> Path:
    return (kind or OutputFile()).convert(str(path), _FLAG, None)


def test_a_file_that_can_be_written_is_taken_and_not_touched(tmp_path: Path) -> None:
    """A check that creates or empties the file would lose the last run's numbers when this one fails."""
    old = tmp_path / "old.json"
    old.write_text("kept")
    assert read(old) == old
    assert old.read_text() == "kept"
    assert read(tmp_path / "new.json") == tmp_path / "new.json"
    assert not (tmp_path / "new.json").exists()
    assert read("-") == Path("-")
    assert read("here.json") == Path("here.json")


def test_what_cannot_be_written_names_flag_path_and_reason(tmp_path: Path) -> None:
    """Minutes of work would end in a stack trace, and a script would take its exit code for a result."""
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError) as refused:
            read(path)
        assert str(refused.value) == f"--json {path}: {reason}"


def test_a_folder_or_file_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only mounts are the commonest case in containers. (Root may write anywhere: hence the double.)"""
    old = tmp_path / "old"
    old.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == old)
    assert read(old) == old  # its folder may be read-only
    with pytest.raises(ConfigError, match="Permission denied"):
        read(tmp_path / "new")
    with pytest.raises(ConfigError, match="Permission denied"):
        read(old, OutputFile(replaced=True))  # a new file takes its place
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    with pytest.raises(ConfigError, match="Permission denied"):
        read(old)
    assert read(old, OutputFile(replaced=True)) == old


def test_missing_folders_are_fine_where_they_are_made(tmp_path: Path) -> None:
    """`bench tree --json results/today/tree.json` has always made them."""
    assert read(tmp_path / "a" / "b" / "x", OutputFile(parents=True)) == tmp_path / "a" / "b" / "x"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        read(tmp_path / "file" / "b" / "x", OutputFile(parents=True))


def test_what_fails_only_when_written_is_one_line_too(tmp_path: Path) -> None:
    """A disk that fills up during the run, or a folder that is removed."""
    gone = tmp_path / "gone" / "x"
    with pytest.raises(ConfigError, match=r"^--json .*gone/x: No such file or directory$"):
        write_json(gone, {})
    with pytest.raises(ConfigError, match=r"^--ready-file .*gone/x: No such file or directory$"):
        write_ready(gone, "")


def test_json_goes_to_stdout_or_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json -` is what pipes read."""
    write_json(Path("-"), [1])
    assert capsys.readouterr().out == "[\n 1\n]\n"
    write_json(tmp_path / "x", [1])
    assert (tmp_path / "x").read_text() == "[\n 1\n]\n"
