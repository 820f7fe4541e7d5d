"""Two servers that should say the same: asked alike, cold, with hits and with longer prompts, and compared.

Like is compared with like: a hit with a hit, cold with cold. On a real engine a hit may tip a near tie
that a cold run does not; so what was meant to be a hit is only called one if the server says so.
"""

from __future__ import annotations

import http.client
import random
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from hicache.bench.report import JSON
from hicache.errors import ConfigError, HiCacheError

COLD, HIT, EXTENDED, RESTORED = "cold", "hit", "extended", "restored"
_FLUSH_RETRY_S = 0.2
_FETCHED = 256  # tokens: L3 is not asked for less, by SGLang's and our default (`prefetch_threshold`)


class VerifyError(HiCacheError):
    """A server cannot be reached, refuses what it is asked, or answers without tokens."""


class _KeyRefused(VerifyError):
    """The server wants another key; asking again does not help."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What both servers are asked. `lengths` in tokens, used in turn; ids are below `vocab_size`."""

    prompts: int = 6
    lengths: tuple[int, ...] = ()  # empty: from the servers' page size
    output_length: int = 16
    extend_by: int = 24
    vocab_size: int = 256
    seed: int = 0
    restored: bool = False  # also after a flush, from L3
    hit_with_cold: bool = False  # compare also where only one of two was a hit
    other_models: bool = False  # go on although the servers name different models

    def __post_init__(self) -> None:
        for name in ("prompts", "output_length", "extend_by"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.vocab_size < 2:
            raise ConfigError(f"--vocab-size {self.vocab_size} must be at least 2")
        if any(length < 1 for length in self.lengths):
            raise ConfigError(
                f"--lengths {','.join(map(str, self.lengths))}: every length must be at least 1"
            )

    def prompt(self, number: int, length: int) -> list[int]:
        """The same for the same seed, number and length."""
        draw = random.Random(f"{self.seed}/{number}")
        return [draw.randrange(1, self.vocab_size) for _ in range(length)]

    def extension(self, number: int) -> list[int]:
        draw = random.Random(f"{self.seed}/{number}/extension")
        return [draw.randrange(1, self.vocab_size) for _ in range(self.extend_by)]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. `details` are cached tokens by tier, where it tells them."""

    tokens: tuple[int, ...]
    cached_tokens: int
    details: dict[str, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt at one stage on both servers. `position` of the first token that differs, or None."""

    prompt: int
    length: int
    stage: str
    answers: tuple[Answer, Answer]
    compared: bool  # like with like, or asked to compare anyway
    position: int | None

    @property
    def as_meant(self) -> bool:
        """Both were hits where hits were meant, and neither was where none was."""
        return all((a.cached_tokens > 0) == (self.stage != COLD) for a in self.answers)

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """Both tokens at `position`; None where an answer had ended."""
        at = self.position
        a, b = (None if at is None or at >= len(x.tokens) else x.tokens[at] for x in self.answers)
        return a, b

    def as_json(self) -> dict[str, JSON]:
        return {
            "prompt": self.prompt,
            "length": self.length,
            "stage": self.stage,
            "compared": self.compared,
            "as_meant": self.as_meant,
            "cached_tokens": [a.cached_tokens for a in self.answers],
            "cached_tokens_details": [dict(a.details) for a in self.answers],
            "position": self.position,
            "tokens": list(self.tokens),
        }


@dataclass(slots=True)
class Verdict:
    """Everything that was compared. `own` counts, per server, hits that differ from its own cold answer."""

    urls: tuple[str, str]
    comparisons: list[Comparison] = field(default_factory=list)
    own: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def first(self) -> Comparison | None:
        """The first difference."""
        return next((c for c in self.comparisons if c.position is not None and c.compared), None)

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(c.stage for c in self.comparisons))

    def of(self, stage: str) -> list[Comparison]:
        return [c for c in self.comparisons if c.stage == stage]

    @property
    def unproven(self) -> list[str]:
        """Stages in which nothing could be compared as meant: they show nothing."""
        return [s for s in self.stages if not any(c.compared and c.as_meant for c in self.of(s))]

    def as_json(self) -> dict[str, JSON]:
        first = self.first
        return {
            "urls": list(self.urls),
            "equal": first is None,
            "unproven_stages": list(self.unproven),
            "first_difference": None if first is None else first.as_json(),
            "hits_unlike_own_cold": list(self.own),
            "comparisons": [c.as_json() for c in self.comparisons],
        }


class Server:
    """One server over HTTP: ours, or SGLang's. Every call blocks, at most `timeout_s`.

    `api_key` goes with every request as a bearer token, `admin_api_key` with the flush, if there is one.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: begin it with http:// or https://")
        self.url = url.rstrip("/")
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self._timeout_s = timeout_s

    def model(self) -> tuple[str, str]:
        """Return what the server says of its model: path and weight version."""
        info = self._json(self._call("GET", "/get_model_info"), "/get_model_info")
        return str(info.get("model_path", "")), str(info.get("weight_version", ""))

    def page_size(self) -> int:
        """Return the server's page size, 1 where it does not tell."""
        found = self._json(self._call("GET", "/get_server_info"), "/get_server_info").get("page_size")
        return found if isinstance(found, int) and found > 0 else 1

    def ask(self, prompt: Sequence[int], new_tokens: int, *, scope: str) -> Answer:
        """Let the server continue a prompt, greedily; nothing outside of `scope` can be hit."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "extra_key": scope,
        }
        reply = self._json(self._call("POST", "/generate", msgspec.json.encode(body)), "/generate")
        meta, tokens = reply.get("meta_info"), reply.get("output_ids")
        if not isinstance(tokens, list) or not isinstance(meta, dict) or "cached_tokens" not in meta:
            raise VerifyError(
                f"{self.url}/generate: the reply has no output_ids, or no meta_info.cached_tokens "
                "(SGLang: start it with --enable-cache-report)"
            )
        details = meta.get("cached_tokens_details") or {}
        tiers = {k: v for k, v in details.items() if isinstance(v, int)} if isinstance(details, dict) else {}
        return Answer(tuple(tokens), int(meta["cached_tokens"]), tiers)

    def flush(self) -> None:
        """Empty L1 and L2. A server refuses while it is busy: asked again for a while."""
        deadline = time.monotonic() + 30.0
        while True:
            try:
                self._call("POST", "/flush_cache", key=self._admin_api_key or self._api_key)
            except _KeyRefused:
                raise
            except VerifyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_FLUSH_RETRY_S)
            else:
                return

    def _call(self, method: str, path: str, body: bytes | None = None, *, key: str | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        key = key or self._api_key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(300).decode("utf-8", "replace")
            said = f"{self.url}{path}: status {error.code}: {text}"
            if error.code in (401, 403):
                where = ", or with --admin-api-key where it has one" if path == "/flush_cache" else ""
                raise _KeyRefused(f"{said}; give the server's key with --api-key{where}") from error
            raise VerifyError(said) from error
        except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise VerifyError(f"{self.url}{path}: {reason}; is the server up?") from error

    def _json(self, raw: bytes, path: str) -> dict[str, object]:
        try:
            return msgspec.json.decode(raw, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise VerifyError(f"{self.url}{path}: the answer is no JSON object: {error}") from error


def verify(
    servers: tuple[Server, Server], plan: Plan, on_comparison: Callable[[Comparison], None] = lambda c: None
) -> Verdict:
    """Ask both servers and compare. Raises VerifyError, and ConfigError for servers of different models."""
    _check_models(servers, plan)
    lengths = plan.lengths or _lengths(max(server.page_size() for server in servers), restored=plan.restored)
    run = secrets.token_hex(4)
    scopes = (f"verify-{run}-a", f"verify-{run}-b")  # they may share their L3
    verdict = Verdict((servers[0].url, servers[1].url))

    def compare(number: int, prompt: Sequence[int], stage: str) -> Comparison:
        a, b = (
            server.ask(prompt, plan.output_length, scope=scope)
            for server, scope in zip(servers, scopes, strict=True)
        )
        compared = plan.hit_with_cold or (a.cached_tokens > 0) == (b.cached_tokens > 0)
        found = Comparison(number, len(prompt), stage, (a, b), compared, _differs(a.tokens, b.tokens))
        verdict.comparisons.append(found)
        on_comparison(found)
        return found

    prompts = [plan.prompt(n, lengths[n % len(lengths)]) for n in range(plan.prompts)]
    for number, prompt in enumerate(prompts):
        cold = compare(number, prompt, COLD)
        hit = compare(number, prompt, HIT)
        for i in range(2):
            verdict.own[i] += cold.answers[i].tokens != hit.answers[i].tokens
        said = cold.answers[0].tokens
        compare(number, [*prompt, *said, *plan.extension(number)], EXTENDED)
    if plan.restored:
        for server in servers:
            server.flush()
        for number, prompt in enumerate(prompts):
            compare(number, prompt, RESTORED)
    return verdict


def _check_models(servers: tuple[Server, Server], plan: Plan) -> None:
    if servers[0].url == servers[1].url:
        raise ConfigError(f"--url {servers[0].url} is given twice; name two servers")
    a, b = (server.model() for server in servers)
    if a != b and not plan.other_models:
        shown = " and ".join(f"{path} (weights {version or '?'})" for path, version in (a, b))
        raise ConfigError(
            f"the servers have different models, {shown}: they cannot agree; "
            "--other-models compares them nevertheless"
        )


def _lengths(page: int, *, restored: bool) -> tuple[int, ...]:
    """A short hit, one that ends with its page, and a long one that does not; of a size for L3 if need be."""
    more = -(-_FETCHED // page) * page if restored else 0
    return more + 2 * page + 1, more + 5 * page, more + 12 * page + page // 2 + 1


def _differs(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ, None if they are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def explain(verdict: Verdict) -> Iterator[str]:
    """Say what was found, a line each."""
    for stage in verdict.stages:
        found = verdict.of(stage)
        like = [c for c in found if c.compared]
        equal = sum(c.position is None for c in like)
        cached = [sum(c.answers[i].cached_tokens for c in found) for i in range(2)]
        line = f"{stage}: {equal} of {len(like)} equal; cached tokens {cached[0]:,} and {cached[1]:,}"
        odd = [c for c in found if not c.as_meant]
        if odd:
            meant = "cold" if stage == COLD else "a hit"
            named = ", ".join(
                f"{c.prompt} ({' and '.join(str(a.cached_tokens) for a in c.answers)})" for c in odd
            )
            line += f"; not {meant}: prompt {named}"
        yield line
    for url, count in zip(verdict.urls, verdict.own, strict=True):
        if count:
            yield f"{url}: {count} hits differ from its own cold answer, as near ties on a real engine may"
    first = verdict.first
    if first is not None:
        a, b = ("the end" if t is None else str(t) for t in first.tokens)
        hits = " and ".join(str(x.cached_tokens) for x in first.answers)
        yield (
            f"DIFFERENT at prompt {first.prompt} ({first.length} tokens, {first.stage}), output token "
            f"{first.position}: {verdict.urls[0]} has {a}, {verdict.urls[1]} has {b}; cached {hits}"
        )
    elif verdict.unproven:
        yield f"nothing is shown for {', '.join(verdict.unproven)}: no pair was what it was meant to be"
    else:
        yield f"EQUAL: {sum(c.compared for c in verdict.comparisons)} answers, token by token"
