"""An executor for one rank of several: what has ended, and what it brought, is what all ranks agree on.

Cache, tree and scheduler are deterministic, so ranks that see the same events at the same ticks decide
alike. This module makes the events the same: a job has ended when it has on every rank, an object is there
when every rank has its shard, and the time is rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import xxhash

from hicache.clock import Clock
from hicache.errors import ConfigError, LoadFailed
from hicache.transfer.agreement import (
    Agreed,
    AgreedClock,
    AgreedJob,
    Collective,
    Local,
    Words,
    combine,
    encode,
    layout,
)
from hicache.transfer.base import Done, Executor, JobId, JobKind, LoadTicket, Move, ObjectRef
from hicache.types import Component

_GREETING_BYTES = 4096
_LONGEST_WAIT_S = 0.002


class AgreedTicket(LoadTicket):
    """A load that has failed for all once it has failed on any rank."""

    def __init__(self, local: LoadTicket) -> None:
        self._local = local
        self.failed = False  # on any rank, as agreed

    def wait_layer(self, layer: int) -> None:
        if self.failed:
            raise LoadFailed("the load failed on a rank of this replica")
        self._local.wait_layer(layer)

    def done(self) -> bool:
        return self._local.done()


class AgreedExecutor(Executor):
    """One rank's executor behind the agreement. poll() is the tick: every rank enters it, whatever it has.

    A load that fails on this rank only raises LoadFailed here at once; the runner tells the other ranks
    within the same step. Used by the cache's thread.
    """

    def __init__(
        self,
        local: Executor,
        collective: Collective,
        clock: Clock,
        *,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        """`longest_wait_s` bounds how long news of other ranks may wait behind a transfer of this one."""
        self.local, self.collective = local, collective
        self._longest_wait_s = longest_wait_s
        self.clock = AgreedClock(clock)
        self.ticks = 0
        self._decisions = xxhash.xxh3_64()
        self._open: dict[JobId, AgreedJob] = {}  # in the order they were started
        self._tickets: dict[JobId, AgreedTicket] = {}
        self._words = Words()
        self._heard: list[bytes] = []
        self._state: Agreed
        self._exchange()  # nobody begins before all are there

    def say(self, text: bytes) -> None:
        """Tell all ranks, this one too, something at a tick to come. Rank 0 only."""
        if self.collective.rank:
            raise ValueError(f"rank {self.collective.rank} has no word; rank 0 speaks for the replica")
        self._words.say(text)

    def heard(self) -> list[bytes]:
        """Take what rank 0 has said up to the last tick."""
        heard, self._heard = self._heard, []
        return heard

    @property
    def decisions(self) -> int:
        """A digest of every transfer decided on since the start: which pages, from and to which slots."""
        return self._decisions.intdigest()

    # -- storage -------------------------------------------------------------------------------

    @property
    def has_storage(self) -> bool:
        return self._state.has_storage

    @property
    def storage_bypassed(self) -> bool:
        return self._state.bypassed

    @property
    def storage_epoch(self) -> int:
        return self._state.epoch

    # -- jobs ----------------------------------------------------------------------------------

    def copy_state(self, source: int, target: int) -> None:
        self._decisions.update(b"copy %d %d" % (source, target))
        self.local.copy_state(source, target)

    def fence(self) -> object:
        return None

    def passed(self, fence: object) -> bool:
        """Always: ranks must not differ in what is free, and loads start behind their rank's compute."""
        return True

    def start_load(self, job: JobId, moves: Sequence[Move]) -> LoadTicket:
        self._begin_moves(job, JobKind.LOAD, moves)
        ticket = AgreedTicket(self.local.start_load(job, moves))
        self._tickets[job] = ticket
        return ticket

    def start_write(self, job: JobId, moves: Sequence[Move]) -> None:
        self._begin_moves(job, JobKind.WRITE, moves)
        self.local.start_write(job, moves)

    def start_probe(self, job: JobId, refs: Sequence[ObjectRef]) -> None:
        self._begin_refs(job, JobKind.PROBE, refs, ())
        self.local.start_probe(job, refs)

    def start_fetch(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._begin_refs(job, JobKind.FETCH, refs, slots)
        self.local.start_fetch(job, refs, slots)

    def start_store(self, job: JobId, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._begin_refs(job, JobKind.STORE, refs, slots)
        self.local.start_store(job, refs, slots)

    def _begin_moves(self, job: JobId, kind: JobKind, moves: Sequence[Move]) -> None:
        self._decisions.update(b"%d %s" % (job, kind.value.encode()))
        for move in moves:
            self._decisions.update(b"%d" % move.component)
            self._decisions.update(bytes(memoryview(move.sources).cast("B")))
            self._decisions.update(bytes(memoryview(move.targets).cast("B")))
        # A load that fails says of each page whether it can be copied; one that does not says nothing.
        pages = sum(len(move.sources) for move in moves) if kind is JobKind.LOAD else 0
        self._open[job] = AgreedJob(job, kind, pages)

    def _begin_refs(self, job: JobId, kind: JobKind, refs: Sequence[ObjectRef], slots: Sequence[int]) -> None:
        self._decisions.update(b"%d %s" % (job, kind.value.encode()))
        self._decisions.update(b"".join(b"%d/%d" % (r.component, r.phase) + r.page_hash for r in refs))
        self._decisions.update(b",".join(b"%d" % slot for slot in slots))
        self._open[job] = AgreedJob(job, kind, len(refs))

    def pin(self, session: str, refs: Sequence[ObjectRef], ttl_s: float) -> None:
        self.local.pin(session, refs, ttl_s)

    def close_session(self, session: str) -> None:
        self.local.close_session(session)

    def arrived(self, job: JobId) -> bytes:
        """What every rank had at the last tick."""
        return bytes(self._open[job].flags)

    def cancel(self, job: JobId) -> None:
        self._decisions.update(b"cancel %d" % job)
        if job in self._open and self._open[job].done is None:
            self.local.cancel(job)

    # -- the tick ------------------------------------------------------------------------------

    def poll(self) -> list[Done]:
        """Enter the tick's one collective; return what has ended on all ranks, oldest first."""
        for done in self.local.poll():
            self._open[done.job].done = done
        state = self._exchange()
        ended = []
        for entry in state.ended:
            del self._open[entry.job]
            ticket = self._tickets.pop(entry.job, None)
            if ticket is not None:
                ticket.failed = entry.failed
            flags = b"" if entry.kind is JobKind.LOAD and not entry.failed else bytes(entry.flags)
            ended.append(Done(entry.job, entry.kind, flags, entry.failed, entry.seconds, entry.why))
        return ended

    def _exchange(self) -> Agreed:
        places = layout(list(self._open.values()))
        local = Local(
            self.ticks,
            self.clock.local.now(),
            self.decisions,
            self.local.has_storage,
            self.local.storage_epoch,
            self.local.storage_bypassed,
        )
        arrived = [self._flags(place.entry) for place in places]
        messages = self.collective.gather(encode(local, places, arrived, self._words.next()))
        self._state = combine(self.ticks, places, messages)
        self._heard += self._words.hear(messages[0])
        self.clock.set(self._state.now)
        self.ticks += 1
        return self._state

    def _flags(self, entry: AgreedJob) -> bytes:
        if entry.done is not None:
            good = entry.kind is JobKind.LOAD and not entry.done.failed
            return b"\1" * entry.count if good else entry.done.flags
        return self.local.arrived(entry.job) if entry.kind is JobKind.FETCH else b""

    def wait(self, timeout_s: float) -> bool:
        """Wait a little for a transfer of this rank; True, that is, look again, while time is left.

        The answer depends on nothing local: who loops on it loops equally often on every rank.
        """
        if timeout_s <= 0:
            return False
        self.local.wait(min(timeout_s, self._longest_wait_s))
        return True

    def close(self) -> None:
        """Stop this rank's threads, and leave the others."""
        self.local.close()
        self.collective.close()


def agree_at_start(
    collective: Collective, capacities: Sequence[Mapping[Component, int]], facts: Mapping[str, object]
) -> list[dict[Component, int]]:
    """Compare what must be equal on all ranks; return the least of each rank's capacities, pool by pool.

    A rank with a page less than the others would evict at another time than they do. `facts` are what is
    decided by: settings, model. Raises ConfigError, on every rank, naming the fact that differs.
    """
    mine = {"facts": facts, "capacities": [{c.name: n for c, n in tier.items()} for tier in capacities]}
    text = json.dumps(mine, sort_keys=True, default=str).encode()
    if len(text) > _GREETING_BYTES:
        raise ValueError(f"{len(text)} bytes of facts exceed the {_GREETING_BYTES} of a greeting")
    everyone = [json.loads(m.rstrip(b"\0")) for m in collective.gather(text.ljust(_GREETING_BYTES, b"\0"))]
    for name in facts:
        values = [rank["facts"].get(name) for rank in everyone]
        if any(value != values[0] for value in values):
            raise ConfigError(f"{name} differs between the ranks of one replica: {values}; start all alike")
    shapes = [[sorted(tier) for tier in rank["capacities"]] for rank in everyone]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(f"the ranks of one replica have different pools: {shapes}; start all alike")
    return [
        {Component[name]: min(rank["capacities"][i][name] for rank in everyone) for name in tier}
        for i, tier in enumerate(everyone[0]["capacities"])
    ]
