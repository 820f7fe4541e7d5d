"""Random families: sidecars on any component, compressed ones, and the states that restore them or do not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


def random_spec(rng: random.Random, kinds: Sequence[Component], page_size: int, window: int) -> ModelSpec:
    """Draw a model of these components with up to three sidecars on each, of bytes that do not matter."""
    ratios = [1, 2 * page_size, 4 * page_size] + [page_size // 2] * (page_size % 2 == 0)
    pools = {component: [_pool(component, 0, page_size)] for component in kinds}
    for number in range(1, 1 + rng.choice([0, 0, 1, 3])):
        pools[FULL].append(_pool(FULL, number, page_size, ratio=rng.choice(ratios)))
    compressed = [pool.name for pool in pools[FULL] if pool.ratio > 1]
    keeper = rng.choice([component for component in kinds if component is not FULL] or [FULL])
    restored = tuple(name for name in compressed if rng.random() < 0.7)
    if restored:
        state = PoolSpec("state", 1, (1,), "uint8", 1, state_of=restored, overlap=rng.random() < 0.3)
        pools[keeper].append(state)
    for component in kinds[1:]:
        if rng.random() < 0.3:
            pools[component].append(_pool(component, 1, page_size))
    logical = SWA in kinds and len(pools[FULL]) > 1 and rng.random() < 0.3
    components = [
        ComponentSpec(
            component,
            tuple(pools[component][logical and component is FULL :]),
            window=window if component is SWA else 0,
            logical=logical and component is FULL,
        )
        for component in kinds
    ]
    return ModelSpec("random", page_size, tuple(components), weight_version="1")


def with_islands(spec: ModelSpec) -> ModelSpec:
    """The same model, SWA kept where a path may be resumed only."""
    kept = tuple(replace(c, islands=c.component is SWA) for c in spec.components)
    return replace(spec, components=kept)


def _pool(component: Component, number: int, page_size: int, *, ratio: int = 1) -> PoolSpec:
    rows = 1 if component is MAMBA else max(1, page_size // ratio)
    return PoolSpec(f"{component.name.lower()}{number}", 1, (1,), "uint8", rows, ratio=ratio)
