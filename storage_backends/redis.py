"""Objects in a Redis server: one string value each, written whole or not at all, with a time to live.

Decides commands, batching and what a reply means. Leaves the protocol to redis-py and time bounds to
`bounded`. A Redis Cluster is refused: a batch spans slots, and its redirects are not followed.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from hicache.seldom import Seldom
from hicache.storage_backends.base import MISS, BackendStats, Reservation, StorageBackend, WriteOutcome
from hicache.storage_backends.bounded import BoundedCalls
from hicache.storage_backends.open_writes import OpenWrites, check_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_BYTES = 8 << 20  # payload in one pipelined request or reply: bounds memory on both sides
BATCH_KEYS = 512
MAX_OBJECT_BYTES = 512 << 20  # Redis refuses a longer string, and closes the connection over it
SCHEMES = ("redis", "rediss", "unix")
URL_OPTIONS = frozenset({"db", "username", "password", "client_name"})  # besides ssl_*


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the `redis` backend; `repr` shows no password."""

    url: str = "redis://127.0.0.1:6379/0"  # redis://, rediss:// (TLS) or unix://path?db=0
    ttl_s: float = 86400.0  # an object not read or touched for so long goes away; 0 keeps it
    timeout_s: float = 2.0  # bound of every call
    clear_timeout_s: float = 60.0  # bound of clear, which walks the whole key space
    max_connections: int = 8
    key_prefix: str = "hicache:"  # what our keys begin with in the server; clear stays below it
    staging_bytes: int = 256 << 20  # most memory held by writes that were begun and not ended

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "url")
        return f"Options(url={mask_password(self.url)!r}, {', '.join(fields)})"

    def validate(self) -> None:
        """Raise ConfigError naming the first option that is wrong."""
        parts = urlsplit(self.url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(f"redis: url {mask_password(self.url)!r} must begin with one of {SCHEMES}://")
        for name, _ in parse_qsl(parts.query):
            if name not in URL_OPTIONS and not name.startswith("ssl_"):
                raise ConfigError(f"redis: url option {name!r} is none of {sorted(URL_OPTIONS)} or ssl_*")
        for name in ("timeout_s", "clear_timeout_s", "max_connections", "staging_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"redis: {name}={getattr(self, name)} must be positive")
        if self.ttl_s < 0 or 0 < self.ttl_s < 0.001:
            raise ConfigError(f"redis: ttl_s={self.ttl_s} must be 0 (keep) or at least 0.001")


def mask_password(url: str) -> str:
    """Return `url` with every password replaced by ***."""
    url = re.sub(r"(://[^:@/?]*):[^/?]*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


class RedisBackend(StorageBackend):
    """One Redis server.

    Invariant: a value is set by a single SET NX, so an object is visible whole or not at all and the
    first writer wins. Thread-safe: `_lock` guards the reservations, every command runs on a BoundedCalls
    thread, and bytes reach the caller's memory only on the caller's own thread.
    """

    name: ClassVar[str] = "redis"
    settles_on_timeout: ClassVar[bool] = True

    def __init__(self, options: Options, client: redis.Redis) -> None:
        self._options = options
        self._client = client
        self._ttl_ms = int(options.ttl_s * 1000)
        self._calls = BoundedCalls("redis", workers=options.max_connections)
        self._checked = False  # two threads may both ask; that costs one more INFO
        self._refusal = ""  # why this server is not for us, as of the last look
        self._open: OpenWrites[int] = OpenWrites()  # bytes of each
        self._lock = threading.Lock()
        self._staged = 0  # bytes of all open writes
        self._closed = False
        self._said = Seldom()

    @classmethod
    def from_options(cls, options: Options) -> RedisBackend:
        """Open the backend; while the server cannot be reached, calls raise.

        Raises ConfigError for wrong options and for a cluster, ImportError without redis-py.
        """
        options.validate()
        backend = cls(options, _client(options))
        try:
            backend._run("connect", lambda _: None)
        except BackendError as error:
            if backend._refusal:
                backend.close()
                raise ConfigError(backend._refusal) from error
            logger.debug("redis: not there yet: %s", error)
        return backend

    def probe(self, keys: Sequence[str]) -> bytes:
        def work(deadline: float) -> bytes:
            found = bytearray()
            for names in self._batches(keys, deadline):
                pipe = self._client.pipeline(transaction=False)
                for name in names:
                    pipe.exists(name)
                found += bytes(pipe.execute())
            return bytes(found)

        return self._run("probe", work) if keys else b""

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
        deadline = time.monotonic() + self._options.timeout_s
        sizes: list[int] = []
        for start, stop in _by_bytes([len(b) for b in buffers]):
            names = [self._options.key_prefix + key for key in keys[start:stop]]
            values = self._run("read", functools.partial(self._fetch, names), deadline=deadline)
            sizes += (_copy(v, b) for v, b in zip(values, buffers[start:stop], strict=True))
        return sizes

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_sizes(keys, sizes)
        there = self.probe(keys)
        return [
            WriteOutcome.EXISTS if found else self._reserve(key, size)
            for key, size, found in zip(keys, sizes, there, strict=True)
        ]

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        # Python keeps the bytes alive for a call that is still running, and nobody else gets them.
        live = [self._end(r) for r in reservations]
        batch = [r for r, alive in zip(reservations, live, strict=True) if alive]

        def work(deadline: float) -> list[WriteOutcome]:
            outcomes: list[WriteOutcome] = []
            for start, stop in _by_bytes([len(r.buffer) for r in batch]):
                _check_deadline(deadline)
                pipe = self._client.pipeline(transaction=False)
                for r in batch[start:stop]:
                    pipe.set(self._options.key_prefix + r.key, r.buffer, nx=True, px=self._ttl_ms or None)
                outcomes += self._outcomes(pipe.execute(raise_on_error=False))
            return outcomes

        outcomes = iter(self._run("commit", work) if reservations else ())
        return [next(outcomes) if alive else WriteOutcome.FAILED for alive in live]

    def _outcomes(self, replies: Sequence[object]) -> list[WriteOutcome]:
        outcomes = [_outcome(reply) for reply in replies]
        if WriteOutcome.FAILED in outcomes and (more := self._said.due("refused")) is not None:
            reason = replies[outcomes.index(WriteOutcome.FAILED)]
            failed = outcomes.count(WriteOutcome.FAILED)
            logger.warning("redis: commit: %d writes were refused: %s%s", failed, reason, more)
        return outcomes

    def abort(self, reservations: Sequence[Reservation]) -> None:
        for r in reservations:
            self._end(r)

    def touch(self, keys: Sequence[str]) -> None:
        def work(deadline: float) -> None:
            for names in self._batches(keys, deadline):
                pipe = self._client.pipeline(transaction=False)
                pipe.touch(*names)
                self._refresh(pipe, names)
                pipe.execute()

        if keys:
            self._run("touch", work)

    def delete(self, keys: Sequence[str]) -> int:
        def work(deadline: float) -> int:
            return sum(self._client.unlink(*names) for names in self._batches(keys, deadline))

        return self._run("delete", work) if keys else 0

    def clear(self, prefix: str) -> int:
        pattern = _escape_glob(self._options.key_prefix + prefix) + "*"

        def work(deadline: float) -> int:
            gone = 0
            cursor = 0
            while True:
                cursor, names = self._client.scan(cursor, match=pattern, count=BATCH_KEYS * 2)
                gone += self._client.unlink(*names) if names else 0
                if cursor == 0:
                    return gone
                _check_deadline(deadline)

        return self._run("clear", work, deadline=time.monotonic() + self._options.clear_timeout_s)

    def stats(self) -> BackendStats:
        """Return what the server says of itself in `details`; which objects are ours it cannot tell."""

        def work(_: float) -> tuple[dict[str, Any], int]:
            return self._client.info("memory"), self._client.dbsize()

        memory, keys = self._run("stats", work)
        with self._lock:
            staged = self._staged
        details: dict[str, float | int | str] = {
            "server_keys": keys,
            "server_used_bytes": int(memory["used_memory"]),
            "server_capacity_bytes": int(memory.get("maxmemory") or -1),
            "server_full_policy": str(memory.get("maxmemory_policy", "")),
            "staged_bytes": staged,
            "calls_abandoned": self._calls.abandoned,
        }
        return BackendStats(-1, -1, -1, details)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._calls.close(self._options.timeout_s)
        self._client.close()

    def _run(self, operation: str, work: Callable[[float], T], *, deadline: float | None = None) -> T:
        """Make one bounded call; the only place where redis-py's exceptions become ours."""
        import redis

        timeout_s = deadline - time.monotonic() if deadline is not None else self._options.timeout_s
        deadline = deadline if deadline is not None else time.monotonic() + timeout_s

        def checked() -> T:
            if not self._checked:
                self._check_server()
            return work(deadline)

        where = mask_password(self._options.url)
        try:
            return self._calls.run(checked, timeout_s=max(timeout_s, 0.0), operation=operation)
        except redis.TimeoutError as error:
            raise BackendTimeout(f"redis: {operation} at {where}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise BackendUnavailable(f"redis: {operation} at {where}: {error}") from error

    def _check_server(self) -> None:
        if self._client.info("cluster").get("cluster_enabled"):
            self._refusal = (
                f"redis: {mask_password(self._options.url)} is a Redis Cluster, which is not supported; "
                "use a server that does not run in cluster mode"
            )
            raise BackendUnavailable(self._refusal)
        self._checked, self._refusal = True, ""

    def _batches(self, keys: Sequence[str], deadline: float) -> Iterator[list[str]]:
        for start in range(0, len(keys), BATCH_KEYS):
            _check_deadline(deadline)
            yield [self._options.key_prefix + key for key in keys[start : start + BATCH_KEYS]]

    def _fetch(self, names: list[str], _: float) -> list[bytes | None]:
        pipe = self._client.pipeline(transaction=False)
        pipe.mget(names)
        self._refresh(pipe, names)
        values: list[bytes | None] = pipe.execute()[0]
        return values

    def _refresh(self, pipe: Any, names: list[str]) -> None:
        if self._ttl_ms:
            for name in names:
                pipe.pexpire(name, self._ttl_ms)

    def _reserve(self, key: str, size: int) -> Reservation | WriteOutcome:
        with self._lock:
            if size > MAX_OBJECT_BYTES or self._staged + size > self._options.staging_bytes:
                return WriteOutcome.EXISTS if key in self._open else WriteOutcome.NO_SPACE
            token = self._open.add(key, size)
            if token is None:
                return WriteOutcome.EXISTS
            self._staged += size
        return Reservation(key, memoryview(bytearray(size)), token)

    def _end(self, reservation: Reservation) -> bool:
        """End a reservation; return whether it was open."""
        with self._lock:
            size = self._open.end(reservation)
            self._staged -= size or 0
        return size is not None


def _client(options: Options) -> redis.Redis:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        # One retry replaces a pooled connection that a restarted server has closed. A time-out is not
        # retried: nobody waits for the second answer, and it would hold the thread as long again.
        return redis.Redis.from_url(
            options.url,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            max_connections=options.max_connections,
        )
    except ValueError as error:
        raise ConfigError(f"redis: url {mask_password(options.url)!r}: {error}") from error


def _by_bytes(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut positions into runs of at most BATCH_BYTES (or one object) and BATCH_KEYS."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (total + size > BATCH_BYTES or at - start == BATCH_KEYS):
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def _copy(value: bytes | None, buffer: memoryview) -> int:
    if value is None:
        return MISS
    if len(value) <= len(buffer):
        buffer[: len(value)] = value
    return len(value)


def _outcome(reply: object) -> WriteOutcome:
    if isinstance(reply, Exception):
        full = str(reply).startswith(("OOM", "command not allowed when used memory"))
        return WriteOutcome.NO_SPACE if full else WriteOutcome.FAILED
    return WriteOutcome.STORED if reply else WriteOutcome.EXISTS


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise BackendTimeout("redis: the time bound is over before the last batch")


def _escape_glob(text: str) -> str:
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)
