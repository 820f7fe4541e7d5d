"""What starting up may load: a user waiting for --help, and a daemon on a host without torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import hicache.daemon
from hicache.cli.main import _COMMANDS

_LOADED = "import sys; print(*[m for m in ('torch', 'grpc', 'matplotlib', 'mooncake') if m in sys.modules])"
_RUN = """
import contextlib, io, sys
from hicache.cli.main import cli
sys.argv = ["hicache", *{arguments!r}]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    cli()
assert "Usage" in out.getvalue()
"""


def _loaded_after(program: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", f"{program}\n{_LOADED}"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_importing_hicache_loads_neither_torch_nor_grpc() -> None:
    """`import hicache` in a tool that only wants keys must not cost seconds and a GPU stack."""
    assert _loaded_after("import hicache") == []


def test_help_loads_neither_torch_nor_grpc() -> None:
    """`hicache --help` answers at once, also where torch is not installed."""
    assert _loaded_after(_RUN.format(arguments=["--help"])) == []


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    """Help for a command is wanted before its extras are installed."""
    loaded = _loaded_after(_RUN.format(arguments=[command, "--help"]))
    assert "torch" not in loaded
    assert "matplotlib" not in loaded
    assert "mooncake" not in loaded


def test_the_daemon_runs_without_torch() -> None:
    """The daemon's image has no torch: one stray import would keep it from starting."""
    modules = [f"hicache.daemon.{m.name}" for m in pkgutil.iter_modules(hicache.daemon.__path__)]
    assert modules
    program = (
        f"import sys, importlib; sys.modules['torch'] = None\nfor m in {[*modules, 'hicache.cli.serve']!r}: "
    )
    assert _loaded_after(f"{program}importlib.import_module(m)\ndel sys.modules['torch']") in ([], ["grpc"])
