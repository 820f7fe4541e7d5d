"""The shm data plane with real processes, killed or stopped at the worst moments, and without it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.clock import ManualClock
from hicache.daemon.arena_store import ArenaStore
from hicache.daemon.server import Daemon
from hicache.errors import BackendError
from hicache.storage_backends import shared_arena
from hicache.storage_backends.base import MISS, Reservation, WriteOutcome
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.backend_suite import pattern, read, reserve, write
from hicache.testing.daemon import DaemonProcess, connect, generated_client, hello, poll, running_daemon
from hicache.testing.services import wait_until_stopped

BOUND_S = 60.0
SIZE = 256 << 10
KEYS = [f"k{i}" for i in range(12)]

PREAMBLE = """
    import json, os, signal, sys
    from hicache.storage_backends import shared_arena
    from hicache.testing.daemon import connect
    backend = connect(sys.argv[1])
    assert backend.stats().details["data_plane"] == "shm"
    KEYS, SIZE = json.loads(sys.argv[2]), int(sys.argv[3])
    contents = sys.stdin.buffer.read(3 * len(KEYS) * SIZE)  # of each version, of each key
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextlib.contextmanager
def client(address: str, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script as another replica on this host."""
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(script)
    process = subprocess.Popen(
        [sys.executable, "-c", code, address, json.dumps(KEYS), str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(b"".join(object_of(key, version) for version in range(3) for key in KEYS))
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until a replica has stopped itself."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it ended with status {status}"
    wait_until_stopped(process.pid)


def resumed(process: subprocess.Popen[bytes]) -> object:
    """Let a stopped replica finish; return what it says."""
    process.send_signal(signal.SIGCONT)
    assert process.stdout is not None
    out = process.stdout.read()
    assert process.wait(BOUND_S) == 0
    return json.loads(out)


@contextlib.contextmanager
def serving(**settings: object) -> Iterator[tuple[Daemon, GrpcBackend]]:
    """A daemon in this process, a client of it, and a look at the arena at the end."""
    with running_daemon(**settings) as daemon:
        backend = connect(daemon.address)
        yield daemon, backend
        store_of(daemon).check_integrity()
        backend.close()


def store_of(daemon: Daemon) -> ArenaStore:
    store = daemon._store.backend
    assert isinstance(store, ArenaStore)
    return store


def stat(backend: GrpcBackend, name: str) -> object:
    return backend.stats().details[name]


def object_of(key: str, version: int = 0) -> bytes:
    """Bytes that are this key's and version's in every 256-byte block."""
    return pattern(SIZE, sum(key.encode()) * 7 + 101 * version)


class TestWriters:
    def test_one_killed_in_mid_write_leaves_nothing_and_its_room_is_back_at_once(self) -> None:
        """A replica killed by the kernel would leave torn pages, or hold its room until the time-out."""
        script = """
            held = backend.begin_write(KEYS, [SIZE] * len(KEYS))
            for one in held[:7]:
                one.buffer[:SIZE // 2] = contents[:SIZE // 2]
            backend.commit(held[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        """
        with serving(reservation_seconds=3600.0) as (daemon, backend):
            with client(daemon.address, script) as process:
                assert process.wait(BOUND_S) == -signal.SIGKILL
                poll(lambda: stat(backend, "reservations") == 0)
            assert stat(backend, "reserved_bytes") == 0
            assert backend.probe(KEYS) == b"\x01" + bytes(11)
            assert backend.delete(KEYS) == 1
            objects = {key: object_of(key) for key in KEYS}
            assert set(write(backend, objects).values()) == {WriteOutcome.STORED}
            assert read(backend, KEYS, SIZE) == list(objects.values())

    def test_one_stopped_past_its_reservation_writes_over_nobody(self) -> None:
        """A replica that the kernel stopped would, once it goes on, write into another's page."""
        script = """
            held = backend.begin_write(KEYS, [SIZE] * len(KEYS))
            stop()
            for one in held:
                one.buffer[:] = b"\\xee" * SIZE
            print(json.dumps([one.value for one in backend.commit(held)]))
        """
        settings = {"capacity": "8MiB", "reservation_seconds": 0.3, "reservation_bytes": "8MiB"}
        with serving(**settings) as (daemon, backend), client(daemon.address, script) as process:
            stopped(process)
            poll(lambda: stat(backend, "reservations") == 0)
            assert stat(backend, "reserved_bytes") == len(KEYS) * SIZE  # kept from others, the keys are free
            more = [*KEYS, *(f"more{i}" for i in range(40))]
            for key in more:  # fills what is left of the store twice
                assert write(backend, {key: object_of(key)}) == {key: WriteOutcome.STORED}
            there = [key for key, flag in zip(more, backend.probe(more), strict=True) if flag]
            assert len(there) >= 16
            assert resumed(process) == ["failed"] * len(KEYS)
            assert read(backend, there, SIZE) == [object_of(key) for key in there]
            assert stat(backend, "reserved_bytes") == 0

    def test_one_stopped_for_longer_than_anybody_waits_damages_no_read(self) -> None:
        """What it writes into others' pages would be read as theirs."""
        script = """
            held = backend.begin_write(KEYS, [SIZE] * len(KEYS))
            stop()
            for one in held:
                one.buffer[:] = b"\\xee" * SIZE
            print(json.dumps([one.value for one in backend.commit(held)]))
        """
        settings = {"capacity": "4MiB", "reservation_seconds": 0.03, "reservation_bytes": "4MiB"}
        with serving(**settings) as (daemon, backend), client(daemon.address, script) as process:
            stopped(process)
            poll(lambda: stat(backend, "reserved_bytes") == 0)  # its places are given up
            objects = {key: object_of(key) for key in KEYS}
            assert set(write(backend, objects).values()) == {WriteOutcome.STORED}
            assert read(backend, KEYS, SIZE) == list(objects.values())
            assert resumed(process) == ["failed"] * len(KEYS)
            found = read(backend, KEYS, SIZE)
            assert None in found, "it wrote nowhere near the objects: the test shows nothing"
            assert all(one in (None, objects[key]) for key, one in zip(KEYS, found, strict=True))
            lost = {key: objects[key] for key, one in zip(KEYS, found, strict=True) if one is None}
            assert set(write(backend, lost).values()) == {WriteOutcome.STORED}
            assert read(backend, KEYS, SIZE) == list(objects.values())


class TestReaders:
    @pytest.mark.parametrize("lease", [0.2, 3600.0], ids=["past its lease", "under its lease"])
    def test_one_stopped_in_mid_copy_never_returns_anothers_bytes(self, lease: float) -> None:
        """A page would be half of one prompt's KV and half of another's."""
        script = """
            copies, copyto = [], shared_arena.np.copyto
            def torn(target, source):
                copies.append(len(target))
                half = len(target) // 2
                copyto(target[:half], source[:half])
                if len(copies) == 4:
                    stop()
                copyto(target[half:], source[half:])
            shared_arena.np.copyto = torn
            buffers = [bytearray(SIZE) for _ in KEYS]
            sizes = backend.read(KEYS, [memoryview(buffer) for buffer in buffers])
            def told(index, size, buffer):
                at = [contents.find(buffer, (v * len(KEYS) + index) * SIZE) for v in range(3)]
                of = [(v * len(KEYS) + index) * SIZE for v in range(3)]
                return "miss" if size == -1 else next((v for v in range(3) if at[v] == of[v]), "wrong")
            print(json.dumps([told(*row) for row in zip(range(len(KEYS)), sizes, buffers)]))
        """
        settings = {"capacity": "8MiB", "lease_seconds": lease, "reservation_bytes": "8MiB"}
        with serving(**settings) as (daemon, backend):
            write(backend, {key: object_of(key) for key in KEYS})
            with client(daemon.address, script) as process:
                stopped(process)
                backend.delete(KEYS)
                filled = [WriteOutcome.NO_SPACE]

                def fill() -> bool:
                    """Write until every free place of the store was used, twice over."""
                    for version in (1, 2):
                        backend.clear("")
                        objects = {f"{key}/{i}": object_of(key, version) for key in KEYS for i in range(3)}
                        filled.extend(write(backend, objects).values())
                    return lease > 60 or filled[-30:].count(WriteOutcome.STORED) >= 29

                poll(fill)
                backend.clear("")
                write(backend, {key: object_of(key, 2) for key in KEYS})
                found = resumed(process)
            assert isinstance(found, list)
            assert set(found) <= ({0} if lease > 60 else {0, 2, "miss"})
            assert lease > 60 or set(found) != {0}

    def test_a_place_that_is_being_read_is_not_given_away(self) -> None:
        """Law 5: a page would change under its reader."""
        settings = {"capacity": "2MiB", "reservation_bytes": "2MiB", "lease_bytes": "1MiB"}
        with running_daemon(**settings) as daemon:
            backend = connect(daemon.address)
            write(backend, {"a": object_of("a")})
            granted, kept = [], backend._connection._session.arena
            note = kept.note_release
            kept.note_release = granted.append
            assert read(backend, ["a"], SIZE) == [object_of("a")]
            (extent,) = [one for one in store_of(daemon)._map if one.pins]
            backend.delete(["a"])
            for i in range(20):
                write(backend, {f"x{i}": object_of("x")})
            place = store_of(daemon).segment.memory[extent.offset : extent.offset + SIZE]
            assert bytes(place) == object_of("a")
            assert store_of(daemon).stats().details["lingering_bytes"] == SIZE
            note(granted[0])
            write(backend, {"y": object_of("y")})
            assert store_of(daemon).stats().details["lingering_bytes"] == 0
            backend.close()


class TestDaemonsDeath:
    def test_memory_stays_valid_and_nothing_is_served_from_it(self, tmp_path: Path) -> None:
        """A replica would die of SIGBUS with its daemon, or continue from what the dead one held."""
        with DaemonProcess(tmp_path) as daemon:
            backend = connect(daemon.address)
            write(backend, {"a": object_of("a")})
            held = reserve(backend, "b", SIZE)
            before = backend.epoch
            daemon.kill()
            held.buffer[:] = object_of("b")
            with pytest.raises(BackendError):
                backend.read(["a"], [memoryview(bytearray(SIZE))])
            daemon.restart()
            poll(lambda: answers(backend))
            assert backend.epoch != before
            assert stat(backend, "data_plane") == "shm"
            assert read(backend, ["a"], SIZE) == [None]
            assert bytes(held.buffer) == object_of("b")
            assert backend.commit([held]) == [WriteOutcome.FAILED]
            assert write(backend, {"b": object_of("b")}) == {"b": WriteOutcome.STORED}
            backend.close()

    def test_a_killed_daemon_leaves_no_memory_behind(self, tmp_path: Path) -> None:
        """Each crash would cost the host a cache's worth of memory, until a reboot."""
        with DaemonProcess(tmp_path, arguments=["--capacity", "64MiB"]) as daemon:
            held = [os.readlink(one) for one in Path(f"/proc/{daemon.pid}/fd").iterdir()]
            assert any(name.startswith("/memfd:hicache-arena") for name in held)
            daemon.kill()
        assert not [name for name in os.listdir("/dev/shm") if "hicache" in name]


class TestWithoutSharedMemory:
    @pytest.mark.parametrize(
        ("broken", "by"),
        [("os.geteuid", 12345), ("mmap.mmap", OSError("no address space"))],
        ids=["another user's", "it cannot be mapped"],
    )
    def test_a_client_that_cannot_map_it_goes_on_inline_and_says_so_once(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        broken: str,
        by: object,
    ) -> None:
        """In a container of its own a replica would have no L3, or fill the log."""

        def instead(*_: object, **__: object) -> object:
            if isinstance(by, OSError):
                raise by
            return by

        module, _, name = broken.partition(".")
        caplog.set_level("INFO")
        clock = ManualClock()
        with running_daemon(clock=clock, max_sessions=1) as daemon, generated_client(daemon.address) as stub:
            backend = GrpcBackend(Options(address=daemon.address))
            with monkeypatch.context() as patch:
                patch.setattr(getattr(shared_arena, module), name, instead)
                for _ in range(2):
                    assert write(backend, {"a": object_of("a")})
                    clock.advance(601.0)
                    hello(stub)  # in its place: the client opens another session
                    clock.advance(601.0)
                assert read(backend, ["a"], SIZE) == [object_of("a")]
                assert stat(backend, "data_plane") == "inline"
            assert caplog.text.count("bytes travel inline, its shared memory cannot be had") == 1
            backend.close()

    def test_a_daemon_without_memory_for_an_arena_serves_inline(self, tmp_path: Path) -> None:
        """On a host with little shared memory the daemon would not start, or die of SIGBUS later."""

        class Limited(DaemonProcess):
            def _command(self) -> list[str]:
                return ["prlimit", "--fsize=1000000", *super()._command()]

        with Limited(tmp_path, arguments=["--capacity", "64MiB"]) as daemon:
            backend = connect(daemon.address)
            assert write(backend, {"a": object_of("a")}) == {"a": WriteOutcome.STORED}
            assert read(backend, ["a"], SIZE) == [object_of("a")]
            assert (stat(backend, "data_plane"), stat(backend, "arena_bytes")) == ("inline", 0)
            backend.close()

    def test_an_arena_that_cannot_grow_is_a_smaller_store(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A host that runs out of memory would take the daemon and its replicas down."""
        mib = 1 << 20

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with serving(capacity="256MiB", reservation_bytes="256MiB") as (_, backend):
            before = stat(backend, "arena_bytes")
            assert 0 < before < 64 * mib
            monkeypatch.setattr(os, "posix_fallocate", full)
            for i in range(64):
                assert write(backend, {f"m{i}": pattern(mib, i)}) == {f"m{i}": WriteOutcome.STORED}
            assert stat(backend, "arena_bytes") == before
            assert caplog.text.count("the arena stays at ") == 1
            there = [i for i in range(64) if backend.probe([f"m{i}"]) == b"\x01"]
            assert there[-1] == 63
            assert 8 <= len(there) < 64
            assert read(backend, [f"m{i}" for i in there], mib) == [pattern(mib, i) for i in there]

    def test_a_daemon_told_inline_has_no_arena(self) -> None:
        """An operator who does not want shared memory would get it."""
        with running_daemon(data_planes="inline") as daemon:
            backend = connect(daemon.address)
            assert stat(backend, "data_plane") == "inline"
            assert daemon._plane is None
            backend.close()


class TestTheSocket:
    @pytest.mark.parametrize(
        "said", [b"", b"abc", b"\x01" * 8 + b"\xff" * 200, b"\x01" * 8 + b"\x00" * 8 + b"\x63"]
    )
    def test_whoever_talks_nonsense_is_hung_up_on_and_others_are_served(self, said: bytes) -> None:
        """A stray program on the host would take the daemon down."""
        with running_daemon() as daemon:
            backend = connect(daemon.address)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stray:
                stray.settimeout(BOUND_S)
                stray.connect(b"\0" + daemon._plane.offer().socket.encode())
                stray.sendall(said)
                stray.shutdown(socket.SHUT_WR)
                while stray.recv(1 << 16):
                    pass
            assert write(backend, {"a": b"1"}) == {"a": WriteOutcome.STORED}
            assert read(backend, ["a"], 1) == [b"1"]
            backend.close()

    def test_a_client_that_closes_is_counted_no_more(self) -> None:
        """Stats would show replicas that left long ago."""
        with running_daemon() as daemon:
            first, second = (connect(daemon.address) for _ in range(2))
            assert daemon._plane.attached == 2
            first.close()
            poll(lambda: daemon._plane.attached == 1)
            assert read(second, ["none"], 1) == [None]
            second.close()

    def test_a_replica_that_was_killed_is_no_session_any_more(self) -> None:
        """For ten minutes stats would show replicas that are dead, and newcomers be isolated from them."""
        with serving() as (_, backend):
            assert stat(backend, "sessions") == 1
            with client(backend._options.address, "stop()") as process:
                stopped(process)
                assert stat(backend, "sessions") == 2
                process.kill()
                process.wait(BOUND_S)
                poll(lambda: stat(backend, "sessions") == 1)

    def test_what_a_closed_client_may_still_write_to_is_not_given_away(self) -> None:
        """A thread that fills a page while its backend is detached would write into another's."""
        settings = {"capacity": "2MiB", "reservation_bytes": "2MiB", "reservation_seconds": 3600.0}
        with running_daemon(**settings) as daemon:
            backend, other = (connect(daemon.address) for _ in range(2))
            (held,) = backend.begin_write(["a"], [SIZE])
            assert isinstance(held, Reservation)
            backend.close()
            poll(lambda: stat(other, "reservations") == 0)
            keys = [f"x{i}" for i in range(7)]
            assert set(write(other, {key: object_of(key) for key in keys}).values()) == {WriteOutcome.STORED}
            held.buffer[:] = b"\xee" * SIZE
            assert read(other, keys, SIZE) == [object_of(key) for key in keys]
            assert write(other, {"a": object_of("a")}) == {"a": WriteOutcome.STORED}
            other.close()


def test_a_batch_larger_than_the_share_of_grants_comes_back_whole() -> None:
    """Reads above the lease bytes would miss what is there."""
    settings = {"capacity": "8MiB", "reservation_bytes": "8MiB", "lease_bytes": 3 * SIZE}
    with running_daemon(**settings) as daemon:
        backend = connect(daemon.address)
        objects = {key: object_of(key) for key in KEYS}
        write(backend, objects)
        assert read(backend, KEYS, SIZE) == list(objects.values())
        hold = backend._connection._session.arena
        hold.note_release, noted = (lambda grant: None), hold.note_release
        for _ in range(3):  # nothing is released: the rest of what is asked for comes inline
            assert read(backend, KEYS, SIZE) == list(objects.values())
        hold.note_release = noted
        calls = daemon.metrics.counters()
        assert any(re.search("calls.*Read", name) for name in calls), calls
        assert backend.read(["none"], [memoryview(bytearray(1))]) == [MISS]
        backend.close()


def test_replicas_that_read_and_write_while_the_store_evicts_never_read_wrong_bytes() -> None:
    """Under load, places would change owner between a look-up and its copy."""
    objects = {f"o{i}": pattern(30_000 + 977 * i, i) for i in range(60)}
    wrong: list[str] = []
    settings = {"capacity": "1MiB", "reservation_bytes": "512KiB", "lease_seconds": 0.001}
    with serving(**settings) as (daemon, backend):
        clients = [backend, connect(daemon.address)]

        def work(number: int) -> int:
            rng, hits = random.Random(number), 0
            for _ in range(50):
                keys = rng.sample(sorted(objects), 6)
                write(clients[number % 2], {key: objects[key] for key in keys[:3]})
                for key, found in zip(keys, read(clients[number // 2], keys, 100_000), strict=True):
                    hits += found is not None
                    if found not in (None, objects[key]):
                        wrong.append(key)
                if rng.random() < 0.2:
                    clients[0].delete(keys[:1])
            return hits

        with ThreadPoolExecutor(4) as pool:
            hits = sum(pool.map(work, range(4)))
        assert not wrong
        assert hits > 300
        assert store_of(daemon).stats().details["evicted"] > 100
        clients[1].close()


def answers(backend: GrpcBackend) -> bool:
    try:
        backend.probe(["any"])
    except BackendError:
        return False
    return True
