"""SGLang's storage calls in terms of whole objects: pages, their sidecars, and what may be promised.

Decides what each call answers. One object has a page's KV and all of its sidecars; SGLang writes sidecars
first and reads them last, so they wait in `sidecars` meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from hicache.clock import Clock
from hicache.integrations.sglang.contract import Refused, StorageConfig, Transfer, text
from hicache.integrations.sglang.identity import Family, Identity, check_source
from hicache.integrations.sglang.pages import PoolPages
from hicache.integrations.sglang.settings import Settings
from hicache.integrations.sglang.sidecars import SidecarPages
from hicache.integrations.sglang.store import ObjectStore
from hicache.types import Component

logger = logging.getLogger(__name__)

_Copy = Callable[[int, Sequence[memoryview]], None]
"""Moves the lead's parts of page i."""

KV = "kv"
_ALL_PAGES = "all_pages"
_TRAILING_PAGES = "trailing_pages"


class Adapter:
    """What one rank stores, from the moment its pools are known until they change.

    Calls come from SGLang's threads: queries from one, reads from another, writes from a third. Nothing
    here is shared between them but `store` and `sidecars`, which are thread-safe.
    """

    def __init__(
        self,
        identity: Identity,
        pools: Mapping[str, PoolPages],
        store: ObjectStore,
        *,
        config: StorageConfig,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self.identity = identity
        self.store = store
        self._pools = pools
        self._writer = config.is_storage_writer
        self._replicated = config.is_mla_model
        self._staged = SidecarPages(
            clock, max_bytes=settings.staged_bytes, max_seconds=settings.staged_seconds
        )
        self._held = SidecarPages(clock, max_bytes=settings.held_bytes, max_seconds=settings.staged_seconds)
        self._refused: set[str] = set()

    @property
    def staged(self) -> SidecarPages:
        """Sidecars that were written and whose KV has not come yet."""
        return self._staged

    @property
    def held(self) -> SidecarPages:
        """Sidecars that were read with their KV and not asked for yet."""
        return self._held

    # -- queries -------------------------------------------------------------------------------

    def leading_pages(self, keys: Sequence[str]) -> int:
        """Return how many pages from the start are there."""
        found = self.store.probe(Component.FULL, _hashes(keys))
        return len(found) if 0 not in found else found.index(0)

    def restorable(
        self, keys: Sequence[str], transfers: Sequence[Transfer]
    ) -> tuple[dict[str, int], list[int]]:
        """Return each pool's own boundary in pages, and every prefix length that all pools accept."""
        hashes = _hashes(keys)
        full = self.store.probe(Component.FULL, hashes)
        depth = len(full) if 0 not in full else full.index(0)
        boundaries = {KV: depth}
        accepted = np.ones(depth + 1, dtype=bool)
        accepted[0] = False
        trailing: dict[Component, bytearray] = {}
        for transfer in transfers:
            name = text(transfer.name)
            family = self._family(transfer)
            if family is None:
                boundaries[name] = 0
                accepted[:] = False
                continue
            if family.component is Component.FULL and text(transfer.hit_policy) == _ALL_PAGES:
                boundaries[name] = depth  # in the same objects
                continue
            if family.component not in trailing:
                trailing[family.component] = self.store.probe(family.component, hashes[:depth])
            allowed = _boundaries(trailing[family.component], transfer)
            boundaries[name] = int(np.flatnonzero(allowed)[-1]) if allowed.any() else 0
            accepted &= allowed
        return boundaries, [int(length) for length in np.flatnonzero(accepted)]

    def _family(self, transfer: Transfer) -> Family | None:
        """Return the family that has a transfer's pool; None, said once, if it cannot be served."""
        name, policy = text(transfer.name), text(transfer.hit_policy)
        family = self.identity.by_pool.get(name)
        if family is None:
            return self._refuse(f"pool {name!r} was never registered")
        if policy not in (_ALL_PAGES, _TRAILING_PAGES):
            return self._refuse(f"pool {name!r} asks for hit policy {policy!r}, which is not supported")
        if policy == _TRAILING_PAGES and family.component is Component.FULL:
            return self._refuse(f"pool {name!r} is stored with every KV page, but asks for {policy!r}")
        source = transfer.indices_from_pool
        try:
            check_source(self.identity, name, None if source is None else text(source))
        except Refused as error:
            return self._refuse(str(error))
        return family

    def _refuse(self, why: str) -> Family | None:
        """Say once why a pool cannot be served; return None."""
        if why not in self._refused:
            self._refused.add(why)
            logger.error("HiCache: no L3 hits for requests that need it: %s", why)
        return None

    # -- writing -------------------------------------------------------------------------------

    def write_kv(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        starts = self._starts(KV, keys, indices)
        return self._write_lead(self.identity.by_pool[KV], _hashes(keys), _out_of(self._pools[KV], starts))

    def write_flat(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store KV pages that SGLang copied out itself."""
        pages = self._pools[KV]

        def copy(i: int, parts: Sequence[memoryview]) -> None:
            for buffer, part in zip(parts, pages.flat_parts(values[i]), strict=True):
                np.copyto(np.frombuffer(buffer, np.uint8).reshape(part.shape), part)

        if len(values) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(values)} pages")
        return self._write_lead(self.identity.by_pool[KV], _hashes(keys), copy)

    def write_pools(self, transfers: Sequence[Transfer]) -> dict[str, list[bool]]:
        """Store states, and stage sidecars until their lead comes."""
        results: dict[str, list[bool]] = {}
        for transfer in sorted(transfers, key=self._is_lead):
            name, keys = transfer.name, transfer.keys or []
            family = self._family(transfer)
            if family is None or transfer.host_indices is None or not self._may_write(family):
                results[name] = [False] * len(keys)
                continue
            hashes, pages = _hashes(keys), self._pools[text(name)]
            starts = self._starts(text(name), keys, transfer.host_indices)
            if text(name) == family.lead:
                results[name] = self._write_lead(family, hashes, _out_of(pages, starts))
            else:
                results[name] = self._stage(family, text(name), hashes, starts)
        return results

    def _stage(self, family: Family, pool: str, hashes: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """Keep sidecar pages until their lead comes; those of stored objects need no keeping."""
        if not self.store.usable:
            return [False] * len(hashes)
        pages = self._pools[pool]
        stored = self.store.probe(family.component, hashes)
        done = []
        for page_hash, start, there in zip(hashes, starts, stored, strict=True):
            if there:
                done.append(True)
                continue
            parts = [bytearray(spec.page_bytes) for spec in pages.specs]
            pages.read(start, [memoryview(part) for part in parts])
            done.append(self._staged.put((family.component, page_hash), pool, parts))
        return done

    def _write_lead(self, family: Family, hashes: Sequence[bytes], copy: _Copy) -> list[bool]:
        """Store objects whose lead is at hand and whose sidecars are staged."""
        if not self._may_write(family):
            return [False] * len(hashes)

        def fill(i: int, parts: Sequence[memoryview]) -> bool:
            staged = self._staged.take((family.component, hashes[i]), family.sidecars)
            if staged is None:
                return False  # an object without them would be a hit that is not whole
            for pool, kept in staged.items():
                for buffer, part in zip(parts[family.parts[pool]], kept, strict=True):
                    buffer[:] = part
            copy(i, parts[family.parts[family.lead]])
            return True

        return self.store.write(family.component, hashes, fill)

    def _may_write(self, family: Family) -> bool:
        return self._writer or not self._replicated or family.component is Component.MAMBA

    # -- reading -------------------------------------------------------------------------------

    def read_kv(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        starts = self._starts(KV, keys, indices)
        return self._read_lead(self.identity.by_pool[KV], _hashes(keys), _into(self._pools[KV], starts))

    def read_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Fill flat KV pages that SGLang copies in itself."""
        pages = self._pools[KV]

        def copy(i: int, parts: Sequence[memoryview]) -> None:
            for buffer, part in zip(parts, pages.flat_parts(targets[i]), strict=True):
                np.copyto(part, np.frombuffer(buffer, np.uint8).reshape(part.shape))

        if len(targets) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(targets)} pages")
        return self._read_lead(self.identity.by_pool[KV], _hashes(keys), copy)

    def read_pools(self, transfers: Sequence[Transfer]) -> dict[str, list[bool]]:
        """Read states, and hand out the sidecars that came with their lead."""
        results: dict[str, list[bool]] = {}
        for transfer in sorted(transfers, key=self._is_lead, reverse=True):
            name, keys = transfer.name, transfer.keys or []
            family = self._family(transfer)
            if family is None or transfer.host_indices is None:
                results[name] = [False] * len(keys)
                continue
            hashes, pages = _hashes(keys), self._pools[text(name)]
            starts = self._starts(text(name), keys, transfer.host_indices)
            if text(name) == family.lead:
                results[name] = self._read_lead(family, hashes, _into(pages, starts))
            else:
                results[name] = self._hand_out(family, text(name), hashes, starts)
        return results

    def _read_lead(self, family: Family, hashes: Sequence[bytes], copy: _Copy) -> list[bool]:
        """Read objects; the sidecars in them are held for the call that follows."""
        self._held.forget(family.component)  # what nobody asked for after the last batch

        def place(i: int, parts: Sequence[memoryview]) -> None:
            copy(i, parts[family.parts[family.lead]])
            self._hold(family, hashes[i], parts, family.sidecars)

        return self.store.read(family.component, hashes, place)

    def _hold(
        self, family: Family, page_hash: bytes, parts: Sequence[memoryview], pools: Sequence[str]
    ) -> None:
        for pool in pools:
            kept = [bytearray(part) for part in parts[family.parts[pool]]]
            self._held.put((family.component, page_hash), pool, kept)

    def _hand_out(
        self, family: Family, pool: str, hashes: Sequence[bytes], starts: Sequence[int]
    ) -> list[bool]:
        """Put held sidecar pages in place; read the objects of the others once more."""
        pages = self._pools[pool]
        missing = []
        done = [False] * len(hashes)
        for i, page_hash in enumerate(hashes):
            held = self._held.take((family.component, page_hash), (pool,))
            if held is None:
                missing.append(i)
                continue
            pages.write(starts[i], [memoryview(part) for part in held[pool]])
            done[i] = True
        others = [name for name in family.sidecars if name != pool]

        def place(i: int, parts: Sequence[memoryview]) -> None:
            pages.write(starts[missing[i]], parts[family.parts[pool]])
            self._hold(family, hashes[missing[i]], parts, others)

        if missing:
            again = self.store.read(family.component, [hashes[i] for i in missing], place)
            for i, good in zip(missing, again, strict=True):
                done[i] = good
        return done

    # -- the rest --------------------------------------------------------------------------------

    def clear(self) -> int:
        """Forget everything of this rank and model, here and in the store. Raises BackendError."""
        self._staged.forget()
        self._held.forget()
        return self.store.clear()

    def close(self) -> None:
        self._staged.forget()
        self._held.forget()
        self.store.close()

    def _is_lead(self, transfer: Transfer) -> bool:
        family = self.identity.by_pool.get(text(transfer.name))
        return family is not None and family.lead == text(transfer.name)

    def _starts(self, pool: str, keys: Sequence[str], indices: torch.Tensor) -> list[int]:
        """Return the index at which each page begins. Raises ValueError unless there is one per key."""
        page_size = self._pools[pool].page_size
        if indices.numel() != len(keys) * page_size:
            raise ValueError(
                f"pool {pool}: {len(keys)} keys of {page_size} tokens, but {indices.numel()} indices"
            )
        starts: list[int] = indices[::page_size].tolist()
        return starts


def _out_of(pages: PoolPages, starts: Sequence[int]) -> _Copy:
    return lambda i, parts: pages.read(starts[i], parts)


def _into(pages: PoolPages, starts: Sequence[int]) -> _Copy:
    return lambda i, parts: pages.write(starts[i], parts)


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _boundaries(present: bytearray, transfer: Transfer) -> np.ndarray:
    """Return, per prefix length, whether the pages that this pool needs before it are there."""
    there = np.frombuffer(bytes(present), np.uint8).astype(bool)
    lengths = np.arange(1, len(there) + 1)
    if text(transfer.hit_policy) == _ALL_PAGES:
        return np.concatenate(([False], np.logical_and.accumulate(there)))
    window = max(1, len(transfer.keys) if transfer.keys else 1)
    last_gap = np.maximum.accumulate(np.where(there, 0, lengths))  # position of the last absent page, from 1
    return np.concatenate(([False], lengths - last_gap >= np.minimum(window, lengths)))
