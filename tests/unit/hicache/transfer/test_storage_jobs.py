"""Probe, fetch and store: what comes back, what is counted, what a store may claim and is not believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from hicache.errors import BackendError, BackendTimeout, BackendUnavailable, InvariantViolation
from hicache.keys import object_key
from hicache.objects import ObjectCodec
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.storage_backends.base import WriteOutcome
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import Fault, FaultyBackend, corrupt, scripted
from hicache.testing.pools import FULL, MAMBA, SWA, compressed_spec, hybrid_spec, page_bytes
from hicache.testing.transfers import TransferWorld, faulty_memory
from hicache.tiers.layouts import HostLayout
from hicache.transfer.base import JobKind, ObjectRef, Why, name_objects
from hicache.transfer.storage_io import StorageLimits

REFS = [ObjectRef(FULL, bytes([i]) * 32) for i in range(8)]
SLOTS = [30, 2, 9, 4, 31, 0, 17, 11]
TARGETS = [1, 3, 5, 7, 12, 14, 16, 18]
MIXED = [*REFS[:4], ObjectRef(SWA, REFS[3].page_hash), ObjectRef(MAMBA, REFS[3].page_hash)]
MIXED_SLOTS = [*SLOTS[:4], 6, 3]
ALL_EIGHT = b"\x01" * 8


def head(count: int) -> bytes:
    """Flags of the first `count` of eight."""
    return (b"\x01" * count).ljust(8, b"\0")


@pytest.fixture
def store() -> FaultyBackend:
    return faulty_memory()


@pytest.fixture
def world(store: FaultyBackend) -> Iterator[TransferWorld]:
    with TransferWorld(store) as made:
        yield made


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_page_comes_back_from_storage_as_it_was_written(
    store: FaultyBackend, layout: HostLayout, synchronous: bool
) -> None:
    """Law 1 through L3, for every component and sidecar; a second replica uses another layout."""
    with (
        TransferWorld(store, layout=layout, synchronous=synchronous) as writer,
        TransferWorld(store, layout=HostLayout.PAGE_FIRST, synchronous=synchronous) as reader,
    ):
        truth = writer.bytes(MIXED, MIXED_SLOTS)
        assert writer.store(MIXED, MIXED_SLOTS).flags == b"\x01" * 6
        assert reader.probe([*MIXED, ObjectRef(FULL, b"?" * 32)]).flags == b"\x01" * 6 + b"\0"
        done = reader.fetch(MIXED, [20, 21, 22, 23, 9, 1])
        assert (done.kind, done.flags, done.failed) == (JobKind.FETCH, b"\x01" * 6, False)
        assert reader.bytes(MIXED, [20, 21, 22, 23, 9, 1]) == truth


def test_calls_are_batches_of_bounded_count(world: TransferWorld, store: FaultyBackend) -> None:
    """One call for everything would block past the store's bound; one per page would crawl."""
    world.store(REFS, SLOTS)
    world.fetch(REFS, TARGETS)
    sizes = [(c.operation, len(c.keys)) for c in store.calls if c.operation in ("begin_write", "read")]
    assert sizes == [
        *(("begin_write", 3), ("begin_write", 3), ("begin_write", 2)),
        *(("read", 3), ("read", 3), ("read", 2)),
    ]


def test_calls_are_batches_of_bounded_bytes(store: FaultyBackend) -> None:
    """Large pages must not make a call outlast the store's bound."""
    exactly_two = 2 * ObjectCodec(hybrid_spec(16), "0of1").size(FULL)
    limits = StorageLimits(batch_objects=100, batch_bytes=exactly_two)
    with TransferWorld(store, limits=limits) as world:
        world.store(REFS, SLOTS)
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
    assert [len(c.keys) for c in store.calls if c.operation in ("begin_write", "read")] == [2] * 8


def test_what_is_stored_already_is_not_sent_again_and_counts_as_stored(world: TransferWorld) -> None:
    """Two replicas computing one prefix store it once."""
    world.store(REFS[:4], SLOTS[:4])
    assert world.store(REFS, SLOTS).flags == ALL_EIGHT
    counters = world.executor.counters()
    assert (counters["store_objects"], counters["store_existing"]) == (8, 4)
    assert counters["store_bytes"] == 8 * ObjectCodec(world.spec, "0of1").size(FULL)


def _flip(at: int) -> Callable[[bytearray], None]:
    def damage(stored: bytearray) -> None:
        stored[at] ^= 0x10

    return damage


def _cut(stored: bytearray) -> None:
    del stored[-1:]


def _grow(stored: bytearray) -> None:
    stored.append(0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_flip(-1), "bad_payload"), (_flip(3), "bad_magic"), (_cut, "bad_size"), (_grow, "bad_size")],
)
def test_a_damaged_object_is_a_miss_is_counted_goes_and_is_written_again(
    world: TransferWorld, store: FaultyBackend, damage: Callable[[bytearray], None], reason: str
) -> None:
    """Flip a bit, miss, rewrite, hit: a rotten object must neither be served nor block its key for ever."""
    world.store(REFS, SLOTS)
    corrupt(store.inner, object_key(world.spec.fingerprint, "0of1", FULL, REFS[3].page_hash), damage)
    done = world.fetch(REFS, TARGETS)
    assert (done.flags, done.failed) == (b"\x01\x01\x01\0\x01\x01\x01\x01", False)
    assert world.executor.counters()[f"mismatch_{reason}"] == 1
    assert set(page_bytes(world.host, FULL, TARGETS[3])["full_kv"]) == {0xFF}  # nothing was placed
    assert world.probe(REFS).flags == done.flags
    assert world.store(REFS, SLOTS).flags == ALL_EIGHT
    assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
    assert world.bytes(REFS, TARGETS) == world.bytes(REFS, SLOTS)


def test_a_damaged_object_that_cannot_be_deleted_is_still_only_a_miss(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """The good pages beside it have arrived; the next read finds and drops it again."""
    world.store(REFS, SLOTS)
    store.script = scripted(read=[Fault(flip={1})], delete=[Fault(error=BackendTimeout("slow"))])
    done = world.fetch(REFS, TARGETS)
    assert (done.flags, done.failed) == (b"\x01\0\x01\x01\x01\x01\x01\x01", False)
    assert world.executor.counters()["storage_timeouts"] == 1


@pytest.mark.parametrize("spoil", ["short", "truncated", "flip", "zero", "miss"])
def test_whatever_a_read_spoils_is_one_miss_and_the_rest_arrives(
    world: TransferWorld, store: FaultyBackend, spoil: str
) -> None:
    """Half an object that calls itself whole is the classic way to wrong text."""
    world.store(REFS, SLOTS)
    store.script = scripted(read=[None, Fault(**{spoil: {1}})])
    assert world.fetch(REFS, TARGETS).flags == b"\x01\x01\x01\x01\0\x01\x01\x01"
    counters = world.executor.counters()
    assert counters["fetch_missing"] == (spoil == "miss")
    assert sum(n for name, n in counters.items() if name.startswith("mismatch_")) == (spoil != "miss")
    kept = [i for i in range(8) if i != 4]
    assert world.bytes([REFS[i] for i in kept], [TARGETS[i] for i in kept]) == world.bytes(
        [REFS[i] for i in kept], [SLOTS[i] for i in kept]
    )


def test_sizes_that_a_store_reports_are_not_believed(store: FaultyBackend) -> None:
    """Nought, one too few, twice as many: each is its own miss, none is a page."""
    size = ObjectCodec(hybrid_spec(16), "0of1").size(FULL)

    class Liar(FaultyBackend):
        def read(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
            super().read(keys, buffers)
            return [size, 0, size - 1, size, 2 * size][: len(keys)]

    with TransferWorld(Liar(store), limits=StorageLimits(batch_objects=5)) as world:
        world.store(REFS[:5], SLOTS[:5])
        assert world.fetch(REFS[:5], TARGETS[:5]).flags == b"\x01\0\0\x01\0"
        assert world.executor.counters()["mismatch_bad_size"] == 3


def test_an_object_of_another_model_or_shard_is_never_a_hit(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """A replica after a weight update must not continue from the old weights' pages."""
    world.store(REFS, SLOTS)
    for spec, shard in ((hybrid_spec(16, weight_version="2"), "0of1"), (hybrid_spec(16), "1of2")):
        with TransferWorld(store, spec=spec, shard=shard) as other:
            assert other.fetch(REFS, TARGETS).flags == bytes(8)
            assert other.probe(REFS).flags == bytes(8)


@pytest.mark.parametrize("error", [BackendTimeout("slow"), BackendUnavailable("gone")])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_read_that_fails_keeps_what_had_arrived(
    world: TransferWorld, store: FaultyBackend, error: BackendError, batch: int
) -> None:
    """A failed read shortens the hit; it neither loses the verified head nor invents a tail."""
    world.store(REFS, SLOTS)
    store.script = scripted(read=[*[None] * batch, Fault(error=error)])
    done = world.fetch(REFS, TARGETS)
    assert (done.flags, done.failed) == (head(3 * batch), True)
    whole = slice(0, 3 * batch)
    assert world.bytes(REFS[whole], TARGETS[whole]) == world.bytes(REFS[whole], SLOTS[whole])
    kind = "storage_timeouts" if isinstance(error, BackendTimeout) else "storage_errors"
    assert world.executor.counters()[kind] == 1
    assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT  # the worker lives


@pytest.mark.parametrize("operation", ["begin_write", "commit"])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_write_that_fails_reports_what_is_stored_and_leaves_no_reservation(
    world: TransferWorld, store: FaultyBackend, operation: str, batch: int
) -> None:
    """Present means that a full read succeeds; a partial write is neither claimed nor half visible."""
    fault = Fault(error=BackendUnavailable("gone"))
    store.script = scripted(**{operation: [*[None] * batch, fault]})
    done = world.store(REFS, SLOTS)
    assert (done.flags, done.failed) == (head(3 * batch), True)
    assert world.probe(REFS).flags == done.flags
    assert store.count("abort") == (operation == "commit")
    assert world.store(REFS, SLOTS).flags == ALL_EIGHT


def test_a_commit_whose_answer_is_lost_is_not_counted_as_stored(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """The retry finds the objects there; claiming them before would be a guess."""
    store.script = scripted(commit=[Fault(error_after=BackendTimeout("no answer"))])
    assert world.store(REFS, SLOTS).flags == bytes(8)
    assert world.store(REFS, SLOTS).flags == ALL_EIGHT
    assert world.executor.counters()["store_existing"] == 3


@pytest.mark.parametrize(("outcome", "failed"), [(WriteOutcome.NO_SPACE, False), (WriteOutcome.FAILED, True)])
def test_nothing_behind_a_refused_object_is_written(
    world: TransferWorld, store: FaultyBackend, outcome: WriteOutcome, failed: bool
) -> None:
    """Law 7: on L3 a page whose ancestor is missing can be reached by nobody."""
    store.script = scripted(begin_write=[None, Fault(refuse={1: outcome})])
    done = world.store(REFS, SLOTS)
    assert (done.flags, done.failed) == (head(4), failed)
    assert world.probe(REFS).flags == done.flags
    assert store.count("begin_write") == 2
    assert world.executor.counters()["store_refused"] == 2
    assert store.inner.stats().details["reserved_bytes"] == 0, (
        "the room of what was not written is free again"
    )


def test_an_object_lost_in_a_commit_is_reported_alone(world: TransferWorld, store: FaultyBackend) -> None:
    """One object that failed must not take the belief in its whole batch with it, nor hide in it."""
    store.script = scripted(commit=[Fault(lose={1})])
    done = world.store(REFS, SLOTS)
    assert (done.flags, done.failed) == (b"\x01\0\x01\0\0\0\0\0", True)
    assert world.probe(REFS).flags == done.flags


def test_a_probe_that_fails_is_no_evidence_of_absence(world: TransferWorld, store: FaultyBackend) -> None:
    """Taken for absence, one time-out would make the cache forget what L3 holds."""
    world.store(REFS, SLOTS)
    store.script = scripted(probe=[Fault(error=BackendTimeout("slow"))])
    assert world.probe(REFS).failed
    done = world.probe(REFS)
    assert (done.flags, done.failed) == (ALL_EIGHT, False)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_bug_in_a_probe_fails_it_and_tells_nothing_that_was_not_asked(
    store: FaultyBackend, batch: int
) -> None:
    """The answer to one part of the pages must not be taken for that to another."""
    with TransferWorld(store, limits=StorageLimits(probe_keys=3)) as world:
        world.store(REFS[:6], SLOTS[:6])
        store.script = scripted(probe=[*[None] * batch, Fault(error=KeyError("oops"))])
        done = world.probe(REFS)
        assert (done.flags, done.failed) == (head(3 * batch), True)
        assert world.probe(REFS).flags == head(6)


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ([], None),
        ([Fault(miss={2})], Why.MISSING),
        ([Fault(short={2})], Why.SHORT),
        ([Fault(truncated={2})], Why.CORRUPT),
        ([Fault(flip={2})], Why.CORRUPT),
        ([Fault(miss={2}), Fault(flip={0})], Why.MISSING),
        ([Fault(flip={2}), Fault(miss={0})], Why.CORRUPT),
        ([None, Fault(error=BackendTimeout("slow"))], Why.TIMEOUT),
        ([None, Fault(error=BackendUnavailable("gone"))], Why.ERROR),
        ([Fault(miss={0}), Fault(error=BackendTimeout("slow"))], Why.MISSING),
    ],
)
def test_a_read_says_why_the_first_object_that_lacks_did_not_come(
    world: TransferWorld, store: FaultyBackend, faults: list[Fault | None], why: Why | None
) -> None:
    """An operator who is told of a slow store looks for another cause than of one that loses objects."""
    world.store(REFS, SLOTS)
    store.script = scripted(read=faults)
    done = world.fetch(REFS, TARGETS)
    assert done.why is why
    assert (done.flags == ALL_EIGHT) == (why is None)


def test_a_bug_in_a_backend_ends_the_job_and_not_the_worker(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """Third-party code raises what it likes; a prefetch that never ends blocks its request for ever."""
    world.store(REFS, SLOTS)
    store.script = scripted(read=[Fault(error=KeyError("oops"))])
    assert world.fetch(REFS, TARGETS).failed
    assert world.executor.counters()["fetch_failed"] == 1
    assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT


def test_staging_is_registered_with_a_backend_that_wants_it() -> None:
    """Unregistered memory costs an extra copy per object over RDMA."""

    class Registering(FaultyBackend):
        registered: ClassVar[list[memoryview]] = []

        def register(self, memory: memoryview) -> None:
            self.registered.append(memory)

    with TransferWorld(Registering(faulty_memory()), readers=1) as world:
        assert [len(memory) for memory in Registering.registered] == [StorageLimits().batch_bytes]
        world.store(REFS, SLOTS)
        assert world.fetch(REFS, TARGETS).flags == ALL_EIGHT
        assert len(Registering.registered) == 1


def test_without_storage_every_storage_job_ends_at_once_as_failed() -> None:
    """A job that never ends holds its pages for ever."""
    with TransferWorld(None) as world:
        assert not world.executor.has_storage
        for done in (world.probe(REFS), world.fetch(REFS, TARGETS), world.store(REFS, SLOTS)):
            assert (done.flags, done.failed) == (bytes(8), True)


def test_a_slot_outside_the_host_pool_is_refused(world: TransferWorld) -> None:
    """A page written past the pool's end is somebody else's memory."""
    with pytest.raises(InvariantViolation, match="host FULL"):
        world.executor.start_fetch(world.job(), REFS[:1], [32])
    with pytest.raises(ValueError, match="1 objects but 2 slots"):
        world.executor.start_store(world.job(), REFS[:1], [1, 2])


def compressed_refs(spec: ModelSpec) -> list[ObjectRef]:
    """Nine pages of FULL and of SWA, as the cache would name them."""
    hashes = [bytes([i]) * 32 for i in range(9)]
    return [
        ref
        for component in (FULL, SWA)
        for ref in name_objects(component, range(9), hashes, spec.periods[component])
    ]


@pytest.mark.parametrize("layout", list(HostLayout))
def test_parts_that_a_page_has_not_are_not_stored_and_all_others_come_back(layout: HostLayout) -> None:
    """Rows that span pages would be stored with each of them, or lost with one."""
    spec = compressed_spec(16)
    refs, slots = compressed_refs(spec), [*range(9), *range(9)]
    backend = MemoryBackend(capacity_bytes=64 << 20)
    with TransferWorld(backend, spec=spec, layout=layout) as world:
        before = world.bytes(refs, slots)
        assert world.store(refs, slots).flags == b"\x01" * 18
        moved = [slot + 5 for slot in slots[:9]] + [slot + 3 for slot in slots[9:]]
        assert world.fetch(refs, moved).flags == b"\x01" * 18
        for ref, old, new in zip(refs, before, world.bytes(refs, moved), strict=True):
            absent = spec.absent(ref.component, ref.phase)
            for name, content in old.items():
                assert (new[name] == content) is (name not in absent)
                assert name not in absent or new[name] == b"\xff" * len(content)  # untouched
        wide = [i for i, ref in enumerate(refs[:9]) if "wide" not in spec.absent(FULL, ref.phase)]
        assert wide == [3, 7]
        codec = ObjectCodec(spec, "0of1")
        sizes = {codec.size(r.component, absent=spec.absent(r.component, r.phase)) for r in refs}
        assert len(sizes) == 4
        assert world.executor.counters()["store_bytes"] == sum(
            codec.size(r.component, absent=spec.absent(r.component, r.phase)) for r in refs
        )


def test_an_object_of_another_phase_is_a_miss() -> None:
    """A page would be taken to hold a row that it has not."""
    spec = compressed_spec(16)
    hashes = [bytes([i]) * 32 for i in range(4)]
    right = name_objects(FULL, range(4), hashes, 4)
    wrong = name_objects(FULL, range(1, 5), hashes, 4)
    with TransferWorld(MemoryBackend(capacity_bytes=64 << 20), spec=spec) as world:
        world.store(right, range(4))
        assert world.fetch(wrong, range(4)).flags == b"\x01\x01\0\0"  # none of the first three has the row


def test_a_component_without_bytes_of_its_own_stores_its_sidecars() -> None:
    """Pools of odd sizes around one that is only an index would not start, or divide by zero."""
    sizes = (1536, 4096, 66_048)
    side = tuple(PoolSpec(f"side{n}", 1, (n,), "uint8", 1) for n in sizes)
    swa = ComponentSpec(SWA, (PoolSpec("swa", 1, (8,), "uint8", 4),), window=8)
    spec = ModelSpec("logical", 4, (ComponentSpec(FULL, side, logical=True), swa), weight_version="1")
    assert spec[FULL].page_bytes == sum(sizes)
    with TransferWorld(MemoryBackend(capacity_bytes=64 << 20), spec=spec) as world:
        before = world.bytes(REFS, range(8))
        assert world.store(REFS, range(8)).flags == b"\x01" * 8
        world.fetch(REFS, range(8, 16))
        assert world.bytes(REFS, range(8, 16)) == before


def test_what_a_store_took_and_does_not_have_is_neither_stored_nor_a_failure(
    world: TransferWorld, store: FaultyBackend
) -> None:
    """Beside a writer that then dies, a page would be believed stored, or a healthy store be bypassed."""
    store.script = scripted(commit=[Fault(busy={1})])
    done = world.store(REFS, SLOTS)
    assert (done.flags, done.failed) == (b"\x01\0\x01" + bytes(5), False)
    assert world.probe(REFS).flags == done.flags
    assert world.store(REFS, SLOTS).flags == ALL_EIGHT
    assert world.executor.counters().get("breaker_opened", 0) == 0
    assert world.executor.storage_answers
