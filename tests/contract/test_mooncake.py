"""The `mooncake` backend keeps the contract against a real mooncake_master over TCP.

The segment lives in a process of its own, so every byte crosses a socket.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import xxhash

from hicache.errors import BackendUnavailable, ConfigError
from hicache.storage_backends.base import StorageBackend, WriteOutcome
from hicache.storage_backends.mooncake import DirectMooncakeBackend, MooncakeBackend, Options
from hicache.testing.backend_suite import BackendSuite, pattern, read, reserve, write
from hicache.testing.services import MooncakeMaster, MooncakeOwner, mooncake_missing

pytestmark = pytest.mark.skipif(mooncake_missing() is not None, reason=str(mooncake_missing()))

SEGMENT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(scope="module")
def owner(master: MooncakeMaster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeOwner]:
    with MooncakeOwner(tmp_path_factory.mktemp("owner"), master, segment_bytes=SEGMENT_BYTES) as owner:
        yield owner


def options(master: MooncakeMaster, **more: object) -> Options:
    given: dict[str, object] = {
        "master_server_address": master.address,
        "master_metrics_port": master.metrics_port,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": 0,
        "staging_bytes": 32 << 20,
        "check_server": True,
        "timeout_s": 60.0,  # what a busy machine may need, where nothing is to fail
    }
    return Options(**(given | more))


@pytest.fixture(scope="module")
def backend(master: MooncakeMaster, owner: MooncakeOwner) -> Iterator[StorageBackend]:
    backend = MooncakeBackend.from_options(options(master))
    yield backend
    backend.close()


class TestMooncake(BackendSuite):
    """Everything that any backend must do."""

    master: ClassVar[MooncakeMaster]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def backend(cls, master: MooncakeMaster, owner: MooncakeOwner) -> Iterator[StorageBackend]:
        """One client for all tests: closing one takes Mooncake about a second."""
        cls.master = master
        backend = MooncakeBackend.from_options(options(master))
        yield backend
        backend.close()

    @pytest.fixture(scope="class")
    @classmethod
    def peer(cls, backend: StorageBackend) -> Iterator[StorageBackend]:
        peer = MooncakeBackend.from_options(options(cls.master))
        yield peer
        peer.close()

    def make_backend(self) -> StorageBackend:
        return MooncakeBackend.from_options(options(self.master))

    def test_a_reader_never_sees_a_torn_object(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A page replaced while it is read would mix old and new KV.

        A forced delete frees the memory under readers elsewhere (see MooncakeBackend.delete), so here the
        reader does what every reader of objects does: it verifies, and takes a torn object for a miss.
        """
        key, size = prefix + "a", 1 << 20
        ended = threading.Event()

        def rewrite() -> int:
            stored = 0
            try:
                for value in range(60):
                    body = bytes([value]) * size
                    backend.delete([key])
                    outcome = write(backend, {key: xxhash.xxh3_64_digest(body) + body})[key]
                    stored += outcome is WriteOutcome.STORED
            finally:
                ended.set()
            return stored

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(rewrite)
            while not ended.is_set():
                (seen,) = read(peer, [key], 8 + size)
                if seen is not None and xxhash.xxh3_64_digest(seen[8:]) == seen[:8]:
                    assert seen[8:] == seen[8:9] * size
            assert writer.result() == 60
        (last,) = read(peer, [key], 8 + size)
        assert last is not None
        assert last[8:] == bytes([59]) * size


class TestStore:
    """What Mooncake does that its return codes do not say."""

    def test_an_object_can_be_deleted_right_after_it_was_read(self, backend: StorageBackend) -> None:
        """A damaged object would stay for ten seconds, since reading it leases it."""
        write(backend, {"leased": pattern(1000)})
        assert read(backend, ["leased"], 1000) == [pattern(1000)]
        assert backend.delete(["leased"]) == 1
        assert write(backend, {"leased": pattern(900, 1)}) == {"leased": WriteOutcome.STORED}
        assert read(backend, ["leased"], 1000) == [pattern(900, 1)]

    def test_a_full_store_answers_no_space_object_by_object(self, tmp_path: Path) -> None:
        """A burst of write-backs would look like an outage."""
        with (
            MooncakeMaster(tmp_path) as master,
            MooncakeOwner(tmp_path, master, segment_bytes=SEGMENT_BYTES),
            contextlib.closing(MooncakeBackend.from_options(options(master))) as backend,
        ):
            outcomes: dict[str, WriteOutcome] = {}
            both = {WriteOutcome.STORED, WriteOutcome.NO_SPACE}
            deadline = (
                time.monotonic() + 60.0
            )  # where writes are slow, the master makes room before it is full
            start = 0
            while start < 80 or not (both <= set(outcomes.values()) or time.monotonic() > deadline):
                burst = {f"burst{start + i}": pattern(1 << 20, start + i) for i in range(8)}
                outcomes |= write(backend, burst)
                start += 8
            # A busy master may evict an object before its writer looks for it: that is no failure either.
            assert WriteOutcome.FAILED not in outcomes.values()
            assert both <= set(outcomes.values())
            there = [key for key, found in zip(outcomes, backend.probe(list(outcomes)), strict=True) if found]
            assert there
            for key in there:
                assert read(backend, [key], 1 << 20) in ([pattern(1 << 20, int(key[5:]))], [None])

    def test_open_writes_are_bounded_by_the_staging_memory(self, backend: StorageBackend) -> None:
        """Writes would take registered memory without end."""
        held = [reserve(backend, f"staged{i}", 4 << 20) for i in range(4)]
        assert backend.begin_write(["more"], [4096]) == [WriteOutcome.NO_SPACE]
        backend.abort(held)
        backend.abort([reserve(backend, "more", 16 << 20)])
        assert backend.begin_write(["huge"], [(16 << 20) + 1]) == [WriteOutcome.NO_SPACE]

    def test_a_batch_larger_than_the_staging_memory_is_read_in_parts(self, backend: StorageBackend) -> None:
        """A long prompt would come back cut, or not at all."""
        objects = {f"part{i}": pattern(3 << 20, i) for i in range(10)}
        for key, data in objects.items():
            write(backend, {key: data})
        assert read(backend, list(objects), 3 << 20) == list(objects.values())
        backend.clear("part")

    def test_a_prefix_with_regex_characters_is_taken_literally(self, backend: StorageBackend) -> None:
        """Clearing one model would clear another, or fail."""
        odd = {f"m.*(1)[a]+{{2}}|^$\\/-{i}": pattern(10) for i in range(3)}
        write(backend, odd | {"mx1a": pattern(10)})
        assert backend.clear("m.*(1)[a]+{2}|^$\\/-") == 3
        assert backend.probe(["mx1a"]) == b"\x01"

    def test_keys_of_another_prefix_are_neither_seen_nor_cleared(
        self, master: MooncakeMaster, backend: StorageBackend
    ) -> None:
        """Clearing our cache would delete what another application stores in the same pool."""
        other = MooncakeBackend.from_options(options(master, key_prefix="other/"))
        try:
            write(backend, {"a": pattern(10)})
            assert other.probe(["a"]) == b"\x00"
            write(other, {"a": pattern(20)})
            assert other.clear("") == 1
            assert backend.probe(["a"]) == b"\x01"
        finally:
            other.close()

    def test_statistics_come_from_the_master(self, backend: StorageBackend) -> None:
        """An operator would not see the pool fill up."""
        stats = backend.stats()
        assert stats.capacity_bytes == SEGMENT_BYTES
        assert 0 <= stats.used_bytes <= SEGMENT_BYTES
        assert stats.details["state"] == "up"


class TestOwnSegment:
    """A client that gives memory of its own to the pool, which is the default."""

    def test_what_a_leaving_client_held_becomes_a_miss_for_the_others(
        self, master: MooncakeMaster, owner: MooncakeOwner, backend: StorageBackend
    ) -> None:
        """Scaling replicas down would turn hits into errors, or into other bytes."""
        leaving = MooncakeBackend.from_options(
            options(master, global_segment_size="64 MB", staging_bytes=64 << 20)
        )
        assert leaving.stats().capacity_bytes == SEGMENT_BYTES + (64 << 20)
        objects = {f"own{i}": pattern(500_000 + i, i) for i in range(40)}
        assert set(write(leaving, objects).values()) == {WriteOutcome.STORED}
        assert read(backend, list(objects), 600_000) == list(objects.values())
        leaving.close()
        left = read(backend, list(objects), 600_000)
        assert None in left
        assert all(seen in (None, data) for seen, data in zip(left, objects.values(), strict=True))
        assert write(backend, {"own-after": pattern(10)}) == {"own-after": WriteOutcome.STORED}
        backend.clear("own")


class TestDirectReads:
    """Reading into the caller's own registered memory."""

    def test_registered_memory_receives_the_bytes_without_staging(
        self, master: MooncakeMaster, owner: MooncakeOwner
    ) -> None:
        """The bytes would land beside the page, or clobber its neighbours."""
        direct = MooncakeBackend.from_options(options(master, direct_reads=True))
        try:
            assert isinstance(direct, DirectMooncakeBackend)
            assert not direct.settles_on_timeout
            memory = memoryview(mmap.mmap(-1, 1 << 20))
            direct.register(memory)
            objects = {f"direct{i}": pattern(5000 + i, i) for i in range(4)}
            write(direct, objects)
            views = [memory[i * 8192 : i * 8192 + 6000] for i in range(4)]
            assert direct.read(list(objects), views) == [5000, 5001, 5002, 5003]
            for view, data in zip(views, objects.values(), strict=True):
                assert view[: len(data)] == data
                assert not any(view[len(data) :])
            assert not any(memory[6000:8192])
            assert direct.read(["direct0"], [memory[:100]]) == [5000]
            assert read(direct, ["direct1"], 6000) == [objects["direct1"]]  # memory it does not know
        finally:
            direct.close()


class TestSharedMemory:
    """Attached to a mooncake_client on the same host."""

    def test_objects_cross_by_shared_memory_and_other_clients_see_them(
        self, master: MooncakeMaster, owner: MooncakeOwner, backend: StorageBackend
    ) -> None:
        """The fast path on one host would store under other names, or nothing."""
        attached = MooncakeBackend.from_options(
            options(master, standalone_storage=True, client_server_address=owner.address)
        )
        try:
            objects = {f"shm{i}": pattern(70_000 + i, i) for i in range(8)}
            assert set(write(attached, objects).values()) == {WriteOutcome.STORED}
            assert read(backend, list(objects), 80_000) == list(objects.values())
            assert read(attached, list(objects), 80_000) == list(objects.values())
            assert attached.delete(["shm0"]) == 1
            assert backend.probe(["shm0", "shm1"]) == b"\x00\x01"
        finally:
            attached.close()
        with pytest.raises(BackendUnavailable):
            attached.probe(["shm1"])


class TestOptions:
    """Wrong settings are named before the library sees them."""

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"timeout_s": 0}, "timeout_s"),
            ({"workers": 0}, "workers"),
            ({"staging_bytes": 5}, "staging_bytes"),
            ({"metadata_server": "redis://127.0.0.1:6379"}, "metadata_server"),
            ({"global_segment_size": "4 parsecs"}, "global_segment_size"),
            ({"standalone_storage": True}, "client_server_address"),
        ],
    )
    def test_a_wrong_option_is_named(self, given: dict[str, object], named: str) -> None:
        """Redis metadata, for one, would end the process without a word."""
        wrong = Options(master_server_address="127.0.0.1:1", **given)
        with pytest.raises(ConfigError, match=named):
            MooncakeBackend.from_options(wrong)
