"""The command line as a whole: how it is started, and what it says about what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.overlap import overlap_command
from hicache.bench.overlap_run import Scenario, Timing
from hicache.cli.hit_rate import hit_rate
from hicache.cli.launch_server import launch_server
from hicache.cli.main import main
from hicache.cli.replay import replay
from hicache.errors import ConfigError

TRACES = Path(__file__).parents[3] / "traces"
MAKEFILE = Path(__file__).parents[4] / "Makefile"


def said_without(library: str, arguments: Sequence[str]) -> str:
    """Run a command where a library is not installed; return its one line."""
    program = (
        f"import sys; sys.modules[{library!r}] = None; sys.argv = ['hicache', *{list(arguments)!r}]\n"
        "from hicache.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_python_m_hicache_is_the_command() -> None:
    """Where scripts are not on the PATH, as in many containers, nobody could start it."""
    done = subprocess.run(
        [sys.executable, "-m", "hicache", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: hicache [OPTIONS] COMMAND")


@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [
        ("torch", ["launch-server", "--port", "0"], "torch"),
        ("uvicorn", ["launch-server", "--port", "0"], "torch"),
        ("redis", ["serve", "--store", "redis"], "redis"),
        ("aiohttp", ["bench", "multi-turn", "--url", "http://127.0.0.1:1"], "bench"),
        ("matplotlib", ["bench", "multi-turn", "--plot", "x.png"], "bench"),
    ],
)
def test_what_is_not_installed_is_one_line_with_the_remedy(
    library: str, arguments: list[str], extra: str
) -> None:
    """Whoever installed the base would read a stack trace about a module they never heard of."""
    line = said_without(library, arguments)
    assert line.startswith("hicache: ")
    assert library in line
    assert line.endswith(f"in the folder of HiCache: pip install -e '.[{extra}]'")


def test_mooncake_without_its_library_says_which_package_brings_it() -> None:
    """Its wheels come in two kinds, which no error of the import names."""
    config = '{"master_server_address": "127.0.0.1:1", "protocol": "tcp"}'
    line = said_without("mooncake", ["serve", "--store", "mooncake", "--store-config", config])
    assert "pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)" in line


def test_help_of_make_is_plain_where_nobody_looks_at_a_terminal() -> None:
    """A pager or a log would show escape codes."""
    done = subprocess.run(
        ["make", "-s", "-f", str(MAKEFILE), "help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=MAKEFILE.parent,
    )
    assert "  test " in done.stdout
    assert "\x1b" not in done.stdout
    assert "033" not in done.stdout


def test_the_title_of_a_replay_is_one_line(tmp_path: Path) -> None:
    """It is wider than its table, and was folded to the table's width."""
    arguments = [str(TRACES / "conversation.jsonl"), "--l1-tokens", "200000"]
    done = CliRunner().invoke(replay, arguments, catch_exceptions=False)
    assert "conversation.jsonl: 60 requests, " in done.output
    assert " input tokens\n" in done.output


def test_a_ratio_is_named_as_it_was_typed() -> None:
    """`--ratio (0.0,)` is what Python has, not what anybody typed."""
    with pytest.raises(ConfigError, match=r"--ratio 0 must be above 0"):
        CliRunner().invoke(
            overlap_command, ["--ratio", "1", "--ratio", "0"], catch_exceptions=False, standalone_mode=False
        )


def test_a_share_that_cannot_be_told_says_why() -> None:
    """A dash in a table of results looks like a bug."""
    quick = Scenario(
        load_over_compute=None,
        load_s=1e-3,
        load_bytes_per_s=1.0,
        no_load=Timing(1.0, 1.0),
        load_then_compute=Timing(3.0, 3.0),
        layer_wise=Timing(2.3, 2.4),
        beside_load=Timing(1.0, 1.0),
        bound_s=2.125,
        bound_then_compute_s=3.0,
        layers=8,
    )
    assert quick.hidden_share is None
    assert quick.as_json()["no_share_because"] == (
        "0.88 ms could be hidden; under 3 ms a share cannot be told from noise"
    )


def test_json_of_a_watched_server_counts_samples_and_not_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One sample of counters is any number of requests: a report would say "requests": 1."""
    from hicache.bench import scrape

    pages = iter([scrape.Counters(0, 0), scrape.Counters(50, 100)])
    monkeypatch.setattr(scrape, "fetch", lambda url: next(pages))
    out = tmp_path / "out.json"
    arguments = ["--url", "http://x", "--interval", "0.01", "--duration", "0.01", "--json", str(out)]
    done = CliRunner().invoke(hit_rate, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert '"intervals"' in text
    assert '"samples": 1' in text
    assert "requests" not in text


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["plan", "islands"], "--json"),
        (["plan", "pools", "--model-preset", "hybrid"], "--json"),
        (["bench", "multi-turn"], "--json"),
        (["bench", "multi-turn"], "--plot"),
        (["bench", "islands"], "--json"),
        (["bench", "overlap"], "--json"),
        (["replay", str(TRACES / "conversation.jsonl")], "--json"),
        (["hit-rate", "--url", "http://127.0.0.1:1"], "--json"),
        (["verify", "--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2"], "--json"),
        (["launch-server", "--port", "0"], "--ready-file"),
        (["serve", "--port", "0"], "--ready-file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    arguments: list[str],
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run of minutes would end in a stack trace, and `verify` with the code for "a token differs"."""
    path = tmp_path / "none" / "x"
    monkeypatch.setattr(sys, "argv", ["hicache", *arguments, flag, str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"hicache: {flag} {path}: No such file or directory\n")


def test_help_of_launch_server_names_each_default_once() -> None:
    """A flag with two defaults, `enabled` and `True`, looks like two settings."""
    text = " ".join(CliRunner().invoke(launch_server, ["--help"], catch_exceptions=False).output.split())
    assert "last. [default: enabled] --session-timeout" in text
    assert "[default: True]" not in text
