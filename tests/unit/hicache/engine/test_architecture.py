"""The reference model's description: what the cache is told about it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from hicache.engine.architecture import PRESETS, ReferenceConfig, layer_string, parse_layers, reference_spec
from hicache.errors import ConfigError
from hicache.types import Component


def test_layers_are_written_one_letter_each() -> None:
    """--layers would not mean what --help says."""
    assert parse_layers("smF") == (Component.SWA, Component.MAMBA, Component.FULL)
    assert layer_string(parse_layers("SMF")) == "SMF"
    for bad in ("", "FX"):
        with pytest.raises(ConfigError, match="one letter per layer"):
            parse_layers(bad)


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_spec_has_the_layers_and_families_of_the_model(name: str) -> None:
    """The cache would move too few pools for a page."""
    config = PRESETS[name]
    spec = reference_spec(config, 16)
    assert spec.layers == config.layers
    assert spec.kinds == config.kinds
    pools = {p.name for c in spec.components for p in c.pools if not p.name.startswith("mamba")}
    plain = {"full_kv", "full_index", *(["swa_kv"] if Component.SWA in config.kinds else [])}
    expected = {
        "dense": {"full_kv"},
        "five-in-thirty": {"full_kv", "swa_kv"},
        "compressed": {"full_c4", "full_c4_index", "full_c32", "swa_kv", "swa_c4_state", "swa_c32_state"},
    }
    assert pools == expected.get(name, plain)
    assert spec.window == (config.window if Component.SWA in config.kinds else 0)


def test_identity_follows_weights_and_shape_but_not_the_context() -> None:
    """Replicas would share bytes of different models, or not share those of equal ones."""
    base = PRESETS["hybrid"]
    same = reference_spec(replace(base, context_length=8192), 16).fingerprint
    assert reference_spec(base, 16).fingerprint == same
    others = [replace(base, seed=1), replace(base, mlp=256), replace(base, window=32), replace(base, tile=32)]
    prints = {reference_spec(c, 16).fingerprint for c in others} | {
        reference_spec(base, 64).fingerprint,
        same,
    }
    assert len(prints) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (Component.SWA,)}, "at least one FULL layer"),
        ({"compression": (4,)}, "compression is of 1 layers, not 8"),
        ({"compression": (0, 0, 4) + (0,) * 5}, "only SWA layers are compressed"),
        ({"compression": (4,) + (0,) * 7}, "name no FULL layer"),
        ({"layers": (Component.SWA,), "compression": (1,)}, "at least 2 tokens a row"),
        ({"layers": (Component.SWA,), "compression": (4,), "indexed_ratio": 8}, "no layer has it"),
        ({"heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "even"),
        ({"vocab": 100}, "at least 256"),
        ({"window": 0}, "--sliding-window 0 must be at least 1"),
        ({"state_dim": 0}, "positive"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(change: dict[str, object], message: str) -> None:
    """A wrong flag would fail deep inside torch."""
    with pytest.raises(ConfigError, match=message):
        replace(PRESETS["hybrid"], **change)  # type: ignore[arg-type]


def test_describing_a_model_does_not_load_torch() -> None:
    """Virtual time and --help would pay for torch, and need it installed."""
    code = "import sys, hicache.engine.architecture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_is_a_value() -> None:
    """Two servers with equal flags would not be known as the same model."""
    assert ReferenceConfig(layers=parse_layers("F")) == ReferenceConfig(layers=(Component.FULL,))
