"""Device pools as pages of bytes: which buffers make the parts of an object, and which layer needs each.

A part is one array of a pool, as in objects that come from host pools: K, V, a state. Replicas with a host
tier and replicas without one share objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.integrations.sglang.contract import Refused
from hicache.spec import DTYPE_BYTES, PoolSpec
from hicache.types import Component


@dataclass(frozen=True, slots=True)
class Part:
    """The buffers of one array. Invariant: `layers[i]` holds layer i of the part and is due at `due[i]`."""

    spec: PoolSpec
    layers: tuple[torch.Tensor, ...]  # uint8, (pages, bytes of a page in this layer), on the device
    due: tuple[int, ...]  # the transfer layer whose gate waits for it


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One device pool. `pages_of` turns SGLang's indices into page numbers; it may raise ValueError."""

    name: str
    page_size: int  # tokens, or 1 for states
    parts: tuple[Part, ...]
    pages_of: Callable[[torch.Tensor], Sequence[int]]

    @property
    def specs(self) -> tuple[PoolSpec, ...]:
        return tuple(part.spec for part in self.parts)


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """All pools of a model. Invariant: every `due` of its parts is below `num_layers`."""

    pools: Mapping[str, DevicePool]
    num_layers: int
    device: torch.device


Layout = Mapping[Component, Sequence[DevicePool]]
"""The pools of each family, lead first, in the order of the parts of its objects."""


def make_part(name: str, buffers: Sequence[torch.Tensor], due: Sequence[int], *, rows_per_page: int) -> Part:
    """Describe equally shaped buffers of (rows, ...), one per layer. Raises Refused unless contiguous."""
    first = buffers[0]
    shape = tuple(int(n) for n in first.shape[1:]) or (1,)
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        # Specs lack it: it is spelt out in the name, and its bytes are counted.
        name, dtype, shape = f"{name}:{dtype}", "uint8", (*shape[:-1], shape[-1] * first.element_size())
    spec = PoolSpec(name, len(buffers), shape, dtype, rows_per_page)
    return Part(spec, tuple(_as_pages(name, buffer, rows_per_page) for buffer in buffers), tuple(due))


def _as_pages(name: str, buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise Refused(f"the memory of pool {name} is not contiguous; serve without the feature that needs it")
    pages = buffer.shape[0] // rows_per_page
    rows = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
    return rows[: pages * rows_per_page].reshape(pages, -1)


def alike(buffers: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Split buffers into runs of one shape and dtype."""
    start = 0
    for i in range(1, len(buffers) + 1):
        if i == len(buffers) or _kind(buffers[i]) != _kind(buffers[start]):
            yield slice(start, i)
            start = i


def _kind(buffer: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return buffer.dtype, buffer.shape[1:]
