#!/usr/bin/env python3
"""Run the workloads of `hicache bench tree` on SGLang's UnifiedRadixCache and its tree cores.

Started by `hicache bench tree --sglang-python PYTHON` in an interpreter where
`sglang.srt.mem_cache.unified_radix_cache` imports (CPU is enough). Reads a JSON list of cases on
stdin and prints one JSON object a case. Only SGLang's public classes are used; KV bytes do not
matter, so the pools are as narrow as they can be. Slots, tokens and their concatenation are
prepared outside of the timed regions; frees are grouped while the tree is emptied, because the
allocator copies its whole free list on every free, which is not the tree's cost.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import statistics
import sys
import time
import warnings
from array import array

os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape  # noqa: E402
from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from hicache.integrations.sglang.radix.backend import CORE, install  # noqa: E402

CPU = "cpu"
PARTS = {"full": ComponentType.FULL, "swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
clock = time.perf_counter_ns


class Cache:
    """One UnifiedRadixCache, and the pools and allocators that it insists on."""

    def __init__(self, case: dict, tokens: int, states: int) -> None:
        parts = tuple(PARTS[name] for name in case["components"].split("+"))
        self.page = page = case["page_size"]
        self.window = case["window"]
        self.swa = PARTS["swa"] in parts
        self.mamba = PARTS["mamba"] in parts
        tokens = -(-tokens // page) * page
        arguments = ServerArgs(model_path="none", page_size=page, device=CPU)
        # Otherwise a model configuration is loaded for it.
        arguments._mamba_cache_chunk_size = max(64, page)  # noqa: SLF001
        set_global_server_args_for_scheduler(arguments)
        self.requests = self._requests(states)
        self.allocator = self._allocator(tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            tree_components=parts,
            sliding_window_size=self.window if self.swa else None,
            enable_mamba_extra_buffer=self.mamba and page > 1,
            tree_core_backend=case["core"],
        )
        # Our policy in SGLang's Python core; what it learns per request is not in these times.
        cache_class = install(params) if case["core"] == CORE else UnifiedRadixCache
        self.tree = cache_class(params)

    def _requests(self, states: int) -> object:
        common = {"size": 2, "max_context_len": 16, "device": CPU, "enable_memory_saver": False}
        if not self.mamba:
            return ReqToTokenPool(**common)
        with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
            shape = Mamba2StateShape.create(
                tp_world_size=1,
                intermediate_size=16,
                n_groups=1,
                num_heads=1,
                head_dim=16,
                state_size=2,
                conv_kernel=2,
            )
            params = Mamba2CacheParams(shape=shape, layers=[1])
        return HybridReqToTokenPool(
            mamba_size=states,
            mamba_spec_state_size=2,
            cache_params=params,
            mamba_layer_ids=[1],
            enable_mamba_extra_buffer=self.page > 1,
            **common,
        )

    def _allocator(self, tokens: int) -> object:
        kv = {"dtype": torch.bfloat16, "head_num": 1, "head_dim": 8, "device": CPU}
        common = {"dtype": torch.bfloat16, "device": CPU, "need_sort": False}
        if self.swa:
            pool = SWAKVPool(
                size=tokens,
                size_swa=tokens,
                page_size=self.page,
                swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0],
                **kv,
            )
            return SWATokenToKVPoolAllocator(
                size=tokens, size_swa=tokens, page_size=self.page, kvcache=pool, **common
            )
        if self.mamba:
            pool = HybridLinearKVPool(
                size=tokens,
                page_size=self.page,
                full_attention_layer_ids=[0],
                enable_memory_saver=False,
                mamba_pool=self.requests.mamba_pool,
                **kv,
            )
        else:
            pool = MHATokenToKVPool(
                size=tokens, page_size=self.page, layer_num=1, enable_memory_saver=False, **kv
            )
        if self.page == 1:
            return TokenToKVPoolAllocator(tokens, kvcache=pool, **common)
        return PagedTokenToKVPoolAllocator(tokens, self.page, kvcache=pool, **common)

    def slots(self, count: int) -> torch.Tensor:
        if count and self.swa and self.page > 1:
            full = self.allocator.full_attn_allocator.alloc(count)
            self.allocator.set_full_to_swa_mapping(full, self.allocator.swa_attn_allocator.alloc(count))
            return full
        return self.allocator.alloc(count)

    def offer(self, tokens: array, prefix: torch.Tensor) -> tuple[InsertParams, int]:
        """Prepare an insert of `tokens` whose first slots are `prefix`; SWA of the last window only."""
        matched = len(prefix)
        length = len(tokens) // self.page * self.page
        new = self.slots(length - matched)
        params = InsertParams(
            key=RadixKey(array("q", tokens)).page_aligned(self.page),
            value=torch.cat([prefix, new]),
            prev_prefix_len=matched,
        )
        if self.mamba:
            params.mamba_value = self.requests.mamba_allocator.alloc(1)
        if self.swa:
            edge = max(length - self.window - 1, 0) // self.page * self.page
            if edge > matched:
                self.allocator.free_swa_segment(new[: edge - matched], start_pos=0)
            params.set_evicted_seqlen(PARTS["swa"], edge)
        return params, length


def run(case: dict) -> dict:
    """Time one workload; medians in microseconds."""
    turns, convs, page = case["turns"], case["conversations"], case["page_size"]
    n_in, n_out = case["tokens_in"], case["tokens_out"]
    forked = case["shape"] == "forked"
    total = convs * turns * (n_in + n_out)
    cache = Cache(case, (3 if forked else 1) * total + 4 * page, convs * turns * (2 if forked else 1) + 8)
    tree = cache.tree
    rng = random.Random(case["seed"])
    histories = [array("q") for _ in range(convs)]
    spent: dict[str, list[int]] = {name: [] for name in ("match", "gather", "lock", "insert", "release")}
    spent["match_last"] = []
    gc.collect()
    gc.disable()
    for turn in range(turns):
        for history in histories:
            history.extend(rng.randrange(1, 100_000) for _ in range(n_in))
            prompt = RadixKey(array("q", history)).page_aligned(page)
            a = clock()
            found = tree.match_prefix(MatchPrefixParams(key=prompt))
            b = clock()
            prefix = tree.path_device_indices(found.last_device_node)
            c = clock()
            lock = tree.inc_lock_ref(found.last_device_node)
            d = clock()
            spent["match"].append(b - a)
            spent["gather"].append(c - b)
            spent["lock"].append(d - c)
            fork = array("q", history)
            history.extend(rng.randrange(1, 100_000) for _ in range(n_out))
            params, _ = cache.offer(history, prefix)
            a = clock()
            tree.insert(params)
            b = clock()
            tree.dec_lock_ref(found.last_device_node, lock.to_dec_params())
            c = clock()
            spent["insert"].append(b - a)
            spent["release"].append(c - b)
            if turn == turns - 1:
                spent["match_last"].append(spent["match"][-1])
            if forked:
                fork.extend(rng.randrange(1, 100_000) for _ in range(n_out))
                params, _ = cache.offer(fork, prefix)
                tree.insert(params)
    out = {k: case[k] for k in ("components", "shape", "page_size", "conversations", "turns")}
    theirs = "sglang-rust" if type(tree.tree_core).__name__.startswith("Rust") else "sglang-python"
    out["core"] = CORE if case["core"] == CORE else theirs
    out.update({f"{name}_us": statistics.median(samples) / 1e3 for name, samples in spent.items()})
    drain(case, cache, out)
    gc.enable()
    return out


def drain(case: dict, cache: Cache, out: dict) -> None:
    """Evict some windows and states one by one, then everything by FULL requests."""
    tree = cache.tree
    half = case["conversations"] * case["turns"] // 2

    def empty(make: object, left: object, limit: int) -> list[int]:
        samples = []
        while len(samples) < limit and left() > 0:
            params = make()
            a = clock()
            result = tree.evict(params)
            samples.append(clock() - a)
            if not (result.num_tokens_evicted or result.swa_num_tokens_evicted or result.mamba_num_evicted):
                break
        return samples

    cache.allocator.free_group_begin()
    if cache.swa:
        samples = empty(lambda: EvictParams(swa_num_tokens=cache.page), tree.swa_evictable_size, half)
        out["evict_swa_us"] = statistics.median(samples) / 1e3 if samples else 0.0
    if cache.mamba:
        samples = empty(lambda: EvictParams(mamba_num=1), tree.mamba_evictable_size, half)
        out["evict_mamba_us"] = statistics.median(samples) / 1e3 if samples else 0.0
    tokens = max(case["evict_tokens"], cache.page)
    samples = empty(lambda: EvictParams(num_tokens=tokens), tree.full_evictable_size, 1 << 60)
    if samples:
        out["evict_us"] = statistics.median(samples) / 1e3
    cache.allocator.free_group_end()


def main() -> None:
    """Run the cases on stdin, one line of JSON each."""
    logging.getLogger().setLevel(logging.WARNING)
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints must not mix with the results
    for case in json.load(sys.stdin):
        try:
            result = run(case)
        except Exception as error:  # noqa: BLE001 - one case that SGLang refuses must not end the others
            result = {
                **{k: case[k] for k in ("components", "shape", "page_size", "conversations", "core")},
                "error": f"{type(error).__name__}: {error}"[:300],
            }
        print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
