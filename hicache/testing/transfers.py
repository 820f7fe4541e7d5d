"""A transfer executor over small hybrid pools and a store that fails on cue, driven one job at a time."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from hicache.clock import ManualClock
from hicache.spec import ModelSpec
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import FaultyBackend
from hicache.testing.pools import FULL, MAMBA, SWA, fill, hybrid_spec, page_bytes
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.tiers.layouts import HostLayout
from hicache.transfer.base import Done, JobId, Move, ObjectRef
from hicache.transfer.executor import TransferExecutor
from hicache.transfer.storage_io import StorageLimits

CAPACITIES = {FULL: 32, SWA: 16, MAMBA: 8}


def faulty_memory() -> FaultyBackend:
    """Return an empty memory store that does nothing wrong yet."""
    return FaultyBackend(MemoryBackend(capacity_bytes=64 << 20))


class TransferWorld:
    """Host pages hold seeded bytes from the start. The clock is hand-cranked; batches have three objects.

    A context manager: leaving closes the executor.
    """

    def __init__(
        self,
        store: StorageBackend | None,
        *,
        spec: ModelSpec | None = None,
        layout: HostLayout = HostLayout.LAYER_FIRST,
        limits: StorageLimits | None = None,
        shard: str = "0of1",
        readers: int = 2,
        synchronous: bool = False,
        close_timeout_s: float = 5.0,
    ) -> None:
        self.spec = spec if spec is not None else hybrid_spec(16)
        self.clock = ManualClock()
        device = DevicePools(self.spec, CAPACITIES)
        fill(device, 7)
        self.host = HostPools(self.spec, CAPACITIES, layout)
        self.executor = TransferExecutor(
            self.spec,
            device,
            self.host,
            storage=store,
            shard=shard,
            clock=self.clock,
            limits=limits if limits is not None else StorageLimits(batch_objects=3),
            readers=readers,
            synchronous=synchronous,
            close_timeout_s=close_timeout_s,
        )
        self._jobs = 0
        everything = [
            Move(c, array("i", range(n)), array("i", range(n)))
            for c, n in CAPACITIES.items()
            if c in self.spec.kinds
        ]
        self.executor.start_write(self.job(), everything)
        self.end()

    def __enter__(self) -> TransferWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.close()

    def job(self) -> JobId:
        """A job id not used before."""
        self._jobs += 1
        return JobId(self._jobs)

    def end(self) -> Done:
        """Wait for the end of the one job in flight."""
        assert self.executor.wait(60)
        (done,) = self.executor.poll()
        return done

    def store(self, refs: Sequence[ObjectRef], slots: Sequence[int]) -> Done:
        self.executor.start_store(self.job(), refs, slots)
        return self.end()

    def fetch(self, refs: Sequence[ObjectRef], slots: Sequence[int]) -> Done:
        """Fetch into slots that are poisoned first."""
        for ref, slot in zip(refs, slots, strict=True):
            self.host.poison(ref.component, [slot])
        self.executor.start_fetch(self.job(), refs, slots)
        return self.end()

    def probe(self, refs: Sequence[ObjectRef]) -> Done:
        self.executor.start_probe(self.job(), refs)
        return self.end()

    def bytes(self, refs: Sequence[ObjectRef], slots: Sequence[int]) -> list[dict[str, bytes]]:
        """What host slots hold now, per entry and pool."""
        return [page_bytes(self.host, ref.component, slot) for ref, slot in zip(refs, slots, strict=True)]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll a condition that another thread makes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it never happened")
        time.sleep(0.001)
