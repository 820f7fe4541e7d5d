"""The launch command of an SGLang replica, and the remarks on the flags beside it."""

from __future__ import annotations

import json
import logging
import shlex
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.cli.main import cli
from hicache.errors import ConfigError
from hicache.integrations.sglang import plugin, settings
from hicache.integrations.sglang.direct.settings import read_linker_settings
from hicache.integrations.sglang.launch import Replica, plan
from hicache.integrations.sglang.remarks import Effect
from hicache.integrations.sglang.shape import read_shape
from hicache.testing.daemon import running_daemon


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(cli, ["sglang-flags", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def config_json(folder: Path, **extra: object) -> Path:
    fields = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "torch_dtype": "bfloat16",
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_the_printed_command_is_one_that_a_shell_takes_apart_again() -> None:
    """The extra config is JSON inside a shell word; one quote wrong and SGLang does not start."""
    out, _ = run("org/model", "--weight-version", "it's 1", "--address", "10.0.0.1:7380", "--no-check")
    words = shlex.split(out.replace("\\\n", " "))
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "org/model"]
    extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert extra["weight_version"] == "it's 1"
    read = settings.read_settings(extra)
    assert read.backend_options == {"address": "10.0.0.1:7380"}


def test_flags_of_the_user_win_over_the_defaults() -> None:
    """A flag given twice would leave the choice to SGLang's parser."""
    replica = Replica(
        model="m",
        weight_version="1",
        options={},
        flags=["--page-size=32", "--hicache-size", "40", "--tp-size", "2", "--enable-metrics"],
    )
    command = plan(replica).command
    assert command.count("--page-size") == 1
    assert command[command.index("--page-size") + 1] == "32"
    assert "--hicache-ratio" not in command
    assert command[command.index("--tp-size") + 1] == "2"
    assert "--enable-metrics" in command


@pytest.mark.parametrize(
    ("flags", "effect", "said"),
    [
        ("--enable-unified-cache-external-linker", Effect.REFUSES, "choose one of them"),
        ("--disable-radix-cache", Effect.REFUSES, "nothing to cache"),
        ("--dcp-size 2", Effect.REFUSES, "--dcp-size 1"),
        ("--hicache-io-backend kernel", Effect.REWRITES, "makes --hicache-io-backend direct"),
        ("--hicache-mem-layout page_first", Effect.REWRITES, "makes --hicache-mem-layout page_first_direct"),
        (
            "--hicache-host-memory-mode buffer_only --hicache-write-policy write_back",
            Effect.REWRITES,
            "makes --hicache-write-policy write_through",
        ),
        ("--enable-unified-memory", Effect.REWRITES, "page_first and --hicache-io-backend kernel"),
        ("--enable-session-radix-cache", Effect.MEANS, "Python tree core"),
        ("--enable-streaming-session", Effect.MEANS, "neither L2 nor L3"),
        ("--page-size 1", Effect.MEANS, "below 16"),
    ],
)
def test_combinations_that_sglang_changes_or_refuses_are_named(flags: str, effect: Effect, said: str) -> None:
    """Operators find out after minutes of loading weights otherwise, or never."""
    notes = plan(Replica(model="m", weight_version="1", options={}, flags=flags.split())).notes
    assert [note.effect for note in notes if said in note.text] == [effect]


@pytest.mark.parametrize(
    ("flags", "effect", "said"),
    [
        ("--enable-hierarchical-cache", Effect.REFUSES, "choose one of them"),
        ("--enable-hicache", Effect.REFUSES, "choose one of them"),
        ("--radix-cache-backend hicache", Effect.REFUSES, "takes no --radix-cache-backend"),
        ("--enable-linker-mla-dedup", Effect.REFUSES, "for the Mooncake linker"),
        ("--disable-radix-cache", Effect.REFUSES, "nothing to cache"),
        ("--pp-size 2", Effect.MEANS, "L3 stays off"),
        ("--dcp-size 2", Effect.MEANS, "L3 stays off"),
        ("--speculative-algorithm EAGLE", Effect.MEANS, "with a draft model"),
        ("--hicache-ratio 3", Effect.MEANS, "no host tier"),
    ],
)
def test_what_the_linker_excludes_is_named(flags: str, effect: Effect, said: str) -> None:
    """Another way in has other exclusions; SGLang tells of some of them, the log of the rest."""
    replica = Replica(model="m", weight_version="1", options={}, flags=flags.split(), linker=True)
    assert [note.effect for note in plan(replica).notes if said in note.text] == [effect]


def test_the_linker_gets_the_same_extra_config_where_it_looks_for_it() -> None:
    """One daemon serves replicas of both kinds, so what identifies a model is said alike."""
    out, err = run("m", "--weight-version", "1", "--linker", "--no-check", "--", "--tp-size", "2")
    words = shlex.split(out.replace("\\\n", " "))
    config = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
    assert config["linker_module_path"] == "hicache.integrations.sglang.linker"
    assert config["linker_extra_config"] == {"weight_version": "1", "address": "127.0.0.1:7380"}
    read_linker_settings(config["linker_extra_config"])
    assert "--enable-hierarchical-cache" not in words
    assert not [word for word in words if word.startswith("--hicache-")]
    assert words[words.index("--tp-size") + 1] == "2"
    assert err == ""


@pytest.mark.parametrize(
    ("flags", "effect", "said"),
    [
        ("", Effect.MEANS, "Python tree core"),
        ("--nnodes 2", Effect.REFUSES, "on one node"),
        ("--enable-lmcache", Effect.REFUSES, "excludes --enable-lmcache"),
        ("--enable-kv-cache-sharding", Effect.REFUSES, "takes no --radix-cache-backend"),
    ],
)
def test_what_the_adaptive_policy_excludes_is_named(flags: str, effect: Effect, said: str) -> None:
    """Each of these ends the start of SGLang, or costs time in its tree."""
    replica = Replica(model="m", weight_version="1", options={}, flags=flags.split(), adaptive=True)
    launch = plan(replica)
    assert launch.command[launch.command.index("--radix-cache-backend") + 1] == "hicache"
    assert [note.effect for note in launch.notes if said in note.text] == [effect]


def test_the_policy_without_its_cache_is_named() -> None:
    """SGLang takes the name, for the plugin offers it, and then knows no such policy."""
    flags = ["--radix-eviction-policy", "adaptive"]
    (note,) = plan(Replica(model="m", weight_version="1", options={}, flags=flags)).notes
    assert note.effect is Effect.REFUSES
    assert "add that flag" in note.text
    with pytest.raises(ConfigError, match="another cache"):
        plan(
            Replica(
                model="m",
                weight_version="1",
                options={},
                flags=["--radix-cache-backend", "flexkv"],
                adaptive=True,
            )
        )


def test_the_plain_command_needs_no_remark() -> None:
    """A warning that always appears is read by nobody."""
    assert plan(Replica(model="m", weight_version="1", options={})).notes == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hicache-storage-backend", "file"], "leave it out"),
        (["2"], "belongs to no flag"),
        (["--tp-size", "2", "3"], "belongs to no flag"),
    ],
)
def test_flags_that_contradict_the_command_are_refused(flags: list[str], said: str) -> None:
    """A command that silently drops a flag starts another server than was asked for."""
    with pytest.raises(ConfigError, match=said):
        plan(Replica(model="m", weight_version="1", options={}, flags=flags))


def test_a_model_folder_and_a_daemon_tell_how_much_fits(tmp_path: Path) -> None:
    """Sizing by hand is where deployments go wrong first."""
    with running_daemon(capacity="1GiB") as daemon:
        _, err = run(str(config_json(tmp_path)), "--weight-version", "1", "--address", daemon.address)
    assert "one page of 64 tokens is 64 KiB of KV on each rank" in err
    assert "the daemon holds 1.0 GiB: about 1,048,576 tokens of this model" in err


def test_a_daemon_that_is_away_is_named_with_the_command_that_starts_it() -> None:
    """SGLang would start and serve without L3, and nobody would look for the reason."""
    out, _ = run("m", "--weight-version", "1", "--address", "127.0.0.1:9", "--json")
    notes = [note["text"] for note in json.loads(out)["notes"]]
    assert [note for note in notes if "no daemon answers at 127.0.0.1:9" in note]
    assert [note for note in notes if "start it with `hicache serve --port 9`" in note]


def test_windows_are_counted_apart(tmp_path: Path) -> None:
    """A hybrid model's pages are smaller than all of its layers."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    shape = read_shape(config_json(tmp_path, layer_types=kinds, sliding_window=128, head_dim=32))
    assert (shape.full_layers, shape.window_layers, shape.window) == (1, 3, 128)
    assert shape.page_bytes(64, tp_size=2) == 2 * 64 * 1 * 32 * 2
    with pytest.raises(ConfigError, match="latent KV"):
        read_shape(config_json(tmp_path, kv_lora_rank=512))
    with pytest.raises(ConfigError, match="No such file"):
        read_shape(tmp_path / "nothing.json")


def test_the_plugin_says_once_what_is_installed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang runs it in every process; one line is information, eight are noise."""
    monkeypatch.setattr(plugin, "_listen", lambda: None)
    monkeypatch.setattr(plugin.backend, "register", lambda: None)
    monkeypatch.setattr(plugin.metadata, "version", {"hicache-tiered": "1.2", "sglang": "0.5.23"}.get)
    with caplog.at_level(logging.INFO):
        plugin.activate()
        monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: types.SimpleNamespace())
        plugin.activate()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("HiCache 1.2 is installed beside SGLang 0.5.23 (tested). It is active only where")
