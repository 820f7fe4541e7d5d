"""What a model's config.json says about its pages: bytes per page, and what the store has to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hicache.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention: layers that keep everything, and layers with a window."""

    full_layers: int
    window_layers: int
    window: int  # tokens
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    def page_bytes(self, page_size: int, *, tp_size: int = 1) -> int:
        """Bytes of the KV of one page of one rank over the layers that keep everything."""
        heads = max(1, self.kv_heads // tp_size)
        return 2 * self.full_layers * page_size * heads * self.head_dim * self.dtype_bytes


def read_shape(path: Path) -> Shape:
    """Read a model's folder or its config.json.

    Raises ConfigError for a file that is not there, or for a model whose KV is of another kind.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    text: Mapping[str, object] = config.get("text_config") or config
    if "kv_lora_rank" in text:
        raise ConfigError(
            f"{file}: latent KV; its page size depends on the engine's kernels and is not computed"
        )
    try:
        return _grouped_query(text)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{file}: not a decoder whose KV can be computed from it ({error!r})") from error


def _grouped_query(text: Mapping[str, object]) -> Shape:
    layers, heads = _int(text["num_hidden_layers"]), _int(text["num_attention_heads"])
    kinds = text.get("layer_types")
    windowed = [str(kind).startswith("sliding") for kind in kinds] if isinstance(kinds, list) else []
    dtype = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    return Shape(
        full_layers=layers - sum(windowed),
        window_layers=sum(windowed),
        window=_int(text.get("sliding_window") or 0) if any(windowed) else 0,
        kv_heads=_int(text.get("num_key_value_heads") or heads),
        head_dim=_int(text.get("head_dim") or _int(text["hidden_size"]) // heads),
        dtype_bytes=_DTYPE_BYTES[dtype],
    )


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value
