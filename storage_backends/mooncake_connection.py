"""One Mooncake client: how it is set up, watched while the master is away, and taken down.

Decides when the store may be called at all. Leaves to the backend what is called, and the time bounds of
those calls.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import logging
import mmap
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache.config.mooncake import MooncakeSettings
from hicache.errors import BackendUnavailable, ConfigError
from hicache.seldom import Seldom
from hicache.storage_backends.arena import Arena

logger = logging.getLogger(__name__)

CLIENT_BUFFER_BYTES = 16 << 20  # Mooncake's own; only calls that we do not make use it
CONNECT_TIMEOUT_S = 1.0
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 5.0
CANARY = "hicache-canary"  # a key that is only ever looked for
GAUGES = ("master_key_count", "master_allocated_bytes", "master_total_capacity_bytes")

# Stores with a call or memory still in use when they were closed. A call into a closed store ends the
# process with a segmentation fault, so such a store is kept until the process ends.
_KEPT: Final[list[object]] = []


class LinkState(enum.Enum):
    """Whether the store may be called."""

    CONNECTING = "connecting"  # never set up so far
    UP = "up"
    SUSPECT = "suspect"  # a call failed or hung; a canary call decides
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Connection:
    """A store that is set up, and the registered memory it reads and writes."""

    store: Any  # mooncake.store.MooncakeDistributedStore, which ships no types
    memory: memoryview
    address: int  # of memory[0]
    reads: Arena
    writes: Arena


class MooncakeLink:
    """Sets a store up, and after a failure keeps asking the master until it answers again.

    Guarded by `_changed`; its own daemon thread makes every blocking call, so no method blocks longer than it
    says. While the link is not up callers are refused at once: with a dead master each call into the
    library would hold its thread for more than 4 seconds.
    """

    def __init__(self, settings: MooncakeSettings, *, staging_bytes: int) -> None:
        self._settings = settings
        self._staging_bytes = staging_bytes
        self._changed = threading.Condition()
        self._state = LinkState.CONNECTING
        self._connection: Connection | None = None
        self._reason = "not connected yet"
        self._extra: list[memoryview] = []
        self._said = Seldom()
        self._thread = threading.Thread(target=self._watch, name="hicache-mooncake-link", daemon=True)
        self._thread.start()

    @property
    def state(self) -> LinkState:
        with self._changed:
            return self._state

    @property
    def reason(self) -> str:
        """Why the link is not up, in words for a log."""
        with self._changed:
            return self._reason

    def wait_up(self, timeout_s: float) -> bool:
        """Wait until the link is up; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in (LinkState.UP, LinkState.CLOSED), timeout_s)
            return self._state is LinkState.UP

    def connection(self) -> Connection:
        """Return the connection to call. Raises BackendUnavailable if it may not be called now."""
        with self._changed:
            if self._state is not LinkState.UP or self._connection is None:
                raise BackendUnavailable(f"mooncake: {self._state.value}: {self._reason}")
            return self._connection

    def suspect(self, reason: str) -> None:
        """Take the link down until a canary call has gone through."""
        with self._changed:
            if self._state is LinkState.UP:
                self._state, self._reason = LinkState.SUSPECT, reason
                self._changed.notify_all()
                if (more := self._said.due("bypassed")) is not None:
                    what = f"mooncake: {self._where} is bypassed until it answers"
                    logger.warning("%s: %s%s", what, reason, more)

    def register(self, memory: memoryview) -> None:
        """Register the caller's memory with this store, or with the one that will be set up."""
        with self._changed:
            self._extra.append(memory)
            connection = self._connection
        if connection is not None:
            _register(connection.store, memory)

    def close(self, timeout_s: float, *, idle: bool) -> None:
        """Take the store down. `idle`: no call is running in it; otherwise it is kept, not closed."""
        with self._changed:
            self._state, self._reason = LinkState.CLOSED, "closed"
            self._changed.notify_all()
            connection, self._connection = self._connection, None
        self._thread.join(timeout_s)
        if connection is None:
            return
        # Memory from a mooncake_client goes with the store; our own stays as long as someone views it.
        shared = self._settings.standalone_storage
        in_use = shared and (connection.reads.taken_bytes or connection.writes.taken_bytes)
        if not idle or in_use or self._thread.is_alive():
            logger.warning("mooncake: closed with calls or reservations open; the client stays until exit")
            _KEPT.append((connection, self._extra))
            return
        closing = threading.Thread(target=connection.store.close, name="hicache-mooncake-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            _KEPT.append((connection, self._extra))

    @property
    def _where(self) -> str:
        return self._settings.client_server_address or self._settings.master_server_address

    def _watch(self) -> None:
        delay = RETRY_FIRST_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state is not LinkState.UP)
                if self._state is LinkState.CLOSED:
                    return
            try:
                reason = self._attempt()
            except Exception as error:
                if (more := self._said.due("connecting")) is not None:
                    logger.exception("mooncake: connecting to %s failed%s", self._where, more)
                reason = str(error)
            with self._changed:
                if self._is_closed():
                    return
                if reason is None:
                    logger.info("mooncake: %s answers", self._where)
                    self._state, delay = LinkState.UP, RETRY_FIRST_S
                    self._changed.notify_all()
                    continue
                self._reason = reason
                self._changed.wait_for(self._is_closed, delay)
                delay = min(delay * 2, RETRY_LAST_S)

    def _is_closed(self) -> bool:
        return self._state is LinkState.CLOSED

    def _attempt(self) -> str | None:
        """Connect, or ask the canary; return why it did not work, or None."""
        if (reason := self._unreachable()) is not None:
            return reason
        with self._changed:
            connection, extra = self._connection, list(self._extra)
        if connection is not None:
            code = connection.store.batch_is_exist([CANARY])[0]
            return None if code >= 0 else f"the master answers with code {code}"
        if self._settings.check_server and not segments(self._settings):
            return "the master lists no segment (check_server)"
        opened = _open(self._settings, self._staging_bytes)
        if isinstance(opened, str):
            return opened
        for memory in extra:
            _register(opened.store, memory)
        with self._changed:
            if self._state is LinkState.CLOSED:
                opened.store.close()
            else:
                self._connection = opened
        return None

    def _unreachable(self) -> str | None:
        """Ask cheaply before Mooncake does: its set-up with a dead address takes seconds."""
        if self._settings.standalone_storage:
            host, _, port = self._settings.client_server_address.rpartition(":")
            address = (host, int(port))
        elif (master := self._settings.master_host) is not None:
            address = (master, self._settings.master_port)
        else:
            return None
        try:
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return f"no connection to {address[0]}:{address[1]}: {error}"
        return None


def load_library() -> Any:
    """Import and return mooncake.store. Raises ConfigError that says what to install."""
    try:
        return importlib.import_module("mooncake.store")  # ships no types
    except ImportError as error:
        raise ConfigError(
            f"mooncake: the client library cannot be loaded: {error}; pip install mooncake-transfer-engine "
            "(without CUDA: mooncake-transfer-engine-non-cuda), and Debian's libibverbs1, libnuma1, libcurl4"
        ) from error


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of writable `memory`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def segments(settings: MooncakeSettings) -> list[str]:
    """Ask the master's metrics port which segments it has; empty if it does not answer."""
    return _http(settings, "/get_all_segments").split()


def gauges(settings: MooncakeSettings) -> dict[str, int]:
    """Ask the master's metrics port for GAUGES; those it does not give are absent."""
    found = {}
    for line in _http(settings, "/metrics").splitlines():
        name, _, value = line.partition(" ")
        if name in GAUGES:
            found[name] = int(float(value))
    return found


def warn_about(settings: MooncakeSettings) -> None:
    """Log what Mooncake would accept in silence and then not work with."""
    devices = Path("/sys/class/infiniband")
    if settings.protocol == "rdma" and not (devices.is_dir() and any(devices.iterdir())):
        logger.warning("mooncake: protocol is rdma, but this host shows no RDMA device; set protocol to tcp")


def _open(settings: MooncakeSettings, staging_bytes: int) -> Connection | str:
    store = load_library().MooncakeDistributedStore()
    if settings.standalone_storage:
        code = store.setup_dummy(staging_bytes, CLIENT_BUFFER_BYTES, settings.client_server_address)
    else:
        code = store.setup(
            settings.local_hostname,
            settings.metadata_server,
            settings.segment_bytes,
            CLIENT_BUFFER_BYTES,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            **_newer_arguments(settings),
        )
    if code != 0:
        return f"set-up failed with code {code}"
    if settings.standalone_storage:
        address = store.alloc_from_mem_pool(staging_bytes)
        if not address:
            store.close()
            return f"the client gave no {staging_bytes} bytes of shared memory"
        memory = memoryview((ctypes.c_ubyte * staging_bytes).from_address(address)).cast("B")
    else:
        memory = memoryview(mmap.mmap(-1, staging_bytes))
        address = address_of(memory)
    if (code := store.register_buffer(address, staging_bytes)) != 0:
        store.close()
        return f"registering {staging_bytes} bytes failed with code {code}"
    half = staging_bytes // 2
    return Connection(store, memory, address, Arena(0, half), Arena(half, staging_bytes - half))


def _newer_arguments(settings: MooncakeSettings) -> dict[str, object]:
    """Return the arguments that earlier releases lack, where they are asked for."""
    arguments: dict[str, object] = {}
    if settings.enable_ssd_offload:
        arguments["enable_ssd_offload"] = True
    if settings.ssd_offload_path:
        arguments["ssd_offload_path"] = settings.ssd_offload_path
    if settings.tenant_id != "default":
        arguments["tenant_id"] = settings.tenant_id
    return arguments


def _register(store: Any, memory: memoryview) -> None:
    if (code := store.register_buffer(address_of(memory), memory.nbytes)) != 0:
        raise BackendUnavailable(f"mooncake: registering {memory.nbytes} bytes failed with code {code}")


def _http(settings: MooncakeSettings, path: str) -> str:
    if settings.master_host is None:
        return ""
    host = f"[{settings.master_host}]" if ":" in settings.master_host else settings.master_host
    try:
        url = f"http://{host}:{settings.master_metrics_port}{path}"
        with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as reply:
            body: bytes = reply.read()
    except (OSError, urllib.error.URLError):
        return ""
    return body.decode(errors="replace")
