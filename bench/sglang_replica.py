"""One replica for sglang_backends.py: SGLang's tree and controller with one backend, led through stdin.

python bench/sglang_replica.py TASK      TASK is JSON: storage, extra, prompts, pages
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

DRIVER = Path(__file__).parents[1] / "tests/sglang/engine/drive_tree.py"
PAGE, LAYERS, HEADS, DIM = 64, 8, 4, 64
BOUND_S = 120.0


def driver() -> Any:
    """Return the tests' driver of SGLang's tree as a module."""
    spec = importlib.util.spec_from_file_location("drive_tree", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(number: int, pages: int) -> array[int]:
    """Return tokens that no other prompt begins with."""
    return array("q", range(number * 1_000_000, number * 1_000_000 + pages * PAGE))


class Replica:
    """SGLang's cache with one backend."""

    def __init__(self, storage: str, extra: Mapping[str, object], prompts: int, pages: int) -> None:
        with tempfile.NamedTemporaryFile() as meeting:
            dist.init_process_group("gloo", init_method=f"file://{meeting.name}.init", rank=0, world_size=1)
        load_plugins()
        arguments = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            device="cpu",
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_storage_backend=storage,
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )
        arguments._mamba_cache_chunk_size = PAGE  # noqa: SLF001  # a model's own loader sets it
        set_global_server_args_for_scheduler(arguments)
        axes = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
        get_parallel().override_permanently(
            **{f"{axis}_rank": 0 for axis in axes}, **{f"{axis}_size": 1 for axis in axes}
        )
        slots = prompts * pages * PAGE

        class Engine(driver().Engine):  # type: ignore[misc]
            """The test's engine with pools of the size measured here."""

            def _make_pools(self) -> None:
                self.pool = MHATokenToKVPool(
                    size=slots,
                    page_size=PAGE,
                    dtype=torch.bfloat16,
                    head_num=HEADS,
                    head_dim=DIM,
                    layer_num=LAYERS,
                    device="cpu",
                    enable_memory_saver=False,
                )
                self.full = self.pool
                self.allocator = PagedTokenToKVPoolAllocator(
                    slots, PAGE, torch.bfloat16, "cpu", self.pool, False
                )

        self.engine = Engine("rust", "full", arguments)
        self.prompts, self.pages = prompts, pages

    def settle(self, done: Callable[[], bool]) -> None:
        """Let SGLang handle its events until `done`. Raises TimeoutError if that takes too long."""
        deadline = time.perf_counter() + BOUND_S
        while not done():
            self.engine.cache.check_hicache_events()
            if time.perf_counter() > deadline:
                raise TimeoutError("SGLang did not get there")
            time.sleep(0.0002)

    def fill(self, number: int) -> list[Any]:
        """Give a prompt device pages with content of its own; return their rows."""

        tokens = prompt(number, self.pages)
        slots = self.engine.take_slots(len(tokens))
        torch.manual_seed(number)
        for _, buffer in self.engine.buffers():
            buffer[slots] = torch.randn_like(buffer[slots])
        rows = self.engine.read(slots)
        self.engine.cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        return list(rows)

    def write(self) -> dict[str, Any]:
        """Store all prompts; return how long SGLang needed from computed to stored."""
        cache = self.engine.cache
        took = []
        for number in range(1, self.prompts + 1):
            self.fill(number)
            began = time.perf_counter()
            cache.flush_pending_backups()
            self.settle(lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
            took.append(time.perf_counter() - began)
        return {"seconds": took}

    def read(self) -> dict[str, Any]:
        """Fetch every prompt into empty host memory; return tokens and seconds of each."""

        cache = self.engine.cache
        self.engine.cache.reset()
        self.engine.allocator.clear()
        tokens, took = [], []
        for number in range(1, self.prompts + 1):
            wanted = prompt(number, self.pages)
            handle = CacheRequestHandle(f"request {number}", 0)
            began = time.perf_counter()
            cache.prefetch_from_storage(handle, cache.root_node_handle(), wanted, None)
            self.settle(lambda handle=handle: cache.check_prefetch_progress(handle))
            found = self.engine.match(RadixKey(wanted))
            took.append(time.perf_counter() - began)
            tokens.append(found.host_hit_length)
        return {"seconds": took, "tokens": tokens}

    def compare(self) -> dict[str, Any]:
        """Fetch and load prompt 1 and say whether every byte is what was computed for it."""

        cache = self.engine.cache
        cache.reset()
        self.engine.allocator.clear()
        rows = self.fill(1)
        self.settle(lambda: not cache.ongoing_write_through and not cache.ongoing_backup)
        self.engine.forget()
        self.engine.fetch(prompt(1, self.pages))
        loaded = self.engine.load(RadixKey(prompt(1, self.pages)))
        pairs = zip(rows, self.engine.read(loaded), strict=True)
        return {"equal": len(loaded) == self.pages * PAGE and all(torch.equal(a, b) for a, b in pairs)}

    def counters(self) -> dict[str, Any]:
        """Return what our backend counted; SGLang's own count nothing."""
        storage = self.engine.cache.cache_controller.storage_backend
        return dict(getattr(storage, "counters", {}))


def main() -> None:
    """Answer commands on stdin, one line of JSON each, until there are no more."""
    task: Mapping[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    replica = Replica(task["storage"], task["extra"], task["prompts"], task["pages"])
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(getattr(replica, line.strip())()) + "\n")
        answers.flush()
    os._exit(0)  # SGLang's threads are not made to be joined


if __name__ == "__main__":
    main()
