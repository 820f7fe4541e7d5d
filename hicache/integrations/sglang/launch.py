"""The launch command of an SGLang replica with our L3, and what SGLang makes of the flags beside it.

Decides text only: nothing is started, and SGLang need not be installed. The rules repeat what the tested
version does; its own argument resolution is compared with them in the tests of the real engine.
"""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache.errors import ConfigError

MODULE, CLASS = "hicache.integrations.sglang.storage", "HiCacheStorageBackend"

Flags = Mapping[str, str]
"""Flags without their dashes; a switch has the value ''."""


class Effect(enum.Enum):
    """What SGLang does with a combination of flags."""

    REFUSES = "refuses"  # it does not start
    REWRITES = "rewrites"  # it starts with another value
    MEANS = "means"  # it starts as asked; the note says what to expect


@dataclass(frozen=True, slots=True)
class Note:
    """One remark on the flags."""

    effect: Effect
    text: str


@dataclass(frozen=True, slots=True)
class _Rule:
    applies: Callable[[Flags], bool]
    effect: Effect
    text: str


def _number(flags: Flags, name: str) -> int:
    text = flags.get(name, "1")
    return int(text) if text.isdigit() else 1


def _layout(layout: str, io: str) -> Callable[[Flags], bool]:
    return lambda f: f["hicache-mem-layout"] == layout and f["hicache-io-backend"] == io


def _has(*names: str) -> Callable[[Flags], bool]:
    return lambda f: all(name in f for name in names)


def _is(name: str, value: str) -> Callable[[Flags], bool]:
    return lambda f: f.get(name) == value


_RULES = (
    _Rule(
        _has("enable-unified-cache-external-linker"),
        Effect.REFUSES,
        "--enable-unified-cache-external-linker excludes --enable-hierarchical-cache and its storage "
        "backend: choose one of them",
    ),
    _Rule(
        _has("disable-radix-cache"),
        Effect.REFUSES,
        "--disable-radix-cache leaves nothing to cache: drop it",
    ),
    _Rule(
        lambda f: (
            f.get("hicache-host-memory-mode") == "buffer_only" and f.get("disaggregation-mode") == "decode"
        ),
        Effect.REFUSES,
        "--hicache-host-memory-mode buffer_only is not for decode instances: use it on prefill instances",
    ),
    _Rule(
        lambda f: _number(f, "dcp-size") > 1 or _number(f, "decode-context-parallel-size") > 1,
        Effect.REFUSES,
        "decode context parallelism takes no dynamic storage backend: serve with --dcp-size 1",
    ),
    _Rule(
        _has("enable-lmcache"),
        Effect.REFUSES,
        "--enable-lmcache is another tiered cache: choose one of them",
    ),
    _Rule(
        _has("enable-int8-mamba-checkpoint"),
        Effect.REFUSES,
        "--enable-int8-mamba-checkpoint excludes --enable-hierarchical-cache: drop it",
    ),
    _Rule(
        _layout("page_first_direct", "kernel"),
        Effect.REWRITES,
        "--hicache-mem-layout page_first_direct makes --hicache-io-backend direct",
    ),
    _Rule(
        _layout("page_first", "direct"),
        Effect.REWRITES,
        "--hicache-io-backend direct makes --hicache-mem-layout page_first_direct",
    ),
    _Rule(
        lambda f: (
            f.get("hicache-host-memory-mode") == "buffer_only"
            and f.get("hicache-write-policy") == "write_back"
        ),
        Effect.REWRITES,
        "--hicache-host-memory-mode buffer_only makes --hicache-write-policy write_through",
    ),
    _Rule(
        lambda f: "enable-unified-memory" in f and f["hicache-mem-layout"] == "page_first_direct",
        Effect.REWRITES,
        "--enable-unified-memory makes --hicache-mem-layout page_first and --hicache-io-backend kernel",
    ),
    _Rule(
        _is("hicache-mem-layout", "page_head"),
        Effect.MEANS,
        "--hicache-mem-layout page_head is the slowest to copy to and from L3; objects are the same in every "
        "layout",
    ),
    _Rule(
        _is("hicache-host-memory-mode", "buffer_only"),
        Effect.MEANS,
        "buffer_only keeps no L2: every hit beyond the GPU comes from L3",
    ),
    _Rule(
        _has("enable-session-radix-cache"),
        Effect.MEANS,
        "--enable-session-radix-cache makes SGLang use its Python tree core, which is slower",
    ),
    _Rule(
        _has("enable-streaming-session"),
        Effect.MEANS,
        "streaming sessions keep their KV on the GPU between turns and use neither L2 nor L3",
    ),
    _Rule(
        _is("hicache-storage-prefetch-policy", "best_effort"),
        Effect.MEANS,
        "best_effort gives a prefetch up when its request is first looked at: expect few hits from L3 on an "
        "idle server",
    ),
    _Rule(
        lambda f: _number(f, "page-size") < 16,
        Effect.MEANS,
        "every page is one object: with --page-size below 16, L3 spends its time on headers",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What the command is made from. `flags` are the user's own, as SGLang takes them."""

    model: str
    weight_version: str
    backend: str = "grpc"
    options: Mapping[str, object]
    model_id: str = ""
    flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """The command, and what to know about it."""

    command: tuple[str, ...]
    extra_config: Mapping[str, object]
    notes: tuple[Note, ...]

    def shell(self) -> str:
        """Return the command for a shell, one flag a line."""
        lines = [shlex.join(self.command[:3])]
        for word in self.command[3:]:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n    ".join(lines)


_DEFAULTS = {
    "page-size": "64",
    "hicache-ratio": "2",
    "hicache-io-backend": "direct",
    "hicache-mem-layout": "page_first_direct",
    "hicache-write-policy": "write_through",
    "hicache-storage-prefetch-policy": "timeout",
}
_OURS = ("hicache-storage-backend", "hicache-storage-backend-extra-config")


def plan(replica: Replica) -> Launch:
    """Return the command that starts this replica with our L3.

    Raises ConfigError for flags that contradict it.
    """
    if not replica.weight_version:
        raise ConfigError("the weight version is needed: any text that changes when the weights do")
    given = read_flags(replica.flags)
    for name in _OURS:
        if name in given:
            raise ConfigError(f"--{name} is what this command writes; leave it out")
    aliases = {"enable-hicache", "enable-hierarchical-cache"}
    flags = {**_DEFAULTS, **{name: value for name, value in given.items() if name not in aliases}}
    if "hicache-size" in given and "hicache-ratio" not in given:
        del flags["hicache-ratio"]
    extra: dict[str, object] = {
        "backend_name": "hicache",
        "module_path": MODULE,
        "class_name": CLASS,
        "interface_v1": 1,
        "weight_version": replica.weight_version,
    }
    if replica.backend != "grpc":
        extra["backend"] = replica.backend
    if replica.model_id:
        extra["model_id"] = replica.model_id
    extra |= replica.options
    command = ["python", "-m", "sglang.launch_server", "--model-path", replica.model]
    command += ["--enable-hierarchical-cache"]
    for name, value in flags.items():
        command += [f"--{name}", value] if value else [f"--{name}"]
    command += ["--hicache-storage-backend", "dynamic"]
    command += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    notes = tuple(Note(rule.effect, rule.text) for rule in _RULES if rule.applies(flags))
    return Launch(tuple(command), extra, notes)


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Return `--name value`, `--name=value` and `--switch` words by name.

    Raises ConfigError for a word that belongs to no flag.
    """
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = value
        elif name and not flags[name]:
            flags[name] = word
        else:
            raise ConfigError(f"{word!r} belongs to no flag; SGLang's flags follow --, as in -- --tp-size 2")
    return flags
