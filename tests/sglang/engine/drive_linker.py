"""SGLang's factory makes our linker on its real device pools; prints what became of it as one line of JSON.

    python drive_linker.py ADDRESS      of a `hicache serve`

For every kind of pool: a first linker offloads pages, a second one on pools of its own looks them up and
loads them, and the bytes of every buffer are compared. Then configs that cannot work.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from drive_tree import join, leave, serve_with

PAGE, PAGES, LAYERS, DIM = 64, 8, 3, 64
HASHES = [f"{i:064x}" for i in range(1, 4)]
BOUND_S = 30.0


def pools() -> dict[str, tuple[Callable[[], Any], set[str]]]:
    """Makers of real pools by kind, with the components of their tree."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common = {"size": PAGE * PAGES, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu"}
    heads = {"head_num": 2, "head_dim": DIM}
    latent = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "layer_num": LAYERS, "enable_memory_saver": False}
    return {
        "mha": (
            lambda: MHATokenToKVPool(layer_num=LAYERS, enable_memory_saver=False, **heads, **common),
            {"FULL"},
        ),
        "mla": (lambda: MLATokenToKVPool(**latent, **common), {"FULL"}),
        "dsa": (
            lambda: DSATokenToKVPool(**{**latent, "kv_cache_dim": 48, "index_head_dim": 128}, **common),
            {"FULL"},
        ),
        "swa": (
            lambda: SWAKVPool(
                size_swa=PAGE * PAGES,
                swa_attention_layer_ids=[0, 2],
                full_attention_layer_ids=[1],
                **heads,
                **common,
            ),
            {"FULL", "SWA"},
        ),
    }


def make(kvcache: Any, components: set[str], extra: dict[str, object]) -> Any:
    """Make a linker as SGLang does, by its own factory."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=SimpleNamespace(),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
        page_size=PAGE,
        tp_cache_group=dist.group.WORLD,
    )
    config = {
        "linker": "HiCacheLinker",
        "linker_module_path": "hicache.integrations.sglang.linker",
        "linker_extra_config": extra,
    }
    kinds = {ComponentType[name] for name in components}
    return create_unified_cache_linker(
        SimpleNamespace(), params, backend="dynamic", config=config, components=kinds
    )


def transfers(components: set[str], pages: list[int]) -> list[Any]:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    slots = torch.tensor([page * PAGE + row for page in pages for row in range(PAGE)])
    made = [PoolTransfer(name=PoolName.KV, device_indices=slots, keys=list(HASHES))]
    if "SWA" in components:
        made.append(PoolTransfer(name=PoolName.SWA, device_indices=slots, keys=list(HASHES)))
    return made


def rows(linker: Any, page: int) -> list[bytes]:
    parts = [part for pool in linker.pools.values() for part in pool.parts]
    return [bytes(layer[page].numpy()) for part in parts for layer in part.layers]


def fill(linker: Any) -> None:
    for pool in linker.pools.values():
        for part in pool.parts:
            for layer in part.layers:
                layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8))


def round_trip(maker: Callable[[], Any], components: set[str], extra: dict[str, object]) -> dict[str, Any]:
    first, second = (make(maker(), components, extra) for _ in range(2))
    fill(first)
    fill(second)
    source, target = [1, 2, 3], [7, 5, 6]
    began = time.monotonic()
    assert first.offload(transfers(components, source))
    while not first.num_completed_offloads():
        assert time.monotonic() - began < BOUND_S
        time.sleep(0.005)
    report: dict[str, Any] = {"stored": first.pop_completed_offload()}
    report["found"] = second.lookup("r", transfers(components, target))
    report["loads"] = second.load("r", transfers(components, target))
    index = second.start_layer_wise_loading()
    second.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        second.layer_done_counter.wait_until(layer)
    report["landed"] = second.finish_layer_wise_loading(index)
    pairs = zip(source, target, strict=True)
    report["equal"] = all(rows(first, a) == rows(second, b) for a, b in pairs)
    report["buffers"] = len(rows(first, 1))
    for linker in (first, second):
        linker.close()
    return report


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    join()
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from sglang.srt.server_args import ServerArgs

    from hicache.errors import ConfigError
    from hicache.integrations.sglang.linker import differences

    serve_with(ServerArgs(model_path="dummy", page_size=PAGE, device="cpu"))
    heard = Heard()
    logging.getLogger("hicache").addHandler(heard)
    extra: dict[str, object] = {"address": sys.argv[1], "weight_version": "1", "model_id": "m"}
    report: dict[str, Any] = {"differences": differences(UnifiedCacheLinker)}
    made = pools()
    for kind, (maker, components) in made.items():
        report[kind] = round_trip(maker, components, {**extra, "model_id": kind})
    maker, components = made["mha"]
    unversioned = make(maker(), components, {"address": sys.argv[1]})
    asked = transfers(components, [1, 2, 3])
    report["unversioned"] = [unversioned.off_because, unversioned.lookup("r", asked)]
    report["offloads when off"] = unversioned.offload(transfers(components, [1, 2, 3]))
    strange = make(maker(), {"FULL", "MAMBA"}, extra)
    report["strange"] = strange.off_because
    away = make(maker(), components, {**extra, "address": "127.0.0.1:1", "timeout_s": 0.5})
    report["away"] = [away.off_because, away.lookup("r", transfers(components, [1, 2, 3]))]
    away.close()
    try:
        make(maker(), components, {**extra, "lookup_timeout": 1})
    except ConfigError as error:
        report["misspelt"] = str(error)
    report["heard"] = [line for line in heard.lines if "L3 is off" in line or "without L3" in line]
    leave(report)


if __name__ == "__main__":
    main()
