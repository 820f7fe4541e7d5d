"""Driving a server over HTTP: a stand-in that speaks SGLang's streaming replies and remembers prefixes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hicache.bench.http import HttpOptions, ServerError, run_http
from hicache.bench.report import ByTier, TurnResult
from hicache.bench.workloads import Workload

WORKLOAD = Workload(
    name="small", num_clients=3, num_rounds=3, request_length=8, output_length=3, request_rate=float("inf")
)


class Server(ThreadingHTTPServer):
    """Answers /generate token by token; what it has seen, it reports as cached, token by token."""

    daemon_threads = True

    def __init__(self, *, cumulative: bool = False, tell_ids: bool = True, busy: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cumulative, self.tell_ids, self.busy = cumulative, tell_ids, busy
        self.seen: set[tuple[int, ...]] = set()
        self.flushes = 0
        self.fail_with = 0
        self.keys = {"/flush_cache": "", "/generate": ""}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def cached(self, prompt: list[int]) -> int:
        with self.lock:
            count = 0
            while count < len(prompt) and tuple(prompt[: count + 1]) in self.seen:
                count += 1
            return min(count, len(prompt) - 1)

    def remember(self, tokens: list[int]) -> None:
        with self.lock:
            self.seen.update(tuple(tokens[: n + 1]) for n in range(len(tokens)))


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.server.keys[self.path]
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._reply(401, b"Unauthorized")
        elif self.path == "/flush_cache":
            self.server.busy -= 1
            self.server.flushes += 1
            self.server.seen.clear()
            self._reply(400 if self.server.busy >= 0 else 200, b"busy")
        elif self.server.fail_with:
            self._reply(self.server.fail_with, b"token id 999 is not below 256")
        else:
            self._generate(json.loads(body))

    def _reply(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _generate(self, body: dict[str, object]) -> None:
        prompt = body["input_ids"]
        assert isinstance(prompt, list)
        sampling = body["sampling_params"]
        assert isinstance(sampling, dict)
        cached = self.server.cached(prompt)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        said: list[int] = []
        for n in range(int(sampling["max_new_tokens"])):
            said.append(1000 + sum(prompt) % 97 + n)
            meta = {
                "prompt_tokens": len(prompt),
                "cached_tokens": cached,
                "completion_tokens": len(said),
                "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            }
            chunk: dict[str, object] = {"text": "x" * len(said), "meta_info": meta}
            if self.server.tell_ids:
                chunk["output_ids"] = said if self.server.cumulative else said[-1:]
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.server.remember(prompt + said)


def serve(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture(params=[False, True], ids=["incremental", "cumulative"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from serve(Server(cumulative=request.param, busy=1))


@pytest.fixture
def silent_server() -> Iterator[Server]:
    yield from serve(Server(tell_ids=False))


def test_a_server_that_forgets_nothing_reaches_the_ceiling(server: Server) -> None:
    """The replies' tokens must join the conversation exactly, or a healthy server looks bad."""
    server.remember([1, 2, 3])
    results: list[TurnResult] = []
    report = run_http(WORKLOAD, HttpOptions(server.url), results.append)
    assert server.flushes == 2  # refused once while busy, then done
    assert [r.hit_rate for r in report.rounds] == [r.ceiling for r in report.rounds]
    assert [r.hit_rate for r in report.rounds] == [WORKLOAD.ceiling(n) for n in range(3)]
    assert report.rounds[0].by_tier == ByTier(0, 0, 0)  # a miss names no tiers
    assert report.rounds[2].by_tier is not None
    assert report.rounds[2].by_tier.device == report.rounds[2].cached_tokens
    assert len(results) == WORKLOAD.num_requests
    assert all(0 < r.ttft_s <= r.latency_s for r in results)
    assert report.effective_input_tokens_per_s == pytest.approx(WORKLOAD.prompt_tokens / report.duration_s)


def test_replies_without_token_ids_are_stood_in_for_and_counted(silent_server: Server) -> None:
    """The run still measures the prompts' part of the cache, and says that replies could not hit."""
    report = run_http(WORKLOAD, HttpOptions(silent_server.url), lambda result: None)
    assert report.details["replies_without_output_ids"] == WORKLOAD.num_requests
    last = report.rounds[2]
    assert 0 < last.hit_rate < last.ceiling


def test_a_refused_request_ends_the_run_with_the_servers_words(silent_server: Server) -> None:
    """A wrong vocabulary must not look like a slow server."""
    silent_server.fail_with = 400
    with pytest.raises(ServerError, match="status 400: token id 999 is not below 256"):
        run_http(WORKLOAD, HttpOptions(silent_server.url), lambda result: None)


def test_an_unreachable_server_is_one_line() -> None:
    """Not a traceback of the HTTP library."""
    server = Server()
    url = server.url
    server.server_close()
    with pytest.raises(ServerError, match=url):
        run_http(WORKLOAD, HttpOptions(url), lambda result: None)


def test_a_server_that_stays_busy_is_reported() -> None:
    """Measuring a cache that could not be emptied would flatter it."""
    for server in serve(Server(busy=1000)):
        with pytest.raises(ServerError, match="flush_cache: status 400: busy"):
            run_http(WORKLOAD, HttpOptions(server.url, flush_timeout_s=0.1), lambda result: None)


def test_a_server_with_keys_is_driven_with_them(server: Server) -> None:
    """Production servers have keys: without them neither the flush nor a request gets through."""
    server.keys = {"/flush_cache": "for admins", "/generate": "for all"}
    with pytest.raises(ServerError, match="status 401: give the server's key with --api-key"):
        run_http(WORKLOAD, HttpOptions(server.url), lambda _: None)
    options = HttpOptions(server.url, api_key="for all", admin_api_key="for admins")
    assert "for a" not in repr(options)
    assert run_http(WORKLOAD, options, lambda _: None).rounds[1].cached_tokens > 0
    server.keys["/flush_cache"] = "for all"
    assert (
        run_http(WORKLOAD, HttpOptions(server.url, api_key="for all"), lambda _: None).rounds[1].cached_tokens
    )
