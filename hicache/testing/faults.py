"""A storage backend that fails on cue, around one that works.

    backend = FaultyBackend(MemoryBackend(...), scripted(read=[None, Fault(error=BackendTimeout("slow"))]))

Decides which call fails and how; the wrapped backend does the rest. Thread-safe if the script is.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from hicache.storage_backends.base import (
    MISS,
    BackendStats,
    Reservation,
    StorageBackend,
    WriteOutcome,
    check_lengths,
)

Operation = Literal["probe", "read", "begin_write", "commit", "abort", "touch", "delete", "clear", "stats"]


class _All:
    def __contains__(self, position: object) -> bool:
        return True


ALL: Container[int] = _All()  # every position of a batch


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the log. `number` counts the calls of this operation from 0."""

    operation: Operation
    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one call. Positions are indices into its batch, or ALL.

    In order: the call waits for `gate` (for `gate_timeout_s` at most), sleeps `delay_s`, raises `error`;
    or it is carried out and its result spoiled; then it raises `error_after`, as if the answer were lost.
    """

    gate: threading.Event | None = None
    gate_timeout_s: float = 30.0
    delay_s: float = 0.0
    error: Exception | None = None
    error_after: Exception | None = None
    miss: Container[int] = ()  # probe and read: not there
    short: Container[int] = ()  # read: half of the object arrives, and its size says so
    truncated: Container[int] = ()  # read: half of the object arrives, and its size does not say so
    flip: Container[int] = ()  # read: one bit in the middle of the object is wrong
    zero: Container[int] = ()  # read: the right size, but all zeros
    refuse: Mapping[int, WriteOutcome] | WriteOutcome | None = None  # begin_write: instead of a reservation
    lose: Container[int] = ()  # commit: FAILED, and nothing is visible
    busy: Container[int] = ()  # commit: BUSY, and nothing is visible


Script = Callable[[Call], Fault | None]


def scripted(**faults: Sequence[Fault | None]) -> Script:
    """Return a script: the i-th entry for the i-th call of that operation, none after the last."""

    def script(call: Call) -> Fault | None:
        planned = faults.get(call.operation, ())
        return planned[call.number] if call.number < len(planned) else None

    return script


def always(**faults: Fault) -> Script:
    """Return a script that gives an operation the same fault at every call."""
    return lambda call: faults.get(call.operation)


def seeded(seed: int, faults: Mapping[Operation, Sequence[tuple[float, Fault]]]) -> Script:
    """Return a script that draws per call: each (probability, fault) in order, the first that hits.

    The draw depends on the seed, the operation and the call's number alone, whatever the threads do.
    """

    def script(call: Call) -> Fault | None:
        draw = random.Random(f"{seed}/{call.operation}/{call.number}")
        for probability, fault in faults.get(call.operation, ()):
            if draw.random() < probability:
                return fault
        return None

    return script


class FaultyBackend(StorageBackend):
    """Passes every call on to `inner`, spoiling it as the script says. Owns `inner`: close() closes it.

    Guarded by `_lock`: the log and the counts. `script` may be replaced at any time.
    """

    name: ClassVar[str] = "faulty"

    def __init__(self, inner: StorageBackend, script: Script | None = None) -> None:
        self.inner = inner
        self.script: Script = script or always()
        self._lock = threading.Lock()
        self._log: list[Call] = []
        self._numbers: Counter[str] = Counter()

    @property
    def calls(self) -> list[Call]:
        """The log so far, in the order in which the calls arrived."""
        with self._lock:
            return list(self._log)

    def count(self, operation: Operation) -> int:
        """Return how often an operation was called."""
        with self._lock:
            return self._numbers[operation]

    def _enter(self, operation: Operation, keys: Sequence[str] = ()) -> Fault:
        with self._lock:
            call = Call(operation, self._numbers[operation], tuple(keys))
            self._numbers[operation] += 1
            self._log.append(call)
        fault = self.script(call) or Fault()
        if fault.gate is not None and not fault.gate.wait(fault.gate_timeout_s):
            raise AssertionError(f"the gate of {operation} call {call.number} was never opened")
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error
        return fault

    @staticmethod
    def _leave(fault: Fault) -> None:
        if fault.error_after is not None:
            raise fault.error_after

    def probe(self, keys: Sequence[str]) -> bytes:
        fault = self._enter("probe", keys)
        flags = bytearray(self.inner.probe(keys))
        for i in range(len(flags)):
            if i in fault.miss:
                flags[i] = 0
        self._leave(fault)
        return bytes(flags)

    def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        fault = self._enter("read", keys)
        sizes = self.inner.read(keys, buffers)
        for i, buffer in enumerate(buffers):
            if i in fault.miss:
                sizes[i] = MISS
            elif 0 < sizes[i] <= len(buffer):
                sizes[i] = _spoil(buffer, sizes[i], i, fault)
        self._leave(fault)
        return sizes

    def begin_write(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Reservation | WriteOutcome]:
        check_lengths(keys, sizes)
        fault = self._enter("begin_write", keys)
        if isinstance(fault.refuse, WriteOutcome):
            return [fault.refuse] * len(keys)
        refused = fault.refuse or {}
        admitted = [i for i in range(len(keys)) if i not in refused]
        answers = iter(self.inner.begin_write([keys[i] for i in admitted], [sizes[i] for i in admitted]))
        merged = [refused[i] if i in refused else next(answers) for i in range(len(keys))]
        self._leave(fault)
        return merged

    def commit(self, reservations: Sequence[Reservation]) -> list[WriteOutcome]:
        fault = self._enter("commit", [r.key for r in reservations])
        spoiled = {i: WriteOutcome.BUSY for i in range(len(reservations)) if i in fault.busy}
        spoiled |= {i: WriteOutcome.FAILED for i in range(len(reservations)) if i in fault.lose}
        self.inner.abort([reservations[i] for i in spoiled])
        answers = iter(self.inner.commit([r for i, r in enumerate(reservations) if i not in spoiled]))
        outcomes = [spoiled[i] if i in spoiled else next(answers) for i in range(len(reservations))]
        self._leave(fault)
        return outcomes

    def abort(self, reservations: Sequence[Reservation]) -> None:
        fault = self._enter("abort", [r.key for r in reservations])
        self.inner.abort(reservations)
        self._leave(fault)

    def touch(self, keys: Sequence[str]) -> None:
        fault = self._enter("touch", keys)
        self.inner.touch(keys)
        self._leave(fault)

    def delete(self, keys: Sequence[str]) -> int:
        fault = self._enter("delete", keys)
        deleted = self.inner.delete(keys)
        self._leave(fault)
        return deleted

    def clear(self, prefix: str) -> int:
        fault = self._enter("clear", [prefix])
        cleared = self.inner.clear(prefix)
        self._leave(fault)
        return cleared

    def stats(self) -> BackendStats:
        fault = self._enter("stats")
        stats = self.inner.stats()
        self._leave(fault)
        return stats

    def close(self) -> None:
        self.inner.close()


def _spoil(buffer: memoryview, size: int, i: int, fault: Fault) -> int:
    """Damage what was read into a buffer; return the size to report."""
    if i in fault.flip:
        buffer[size // 2] ^= 0x10
    if i in fault.zero:
        buffer[:size] = bytes(size)
    if i in fault.short or i in fault.truncated:
        buffer[size // 2 : size] = bytes(size - size // 2)
    return size // 2 if i in fault.short else size


def corrupt(backend: StorageBackend, key: str, damage: Callable[[bytearray], None]) -> None:
    """Replace a stored object by a damaged copy of itself; for faults that stay in the store."""
    (size,) = backend.read([key], [memoryview(bytearray())])
    data = bytearray(size)
    assert backend.read([key], [memoryview(data)]) == [size], f"{key} is not there to be damaged"
    damage(data)
    backend.delete([key])
    (reservation,) = backend.begin_write([key], [len(data)])
    assert isinstance(reservation, Reservation), f"writing {key} back: {reservation}"
    reservation.buffer[:] = data
    assert backend.commit([reservation]) == [WriteOutcome.STORED]
