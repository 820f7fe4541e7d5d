"""SGLang's tree and controller in one process against our L3; prints what happened as one line of JSON.

    python drive_tree.py ROLE CORE COMPONENTS INTERFACE LAYOUT ADDRESS

ROLE: alone (compute, store, read back, clear), writer (the same without clear) or reader (read what a writer
stored); CORE: python or rust; COMPONENTS: full or full+swa; INTERFACE: 0 (copying calls) or 1 (zero copy);
LAYOUT of the host pools; ADDRESS of a `hicache serve`. What it prints: tokens found per tier, and whether
bytes agree.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from array import array
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

PAGE, PAGES, WINDOW, SLOTS = 64, 8, 128, 2048
BOUND_S = 60.0


def join() -> None:
    """Make this process the only rank of a group, and load SGLang's plugins."""
    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting.name}.init", rank=0, world_size=1)
    from sglang.srt.plugins import load_plugins

    load_plugins()


def serve_with(arguments: Any) -> None:
    """Make these the arguments of the server whose only rank this process is."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    arguments._mamba_cache_chunk_size = arguments.page_size  # a model's own loader sets it
    set_global_server_args_for_scheduler(arguments)
    axes = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
    get_parallel().override_permanently(
        **{f"{axis}_rank": 0 for axis in axes}, **{f"{axis}_size": 1 for axis in axes}
    )


def leave(report: Any) -> NoReturn:
    """Print what was seen as one line of JSON, and end this process."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads are not made to be joined


def server_args(interface: int, layout: str, address: str) -> Any:
    from sglang.srt.server_args import ServerArgs

    extra = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheStorageBackend",
        "interface_v1": interface,
        "address": address,
        "model_id": "tree",
        "weight_version": "1",
    }
    return ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend="direct",
        hicache_mem_layout=layout,
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(extra),
    )


class Engine:
    """A cache with its pools, as a scheduler of one rank has them."""

    page, slots, window = PAGE, SLOTS, WINDOW
    layers, heads, dim = 3, 2, 16
    pause_s = 0.005

    def __init__(self, core: str, components: str, arguments: Any) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.swa = components == "full+swa"
        kinds = (ComponentType.FULL, ComponentType.SWA) if self.swa else (ComponentType.FULL,)
        self._make_pools()
        params = self._params(tree_components=kinds, tree_core_backend=core)
        self.cache = UnifiedRadixCache(params)
        self.attach(arguments, params)

    def _params(self, **tree: Any) -> Any:
        """What SGLang makes a cache on these pools from."""
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        return CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=4, max_context_len=4096, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            sliding_window_size=self.window if self.swa else None,
            tp_cache_group=dist.new_group([0]),
            **tree,
        )

    def attach(self, arguments: Any, params: Any) -> None:
        """Put the host tier and its storage behind the tree."""
        self.cache.init_hicache(arguments, params)

    def _make_pools(self) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        common = {"page_size": self.page, "dtype": torch.bfloat16, "device": "cpu"}
        shape = {"head_num": self.heads, "head_dim": self.dim, **common}
        if not self.swa:
            self.pool: Any = MHATokenToKVPool(
                size=self.slots, layer_num=self.layers, enable_memory_saver=False, **shape
            )
            self.full = self.pool
            self.allocator: Any = PagedTokenToKVPoolAllocator(
                self.slots, self.page, torch.bfloat16, "cpu", self.pool, False
            )
            return
        self.pool = SWAKVPool(
            size=self.slots,
            size_swa=self.slots,
            swa_attention_layer_ids=list(range(self.layers - 1)),
            full_attention_layer_ids=[self.layers - 1],
            **shape,
        )
        self.full = self.pool.full_kv_pool
        self.allocator = SWATokenToKVPoolAllocator(
            size=self.slots, size_swa=self.slots, kvcache=self.pool, need_sort=False, **common
        )

    def take_slots(self, count: int) -> torch.Tensor:
        if not self.swa:
            return self.allocator.alloc(count)
        full = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(full, self.allocator.swa_attn_allocator.alloc(count))
        return full

    def window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        return self.pool.translate_loc_from_full_to_swa(slots)

    def buffers(self) -> list[tuple[bool, torch.Tensor]]:
        """All device memory, and whether it is a window pool's."""
        found = [(False, buffer) for buffer in (*self.full.k_buffer, *self.full.v_buffer)]
        if self.swa:
            window = self.pool.swa_kv_pool
            found += [(True, buffer) for buffer in (*window.k_buffer, *window.v_buffer)]
        return found

    def fill(self, slots: torch.Tensor, seed: int) -> None:
        """Give these slots content of their own in every pool."""
        torch.manual_seed(seed)
        for window, buffer in self.buffers():
            used = self.window_slots(slots) if window else slots
            buffer[used] = torch.randn_like(buffer[used])

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a sequence in every pool; of a window pool the last window."""
        last = self.window_slots(slots)[-self.window :] if self.swa else slots
        return [buffer[last if window else slots].clone() for window, buffer in self.buffers()]

    def settle(self, done: Any) -> bool:
        """Let SGLang handle its events until `done`; False if that takes too long."""
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            self.cache.check_hicache_events()
            if done():
                return True
            time.sleep(self.pause_s)
        return False

    def forget(self) -> None:
        """Empty L1 and L2, and their memory."""
        self.cache.reset()
        self.allocator.clear()
        for _, buffer in self.buffers():
            buffer.zero_()
        for entry in self.cache.cache_controller.mem_pool_host.entries:
            entry.host_pool.kv_buffer.zero_()

    def match(self, key: Any) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def fetch(self, tokens: Any) -> None:
        """Prefetch from L3 for a request, as at its arrival."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle = CacheRequestHandle("request", 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), tokens, None)
        if not self.settle(lambda: self.cache.check_prefetch_progress(handle)):
            raise TimeoutError("the prefetch did not end")

    def load(self, key: Any) -> torch.Tensor:
        """Load what L2 has to the device; return the slots of the prefix."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams

        found = self.match(key)
        request = SimpleNamespace(
            rid="request",
            extra_key=None,
            last_node=found.last_device_node,
            prefix_len=found.device_prefix_len,
            prefix_indices=torch.empty(0, dtype=torch.int64),
            kv=SimpleNamespace(mamba_pool_idx=None),
            mamba_pool_idx=None,
            host_hit_length=found.host_hit_length,
            swa_host_hit_length=found.swa_host_hit_length,
            mamba_host_hit_length=found.mamba_host_hit_length,
            cache_request_handle=CacheRequestHandle("request", 0),
        )
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                mem_quota=None,
                req=request,
            )
        )
        self.cache.ready_to_load_host_cache()
        self.settle(lambda: not self.cache.ongoing_load_back)
        return self.cache.path_device_indices(self.match(key).last_device_node)


def run(role: str, core: str, components: str, arguments: Any) -> dict[str, Any]:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    engine = Engine(core, components, arguments)
    storage = engine.cache.cache_controller.storage_backend
    tokens = array("q", range(1000, 1000 + PAGES * PAGE))
    key = RadixKey(tokens)
    slots = engine.take_slots(len(tokens))
    engine.fill(slots, 7)
    computed = engine.read(slots)
    if role != "reader":
        engine.cache.insert(InsertParams(key=key, value=slots))
    backed_up = engine.settle(
        lambda: not engine.cache.ongoing_write_through and not engine.cache.ongoing_backup
    )
    engine.forget()
    cold = engine.match(key)
    engine.fetch(tokens)
    found = engine.match(key)
    loaded = engine.load(key)
    equal = [torch.equal(a, b) for a, b in zip(computed, engine.read(loaded), strict=True)]
    report = {
        "core": type(engine.cache.tree_core).__name__,
        "backend": type(storage).__name__,
        "backed_up": backed_up,
        "cold": cold.device_prefix_len + cold.host_hit_length,
        "from_storage": found.host_hit_length,
        "loaded": len(loaded),
        "equal": equal,
        "counters": dict(storage.counters),
    }
    if role == "alone":
        engine.forget()
        storage.clear()
        engine.fetch(tokens)
        report["after_clear"] = engine.match(key).host_hit_length
    engine.cache.shutdown()
    return report


def main() -> None:
    role, core, components, interface, layout, address = sys.argv[1:]
    join()
    arguments = server_args(int(interface), layout, address)
    serve_with(arguments)
    leave(run(role, core, components, arguments))


if __name__ == "__main__":
    main()
