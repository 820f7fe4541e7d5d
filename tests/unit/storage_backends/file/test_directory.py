"""Files: names that lose nothing, staging that leaves nothing, and whatever else lies around."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage_backends.base import WriteOutcome
from hicache.storage_backends.file import FileBackend, Fsync, Options
from hicache.storage_backends.file.directory import FANOUT, Directory
from hicache.testing.backend_suite import pattern, read, write

# Opens the directory, stages half an object, says so, and waits to be killed.
HALF_A_WRITE = """
import sys
from hicache.storage_backends.file import directory
from hicache.storage_backends.file import FileBackend, Options
backend = FileBackend.from_options(Options(file_storage_path=sys.argv[1]))
def stop_half_way(fd, data):
    import os
    os.write(fd, data[: len(data) // 2])
    print("half", flush=True)
    sys.stdin.read()
directory.write_all = stop_half_way
(reservation,) = backend.begin_write(["victim"], [1000])
backend.commit([reservation])
"""
# Writes the same keys as everybody else.
SAME_KEYS = """
import sys
from hicache.storage_backends.file import FileBackend, Options
from hicache.testing.backend_suite import pattern, write
backend = FileBackend.from_options(Options(file_storage_path=sys.argv[1]))
sys.stdin.read()
outcomes = write(backend, {f"k{i}": pattern(5000, i) for i in range(32)})
print(*{outcome.value for outcome in outcomes.values()})
backend.close()
"""


def make(path: Path, **options: object) -> FileBackend:
    return FileBackend.from_options(Options(file_storage_path=str(path), **options))  # type: ignore[arg-type]


def staged(path: Path) -> list[str]:
    return [p.name for p in path.glob("staging/*/*") if p.name != "owner"]


def spawn(script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@given(st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=2, unique=True))
def test_two_keys_never_share_a_file(tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> None:
    """One prompt's KV would be read for another's."""
    directory = Directory.__new__(Directory)
    directory._objects = "/objects"
    try:
        one, two = (directory.path(key) for key in keys)
    except UnicodeEncodeError:
        return
    assert one != two
    assert os.path.dirname(os.path.dirname(one)) == "/objects"


@pytest.mark.parametrize(
    "key", ["a/b", "..", "../../etc/passwd", "a b", "%2F", "~x", "größe", "f=1/s.0-of-2/full/ab"]
)
def test_any_key_can_be_listed_and_cleared(tmp_path: Path, key: str) -> None:
    """Some objects could never be found again, or would be written outside of the directory."""
    backend = make(tmp_path / "store")
    write(backend, {key: pattern(10), "other": pattern(10)})
    assert read(backend, [key], 10) == [pattern(10)]
    assert len(list((tmp_path / "store" / "objects").glob("*/*.hco"))) == 2
    assert backend.clear(key) == 1
    assert backend.probe([key, "other"]) == b"\x00\x01"
    backend.close()


def test_a_key_too_long_for_a_file_name_is_a_miss(tmp_path: Path) -> None:
    """One odd key would end the worker thread."""
    backend = make(tmp_path)
    key = "x" * 300
    assert backend.probe([key]) == b"\x00"
    assert read(backend, [key], 10) == [None]
    assert write(backend, {key: pattern(10)}) == {key: WriteOutcome.FAILED}
    assert backend.stats().details["write_enametoolong"] == 1
    assert write(backend, {"a": pattern(10)}) == {"a": WriteOutcome.STORED}
    backend.close()


def test_clear_leaves_foreign_files_alone(tmp_path: Path) -> None:
    """Clearing the cache would delete what somebody else keeps in the same directory."""
    backend = make(tmp_path)
    write(backend, {"a": pattern(10)})
    part = next(tmp_path.glob("objects/*"))
    foreign = [tmp_path / "notes.txt", tmp_path / "0a1b.bin", part / "notes.txt"]
    for path in foreign:
        path.write_text("mine")
    (part / "folder.hco").mkdir()
    assert backend.clear("") == 1
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    backend.close()


def test_a_process_killed_in_mid_write_leaves_nothing(tmp_path: Path) -> None:
    """Half-written pages would pile up on the disk, or be served."""
    writer = spawn(HALF_A_WRITE, tmp_path)
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == "half\n"
    assert len(staged(tmp_path)) == 1
    while_alive = make(tmp_path)
    assert len(staged(tmp_path)) == 1
    assert while_alive.probe(["victim"]) == b"\x00"
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    writer.stdin.close()
    writer.stdout.close()
    after = make(tmp_path)
    assert staged(tmp_path) == []
    assert write(after, {"victim": pattern(10)}) == {"victim": WriteOutcome.STORED}
    for backend in (while_alive, after):
        backend.close()
    assert list(tmp_path.glob("staging/*")) == []


def test_processes_writing_the_same_keys_all_succeed(tmp_path: Path) -> None:
    """Replicas that share a directory would trip over each other's temporary files."""
    writers = [spawn(SAME_KEYS, tmp_path) for _ in range(3)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
        writer.stdin = None
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        assert set(out.split()) <= {"stored", "exists"}
    backend = make(tmp_path)
    assert read(backend, [f"k{i}" for i in range(32)], 5000) == [pattern(5000, i) for i in range(32)]
    assert len(list(tmp_path.glob("objects/*/*"))) == 32
    assert staged(tmp_path) == []
    backend.close()


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    """Emptying the cache with rm -r would need a restart of every engine."""
    backend = make(tmp_path / "store")
    write(backend, {"a": pattern(10)})
    shutil.rmtree(tmp_path / "store")
    assert read(backend, ["a"], 10) == [None]
    assert backend.clear("") == 0
    assert write(backend, {"a": pattern(10), "b": pattern(20)}) == dict.fromkeys("ab", WriteOutcome.STORED)
    assert read(backend, ["a", "b"], 20) == [pattern(10), pattern(20)]
    backend.close()


@pytest.mark.parametrize(
    ("fsync", "data", "folder"), [(Fsync.NEVER, 0, 0), (Fsync.DATA, 2, 0), (Fsync.FULL, 2, 2)]
)
def test_fsync_happens_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: Fsync, data: int, folder: int
) -> None:
    """Objects promised to survive a power loss would not."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("data"))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("folder"))
    backend = make(tmp_path, fsync=fsync)
    write(backend, {"a": pattern(10), "b": pattern(10)})
    assert (calls.count("data"), calls.count("folder")) == (data, folder)
    backend.close()


def test_objects_fan_out(tmp_path: Path) -> None:
    """A million files in one folder would make every look-up slow."""
    backend = make(tmp_path)
    write(backend, {f"k{i}": b"x" for i in range(300)})
    folders = list(tmp_path.glob("objects/*"))
    assert FANOUT // 3 < len(folders) <= FANOUT
    backend.close()
