"""Asks a replica over HTTP and keeps the accounts: every prompt token came from a tier or was computed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.bench.demo.processes import DemoFailed
from hicache.bench.demo.sessions import Prompt

_REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server at `url` replied to one prompt: tokens by the tier they came from, and seconds."""

    url: str
    prompt: Prompt
    output: array[int]
    prompt_tokens: int
    cached_tokens: int
    device: int
    host: int
    storage: int
    seconds: float

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def adds_up(self) -> bool:
        """L1, L2, L3 and computed make up the prompt that was sent."""
        parts = (self.device, self.host, self.storage, self.computed)
        return min(parts) >= 0 and sum(parts) == self.prompt_tokens == len(self.prompt.tokens)


@dataclass(slots=True)
class Tally:
    """Sums over answers."""

    requests: int = 0
    prompt: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Tally:
        tally = cls()
        for answer in answers:
            tally.requests += 1
            tally.prompt += answer.prompt_tokens
            tally.device += answer.device
            tally.host += answer.host
            tally.storage += answer.storage
            tally.computed += answer.computed
            tally.seconds += answer.seconds
            tally.answers.append(answer)
        return tally


def ask(url: str, prompt: Prompt, *, max_new_tokens: int) -> Answer:
    """Send one prompt and wait for the whole reply. Raises DemoFailed if the replica refuses or dies."""
    body = {
        "input_ids": prompt.tokens.tolist(),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as reply:
            said = json.load(reply)
    except urllib.error.HTTPError as error:
        raise DemoFailed(f"{url}: status {error.code}: {error.read()[:300]!r}") from error
    except OSError as error:
        raise DemoFailed(f"{url}: {error}") from error
    meta = said["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        url=url,
        prompt=prompt,
        output=array("I", said["output_ids"]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        device=details.get("device", 0),
        host=details.get("host", 0),
        storage=details.get("storage", 0),
        seconds=time.monotonic() - started,
    )
