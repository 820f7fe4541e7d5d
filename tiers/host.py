"""L2: pages in host memory, pinned where a GPU copies from it, in one of three layouts."""

from __future__ import annotations

import enum
import math
import mmap
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import HiCacheError
from hicache.spec import ModelSpec, PoolSpec
from hicache.tiers.layouts import HostLayout, slot_index, word_dtype
from hicache.tiers.pools import POISON, TorchPools
from hicache.types import Component

Rows = npt.NDArray[np.generic]  # [num_rows, words]: a pool seen as rows of machine words


class HostMemory(enum.Enum):
    """What kind of memory host pools take."""

    PLAIN = "plain"
    PINNED = "pinned"  # page-locked and known to CUDA, so that copies run asynchronously at full speed

    @classmethod
    def for_device(cls, device: str | torch.device) -> HostMemory:
        return cls.PINNED if torch.device(device).type == "cuda" else cls.PLAIN


class HostPools(TorchPools):
    """The memory of every component and sidecar on the host: one buffer per pool, touched at once.

    Whatever the layout, read_page and write_page speak the canonical order (layer, row, row_shape).
    Thread-safe as far as callers touch different slots; which slots those are is the cache's to say.
    Copies run outside the interpreter lock.
    """

    def __init__(
        self,
        spec: ModelSpec,
        capacities: Mapping[Component, int],
        layout: HostLayout = HostLayout.LAYER_FIRST,
        memory: HostMemory = HostMemory.PLAIN,
    ) -> None:
        self.memory = memory
        self._locked: list[int] = []
        self._unlock = weakref.finalize(self, _page_unlock, self._locked)
        self._unlock.atexit = False  # CUDA may be gone by then, and so is the memory
        super().__init__(spec, capacities, layout, self._allocate)
        self._rows = {name: self._as_rows(name) for name in self._tensors}

    def _allocate(self, pool: PoolSpec, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # A mapping of its own begins and ends at memory pages, which page-locking and RDMA want. zero_()
        # writes all of them, so the first transfer does not pay for page faults.
        size = math.prod(shape) * dtype.itemsize
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(buffer, dtype=dtype).view(shape).zero_()
        if self.memory is HostMemory.PINNED:
            _page_lock(tensor, pool.name)
            self._locked.append(tensor.data_ptr())
        return tensor

    def _as_rows(self, name: str) -> Rows:
        geometry = self._geometry[name]
        raw = self._tensors[name].view(torch.uint8).numpy()
        return raw.reshape(geometry.num_rows, geometry.row_bytes).view(word_dtype(geometry.row_bytes))

    def rows(self, name: str) -> Rows:
        """Return a pool as [num_rows, words] over the same memory; `geometry` says which row is what."""
        return self._rows[name]

    def read_page(self, component: Component, slot: int, parts: Sequence[memoryview]) -> None:
        """Copy a page of a family into `parts`, one writable buffer of page_bytes per pool.

        An empty buffer leaves its pool out.
        """
        for rows, index, part in self._page_parts(component, slot, parts):
            out = np.frombuffer(part, dtype=rows.dtype).reshape(len(index), rows.shape[1])
            np.take(rows, index, axis=0, out=out, mode="clip")  # clip: 'raise' would copy twice

    def write_page(self, component: Component, slot: int, parts: Sequence[memoryview]) -> None:
        """Copy `parts`, one buffer of page_bytes or none per pool, into a page of a family."""
        for rows, index, part in self._page_parts(component, slot, parts):
            rows[index] = np.frombuffer(part, dtype=rows.dtype).reshape(len(index), rows.shape[1])

    def read_pages(
        self, component: Component, slots: Sequence[int], parts: Sequence[Sequence[memoryview]]
    ) -> None:
        """Copy several pages of one component; `parts[i]` belongs to `slots[i]`."""
        for slot, buffers in zip(slots, parts, strict=True):
            self.read_page(component, slot, buffers)

    def write_pages(
        self, component: Component, slots: Sequence[int], parts: Sequence[Sequence[memoryview]]
    ) -> None:
        """Copy into several pages of one component; `parts[i]` belongs to `slots[i]`."""
        for slot, buffers in zip(slots, parts, strict=True):
            self.write_page(component, slot, buffers)

    def poison(self, component: Component, slots: Sequence[int]) -> None:
        """Fill pages with POISON bytes, so that a reader of a released page is caught."""
        slot_index(slots, self.capacities[component], f"host {component.name}")
        for pool in self.spec[component].pools:
            raw = self._rows[pool.name].view(np.uint8)
            for slot in slots:
                raw[self._geometry[pool.name].page_rows(slot)] = POISON

    def close(self) -> None:
        """Unlock pinned memory; else that happens when the pools go. No transfer may be running."""
        self._unlock()

    def _page_parts(
        self, component: Component, slot: int, parts: Sequence[memoryview]
    ) -> list[tuple[Rows, npt.NDArray[np.int64], memoryview]]:
        slot_index((slot,), self.capacities[component], f"host {component.name}")
        return [
            (self._rows[pool.name], self._geometry[pool.name].page_rows(slot), part)
            for pool, part in zip(self.spec[component].pools, parts, strict=True)
            if len(part)
        ]


def _page_lock(tensor: torch.Tensor, name: str) -> None:
    # Registering keeps the exact size; torch's pinned allocator rounds up to a power of two.
    code = _cuda_runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) != 0:
        raise HiCacheError(
            f"cannot page-lock {tensor.nbytes} bytes for host pool {name} (CUDA error {int(code)}); lower "
            "--hicache-ratio or --hicache-size, or raise the locked-memory limit (ulimit -l)"
        )


def _page_unlock(pointers: list[int]) -> None:
    for pointer in pointers:
        _cuda_runtime().cudaHostUnregister(pointer)
    pointers.clear()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
