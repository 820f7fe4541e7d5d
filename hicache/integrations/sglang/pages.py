"""Pages of SGLang's host pools as bytes in one canonical order, whatever the host layout.

A part is one array of a pool: K, V, a state. Its page has the order layer, row, and the rest of a row.
Pools of a kind that is not known here are taken whole, in their own order, and that order then names
the part: replicas with another layout miss instead of loading it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.integrations.sglang.contract import HostPool, Refused
from hicache.spec import DTYPE_BYTES, PoolSpec

Bytes = npt.NDArray[np.uint8]

PAGED_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class PoolPages(ABC):
    """One host pool. Methods may be called from any thread on pages that SGLang has given to the caller."""

    specs: tuple[PoolSpec, ...]  # one per part; none for a pool without bytes
    page_size: int  # tokens, or 1 for states
    canonical = True  # False: the bytes are in the order of the host layout

    @abstractmethod
    def read(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Copy the page that begins at token `index` out, one buffer per part."""

    @abstractmethod
    def write(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Copy one buffer per part into the page that begins at token `index`."""

    @abstractmethod
    def flat_parts(self, page: torch.Tensor) -> Sequence[Bytes]:
        """Return views of a flat page, as SGLang's calls without host indices have it, one per part."""


class StridedPages(PoolPages):
    """Arrays whose pages are views: nothing is copied but the page itself."""

    def __init__(
        self,
        page_size: int,
        parts: Sequence[tuple[PoolSpec, Bytes]],
        flat: Callable[[Bytes], Sequence[Bytes]] | None,
    ) -> None:
        """`parts` have the shape (pages, layers, rows, ...); `flat` splits the bytes of a flat page."""
        self.page_size = page_size
        self.specs = tuple(spec for spec, _ in parts)
        self._parts = [array for _, array in parts]
        self.flat = flat

    def read(self, index: int, buffers: Sequence[memoryview]) -> None:
        page = index // self.page_size
        for part, buffer in zip(self._parts, buffers, strict=True):
            np.copyto(np.frombuffer(buffer, np.uint8).reshape(part.shape[1:]), part[page])

    def write(self, index: int, buffers: Sequence[memoryview]) -> None:
        page = index // self.page_size
        for part, buffer in zip(self._parts, buffers, strict=True):
            np.copyto(part[page], np.frombuffer(buffer, np.uint8).reshape(part.shape[1:]))

    def flat_parts(self, page: torch.Tensor) -> Sequence[Bytes]:
        if self.flat is None:
            raise Refused('this pool has no flat pages; add "interface_v1": 1 to the extra config')
        return self.flat(_flat_bytes(page))


class WholePages(PoolPages):
    """A pool of unknown make, through its own flat pages, in the order of its host layout."""

    canonical = False

    def __init__(self, name: str, pool: HostPool) -> None:
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._pool = pool
        self._lock = threading.Lock()  # guards the scratch page
        self._scratch = pool.get_dummy_flat_data_page()
        size = _flat_bytes(self._scratch).size
        label = f"{name}@{type(pool).__name__}.{getattr(pool, 'layout', '')}"
        self.specs = (PoolSpec(label, 1, (size,), "uint8", 1),)

    def read(self, index: int, buffers: Sequence[memoryview]) -> None:
        np.frombuffer(buffers[0], np.uint8)[:] = _flat_bytes(self._pool.get_data_page(index, flat=True))

    def write(self, index: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            _flat_bytes(self._scratch)[:] = np.frombuffer(buffers[0], np.uint8)
            self._pool.set_from_flat_data_page(index, self._scratch)

    def flat_parts(self, page: torch.Tensor) -> Sequence[Bytes]:
        return [_flat_bytes(page)]


class NoPages(PoolPages):
    """A pool that only counts pages: the KV anchor of a model that keeps everything in sidecars."""

    specs = ()

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def read(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Nothing to copy."""

    def write(self, index: int, buffers: Sequence[memoryview]) -> None:
        """Nothing to copy."""

    def flat_parts(self, page: torch.Tensor) -> Sequence[Bytes]:
        return []


def open_pool(name: str, pool: HostPool) -> PoolPages:
    """Return the pages of a host pool that SGLang registered under `name`.

    Raises Refused for a pool that offers no way to its pages.
    """
    kinds: dict[str, Callable[[str, Any], PoolPages]] = {
        "LogicalHostPool": lambda _, logical: NoPages(logical.page_size),
        "MHATokenToKVPoolHost": _keys_and_values,
        "AsymmetricMHATokenToKVPoolHost": _keys_and_values,
        "MHATokenToKOnlyPoolHost": _single,
        "MLATokenToKVPoolHost": _single,
        "MambaPoolHost": _states,
        "DSAIndexerPoolHost": _indexer,
    }
    opener = kinds.get(type(pool).__name__)
    try:
        if opener is None or (opener in (_keys_and_values, _single) and pool.layout not in PAGED_LAYOUTS):
            return WholePages(name, pool)
        pages = opener(name, pool)
        _compare(name, pool, pages)
    except NotImplementedError as error:
        raise Refused(f"pool {name} ({type(pool).__name__}, layout {pool.layout}): {error}") from error
    return pages


def _keys_and_values(name: str, pool: Any) -> PoolPages:
    """Keys and values in equally laid out arrays; asymmetric heads have no flat pages."""
    arrays = {f"{name}.k": pool.k_buffer, f"{name}.v": pool.v_buffer}
    halves = [_paged(_bytes(tensor), pool.layout, pool.page_size) for tensor in arrays.values()]
    parts = [
        (_spec(part, tensor, half), half) for (part, tensor), half in zip(arrays.items(), halves, strict=True)
    ]
    if type(pool).__name__ != "MHATokenToKVPoolHost":
        return StridedPages(pool.page_size, parts, None)
    shape = _page_shape(_bytes(pool.k_buffer).shape, pool.layout, pool.page_size)

    def flat(page: Bytes) -> Sequence[Bytes]:
        return [_paged(half, pool.layout, pool.page_size)[0] for half in page.reshape(2, *shape)]

    return StridedPages(pool.page_size, parts, flat)


def _single(name: str, pool: Any) -> PoolPages:
    """One array: latent KV, or keys alone."""
    whole = _bytes(pool.kv_buffer)
    shape = _page_shape(whole.shape, pool.layout, pool.page_size)
    array = _paged(whole, pool.layout, pool.page_size)

    def flat(page: Bytes) -> Sequence[Bytes]:
        return [_paged(page.reshape(shape), pool.layout, pool.page_size)[0]]

    return StridedPages(pool.page_size, [(_spec(name, pool.kv_buffer, array), array)], flat)


def _states(name: str, pool: Any) -> PoolPages:
    """Recurrent states: a page is one state, each array layer by layer in every layout."""
    tensors = {f"{name}.temporal": pool.temporal_buffer}
    tensors |= {f"{name}.conv{i}": tensor for i, tensor in enumerate(pool.conv_buffer)}
    parts = []
    for part, tensor in tensors.items():
        if not tensor.numel():
            continue
        array = _bytes(tensor)
        paged = array if pool.layout != "layer_first" else np.moveaxis(array, 0, 1)[:, :, None]
        parts.append((_spec(part, tensor, paged), paged))
    for i, tensor in enumerate(pool.slot_state_buffers):
        array = _bytes(tensor)
        paged = array.reshape(array.shape[0], 1, 1, -1)
        parts.append((_spec(f"{name}.slot{i}", tensor, paged), paged))
    return StridedPages(1, parts, None)


def _indexer(name: str, pool: Any) -> PoolPages:
    """Indexer keys with their scales, packed by page and layer."""
    array = _bytes(pool.index_k_with_scale_buffer)
    paged = np.moveaxis(array, 0, 1) if pool.layout == "layer_first" else array[:, :, 0]
    rows = paged[:, :, None]
    return StridedPages(pool.page_size, [(_spec(name, pool.index_k_with_scale_buffer, rows), rows)], None)


def _paged(array: Bytes, layout: str, page_size: int) -> Bytes:
    """View (layers, tokens, ...) or another layout of it as (pages, layers, rows, ...)."""
    if layout == "layer_first":
        layers, tokens, *rest = array.shape
        return np.moveaxis(array.reshape(layers, tokens // page_size, page_size, *rest), 0, 1)
    if layout == "page_first":
        tokens, layers, *rest = array.shape
        return np.swapaxes(array.reshape(tokens // page_size, page_size, layers, *rest), 1, 2)
    if layout == "page_head":
        return array.transpose(0, 3, 2, 1, 4)
    return array


def _page_shape(shape: Sequence[int], layout: str, page_size: int) -> tuple[int, ...]:
    """Return the shape of one page of an array, in the array's own order."""
    if layout == "layer_first":
        return (shape[0], page_size, *shape[2:])
    return (page_size if layout == "page_first" else 1, *shape[1:])


def _spec(name: str, tensor: torch.Tensor, paged: Bytes) -> PoolSpec:
    """Describe a part; a dtype that specs do not have is spelt out in its name, and its bytes counted."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    _, layers, rows, *row = paged.shape
    if dtype not in DTYPE_BYTES:
        return PoolSpec(f"{name}:{dtype}", layers, tuple(row), "uint8", rows)
    return PoolSpec(name, layers, (*row[:-1], row[-1] // tensor.element_size()), dtype, rows)


def _bytes(tensor: torch.Tensor) -> Bytes:
    if not tensor.is_contiguous():
        raise NotImplementedError("its memory is not contiguous")
    array: Bytes = tensor.view(torch.uint8).numpy()
    return array


def _flat_bytes(page: torch.Tensor) -> Bytes:
    array: Bytes = page.contiguous().view(torch.uint8).numpy().reshape(-1)
    return array


def _compare(name: str, pool: HostPool, pages: PoolPages) -> None:
    """Read page 0 both ways where the pool can: a pool that is not laid out as expected is refused."""
    if not isinstance(pages, StridedPages) or pages.flat is None:
        return
    ours = [bytearray(spec.page_bytes) for spec in pages.specs]
    pages.read(0, [memoryview(buffer) for buffer in ours])
    theirs = pages.flat_parts(pool.get_data_page(0, flat=True))
    if any(mine != part.tobytes() for mine, part in zip(ours, theirs, strict=True)):
        raise NotImplementedError("its pages are not laid out as in the tested version of SGLang")
