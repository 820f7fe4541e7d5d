"""What every storage backend must do, as pytest tests that third parties run on theirs.

    class TestMine(BackendSuite):
        def make_backend(self) -> StorageBackend:
            return MyBackend(...)

Objects are written under keys that begin with a prefix of the test's own, so a backend may stand on
a shared server; only `test_clearing_everything_leaves_nothing` empties the store.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from hicache.errors import BackendUnavailable
from hicache.objects import ObjectCodec, Verdict
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.storage_backends.base import MISS, Reservation, StorageBackend, WriteOutcome
from hicache.testing.faults import corrupt
from hicache.types import Component

ODD_SIZES = (1, 2, 63, 64, 65, 4095, 4096, 4097, 65_537, (1 << 20) + 3)
_UNTOUCHED = 0xA5


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes in which no two neighbouring 256-byte blocks are alike."""
    block = bytes((i * 7 + seed) & 0xFF for i in range(251))
    return (block * (size // len(block) + 1))[:size]


def write(backend: StorageBackend, objects: Mapping[str, bytes]) -> dict[str, WriteOutcome]:
    """Write objects in one batch through both phases; return what became of each."""
    answers = backend.begin_write(list(objects), [len(data) for data in objects.values()])
    outcomes: dict[str, WriteOutcome] = {}
    reserved = []
    for key, answer in zip(objects, answers, strict=True):
        if isinstance(answer, Reservation):
            answer.buffer[:] = objects[key]
            reserved.append(answer)
        else:
            outcomes[key] = answer
    for reservation, outcome in zip(reserved, backend.commit(reserved), strict=True):
        outcomes[reservation.key] = outcome
    return outcomes


def read(backend: StorageBackend, keys: Sequence[str], size: int) -> list[bytes | None]:
    """Read objects of at most `size` bytes; None is a miss."""
    buffers = [bytearray(size) for _ in keys]
    sizes = backend.read(keys, [memoryview(buffer) for buffer in buffers])
    return [None if n == MISS else bytes(b[:n]) for n, b in zip(sizes, buffers, strict=True)]


def reserve(backend: StorageBackend, key: str, size: int) -> Reservation:
    """Begin a write that must be admitted."""
    (answer,) = backend.begin_write([key], [size])
    assert isinstance(answer, Reservation), f"begin_write of a new key answered {answer}"
    return answer


class BackendSuite:
    """Subclass, say how to make a backend, and pytest does the rest."""

    settle_s: ClassVar[float] = 0.0  # how long the store may take to show a delete or a clear
    many: ClassVar[int] = 300  # objects of a large batch

    def make_backend(self) -> StorageBackend:
        """Return an open backend; the suite closes it."""
        raise NotImplementedError

    def make_peer(self, backend: StorageBackend) -> StorageBackend:
        """Return another client of the same store, or `backend` itself where there is none."""
        return backend

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        backend = self.make_backend()
        yield backend
        backend.close()

    @pytest.fixture
    def peer(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        peer = self.make_peer(backend)
        yield peer
        if peer is not backend:
            peer.close()

    @pytest.fixture
    def prefix(self) -> str:
        return f"suite-{uuid.uuid4().hex[:12]}/"

    def settles(self, condition: Callable[[], bool]) -> bool:
        """Return whether the condition holds within `settle_s`."""
        deadline = time.monotonic() + self.settle_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            threading.Event().wait(0.01)
        return True

    # -- bytes ---------------------------------------------------------------------------------

    def test_objects_come_back_byte_for_byte(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A request would continue from KV that nobody computed."""
        objects = {f"{prefix}{size}": pattern(size, size) for size in ODD_SIZES}
        assert set(write(backend, objects).values()) == {WriteOutcome.STORED}
        for client in (backend, peer):
            assert client.probe(list(objects)) == b"\x01" * len(objects)
            assert read(client, list(objects), max(ODD_SIZES)) == list(objects.values())

    def test_large_batches_keep_their_order(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A chain of pages would come back with pages swapped."""
        objects = {f"{prefix}{i}": pattern(100 + i, i) for i in range(self.many)}
        assert list(write(backend, objects).values()) == [WriteOutcome.STORED] * self.many
        assert peer.probe(list(objects)) == b"\x01" * self.many
        assert read(peer, list(objects), 100 + self.many) == list(objects.values())

    def test_hits_and_misses_in_one_batch_stay_apart(self, backend: StorageBackend, prefix: str) -> None:
        """A miss in the middle of a chain would shift every page behind it."""
        keys = [f"{prefix}{i}" for i in range(10)]
        objects = {key: pattern(50, i) for i, key in enumerate(keys) if i % 3 == 0}
        write(backend, objects)
        assert list(backend.probe(keys)) == [int(key in objects) for key in keys]
        assert read(backend, keys, 50) == [objects.get(key) for key in keys]

    def test_a_buffer_too_small_is_told_the_size_and_left_alone(
        self, backend: StorageBackend, prefix: str
    ) -> None:
        """A page of another size would overwrite the start of the buffer and look like a hit."""
        write(backend, {prefix + "a": pattern(1000)})
        buffer = bytearray([_UNTOUCHED]) * 999
        assert backend.read([prefix + "a"], [memoryview(buffer)]) == [1000]
        assert buffer == bytearray([_UNTOUCHED]) * 999

    def test_a_larger_buffer_keeps_its_rest(self, backend: StorageBackend, prefix: str) -> None:
        """A short object would clobber the page beside it in the host pool."""
        write(backend, {prefix + "a": pattern(1000)})
        buffer = bytearray([_UNTOUCHED]) * 1100
        assert backend.read([prefix + "a"], [memoryview(buffer)]) == [1000]
        assert buffer == pattern(1000) + bytes([_UNTOUCHED]) * 100

    def test_the_backend_keeps_no_hold_on_the_callers_memory(
        self, backend: StorageBackend, prefix: str
    ) -> None:
        """A host page reused for another prompt would change the stored object, or the reverse."""
        key = prefix + "a"
        write(backend, {key: pattern(500)})
        buffer = bytearray(500)
        assert backend.read([key], [memoryview(buffer)]) == [500]
        buffer[:] = bytes(500)
        assert read(backend, [key], 500) == [pattern(500)]
        assert backend.read([key], [memoryview(buffer)]) == [500]
        backend.delete([key])
        write(backend, {key: pattern(500, 9)})
        assert buffer == pattern(500)

    # -- batches -------------------------------------------------------------------------------

    def test_empty_batches_do_nothing(self, backend: StorageBackend) -> None:
        """A request without pages would fail instead of missing."""
        assert backend.probe([]) == b""
        assert backend.read([], []) == []
        assert backend.begin_write([], []) == []
        assert backend.commit([]) == []
        assert backend.delete([]) == 0
        backend.abort([])
        backend.touch([])

    def test_a_batch_may_name_a_key_twice(self, backend: StorageBackend, prefix: str) -> None:
        """Two identical prompts in one batch would fail it or count twice."""
        key = prefix + "a"
        first, second = backend.begin_write([key, key], [10, 10])
        assert isinstance(first, Reservation)
        assert second is WriteOutcome.EXISTS
        first.buffer[:] = pattern(10)
        assert backend.commit([first]) == [WriteOutcome.STORED]
        assert backend.probe([key, key]) == b"\x01\x01"
        assert read(backend, [key, key], 10) == [pattern(10)] * 2
        assert backend.delete([key, key]) == 1

    def test_wrong_calls_are_refused(self, backend: StorageBackend, prefix: str) -> None:
        """A caller's slip would pair keys with the wrong buffers."""
        with pytest.raises(ValueError, match="keys"):
            backend.read([prefix + "a"], [])
        with pytest.raises(ValueError, match="keys"):
            backend.begin_write([prefix + "a"], [1, 2])
        with pytest.raises(ValueError, match="at least one byte"):
            backend.begin_write([prefix + "a", prefix + "b"], [1, 0])
        assert backend.probe([prefix + "a"]) == b"\x00"

    # -- two-phase writes ----------------------------------------------------------------------

    def test_a_reservation_offers_exactly_the_asked_size(self, backend: StorageBackend, prefix: str) -> None:
        """A writer would overrun its buffer, or store padding."""
        for size in (1, 4097):
            reservation = reserve(backend, f"{prefix}{size}", size)
            assert reservation.buffer.nbytes == size
            assert not reservation.buffer.readonly
            assert reservation.key == f"{prefix}{size}"
            backend.abort([reservation])

    def test_nothing_is_visible_before_commit(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A second replica would load a page that is half written."""
        key = prefix + "a"
        reservation = reserve(backend, key, 100)
        for client in (backend, peer):
            assert client.probe([key]) == b"\x00"
            assert read(client, [key], 100) == [None]
        reservation.buffer[:] = pattern(100)
        assert peer.probe([key]) == b"\x00"
        assert backend.commit([reservation]) == [WriteOutcome.STORED]
        assert backend.probe([key]) == peer.probe([key]) == b"\x01"
        assert read(backend, [key], 100) == read(peer, [key], 100) == [pattern(100)]

    def test_an_aborted_write_leaves_no_trace(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A request cancelled in mid-write would block its pages from ever being stored."""
        key = prefix + "a"
        reservation = reserve(backend, key, 100)
        reservation.buffer[:] = pattern(100)
        backend.abort([reservation])
        assert peer.probe([key]) == b"\x00"
        assert read(peer, [key], 100) == [None]
        assert write(peer, {key: pattern(90, 1)}) == {key: WriteOutcome.STORED}
        assert read(backend, [key], 100) == [pattern(90, 1)]

    def test_a_reservation_ends_once(self, backend: StorageBackend, prefix: str) -> None:
        """A retried commit or a late abort would undo or repeat a finished write."""
        key = prefix + "a"
        reservation = reserve(backend, key, 10)
        reservation.buffer[:] = pattern(10)
        assert backend.commit([reservation]) == [WriteOutcome.STORED]
        backend.abort([reservation])
        assert backend.commit([reservation]) == [WriteOutcome.FAILED]
        assert read(backend, [key], 10) == [pattern(10)]
        aborted = reserve(backend, prefix + "b", 10)
        backend.abort([aborted, aborted])
        assert backend.commit([aborted]) == [WriteOutcome.FAILED]

    def test_what_is_there_is_not_written_again(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """Every replica would send every shared page again."""
        key = prefix + "a"
        write(backend, {key: pattern(100)})
        for client in (backend, peer):
            assert write(client, {key: pattern(100, 1)}) == {key: WriteOutcome.EXISTS}
        assert read(peer, [key], 100) == [pattern(100)]

    def test_a_key_being_written_is_not_written_twice(self, backend: StorageBackend, prefix: str) -> None:
        """Two requests that compute the same prefix would both hold memory for it."""
        key = prefix + "a"
        reservation = reserve(backend, key, 10)
        assert backend.begin_write([key], [10]) == [WriteOutcome.EXISTS]
        backend.abort([reservation])
        backend.abort([reserve(backend, key, 10)])

    def test_two_clients_writing_one_key_leave_one_whole_object(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """Two replicas storing the same prefix would interleave their bytes."""
        key = prefix + "a"
        mine = reserve(backend, key, 5000)
        (theirs,) = peer.begin_write([key], [5000])
        mine.buffer[:] = pattern(5000, 1)
        ends = {WriteOutcome.STORED, WriteOutcome.EXISTS, WriteOutcome.BUSY}
        if isinstance(theirs, Reservation):
            theirs.buffer[:] = pattern(5000, 2)
            assert peer.commit([theirs])[0] in ends
        else:
            assert theirs is WriteOutcome.EXISTS
        assert backend.commit([mine])[0] in ends
        (seen,) = read(peer, [key], 5000)
        assert seen in (pattern(5000, 1), pattern(5000, 2))

    # -- dropping ------------------------------------------------------------------------------

    def test_deleting_says_what_was_there(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A damaged object could not be replaced by the next write."""
        write(backend, {prefix + "a": pattern(10), prefix + "b": pattern(10)})
        assert backend.delete([prefix + "a", prefix + "none"]) == 1
        assert self.settles(lambda: peer.probe([prefix + "a", prefix + "b"]) == b"\x00\x01")
        assert read(backend, [prefix + "a"], 10) == [None]
        assert write(peer, {prefix + "a": pattern(20, 3)}) == {prefix + "a": WriteOutcome.STORED}
        assert read(backend, [prefix + "a"], 20) == [pattern(20, 3)]

    def test_clearing_a_prefix_spares_the_others(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """Clearing one model would empty the store of its neighbours."""
        mine = {f"{prefix}m/{i}": pattern(10, i) for i in range(5)}
        others = {f"{prefix}m2/{i}": pattern(10, i) for i in range(5)}
        write(backend, mine | others)
        assert backend.clear(prefix + "m/") == 5
        assert self.settles(lambda: peer.probe(list(mine)) == bytes(5))
        assert peer.probe(list(others)) == b"\x01" * 5
        assert backend.clear(prefix + "m/") == 0

    def test_clearing_everything_leaves_nothing(self, backend: StorageBackend, prefix: str) -> None:
        """A flush would leave stale KV behind."""
        keys = [f"{prefix}{i}" for i in range(20)]
        write(backend, dict.fromkeys(keys, pattern(10)))
        assert backend.clear("") >= 20
        assert self.settles(lambda: backend.probe(keys) == bytes(20))

    def test_a_damaged_object_is_refused_and_replaced(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """One flipped bit would be served, or block its page for ever."""
        pool = PoolSpec("kv", 2, (16,), "uint8", 16)
        codec = ObjectCodec(ModelSpec("suite", 16, (ComponentSpec(Component.FULL, (pool,)),)), "tp0of1")
        data = bytearray(pattern(codec.size(Component.FULL)))
        page_hash = bytes(range(32))
        codec.seal(Component.FULL, page_hash, memoryview(data))
        key = prefix + "a"

        def verdict() -> Verdict:
            buffer = memoryview(bytearray(len(data)))
            (size,) = peer.read([key], [buffer])
            return codec.verify(Component.FULL, page_hash, buffer, size)

        def flip(damaged: bytearray) -> None:
            damaged[len(damaged) // 2] ^= 4

        write(backend, {key: bytes(data)})
        assert verdict() is Verdict.OK
        corrupt(backend, key, flip)
        assert verdict() is Verdict.BAD_PAYLOAD
        assert peer.delete([key]) == 1
        assert write(peer, {key: bytes(data)}) == {key: WriteOutcome.STORED}
        assert verdict() is Verdict.OK

    # -- the rest ------------------------------------------------------------------------------

    def test_touch_is_a_hint(self, backend: StorageBackend, prefix: str) -> None:
        """Refreshing a page that has just gone would fail the request."""
        write(backend, {prefix + "a": pattern(10)})
        backend.touch([prefix + "a", prefix + "none"])
        assert backend.probe([prefix + "a", prefix + "none"]) == b"\x01\x00"

    def test_stats_count_what_they_know(self, backend: StorageBackend, prefix: str) -> None:
        """An operator would size the store by wrong figures."""
        before = backend.stats()
        write(backend, {f"{prefix}{i}": pattern(1000, i) for i in range(8)})
        after = backend.stats()
        if before.objects >= 0:
            assert after.objects == before.objects + 8
        if before.used_bytes >= 0:
            assert after.used_bytes >= before.used_bytes + 8000
        assert after.capacity_bytes == -1 or after.capacity_bytes >= after.used_bytes

    def test_a_closed_backend_says_so(self, prefix: str) -> None:
        """A late call after a detach would crash the engine or hang."""
        backend = self.make_backend()
        reservation = reserve(backend, prefix + "a", 10)
        backend.close()
        backend.close()
        calls: list[Callable[[], object]] = [
            lambda: backend.probe([prefix]),
            lambda: backend.read([prefix], [memoryview(bytearray(1))]),
            lambda: backend.begin_write([prefix], [1]),
            lambda: backend.commit([reservation]),
            lambda: backend.touch([prefix]),
            lambda: backend.delete([prefix]),
            lambda: backend.clear(prefix),
            lambda: backend.stats(),
        ]
        for call in calls:
            with pytest.raises(BackendUnavailable):
                call()

    # -- threads -------------------------------------------------------------------------------

    def test_threads_writing_the_same_keys_store_each_once(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """Concurrent requests with one prefix would tear its pages or lose them."""
        objects = {f"{prefix}{i}": pattern(2000, i) for i in range(16)}
        gate = threading.Barrier(4)

        def work(client: StorageBackend) -> list[WriteOutcome]:
            gate.wait(30)
            return [write(client, {key: data})[key] for key, data in objects.items()]

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(work, [backend, backend, peer, peer]))
        for per_key in zip(*outcomes, strict=True):
            assert WriteOutcome.STORED in per_key
            assert set(per_key) <= {WriteOutcome.STORED, WriteOutcome.EXISTS, WriteOutcome.BUSY}
        assert read(peer, list(objects), 2000) == list(objects.values())

    def test_a_reader_never_sees_a_torn_object(
        self, backend: StorageBackend, peer: StorageBackend, prefix: str
    ) -> None:
        """A page replaced while it is read would mix old and new KV."""
        key, size = prefix + "a", 100_000
        ended = threading.Event()

        def rewrite() -> int:
            stored = 0
            try:
                for value in range(30):
                    backend.delete([key])
                    stored += write(backend, {key: bytes([value]) * size})[key] is WriteOutcome.STORED
            finally:
                ended.set()
            return stored

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(rewrite)
            while not ended.is_set():
                (seen,) = read(peer, [key], size)
                if seen is not None:
                    assert len(seen) == size
                    assert seen == seen[:1] * size
            assert writer.result() > 0

    def test_closing_during_calls_ends_them(self, prefix: str) -> None:
        """Detaching under traffic would crash a worker thread."""
        backend = self.make_backend()
        started = threading.Barrier(4)

        def work(thread: int) -> str:
            started.wait()
            try:
                for i in range(100_000):
                    write(backend, {f"{prefix}{thread}/{i % 50}": pattern(100)})
                    read(backend, [f"{prefix}{thread}/{i % 50}"], 100)
                    backend.delete([f"{prefix}{thread}/{i % 50}"])
            except BackendUnavailable:
                return "unavailable"
            return "never noticed"

        with ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(work, thread) for thread in range(3)]
            started.wait()
            backend.stats()
            backend.close()
            assert [worker.result() for worker in workers] == ["unavailable"] * 3


class CapacitySuite:
    """For backends with a byte limit of their own that evict by recency; beside BackendSuite."""

    def make_small_backend(self, capacity_bytes: int) -> StorageBackend:
        """Return an open backend that holds `capacity_bytes` and protects nothing by leases."""
        raise NotImplementedError

    @pytest.fixture
    def small(self) -> Iterator[StorageBackend]:
        backend = self.make_small_backend(10_000)
        yield backend
        backend.close()

    def test_what_cannot_fit_is_refused_and_costs_nothing(self, small: StorageBackend) -> None:
        """One oversized page would empty the cache."""
        write(small, {"a": pattern(5000)})
        assert small.begin_write(["b"], [10_001]) == [WriteOutcome.NO_SPACE]
        assert small.probe(["a", "b"]) == b"\x01\x00"

    def test_room_is_made_by_dropping_the_least_recently_used(self, small: StorageBackend) -> None:
        """A hot prefix would be dropped for one that nobody asks for."""
        for name in "abc":
            assert write(small, {name: pattern(3000)}) == {name: WriteOutcome.STORED}
        small.touch(["a"])
        assert write(small, {"d": pattern(3000)}) == {"d": WriteOutcome.STORED}
        assert small.probe(list("abcd")) == b"\x01\x00\x01\x01"
        assert small.stats().used_bytes <= 10_000

    def test_a_chain_is_dropped_from_its_end(self, small: StorageBackend) -> None:
        """Losing the root first would make the whole chain behind it unreachable."""
        write(small, {f"chain/{i}": pattern(2000) for i in range(5)})
        write(small, {"other": pattern(4000)})
        assert small.probe([f"chain/{i}" for i in range(5)]) == b"\x01\x01\x01\x00\x00"

    def test_open_writes_count_against_the_limit(self, small: StorageBackend) -> None:
        """Many writers at once would exceed the limit together."""
        held = [reserve(small, f"w{i}", 4000) for i in range(2)]
        assert small.begin_write(["x"], [4000]) == [WriteOutcome.NO_SPACE]
        small.abort(held[:1])
        small.abort([reserve(small, "x", 4000)])
        small.abort(held[1:])
        assert small.stats().used_bytes == 0
