"""What POST /generate may ask for: SGLang's body, read strictly, turned into requests.

What cannot change a greedy answer is accepted and ignored; what would change it and is not there is
refused by name. Nothing here touches the engine.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from hicache.errors import HiCacheError
from hicache.keys import scope
from hicache.request import Request
from hicache.server.tokenizer import encode

DEFAULT_NEW_TOKENS = 128

# Fields of SGLang's bodies that have no meaning here, with the values that ask for nothing.
_INERT_FIELDS: Mapping[str, tuple[object, ...]] = {
    "return_logprob": (None, False),
    "return_hidden_states": (None, False),
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "input_embeds": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
}
_IGNORED_FIELDS = frozenset(
    {"log_metrics", "logprob_start_len", "modalities", "return_text_in_logprobs", "stream_options",
     "top_logprobs_num", "token_ids_logprob"}
)  # fmt: skip
# Sampling settings that cannot change what greedy decoding picks.
_IGNORED_SAMPLING = frozenset(
    {"ignore_eos", "min_p", "no_stop_trim", "sampling_seed", "skip_special_tokens",
     "spaces_between_special_tokens", "top_k", "top_p"}
)  # fmt: skip
_INERT_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "min_new_tokens": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
}


class BadRequest(HiCacheError, ValueError):
    """The body is refused; the message says where and why. Becomes status 400."""


class _Sampling(msgspec.Struct, kw_only=True):
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: float = 0.0
    stop_token_ids: list[int] | None = None


class _Body(msgspec.Struct, kw_only=True):
    input_ids: list[Any] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = False
    rid: str | list[str] | None = None
    session_id: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    lora: str | list[str | None] | None = None
    priority: int | list[int] | None = None


_BODY_FIELDS = frozenset(_Body.__struct_fields__)
_SAMPLING_FIELDS = frozenset(_Sampling.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take: `vocab` ids, `context_length` tokens of prompt and output together."""

    vocab: int
    context_length: int


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A parsed body: one request, or several whose replies come back in order."""

    requests: tuple[Request, ...]
    batch: bool
    stream: bool


def parse(raw: bytes, limits: Limits) -> GenerateCall:
    """Read a body. Raises BadRequest, which names the field."""
    body = _decode(raw)
    prompts, batch = _prompts(body, limits.vocab)
    sampling = _spread(
        "sampling_params",
        {} if body.sampling_params is None else body.sampling_params,
        len(prompts),
        batch=batch,
    )
    rids = _rids(body.rid, len(prompts), batch=batch)
    if body.lora and body.lora_path:
        raise BadRequest("lora and lora_path are two names of one thing: give one of them")
    per_item = {
        name: _spread(name, value, len(prompts), batch=batch)
        for name, value in (
            ("session_id", body.session_id),
            ("extra_key", body.extra_key),
            ("cache_salt", body.cache_salt),
            ("lora_path", body.lora_path or body.lora),
            ("priority", body.priority),
        )
    }
    requests = []
    for i, prompt in enumerate(prompts):
        settings = _sampling(sampling[i] or {}, len(prompt), limits)
        requests.append(
            Request(
                rid=rids[i],
                tokens=array("I", prompt),
                prompt_length=len(prompt),
                max_new_tokens=settings.max_new_tokens or DEFAULT_NEW_TOKENS,
                scope=scope(
                    per_item["extra_key"][i], per_item["cache_salt"][i], per_item["lora_path"][i] or None
                ),
                priority=per_item["priority"][i] or 0,
                session_id=per_item["session_id"][i],
                stop_tokens=frozenset(settings.stop_token_ids or ()),
            )
        )
    return GenerateCall(tuple(requests), batch, bool(body.stream))


def _decode(raw: bytes) -> _Body:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON object: {error}") from error
    _refuse_active("", fields, _INERT_FIELDS, _IGNORED_FIELDS | _BODY_FIELDS)
    return _convert({k: v for k, v in fields.items() if k in _BODY_FIELDS}, _Body, "")


def _refuse_active(
    where: str, fields: Mapping[str, Any], inert: Mapping[str, tuple[object, ...]], known: frozenset[str]
) -> None:
    for name, value in fields.items():
        if name in known:
            continue
        if name not in inert:
            raise BadRequest(f"{where}{name} is unknown; known are {', '.join(sorted(known | inert.keys()))}")
        if value not in inert[name]:
            raise BadRequest(
                f"{where}{name}={value!r} is not supported by the reference engine; leave it out"
            )


_T = TypeVar("_T")


def _convert(value: object, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise BadRequest(f"{where}{path.rstrip('`')}: {message}" if path else f"{where}{error}") from error


def _prompts(body: _Body, vocab: int) -> tuple[Sequence[Sequence[int]], bool]:
    """Return the prompts and whether they came as a batch."""
    if (body.input_ids is None) == (body.text is None):
        raise BadRequest("give either input_ids or text")
    prompts: list[list[int]]
    if body.text is not None:
        where, batch = "text", isinstance(body.text, list)
        prompts = [encode(text) for text in ([body.text] if isinstance(body.text, str) else body.text)]
    else:
        ids = body.input_ids or []
        where, batch = "input_ids", bool(ids) and isinstance(ids[0], list)
        prompts = (
            _convert(ids, list[list[int]], "input_ids: ")
            if batch
            else [_convert(ids, list[int], "input_ids: ")]
        )
    if not prompts:
        raise BadRequest(f"{where} is empty; send at least one token")
    for i, prompt in enumerate(prompts):
        at = f"{where}[{i}]" if batch else where
        if not prompt:
            raise BadRequest(f"{at} is empty; send at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            wrong = next(j for j, token in enumerate(prompt) if not 0 <= token < vocab)
            raise BadRequest(f"{at}[{wrong}]={prompt[wrong]} is outside of the vocabulary, 0 to {vocab - 1}")
    return prompts, batch


def _spread(name: str, value: Any, count: int, *, batch: bool) -> list[Any]:
    """One value per prompt: a list gives one each, anything else holds for all."""
    if not isinstance(value, list):
        return [value] * count
    if not batch or len(value) != count:
        entries = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
        wrong = f"{count} prompts" if batch else "1 single prompt: send it without a list"
        raise BadRequest(f"{name} has {entries} for {wrong}")
    return value


def _rids(rid: str | list[str] | None, count: int, *, batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and batch:
        return [f"{rid}_{i}" for i in range(count)]
    rids = _spread("rid", rid, count, batch=batch)
    if len(set(rids)) != len(rids) or "" in rids:
        raise BadRequest("rid: ids must be distinct and not empty")
    return rids


def _sampling(fields: Mapping[str, Any], prompt_length: int, limits: Limits) -> _Sampling:
    where = "sampling_params."
    _refuse_active(where, fields, _INERT_SAMPLING, _IGNORED_SAMPLING | _SAMPLING_FIELDS)
    settings = _convert({k: v for k, v in fields.items() if k in _SAMPLING_FIELDS}, _Sampling, where)
    if settings.temperature != 0:
        raise BadRequest(
            f"{where}temperature={settings.temperature} is not supported: the reference engine decodes "
            "greedily; send 0 or leave it out"
        )
    room = limits.context_length - prompt_length
    if room < 1:
        raise BadRequest(
            f"the prompt has {prompt_length} tokens; with one token to produce that is more than the context "
            f"of {limits.context_length}; shorten it, or serve with a longer --context-length"
        )
    if settings.max_new_tokens is None:
        settings.max_new_tokens = min(DEFAULT_NEW_TOKENS, room)
    if settings.max_new_tokens > room:
        raise BadRequest(
            f"the prompt has {prompt_length} tokens and {where}max_new_tokens is {settings.max_new_tokens}: "
            f"together more than the context of {limits.context_length}"
        )
    return settings
