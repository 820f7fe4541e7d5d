"""One replica for sglang_backends.py: SGLang's tree and controller with one backend, led through stdin.

python bench/sglang_replica.py TASK      TASK is JSON: storage (or linker), extra, prompts, pages
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.linker_factory import (
    create_unified_cache_linker,
    get_startup_linker_config,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

DRIVER = Path(__file__).parents[1] / "tests/sglang/engine/drive_tree.py"
PAGE, LAYERS, HEADS, DIM = 64, 8, 4, 64
BOUND_S = 120.0


def load_driver() -> Any:
    """Return the tests' driver of SGLang's tree as a module."""
    spec = importlib.util.spec_from_file_location("drive_tree", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


driver = load_driver()


def prompt(number: int, pages: int) -> array[int]:
    """Return tokens that no other prompt begins with."""
    return array("q", range(number * 1_000_000, number * 1_000_000 + pages * PAGE))


class Replica:
    """SGLang's cache with one backend."""

    def __init__(self, storage: str, extra: Mapping[str, object], prompts: int, pages: int) -> None:
        driver.join()
        arguments = ServerArgs(model_path="dummy", page_size=PAGE, device="cpu", **self.flags(storage, extra))
        driver.serve_with(arguments)
        self.engine = self.make_engine(prompts * pages * PAGE)("rust", "full", arguments)
        self.prompts, self.pages = prompts, pages

    @staticmethod
    def flags(storage: str, extra: Mapping[str, object]) -> dict[str, Any]:
        """Return what SGLang is started with."""
        return {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_storage_backend": storage,
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }

    def make_engine(self, slots: int) -> type[Any]:
        """Return the test's engine with pools of the size measured here."""

        sizes = {"page": PAGE, "slots": slots, "layers": LAYERS, "heads": HEADS, "dim": DIM}
        return type("Engine", (driver.Engine,), {**sizes, "pause_s": 0.0002})

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
        self.engine.fill(slots, number)
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
        """Fetch every prompt into empty tiers; return tokens, seconds to the hit and to the device."""

        cache = self.engine.cache
        self.engine.cache.reset()
        self.engine.allocator.clear()
        tokens, took, loaded = [], [], []
        for number in range(1, self.prompts + 1):
            wanted = prompt(number, self.pages)
            handle = CacheRequestHandle(f"request {number}", 0)
            began = time.perf_counter()
            cache.prefetch_from_storage(handle, cache.root_node_handle(), wanted, None)
            self.settle(lambda handle=handle: cache.check_prefetch_progress(handle))
            found = self.engine.match(RadixKey(wanted))
            took.append(time.perf_counter() - began)
            tokens.append(found.host_hit_length)
            self.engine.load(RadixKey(wanted))
            loaded.append(time.perf_counter() - began)
        return {"seconds": took, "tokens": tokens, "device_seconds": loaded}

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


class LinkerReplica(Replica):
    """SGLang's cache with our linker: from L3 to the device, without a host tier."""

    @staticmethod
    def flags(storage: str, extra: Mapping[str, object]) -> dict[str, Any]:
        config = {
            "linker": "HiCacheLinker",
            "linker_module_path": "hicache.integrations.sglang.linker",
            "linker_extra_config": dict(extra),
        }
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": config,
        }

    def make_engine(self, slots: int) -> type[Any]:
        class Engine(super().make_engine(slots)):  # type: ignore[misc]
            """The same with the linker where the host tier was."""

            def attach(self, arguments: Any, params: Any) -> None:
                linker = create_unified_cache_linker(
                    arguments,
                    params,
                    backend="dynamic",
                    config=get_startup_linker_config(),
                    components=set(self.cache.components),
                )
                self.cache.init_cache_linker(linker)

        return Engine

    def write(self) -> dict[str, Any]:
        linker, took = self.engine.cache.linker, []
        for number in range(1, self.prompts + 1):
            self.fill(number)
            began = time.perf_counter()
            self.settle(lambda: not linker.pending_offloads)
            took.append(time.perf_counter() - began)
        return {"seconds": took}

    def read(self) -> dict[str, Any]:
        self.engine.cache.reset()
        self.engine.allocator.clear()
        tokens, took, loaded = [], [], []
        for number in range(1, self.prompts + 1):
            hit, found_s, loaded_s, _ = self.load(number)
            tokens.append(hit)
            took.append(found_s)
            loaded.append(loaded_s)
        return {"seconds": took, "tokens": tokens, "device_seconds": loaded}

    def load(self, number: int) -> tuple[int, float, float, Any]:
        """Load a prompt as for a request; return tokens, seconds to the hit and to the device, slots."""
        cache, whole = self.engine.cache, self.pages * PAGE
        tokens = prompt(number, self.pages)
        tokens.append(1)  # SGLang computes at least one
        request = Req(f"request {number}", "", tokens, SamplingParams(max_new_tokens=1))
        began = time.perf_counter()
        deadline = began + BOUND_S
        while request.host_hit_length < whole and time.perf_counter() < deadline:
            request.init_next_round_input(cache)
        found = time.perf_counter() - began
        hit = request.host_hit_length
        cache.init_load_back(
            InitLoadBackParams(
                best_match_node=request.best_match_node, host_hit_length=hit, mem_quota=None, req=request
            )
        )
        slots = cache.linker.private_load_indices[request.rid]
        counter = cache.linker.layer_done_counter
        counter.set_consumer(cache.ready_to_load_host_cache())
        for layer in range(LAYERS):
            counter.wait_until(layer)
        if cache.finish_external_linker_loads([request]):
            raise RuntimeError("the load failed")
        return hit, found, time.perf_counter() - began, slots

    def compare(self) -> dict[str, Any]:
        cache = self.engine.cache
        cache.reset()
        self.engine.allocator.clear()
        rows = self.fill(1)
        self.settle(lambda: not cache.linker.pending_offloads)
        cache.reset()
        self.engine.allocator.clear()
        for _, buffer in self.engine.buffers():
            buffer.zero_()
        slots = self.load(1)[3]
        pairs = zip(rows, self.engine.read(slots), strict=True)
        return {"equal": all(torch.equal(a, b) for a, b in pairs)}

    def counters(self) -> dict[str, Any]:
        return dict(self.engine.cache.linker.cache_linker.counters)


def main() -> None:
    """Answer commands on stdin, one line of JSON each, until there are no more."""
    task: Mapping[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    kind = LinkerReplica if task["storage"] == "linker" else Replica
    replica = kind(task["storage"], task["extra"], task["prompts"], task["pages"])
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(getattr(replica, line.strip())()) + "\n")
        answers.flush()
    os._exit(0)  # SGLang's threads are not made to be joined


if __name__ == "__main__":
    main()
