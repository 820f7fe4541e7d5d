"""Pools shaped like those of published models, by name, at their real sizes: for planning, not for running.

The reference engine's presets of the same names have the same pools at sizes that a CPU can compute.
Shapes are of one whole copy of the KV, before it is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA

# One row of 512 numbers: 448 in FP8, 64 rotary ones in BF16, scales.
_V4_ROW = 584
# One indexer key of 128 numbers in FP8, and its scale.
_INDEX_ROW = 132


@dataclass(frozen=True, slots=True)
class Family:
    """A published shape. `build` makes its components for a page size, with draft pools or without."""

    title: str
    source: str
    build: Callable[[int, bool], tuple[ComponentSpec, ...]]


def _with_draft(pools: list[PoolSpec], draft: PoolSpec, wanted: bool) -> tuple[PoolSpec, ...]:
    return (*pools, draft) if wanted else tuple(pools)


def _dense(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    row = (2, 8, 128)
    pools = [PoolSpec("kv", 64, row, "bfloat16", page)]
    return (ComponentSpec(FULL, _with_draft(pools, PoolSpec("draft", 1, row, "bfloat16", page), draft)),)


def _five_in_thirty(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    full = [PoolSpec("kv", 5, (1_900,), "uint8", page)]
    return (
        ComponentSpec(FULL, _with_draft(full, PoolSpec("draft", 5, (2_048,), "uint8", page), draft)),
        ComponentSpec(SWA, (PoolSpec("swa", 25, (3_800,), "uint8", page),), window=1024),
    )


def _full_mamba(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    row = (2, 2, 256)
    full = [PoolSpec("kv", 12, row, "bfloat16", page)]
    states = (
        PoolSpec("state", 36, (32, 128, 128), "float32", 1),
        PoolSpec("conv", 36, (3, 8_192), "bfloat16", 1),
    )
    return (
        ComponentSpec(FULL, _with_draft(full, PoolSpec("draft", 1, row, "bfloat16", page), draft)),
        ComponentSpec(MAMBA, states),
    )


def _hybrid(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    full = [PoolSpec("kv", 8, (1_188,), "uint8", page)]
    return (
        ComponentSpec(FULL, _with_draft(full, PoolSpec("draft", 1, (1_188,), "uint8", page), draft)),
        ComponentSpec(SWA, (PoolSpec("swa", 8, (11_875,), "uint8", page),), window=512),
        ComponentSpec(MAMBA, (PoolSpec("state", 8, (152_064,), "uint8", 1),)),
    )


def _sparse(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    pools = [
        PoolSpec("kv", 61, (576,), "bfloat16", page),
        PoolSpec("index", 61, (_INDEX_ROW,), "uint8", page),
    ]
    if draft:
        pools.append(PoolSpec("draft", 1, (576,), "bfloat16", page))
    return (
        ComponentSpec(
            FULL, _with_draft(pools, PoolSpec("draft_index", 1, (_INDEX_ROW,), "uint8", page), draft)
        ),
    )


def _compressed(page: int, draft: bool) -> tuple[ComponentSpec, ...]:
    near, far = tuple(range(2, 43, 2)), tuple(range(3, 42, 2))  # layers of 4 and of 128 tokens a row

    def packed(name: str, at: tuple[int, ...], width: int, ratio: int) -> PoolSpec:
        rows = max(1, page // ratio)
        return PoolSpec(name, len(at), (width,), "uint8", rows, ratio=ratio, at=at)

    full = (
        packed("c4", near, _V4_ROW, 4),
        packed("c4_index", near, _INDEX_ROW, 4),
        packed("c128", far, _V4_ROW, 128),
    )
    states = [
        PoolSpec("swa", 43, (_V4_ROW,), "uint8", page),
        PoolSpec(
            *("c4_state", len(near), (2, 512 + 128 + 1), "float32", 1),
            state_of=("c4", "c4_index"),
            overlap=True,
            at=near,
        ),
        PoolSpec("c128_state", len(far), (1, 512 + 1), "float32", 1, state_of=("c128",), at=far),
    ]
    drafted = PoolSpec("swa_draft", 1, (_V4_ROW,), "uint8", page, at=(42,))
    return (
        ComponentSpec(FULL, full, logical=True),
        ComponentSpec(SWA, _with_draft(states, drafted, draft), window=128),
    )


FAMILIES: Mapping[str, Family] = {
    "dense": Family(
        "dense attention with grouped queries",
        "config.json of Qwen/Qwen3-32B: 64 layers, 8 KV heads of 128 in BF16; the draft pool is assumed",
        _dense,
    ),
    "five-in-thirty": Family(
        "five FULL layers in thirty, the others slide over 1,024 tokens",
        "the figures of the article on Radix Islands: 9.5 KB FULL, 95 KB SWA and 10.24 KB besides per token; "
        "equal bytes per layer of a kind, and what is besides as a draft model's, are assumed",
        _five_in_thirty,
    ),
    "full-mamba": Family(
        "FULL and recurrent layers",
        "config.json of Qwen/Qwen3-Next-80B-A3B: every fourth of 48 layers FULL, 2 KV heads of 256 in BF16; "
        "32 value heads of 128 x 128, convolution over 4 inputs. FP32 states and the draft pool are assumed",
        _full_mamba,
    ),
    "hybrid": Family(
        "FULL, sliding and recurrent layers",
        "Inkling-Small, whose bytes are not published: those that `hicache bench` assumes, with its reasons",
        _hybrid,
    ),
    "full": Family(
        "sparse attention: latent KV, and an indexer key per token",
        "config.json of deepseek-ai/DeepSeek-V3.2: 61 layers, latent of 512 + 64, indexer keys of 128, one "
        "draft layer. BF16, and FP8 with a scale for the indexer, are assumed",
        _sparse,
    ),
    "compressed": Family(
        "a window of 128 tokens, and compressed rows of all before: three sidecars on FULL, two on SWA",
        "config.json of deepseek-ai/DeepSeek-V4-Flash: 43 layers, from the third on 4 and 128 tokens a row "
        "in turn, a window of 128. Bytes of a row and of the compressors' sums are assumed: FULL then takes "
        "3.85 GB per million tokens, where Mooncake's article on hybrid L3 has 3.6",
        _compressed,
    ),
}


def published_spec(name: str, page_size: int, *, draft: bool = False) -> ModelSpec:
    """Return the pools of a published shape.

    Raises ConfigError for an unknown name, SpecError for a page size that its ratios do not allow.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"--model-preset {name}: no published shape; there are {', '.join(FAMILIES)}")
    return ModelSpec(f"shape-of-{name}", page_size, family.build(page_size, draft), weight_version="none")


def stored_bytes(spec: ModelSpec, component: Component) -> float:
    """Return the bytes that L3 keeps per token of a component (MAMBA: per state), without headers."""
    period = spec.periods[component]
    size = sum(spec.object_bytes(component, phase) for phase in range(period)) / period
    return size if component is MAMBA else size / spec.page_size
