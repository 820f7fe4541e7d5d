"""POST /generate reads SGLang's bodies, and names what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from hicache.keys import scope
from hicache.server.generate import BadRequest, GenerateCall, Limits, parse

LIMITS = Limits(vocab=512, context_length=64)


def body(**fields: object) -> GenerateCall:
    return parse(msgspec.json.encode(fields), LIMITS)


def test_one_prompt_of_ids() -> None:
    """The plainest request would not work."""
    call = body(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 5, "temperature": 0}, rid="a")
    (request,) = call.requests
    assert (request.rid, request.tokens.tolist(), request.max_new_tokens) == ("a", [1, 2, 3], 5)
    assert request.scope == scope()
    assert not call.batch
    assert not call.stream


def test_text_is_its_utf8_bytes() -> None:
    """Text prompts would not share a cache with their ids."""
    assert body(text="Hé").requests[0].tokens.tolist() == list("Hé".encode())


def test_a_batch_spreads_shared_and_own_fields() -> None:
    """A batch would run under one prompt's settings, or one tenant's salt."""
    call = body(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        cache_salt=["x", None],
        session_id="s",
        priority=3,
    )
    assert call.batch
    assert [r.max_new_tokens for r in call.requests] == [1, 2]
    assert [r.scope for r in call.requests] == [scope(cache_salt="x"), scope()]
    assert [r.session_id for r in call.requests] == ["s", "s"]
    assert [r.priority for r in call.requests] == [3, 3]
    assert len({r.rid for r in call.requests}) == 2


def test_scopes_keep_their_parts_apart() -> None:
    """Two tenants would read each other's cache."""
    scopes = {
        body(input_ids=[1]).requests[0].scope,
        body(input_ids=[1], extra_key="k").requests[0].scope,
        body(input_ids=[1], cache_salt="k").requests[0].scope,
        body(input_ids=[1], lora_path="k").requests[0].scope,
    }
    assert len(scopes) == 4
    assert (
        body(input_ids=[1], lora="k").requests[0].scope
        == body(input_ids=[1], lora_path="k").requests[0].scope
    )
    assert body(input_ids=[1], lora_path="").requests[0].scope == scope()


def test_what_cannot_change_a_greedy_answer_is_accepted() -> None:
    """SGLang's own clients send these and would be turned away."""
    body(
        text="hi",
        sampling_params={"top_p": 0.9, "top_k": 5, "ignore_eos": True, "skip_special_tokens": True, "n": 1},
        return_logprob=False,
        logprob_start_len=-1,
        lora_path="",
        stream_options={"include_usage": True},
    )


def test_the_default_output_ends_at_the_context() -> None:
    """A long prompt without max_new_tokens would be refused although one token fits."""
    assert body(input_ids=[1] * 60).requests[0].max_new_tokens == 4
    assert parse(b'{"text":"a"}', Limits(512, 4096)).requests[0].max_new_tokens == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either input_ids or text"),
        ({"input_ids": [1], "text": "a"}, "either input_ids or text"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [[1], []]}, r"input_ids\[1\] is empty"),
        ({"text": ""}, "text is empty"),
        ({"text": []}, "text is empty"),
        ({"input_ids": [1, 2.5]}, r"input_ids: Expected `int`, got `float` - at `\$\[1\]`"),
        ({"input_ids": [1, True]}, "got `bool`"),
        ({"input_ids": [1, "2"]}, "got `str`"),
        ({"input_ids": [[1], 2]}, r"got `int` - at `\$\[1\]`"),
        ({"input_ids": "1 2"}, "input_ids"),
        ({"input_ids": [1, 512]}, r"input_ids\[1\]=512 is outside of the vocabulary, 0 to 511"),
        ({"input_ids": [[1], [3, -1]]}, r"input_ids\[1\]\[1\]=-1 is outside"),
        ({"input_ids": [1] * 64}, "64 tokens; with one token to produce that is more than the context of 64"),
        ({"input_ids": [1] * 60, "sampling_params": {"max_new_tokens": 5}}, "60 tokens .* is 5: .* of 64"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": 0.7}}, "temperature=0.7 is not supported"),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, r"sampling_params\.n=2 is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop.* is not supported"),
        ({"input_ids": [1], "sampling_params": {"tempratur": 0}}, "tempratur is unknown"),
        ({"input_ids": [1], "return_logprob": True}, "return_logprob=True is not supported"),
        ({"input_ids": [1], "promt": 1}, "promt is unknown; known are"),
        ({"input_ids": [1], "rid": ["a", "b"]}, "rid has 2 entries for 1 single prompt"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "distinct"),
        ({"input_ids": [1], "lora": "a", "lora_path": "b"}, "two names of one thing"),
        ({"input_ids": [1], "priority": "high"}, "priority"),
        ({"input_ids": [1], "sampling_params": []}, "sampling_params has 0 entries for 1 single prompt"),
        (
            {"input_ids": [1], "session_id": ["a"]},
            "session_id has 1 entry for 1 single prompt: send it without a list",
        ),
        ({"input_ids": [[1], [2]], "session_id": ["a"]}, "session_id has 1 entry for 2 prompts"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    """A user would get a stack trace, or an answer to another question."""
    with pytest.raises(BadRequest, match=message):
        body(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens: Expected `int` >= 1"),
        (
            {"sampling_params": {"stop_token_ids": [1, "a"]}},
            "sampling_params.stop_token_ids[1]: Expected `int`, got `str`",
        ),
        ({"priority": "high"}, "priority: Expected `int | array | null`, got `str`"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_first(fields: dict[str, object], message: str) -> None:
    """A reader would have to find the field in a path behind the message, with a quote left over."""
    with pytest.raises(BadRequest) as refused:
        body(input_ids=[1], **fields)
    assert str(refused.value) == message


NESTED = b'{"input_ids": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"text": ', b"\xff\xfe", pytest.param(NESTED, id="nested")])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    """Garbage would end a connection without a word."""
    with pytest.raises(BadRequest, match="no JSON object"):
        parse(raw, LIMITS)
