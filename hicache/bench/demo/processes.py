"""The processes of the demo: real command lines, a log file each, ready when they answer.

Whoever makes a Fleet closes it; closing ends every process it started.
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from hicache.errors import HiCacheError

HOST = "127.0.0.1"
_POLL_S = 0.1
_STOP_S = 20.0


class DemoFailed(HiCacheError):
    """Something that the demo promises did not happen."""


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Program:
    """One `hicache` process. Its log keeps what all its lives wrote."""

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path, ready_url: str) -> None:
        self.name = name
        self.arguments = tuple(arguments)
        self.log = log
        self._ready_url = ready_url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> str:
        """The line to type for the same."""
        return shlex.join(["hicache", *self.arguments])

    def start(self) -> None:
        """Start without waiting; see wait_ready."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from hicache.cli.main import main; main()", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the process answers over HTTP. Raises DemoFailed with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not _answers(self._ready_url):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = "ended" if ended else f"did not answer at {self._ready_url} within {timeout_s:.0f} s"
                raise DemoFailed(f"{self.name} {why}; the end of {self.log}:\n{self._tail()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and insist after a while."""
        self._end(signal.SIGTERM)

    def check_alive(self) -> None:
        """Raise DemoFailed if the process is gone."""
        if self._process is None or self._process.poll() is not None:
            raise DemoFailed(f"{self.name} ended; the end of {self.log}:\n{self._tail()}")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  {line}" for line in lines[-15:])


class Fleet:
    """Programs that end together."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.programs: list[Program] = []

    def close(self) -> None:
        """End all, last started first."""
        for program in reversed(self.programs):
            program.stop()

    def add(self, name: str, arguments: Sequence[str], *, ready_url: str) -> Program:
        """Make a program; nothing is started yet."""
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        program = Program(name, arguments, log=log, ready_url=ready_url)
        self.programs.append(program)
        return program


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
