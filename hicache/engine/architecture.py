"""The reference decoder's shape, and the spec of the pools it needs. No torch: virtual time uses it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hicache.errors import ConfigError
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

FULL_KV = "full_kv"
FULL_INDEX = "full_index"
SWA_KV = "swa_kv"
MAMBA_STATE = "mamba_state"
MAMBA_CONV = "mamba_conv"
FULL_DRAFT = "full_draft"
SWA_DRAFT = "swa_draft"


def packed_name(ratio: int) -> str:
    """Name FULL's sidecar with one row of keys and values per `ratio` tokens."""
    return f"full_c{ratio}"


def packed_index_name(ratio: int) -> str:
    """Name FULL's sidecar with the indexer keys of those rows."""
    return f"full_c{ratio}_index"


def packed_state_name(ratio: int) -> str:
    """Name SWA's sidecar with the sums of the group that is unfinished."""
    return f"swa_c{ratio}_state"


_LETTERS = {"F": Component.FULL, "S": Component.SWA, "M": Component.MAMBA}


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """A small hybrid decoder with seeded random weights.

    Positions are computed in tiles of `tile` rows at absolute positions, whatever the caller asks
    for, so that a result never depends on how the work was cut (see hicache.engine.layers).

    A layer of a `compression` ratio is a sliding one that also sees one row per so many tokens of all
    that is older; those rows are sidecars of FULL, what is unfinished of them is a sidecar of SWA.
    """

    layers: tuple[Component, ...]
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    # The sidecar of FULL: one indexer key per token, or per row of `indexed_ratio`; 0: none.
    index_dim: int = 8
    mlp: int = 128
    vocab: int = 512
    window: int = 64  # tokens before a position that SWA sees, besides the position itself
    state_dim: int = 8  # recurrent state per channel
    conv_width: int = 4  # inputs that the short convolution of MAMBA sees
    compression: tuple[int, ...] = ()  # tokens per row, layer by layer; 0 or nothing: not compressed
    indexed_ratio: int = 0  # rows of this ratio overlap with the row before, and have indexer keys
    draft: bool = False  # one more layer, behind all others, guesses the token after the next
    context_length: int = 4096
    tile: int = 16
    seed: int = 0  # of the weights; it is their version

    def __post_init__(self) -> None:
        if Component.FULL not in self.layers and not any(self.compression):
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
        sizes = (self.heads, self.kv_heads, self.index_dim + 1, self.mlp, self.state_dim, self.tile)
        if min(sizes) < 1 or self.conv_width < 2:
            raise ConfigError(f"sizes of the reference model must be positive, conv width at least 2: {self}")
        self._check_compression()

    def _check_compression(self) -> None:
        if self.compression and len(self.compression) != len(self.layers):
            raise ConfigError(
                f"--layers {layer_string(self.layers)}: the preset's compression is of "
                f"{len(self.compression)} layers, not {len(self.layers)}; take another preset"
            )
        if any(r and c is not Component.SWA for r, c in zip(self.compression, self.layers, strict=False)):
            raise ConfigError("only SWA layers are compressed")
        if any(r < 0 or r == 1 for r in self.compression):
            raise ConfigError(f"compression {self.compression}: 0 for none, or at least 2 tokens a row")
        if any(self.compression) and Component.FULL in self.layers:
            raise ConfigError(
                "FULL is without bytes of its own where layers are compressed: name no FULL layer"
            )
        if self.indexed_ratio and (self.indexed_ratio not in self.compression or not self.index_dim):
            raise ConfigError(f"indexed ratio {self.indexed_ratio}: no layer has it, or the index dim is 0")

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compression ratios, ascending."""
        return tuple(sorted({ratio for ratio in self.compression if ratio}))

    def compressed_layers(self, ratio: int) -> tuple[int, ...]:
        """Model layers of a ratio; the i-th reads layer i of the ratio's pools."""
        return tuple(i for i, r in enumerate(self.compression) if r == ratio)

    def packed_width(self, ratio: int, ranks: int = 1) -> int:
        """Numbers that a token adds to its group: keys and values, the indexer key, its weight.

        Of `ranks` each keeps its heads, and the rest whole.
        """
        index = self.index_dim if ratio == self.indexed_ratio else 0
        return 2 * self.kv_heads // ranks * self.head_dim + index + 1

    @property
    def kinds(self) -> tuple[Component, ...]:
        return tuple(sorted({*self.layers, *([Component.FULL] if self.ratios else [])}))

    @property
    def draft_component(self) -> Component:
        """Whose pages the draft layer's keys and values follow."""
        return Component.SWA if self.ratios else Component.FULL

    @property
    def model_id(self) -> str:
        """Name the architecture; equal for equal weights-free shapes, so that it may stand in a key."""
        without = ("seed", "context_length")
        shape = {k: v for k, v in asdict(self).items() if k not in without and v not in ((), 0)}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
        return f"hicache-reference-{layer_string(self.layers)}-{digest}"


PRESETS: Mapping[str, ReferenceConfig] = {
    "full": ReferenceConfig(layers=(Component.FULL,) * 4),
    "full-swa": ReferenceConfig(layers=(Component.SWA, Component.FULL) * 2),
    "full-mamba": ReferenceConfig(layers=(Component.MAMBA, Component.FULL) * 2),
    "hybrid": ReferenceConfig(layers=(Component.SWA, Component.MAMBA, Component.FULL, Component.SWA) * 2),
    "dense": ReferenceConfig(layers=(Component.FULL,) * 4, heads=8, index_dim=0),
    "five-in-thirty": ReferenceConfig(
        layers=((Component.SWA,) * 5 + (Component.FULL,)) * 5,
        hidden=32,
        mlp=64,
        head_dim=8,
        index_dim=0,
        window=1024,
    ),
    "compressed": ReferenceConfig(
        layers=(Component.SWA,) * 5, compression=(0, 4, 32, 4, 32), indexed_ratio=4, window=32
    ),
}
DRAFT_SUFFIX = "-draft"


def preset_config(name: str) -> ReferenceConfig:
    """Return a preset, with a draft layer where the name ends in "-draft". Raises ConfigError."""
    preset = PRESETS.get(name.removesuffix(DRAFT_SUFFIX))
    if preset is None:
        known = ", ".join(PRESETS)
        raise ConfigError(
            f"--model-preset {name}: unknown; there are {known}, and each with {DRAFT_SUFFIX} behind it"
        )
    return replace(preset, draft=True) if name.endswith(DRAFT_SUFFIX) else preset


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


def reference_spec(
    config: ReferenceConfig, page_size: int, shard: Shard = WHOLE, *, islands: bool = False
) -> ModelSpec:
    """Describe the pools the model reads and writes, for pages of `page_size` tokens, on one rank.

    KV heads and recurrent channels are sharded; indexer keys have no heads, every rank has them whole.
    `islands` is of models with SWA; raises ConfigError for others.
    """
    if islands and Component.SWA not in config.kinds:
        raise ConfigError(
            f"--enable-swa-islands needs a model with SWA layers; {layer_string(config.layers)} has none, "
            "see --model-preset and --layers"
        )
    shard.check(config)
    kv_row = (2, config.kv_heads // shard.size, config.head_dim)
    channels = config.hidden // shard.size
    components = []
    for component in config.kinds:
        layers = config.layers.count(component)
        if component is Component.FULL:
            pools = _full_pools(config, layers, page_size, kv_row)
        elif component is Component.SWA:
            pools = [PoolSpec(SWA_KV, layers, kv_row, "float32", page_size), *_states(config, shard)]
        else:
            pools = [
                PoolSpec(MAMBA_STATE, layers, (channels, config.state_dim), "float32", 1),
                PoolSpec(MAMBA_CONV, layers, (config.conv_width - 1, channels), "float32", 1),
            ]
        if config.draft and component is config.draft_component:
            name = FULL_DRAFT if component is Component.FULL else SWA_DRAFT
            last = (len(config.layers) - 1,)
            pools.append(PoolSpec(name, 1, kv_row, "float32", page_size, at=last))
        window = config.window if component is Component.SWA else 0
        logical = component is Component.FULL and not layers
        kept = islands and component is Component.SWA
        components.append(
            ComponentSpec(component, tuple(pools), window=window, logical=logical, islands=kept)
        )
    return ModelSpec(
        model_id=config.model_id,
        page_size=page_size,
        components=tuple(components),
        weight_version=str(config.seed),
        layers=config.layers,
    )


def _full_pools(
    config: ReferenceConfig, layers: int, page_size: int, kv_row: tuple[int, ...]
) -> list[PoolSpec]:
    pools = []
    if layers:
        pools.append(PoolSpec(FULL_KV, layers, kv_row, "float32", page_size))
        if config.index_dim:
            pools.append(PoolSpec(FULL_INDEX, layers, (config.index_dim,), "float32", page_size))
    for ratio in config.ratios:
        at, rows = config.compressed_layers(ratio), max(1, page_size // ratio)
        pools.append(PoolSpec(packed_name(ratio), len(at), kv_row, "float32", rows, ratio=ratio, at=at))
        if ratio == config.indexed_ratio:
            row = (config.index_dim,)
            name = packed_index_name(ratio)
            pools.append(PoolSpec(name, len(at), row, "float32", rows, ratio=ratio, at=at))
    return pools


def _states(config: ReferenceConfig, shard: Shard) -> list[PoolSpec]:
    """One row a page: the sums of the group that the page leaves unfinished, as of its last token."""
    states = []
    for ratio in config.ratios:
        at, indexed = config.compressed_layers(ratio), ratio == config.indexed_ratio
        of = (packed_name(ratio), *([packed_index_name(ratio)] if indexed else []))
        row = (2 if indexed else 1, config.packed_width(ratio, shard.size))
        name = packed_state_name(ratio)
        states.append(PoolSpec(name, len(at), row, "float32", 1, state_of=of, overlap=indexed, at=at))
    return states
