"""Reading recorded traces: both formats, nested sub-agents, and ids made into tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.bench.traces import TokenExpander, TraceRequest, read_trace
from hicache.errors import ConfigError

TRACES = Path(__file__).parents[3] / "traces"


def request(blocks: list[int], length: int, *, size: int = 4, scope: bytes = b"") -> TraceRequest:
    return TraceRequest(0.0, length, 1, tuple(blocks), size, scope)


def test_equal_blocks_give_equal_tokens_and_other_blocks_share_none() -> None:
    """The replayed hit rate is exactly what the ids say, no more and no less."""
    expander = TokenExpander()
    first = expander.expand(request([3, 5], 8))
    second = expander.expand(request([3, 6], 8))
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])


def test_a_partly_filled_last_block_is_cut_and_unnamed_tokens_are_never_shared() -> None:
    """A rest that no id names must not hit anything, not even itself in the next request."""
    expander = TokenExpander()
    cut = expander.expand(request([3, 5], 6))
    assert (len(cut), cut.itemsize) == (6, 4)
    one, other = expander.expand(request([3], 7)), expander.expand(request([3], 7))
    assert one[:4] == other[:4] == cut[:4]
    assert not set(one[4:]) & set(other[4:])


def test_ids_beyond_the_token_space_are_refused() -> None:
    """Wrapping around would make different blocks equal."""
    with pytest.raises(ConfigError, match=r"2\*\*32"):
        TokenExpander().expand(request([2**30], 4))


def test_sub_agents_are_read_inside_their_session_and_in_time_order() -> None:
    """Their times count from the sub-agent's start; a wrong order would change what is cached."""
    requests = read_trace(TRACES / "agentic" / "trace_0277.json")
    times = [r.time_s for r in requests]
    assert times[:4] == pytest.approx([0.0, 79.224, 85.224, 92.224])
    assert times == sorted(times)
    assert {r.scope for r in requests} == {requests[0].scope}
    assert all(len(r.blocks) == r.input_length // 64 for r in requests)


def test_sessions_of_a_folder_have_their_own_scopes() -> None:
    """Ids are local to a session: without a scope, unrelated sessions would hit each other."""
    files = list((TRACES / "agentic").iterdir())
    requests = read_trace(TRACES / "agentic")
    assert len({r.scope for r in requests}) == len(files) > 1
    assert [r.time_s for r in requests] == sorted(r.time_s for r in requests)


def test_the_line_format_has_blocks_of_512_and_times_in_milliseconds() -> None:
    """Its ids are global, so that different users share the system prompt."""
    requests = read_trace(TRACES / "conversation.jsonl")
    assert len(requests) == 60
    assert {(r.block_size, r.scope) for r in requests} == {(512, b"")}
    assert all(len(r.blocks) == -(-r.input_length // 512) for r in requests)
    assert requests[-1].time_s < 600


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": "x"}, "hash_ids must be a list"),
        ({"hash_ids": [1, -2]}, "non-negative"),
        ({"hash_ids": [1, 2, 3]}, "3 blocks of 512 for 600 tokens"),
        ({"input_length": 0, "hash_ids": []}, "input_length 0 must be at least 1"),
        ({"input_length": "many"}, "input_length is 'many', not a whole number"),
        ({"timestamp": None}, "timestamp is None, not a number"),
    ],
)
def test_a_bad_request_is_named_by_file_and_line(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """A trace of twelve thousand lines with one bad one must say which."""
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl line 2: ") as caught:
        read_trace(file)
    assert reason in str(caught.value)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """Missing, empty, truncated and foreign files each get a sentence."""
    empty, broken, foreign = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "c.json"
    empty.write_text("")
    broken.write_text('{"block_size": 64, "requests": [')
    foreign.write_text('{"block_size": 64}')
    for path, reason in [
        (tmp_path / "missing", "no such file or folder"),
        (empty, "no request in it"),
        (broken, "truncated"),
        (foreign, "`requests` must be a list"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            read_trace(path)
