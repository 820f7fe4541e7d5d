"""How a pool's pages lie in memory: shapes, and which rows of it hold a layer of a page.

Arithmetic only, no torch. Whatever the layout, a pool is one C-contiguous array; seen as a 2-D
array of equally long rows, any layer of any page is a handful of whole rows of it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError, InvariantViolation
from hicache.spec import PoolSpec

RowIndex = npt.NDArray[np.int64]


class HostLayout(str, enum.Enum):
    """The order of axes of a host pool; names as in SGLang."""

    LAYER_FIRST = "layer_first"  # layer, page, row: what the device uses; a layer's load is a straight copy
    PAGE_FIRST = "page_first"  # page, row, layer: token-major, all layers of a token side by side
    PAGE_FIRST_DIRECT = "page_first_direct"  # page, layer, row: a page is one run of bytes, as in an object

    @classmethod
    def parse(cls, name: str) -> HostLayout:
        """Return the layout called `name`; ConfigError lists what exists."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(layout.value for layout in cls)
            raise ConfigError(f"--hicache-mem-layout {name!r} is unknown; choose one of: {known}") from None


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Where the bytes of (layer, slot) of one pool lie.

    The pool is `num_rows` rows of `row_bytes` bytes; one layer of one page is `rows_per_layer` of
    them. The canonical order of a page is layer, row, row_shape, whatever the layout.
    """

    pool: PoolSpec
    capacity: int  # pages
    layout: HostLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool's tensor."""
        pool = self.pool
        lead = {
            HostLayout.LAYER_FIRST: (pool.num_layers, self.capacity, pool.rows_per_page),
            HostLayout.PAGE_FIRST: (self.capacity, pool.rows_per_page, pool.num_layers),
            HostLayout.PAGE_FIRST_DIRECT: (self.capacity, pool.num_layers, pool.rows_per_page),
        }[self.layout]
        return (*lead, *pool.row_shape)

    @property
    def rows_per_layer(self) -> int:
        return self.pool.rows_per_page if self.layout is HostLayout.PAGE_FIRST else 1

    @property
    def row_bytes(self) -> int:
        return self.pool.layer_page_bytes // self.rows_per_layer

    @property
    def num_rows(self) -> int:
        return self.pool.num_layers * self.capacity * self.rows_per_layer

    @property
    def size_bytes(self) -> int:
        return self.capacity * self.pool.page_bytes

    def layer_rows(self, layer: int, slots: RowIndex) -> RowIndex:
        """Return the rows of one layer of each page of `slots`, page after page."""
        if self.layout is HostLayout.LAYER_FIRST:
            return slots + layer * self.capacity
        if self.layout is HostLayout.PAGE_FIRST_DIRECT:
            return slots * self.pool.num_layers + layer
        rows = np.arange(self.pool.rows_per_page, dtype=np.int64)
        first = slots[:, None] * self.pool.rows_per_page + rows
        return (first * self.pool.num_layers + layer).reshape(-1)

    def page_rows(self, slot: int) -> RowIndex:
        """Return the rows of one page in canonical order: layer after layer."""
        slots = np.array([slot], dtype=np.int64)
        return np.concatenate([self.layer_rows(layer, slots) for layer in range(self.pool.num_layers)])


def word_dtype(*row_bytes: int) -> np.dtype[np.generic]:
    """Return the widest unsigned integer that divides every given row: fewer, larger items to copy."""
    for size in (8, 4, 2):
        if all(n % size == 0 for n in row_bytes):
            return np.dtype(f"u{size}")
    return np.dtype("u1")


def slot_index(slots: Sequence[int], capacity: int, what: str) -> RowIndex:
    """Return slots as an index array; a slot outside the pool raises InvariantViolation."""
    index = np.asarray(slots, dtype=np.int64)
    if index.size and (int(index.min()) < 0 or int(index.max()) >= capacity):
        raise InvariantViolation(f"{what}: slots {index.min()}..{index.max()} outside [0, {capacity})")
    return index
