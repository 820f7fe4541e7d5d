"""Real redis-server and Mooncake processes on free loopback ports, for tests and the demo.

Decides how they are found, started, waited for, paused, killed and started again. What is missing is
said in words that name the package to install.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hicache.errors import BackendError

HOST = "127.0.0.1"
INSTALL = "run deploy/install-test-services.sh as root"
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}  # file: Debian package
START_TRIES = 3  # the port is chosen before the process binds it, so somebody else may take it


ServiceT = TypeVar("ServiceT", bound="Service")
T = TypeVar("T")


class ServiceMissing(RuntimeError):
    """A program or library that a service needs is not installed; the message says which."""


class ServiceFailed(RuntimeError):
    """A service did not start; the message ends with its log."""


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def patiently(call: Callable[[], T], *, within_s: float = 60.0) -> T:
    """Return what a call to a healthy store returns: on a busy machine it may exceed its bound at first."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call()
        except BackendError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.02)


def redis_missing() -> str | None:
    """Return what is missing to run and reach a Redis server, or None if nothing is."""
    if importlib.util.find_spec("redis") is None:
        return "the Python package redis is not installed: pip install 'redis[hiredis]'"
    if shutil.which("redis-server") is None:
        return f"redis-server is not on PATH: {INSTALL}"
    return None


def mooncake_missing() -> str | None:
    """Return what is missing to run and reach a Mooncake master, or None if nothing is."""
    if importlib.util.find_spec("mooncake") is None:
        return (
            "the Python package mooncake is not installed: "
            "pip install mooncake-transfer-engine (with CUDA) or mooncake-transfer-engine-non-cuda"
        )
    for library, package in MOONCAKE_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return f"{library} (Debian package {package}) cannot be loaded: {error}; {INSTALL}"
    if (found := _find_mooncake("mooncake_master")) is None:
        return f"mooncake_master is neither in the mooncake package, beside {sys.executable}, nor on PATH"
    return None if os.access(found, os.X_OK) else f"{found} may not be executed"


class Service(ABC):
    """One child process that listens on a loopback port. Used by one thread at a time.

    Starts when entered or by start(); ends on exit, and at the latest when this process does.
    """

    port: int
    executable: str

    def __init__(self, directory: Path, *, arguments: Sequence[str] = ()) -> None:
        self._directory = directory
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self.port = 0

    def __enter__(self: ServiceT) -> ServiceT:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServiceFailed(f"{self.executable} is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        """What the process wrote, over all its lives."""
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self: ServiceT, *, timeout_s: float = 15.0, tries: int = START_TRIES) -> ServiceT:
        """Start on a free port and return once it accepts connections."""
        for attempt in range(tries):
            self._choose_ports()
            try:
                return self._start(timeout_s)
            except ServiceFailed:
                if attempt + 1 == tries:
                    raise
        raise AssertionError("unreachable")

    def restart(self: ServiceT, *, timeout_s: float = 15.0) -> ServiceT:
        """Start again on the ports it had; kill it first if it runs."""
        self.kill()
        return self._start(timeout_s)

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would; nothing happens if it does not run."""
        self._end(signal.SIGKILL, timeout_s=60.0)

    def stop(self, *, timeout_s: float = 60.0) -> None:
        """End it with SIGTERM, and with SIGKILL if it has not ended after `timeout_s`."""
        self.resume()
        self._end(signal.SIGTERM, timeout_s=timeout_s)

    def pause(self) -> None:
        """Stop it with SIGSTOP: its port still accepts connections, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True
        wait_until_stopped(self.pid)

    def resume(self) -> None:
        """Let a paused process go on."""
        if self._process is not None and self._paused:
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the command line for the ports chosen."""

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _environment(self) -> dict[str, str]:
        return {}

    @property
    def _log_path(self) -> Path:
        return self._directory / f"{self.executable}-{self.port}.log"

    def _start(self: ServiceT, timeout_s: float) -> ServiceT:
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command(), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=os.environ | self._environment(),
                start_new_session=True,
            )
        atexit.register(self.kill)
        deadline = time.monotonic() + timeout_s
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServiceFailed(f"{self.executable} did not start on {self.address}: {self.log[-2000:]}")
            time.sleep(0.02)
        return self

    def _accepts(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _end(self, how: signal.Signals, *, timeout_s: float) -> None:
        process, self._process = self._process, None
        self._paused = False
        atexit.unregister(self.kill)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


class RedisServer(Service):
    """A redis-server without persistence, also reachable on a Unix socket; it loses all when it ends."""

    executable = "redis-server"

    def __init__(self, directory: Path, *, arguments: Sequence[str] = ()) -> None:
        if (reason := redis_missing()) is not None:
            raise ServiceMissing(reason)
        super().__init__(directory, arguments=arguments)

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    @property
    def socket_path(self) -> Path:
        return self._directory / f"redis-{self.port}.sock"

    def _command(self) -> list[str]:
        return [
            shutil.which(self.executable) or self.executable,
            *("--port", str(self.port), "--bind", HOST, "--dir", str(self._directory)),
            *("--save", "", "--appendonly", "no", "--unixsocket", self.socket_path.name),
        ]


class MooncakeMaster(Service):
    """A mooncake_master on TCP. It owns no memory: a client with a segment or a MooncakeOwner does."""

    executable = "mooncake_master"

    def __init__(self, directory: Path, *, arguments: Sequence[str] = ()) -> None:
        if (reason := mooncake_missing()) is not None:
            raise ServiceMissing(reason)
        super().__init__(directory, arguments=arguments)
        self.metrics_port = 0

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.metrics_port = free_port()

    def _environment(self) -> dict[str, str]:
        return {"MC_TCP_BIND_ADDRESS": HOST}

    def _command(self) -> list[str]:
        return [
            str(_find_mooncake(self.executable)),
            *(f"--rpc_address={HOST}", f"--rpc_port={self.port}"),
            *(f"--metrics_host={HOST}", f"--metrics_port={self.metrics_port}", "--logtostderr=true"),
        ]


class MooncakeOwner(Service):
    """A mooncake_client process that gives the master a segment of `segment_bytes`.

    Being a process of its own it can be killed and stopped, and same-host clients may attach to it.
    """

    executable = "mooncake_client"

    def __init__(self, directory: Path, master: MooncakeMaster, *, segment_bytes: int) -> None:
        super().__init__(directory)
        self._master = master
        self._segment_bytes = segment_bytes

    def _environment(self) -> dict[str, str]:
        return {"MC_TCP_BIND_ADDRESS": HOST}

    def _command(self) -> list[str]:
        return [
            str(_find_mooncake(self.executable)),
            *(f"--host={HOST}", f"--port={self.port}", f"--global_segment_size={self._segment_bytes}B"),
            *(f"--master_server_address={self._master.address}", "--metadata_server=P2PHANDSHAKE"),
            *("--protocol=tcp", "--logtostderr=true"),
        ]


def _find_mooncake(program: str) -> Path | None:
    """Return the program itself, not the Python script in front of it: signals must reach it."""
    spec = importlib.util.find_spec("mooncake")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for path in (folder / program for folder in (*folders, Path(sys.executable).parent)):
        if path.is_file():
            with contextlib.suppress(OSError):
                path.chmod(path.stat().st_mode | 0o111)  # wheels do not always keep the bit
            return path
    found = shutil.which(program)
    return Path(found) if found else None


def wait_until_stopped(pid: int) -> None:
    """Wait until every thread of a process that got SIGSTOP stands still: one may answer calls until then."""
    deadline = time.monotonic() + 10.0
    while True:
        states = {
            stat.read_text().rpartition(")")[2].split()[0]
            for stat in Path(f"/proc/{pid}/task").glob("*/stat")
        }
        if states == {"T"}:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} does not stop: {states}")
        threading.Event().wait(0.001)
