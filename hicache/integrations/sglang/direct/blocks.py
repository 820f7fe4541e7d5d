"""Pages in host memory, layer by layer, and their copies to and from device pools.

A page's layer is then one contiguous run beside those of its neighbours, so that a layer of many pages is
one copy. Decides how bytes move; which and when is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hicache.integrations.sglang.contract import Refused
from hicache.integrations.sglang.direct.pools import Part
from hicache.spec import PoolSpec

KINDS = ("cpu", "cuda")


class Block:
    """Room for `pages` pages of one family: per part an array of (layers, pages, bytes).

    Whoever has a slot may call put and take on it from any thread.
    """

    def __init__(self, specs: Sequence[PoolSpec], pages: int, *, pinned: bool) -> None:
        self.pages = pages
        self.nbytes = pages * sum(spec.page_bytes for spec in specs)
        self.parts = [
            torch.empty((spec.num_layers, pages, spec.layer_page_bytes), dtype=torch.uint8, pin_memory=pinned)
            for spec in specs
        ]
        self._arrays = [part.numpy() for part in self.parts]

    def put(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Copy a page in, one buffer per part in canonical order."""
        for array, part in zip(self._arrays, parts, strict=True):
            array[:, slot] = np.frombuffer(part, np.uint8).reshape(array.shape[0], -1)

    def take(self, slot: int, parts: Sequence[memoryview]) -> None:
        """Copy a page out."""
        for array, part in zip(self._arrays, parts, strict=True):
            np.frombuffer(part, np.uint8).reshape(array.shape[0], -1)[:] = array[:, slot]


class Copier(Protocol):
    """Copies layers of pages between blocks and device pools, on one thread, in order."""

    def wait_for(self, ready: Sequence[Any]) -> None:
        """Let what follows begin only after these events of SGLang's."""

    def rows(self, pages: Sequence[int]) -> Any:
        """Prepare page numbers of a device pool for many copies."""

    def load(self, part: Part, layer: int, rows: Any, source: torch.Tensor) -> None:
        """Copy (pages, bytes) to the rows of a part's layer."""

    def store(self, part: Part, layer: int, rows: Any, target: torch.Tensor) -> None:
        """Copy the rows of a part's layer to (pages, bytes)."""

    def mark(self) -> Any:
        """Return an event behind all copies so far, or None when they have been made already."""

    def settle(self) -> None:
        """Return when all copies so far have been made."""


def make_copier(device: torch.device) -> Copier:
    """Raises Refused for a kind of device that has no copier."""
    if device.type not in KINDS:
        raise Refused(
            f"device pools on {device.type!r} are not supported; the linker serves {', '.join(KINDS)}"
        )
    return CpuCopier() if device.type == "cpu" else CudaCopier(device)


class CpuCopier:
    """Device pools in ordinary memory; a copy has been made when the call returns."""

    def wait_for(self, ready: Sequence[Any]) -> None:
        for event in ready:
            event.synchronize()

    def rows(self, pages: Sequence[int]) -> Any:
        return np.asarray(pages, dtype=np.int64)

    def load(self, part: Part, layer: int, rows: Any, source: torch.Tensor) -> None:
        _units(part.layers[layer])[rows] = _units(source)

    def store(self, part: Part, layer: int, rows: Any, target: torch.Tensor) -> None:
        _units(target)[:] = _units(part.layers[layer])[rows]

    def mark(self) -> Any:
        return None

    def settle(self) -> None:
        """Nothing is under way."""


def _units(pages: torch.Tensor) -> np.ndarray[Any, Any]:
    """View (pages, bytes) as one opaque element a page: numpy then moves pages, not bytes."""
    array: np.ndarray[Any, Any] = pages.numpy()
    return array.view(np.dtype((np.void, array.shape[1])))[:, 0]


class CudaCopier:
    """A stream of its own. Blocks are pinned, so that copies run beside the thread that orders them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait_for(self, ready: Sequence[Any]) -> None:
        for event in ready:
            self._stream.wait_event(event)

    def rows(self, pages: Sequence[int]) -> Any:
        with torch.cuda.stream(self._stream):
            return torch.tensor(list(pages), dtype=torch.int64).to(self._device)

    def load(self, part: Part, layer: int, rows: Any, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            scratch = source.to(self._device, non_blocking=True)
            _wide(part.layers[layer]).index_copy_(0, rows, _wide(scratch))

    def store(self, part: Part, layer: int, rows: Any, target: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(_wide(part.layers[layer]).index_select(0, rows).view(torch.uint8), non_blocking=True)

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def settle(self) -> None:
        self._stream.synchronize()


def _wide(pages: torch.Tensor) -> torch.Tensor:
    """View bytes as wider numbers where that is possible: the same copy in fewer elements."""
    return pages.view(torch.int64) if pages.shape[1] % 8 == 0 and pages.data_ptr() % 8 == 0 else pages
