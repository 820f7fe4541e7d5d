"""What SGLang makes of combinations of flags: refuses, rewrites, or takes with a meaning worth knowing.

The rules repeat what the tested version and our own parts do; SGLang's own argument resolution is compared
with them in the tests of the real engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def _dcp(flags: Flags) -> int:
    return max(_number(flags, "dcp-size"), _number(flags, "decode-context-parallel-size"))


def _layout(layout: str, io: str) -> Callable[[Flags], bool]:
    return lambda f: f.get("hicache-mem-layout") == layout and f.get("hicache-io-backend") == io


def _has(*names: str) -> Callable[[Flags], bool]:
    return lambda f: all(name in f for name in names)


def _is(name: str, value: str) -> Callable[[Flags], bool]:
    return lambda f: f.get(name) == value


_LINKER = "enable-unified-cache-external-linker"
_HOST = "enable-hierarchical-cache"
_TREE = "radix-cache-backend"


def _adaptive(flags: Flags) -> bool:
    return flags.get(_TREE) == "hicache" and flags.get("radix-eviction-policy", "adaptive") == "adaptive"


_TREE_RULES = (
    _Rule(
        _has(_LINKER, _TREE),
        Effect.REFUSES,
        "--enable-unified-cache-external-linker takes no --radix-cache-backend: drop one of them",
    ),
    _Rule(
        lambda f: f.get("radix-eviction-policy") == "adaptive" and f.get(_TREE) != "hicache",
        Effect.REFUSES,
        "--radix-eviction-policy adaptive is a policy of --radix-cache-backend hicache: add that flag",
    ),
    _Rule(
        lambda f: f.get(_TREE) == "hicache" and ("enable-lmcache" in f or "enable-flexkv" in f),
        Effect.REFUSES,
        "--radix-cache-backend hicache excludes --enable-lmcache and --enable-flexkv: choose one of them",
    ),
    _Rule(
        lambda f: _adaptive(f) and _number(f, "nnodes") > 1,
        Effect.REFUSES,
        "the adaptive policy is for replicas on one node: drop --radix-cache-backend hicache",
    ),
    _Rule(
        _has(_TREE, "enable-kv-cache-sharding"),
        Effect.REFUSES,
        "--enable-kv-cache-sharding takes no --radix-cache-backend: drop one of them",
    ),
    _Rule(
        _adaptive,
        Effect.MEANS,
        "--radix-cache-backend hicache runs in SGLang's Python tree core, which is slower than its Rust core",
    ),
)

_LINKER_RULES = (
    _Rule(
        _has(_LINKER, _HOST),
        Effect.REFUSES,
        "--enable-unified-cache-external-linker excludes --enable-hierarchical-cache and its storage "
        "backend: choose one of them",
    ),
    _Rule(
        _has(_LINKER, "enable-linker-mla-dedup"),
        Effect.REFUSES,
        "--enable-linker-mla-dedup is for the Mooncake linker: drop it",
    ),
    _Rule(
        lambda f: _LINKER in f and (_number(f, "pp-size") > 1 or _number(f, "pipeline-parallel-size") > 1),
        Effect.MEANS,
        "pipeline stages do not agree on what a linker restores: L3 stays off",
    ),
    _Rule(
        lambda f: _LINKER in f and _dcp(f) > 1,
        Effect.MEANS,
        "decode context parallelism is not served by the linker: L3 stays off",
    ),
    _Rule(
        lambda f: _LINKER in f and any(name.startswith("speculative-") for name in f),
        Effect.MEANS,
        "with a draft model, the linker serves only the kinds that SGLang's own linkers serve; with plain "
        "FULL or FULL + SWA layers L3 stays off",
    ),
    _Rule(
        lambda f: _LINKER in f and any(name.startswith("hicache-") for name in f),
        Effect.MEANS,
        "flags that begin with --hicache- have no effect with the linker: there is no host tier",
    ),
)

RULES = (
    *_TREE_RULES,
    *_LINKER_RULES,
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
        lambda f: _HOST in f and _dcp(f) > 1,
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
        lambda f: "enable-unified-memory" in f and f.get("hicache-mem-layout") == "page_first_direct",
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


def remarks(flags: Flags) -> tuple[Note, ...]:
    """Return what is to be said of these flags, those of the command itself included."""
    return tuple(Note(rule.effect, rule.text) for rule in RULES if rule.applies(flags))
