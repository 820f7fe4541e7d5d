"""Copies between pinned host pools and a CUDA device, on streams of their own.

Pages that lie side by side on both ends go as one copy; scattered ones are gathered into pinned
staging, cross the bus in one piece, and are scattered on the device by a kernel. All of it but the
streams themselves also runs on the CPU, where tests check it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.tiers.layouts import RowIndex
from hicache.transfer.base import JobKind
from hicache.transfer.copy_engine import CopyEngine, LayerPart, Mark, Pages
from hicache.types import Component

_STAGING_BYTES = 8 << 20
_NUM_STAGING = 2  # one is filled while the other crosses the bus
_DIRECT_RUN_BYTES = 256 << 10  # from this mean length on, separate copies beat gathering on the CPU


class Streams(ABC):
    """What of CUDA the copy engine needs; marks are events."""

    pinned: bool

    @abstractmethod
    def fence(self) -> Mark:
        """Mark what the calling thread's current stream holds so far."""

    @abstractmethod
    def enter(self, kind: JobKind, after: Mark) -> AbstractContextManager[None]:
        """Make the stream of a kind current, behind `after`; its work has ended on leaving."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Make the calling thread's current stream wait for a mark, without blocking the thread."""

    @abstractmethod
    def passed(self, mark: Mark) -> bool:
        """True once a mark has happened."""

    @abstractmethod
    def block(self, mark: Mark) -> None:
        """Block the calling thread until a mark has happened."""


class NoStreams(Streams):
    """Everything has happened when the call returns: a CPU standing in for the device."""

    pinned = False

    def fence(self) -> Mark:
        return None

    def enter(self, kind: JobKind, after: Mark) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, mark: Mark) -> None:
        return

    def passed(self, mark: Mark) -> bool:
        return True

    def block(self, mark: Mark) -> None:
        return


class CudaStreams(Streams):
    """One stream for loads, one for writes, on one device."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            JobKind.LOAD: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            JobKind.WRITE: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }

    def fence(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def enter(self, kind: JobKind, after: Mark) -> Iterator[None]:
        stream = self._streams[kind]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            assert isinstance(after, torch.cuda.Event)
            stream.wait_event(after)
            try:
                yield
            finally:
                stream.synchronize()

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def passed(self, mark: Mark) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def block(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()


class _Staging:
    """A pinned buffer and its twin on the device. Invariant: `busy` is behind the last use of either."""

    def __init__(self, size: int, device: torch.device, *, pinned: bool) -> None:
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.device = torch.empty(size, dtype=torch.uint8, device=device)
        self.busy: Mark = None


class StagedCopyEngine(CopyEngine):
    """Serves one load session and one write session at a time, each with staging of its own."""

    def __init__(
        self,
        device: DevicePools,
        host: HostPools | None,
        streams: Streams,
        *,
        staging_bytes: int = _STAGING_BYTES,
        direct_run_bytes: int = _DIRECT_RUN_BYTES,
    ) -> None:
        self._device = device
        self._host = host
        self._streams = streams
        self._direct_run_bytes = direct_run_bytes
        largest = max(pool.layer_page_bytes for c in device.spec.components for pool in c.pools)
        size = max(staging_bytes, largest)
        kinds = () if host is None else (JobKind.LOAD, JobKind.WRITE)
        self._staging = {
            kind: [_Staging(size, device.device, pinned=streams.pinned) for _ in range(_NUM_STAGING)]
            for kind in kinds
        }
        self._slots: dict[JobKind, dict[Component, torch.Tensor]] = {}  # device slots, on the device

    def fence(self) -> Mark:
        return self._streams.fence()

    @contextmanager
    def session(self, kind: JobKind, pages: Mapping[Component, Pages], after: Mark) -> Iterator[None]:
        with self._streams.enter(kind, after):
            self._slots[kind] = {
                c: torch.from_numpy(p.device).to(self._device.device) for c, p in pages.items()
            }
            yield

    def mark(self) -> Mark:
        return self._streams.fence()

    def wait(self, mark: Mark) -> None:
        self._streams.wait(mark)

    def passed(self, mark: Mark) -> bool:
        return self._streams.passed(mark)

    def load_part(self, part: LayerPart, pages: Pages) -> None:
        host_rows, runs = self._plan(part, pages)
        if runs is not None:
            target, source = self._as_rows(part)
            for at, origin, length in runs:
                target[at : at + length].copy_(source[origin : origin + length], non_blocking=True)
            return
        assert self._host is not None
        rows = self._host.rows(part.pool)
        layer = self._layer(part)
        slots = self._slots[JobKind.LOAD][part.component]
        per_page = len(host_rows) // len(pages.host)
        for turn, (start, end) in enumerate(self._chunks(part, pages)):
            staging = self._staging[JobKind.LOAD][turn % _NUM_STAGING]
            self._release(staging)
            size = (end - start) * layer[0].nbytes
            picked = host_rows[start * per_page : end * per_page]
            out = staging.host[:size].numpy().view(rows.dtype).reshape(len(picked), -1)
            np.take(rows, picked, axis=0, out=out, mode="clip")
            staging.device[:size].copy_(staging.host[:size], non_blocking=True)
            fresh = staging.device[:size].view(layer.dtype).view(end - start, -1)
            layer.index_copy_(0, slots[start:end], fresh)
            staging.busy = self._streams.fence()

    def write_part(self, part: LayerPart, pages: Pages) -> None:
        host_rows, runs = self._plan(part, pages)
        if runs is not None:
            source, target = self._as_rows(part)
            for origin, at, length in runs:
                target[at : at + length].copy_(source[origin : origin + length], non_blocking=True)
            return
        layer = self._layer(part)
        slots = self._slots[JobKind.WRITE][part.component]
        per_page = len(host_rows) // len(pages.host)
        crossing: list[tuple[_Staging, RowIndex, int]] = []
        for turn, (start, end) in enumerate(self._chunks(part, pages)):
            if len(crossing) == _NUM_STAGING:
                self._land(part, *crossing.pop(0))
            staging = self._staging[JobKind.WRITE][turn % _NUM_STAGING]
            size = (end - start) * layer[0].nbytes
            gathered = staging.device[:size].view(layer.dtype).view(end - start, -1)
            torch.index_select(layer, 0, slots[start:end], out=gathered)
            staging.host[:size].copy_(staging.device[:size], non_blocking=True)
            staging.busy = self._streams.fence()
            crossing.append((staging, host_rows[start * per_page : end * per_page], size))
        for landing in crossing:
            self._land(part, *landing)

    def _land(self, part: LayerPart, staging: _Staging, host_rows: RowIndex, size: int) -> None:
        """Scatter what a write brought across into its host pages."""
        assert self._host is not None
        self._release(staging)
        rows = self._host.rows(part.pool)
        rows[host_rows] = staging.host[:size].numpy().view(rows.dtype).reshape(len(host_rows), -1)

    def _release(self, staging: _Staging) -> None:
        if staging.busy is not None:
            self._streams.block(staging.busy)
            staging.busy = None

    def _plan(self, part: LayerPart, pages: Pages) -> tuple[RowIndex, list[tuple[int, int, int]] | None]:
        """Return the host rows, and (device row, host row, rows) of direct copies if those are worth it."""
        assert self._host is not None
        geometry = self._host.geometry(part.pool)
        host_rows = geometry.layer_rows(part.layer, pages.host)
        device_rows = self._device.geometry(part.pool).layer_rows(part.layer, pages.device)
        if len(host_rows) != len(device_rows):
            return host_rows, None  # a page's layer is scattered on the host
        breaks = np.flatnonzero((np.diff(host_rows) != 1) | (np.diff(device_rows) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        if len(host_rows) * geometry.row_bytes < self._direct_run_bytes * len(starts):
            return host_rows, None
        lengths = np.diff(np.concatenate((starts, [len(host_rows)])))
        runs = zip(device_rows[starts].tolist(), host_rows[starts].tolist(), lengths.tolist(), strict=True)
        return host_rows, list(runs)

    def _chunks(self, part: LayerPart, pages: Pages) -> Iterator[tuple[int, int]]:
        kind = next(iter(self._staging))
        step = self._staging[kind][0].host.nbytes // self._layer(part)[0].nbytes
        for start in range(0, len(pages.host), step):
            yield start, min(start + step, len(pages.host))

    def _layer(self, part: LayerPart) -> torch.Tensor:
        """One layer of a device pool as (capacity, elements of a page)."""
        return self._device.pool(part.pool)[part.layer].flatten(1)

    def _as_rows(self, part: LayerPart) -> tuple[torch.Tensor, torch.Tensor]:
        """A pool on device and host, each as the rows that its geometry counts."""
        assert self._host is not None
        pools = ((self._device.pool(part.pool), self._device), (self._host.pool(part.pool), self._host))
        device, host = (tensor.view(tier.geometry(part.pool).num_rows, -1) for tensor, tier in pools)
        return device, host
