"""Sessions over HTTP, with SGLang's routes and fields: opened, used, closed, refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hicache.testing.served import Served, running_server

RNG = random.Random(3)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running_server(enable_metrics=True, model_preset="full", max_total_tokens=1024) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60.0) as client:
        yield client


def prompt() -> list[int]:
    return RNG.choices(range(256), k=200)


def cached(client: httpx.Client, ids: list[int], **fields: Any) -> int:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, **fields}
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["meta_info"]["cached_tokens"])


def flood(client: httpx.Client) -> None:
    for _ in range(8):
        cached(client, prompt())


def test_a_session_keeps_its_pages_until_it_is_closed(client: httpx.Client) -> None:
    """An agent's context would be gone whenever somebody else is busy, or stay when nobody needs it."""
    ids = prompt()
    cached(client, ids, session_id="agent")
    flood(client)
    assert cached(client, ids, session_id="agent") == 192
    assert client.post("/close_session", json={"session_id": "agent"}).json() == {
        "session_id": "agent",
        "closed": True,
    }
    flood(client)
    assert cached(client, ids) == 0


def test_open_session_answers_an_id_as_sglang_does(client: httpx.Client) -> None:
    """Clients written for SGLang would not get past their first call."""
    body = {"capacity_of_str_len": 1000, "timeout": 3.5}
    made = client.post("/open_session", json=body)
    assert made.status_code == 200
    assert isinstance(made.json(), str)
    named = client.post("/open_session", json=body | {"session_id": "named"})
    assert named.json() == "named"
    again = client.post("/open_session", json=body | {"session_id": "named"})
    assert again.status_code == 400
    assert "is open already" in again.json()["error"]["message"]
    for _ in range(2):
        assert client.post("/close_session", json={"session_id": "named"}).status_code == 200


def test_a_batch_may_name_a_session_for_each_prompt(client: httpx.Client) -> None:
    """Conversations that are sent together would be one."""
    before = opened(client)
    body = {
        "input_ids": [prompt(), prompt(), prompt()],
        "sampling_params": {"max_new_tokens": 1},
        "session_id": ["b1", None, "b2"],
    }
    assert client.post("/generate", json=body).status_code == 200
    assert opened(client) == before + 2


def opened(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith('hicache_sessions_total{event="opened"}')]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/generate", {"session_id": ""}, "session_id is empty"),
        ("/generate", {"session_id": "x" * 10_000_000}, "the most is 1024"),
        ("/generate", {"session_id": 7}, "session_id"),
        ("/close_session", {}, "name the session"),
        ("/close_session", {"session_id": ""}, "is empty"),
        ("/close_session", {"session_id": "x" * 2000}, "2000 bytes"),
        ("/close_session", {"session_id": "s", "force": True}, "force: unknown"),
        ("/open_session", {"session_id": ["s"]}, "give a text"),
        ("/open_session", {"timeout": 0}, "timeout=0"),
        ("/open_session", {"timeout": "soon"}, "timeout='soon'"),
        ("/open_session", {"streaming": True}, "streaming sessions are not supported"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    client: httpx.Client, path: str, body: dict[str, Any], reason: str
) -> None:
    """A worker that dies of a strange id takes everybody's requests with it."""
    if path == "/generate":
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}} | body
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert reason in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("path", ["/generate", "/open_session", "/close_session"])
def test_a_body_nested_without_end_is_refused(client: httpx.Client, path: str) -> None:
    """A hundred kilobytes of brackets would be an error of the server, with a traceback in its log."""
    body = b'{"session_id": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    reply = client.post(path, content=body)
    assert reply.status_code == 400
    assert "the body is no JSON object" in reply.json()["error"]["message"]


@pytest.mark.parametrize("session", ["\0", "\u00e9\u4e2d\U0001f600", " ", "../../etc", "a" * 1024])
def test_any_other_text_is_a_session(client: httpx.Client, session: str) -> None:
    """Ids come from other people's databases."""
    cached(client, prompt(), session_id=session)
    closed = client.post("/close_session", json={"session_id": session})
    assert closed.json() == {"session_id": session, "closed": True}


def test_half_a_character_is_refused_or_a_session(client: httpx.Client) -> None:
    """JSON can carry a lone surrogate; it must not be what ends the server."""
    raw = json.dumps({"session_id": "\ud800"}).encode()
    reply = client.post("/close_session", content=raw)
    assert reply.status_code in (200, 400)
    assert client.get("/health").status_code == 200


def test_with_sessions_off_requests_are_served_and_control_says_so() -> None:
    """A flag that is off would look like sessions that do not work."""
    with (
        running_server(enable_session_radix_cache=False) as served,
        httpx.Client(base_url=served.url, timeout=60.0) as client,
    ):
        assert cached(client, prompt(), session_id="s") == 0
        reply = client.post("/close_session", json={"session_id": "s"})
        assert reply.status_code == 400
        assert "--enable-session-radix-cache" in reply.json()["error"]["message"]
