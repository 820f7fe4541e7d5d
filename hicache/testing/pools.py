"""Pools of every shape that transfers must cope with, and a copy thread held by hand."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

import torch

from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.tiers.device import DevicePools
from hicache.tiers.pools import TorchPools
from hicache.transfer.base import JobKind
from hicache.transfer.copy_engine import CopyEngine, LayerPart, Mark, Pages
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA


def hybrid_spec(page_size: int, *, weight_version: str = "1") -> ModelSpec:
    """Seven layers of all components, sidecars with as many layers and with others, odd row sizes."""
    return ModelSpec(
        model_id="hybrid-test",
        page_size=page_size,
        weight_version=weight_version,
        components=(
            ComponentSpec(
                FULL,
                (
                    PoolSpec("full_kv", 2, (2, 2, 8), "bfloat16", page_size),
                    PoolSpec("full_index", 2, (5,), "uint8", page_size),
                    PoolSpec("full_draft", 3, (3,), "float16", page_size),
                ),
            ),
            ComponentSpec(SWA, (PoolSpec("swa_kv", 3, (2, 4), "float32", page_size),), window=2 * page_size),
            ComponentSpec(
                MAMBA,
                (
                    PoolSpec("mamba_state", 2, (7, 3), "float32", 1),
                    PoolSpec("mamba_conv", 2, (9,), "int8", 1),
                ),
            ),
        ),
        layers=(SWA, FULL, MAMBA, SWA, FULL, MAMBA, SWA),
    )


def compressed_spec(page_size: int) -> ModelSpec:
    """FULL without bytes of its own, three compressed sidecars on it, two states of theirs on SWA.

    Rows of one sidecar span four pages; one state is needed at every boundary, the other where no
    group of four pages ends.
    """
    wide = 4 * page_size
    return ModelSpec(
        model_id="compressed-test",
        page_size=page_size,
        weight_version="1",
        components=(
            ComponentSpec(
                FULL,
                (
                    PoolSpec("c4", 2, (5,), "bfloat16", page_size // 4, ratio=4, at=(0, 2)),
                    PoolSpec("c4_index", 2, (3,), "uint8", page_size // 4, ratio=4, at=(0, 2)),
                    PoolSpec("wide", 1, (7,), "float32", 1, ratio=wide, at=(1,)),
                ),
                logical=True,
            ),
            ComponentSpec(
                SWA,
                (
                    PoolSpec("swa_kv", 3, (2, 4), "float32", page_size),
                    PoolSpec("c4_state", 2, (9,), "float32", 1, state_of=("c4", "c4_index"), overlap=True),
                    PoolSpec("wide_state", 1, (6,), "float32", 1, state_of=("wide",)),
                ),
                window=2 * page_size,
            ),
        ),
    )


def fill(pools: DevicePools, seed: int) -> None:
    """Give every byte of every device pool a seeded random value."""
    generator = torch.Generator().manual_seed(seed)
    for family in pools.spec.components:
        for _, tensor in pools.component_pools(family.component):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def page_bytes(pools: TorchPools, component: Component, slot: int) -> dict[str, bytes]:
    """Read one page of a family, pool by pool, in canonical order; naive, so that it is the truth."""
    return {
        pool.name: b"".join(
            _layer(tensor, pools, layer)[slot].contiguous().view(torch.uint8).cpu().numpy().tobytes()
            for layer in range(pool.num_layers)
        )
        for pool, tensor in pools.component_pools(component)
    }


def _layer(tensor: torch.Tensor, pools: TorchPools, layer: int) -> torch.Tensor:
    """One layer of a pool as (page, row, *row_shape)."""
    axis = {"layer_first": 0, "page_first": 2, "page_first_direct": 1}[pools.layout.value]
    return tensor.select(axis, layer)


class GatedCopyEngine(CopyEngine):
    """Holds every part of a load until allowed, and fails where told; otherwise the engine inside.

    `allow(n)` lets n more parts be copied. `fail_on` names (pool, layer) whose copy raises, for all pages
    or for those that touch one of the host pages `bad`; from then on nothing is held.
    """

    def __init__(
        self, inner: CopyEngine, *, fail_on: tuple[str, int] | None = None, bad: Collection[int] | None = None
    ) -> None:
        self._inner = inner
        self._fail_on, self._bad = fail_on, bad
        self._broken = False
        self._allowed = threading.Semaphore(0)
        self._moved = threading.Condition()
        self._begun = 0

    def allow(self, parts: int) -> None:
        """Let so many more parts of loads be copied."""
        if parts:
            self._allowed.release(parts)

    def wait_until_held_at(self, part: int, timeout_s: float = 60.0) -> None:
        """Wait until the copy thread stands before the part of this number, counted from 0."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._begun > part, timeout_s):
                raise TimeoutError(f"the copy thread never came to part {part}")

    def load_part(self, part: LayerPart, pages: Pages) -> None:
        with self._moved:
            self._begun += 1
            self._moved.notify_all()
        if not self._broken:
            self._allowed.acquire()
        self._check(part, pages)
        self._inner.load_part(part, pages)

    def write_part(self, part: LayerPart, pages: Pages) -> None:
        self._check(part, pages)
        self._inner.write_part(part, pages)

    def _check(self, part: LayerPart, pages: Pages) -> None:
        touched = self._bad is None or not set(self._bad).isdisjoint(pages.host.tolist())
        if (part.pool, part.layer) == self._fail_on and touched:
            self._broken = True
            raise OSError(f"the bus broke at {part.pool} layer {part.layer}")

    def fence(self) -> Mark:
        return self._inner.fence()

    def session(
        self, kind: JobKind, pages: Mapping[Component, Pages], after: Mark
    ) -> AbstractContextManager[None]:
        return self._inner.session(kind, pages, after)

    def mark(self) -> Mark:
        return self._inner.mark()

    def wait(self, mark: Mark) -> None:
        self._inner.wait(mark)

    def passed(self, mark: Mark) -> bool:
        return self._inner.passed(mark)
