"""`hicache serve` as people run it: a process that is started, signalled, killed and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.rpc.v1 import cache_pb2 as pb
from hicache.storage_backends.base import MISS, WriteOutcome
from hicache.storage_backends.grpc import GrpcBackend
from hicache.testing.backend_suite import pattern, read, reserve, write
from hicache.testing.daemon import DaemonProcess, begin, connect, generated_client, hello, poll
from hicache.testing.services import free_port, patiently

BOUND_S = 60.0
TIMEOUT_S = 2.0
RESERVATIONS = ("--reservation-seconds", "5")  # longer than any write takes on a busy machine
HICACHE = str(Path(sys.executable).with_name("hicache"))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, arguments=["--capacity", "256MiB", *RESERVATIONS]) as daemon:
        yield daemon


@pytest.fixture
def backend(daemon: DaemonProcess) -> Iterator[GrpcBackend]:
    backend = connect(daemon.address)
    yield backend
    backend.close()


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [HICACHE, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    return process.returncode, out, err


class TestDeath:
    def test_a_daemon_killed_under_load_is_an_error_in_time_and_then_a_miss(
        self, daemon: DaemonProcess, backend: GrpcBackend
    ) -> None:
        """Replicas would hang, crash or serve wrong bytes when the daemon dies, or need a restart after."""
        page = pattern(200_000)
        assert all_there(patiently(lambda: write(backend, {f"r{i}": page for i in range(20)})))
        before = backend.epoch
        stop, worked = threading.Event(), threading.Barrier(3)
        wrong: list[object] = []

        def keep_trying(work: object) -> None:
            at_work = False
            while not stop.is_set():
                try:
                    work()
                except (BackendUnavailable, BackendTimeout):
                    pass
                except BaseException as error:
                    wrong.append(error)
                    raise
                if not at_work:
                    at_work = True
                    worked.wait(BOUND_S)

        def reads() -> None:
            found = read(backend, [f"r{i}" for i in range(20)], 200_000)
            assert all(one in (None, page) for one in found)

        counter = iter(range(1_000_000))

        def writes() -> None:
            write(backend, {f"w{next(counter)}": page for _ in range(10)})

        threads = [threading.Thread(target=keep_trying, args=(work,)) for work in (reads, writes)]
        for thread in threads:
            thread.start()
        worked.wait(BOUND_S)
        daemon.kill()
        with pytest.raises(BackendError):
            poll(lambda: backend.probe(["r0"]) == b"")
        daemon.restart()
        poll(lambda: answers(backend))
        stop.set()
        for thread in threads:
            thread.join(BOUND_S)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        assert backend.epoch not in (0, before)
        assert patiently(lambda: read(backend, ["r0"], 200_000)) == [None]
        assert all_there(patiently(lambda: write(backend, {"r0": page})))
        assert patiently(lambda: read(backend, ["r0"], 200_000)) == [page]

    def test_what_was_reserved_before_a_restart_is_not_stored_after_it(
        self, daemon: DaemonProcess, backend: GrpcBackend
    ) -> None:
        """A commit would land on a reservation number that the new daemon gave to somebody else."""
        reservation = patiently(lambda: reserve(backend, "k", 1000))
        daemon.restart()
        poll(lambda: answers(backend))
        other = patiently(lambda: reserve(backend, "other", 1000))
        assert backend.commit([reservation]) == [WriteOutcome.FAILED]
        assert backend.probe(["k", "other"]) == b"\x00\x00"
        assert backend.commit([other]) == [WriteOutcome.STORED]

    def test_a_daemon_that_hangs_is_a_timeout_within_the_bound(self, daemon: DaemonProcess) -> None:
        """A daemon stopped by the kernel would stop every replica with it."""
        backend = connect(daemon.address, timeout_s=TIMEOUT_S)
        patiently(lambda: write(backend, {"a": pattern(1000)}))
        buffer = bytearray(1000)
        daemon.pause()
        try:
            began = time.monotonic()
            with pytest.raises(BackendTimeout):
                backend.read(["a"], [memoryview(buffer)])
            assert time.monotonic() - began < TIMEOUT_S + BOUND_S
            left = bytes(buffer)  # what came before it hung; from here on the memory is the caller's
        finally:
            daemon.resume()
        poll(lambda: answers(backend))
        assert bytes(buffer) == left
        assert patiently(lambda: read(backend, ["a"], 1000)) == [pattern(1000)]
        backend.close()

    def test_a_client_killed_in_mid_write_leaves_nothing(
        self, daemon: DaemonProcess, backend: GrpcBackend
    ) -> None:
        """A replica killed by the kernel would leave torn pages, or keys that nobody can write again."""
        script = (
            "import os, signal\n"
            "from hicache.storage_backends import grpc\n"
            "from hicache.storage_backends.grpc import GrpcBackend, Options\n"
            f"options = Options(address={daemon.address!r}, data_planes='inline')\n"
            "backend = GrpcBackend.from_options(options)\n"
            "held = backend.begin_write([f'k{i}' for i in range(40)], [1_000_000] * 40)\n"
            "send = grpc.bulk.upload\n"
            "def torn(*args, **kwargs):\n"
            "    for count, message in enumerate(send(*args, **kwargs)):\n"
            "        if count == 20: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        yield message\n"
            "grpc.bulk.upload = torn\n"
            "backend.commit(held[:30])\n"
        )
        done = subprocess.run([sys.executable, "-c", script], timeout=BOUND_S, check=False)
        assert done.returncode == -signal.SIGKILL
        keys = [f"k{i}" for i in range(40)]
        assert patiently(lambda: backend.probe(keys)) == bytes(40)
        poll(lambda: patiently(backend.stats).details["reservations"] == 0)
        assert patiently(lambda: backend.probe(keys)) == bytes(40)
        assert all_there(patiently(lambda: write(backend, {key: pattern(1000) for key in keys})))

    def test_a_client_started_first_finds_the_daemon_later(self, tmp_path: Path) -> None:
        """Replicas would have to be restarted when the daemon comes up after them."""
        with DaemonProcess(tmp_path) as daemon:
            daemon.kill()
            backend = connect(daemon.address)
            with pytest.raises(BackendUnavailable):
                backend.read(["a"], [memoryview(bytearray(1))])
            daemon.restart()
            poll(lambda: answers(backend))
            assert patiently(lambda: backend.read(["a"], [memoryview(bytearray(1))])) == [MISS]
            backend.close()

    def test_a_forked_process_is_told_to_open_its_own(
        self, daemon: DaemonProcess, backend: GrpcBackend
    ) -> None:
        """A worker forked after the start would hang in the parent's connection, or break it."""
        script = (
            "import os, sys\n"
            "from hicache.errors import BackendUnavailable\n"
            "from hicache.testing.daemon import connect\n"
            f"backend = connect({daemon.address!r})\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try:\n"
            "        backend.probe(['a'])\n"
            "    except BackendUnavailable as error:\n"
            "        backend.close()\n"
            "        os._exit(0 if 'after the fork' in str(error) else 1)\n"
            "    os._exit(2)\n"
            "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
            "assert backend.probe(['a']) == b'\\x00'\n"
            "sys.exit(code)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], timeout=BOUND_S, check=False)
        assert done.returncode == 0


class TestCommand:
    def test_sigterm_drains_and_says_what_was_done(self, tmp_path: Path) -> None:
        """systemd would report a failure at every restart, or kill the daemon after a time-out."""
        ready = tmp_path / "ready.json"
        process = serve("--port", "0", "--metrics-port", "0", "--ready-file", str(ready))
        try:
            poll(ready.exists)
            told = json.loads(ready.read_text())
            backend = connect(told["address"])
            assert write(backend, {"a": b"1"}) == {"a": WriteOutcome.STORED}
            backend.close()
            process.send_signal(signal.SIGTERM)
            code, out, err = ended(process)
        finally:
            process.kill()
        assert code == 0
        assert out.splitlines()[0] == (
            f"listening on {told['address']}, metrics on port {told['metrics_port']}"
        )
        assert "drained in " in out
        assert "SIGTERM: draining for at most 10 s" in err

    def test_a_second_signal_ends_it_at_once(self, tmp_path: Path) -> None:
        """An operator in a hurry would have to find the process and kill it."""
        ready, gate = tmp_path / "ready.json", threading.Event()
        process = serve(
            *("--port", "0", "--no-metrics", "--ready-file", str(ready), "--drain-seconds", "300")
        )
        try:
            poll(ready.exists)
            with generated_client(json.loads(ready.read_text())["address"]) as stub:
                session = hello(stub).session
                held = begin(stub, session, {"a": 3})

                def never_ending() -> Iterator[pb.CommitRequest]:
                    yield pb.CommitRequest(
                        session=session, reservations=held.reservations, sizes=[3], data=b"a"
                    )
                    gate.wait(BOUND_S)

                upload = stub.Commit.future(never_ending(), timeout=BOUND_S)
                poll(
                    lambda: stub.Stats(pb.StatsRequest()).counters["hicache_daemon_received_bytes_total"] == 1
                )
                process.send_signal(signal.SIGTERM)
                assert process.stderr is not None
                while "draining for at most" not in process.stderr.readline():
                    assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert process.wait(BOUND_S) == -signal.SIGTERM
                gate.set()
                assert upload.exception(BOUND_S) is not None
        finally:
            gate.set()
            ended(process)

    @pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
    def test_a_port_in_use_is_one_clear_line(self, daemon: DaemonProcess, flag: str) -> None:
        """Two daemons would share one port and each replica would reach one of them at random."""
        flags = {"--port": "0", "--metrics-port": "0"} | {flag: str(daemon.port)}
        code, out, err = ended(serve(*(part for pair in flags.items() for part in pair)))
        assert (code, out) == (2, "")
        assert (
            err == f"hicache: {flag} {daemon.port} of host 127.0.0.1 cannot be had: Address already in use\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--host", "0.0.0.0"], "Add --allow-remote if that is wanted"),
            (["--host", "example.org"], "Add --allow-remote if that is wanted"),
            (["--capacity", "4G"], "'4G' is not a size"),
            (["--capacity", "-1"], "'-1' is not a size"),
            (["--lease-seconds", "-1"], "--lease-seconds -1.0 must be within 0"),
            (["--store", "nowhere"], "storage backend 'nowhere' does not exist; there are memory, file"),
            (["--data-planes", "shm,rdma"], "--data-planes 'shm,rdma' must be of shm, inline"),
            (["--data-planes", "shm"], "--data-planes must have inline"),
            (["--store-config", "{}x"], "--store-config {}x:"),
            (["--config", "/nonexistent.toml"], "--config /nonexistent.toml:"),
        ],
    )
    def test_a_wrong_setting_is_one_clear_line(self, arguments: list[str], says: str) -> None:
        """A typo would start a daemon with a default, or open it to the network."""
        code, out, err = ended(serve("--port", "0", "--no-metrics", *arguments))
        assert (code, out) == (2, "")
        assert says in err
        assert len(err.splitlines()) == 1

    def test_a_remote_host_is_allowed_in_so_many_words_and_warned_about(self, tmp_path: Path) -> None:
        """An operator would open the store to the network without knowing that it has no authentication."""
        ready = tmp_path / "ready.json"
        process = serve(
            *(
                "--host",
                "0.0.0.0",
                "--allow-remote",
                "--port",
                "0",
                "--no-metrics",
                "--ready-file",
                str(ready),
            )
        )
        try:
            poll(ready.exists)
            process.send_signal(signal.SIGINT)
            code, _, err = ended(process)
        finally:
            process.kill()
        assert code == 0
        assert "there is no authentication" in err

    def test_settings_come_from_a_file_and_flags_win(self, tmp_path: Path) -> None:
        """A deployed hicache.toml would be read in part, or override what was typed."""
        config = tmp_path / "hicache.toml"
        port = free_port()
        config.write_text(
            f'[serve]\nport = {port}\nmetrics_port = -1\nstore = "file"\n[serve.store_config]\n'
            f'file_storage_path = "{tmp_path / "objects"}"\n'
        )
        ready = tmp_path / "ready.json"
        process = serve("--config", str(config), "--port", "0", "--ready-file", str(ready))
        try:
            poll(ready.exists)
            told = json.loads(ready.read_text())
            assert told["port"] not in (0, port)
            backend = connect(told["address"])
            assert backend.stats().details["store"] == "file"
            backend.close()
        finally:
            process.kill()
            ended(process)


def all_there(outcomes: Mapping[str, WriteOutcome]) -> bool:
    """EXISTS is the outcome of a write whose first answer came too late."""
    return set(outcomes.values()) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}


def answers(backend: GrpcBackend) -> bool:
    try:
        backend.probe(["any"])
    except BackendError:
        return False
    return True
