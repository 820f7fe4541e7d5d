"""Copies between device and host pools: which pieces a model layer needs, and how a CPU moves them.

The CUDA side is in `transfer.cuda_copy`. Both gather the rows of many pages at once, whatever the
host layout, so the interpreter lock is held for a handful of calls per layer only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from hicache.errors import SpecError
from hicache.spec import ModelSpec
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools, Rows
from hicache.tiers.layouts import RowIndex, slot_index
from hicache.transfer.base import JobKind, Move
from hicache.types import Component

Mark = object  # a point in a stream; None where there are no streams

_SCRATCH_BYTES = 2 << 20  # small enough to stay in a core's cache between gather and scatter


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer of one pool, as a piece of work."""

    component: Component
    pool: str
    layer: int


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one component that a job moves: host page `host[i]` is device page `device[i]`."""

    host: RowIndex
    device: RowIndex


def layer_schedule(spec: ModelSpec) -> tuple[tuple[LayerPart, ...], ...]:
    """Return what must be there before each model layer may run: every pool layer that it reads first."""
    schedule: list[list[LayerPart]] = [[] for _ in spec.layers]
    for family in spec.components:
        for pool in family.pools:
            for layer, reader in enumerate(spec.readers(family.component, pool)):
                schedule[reader].append(LayerPart(family.component, pool.name, layer))
    return tuple(map(tuple, schedule))


def check_mirrors(spec: ModelSpec, device: DevicePools, host: HostPools | None) -> None:
    """Refuse a pool that some tier lacks or keeps in another shape: it would not move with its family.

    Raises SpecError naming the tier and the pool.
    """
    wanted = {pool.name: pool for family in spec.components for pool in family.pools}
    for name, tier in (("device", device), ("host", host)):
        if tier is None:
            continue
        held = {pool.name: pool for family in tier.spec.components for pool in family.pools}
        for pool in [*wanted, *held]:
            if wanted.get(pool) == held.get(pool):
                continue
            what = "is of another shape" if pool in wanted and pool in held else "is missing"
            where = f"on the {name}" if pool in wanted else "in the model"
            raise SpecError(
                f"pool {pool} {what} {where}: a family is on a tier whole, or not at all; "
                "build the pools of every tier from one spec"
            )


def gather_pages(
    moves: Sequence[Move], device: DevicePools, host: HostPools, *, kind: JobKind
) -> dict[Component, Pages]:
    """Merge moves per component and check every slot; raises InvariantViolation or ValueError."""
    merged: dict[Component, Pages] = {}
    for component, sources, targets in moves:
        if len(sources) != len(targets):
            raise ValueError(f"{component.name}: {len(sources)} sources but {len(targets)} targets")
        host_slots, device_slots = (sources, targets) if kind is JobKind.LOAD else (targets, sources)
        pages = Pages(
            slot_index(host_slots, host.capacities[component], f"host {component.name}"),
            slot_index(device_slots, device.capacities[component], f"device {component.name}"),
        )
        known = merged.get(component)
        if known is not None:
            pages = Pages(
                np.concatenate((known.host, pages.host)), np.concatenate((known.device, pages.device))
            )
        merged[component] = pages
    return {component: pages for component, pages in merged.items() if len(pages.host)}


class CopyEngine(ABC):
    """Moves pieces of jobs. At most one thread is inside a load session, one inside a write session."""

    @abstractmethod
    def fence(self) -> Mark:
        """Mark what the calling thread has queued on the device so far."""

    @abstractmethod
    def session(
        self, kind: JobKind, pages: Mapping[Component, Pages], after: Mark
    ) -> AbstractContextManager[None]:
        """Enter the stream of a LOAD or WRITE behind `after`; on leaving, all its copies have ended."""

    @abstractmethod
    def load_part(self, part: LayerPart, pages: Pages) -> None:
        """Copy one layer of one pool from host to device pages, inside a load session."""

    @abstractmethod
    def write_part(self, part: LayerPart, pages: Pages) -> None:
        """Copy one layer of one pool from device to host pages, inside a write session."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark what the load session has queued so far."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Make the calling thread's stream wait for a mark."""

    @abstractmethod
    def passed(self, mark: Mark) -> bool:
        """True once everything before a mark has happened."""


class CpuCopyEngine(CopyEngine):
    """Device pools in host memory: a copy has happened when the call returns, so marks are None."""

    def __init__(self, device: DevicePools, host: HostPools | None) -> None:
        if device.device.type != "cpu":
            raise SpecError(f"device pools on {device.device} need a CUDA copy engine")
        self._device = device
        self._host = host
        self._rows = {} if host is None else _device_rows(device, host)
        self._load_scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
        self._write_scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)

    def fence(self) -> Mark:
        return None

    def session(
        self, kind: JobKind, pages: Mapping[Component, Pages], after: Mark
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def load_part(self, part: LayerPart, pages: Pages) -> None:
        (host, host_rows), (device, device_rows) = self._both(part, pages)
        self._load_scratch = _move_rows(
            device, device_rows, host, host_rows, scratch=self._load_scratch, pages=len(pages.host)
        )

    def write_part(self, part: LayerPart, pages: Pages) -> None:
        (host, host_rows), (device, device_rows) = self._both(part, pages)
        self._write_scratch = _move_rows(
            host, host_rows, device, device_rows, scratch=self._write_scratch, pages=len(pages.host)
        )

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        return

    def passed(self, mark: Mark) -> bool:
        return True

    def _both(self, part: LayerPart, pages: Pages) -> tuple[tuple[Rows, RowIndex], tuple[Rows, RowIndex]]:
        assert self._host is not None
        host_rows = self._host.geometry(part.pool).layer_rows(part.layer, pages.host)
        device_rows = self._device.geometry(part.pool).layer_rows(part.layer, pages.device)
        return (self._host.rows(part.pool), host_rows), (self._rows[part.pool], device_rows)


def _device_rows(device: DevicePools, host: HostPools) -> dict[str, Rows]:
    """See each device pool as rows of the words its host pool is made of."""
    rows = {}
    for family in device.spec.components:
        for pool in family.pools:
            geometry = device.geometry(pool.name)
            raw = device.pool(pool.name).view(torch.uint8).numpy()
            raw = raw.reshape(geometry.num_rows, geometry.row_bytes)
            rows[pool.name] = raw.view(host.rows(pool.name).dtype)
    return rows


def _move_rows(
    target: Rows,
    target_rows: RowIndex,
    source: Rows,
    source_rows: RowIndex,
    *,
    scratch: np.ndarray[tuple[int], np.dtype[np.uint8]],
    pages: int,
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Copy rows through `scratch`, a chunk of pages at a time; returns the scratch, grown if it had to be.

    Rows of the two sides may differ in length; a page is equally many bytes on both.
    """
    per_source, per_target = len(source_rows) // pages, len(target_rows) // pages
    width = source.shape[1] * per_source  # words of one layer of one page
    page_bytes = width * source.itemsize
    if scratch.nbytes < page_bytes:
        scratch = np.empty(page_bytes, dtype=np.uint8)
    words = scratch[: scratch.nbytes // source.itemsize * source.itemsize].view(source.dtype)
    chunk = len(words) // width
    for start in range(0, pages, chunk):
        end = min(start + chunk, pages)
        piece = words[: (end - start) * width]
        rows = source_rows[start * per_source : end * per_source]
        # mode='clip' because 'raise' would go through a second buffer; the slots were checked before.
        np.take(source, rows, axis=0, out=piece.reshape(len(rows), source.shape[1]), mode="clip")
        rows = target_rows[start * per_target : end * per_target]
        target[rows] = piece.reshape(len(rows), target.shape[1])
    return scratch
