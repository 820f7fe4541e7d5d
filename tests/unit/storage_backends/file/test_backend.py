"""The file backend on disks that are full, damaged, shared, or limited."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from hicache.clock import ManualClock
from hicache.storage_backends.base import MISS, WriteOutcome
from hicache.storage_backends.file import FileBackend, Options, directory
from hicache.storage_backends.file.directory import Directory
from hicache.storage_backends.file.options import resolve
from hicache.testing.backend_suite import pattern, read, reserve, write


def make(path: Path, *, clock: ManualClock | None = None, **options: object) -> FileBackend:
    settings = resolve(Options(file_storage_path=str(path), **options))  # type: ignore[arg-type]
    return FileBackend(settings, clock=clock or ManualClock())


def file_of(path: Path, key: str) -> Path:
    (found,) = path.glob(f"objects/*/{key}.hco")
    return found


def failing_disk(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def write_some(fd: int, data: memoryview) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory, "write_all", write_some)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_space_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A half-written page would be served, or its room never given back."""
    backend = make(tmp_path)
    with monkeypatch.context() as patch:
        failing_disk(patch, code)
        assert write(backend, {"a": pattern(1000)}) == {"a": WriteOutcome.NO_SPACE}
    assert backend.probe(["a"]) == b"\x00"
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["owner"]
    assert backend.stats().details["reserved_bytes"] == 0
    assert write(backend, {"a": pattern(1000)}) == {"a": WriteOutcome.STORED}
    backend.close()


def test_a_failing_disk_is_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dying disk would flood the log, or go unnoticed."""
    backend = make(tmp_path)
    failing_disk(monkeypatch, errno.EIO)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert write(backend, {"a": pattern(1000)}) == {"a": WriteOutcome.FAILED}
    assert len(caplog.records) == 1
    assert backend.stats().details["write_eio"] == 3
    backend.close()


def test_truncated_and_empty_files_are_no_hits(tmp_path: Path) -> None:
    """After a power loss a page of zeros or a cut page would be served."""
    backend = make(tmp_path)
    write(backend, {"cut": pattern(1000), "empty": pattern(1000)})
    os.truncate(file_of(tmp_path, "cut"), 400)
    os.truncate(file_of(tmp_path, "empty"), 0)
    buffers = [bytearray(1000), bytearray(1000)]
    assert backend.read(["cut", "empty"], [memoryview(b) for b in buffers]) == [400, MISS]
    assert backend.probe(["empty"]) == b"\x00"
    assert write(backend, {"empty": pattern(10)}) == {"empty": WriteOutcome.STORED}
    backend.close()


def test_unreadable_objects_are_misses_and_counted(tmp_path: Path) -> None:
    """One bad file would end the worker thread and with it the whole tier."""
    backend = make(tmp_path)
    write(backend, {name: pattern(10) for name in ("folder", "pipe", "loop", "good")})
    for name in ("folder", "pipe", "loop"):
        path = file_of(tmp_path, name)
        path.unlink()
        if name == "folder":
            path.mkdir()
        elif name == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path.name)
    names = ["folder", "pipe", "loop", "good"]
    assert backend.probe(names) == b"\x00\x00\x00\x01"
    assert read(backend, names, 10) == [None, None, None, pattern(10)]
    details = backend.stats().details
    assert details["read_eloop"] == details["stat_eloop"] == 1
    assert details["read_einval"] == 2
    assert write(backend, {"folder": pattern(10)}) == {"folder": WriteOutcome.FAILED}
    assert backend.delete(names) == 3
    backend.close()


def test_a_file_that_ends_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the buffer would hold an older page's bytes."""
    backend = make(tmp_path)
    write(backend, {"a": pattern(1000)})
    counts = iter([600, 0])
    monkeypatch.setattr(os, "readv", lambda fd, buffers: next(counts))
    assert read(backend, ["a"], 1000) == [None]
    backend.close()


def test_reading_takes_as_many_calls_as_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network filesystems that return less than asked for would look like truncated objects."""
    backend = make(tmp_path)
    write(backend, {"a": pattern(1000)})
    real = os.readv
    monkeypatch.setattr(os, "readv", lambda fd, buffers: real(fd, [buffers[0][:300]]))
    assert read(backend, ["a"], 1000) == [pattern(1000)]
    backend.close()


def test_the_index_is_rebuilt_oldest_first_after_a_crash(tmp_path: Path) -> None:
    """A restart would forget what is on the disk and overrun the quota, or drop the newest."""
    crashed = make(tmp_path)
    write(crashed, {name: pattern(3000) for name in "abc"})
    for age, name in enumerate("cab"):
        os.utime(file_of(tmp_path, name), ns=(0, age))
    reopened = make(tmp_path, max_size=10_000, eviction_ratio=1.0)
    assert (reopened.stats().objects, reopened.stats().used_bytes) == (3, 9000)
    write(reopened, {"d": pattern(3000)})
    assert reopened.probe(list("abcd")) == b"\x01\x01\x00\x01"
    for backend in (crashed, reopened):
        backend.close()


def test_an_eviction_goes_down_to_the_ratio(tmp_path: Path) -> None:
    """Every write at the limit would pay for an eviction."""
    backend = make(tmp_path, max_size=10_000, eviction_ratio=0.5)
    write(backend, {str(i): pattern(1000) for i in range(10)})
    write(backend, {"new": pattern(1000)})
    assert backend.stats().used_bytes == 5000
    assert len(list(tmp_path.glob("objects/*/*"))) == 5
    backend.close()


def test_what_was_just_probed_is_not_evicted(tmp_path: Path) -> None:
    """A hit that a probe promised would be gone when it is read."""
    clock = ManualClock()
    backend = make(tmp_path, clock=clock, max_size=10_000, eviction_ratio=1.0)
    write(backend, {"a": pattern(5000)})
    write(backend, {"b": pattern(5000)})
    backend.probe(["a"])
    assert write(backend, {"c": pattern(5000)}) == {"c": WriteOutcome.STORED}
    assert backend.probe(list("abc")) == b"\x01\x00\x01"
    clock.advance(10)
    assert write(backend, {"d": pattern(10_000)}) == {"d": WriteOutcome.STORED}
    backend.close()


def test_free_space_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache would fill the disk that logs and checkpoints are on."""
    free = 10_000
    monkeypatch.setattr(Directory, "free_bytes", lambda self: free)
    backend = make(tmp_path, min_free_space=4000)
    write(backend, {"a": pattern(3000), "b": pattern(3000)})
    free = 4000
    assert write(backend, {"c": pattern(3000)}) == {"c": WriteOutcome.STORED}
    assert backend.probe(list("abc")) == b"\x01\x00\x01"
    free = 0
    assert backend.begin_write(["d"], [3000]) == [WriteOutcome.NO_SPACE]
    backend.close()


def test_one_batch_evicts_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of pages would empty the cache, each page paying for those before it."""
    monkeypatch.setattr(Directory, "free_bytes", lambda self: 4000)
    backend = make(tmp_path, min_free_space=4000)
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "free_bytes", lambda self: 1 << 30)
        write(backend, {f"old{i}": pattern(1000) for i in range(9)})
    write(backend, {f"new{i}": pattern(1000) for i in range(3)})
    assert backend.stats().objects == 9
    backend.close()


def test_another_process_is_believed_on_sight(tmp_path: Path) -> None:
    """Replicas on one directory would not see each other's pages, or believe in deleted ones."""
    mine, theirs = make(tmp_path, max_size="1MiB"), make(tmp_path, max_size="1MiB")
    write(theirs, {"a": pattern(3000)})
    assert mine.stats().used_bytes == 0
    assert mine.probe(["a"]) == b"\x01"
    assert mine.stats().used_bytes == 3000
    theirs.delete(["a"])
    assert mine.probe(["a"]) == b"\x00"
    assert mine.stats().used_bytes == 0
    for backend in (mine, theirs):
        backend.close()


def test_what_others_store_counts_against_the_quota_in_time(tmp_path: Path) -> None:
    """Ten replicas with one quota would fill ten times the space."""
    clock = ManualClock()
    mine, theirs = make(tmp_path, clock=clock, max_size="1MiB"), make(tmp_path)
    write(theirs, {f"k{i}": pattern(100) for i in range(50)})
    for i in range(300):
        clock.advance(1.0)
        mine.abort([reserve(mine, f"w{i}", 10)])
    assert (mine.stats().objects, mine.stats().used_bytes) == (50, 5000)
    for backend in (mine, theirs):
        backend.close()


def test_without_a_limit_nothing_is_listed_or_claimed(tmp_path: Path) -> None:
    """Opening a shared directory of millions of files would take minutes."""
    backend = make(tmp_path)
    write(backend, {"a": pattern(10)})
    stats = backend.stats()
    assert (stats.objects, stats.used_bytes, stats.capacity_bytes) == (-1, -1, -1)
    assert stats.details["stored"] == 1
    assert stats.details["free_bytes"] > 0  # type: ignore[operator]
    backend.close()


def test_an_abandoned_reservation_ends(tmp_path: Path) -> None:
    """A cancelled request would block its page from ever being stored."""
    clock = ManualClock()
    backend = make(tmp_path, clock=clock)
    abandoned = reserve(backend, "a", 10)
    clock.advance(60)
    assert write(backend, {"a": pattern(20)}) == {"a": WriteOutcome.STORED}
    assert backend.commit([abandoned]) == [WriteOutcome.FAILED]
    assert read(backend, ["a"], 20) == [pattern(20)]
    backend.close()
