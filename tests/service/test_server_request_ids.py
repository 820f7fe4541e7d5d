"""Request ids over HTTP: one that is in use is refused, and whoever uses it is left alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import httpx
import pytest

from hicache.testing.served import running_server

PROMPT = random.Random(17).choices(range(256), k=200)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server() as served, httpx.Client(base_url=served.url, timeout=60.0) as client:
        yield client


def test_two_requests_with_one_id_are_refused(client: httpx.Client) -> None:
    """Two answers would be mixed up."""
    body = {"input_ids": PROMPT, "stream": True, "rid": "x", "sampling_params": {"max_new_tokens": 500}}
    with client.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        second = client.post("/generate", json={"input_ids": [1], "rid": "x"})
    assert second.status_code == 400
    assert "in use" in second.text


def test_a_refused_second_request_leaves_the_first_with_its_id_alone(client: httpx.Client) -> None:
    """A client's careless retry, alone or in a batch, would cut off the answer that is under way."""
    count = 500
    body = {"input_ids": PROMPT, "stream": True, "rid": "kept", "sampling_params": {"max_new_tokens": count}}
    with client.stream("POST", "/generate", json=body) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(lines)
        again = client.post("/generate", json={"input_ids": [1], "rid": "kept"})
        batch = client.post("/generate", json={"input_ids": [[1], [2]], "rid": ["y", "kept"]})
        *_, last, _ = lines
    assert (again.status_code, batch.status_code) == (400, 400), "the first must still run"
    answer = json.loads(last)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == count
    alone = client.post("/generate", json=body | {"stream": False}).json()
    assert answer["output_ids"] == alone["output_ids"]
