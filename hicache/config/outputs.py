"""Files that commands write: what cannot be written is refused before the work, and in one line after it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import click

from hicache.errors import ConfigError

_STDOUT = "-"


class OutputFile(click.Path):
    """A file that a command writes at its end. Refused with a ConfigError when flags are read.

    `replaced`: another file takes its place, so only its folder must be writable.
    `parents`: missing folders are made.
    """

    def __init__(self, *, replaced: bool = False, parents: bool = False) -> None:
        super().__init__(path_type=Path)
        self._replaced = replaced
        self._parents = parents

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        path = Path(value)
        refused = self._refused(path)
        if refused is not None and str(path) != _STDOUT:
            flag = param.opts[0] if param is not None else "file"
            raise ConfigError(f"{flag} {path}: {os.strerror(refused)}")
        return path

    def _refused(self, path: Path) -> int | None:
        """Return the errno that writing would give, None if nothing speaks against it."""
        try:
            if path.is_dir():
                return errno.EISDIR
            if path.exists() and not self._replaced:
                return None if os.access(path, os.W_OK) else errno.EACCES
            folder = path.parent
            while self._parents and not folder.exists() and folder != folder.parent:
                folder = folder.parent
            if not folder.exists():
                return errno.ENOENT
        except OSError as error:  # of a folder that may not be looked into, or a name that is too long
            return error.errno or errno.EIO
        if not folder.is_dir():
            return errno.ENOTDIR
        return None if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES


def write_json(path: Path, value: object) -> None:
    """Write what --json asks for; `-` is stdout. Raises ConfigError if the file cannot be written."""
    text = json.dumps(value, indent=1) + "\n"
    if str(path) == _STDOUT:
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error


def write_ready(path: Path, text: str) -> None:
    """Write what --ready-file asks for: whoever polls for the file sees it whole. Raises ConfigError."""
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        staged.write_text(text)
        staged.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: {error.strerror}") from error
