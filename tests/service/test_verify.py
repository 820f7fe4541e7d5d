"""`hicache verify` between real servers, and between one and a double that spoils or hides hits."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hicache.cli.main import main

READY_S = 90.0
HICACHE = str(Path(sys.executable).with_name("hicache"))
SMALL = (
    *("--page-size", "16", "--max-total-tokens", "1024", "--chunked-prefill-size", "128"),
    *("--context-length", "512", "--sliding-window", "32"),
)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Three processes: with all tiers, with L1 alone, and with other weights."""
    folder = tmp_path_factory.mktemp("verify")
    tiers = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
    extra = '{"prefetch_threshold": 16, "prefetch_timeout_base": 20.0}'
    store = ("--file-storage-path", str(folder / "store"), "--hicache-storage-backend-extra-config", extra)
    commands = {
        "tiered": (*SMALL, *tiers, *store),
        "plain": SMALL,
        "other": (*SMALL, "--seed", "1"),
    }
    started = {}
    for name, arguments in commands.items():
        ready = folder / f"{name}.url"
        log = (folder / f"{name}.log").open("w")
        with log:
            started[name] = subprocess.Popen(
                [HICACHE, "launch-server", "--port", "0", "--ready-file", str(ready), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    try:
        found = {}
        deadline = time.monotonic() + READY_S
        for name, process in started.items():
            ready = folder / f"{name}.url"
            while not ready.exists():
                assert process.poll() is None, (folder / f"{name}.log").read_text()
                assert time.monotonic() < deadline, f"{name} is not ready"
                time.sleep(0.02)
            found[name] = ready.read_text().strip()
        yield found
    finally:
        for process in started.values():
            process.kill()
            process.wait()


Change = Callable[[dict[str, Any], dict[str, Any]], None]  # of a reply's body, given the request's


@contextlib.contextmanager
def double(
    url: str, change: Change = lambda *_: None, *, keys: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server in front of another one that changes its answers to /generate; some paths need a key."""

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
            key = (keys or {}).get(self.path)
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self.send_error(401)
                return
            request = urllib.request.Request(url + self.path, data=body, method=self.command)
            with urllib.request.urlopen(request, timeout=60) as reply:
                answer = reply.read()
            if self.path == "/generate":
                fields = json.loads(answer)
                change(fields, json.loads(body or b"{}"))
                answer = json.dumps(fields).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Ran:
    """How the command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def command(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hicache", "verify", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return command


FEW = ("--prompts", "3", "--output-length", "8")


def test_servers_that_differ_in_their_tiers_are_equal(
    urls: dict[str, str], run: Callable[..., Ran], tmp_path: Path
) -> None:
    """The promise of the cache: what a switch changes is the time, never the text."""
    report = tmp_path / "report.json"
    ran = run("--url", urls["tiered"], "--url", urls["plain"], *FEW, "--json", str(report))
    assert ran.code == 0, ran.out + ran.err
    assert "EQUAL: 9 answers, token by token" in ran.out
    found = json.loads(report.read_text())
    assert found["equal"]
    assert found["unproven_stages"] == []
    for one in found["comparisons"]:
        assert one["as_meant"]
        assert (min(one["cached_tokens"]) > 0) == (one["stage"] != "cold")


def test_hits_from_l3_are_compared_with_computing(urls: dict[str, str], run: Callable[..., Ran]) -> None:
    """After a restart all hits come from storage; only one of the two has one."""
    ran = run("--url", urls["tiered"], "--url", urls["plain"], *FEW, "--restored", "--hit-with-cold")
    assert ran.code == 3, ran.out + ran.err  # restored is no hit on the server without storage
    assert "restored: 3 of 3 equal" in ran.out
    assert "nothing is shown for restored" in ran.out


def test_servers_with_keys_are_asked_and_flushed_with_them(
    urls: dict[str, str], run: Callable[..., Ran]
) -> None:
    """Production servers have keys; a wrong one must not be tried for half a minute."""
    keys = {"/generate": "for all", "/get_model_info": "for all", "/flush_cache": "for admins"}
    with double(urls["tiered"], keys=keys) as a, double(urls["plain"], keys=keys) as b:
        pair = ("--url", a, "--url", b, "--prompts", "1", "--restored")
        none = run(*pair)
        assert (none.code, f"{a}/get_model_info: status 401" in none.err) == (2, True)
        assert "give the server's key with --api-key\n" in none.err
        one = run(*pair, "--api-key", "for all")
        assert (one.code, f"{a}/flush_cache: status 401" in one.err) == (2, True)
        assert "with --api-key, or with --admin-api-key where it has one" in one.err
        both = run(*pair, "--api-key", "for all", "--admin-api-key", "for admins")
    assert both.code == 3, both.err  # one of them has no storage
    assert "restored: " in both.out


def test_other_weights_are_found_at_the_first_token(urls: dict[str, str], run: Callable[..., Ran]) -> None:
    """The report must lead to one request that can be repeated."""
    pair = ("--url", urls["plain"], "--url", urls["other"])
    refused = run(*pair, *FEW)
    assert refused.code == 2
    assert "the servers have different models" in refused.err
    assert "--other-models" in refused.err
    ran = run(*pair, *FEW, "--other-models", "--json", "-")
    assert ran.code == 1
    first = json.loads(ran.out)["first_difference"]
    a, b = first["tokens"]
    assert (first["prompt"], first["stage"]) == (0, "cold")
    assert a != b
    line = next(line for line in ran.err.splitlines() if line.startswith("DIFFERENT"))
    assert f"output token {first['position']}: {urls['plain']} has {a}, {urls['other']} has {b}" in line


def test_a_spoiled_hit_is_named_with_prompt_position_and_both_tokens(
    urls: dict[str, str], run: Callable[..., Ran]
) -> None:
    """A fault that shows only in hits on long prompts must not hide behind equal cold answers."""

    def spoil(reply: dict[str, Any], request: dict[str, Any]) -> None:
        if reply["meta_info"]["cached_tokens"] and len(request["input_ids"]) > 150:
            reply["output_ids"][5] += 1

    with double(urls["plain"], spoil) as spoiled:
        ran = run("--url", urls["tiered"], "--url", spoiled, *FEW)
    assert ran.code == 1
    assert "cold: 3 of 3 equal" in ran.out
    assert "hit: 2 of 3 equal" in ran.out
    line = next(line for line in ran.out.splitlines() if line.startswith("DIFFERENT"))
    assert line.startswith("DIFFERENT at prompt 2 (201 tokens, hit), output token 5: ")
    assert f"{spoiled}: 1 hits differ from its own cold answer" in ran.out


def test_a_hit_that_was_none_shows_nothing_and_says_so(urls: dict[str, str], run: Callable[..., Ran]) -> None:
    """A server whose cache is off would pass every comparison."""

    def hide(reply: dict[str, Any], request: dict[str, Any]) -> None:
        reply["meta_info"]["cached_tokens"] = 0
        reply["output_ids"][0] += 1  # a hit compared with cold would be no fault of the cache

    with double(urls["plain"], hide) as hiding, double(urls["tiered"], hide) as other:
        ran = run("--url", urls["plain"], "--url", hiding, *FEW, "--lengths", "200")
        assert ran.code == 1  # cold answers are compared, and differ
        assert "hit: 0 of 0 equal; cached tokens" in ran.out
        assert "not a hit: prompt 0 (192 and 0), 1 (192 and 0)" in ran.out
        both = run("--url", other, "--url", hiding, *FEW)
    assert both.code == 3
    assert "nothing is shown for hit, extended: no pair was what it was meant to be" in both.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--url is given 0 times"),
        (["--url", "http://127.0.0.1:1"], "--url is given once; give it for each of two servers"),
        (["--url", "127.0.0.1:1", "--url", "http://127.0.0.1:1"], "begin it with http://"),
        (["--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1/"], "is given twice"),
        (["--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2"], "is the server up?"),
        (
            ["--url", "http://a", "--url", "http://b", "--lengths", "1,x"],
            "--lengths '1,x': write numbers, separated by commas, as in",
        ),
        (["--url", "http://a", "--url", "http://b", "--lengths", "0"], "every length must be at least 1"),
        (["--url", "http://a", "--url", "http://b", "--prompts", "0"], "--prompts 0 must be at least 1"),
        (
            ["--url", "http://a", "--url", "http://b", "--vocab-size", "1"],
            "--vocab-size 1 must be at least 2",
        ),
        (["--url", "http://a", "--url", "http://b", "--timeout", "0"], "--timeout 0 must be above 0"),
        (["--json", "/nonexistent/x"], "--json /nonexistent/x: No such file or directory"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: list[str], message: str, run: Callable[..., Ran]
) -> None:
    """A script must tell "different" (1) from "not asked" (2)."""
    ran = run(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_the_same_server_twice_is_refused(urls: dict[str, str], run: Callable[..., Ran]) -> None:
    """It would agree with itself."""
    ran = run("--url", urls["plain"], "--url", urls["plain"] + "/")
    assert (ran.code, "is given twice" in ran.err) == (2, True)


def test_a_prompt_that_the_server_refuses_names_its_reason(
    urls: dict[str, str], run: Callable[..., Ran]
) -> None:
    """Lengths beyond the context are the commonest mistake."""
    ran = run("--url", urls["plain"], "--url", urls["tiered"], "--lengths", "600")
    assert ran.code == 2
    assert "/generate: status 400: " in ran.err
    assert "context" in ran.err
