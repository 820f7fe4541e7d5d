"""What ranks tell each other once a tick: fixed size, intersections, minima, one time, and no divergence."""

from __future__ import annotations

import json
import random
from array import array

import pytest

from hicache.clock import ManualClock
from hicache.errors import ConfigError, LoadFailed, RankLost, RanksDiverged
from hicache.testing.ledger import Faults, LedgerExecutor, ScriptedLedger
from hicache.testing.ranks import MeetingMember, run_ranks
from hicache.transfer.agreed import AgreedExecutor, agree_at_start
from hicache.transfer.agreement import (
    MESSAGE_BYTES,
    AgreedJob,
    Local,
    Words,
    combine,
    encode,
    layout,
)
from hicache.transfer.base import Done, JobId, JobKind, Move, ObjectRef
from hicache.types import Component, Tier

FULL = Component.FULL


def job(number: int, count: int, done: Done | None = None) -> AgreedJob:
    entry = AgreedJob(JobId(number), JobKind.FETCH, count)
    entry.done = done
    return entry


def local(**changes: object) -> Local:
    facts = {"tick": 3, "now": 1.5, "decisions": 7, "has_storage": True, "epoch": 1, **changes}
    return Local(**facts)  # type: ignore[arg-type]


def meet(ranks: list[tuple[Local, list[AgreedJob], list[bytes]]]) -> list[AgreedJob]:
    """One tick of ranks with these jobs and flags; returns what rank 0 takes as ended."""
    messages = [encode(facts, layout(jobs), flags, b"") for facts, jobs, flags in ranks]
    assert {len(message) for message in messages} == {MESSAGE_BYTES}
    return combine(3, layout(ranks[0][1]), messages).ended


def test_what_was_read_is_what_every_rank_has_read() -> None:
    """A page that one rank lacks would be served with that rank's shard left over from another prompt."""
    done = Done(JobId(1), JobKind.FETCH)
    mine, theirs = bytes([1, 1, 0, 1, 1]), bytes([1, 0, 1, 1, 1])
    (entry,) = meet([(local(), [job(1, 5, done)], [mine]), (local(), [job(1, 5, done)], [theirs])])
    assert bytes(entry.flags) == bytes([1, 0, 0, 1, 1])


def test_a_job_has_ended_when_it_has_on_all_ranks_and_took_as_long_as_on_the_slowest() -> None:
    """Pages that one rank still writes to would be freed and given to somebody else."""
    quick = Done(JobId(1), JobKind.FETCH, seconds=0.5)
    slow = Done(JobId(1), JobKind.FETCH, failed=True, seconds=2.0)
    entry = job(1, 10, quick)
    ten, seven = bytes([1] * 10), bytes([1] * 7 + [0] * 3)
    assert meet([(local(), [entry], [ten]), (local(), [job(1, 10)], [seven])]) == []
    assert bytes(entry.flags) == seven  # so far: the minimum
    (ended,) = meet([(local(), [entry], [ten]), (local(), [job(1, 10, slow)], [seven])])
    assert (ended.failed, ended.seconds) == (True, 2.0)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100_000, 163_000, 164_000, 400_000])
def test_a_job_with_any_number_of_objects_fits_messages_of_one_size(count: int) -> None:
    """A prompt of a million tokens would make the collective grow, or never be agreed on."""
    rng = random.Random(count)
    both = [bytes(rng.choices([0, 1], k=count)) for _ in range(2)]
    done = Done(JobId(1), JobKind.FETCH)
    entries = [job(1, count, done), job(2, 3, done)]
    others = [job(1, count, done), job(2, 3, done)]
    last = [bytes([1, 1, 0]), bytes([1, 0, 0])]
    ended: list[AgreedJob] = []
    for _ in range(5):
        places = layout(entries)
        messages = [
            encode(local(), layout(jobs), [flags, more][: len(places)], b"")
            for jobs, flags, more in ((entries, both[0], last[0]), (others, both[1], last[1]))
        ]
        assert {len(message) for message in messages} == {MESSAGE_BYTES}
        fresh = combine(3, places, messages).ended
        combine(3, layout(others), messages)  # the other rank takes the same
        ended += fresh
        entries = [e for e in entries if e not in fresh]
        others = [e for e in others if e.job in {left.job for left in entries}]
        if not entries:
            break
    assert [e.job for e in ended] == [1, 2]
    assert bytes(ended[0].flags) == bytes(a & b for a, b in zip(*both, strict=True))
    assert bytes(ended[1].flags) == bytes([1, 0, 0])


def test_time_is_rank_0s_storage_is_what_all_have_and_an_epoch_grows_when_any_does() -> None:
    """Ranks with clocks and stores of their own would let a request go at different times."""
    ranks = [local(now=5.0, epoch=1), local(now=900.0, epoch=3, has_storage=False)]
    agreed = combine(3, [], [encode(facts, [], [], b"") for facts in ranks])
    assert (agreed.now, agreed.has_storage, agreed.epoch) == (5.0, False, 4)


@pytest.mark.parametrize("changed", [{"tick": 4}, {"decisions": 8}])
def test_ranks_that_have_drifted_apart_stop_at_the_next_tick(changed: dict[str, object]) -> None:
    """Half of an answer would come from another history, and nobody would notice."""
    with pytest.raises(RanksDiverged, match=next(iter(changed))):
        combine(3, [], [encode(facts, [], [], b"") for facts in (local(), local(**changed))])


@pytest.mark.parametrize("sizes", [[0], [1, 5], [12_000, 12_284, 12_288], [50_000, 3]])
def test_what_rank_0_says_arrives_whole_and_in_order_whatever_its_length(sizes: list[int]) -> None:
    """A long prompt would be cut off, or be taken for two."""
    speaker, listener = Words(), Words()
    texts = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    for text in texts:
        speaker.say(text)
    heard: list[bytes] = []
    for _ in range(8):
        heard += listener.hear(encode(local(), [], [], speaker.next()))
    assert heard == texts


def test_a_load_that_fails_on_one_rank_fails_on_all() -> None:
    """One rank would compute on pages that hold nothing."""

    def work(member: MeetingMember) -> tuple[bool, bool]:
        clock = ManualClock()
        ledger = LedgerExecutor(clock, random.Random(0), storage=False, faults=Faults())
        ledger.content = {(Tier.HOST, FULL, 0): (4, 1)}
        executor = AgreedExecutor(ledger, member, clock)
        ticket = executor.start_load(JobId(1), [Move(FULL, array("i", [0]), array("i", [0]))])
        ledger.finish(JobId(1), failed=member.rank == 1)
        (done,) = executor.poll()
        try:
            ticket.wait_layer(0)
        except LoadFailed:
            return done.failed, True
        return done.failed, False

    assert run_ranks(3, work) == [(True, True)] * 3


def test_a_rank_that_ends_early_frees_its_pages_only_when_all_have_ended() -> None:
    """Stage completions of 10 and 7 pages: both use 7, and nobody pops what the other has not."""

    def work(member: MeetingMember) -> list[object]:
        clock = ManualClock()
        executor = AgreedExecutor(ScriptedLedger(clock, storage=True), member, clock)
        ledger = executor.local
        assert isinstance(ledger, ScriptedLedger)
        assert ledger.storage is not None
        refs = [ObjectRef(FULL, bytes([i]) * 32) for i in range(10)]
        ledger.storage.update({ref: (i, i) for i, ref in enumerate(refs)})
        executor.start_fetch(JobId(1), refs, list(range(10)))
        ledger.read(JobId(1), 10 if member.rank == 0 else 7)
        if member.rank == 0:
            ledger.finish(JobId(1), failed=False)
        seen: list[object] = [executor.poll(), executor.arrived(JobId(1)).count(1)]
        executor.cancel(JobId(1))
        seen += [executor.poll(), executor.arrived(JobId(1)).count(1)]
        if member.rank == 1:
            ledger.finish(JobId(1), failed=False)
        (done,) = executor.poll()
        return [*seen, done.flags.count(1)]

    first, second = run_ranks(2, work)
    assert first == second == [[], 7, [], 7, 7]


def test_the_smallest_pool_of_any_rank_is_everybodys_and_other_differences_are_refused() -> None:
    """A rank with one host page fewer would evict when the others do not, and the trees would drift apart."""

    def agree(member: MeetingMember) -> list[dict[Component, int]]:
        host = {FULL: 30 - (member.rank == 1)}
        return agree_at_start(member, [{FULL: 20}, host], {"page_size": 16})

    assert run_ranks(4, agree) == [[{FULL: 20}, {FULL: 29}]] * 4

    def differ(member: MeetingMember) -> str:
        with pytest.raises(ConfigError) as refused:
            agree_at_start(member, [{FULL: 20}], {"page_size": 16 * (1 + member.rank)})
        return str(refused.value)

    first, second = run_ranks(2, differ)
    assert first == second == "page_size differs between the ranks of one replica: [16, 32]; start all alike"


def test_whoever_waits_for_a_rank_that_has_left_is_told() -> None:
    """A replica would hang for ever with one rank gone."""

    def work(member: MeetingMember) -> None:
        clock = ManualClock()
        executor = AgreedExecutor(ScriptedLedger(clock, storage=False), member, clock)
        if member.rank == 1:
            executor.close()
            return
        while True:
            executor.poll()

    with pytest.raises(RankLost):
        run_ranks(2, work)


def test_only_rank_0_speaks_for_the_replica() -> None:
    """Two ranks that both took requests would run different ones."""

    def work(member: MeetingMember) -> list[bytes]:
        clock = ManualClock()
        executor = AgreedExecutor(ScriptedLedger(clock, storage=False), member, clock)
        if member.rank:
            with pytest.raises(ValueError, match="rank 0 speaks"):
                executor.say(b"mine")
        else:
            executor.say(json.dumps({"do": "this"}).encode())
        executor.poll()
        return executor.heard()

    assert run_ranks(2, work) == [[b'{"do": "this"}']] * 2
