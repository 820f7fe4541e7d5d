"""The suite catches backends that break the contract; a suite that passes everything proves nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from hicache.storage_backends.base import MISS, Reservation, StorageBackend, WriteOutcome
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.backend_suite import BackendSuite


class Sound(MemoryBackend):
    def __init__(self) -> None:
        super().__init__(capacity_bytes=64 << 20)


class FlipsABit(Sound):
    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        sizes = super().read(keys, buffers)
        for buffer, size in zip(buffers, sizes, strict=True):
            if size == 65:
                buffer[64] ^= 1
        return sizes


class SwapsTheBatch(Sound):
    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        return super().read(keys, buffers) if len(keys) < 20 else super().read(keys[::-1], buffers)


class OverrunsSmallBuffers(Sound):
    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        sizes = super().read(keys, buffers)
        for buffer, size in zip(buffers, sizes, strict=True):
            if size > len(buffer):
                buffer[:] = bytes(len(buffer))
        return sizes


class ClobbersTheRest(Sound):
    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        sizes = super().read(keys, buffers)
        for buffer, size in zip(buffers, sizes, strict=True):
            if 0 < size < len(buffer):
                buffer[size:] = bytes(len(buffer) - size)
        return sizes


class SharesMemory(Sound):
    def views(self, keys: Sequence[str]) -> list[memoryview | None]:
        raise NotImplementedError

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        sizes = super().read(keys, buffers)
        for key, buffer, size in zip(keys, buffers, sizes, strict=True):
            entry = self._objects.get(key)
            if entry is not None and size == len(buffer) and isinstance(buffer.obj, bytearray):
                entry.data = buffer.obj
        return sizes


class ShowsUncommitted(Sound):
    def probe(self, keys: Sequence[str]) -> bytes:
        return bytes(
            flag or key in self._pending for flag, key in zip(super().probe(keys), keys, strict=True)
        )


class ForgetsToAbort(Sound):
    def abort(self, reservations: Sequence[Reservation]) -> None:
        pass


class Overwrites(Sound):
    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        self.delete(keys)
        return super().begin_write(keys, sizes)


class ClaimsToStore(Sound):
    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        super().commit(reservations)
        return [WriteOutcome.STORED] * len(reservations)


class ClearsTooMuch(Sound):
    def clear(self, prefix: str) -> int:
        return super().clear(prefix[:-1])


class MiscountsDeletes(Sound):
    def delete(self, keys: Sequence[str]) -> int:
        super().delete(keys)
        return len(keys)


class AcceptsEmptyObjects(Sound):
    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        return super().begin_write(keys, [max(1, size) for size in sizes])


class LivesAfterClose(Sound):
    def close(self) -> None:
        pass


class FailsOnUnknownKeys(Sound):
    def touch(self, keys: Sequence[str]) -> None:
        if MISS in self.sizes(keys):
            raise KeyError(keys)


BROKEN: dict[type[StorageBackend], str] = {
    FlipsABit: "test_objects_come_back_byte_for_byte",
    SwapsTheBatch: "test_large_batches_keep_their_order",
    OverrunsSmallBuffers: "test_a_buffer_too_small_is_told_the_size_and_left_alone",
    ClobbersTheRest: "test_a_larger_buffer_keeps_its_rest",
    SharesMemory: "test_the_backend_keeps_no_hold_on_the_callers_memory",
    ShowsUncommitted: "test_nothing_is_visible_before_commit",
    ForgetsToAbort: "test_an_aborted_write_leaves_no_trace",
    Overwrites: "test_what_is_there_is_not_written_again",
    ClaimsToStore: "test_a_reservation_ends_once",
    ClearsTooMuch: "test_clearing_a_prefix_spares_the_others",
    MiscountsDeletes: "test_deleting_says_what_was_there",
    AcceptsEmptyObjects: "test_wrong_calls_are_refused",
    LivesAfterClose: "test_a_closed_backend_says_so",
    FailsOnUnknownKeys: "test_touch_is_a_hint",
}


def failures(make: type[StorageBackend]) -> list[str]:
    """Run the suite on a backend; return the tests that fail."""

    class Suite(BackendSuite):
        def make_backend(self) -> StorageBackend:
            return make()

    failed = []
    for name, test in inspect.getmembers(Suite(), inspect.ismethod):
        if not name.startswith("test_") or (make is LivesAfterClose and "during" in name):
            continue
        backend = make()
        offered = {"backend": backend, "peer": backend, "prefix": "p/"}
        try:
            test(**{n: offered[n] for n in inspect.signature(test).parameters})
        except (Exception, pytest.fail.Exception):  # noqa: BLE001
            failed.append(name)
    return failed


def test_a_sound_backend_passes() -> None:
    """Third parties could not tell a broken suite from a broken backend."""
    assert failures(Sound) == []


@pytest.mark.parametrize(("broken", "test"), BROKEN.items())
def test_a_broken_backend_fails_the_test_for_it(broken: type[StorageBackend], test: str) -> None:
    """A backend that serves wrong bytes would be called conformant."""
    assert test in failures(broken)
