"""The frozen description of a model's pools, and the identity derived from it.

Decides which pools a family has, how many bytes a page of each takes, and the model fingerprint.
Leaves to others where the bytes live (tiers) and which boundaries are acceptable (boundary).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from hicache.errors import SpecError
from hicache.types import Component

OBJECT_LAYOUT = 1  # bumped when the canonical order of bytes in an object changes


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool: the memory of a component or of one of its sidecars.

    A page of a layer is an array of shape (rows_per_page, *row_shape) of `dtype`; for MAMBA a
    "page" is one state and rows_per_page is 1. A compressed pool has one row per `ratio` tokens,
    in the page that completes them; where that is not every page, other pages have none.
    """

    name: str
    num_layers: int
    row_shape: tuple[int, ...]
    dtype: str  # a numpy/torch name: float32, bfloat16, float16, uint8, int8
    rows_per_page: int
    ratio: int = 1  # tokens that a row stands for
    # Compressed pools whose unfinished groups this holds, as of the page's end.
    state_of: tuple[str, ...] = ()
    # Of a state: groups reach back into the one before, so it is needed at their ends too.
    overlap: bool = False
    at: tuple[int, ...] = ()  # the model layer that reads each layer; default: see ModelSpec.readers

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"pool {self.name}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}")
        if min((self.num_layers, self.rows_per_page, *self.row_shape)) < 1:
            raise SpecError(f"pool {self.name}: layers, rows and shape must be positive")
        if self.ratio < 1:
            raise SpecError(f"pool {self.name}: a row stands for at least one token, not {self.ratio}")
        if self.state_of and self.ratio > 1:
            raise SpecError(f"pool {self.name}: a state has no compression ratio of its own")
        if self.overlap and not self.state_of:
            raise SpecError(f"pool {self.name}: `overlap` speaks of a state, and it is the state of no pool")
        if self.at and (len(self.at) != self.num_layers or list(self.at) != sorted(self.at)):
            raise SpecError(
                f"pool {self.name}: `at` names the model layer of each of its {self.num_layers} layers, "
                f"ascending, not {self.at}"
            )

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
    """One component and its family: `pools[0]` is the component's own, the rest are sidecars.

    A `logical` component has slots but no bytes of its own: all its pools are sidecars.
    """

    component: Component
    pools: tuple[PoolSpec, ...]
    window: int = 0  # tokens; SWA only
    logical: bool = False
    islands: bool = False  # SWA only: windows are kept where a path may be resumed, other SWA is given back

    def __post_init__(self) -> None:
        if not self.pools:
            raise SpecError(f"{self.component.name}: a component needs at least one pool")
        if (self.component is Component.SWA) != (self.window > 0):
            raise SpecError(f"{self.component.name}: window={self.window}; exactly SWA has a positive window")
        if self.own_layers and self.pools[0].ratio > 1:
            raise SpecError(
                f"{self.component.name}: its own pool {self.pools[0].name} has a compression ratio; only "
                "sidecars may (make the component logical if it has nothing else)"
            )
        if self.component is Component.MAMBA and any(pool.ratio > 1 for pool in self.pools):
            raise SpecError("MAMBA: a state is of one token, its sidecars have no compression ratio")
        if self.islands and self.component is not Component.SWA:
            raise SpecError(f"{self.component.name}: islands are of SWA only")

    @property
    def own_layers(self) -> int:
        """Layers of the component's own pool; 0 if it is logical."""
        return 0 if self.logical else self.pools[0].num_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the whole family in memory; an object may lack some of it."""
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
            order = [c.component for c in self.components for _ in range(c.own_layers)]
            object.__setattr__(self, "layers", tuple(order))
        if self.page_size < 1:
            raise SpecError(f"page size {self.page_size} must be positive")
        self._check_components()
        names = [p.name for c in self.components for p in c.pools]
        if len(set(names)) != len(names):
            raise SpecError(f"pool names must be distinct: {names}")
        for c in self.components:
            for pool in c.pools:
                self._check_sidecar(pool)

    def _check_components(self) -> None:
        kinds = [c.component for c in self.components]
        if Component.FULL not in kinds:
            raise SpecError("a model needs a FULL component")
        if len(set(kinds)) != len(kinds) or kinds != sorted(kinds):
            raise SpecError(f"components must be distinct and in order FULL, SWA, MAMBA, not {kinds}")
        for c in self.components:
            if self.layers.count(c.component) != c.own_layers:
                raise SpecError(
                    f"{c.component.name}: {c.own_layers} pool layers, "
                    f"but {self.layers.count(c.component)} model layers use it"
                )
        if not self.layers:
            raise SpecError("a model needs at least one layer, and logical components have none")

    def _check_sidecar(self, pool: PoolSpec) -> None:
        if pool.ratio > 1 and self.page_size % pool.ratio and pool.ratio % self.page_size:
            raise SpecError(
                f"pool {pool.name}: {pool.ratio} tokens a row and pages of {self.page_size}: one must divide "
                "the other, or a row would belong to no page; choose another page size"
            )
        rows = max(1, self.page_size // pool.ratio)
        if pool.ratio > 1 and pool.rows_per_page != rows:
            raise SpecError(f"pool {pool.name}: {pool.rows_per_page} rows a page, its ratio makes {rows}")
        for name in pool.state_of:
            if self._ratios.get(name, 1) == 1:
                raise SpecError(f"pool {pool.name}: holds the state of {name!r}, which is no compressed pool")
        if pool.at and not 0 <= pool.at[0] <= pool.at[-1] < len(self.layers):
            raise SpecError(
                f"pool {pool.name}: layers {pool.at} are not all of the {len(self.layers)} there are"
            )

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

    @property
    def islands(self) -> bool:
        """Whether SWA is kept at places only."""
        swa = self.get(Component.SWA)
        return swa is not None and swa.islands

    @cached_property
    def align_pages(self) -> int:
        """Pages between the boundaries that compressed pools allow: those where every group ends.

        A pool whose unfinished group some state holds allows them all.
        """
        pools = [pool for c in self.components for pool in c.pools]
        restored = {name for pool in pools for name in pool.state_of}
        return self._pages_of([pool.ratio for pool in pools if pool.name not in restored])

    @cached_property
    def _ratios(self) -> Mapping[str, int]:
        """Tokens a row, by pool."""
        return {pool.name: pool.ratio for c in self.components for pool in c.pools}

    def _pages_of(self, ratios: Iterable[int]) -> int:
        return math.lcm(*(ratio // self.page_size for ratio in ratios if ratio > self.page_size))

    @cached_property
    def periods(self) -> Mapping[Component, int]:
        """After how many pages the parts of a component's objects repeat; 1 if all have the same."""
        return {
            c.component: self._pages_of(
                [*(p.ratio for p in c.pools), *(self._ratios[name] for p in c.pools for name in p.state_of)]
            )
            for c in self.components
        }

    def phase(self, component: Component, position: int) -> int:
        """Which kind of object a page (MAMBA: the state at a boundary) has; an argument of absent()."""
        return (position - (component is Component.MAMBA)) % self.periods[component]

    def absent(self, component: Component, phase: int) -> frozenset[str]:
        """Names of a family's pools that have nothing for pages of this phase."""
        end = (phase + 1) * self.page_size  # which groups have ended there repeats with the period
        absent, ratios = set(), self._ratios
        for pool in self[component].pools:
            if pool.ratio > self.page_size and end % pool.ratio:
                absent.add(pool.name)  # its group goes on
            if pool.state_of and not pool.overlap and not any(end % ratios[name] for name in pool.state_of):
                absent.add(pool.name)  # nothing is unfinished
        return frozenset(absent)

    def object_bytes(self, component: Component, phase: int = 0) -> int:
        """Bytes of a family's parts in an object of this phase."""
        absent = self.absent(component, phase)
        return sum(pool.page_bytes for pool in self[component].pools if pool.name not in absent)

    def readers(self, component: Component, pool: PoolSpec) -> tuple[int, ...]:
        """The model layer that first reads each layer of a pool.

        As the pool says; else, with as many layers as its component's own, theirs; else the first.
        """
        own = [i for i, used in enumerate(self.layers) if used is component]
        if pool.at:
            return pool.at
        return tuple(own) if pool.num_layers == len(own) else (own[0] if own else 0,) * pool.num_layers

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over everything that decides the bytes of a page."""
        identity = {"layout": OBJECT_LAYOUT, **asdict(self)}
        for component in identity["components"]:
            del component["islands"]  # which pages are kept, not what is in them
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
