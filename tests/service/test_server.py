"""The reference server over real HTTP: replies, streams, accounting, control, and refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hicache.daemon.server import Daemon
from hicache.errors import BackendUnavailable
from hicache.registry import create_backend
from hicache.server import storage
from hicache.storage_backends.base import StorageBackend
from hicache.testing.daemon import running_daemon
from hicache.testing.faults import Fault, FaultyBackend, always
from hicache.testing.served import Served, running_server
from hicache.testing.services import free_port

RNG = random.Random(17)
PROMPT = [RNG.randrange(512) for _ in range(200)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running_server(enable_hierarchical_cache=True, enable_metrics=True) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60.0) as client:
        eventually(lambda: client.post("/flush_cache").status_code == 200)
        yield client


def eventually(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def ask(client: httpx.Client, ids: list[int], count: int = 8, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": count, "temperature": 0} | fields.pop("sampling_params", {})
    reply = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def counters(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def events(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line)


def test_a_reply_has_the_shape_that_sglang_clients_read(client: httpx.Client) -> None:
    """Existing clients and benchmarks would not work."""
    reply = ask(client, PROMPT, rid="mine")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 8
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (200, 8)
    assert meta["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
    assert meta["e2e_latency"] > 0


def test_the_second_turn_is_cached_and_says_where(client: httpx.Client) -> None:
    """The reason to run this at all: a conversation must not be computed twice."""
    first = ask(client, PROMPT)
    longer = [*PROMPT, *first["output_ids"], *RNG.choices(range(512), k=40)]
    meta = ask(client, longer)["meta_info"]
    assert meta["cached_tokens"] == 192
    assert meta["cached_tokens_details"] == {"device": 192, "host": 0, "storage": 0}


def test_text_batch_and_stream_say_the_same_as_one_plain_request(client: httpx.Client) -> None:
    """The way a question is put would change its answer."""
    text = "The quick brown fox jumps over the lazy dog, twice."
    plain = ask(client, list(text.encode()))
    body = {"text": text, "sampling_params": {"max_new_tokens": 8}}
    assert client.post("/generate", json=body).json()["output_ids"] == plain["output_ids"]
    both = client.post("/generate", json=body | {"text": [text, "x"]}).json()
    assert both[0]["text"] == plain["text"]
    assert len(both) == 2
    with client.stream("POST", "/generate", json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(reply.iter_lines())
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[-1]["output_ids"] == plain["output_ids"]
    assert parsed[-1]["meta_info"]["finish_reason"]["type"] == "length"
    lengths = [chunk["meta_info"]["completion_tokens"] for chunk in parsed]
    assert lengths == sorted(set(lengths))


def test_a_streamed_batch_names_the_prompt_of_each_event(client: httpx.Client) -> None:
    """A reader could not tell the answers apart."""
    body = {"input_ids": [[1, 2], [3]], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    with client.stream("POST", "/generate", json=body) as reply:
        *chunks, _ = events(reply.iter_lines())
    last = {(e := json.loads(chunk))["index"]: e["output_ids"] for chunk in chunks}
    assert last == {i: ask(client, ids, 3)["output_ids"] for i, ids in enumerate(body["input_ids"])}


def test_a_stop_token_ends_the_answer(client: httpx.Client) -> None:
    """Answers would run on to their longest."""
    whole = ask(client, PROMPT, 8)["output_ids"]
    stop = whole[3]
    meta = ask(client, PROMPT, 8, sampling_params={"stop_token_ids": [stop, 511]})["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert meta["completion_tokens"] == whole.index(stop) + 1


def test_concurrent_requests_answer_like_single_ones(client: httpx.Client) -> None:
    """Load would change what users are told."""
    prompts = [PROMPT[: 40 + 20 * i] + [i] * 10 for i in range(6)]
    alone = [ask(client, p)["output_ids"] for p in prompts]
    client.post("/flush_cache")
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda p: ask(client, p)["output_ids"], prompts))
    assert together == alone


def test_scopes_do_not_share_cached_tokens(client: httpx.Client) -> None:
    """A tenant could find out what another one asked."""
    ask(client, PROMPT, cache_salt="a")
    assert ask(client, PROMPT, cache_salt="b")["meta_info"]["cached_tokens"] == 0
    assert ask(client, PROMPT, cache_salt="a")["meta_info"]["cached_tokens"] > 0


def test_a_busy_cache_is_not_flushed_and_a_client_that_leaves_frees_it(client: httpx.Client) -> None:
    """A flush would pull pages from under a request; a closed browser tab would compute for ever."""
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 800}}
    with client.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        refused = client.post("/flush_cache")
        assert refused.status_code == 400
        assert "running" in refused.text
    eventually(lambda: client.post("/flush_cache").status_code == 200, within_s=0.5)


def test_a_client_that_leaves_without_a_stream_is_noticed(client: httpx.Client) -> None:
    """Time-outs of a client would leave its work running."""
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            "/generate",
            json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 800}},
            timeout=0.1,
        )
    eventually(lambda: client.post("/flush_cache").status_code == 200, within_s=0.5)


def test_an_aborted_request_says_so(client: httpx.Client) -> None:
    """An operator could not end a runaway request."""
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "rid": "long",
        "sampling_params": {"max_new_tokens": 800},
    }
    with client.stream("POST", "/generate", json=body) as reply:
        lines = events(reply.iter_lines())
        next(lines)
        assert client.post("/abort_request", json={"rid": "long"}).json() == {"rid": "long", "aborted": True}
        *_, last, _ = lines
    assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.post("/abort_request", json={"rid": "long"}).json()["aborted"] is False


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, "2"]}, "Expected `int`, got `str`"),
        ({"input_ids": [600]}, "outside of the vocabulary"),
        ({"input_ids": [1] * 2000}, "2000 tokens; .* context of 1024"),
        ({"input_ids": [1], "sampling_params": {"temperature": 1}}, "temperature"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    client: httpx.Client, body: dict[str, Any], message: str
) -> None:
    """A user would get a stack trace, or hang."""
    reply = client.post("/generate", json=body)
    assert reply.status_code == 400
    assert re.search(message, reply.json()["error"]["message"])


def test_health_and_info(client: httpx.Client) -> None:
    """Probes and dashboards would find nobody home."""
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    info = client.get("/get_model_info").json()
    assert info["is_generation"] is True
    assert info["weight_version"] == "0"
    settings = client.get("/get_server_info").json()
    assert settings["page_size"] == 16
    assert settings["hicache_write_policy"] == "write_through"
    assert f":{settings['port']}" in str(client.base_url)


def test_metrics_add_up(client: httpx.Client) -> None:
    """The hit rate on a dashboard would not be that of the requests."""
    before = counters(client)
    replies = [ask(client, PROMPT)["meta_info"] for _ in range(3)]
    after = counters(client)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("sglang:prompt_tokens_total") == 600
    cached = sum(m["cached_tokens"] for m in replies)
    assert cached == 384
    sources = ("device", "host", "storage")
    assert sum(grown(f'sglang:cached_tokens_total{{cache_source="{s}"}}') for s in sources) == cached
    assert grown('sglang:num_requests_total{outcome="length"}') == 3
    assert grown("sglang:generation_tokens_total") == 24
    assert 0 < after["sglang:token_usage"] < 1


def test_storage_is_attached_cleared_and_detached_while_serving(client: httpx.Client) -> None:
    """L3 could only be changed by a restart, which empties L1 and L2."""
    path = "/hicache/storage-backend"
    assert client.get(path).json()["attached"] is False
    wrong = client.put(path, json={"hicache_storage_backend": "nosuch"})
    assert wrong.status_code == 400
    assert "memory" in wrong.text
    option = {"hicache_storage_backend_extra_config_json": json.dumps({"capacity": 1})}
    unknown = client.put(path, json={"hicache_storage_backend": "memory", **option})
    assert unknown.status_code == 400
    assert "capacity_bytes" in unknown.text

    assert client.put(path, json={"hicache_storage_backend": "memory"}).status_code == 200
    assert (
        client.get(path).json() | {"hicache_storage_backend": "memory", "usable": True}
        == client.get(path).json()
    )
    assert client.put(path, json={"hicache_storage_backend": "memory"}).status_code == 200
    other = client.put(path, json={"hicache_storage_backend": "file"})
    assert other.status_code == 400
    assert "detach it first" in other.text

    prompt = PROMPT + [5] * 200  # above the prefetch threshold
    cold = ask(client, prompt)
    eventually(lambda: 'hicache_transfer_total{sum="store_objects"}' in client.get("/metrics").text)
    assert client.post("/flush_cache").status_code == 200
    again = ask(client, prompt)
    assert again["output_ids"] == cold["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["storage"] > 256

    assert client.post(f"{path}/clear").json()["deleted"] > 0
    client.post("/flush_cache")
    assert ask(client, prompt)["meta_info"]["cached_tokens"] == 0
    assert client.delete(path).status_code == 200
    assert client.get(path).json()["attached"] is False
    assert client.post(f"{path}/clear").status_code == 400


def test_another_store_is_stocked_with_what_is_in_memory(client: httpx.Client) -> None:
    """After moving to a new store, nobody would find there what this server still holds."""
    path, body = "/hicache/storage-backend", {"hicache_storage_backend": "memory"}
    prompt = PROMPT + [6] * 200
    objects = 'hicache_transfer_total{sum="store_objects"}'
    client.put(path, json=body)
    cold = ask(client, prompt)
    eventually(lambda: counters(client).get(objects, 0) >= 25)
    client.delete(path)
    before = counters(client)[objects]
    client.put(path, json=body)
    eventually(lambda: counters(client)[objects] >= before + 25)
    assert client.post("/flush_cache").status_code == 200
    again = ask(client, prompt)
    assert again["output_ids"] == cold["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["storage"] == 384
    client.delete(path)


def stored(daemon: Daemon) -> int:
    return daemon._store.backend.stats().objects


def test_an_idle_server_offers_what_it_holds_to_a_store_that_is_attached_late() -> None:
    """Replicas would find nothing there until somebody happened to ask this server again."""
    with (
        running_daemon() as daemon,
        running_server(enable_hierarchical_cache=True) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        ask(client, PROMPT + [7] * 200)
        config = json.dumps({"address": daemon.address})
        body = {"hicache_storage_backend": "grpc", "hicache_storage_backend_extra_config_json": config}
        assert client.put("/hicache/storage-backend", json=body).status_code == 200
        eventually(lambda: stored(daemon) >= 25, within_s=30.0)


def test_an_idle_server_fills_a_daemon_that_has_started_anew() -> None:
    """After a restart of the daemon, replicas that nobody asks would keep to themselves what they hold."""
    port = free_port()
    flags = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "grpc",
        "hicache_storage_backend_extra_config": {"address": f"127.0.0.1:{port}"},
    }
    with contextlib.ExitStack() as first:
        daemon = first.enter_context(running_daemon(port=port))
        with running_server(**flags) as served:
            with httpx.Client(base_url=served.url, timeout=60) as client:
                ask(client, PROMPT + [8] * 200)
            eventually(lambda: stored(daemon) >= 25, within_s=30.0)
            first.close()
            with running_daemon(port=port) as anew:
                eventually(lambda: stored(anew) >= 25, within_s=60.0)


def test_without_l2_there_is_no_storage_to_attach() -> None:
    """An attach would be confirmed that can never work."""
    with running_server(model_preset="full") as served, httpx.Client(base_url=served.url) as client:
        refused = client.put("/hicache/storage-backend", json={"hicache_storage_backend": "memory"})
        assert refused.status_code == 400
        assert "--enable-hierarchical-cache" in refused.text
        assert client.get("/metrics").status_code == 404


def test_a_second_replica_finds_in_the_daemon_what_the_first_computed() -> None:
    """The last tier would be shared with nobody."""
    prompt = PROMPT + [9] * 200
    with running_daemon() as daemon:
        flags = {
            "enable_hierarchical_cache": True,
            "enable_metrics": True,
            "hicache_storage_backend": "grpc",
            "hicache_storage_backend_extra_config": {"address": daemon.address},
        }
        with running_server(**flags) as one, httpx.Client(base_url=one.url, timeout=60) as client:
            first = ask(client, prompt)
            eventually(lambda: "store_objects" in client.get("/metrics").text)
        with running_server(**flags) as two, httpx.Client(base_url=two.url, timeout=60) as client:
            second = ask(client, prompt)
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 384}


def test_a_daemon_that_is_not_there_yet_costs_nothing_and_is_found_later() -> None:
    """A replica could not start before the daemon, or would never use it."""
    prompt = PROMPT + [9] * 200
    port = free_port()
    flags = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "grpc",
        "hicache_storage_backend_extra_config": {"address": f"127.0.0.1:{port}", "timeout_s": 0.3},
    }
    with running_server(**flags) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        cold = ask(client, prompt)
        with running_daemon(port=port):
            eventually(lambda: storage_hit(client, prompt, cold["output_ids"]), within_s=20.0)


def test_a_store_that_cannot_be_opened_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that starts after the server would not be used until a restart."""
    opened = threading.Event()
    tries: list[str] = []

    def open_late(name: str, options: Mapping[str, object]) -> StorageBackend:
        tries.append(name)
        if len(tries) < 3:
            raise BackendUnavailable("connection refused")
        opened.set()
        return create_backend(name, options)

    monkeypatch.setattr(storage, "create_backend", open_late)
    with (
        running_server(enable_hierarchical_cache=True, hicache_storage_backend="memory") as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        ask(client, PROMPT)
        assert "cannot be reached, serving without L3" in caplog.text
        assert client.get("/hicache/storage-backend").json()["attached"] is False
        assert opened.wait(60)
        eventually(lambda: client.get("/hicache/storage-backend").json()["usable"])
    assert len(tries) == 3


def test_a_store_that_stays_away_is_told_of_once_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that is not there would fill the log with a line every few seconds, for days."""
    opened: list[FaultyBackend] = []

    def never_there(name: str, options: Mapping[str, object]) -> StorageBackend:
        opened.append(FaultyBackend(create_backend(name, options)))
        return opened[-1]

    monkeypatch.setattr(storage, "create_backend", never_there)
    monkeypatch.setattr(storage, "_RETRY_S", (0.001,))
    port = free_port()
    flags = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "grpc",
        "hicache_storage_backend_extra_config": {"address": f"127.0.0.1:{port}", "timeout_s": 5.0},
    }
    with caplog.at_level(logging.INFO), running_server(**flags) as served:
        eventually(lambda: opened[0].count("probe") >= 30, within_s=60.0)
        (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        with running_daemon(port=port), httpx.Client(base_url=served.url, timeout=60) as client:
            eventually(lambda: client.get("/hicache/storage-backend").json()["usable"], within_s=60.0)
    assert said.startswith("grpc cannot be reached, serving without L3 and trying again: ")
    assert [record.getMessage() for record in caplog.records].count("L3: grpc is attached") == 1
    assert len(opened) == 1


def test_a_store_that_fails_is_shown_as_unusable_until_it_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dashboard would be green while every request misses L3, or red for good after one failure."""
    made: list[FaultyBackend] = []

    def faulty(name: str, options: Mapping[str, object]) -> StorageBackend:
        made.append(FaultyBackend(create_backend(name, options)))
        return made[-1]

    monkeypatch.setattr(storage, "create_backend", faulty)
    flags = {"enable_hierarchical_cache": True, "enable_metrics": True, "hicache_storage_backend": "memory"}
    with running_server(**flags) as served, httpx.Client(base_url=served.url, timeout=60) as client:

        def usable() -> tuple[bool, float]:
            shown = client.get("/hicache/storage-backend").json()
            assert shown["attached"] is True
            return shown["usable"], counters(client)["hicache_storage_usable"]

        cold = ask(client, PROMPT)
        assert usable() == (True, 1.0)
        down = Fault(error=BackendUnavailable("down"))
        made[0].script = always(probe=down, read=down, begin_write=down)
        eventually(lambda: usable() == (False, 0.0), within_s=60.0)
        assert ask(client, PROMPT)["output_ids"] == cold["output_ids"]
        made[0].script = always()
        eventually(lambda: usable() == (True, 1.0), within_s=60.0)


def storage_hit(client: httpx.Client, prompt: list[int], expected: list[int]) -> bool:
    """Ask again on an empty L1 and L2; every answer must be right, whatever L3 does meanwhile."""
    client.post("/flush_cache")
    reply = ask(client, prompt)
    assert reply["output_ids"] == expected
    return bool(reply["meta_info"]["cached_tokens_details"]["storage"] > 0)


def test_a_prompt_in_flight_is_finished_when_the_server_is_stopped() -> None:
    """A rolling restart would cut answers off."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200}, "stream": True}
    with (
        running_server(model_preset="full", drain_seconds=20.0) as served,
        httpx.stream("POST", f"{served.url}/generate", json=body, timeout=60) as reply,
    ):
        lines = events(reply.iter_lines())
        next(lines)
        served.stop()
        *_, last, done = lines
    assert done == "[DONE]"
    assert json.loads(last)["meta_info"]["completion_tokens"] == 200
    assert served.report is not None
    assert not served.report.failed
