"""The linker itself, on pools and a store: what SGLang's calls mean.

Decides what is promised, and that ranks which may see different stores still do the same. A prefix that
SGLang was promised is in verified host memory, or its load is refused on every rank and it is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hicache.clock import Clock
from hicache.integrations.sglang.contract import text
from hicache.integrations.sglang.direct.blocks import make_copier
from hicache.integrations.sglang.direct.fetches import Agreement, Fetcher, Wanted
from hicache.integrations.sglang.direct.held import HeldPages
from hicache.integrations.sglang.direct.loads import FamilyLoad, LayerGates, Loader
from hicache.integrations.sglang.direct.offloads import FamilyOffload, Offloader
from hicache.integrations.sglang.direct.pools import PoolGroup
from hicache.integrations.sglang.direct.settings import Bounds
from hicache.integrations.sglang.identity import LEADS, Identity
from hicache.integrations.sglang.store import ObjectStore
from hicache.transfer.counters import Counters
from hicache.types import Component

logger = logging.getLogger(__name__)


class DeviceTransfer(Protocol):
    """PoolTransfer as linkers get it: pages of a component. `device_indices` has one entry per token."""

    name: str
    device_indices: torch.Tensor | None
    keys: list[str] | None


class LinkerCore:
    """All calls come from SGLang's scheduler thread, but waiting at the gates.

    Nothing but `finish` raises; whatever else goes wrong is a miss, a load or an offload that is refused.
    """

    def __init__(
        self,
        identity: Identity,
        group: PoolGroup,
        store: ObjectStore,
        *,
        bounds: Bounds,
        writes: Callable[[Component], bool],
        agree: Callable[[bool], bool] | None,
        clock: Clock,
        counters: Counters,
    ) -> None:
        """`writes` says whether this rank stores a component; `agree` is True where it is on all ranks."""
        self._identity = identity
        self._store = store
        self._bounds = bounds
        self._writes = writes
        self._agree = agree
        self._counters = counters
        self._layout = {
            component: [group.pools[name] for name in family.pools]
            for component, family in identity.families.items()
        }
        specs = {
            kind: [spec for pool in pools for spec in pool.specs] for kind, pools in self._layout.items()
        }
        pinned = group.device.type == "cuda"
        self._held = HeldPages(specs, max_bytes=bounds.transit_bytes, pinned=pinned)
        self.gates = LayerGates(group.num_layers, timeout_s=bounds.layer_timeout_s)
        self._loader = Loader(
            self._layout,
            self.gates,
            make_copier(group.device),
            timeout_s=bounds.layer_timeout_s,
            clock=clock,
            counters=counters,
            release=self._held.done,
        )
        self._fetcher = Fetcher(
            store,
            self._held,
            bounds=bounds,
            clock=clock,
            counters=counters,
            agreement=Agreement.SHARED if agree else Agreement.ALONE,
        )
        full = next(part for pool in self._layout[Component.FULL] for part in pool.parts)
        self._offloader = Offloader(
            self._layout,
            store,
            make_copier(group.device),
            pinned=pinned,
            max_pages=max(1, int(full.layers[0].shape[0] * bounds.offload_share)),
            bounds=bounds,
            clock=clock,
            counters=counters,
        )
        self._queued: dict[str, tuple[object, list[FamilyLoad]]] = {}
        self._off = False

    @property
    def held_pages(self) -> int:
        """Pages between store and device right now."""
        return len(self._held)

    def turn_off(self) -> None:
        """Restore and store nothing from now on; what has begun ends, and offloads are still answered."""
        self._off = True
        self._fetcher.reset()

    # -- restoring -------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: Sequence[DeviceTransfer]) -> list[int]:
        """Return the prefix lengths in pages that can be restored. Waits within the tick's bound."""
        if self._off:
            return []
        try:
            families = _by_component(transfers)
            full = families.pop(Component.FULL, None)
            if full is None or not full.keys or not families.keys() <= self._layout.keys():
                return []
            windows = tuple((component, len(one.keys or [1])) for component, one in families.items())
            return self._fetcher.lookup(rid, Wanted(tuple(map(bytes.fromhex, full.keys)), windows))
        except Exception:
            self._counters.add("lookup_crashed")
            logger.exception("HiCache: an L3 lookup failed; SGLang goes on without it")
            return []

    def load(self, rid: str, transfers: Sequence[DeviceTransfer]) -> bool:
        """Queue a load for the next batch; False, on every rank, if any rank has not all of its pages."""
        try:
            families = None if self._off else self._plan(rid, transfers)
        except Exception:
            self._counters.add("load_crashed")
            logger.exception("HiCache: an L3 load failed; SGLang goes on without it")
            families = None
        good = families is not None
        if self._agree is not None:
            good = self._agree(good)
        if not good or families is None:
            self._counters.add("loads_refused")
            self._fetcher.forget(rid)
            return False
        owner = object()
        self._fetcher.take(rid, owner)
        self._queued[rid] = owner, families
        return True

    def _plan(self, rid: str, transfers: Sequence[DeviceTransfer]) -> list[FamilyLoad] | None:
        if rid in self._queued:
            raise ValueError(f"the request {rid} has a load already")
        wanted = []
        for component, one in _by_component(transfers).items():
            if component not in self._layout or not one.keys or one.device_indices is None:
                return None
            wanted.append((component, [bytes.fromhex(key) for key in one.keys], one.device_indices))
        keys = [(component, page_hash) for component, hashes, _ in wanted for page_hash in hashes]
        if not keys or not self._fetcher.ensure(rid, keys):
            return None
        families = []
        for component, hashes, indices in wanted:
            runs = self._held.runs(component, hashes)
            if runs is None:
                return None
            families.append(FamilyLoad(component, runs, self._pages(component, hashes, indices)))
        return families

    def start(self, ready: Callable[[], Sequence[Any]]) -> int:
        """Begin the queued loads behind the events `ready` records; return their batch, -1 without any."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        owners = [owner for owner, _ in queued.values()]
        families = [family for _, families in queued.values() for family in families]
        return self._loader.start(owners, families, ready())

    def finish(self, index: int) -> bool:
        """Return when a batch writes nothing any more: True if all of it is on the device."""
        return self._loader.finish(index)

    def cancel(self, rid: str) -> bool:
        """Forget a load that has not begun; False if there is none."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        self._held.done(queued[0])
        return True

    # -- storing ---------------------------------------------------------------------------------

    def offload(self, transfers: Sequence[DeviceTransfer], ready: Callable[[], Sequence[Any]]) -> bool:
        """Queue pages to be stored; True means that an answer will come, in the order of these calls."""
        named = {kind: one for kind, one in _by_component(transfers).items() if kind in self._layout}
        if not any(one.keys for one in named.values()):
            return False
        if self._off:
            self._offloader.refuse()
            return True
        try:
            families = [self._leaving(kind, one) for kind, one in named.items() if one.keys]
        except Exception:
            self._counters.add("offload_crashed")
            logger.exception("HiCache: an L3 offload failed; SGLang goes on without it")
            self._offloader.refuse()
            return True
        self._offloader.offload([one for one in families if self._writes(one.component)], ready())
        return True

    def _leaving(self, component: Component, transfer: DeviceTransfer) -> FamilyOffload:
        if transfer.keys is None or transfer.device_indices is None:
            raise ValueError(f"an offload of {component.name} without keys or device pages")
        hashes = [bytes.fromhex(key) for key in transfer.keys]
        return FamilyOffload(component, hashes, self._pages(component, hashes, transfer.device_indices))

    def num_answers(self) -> int:
        """Return how many offloads have been answered. SGLang asks once a tick."""
        self._fetcher.new_tick()
        return self._offloader.num_answers

    def pop_answer(self) -> bool:
        return self._offloader.pop_answer()

    # -- the rest --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all that is under way; nothing touches device pages when this returns."""
        for rid in list(self._queued):
            self.cancel(rid)
        self._fetcher.reset()
        self._offloader.reset()
        self._loader.reset()

    def close(self) -> None:
        """Reset, end the threads and release the store."""
        self.reset()
        self._loader.close()
        self._store.close()  # lets go of threads that are in it
        self._fetcher.close(timeout_s=self._bounds.lookup_timeout_s)
        self._offloader.close(timeout_s=self._bounds.lookup_timeout_s)

    def _pages(
        self, component: Component, hashes: Sequence[bytes], indices: torch.Tensor
    ) -> Mapping[str, Sequence[int]]:
        pages = {}
        for pool in self._layout[component]:
            if not pool.parts:
                continue
            pages[pool.name] = pool.pages_of(indices)
            if len(pages[pool.name]) != len(hashes):
                raise ValueError(
                    f"pool {pool.name}: {len(hashes)} keys, but {len(pages[pool.name])} device pages"
                )
        return pages


def _by_component(transfers: Sequence[DeviceTransfer]) -> dict[Component, DeviceTransfer]:
    return {LEADS[text(one.name)]: one for one in transfers if text(one.name) in LEADS}
