"""Conversations that the benchmark names: each has a session of its own, closed behind its last turn."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hicache.bench.system import SimulatedSystem, Tiers
from hicache.bench.traffic import Traffic
from hicache.bench.virtual import run_virtual
from hicache.bench.workloads import Workload
from hicache.engine.scheduler import FinalToken

CHURNED = Workload(
    name="churned",
    num_clients=16,
    num_rounds=10,
    request_length=256,
    output_length=16,
    max_parallel=4,
    request_rate=float("inf"),
    churn=0.3,
)


@pytest.mark.parametrize("sessions", [False, True])
def test_a_session_lasts_as_long_as_its_conversation(sessions: bool) -> None:
    """A session over two conversations would keep the one that is gone."""
    workload = Workload("w", 6, 12, 8, 4, churn=0.4, sessions=sessions)
    traffic = Traffic(workload)
    prompts: dict[str, list[list[int]]] = {}
    last: dict[str, list[bool]] = {}
    while not traffic.done:
        turn = traffic.take(max(0.0, traffic.due_at() or 0.0))
        if not sessions:
            assert turn.session is None
        else:
            assert turn.session is not None
            prompts.setdefault(turn.session, []).append(turn.prompt.tolist())
            last.setdefault(turn.session, []).append(turn.last)
        traffic.finish(turn, turn.prompt[:4], now=turn.sent_at)
    for session, seen in prompts.items():
        assert all(later[: len(before)] == before for before, later in itertools.pairwise(seen))
        assert last[session] == [False] * (len(seen) - 1) + [True]
    assert len(prompts) > workload.num_clients or not sessions


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_naming_and_closing_conversations_leaves_the_room_to_those_that_go_on(policy: str) -> None:
    """The point of sessions: what is over would otherwise push out what comes back."""
    rates = []
    for sessions in (False, True):
        run = run_virtual(
            replace(CHURNED, sessions=sessions),
            SimulatedSystem(max_total_tokens=14_000),
            tiers=Tiers.L1,
            eviction_policy=policy,
            final_token=FinalToken.SKIP,
            on_result=lambda _: None,
        )
        rates.append(run.hit_rate)
    assert rates[1] > rates[0] + 0.02
