"""The reference decoder's shape, and the spec of the pools it needs. No torch: virtual time uses it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hicache.errors import ConfigError
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

FULL_KV = "full_kv"
FULL_INDEX = "full_index"
SWA_KV = "swa_kv"
MAMBA_STATE = "mamba_state"
MAMBA_CONV = "mamba_conv"

_LETTERS = {"F": Component.FULL, "S": Component.SWA, "M": Component.MAMBA}


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """A small hybrid decoder with seeded random weights.

    Positions are computed in tiles of `tile` rows at absolute positions, whatever the caller asks
    for, so that a result never depends on how the work was cut (see hicache.engine.model).
    """

    layers: tuple[Component, ...]
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    index_dim: int = 8  # the sidecar of FULL: one indexer key per token
    mlp: int = 128
    vocab: int = 512
    window: int = 64  # tokens before a position that SWA sees, besides the position itself
    state_dim: int = 8  # recurrent state per channel
    conv_width: int = 4  # inputs that the short convolution of MAMBA sees
    context_length: int = 4096
    tile: int = 16
    seed: int = 0  # of the weights; it is their version

    def __post_init__(self) -> None:
        if Component.FULL not in self.layers:
            raise ConfigError(
                f"--layers {layer_string(self.layers)}: the model needs at least one FULL layer, F"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads are not a multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ConfigError(f"head dim {self.head_dim} must be even: rotary positions turn pairs")
        if self.vocab < 256:
            raise ConfigError(
                f"--vocab-size {self.vocab} must be at least 256: the tokenizer speaks in bytes"
            )
        for flag, value in (
            ("--hidden-size", self.hidden),
            ("--sliding-window", self.window),
            ("--context-length", self.context_length),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value} must be at least 1")
        sizes = (self.heads, self.kv_heads, self.index_dim, self.mlp, self.state_dim, self.tile)
        if min(sizes) < 1 or self.conv_width < 2:
            raise ConfigError(f"sizes of the reference model must be positive, conv width at least 2: {self}")

    @property
    def kinds(self) -> tuple[Component, ...]:
        return tuple(sorted(set(self.layers)))

    @property
    def model_id(self) -> str:
        """Name the architecture; equal for equal weights-free shapes, so that it may stand in a key."""
        shape = {k: v for k, v in asdict(self).items() if k not in ("seed", "context_length")}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
        return f"hicache-reference-{layer_string(self.layers)}-{digest}"


PRESETS: Mapping[str, ReferenceConfig] = {
    "full": ReferenceConfig(layers=(Component.FULL,) * 4),
    "full-swa": ReferenceConfig(layers=(Component.SWA, Component.FULL) * 2),
    "full-mamba": ReferenceConfig(layers=(Component.MAMBA, Component.FULL) * 2),
    "hybrid": ReferenceConfig(layers=(Component.SWA, Component.MAMBA, Component.FULL, Component.SWA) * 2),
}


def parse_layers(text: str) -> tuple[Component, ...]:
    """Read layers as one letter each, F, S or M, in model order: "SMFS"."""
    wrong = sorted(set(text.upper()) - set(_LETTERS))
    if wrong or not text:
        raise ConfigError(f"--layers {text!r}: use one letter per layer, F (full), S (swa) or M (mamba)")
    return tuple(_LETTERS[letter] for letter in text.upper())


def layer_string(layers: tuple[Component, ...]) -> str:
    """Write layers as parse_layers reads them."""
    return "".join(component.name[0] for component in layers)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a sharded axis is a rank's: KV heads of attention, channels of recurrent layers."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is none of {self.size}")

    @property
    def id(self) -> str:
        """As it stands in every storage key and object header."""
        return f"{self.rank}of{self.size}"

    def of(self, width: int) -> slice:
        """This rank's part of an axis of `width`, which the size divides."""
        part = width // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def check(self, config: ReferenceConfig) -> None:
        """Raise ConfigError if the model cannot be cut like this."""
        for what, width in (("KV heads", config.kv_heads), ("channels", config.hidden)):
            if width % self.size:
                raise ConfigError(
                    f"{self.size} ranks do not divide {width} {what}; use a number of ranks that does"
                )


WHOLE = Shard()


def reference_spec(config: ReferenceConfig, page_size: int, shard: Shard = WHOLE) -> ModelSpec:
    """Describe the pools the model reads and writes, for pages of `page_size` tokens, on one rank.

    KV heads and recurrent channels are sharded; the indexer's keys have no heads, every rank has them whole.
    """
    shard.check(config)
    kv_row = (2, config.kv_heads // shard.size, config.head_dim)
    channels = config.hidden // shard.size
    components = []
    for component in config.kinds:
        layers = config.layers.count(component)
        if component is Component.FULL:
            pools: tuple[PoolSpec, ...] = (
                PoolSpec(FULL_KV, layers, kv_row, "float32", page_size),
                PoolSpec(FULL_INDEX, layers, (config.index_dim,), "float32", page_size),
            )
        elif component is Component.SWA:
            pools = (PoolSpec(SWA_KV, layers, kv_row, "float32", page_size),)
        else:
            pools = (
                PoolSpec(MAMBA_STATE, layers, (channels, config.state_dim), "float32", 1),
                PoolSpec(MAMBA_CONV, layers, (config.conv_width - 1, channels), "float32", 1),
            )
        window = config.window if component is Component.SWA else 0
        components.append(ComponentSpec(component, pools, window=window))
    return ModelSpec(
        model_id=config.model_id,
        page_size=page_size,
        components=tuple(components),
        weight_version=str(config.seed),
        layers=config.layers,
    )
