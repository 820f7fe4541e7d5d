"""Damaged objects, failing stores, clearing: a miss, counted, and nothing that SGLang takes for success."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable
from hicache.storage_backends.base import WriteOutcome
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, scripted
from hicache.testing.sglang_pools import (
    DSAIndexerPoolHost,
    FakeConfig,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Replicas,
    indices,
    page_bytes,
    scramble,
    transfer,
)

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(16)]
BOUND_S = 60.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def filled(replica: Replicas, pages: int = 8, **options: Any) -> tuple[Any, MHATokenToKVPoolHost]:
    pool = MHATokenToKVPoolHost()
    scramble(pool, 1)
    backend = replica({"kv": pool}, **options)
    assert backend.batch_set_v1(KEYS[:pages], indices(pool, *range(pages))) == [True] * pages
    return backend, pool


def objects(store: MemoryBackend) -> dict[str, bytearray]:
    """Stored bytes by page, to be damaged in place."""
    return {key.rsplit("/", 1)[1]: store._objects.get(key).data for key in store._objects}


def damage_header(data: bytearray) -> None:
    data[9] ^= 1


def damage_payload(data: bytearray) -> None:
    data[-1] ^= 0x80


def zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def lengthen(data: bytearray) -> None:
    data += bytes(64)


def empty(data: bytearray) -> None:
    del data[:]


@pytest.mark.parametrize("harm", [damage_header, damage_payload, zero, cut, lengthen, empty])
def test_a_damaged_object_is_a_miss_once_and_then_rewritten(
    replica: Replicas, store: MemoryBackend, harm: Callable[[bytearray], None]
) -> None:
    """One bad object must shorten one hit, not change an answer and not stay for ever."""
    backend, pool = filled(replica)
    before = [page_bytes(pool, page) for page in range(8)]
    harm(objects(store)[KEYS[3]])
    target = MHATokenToKVPoolHost()
    other = replica({"kv": target})
    assert other.batch_exists(KEYS[:8]) == 8
    assert other.batch_get_v1(KEYS[:8], indices(target, *range(8))).index(False) == 3
    assert [page_bytes(target, page) for page in range(3)] == before[:3]
    assert not any(page_bytes(target, 3))
    assert sum(n for name, n in other.counters.items() if name.startswith("mismatch_")) == 1
    assert other.batch_exists(KEYS[:8]) == 3
    assert backend.batch_set_v1(KEYS[:8], indices(pool, *range(8))) == [True] * 8
    assert other.batch_get_v1(KEYS[:8], indices(target, *range(8))) == [True] * 8
    assert [page_bytes(target, page) for page in range(8)] == before


def test_an_object_under_another_pages_key_is_a_miss(replica: Replicas, store: MemoryBackend) -> None:
    """A store that mixes up two keys would hand one user another's prompt."""
    backend, pool = filled(replica, 2)
    stored = objects(store)
    stored[KEYS[0]][:], stored[KEYS[1]][:] = bytes(stored[KEYS[1]]), bytes(stored[KEYS[0]])
    assert backend.batch_get_v1(KEYS[:2], indices(pool, 8, 9)) == [False, False]
    assert backend.counters["mismatch_wrong_page"] == 2


def test_wrong_sizes_are_each_counted_and_end_the_hit(replica: Replicas) -> None:
    """A read of no bytes is not a page of nothing."""
    from hicache.testing.faults import ALL

    store = MemoryBackend(capacity_bytes=1 << 20)
    faulty = FaultyBackend(store, scripted(read=[Fault(short=ALL)]))
    backend, pool = filled(replica, 5, backend=faulty)
    assert backend.batch_get_v1(KEYS[:5], indices(pool, *range(5))) == [False] * 5
    assert backend.counters["mismatch_bad_size"] == 5


def test_a_backup_cut_off_in_the_middle_is_told_and_completed_later(replica: Replicas) -> None:
    """A page believed to be stored and not there is recomputed for ever."""
    store = MemoryBackend(capacity_bytes=1 << 20)
    refused = Fault(refuse={3: WriteOutcome.NO_SPACE})
    faulty = FaultyBackend(store, scripted(begin_write=[refused]))
    pool = MHATokenToKVPoolHost()
    backend = replica({"kv": pool}, backend=faulty)
    done = backend.batch_set_v1(KEYS[:8], indices(pool, *range(8)))
    assert done == [True] * 3 + [False] * 5
    assert backend.batch_exists(KEYS[:8]) == 3
    assert store.stats().details["reservations"] == 0
    assert backend.batch_set(KEYS[:8], [pool.get_data_page(page * 4) for page in range(8)])
    assert store.stats().details["stored"] == 8
    assert backend.batch_exists(KEYS[:8]) == 8


@pytest.mark.parametrize("operation", ["probe", "read", "begin_write", "commit"])
@pytest.mark.parametrize("error", [BackendUnavailable("gone"), BackendTimeout("slow"), RuntimeError("a bug")])
def test_no_failure_of_the_store_reaches_sglang(replica: Replicas, operation: str, error: Exception) -> None:
    """SGLang's threads must live, and every failure must read as a miss."""
    store = MemoryBackend(capacity_bytes=1 << 20)
    pool = MHATokenToKVPoolHost()
    faulty = FaultyBackend(store, scripted(**{operation: [None, Fault(error=error)]}))
    backend = replica({"kv": pool}, backend=faulty)
    for attempt in range(2):
        keys = KEYS[attempt * 4 : attempt * 4 + 4]
        stored = backend.batch_set_v1(keys, indices(pool, 0, 1, 2, 3))
        found = backend.batch_exists(keys)
        got = backend.batch_get_v1(keys, indices(pool, 0, 1, 2, 3))
        assert stored in ([True] * 4, [False] * 4)
        assert found in (0, 4)
        assert got in ([True] * 4, [False] * 4)
        if attempt == 0:
            assert (stored, found, got) == ([True] * 4, 4, [True] * 4)
    assert sum(backend.counters.get(name, 0) for name in ("store_errors", "store_timeouts")) == (
        0 if isinstance(error, RuntimeError) else 1
    )
    assert store.stats().details["reservations"] == 0


def test_a_dead_store_is_asked_once_and_comes_back_by_itself(replica: Replicas) -> None:
    """A daemon that died must cost SGLang one bounded call, not one for every request."""
    store = MemoryBackend(capacity_bytes=1 << 20)
    dead = threading.Event()

    class Dying(FaultyBackend):
        def probe(self, keys: Any) -> bytes:
            if dead.is_set():
                asked.append(len(keys))
                raise BackendTimeout("no answer")
            return super().probe(keys)

    asked: list[int] = []
    backend, pool = filled(replica, 4, backend=Dying(store, scripted()))
    dead.set()
    assert backend.batch_exists(KEYS[:4]) == 0
    in_the_call = len(asked)
    assert in_the_call == 1
    for _ in range(50):
        assert backend.batch_exists(KEYS[:4]) == 0
        assert backend.batch_set_v1(KEYS[4:6], indices(pool, 4, 5)) == [False, False]
        assert backend.batch_get_v1(KEYS[:4], indices(pool, 0, 1, 2, 3)) == [False] * 4
    assert asked[1:].count(4) == 0
    dead.clear()
    until(lambda: backend.batch_exists(KEYS[:4]) == 4)
    assert backend.counters["breaker_opened"] == 1


def test_a_store_that_is_away_at_the_start_is_used_when_it_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang starts before its store does; nobody restarts it for that."""
    from hicache.integrations.sglang import storage

    there = threading.Event()

    def create(name: str, options: object) -> MemoryBackend:
        if not there.is_set():
            raise BackendUnavailable("connection refused")
        return MemoryBackend(capacity_bytes=1 << 20)

    monkeypatch.setattr(storage, "create_backend", create)
    backend = storage.HiCacheStorageBackend(FakeConfig(), {})
    pool = MHATokenToKVPoolHost()
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert "serving without L3 until it answers again: open failed: connection refused" in caplog.text
    assert backend.batch_set_v1(KEYS[:1], indices(pool, 0)) == [False]
    there.set()
    until(lambda: backend.batch_set_v1(KEYS[:1], indices(pool, 0)) == [True])
    backend.close()


def test_memory_of_a_read_that_never_ended_is_not_used_again(replica: Replicas) -> None:
    """A late answer of the store would overwrite another request's pages."""
    store = MemoryBackend(capacity_bytes=1 << 20)

    class Late(FaultyBackend):
        settles_on_timeout = False
        held: list[memoryview]

        def read(self, keys: Any, buffers: Any) -> list[int]:
            if not self.held:
                self.held = list(buffers)
                raise BackendTimeout("still at it")
            return super().read(keys, buffers)

    late = Late(store, scripted())
    late.held = []
    backend, pool = filled(replica, 2, backend=late)
    before = [page_bytes(pool, page) for page in range(2)]
    assert backend.batch_get_v1(KEYS[:2], indices(pool, 4, 5)) == [False, False]
    until(lambda: backend._adapter.store.usable)
    for buffer in late.held:
        buffer[:] = b"\xff" * len(buffer)
    assert backend.batch_get_v1(KEYS[:2], indices(pool, 6, 7)) == [True, True]
    for buffer in late.held:
        buffer[:] = b"\x11" * len(buffer)
    assert backend.batch_get_v1(KEYS[:2], indices(pool, 8, 9)) == [True, True]
    assert [page_bytes(pool, page) for page in (8, 9)] == before


def test_clear_takes_this_model_and_leaves_the_rest(replica: Replicas, store: MemoryBackend) -> None:
    """Clearing one deployment must not empty its neighbours' caches in a shared store."""
    (reservation,) = store.begin_write(["foreign/key"], [8])
    store.commit([reservation])
    a, pool = filled(replica, 4)
    ranks = [replica({"kv": pool}, FakeConfig(tp_rank=rank, tp_size=2)) for rank in range(2)]
    b = replica({"kv": pool}, FakeConfig(model_name="another"))
    for backend in (*ranks, b):
        assert backend.batch_set_v1(KEYS[:4], indices(pool, *range(4))) == [True] * 4
    assert store.stats().objects == 17
    a.clear()
    assert [backend.batch_exists(KEYS[:4]) for backend in (a, *ranks, b)] == [0, 4, 4, 4]
    threads = [threading.Thread(target=rank.clear) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert [backend.batch_exists(KEYS[:4]) for backend in (a, *ranks, b)] == [0, 0, 0, 4]
    assert store.probe(["foreign/key"]) == b"\x01"
    assert a.batch_set_v1(KEYS[:1], indices(pool, 0)) == [True]


def test_a_clear_that_failed_is_not_reported_as_done(replica: Replicas) -> None:
    """SGLang answers its operator by whether clear() raised."""
    faulty = FaultyBackend(
        MemoryBackend(capacity_bytes=1 << 20), scripted(clear=[Fault(error=BackendUnavailable("gone"))])
    )
    backend, _ = filled(replica, 2, backend=faulty)
    with pytest.raises(BackendError):
        backend.clear()
    backend.close()
    with pytest.raises(BackendError):
        backend.clear()


def test_clear_forgets_what_waits_for_its_kv(replica: Replicas, store: MemoryBackend) -> None:
    """Sidecars from before a clear must not become part of a page from after it."""
    pools = {"kv": MLATokenToKVPoolHost(), "indexer": DSAIndexerPoolHost()}
    backend = replica(pools)
    backend.batch_set_v2([transfer("indexer", KEYS[:1], indices(pools["indexer"], 0), source="kv")])
    backend.clear()
    assert backend.batch_set_v1(KEYS[:1], indices(pools["kv"], 0)) == [False]
    assert store.stats().objects == 0


def test_calls_that_contradict_themselves_are_misses(
    replica: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    """A key for which there are no indices must not shift all pages behind it by one."""
    backend, pool = filled(replica, 4)
    assert backend.batch_get_v1(KEYS[:4], indices(pool, 0, 1, 2)) == [False] * 4
    assert backend.batch_set_v1(KEYS[8:12], indices(pool, 0, 1, 2)) == [False] * 4
    assert backend.batch_exists(["not a hash"]) == 0
    assert "4 keys of 4 tokens, but 12 indices" in caplog.text
    assert backend.batch_exists(KEYS[8:12]) == 0


def test_a_call_ends_at_its_bound_however_many_pages_it_has(replica: Replicas) -> None:
    """A slow store may keep SGLang's read thread for a bounded time only."""
    store = MemoryBackend(capacity_bytes=1 << 24)
    pool = MHATokenToKVPoolHost(pages=130)
    keys = [hashlib.sha256(bytes([i, 1])).hexdigest() for i in range(128)]
    slow = FaultyBackend(store, scripted(read=[Fault(delay_s=0.3)] * 2))
    backend = replica({"kv": pool}, backend=slow, prefetch_timeout_max=0.2)
    assert all(backend.batch_set_v1(keys, indices(pool, *range(128))))
    done = backend.batch_get_v1(keys, indices(pool, *range(128)))
    assert done == [True] * 64 + [False] * 64


def test_metrics_are_sglangs_own_and_only_with_its_flag(replica: Replicas) -> None:
    """SGLang's collector checks the type and wants each operation once."""
    backend, _ = filled(replica, 4)
    assert backend.get_stats() is None
    pool = MHATokenToKVPoolHost()
    metered = replica({"kv": pool}, FakeConfig(enable_storage_metrics=True))
    assert metered.batch_set_v1(KEYS[:3], indices(pool, 0, 1, 2)) == [True] * 3
    metrics = metered._metrics
    assert (metrics._writes.pages, metrics._reads.pages) == ([3], [])
    assert metrics._writes.gigabytes_per_s[0] > 0
