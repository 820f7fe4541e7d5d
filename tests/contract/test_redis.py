"""The `redis` backend keeps the contract against a real redis-server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from hicache.errors import BackendUnavailable, ConfigError
from hicache.storage_backends.base import MISS, Reservation, StorageBackend, WriteOutcome
from hicache.storage_backends.redis import Options, RedisBackend, mask_password
from hicache.testing.backend_suite import BackendSuite, pattern, read, reserve, write
from hicache.testing.services import RedisServer, free_port, redis_missing

pytestmark = pytest.mark.skipif(redis_missing() is not None, reason=str(redis_missing()))


def at(server: RedisServer, **more: object) -> Options:
    """Options for a server where nothing is to fail: a busy machine may need more than the default bound."""
    return Options(**{"url": server.url, "timeout_s": 60.0, **more})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server: RedisServer):
    import redis

    client = redis.Redis.from_url(server.url)
    yield client
    client.close()


@pytest.fixture
def opened() -> Iterator[list[StorageBackend]]:
    """Backends put in here are closed after the test."""
    backends: list[StorageBackend] = []
    yield backends
    for backend in backends:
        backend.close()


class TestRedis(BackendSuite):
    """Everything that any backend must do."""

    server: ClassVar[RedisServer]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _on_server(cls, server: RedisServer) -> None:
        cls.server = server

    def make_backend(self) -> StorageBackend:
        return RedisBackend.from_options(at(self.server))

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        return self.make_backend()


class TestTimeToLive:
    """Objects nobody uses go away; objects in use stay."""

    def test_a_stored_object_expires_after_the_ttl(self, server, client, opened) -> None:
        """The server would fill up with prefixes of last week."""
        backend = RedisBackend.from_options(at(server, ttl_s=100, key_prefix="ttl1:"))
        opened.append(backend)
        write(backend, {"a": pattern(10)})
        assert 0 < client.pttl("ttl1:a") <= 100_000

    @pytest.mark.parametrize("use", ["read", "touch"])
    def test_use_starts_the_ttl_again(self, server, client, opened, use: str) -> None:
        """A system prompt that every request reads would expire every ttl."""
        backend = RedisBackend.from_options(at(server, ttl_s=100, key_prefix=f"ttl-{use}:"))
        opened.append(backend)
        write(backend, {"a": pattern(10)})
        client.pexpire(f"ttl-{use}:a", 5000)
        if use == "read":
            assert read(backend, ["a", "none"], 10) == [pattern(10), None]
        else:
            backend.touch(["a", "none"])
        assert client.pttl(f"ttl-{use}:a") > 90_000
        assert client.exists(f"ttl-{use}:none") == 0

    def test_a_probe_does_not_keep_an_object_alive(self, server, client, opened) -> None:
        """Probing alone would make objects immortal and the server full."""
        backend = RedisBackend.from_options(at(server, ttl_s=100, key_prefix="ttl3:"))
        opened.append(backend)
        write(backend, {"a": pattern(10)})
        client.pexpire("ttl3:a", 5000)
        assert backend.probe(["a"]) == b"\x01"
        assert client.pttl("ttl3:a") <= 5000

    def test_a_ttl_of_zero_keeps_objects(self, server, client, opened) -> None:
        """An operator who wants eviction by memory only would lose objects by age."""
        backend = RedisBackend.from_options(at(server, ttl_s=0, key_prefix="ttl4:"))
        opened.append(backend)
        write(backend, {"a": pattern(10)})
        assert client.pttl("ttl4:a") == -1
        assert read(backend, ["a"], 10) == [pattern(10)]
        backend.touch(["a"])
        assert client.pttl("ttl4:a") == -1


class TestKeySpace:
    """The server is shared with other applications."""

    def test_clearing_everything_spares_foreign_keys(self, server, client, opened) -> None:
        """A cache flush would delete the session store of a web shop."""
        client.set("shop:basket", "3 apples")
        client.set("clearX", "not ours either")
        backend = RedisBackend.from_options(at(server, key_prefix="clear:"))
        opened.append(backend)
        write(backend, {f"k{i}": pattern(10) for i in range(2500)})
        assert backend.clear("") == 2500
        assert client.get("shop:basket") == b"3 apples"
        assert client.get("clearX") == b"not ours either"

    def test_a_prefix_with_wildcards_is_taken_literally(self, server, opened) -> None:
        """Clearing model `a*` would also clear model `ab`."""
        backend = RedisBackend.from_options(at(server, key_prefix="glob[1]:"))
        opened.append(backend)
        odd = {f"a*?[b]\\^-{i}": pattern(10) for i in range(3)}
        write(backend, odd | {"ab1": pattern(10), "axx[b]": pattern(10)})
        assert backend.clear("a*?[b]\\^-") == 3
        assert backend.probe(["ab1", "axx[b]"]) == b"\x01\x01"

    def test_a_foreign_value_under_our_key_is_a_miss(self, server, client, opened) -> None:
        """Reading a list that another program put there would fail the whole batch."""
        backend = RedisBackend.from_options(at(server, key_prefix="foreign:"))
        opened.append(backend)
        client.lpush("foreign:a", "x")
        write(backend, {"b": pattern(10)})
        assert read(backend, ["a", "b"], 10) == [None, pattern(10)]


class TestFirstWriter:
    """Two replicas that computed the same page."""

    def test_the_first_commit_stays_and_the_second_is_told(self, server, opened) -> None:
        """A reader that has verified one copy would be given the other in mid-chain."""
        first, second = (RedisBackend.from_options(at(server, key_prefix="race:")) for _ in range(2))
        opened += [first, second]
        mine, theirs = reserve(first, "a", 10), reserve(second, "a", 10)
        mine.buffer[:] = pattern(10, 1)
        theirs.buffer[:] = pattern(10, 2)
        assert first.commit([mine]) == [WriteOutcome.STORED]
        assert second.commit([theirs]) == [WriteOutcome.EXISTS]
        assert read(second, ["a"], 10) == [pattern(10, 1)]


class TestLimits:
    """Full means refused, object by object."""

    def test_a_full_server_answers_no_space_and_keeps_serving(self, tmp_path, opened) -> None:
        """Running out of memory would look like an outage, and every hit would be lost."""
        with RedisServer(
            tmp_path, arguments=["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"]
        ) as server:
            backend = RedisBackend.from_options(at(server))
            opened.append(backend)
            outcomes = write(backend, {f"k{i}": pattern(1 << 20, i) for i in range(12)})
            assert set(outcomes.values()) == {WriteOutcome.STORED, WriteOutcome.NO_SPACE}
            there = backend.probe(list(outcomes))
            assert list(there) == [int(o is WriteOutcome.STORED) for o in outcomes.values()]
            assert read(backend, ["k0"], 1 << 20) == [pattern(1 << 20)]
            backend.delete(list(outcomes))
            assert write(backend, {"again": pattern(1 << 20)}) == {"again": WriteOutcome.STORED}

    def test_open_writes_are_bounded_by_the_staging_memory(self, server, opened) -> None:
        """A burst of write-backs would eat the host's memory."""
        backend = RedisBackend.from_options(at(server, staging_bytes=10_000, key_prefix="staging:"))
        opened.append(backend)
        held = reserve(backend, "a", 8000)
        assert backend.begin_write(["b", "a"], [3000, 3000]) == [WriteOutcome.NO_SPACE, WriteOutcome.EXISTS]
        backend.abort([held, held])
        (answer,) = backend.begin_write(["b"], [10_000])
        assert isinstance(answer, Reservation)
        assert backend.stats().details["staged_bytes"] == 10_000
        backend.abort([answer])

    def test_batches_larger_than_one_reply_are_read_whole(self, server, opened) -> None:
        """A long prompt's pages would be cut at the size of one reply."""
        backend = RedisBackend.from_options(Options(url=server.url, timeout_s=20))
        opened.append(backend)
        objects = {f"big{i}": pattern(3 << 20, i) for i in range(8)}
        assert set(write(backend, objects).values()) == {WriteOutcome.STORED}
        assert read(backend, list(objects), 3 << 20) == list(objects.values())
        assert backend.delete(list(objects)) == 8


class TestOptions:
    """Wrong settings are named before anything is served."""

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (Options(url="http://x"), "url"),
            (Options(url="redis://:pw@x?decode_responses=True"), "decode_responses"),
            (Options(timeout_s=0), "timeout_s"),
            (Options(ttl_s=-1), "ttl_s"),
            (Options(max_connections=0), "max_connections"),
        ],
    )
    def test_a_wrong_option_is_named(self, options: Options, named: str) -> None:
        """A typo would surface as misses at night."""
        with pytest.raises(ConfigError, match=named) as caught:
            RedisBackend.from_options(options)
        assert "pw" not in str(caught.value)

    def test_no_password_is_shown(self) -> None:
        """The password would stand in every log and bug report."""
        options = Options(url="redis://bob:s3cret@h:1/0?password=s3cret&db=0")
        for text in (repr(options), str(options), mask_password("unix://:s3cret@/run/r.sock")):
            assert "s3cret" not in text
        assert "bob:***@h:1/0" in repr(options)

    def test_errors_of_an_unreachable_server_show_no_password(self, opened) -> None:
        """The password would reach the log when the server is down."""
        backend = RedisBackend.from_options(Options(url=f"redis://:s3cret@127.0.0.1:{free_port()}/0"))
        opened.append(backend)
        with pytest.raises(BackendUnavailable) as caught:
            backend.probe(["a"])
        assert "s3cret" not in str(caught.value)

    def test_a_wrong_password_is_an_outage_not_a_crash(self, tmp_path, opened) -> None:
        """A rotated password would end the engine."""
        with RedisServer(tmp_path, arguments=["--requirepass", "right"]) as server:
            wrong = RedisBackend.from_options(at(server, url=server.url.replace("//", "//:wrong@")))
            right = RedisBackend.from_options(at(server, url=server.url.replace("//", "//:right@")))
            opened += [wrong, right]
            with pytest.raises(BackendUnavailable):
                wrong.probe(["a"])
            assert right.probe(["a"]) == b"\x00"

    def test_a_unix_socket_serves_too(self, server, opened) -> None:
        """The fastest way on one host would be closed."""
        backend = RedisBackend.from_options(Options(url=f"unix://{server.socket_path}?db=0"))
        opened.append(backend)
        write(backend, {"unix": pattern(100)})
        assert read(backend, ["unix"], 100) == [pattern(100)]

    def test_a_cluster_is_refused_at_start(self, tmp_path) -> None:
        """Every batch would fail half of its keys with redirects."""
        with (
            RedisServer(tmp_path, arguments=["--cluster-enabled", "yes"]) as server,
            pytest.raises(ConfigError, match="Redis Cluster"),
        ):
            RedisBackend.from_options(at(server))

    def test_an_object_gone_between_probe_and_read_is_a_miss(self, server, client, opened) -> None:
        """An expiry at the wrong moment would fail the request."""
        backend = RedisBackend.from_options(at(server, key_prefix="gone:"))
        opened.append(backend)
        write(backend, {"a": pattern(10)})
        assert backend.probe(["a"]) == b"\x01"
        client.delete("gone:a")
        assert backend.read(["a"], [memoryview(bytearray(10))]) == [MISS]
