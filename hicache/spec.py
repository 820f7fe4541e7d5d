"""The frozen description of a model's pools, and the identity derived from it.

Decides which pools a family has, how many bytes a page of each takes, and the model fingerprint.
Leaves to others where the bytes live (tiers) and which boundaries are acceptable (boundary).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from hicache.errors import SpecError
from hicache.types import Component

OBJECT_LAYOUT = 1  # bumped when the canonical order of bytes in an object changes


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool: the memory of a component or of one of its sidecars.

    A page of a layer is an array of shape (rows_per_page, *row_shape) of `dtype`; for MAMBA a
    "page" is one state and rows_per_page is 1.
    """

    name: str
    num_layers: int
    row_shape: tuple[int, ...]
    dtype: str  # a numpy/torch name: float32, bfloat16, float16, uint8, int8
    rows_per_page: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"pool {self.name}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}")
        if min((self.num_layers, self.rows_per_page, *self.row_shape)) < 1:
            raise SpecError(f"pool {self.name}: layers, rows and shape must be positive")

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one layer of one page."""
        size = DTYPE_BYTES[self.dtype] * self.rows_per_page
        for n in self.row_shape:
            size *= n
        return size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers; the canonical order is layer, row, row_shape."""
        return self.layer_page_bytes * self.num_layers


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One component and its family: `pools[0]` is the component's own, the rest are sidecars."""

    component: Component
    pools: tuple[PoolSpec, ...]
    window: int = 0  # tokens; SWA only

    def __post_init__(self) -> None:
        if not self.pools:
            raise SpecError(f"{self.component.name}: a component needs at least one pool")
        if (self.component is Component.SWA) != (self.window > 0):
            raise SpecError(f"{self.component.name}: window={self.window}; exactly SWA has a positive window")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the whole family."""
        return sum(pool.page_bytes for pool in self.pools)


@dataclass(frozen=True)
class ModelSpec:
    """A model as the cache sees it. Invariant: FULL is present; each component at most once."""

    model_id: str
    page_size: int  # tokens
    components: tuple[ComponentSpec, ...]
    weight_version: str = ""
    layers: tuple[Component, ...] = ()  # which component each model layer uses; default: one after the other

    def __post_init__(self) -> None:
        if not self.layers:
            order = [c.component for c in self.components for _ in range(c.pools[0].num_layers)]
            object.__setattr__(self, "layers", tuple(order))
        for c in self.components:
            if self.layers.count(c.component) != c.pools[0].num_layers:
                raise SpecError(
                    f"{c.component.name}: {c.pools[0].num_layers} pool layers, "
                    f"but {self.layers.count(c.component)} model layers use it"
                )
        kinds = [c.component for c in self.components]
        if self.page_size < 1:
            raise SpecError(f"page size {self.page_size} must be positive")
        if Component.FULL not in kinds:
            raise SpecError("a model needs a FULL component")
        if len(set(kinds)) != len(kinds) or kinds != sorted(kinds):
            raise SpecError(f"components must be distinct and in order FULL, SWA, MAMBA, not {kinds}")
        names = [p.name for c in self.components for p in c.pools]
        if len(set(names)) != len(names):
            raise SpecError(f"pool names must be distinct: {names}")

    def get(self, component: Component) -> ComponentSpec | None:
        for c in self.components:
            if c.component is component:
                return c
        return None

    def __getitem__(self, component: Component) -> ComponentSpec:
        found = self.get(component)
        if found is None:
            raise KeyError(component)
        return found

    @property
    def kinds(self) -> tuple[Component, ...]:
        return tuple(c.component for c in self.components)

    @property
    def window(self) -> int:
        """The sliding window in tokens; 0 without SWA."""
        swa = self.get(Component.SWA)
        return swa.window if swa else 0

    @property
    def window_pages(self) -> int:
        """Pages that hold the last `window` tokens before a page boundary."""
        return -(-self.window // self.page_size)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over everything that decides the bytes of a page."""
        identity = {"layout": OBJECT_LAYOUT, **asdict(self)}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
