"""Why the daemon did not have an object, counted where a client asks for it."""

from __future__ import annotations

import pytest

from hicache.daemon.events import Change, ChangeKind
from hicache.daemon.misses import Fate, Fates
from hicache.daemon.server import Daemon
from hicache.registry import create_backend
from hicache.storage_backends.base import MISS, Reservation, StorageBackend, WriteOutcome
from hicache.testing.daemon import running_daemon


def store(backend: StorageBackend, keys: list[str], size: int) -> None:
    taken = backend.begin_write(keys, [size] * len(keys))
    reservations = [one for one in taken if isinstance(one, Reservation)]
    assert len(reservations) == len(keys)
    assert set(backend.commit(reservations)) == {WriteOutcome.STORED}


def counted(daemon: Daemon, name: str, operation: str) -> dict[str, int]:
    """A counter's values of one operation, by reason where it has one."""
    found = {}
    for family in daemon.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == name and sample.labels["operation"] == operation:
                found[sample.labels.get("reason", "")] = int(sample.value)
    return found


@pytest.mark.parametrize("plane", ["shm,inline", "inline"])
def test_misses_say_why_and_the_ceiling_what_a_larger_store_would_have(plane: str) -> None:
    """An operator must see whether more memory would help, or whether nobody ever stored it."""
    size = 1 << 20
    with running_daemon(capacity="8MiB", lease_seconds=0.01) as daemon:
        options = {"address": daemon.address, "data_planes": plane}
        backend = create_backend("grpc", options)
        try:
            for i in range(12):
                store(backend, [f"k{i}"], size)
            backend.delete(["k11"])
            keys = [f"k{i}" for i in range(12)] + ["never"]
            present = backend.probe(keys)
            gone = [key for key, flag in zip(keys, present, strict=True) if not flag]
            evicted = len(gone) - 2  # k11 was deleted, "never" never stored
            assert evicted >= 4
            assert counted(daemon, "hicache_daemon_misses_total", "probe") == {
                "evicted": evicted,
                "deleted": 1,
                "never_stored": 1,
            }
            assert counted(daemon, "hicache_daemon_ceiling_keys_total", "probe") == {"": 12}
            sizes = backend.read(["k0", "k10", "never"], [memoryview(bytearray(size)) for _ in range(3)])
            assert sizes == [MISS, size, MISS]
            assert counted(daemon, "hicache_daemon_misses_total", "read") == {
                "evicted": 1,
                "never_stored": 1,
            }
            assert counted(daemon, "hicache_daemon_ceiling_keys_total", "read") == {"": 2}
            backend.clear("")
            backend.probe(["k10"])
            assert counted(daemon, "hicache_daemon_misses_total", "probe")["lost"] == 1
        finally:
            backend.close()


def test_an_object_stored_again_is_lost_when_it_is_missed_again() -> None:
    """An old eviction would explain a new miss."""
    fates = Fates()
    for kind in (ChangeKind.STORED, ChangeKind.EVICTED, ChangeKind.STORED):
        fates.note([Change(kind, "k")])
    assert fates.of(["k", "other"]) == {Fate.LOST: 1, Fate.NEVER_STORED: 1}


def test_its_memory_is_bounded_and_keeps_what_changed_last() -> None:
    """A daemon runs for months."""
    fates = Fates(100)
    fates.note([Change(ChangeKind.EVICTED, str(i)) for i in range(1000)])
    assert fates.of(map(str, range(950, 1000))) == {Fate.EVICTED: 50}
    assert fates.of(map(str, range(800))) == {Fate.NEVER_STORED: 800}
