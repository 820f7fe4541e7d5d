"""`hicache launch-server` as people start it: flags, refusals, readiness, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hicache.cli.launch_server import launch_server
from hicache.cli.main import main
from hicache.config.server import ServerConfig
from hicache.engine import reference

READY_S = 60.0
SMALL = ("--page-size", "16", "--max-total-tokens", "2048", "--chunked-prefill-size", "256")
L2 = ("--enable-hierarchical-cache",)
PROMPT = [(7 * i) % 512 for i in range(400)]


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command in this process; it must end with exit code 2 before a model is built."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was built before the flags were checked")

    monkeypatch.setattr(reference, "ReferenceModel", never)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["hicache", "launch-server", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*L2, "--hicache-ratio", "1.0"], "--hicache-ratio 1.0 must be greater than 1"),
        (["--page-size", "48"], "--page-size 48 does not divide --chunked-prefill-size 2048"),
        (["--page-size", "0"], "--page-size 0 must be at least 1"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size 0 must be at least 1"),
        (["--mamba-track-interval", "0"], "--mamba-track-interval 0 must be at least 1"),
        (["--sliding-window", "0"], "--sliding-window 0 must be at least 1"),
        (["--hidden-size", "-4"], "--hidden-size -4 must be at least 1"),
        (["--layers", "SM"], "--layers SM: the model needs at least one FULL layer"),
        ([*L2, "--hicache-write-policy", "write_never"], "'write_never' is not one of"),
        (["--radix-eviction-policy", "best"], "lru"),
        (["--radix-eviction-policy", "slru", "--radix-eviction-policy-config", '{"no": 1}'], "no"),
        ([*L2, "--hicache-storage-backend", "tape"], "tape: no such backend; there are memory, file"),
        (["--hicache-storage-backend", "file"], "file needs --enable-hierarchical-cache"),
        (
            [*L2, "--hicache-storage-backend", "memory", "--hicache-storage-backend-extra-config", "{"],
            "--hicache-storage-backend-extra-config {: ",
        ),
        (
            [
                *L2,
                "--hicache-storage-backend",
                "memory",
                "--hicache-storage-backend-extra-config",
                "@/nowhere",
            ],
            "@/nowhere",
        ),
        (
            [
                *(*L2, "--hicache-storage-backend", "memory"),
                *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": "many"}'),
            ],
            "prefetch_threshold 'many': Expected `int`, got `str`",
        ),
        (["--layers", "FXS"], "one letter per layer"),
        (["--model-preset", "gpt"], "there are full, full-swa, full-mamba, hybrid"),
        (["--model-preset", "compressed", "--layers", "FS"], "--layers FS: the preset's compression is of 5"),
        (
            [
                *("--model-preset", "compressed", "--page-size", "24"),
                *("--chunked-prefill-size", "240", "--mamba-track-interval", "240"),
            ],
            "--page-size 24: pool full_c32: 32 tokens a row",
        ),
        (["--swa-full-tokens-ratio", "2"], "--swa-full-tokens-ratio 2.0 must be in (0, 1]"),
        (["--max-total-tokens", "10"], "less than one page"),
        (["--max-total-tokens", "256"], "raise --max-total-tokens"),
        (["--vocab-size", "100"], "--vocab-size 100 must be at least 256"),
        (["--port", "70000"], "--port 70000 must be within 0..65535"),
        (["--device", "cuda"], "--device cuda: torch "),
        (["--device", "cuda:1"], "sees no CUDA device; use --device cpu, or install a torch built for CUDA"),
        (["--host", "no.such.host.invalid"], "cannot listen on --host no.such.host.invalid"),
        (["--hicache-size", "lots"], "'lots' is not a valid float"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_built(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An operator would read a stack trace, or find out in production."""
    said = refused(arguments, monkeypatch, capsys)
    assert message in said
    assert "Traceback" not in said


def test_an_unknown_option_of_a_backend_lists_what_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt option would silently do nothing."""
    arguments = [*L2, *SMALL, "--hicache-storage-backend", "memory"]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("hicache", "launch-server", "--port", "0", *arguments),
            *("--hicache-storage-backend-extra-config", '{"capacity": 1}'),
        ],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "has no option 'capacity'; valid are capacity_bytes" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most common mistake would look like a crash."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(["--port", port], monkeypatch, capsys)
    assert f"cannot listen on --host 127.0.0.1 --port {port}: Address already in use" in said
    assert len(said.strip().splitlines()) == 1


class Process:
    """A started server."""

    def __init__(self, arguments: tuple[str, ...], folder: Path) -> None:
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("hicache")), "launch-server", "--port", "0"),
                *("--ready-file", str(ready), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert self._process.poll() is None, self._process.communicate()[0]
            assert time.monotonic() < deadline, "the server is not ready"
            time.sleep(0.02)
        self.url = ready.read_text().strip()

    def end(self, how: signal.Signals) -> tuple[int, str]:
        """Send a signal; return the exit code and everything the process wrote."""
        self._process.send_signal(how)
        output, _ = self._process.communicate(timeout=READY_S)
        return self._process.returncode, output

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


def ask(process: Process) -> dict[str, object]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
    reply = httpx.post(f"{process.url}/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_sigterm_writes_back_what_only_memory_holds(tmp_path: Path, processes: list[Process]) -> None:
    """With write_back, a restart would lose every page that had not been evicted yet."""
    store = ("--hicache-storage-backend", "file", "--file-storage-path", str(tmp_path / "store"))
    arguments = (*SMALL, *L2, *store, "--hicache-write-policy", "write_back")
    processes.append(Process(arguments, tmp_path))
    first = ask(processes[0])
    code, said = processes[0].end(signal.SIGTERM)
    assert code == 0, said
    assert f"ready on {processes[0].url}" in said
    assert "stopped; every dirty page is written down" in said

    settings = tmp_path / "extra.toml"
    settings.write_text("prefetch_timeout_base = 20.0\n")
    extra = ("--hicache-storage-backend-extra-config", f"@{settings}")
    processes.append(Process((*arguments, *extra), tmp_path))
    second = ask(processes[1])
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens_details"]["storage"] == 384
    code, said = processes[1].end(signal.SIGINT)
    assert code == 0, said
    assert "Traceback" not in said


def test_requests_that_the_drain_has_no_time_for_are_told_and_counted(
    tmp_path: Path, processes: list[Process]
) -> None:
    """Clients would get a bare 500 and the log pages of tracebacks; nobody would know how many were cut."""
    arguments = (*SMALL, "--max-total-tokens", "65536", "--context-length", "16384", "--enable-metrics")
    processes.append(Process((*arguments, "--drain-seconds", "0.5"), tmp_path))
    url = httpx.URL(processes[0].url)
    long = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 15000}}
    with (
        ThreadPoolExecutor(3) as pool,
        socket.create_connection((url.host, url.port), timeout=READY_S) as slow,
        httpx.stream("POST", f"{url}/generate", json={**long, "stream": True}, timeout=READY_S) as stream,
    ):
        slow.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
        plain = [pool.submit(httpx.post, f"{url}/generate", json=long, timeout=READY_S) for _ in range(2)]
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        until(lambda: "sglang:num_running_reqs 3.0" in httpx.get(f"{url}/metrics").text)
        code, said = processes[0].end(signal.SIGTERM)
        *_, last, done = lines
        answers = [
            (reply.status_code, reply.json()["error"]["message"]) for reply in (p.result() for p in plain)
        ]
        raw = b"".join(iter(lambda: slow.recv(4096), b""))
    assert code == 0, said
    why = "cut off: the server is shutting down, and --drain-seconds 0.5 are over; send the request again"
    assert answers == [(503, why)] * 2
    assert raw.startswith(b"HTTP/1.1 503 ")
    assert raw.endswith(json.dumps({"error": {"message": why}}, separators=(",", ":")).encode())
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "data: [DONE]"
    ending = said[said.index(f"ready on {url}") :].splitlines()[1:]
    assert len(ending) == 2, said
    assert ending[0].endswith("4 requests are cut off: --drain-seconds 0.5 are over")
    assert ending[1] == "stopped; 4 requests were cut off"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """A knob would exist that nobody can find."""
    with pytest.raises(SystemExit):
        launch_server.main(["--help"])
    said = capsys.readouterr().out
    for name in set(ServerConfig.__struct_fields__) - {"cache"}:  # a section of --config
        assert f"  --{name.replace('_', '-')}" in said, name
