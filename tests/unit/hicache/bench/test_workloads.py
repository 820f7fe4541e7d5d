"""The traffic of a benchmark: the same for the same seed, and the sizes that were published."""

from __future__ import annotations

import math
from array import array

import pytest

from hicache.bench.traffic import Traffic, Turn
from hicache.bench.workloads import WORKLOADS, Pacing, ReadyQueue, Workload
from hicache.errors import ConfigError


def small(**changes: object) -> Workload:
    settings = {"num_clients": 3, "num_rounds": 3, "request_length": 8, "output_length": 2, **changes}
    return Workload(name="small", **settings)  # type: ignore[arg-type]


def play(workload: Workload) -> list[Turn]:
    """Answer every turn at once, oldest first, cranking time to when the next one is due."""
    traffic = Traffic(workload)
    now, turns, open_turns = 0.0, [], []
    while not traffic.done:
        due = traffic.due_at()
        if due is None:
            turn = open_turns.pop(0)
            traffic.finish(turn, array("I", [turn.client] * workload.output_length), now=now)
            continue
        now = max(now, due)
        turns.append(traffic.take(now))
        open_turns.append(turns[-1])
    return turns


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "last", "whole"),
    [("deepseek-v4-flash", 361_152_000, 0.9834, 0.9673), ("inkling-small", 37_969_920, 0.9683, 0.9385)],
)
def test_published_workloads_have_the_published_sizes_and_ceilings(
    name: str, prompt_tokens: int, last: float, whole: float
) -> None:
    """A wrong length would make every comparison with the published curves meaningless."""
    workload = WORKLOADS[name]
    rounds = range(workload.num_rounds)
    history = workload.num_clients * sum(map(workload.history_length, rounds))
    assert workload.prompt_tokens == prompt_tokens
    assert workload.ceiling(workload.num_rounds - 1) == pytest.approx(last, abs=5e-5)
    assert history / workload.prompt_tokens == pytest.approx(whole, abs=5e-5)


def test_equal_seeds_give_equal_requests_and_another_seed_does_not() -> None:
    """Two people who compare numbers must have sent the same tokens in the same order."""
    again = [(t.client, t.round, t.prompt.tobytes()) for t in play(small())]
    assert [(t.client, t.round, t.prompt.tobytes()) for t in play(small())] == again
    other = [(t.client, t.round, t.prompt.tobytes()) for t in play(small(seed=2))]
    assert other != again


def test_tokens_are_the_same_on_every_machine() -> None:
    """The stream is part of the benchmark: a changed generator would silently be another benchmark."""
    assert small(vocab_size=1000).question(0, 0).tolist() == [880, 986, 918, 431, 302, 282, 446, 55]


def test_every_turn_extends_its_clients_conversation_with_the_reply() -> None:
    """A broken history would turn hits into misses on a healthy cache."""
    workload = small()
    seen: dict[int, array[int]] = {}
    for turn in play(workload):
        assert turn.history == workload.history_length(turn.round)
        assert len(turn.prompt) == workload.prompt_length(turn.round)
        if turn.round:
            said = seen[turn.client] + array("I", [turn.client] * 2)
            assert turn.prompt[: turn.history] == said
        seen[turn.client] = turn.prompt


def test_a_barrier_holds_the_next_round_until_the_last_client_is_through() -> None:
    """Without it, per-round hit rates mix rounds and the cliff smears."""
    rounds = [turn.round for turn in play(small(max_parallel=2))]
    assert rounds == sorted(rounds)
    traffic = Traffic(small(pacing=Pacing.FREE, max_parallel=1, request_rate=math.inf))
    first = traffic.take(0.0)
    traffic.finish(first, array("I", [1, 2]), now=0.0)
    assert [traffic.due_at() is not None, traffic.completed] == [True, 1]


def test_at_most_max_parallel_turns_are_under_way() -> None:
    """The server's load is what the flag says, or throughput figures are of something else."""
    traffic = Traffic(small(max_parallel=2, request_rate=math.inf))
    turns = [traffic.take(0.0), traffic.take(0.0)]
    assert traffic.due_at() is None
    with pytest.raises(ValueError, match="no turn is due"):
        traffic.take(0.0)
    traffic.finish(turns[1], array("I", [1, 2]), now=0.0)
    assert traffic.due_at() is not None


def test_arrivals_are_poisson_at_the_given_rate() -> None:
    """The mean gap is 1 / rate, and no turn is handed out before its time."""
    traffic = Traffic(small(num_clients=4000, max_parallel=4000, request_rate=50.0))
    now = 0.0
    for _ in range(4000):
        due = traffic.due_at()
        assert due is not None
        now = max(now, due)
        traffic.take(now)
    assert now / 3999 == pytest.approx(1 / 50, rel=0.06)


def test_a_random_queue_mixes_clients_and_still_serves_each_round_once() -> None:
    """Random order is what keeps a cyclic scan from being the only case measured."""
    turns = play(small(num_clients=12, ready_queue=ReadyQueue.RANDOM))
    order = [t.client for t in turns if t.round == 0]
    assert sorted(order) == list(range(12))
    assert order != sorted(order)


def test_a_reply_longer_than_asked_for_is_cut() -> None:
    """The client keeps `output_length` tokens, also where the engine was asked to compute one more."""
    traffic = Traffic(small(num_clients=1))
    turn = traffic.take(0.0)
    traffic.finish(turn, array("I", [7, 8, 9]), now=0.0)
    due = traffic.due_at()
    assert due is not None
    following = traffic.take(due)
    assert following.history == 10
    assert following.prompt[8:10].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 0}, "--num-clients 0"),
        ({"request_rate": 0.0}, "--request-rate 0.0"),
        ({"request_rate": math.nan}, "--request-rate nan"),
        ({"sub_question_length": -1}, "--sub-question-input-length -1"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_impossible_workloads_are_refused_by_flag(changes: dict[str, object], message: str) -> None:
    """A typo must name its flag instead of running for an hour."""
    with pytest.raises(ConfigError, match=message):
        small(**changes)


def test_with_churn_that_share_of_the_conversations_is_replaced_each_round() -> None:
    """A policy that never lets go is only found out where conversations end."""
    workload = small(num_clients=200, num_rounds=20, churn=0.05)
    turns = play(workload)
    fresh = [turn for turn in turns if turn.round and turn.history == 0]
    assert 0.04 < len(fresh) / (200 * 19) < 0.06
    assert all(len(turn.prompt) == 8 for turn in fresh)
    assert [turn.prompt for turn in play(workload)] == [turn.prompt for turn in turns]


def test_half_way_every_conversation_is_replaced_and_another_churn_begins() -> None:
    """What a policy learned before must not hold it back for long after."""
    turns = play(small(num_clients=50, num_rounds=8, churn_later=1.0))
    assert {turn.round for turn in turns if turn.history == 0} == {0, 4, 5, 6, 7}


def test_shared_prefixes_begin_every_conversation_the_first_of_them_most_often() -> None:
    """Prefixes that nobody shares would measure nothing that a shared system prompt does."""
    workload = small(num_clients=300, num_rounds=1, shared_prefix_length=6, num_shared_prefixes=4)
    turns = play(workload)
    prefixes = [turn.prompt[:6].tobytes() for turn in turns]
    counts = sorted((prefixes.count(p) for p in set(prefixes)), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 1.5 * counts[1]
    assert all(turn.history == 6 and len(turn.prompt) == 14 for turn in turns)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"churn": 1.5}, "--churn 1.5"),
        ({"churn_later": -0.1}, "--churn-later -0.1"),
        ({"shared_prefix_length": -1}, "--shared-prefix-length -1"),
        ({"num_shared_prefixes": 0}, "--num-shared-prefixes 0"),
    ],
)
def test_churn_and_prefixes_that_cannot_be_are_refused(change: dict[str, float], said: str) -> None:
    """A share above one would silently be one."""
    with pytest.raises(ConfigError, match=said):
        small(**change)
