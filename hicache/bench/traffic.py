"""The load generator: which client sends next, and when. It keeps no clock and does no I/O.

One state machine serves every driver (HTTP, in process, virtual time), so that all of them put the
same requests in the same order.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from dataclasses import dataclass

from hicache.bench.workloads import Pacing, ReadyQueue, Workload
from hicache.types import TokenBuffer


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of one client. `prompt` is the caller's own copy, `history` of it not new."""

    client: int
    round: int
    prompt: array[int]
    history: int
    sent_at: float  # when it was due: a driver that was busy then takes it later
    session: str | None = None
    last: bool = False  # of its conversation: its session is closed behind it

    @property
    def rid(self) -> str:
        return f"c{self.client}-r{self.round}"


class Traffic:
    """Hands out turns in order and takes replies. Not thread-safe: owned by one driver.

    A turn is due once its client may speak, fewer than `max_parallel` are under way, and the Poisson
    gap since the last one is over. Invariant: a client has at most one turn under way.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._ready = deque((client, 0) for client in range(workload.num_clients))
        self._held: list[tuple[int, int]] = []  # waiting at the barrier
        self._conversations = [array("I") for _ in range(workload.num_clients)]
        self._begun = [0] * workload.num_clients  # the round that the conversation began with
        self._under_way: set[int] = set()
        self._completed = 0
        self._not_before = -math.inf  # the Poisson gap since the last turn ends then
        self._able_since = -math.inf  # the last reply that may have let somebody speak
        self._arrivals = random.Random(workload.seed)
        self._draws = random.Random(workload.seed + 1)

    @property
    def done(self) -> bool:
        return self._completed == self.workload.num_requests

    @property
    def completed(self) -> int:
        return self._completed

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def due_at(self) -> float | None:
        """When the next turn may be sent (-inf: now), or None while nobody may speak."""
        if not self._ready or len(self._under_way) >= self.workload.max_parallel:
            return None
        return max(self._not_before, self._able_since)

    def take(self, now: float) -> Turn:
        """Send the next turn at `now`, which is not before due_at(); gaps count from when it was due."""
        due = self.due_at()
        if due is None or now < due:
            raise ValueError(f"no turn is due at {now}")
        if self.workload.ready_queue is ReadyQueue.RANDOM:
            self._ready.rotate(-self._draws.randrange(len(self._ready)))
        client, round_ = self._ready.popleft()
        self._under_way.add(client)
        sent_at = now if math.isinf(due) else due
        rate = self.workload.request_rate
        self._not_before = sent_at + (0.0 if math.isinf(rate) else self._arrivals.expovariate(rate))
        if self.workload.begins(client, round_):
            self._conversations[client] = self.workload.opening(client, round_)
            self._begun[client] = round_
        conversation = self._conversations[client]
        history = len(conversation)
        conversation.extend(self.workload.question(client, round_))
        return Turn(
            client=client,
            round=round_,
            prompt=conversation[:],
            history=history,
            sent_at=sent_at,
            session=f"c{client}-from-r{self._begun[client]}" if self.workload.sessions else None,
            last=self.workload.ends(client, round_),
        )

    def finish(self, turn: Turn, reply: TokenBuffer, *, now: float) -> None:
        """Take a reply; its first `output_length` tokens join the conversation."""
        if self.due_at() is None:
            self._able_since = now
        self._under_way.remove(turn.client)
        self._completed += 1
        said = array("I", memoryview(reply).cast("B").tobytes())
        self._conversations[turn.client].extend(said[: self.workload.output_length])
        following = (turn.client, turn.round + 1)
        if following[1] == self.workload.num_rounds:
            return
        if self.workload.pacing is Pacing.FREE:
            self._ready.append(following)
            return
        self._held.append(following)
        if len(self._held) == self.workload.num_clients:
            self._ready.extend(self._held)
            self._held.clear()
