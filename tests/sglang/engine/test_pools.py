"""SGLang's own host pools, of every kind and layout that a CPU can hold, through our view of their pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hicache.integrations.sglang.pages import StridedPages, open_pool

pytestmark = pytest.mark.filterwarnings("ignore")  # what SGLang imports warns in plenty

PAGE, LAYERS, HEADS, DIM, PAGES = 4, 3, 2, 8, 6


@pytest.fixture(scope="module", autouse=True)
def _plain_memory() -> None:
    """Host pools in ordinary memory."""
    cpu = pytest.importorskip(
        "hicache_sglang_cpu", reason="SGLang for a CPU is not installed here; see `make test-sglang`"
    )
    cpu.plugin()


def host_pool(kind: str, layout: str) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common = {"size": PAGES * PAGE, "page_size": PAGE, "layer_num": LAYERS, "device": "cpu"}
    common |= {"enable_memory_saver": False, "dtype": torch.bfloat16}
    if kind == "latent":
        device = MLATokenToKVPool(kv_lora_rank=12, qk_rope_head_dim=4, **common)
    else:
        wider = {"v_head_dim": 2 * DIM} if kind == "asymmetric" else {}
        device = MHATokenToKVPool(head_num=HEADS, head_dim=DIM, **wider, **common)
    return _build_mha_mla_host_pool(
        pool=device,
        host_to_device_ratio=1.0,
        page_size=PAGE,
        layout=layout,
        allocator_type="default",
        pool_label="kv",
    )


def value(part: int, layer: int, token: int, head: int, dim: int) -> int:
    """What stands at a place of the model, whatever the layout."""
    return (part * 101 + layer * 53 + token * 17 + head * 7 + dim * 3) % 251


def fill(array: torch.Tensor, part: int, layout: str, layers: int, heads: int, dims: int) -> None:
    """Write the values where this layout has them, one by one."""
    for layer in range(layers):
        for token in range(PAGES * PAGE):
            for head in range(heads):
                row = torch.tensor([value(part, layer, token, head, dim) for dim in range(dims)])
                page, rest = divmod(token, PAGE)
                if layout == "layer_first":
                    array[layer, token, head] = row
                elif layout == "page_first":
                    array[token, layer, head] = row
                elif layout == "page_head":
                    array[page, head, rest, layer] = row
                else:
                    array[page, layer, rest, head] = row


def expected(part: int, page: int, heads: int, dims: int) -> bytes:
    rows = [
        [value(part, layer, page * PAGE + rest, head, dim) for dim in range(dims)]
        for layer in range(LAYERS)
        for rest in range(PAGE)
        for head in range(heads)
    ]
    return torch.tensor(rows, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("equal", layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
        *(("asymmetric", layout) for layout in ("page_first", "page_first_direct")),
        *(("latent", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
    ],
)
def test_a_page_of_sglangs_pool_has_our_order(kind: str, layout: str) -> None:
    """An axis taken for another gives KV that is wrong everywhere and fails nowhere."""
    pool = host_pool(kind, layout)
    arrays = [pool.kv_buffer] if kind == "latent" else [pool.k_buffer, pool.v_buffer]
    heads = 1 if kind == "latent" else HEADS
    dims = [16] if kind == "latent" else [DIM, 2 * DIM if kind == "asymmetric" else DIM]
    for part, array in enumerate(arrays):
        fill(array, part, layout, LAYERS, heads, dims[part])
    pages = open_pool("kv", pool)
    assert isinstance(pages, StridedPages)
    assert [spec.num_layers for spec in pages.specs] == [LAYERS] * len(arrays)
    assert [spec.rows_per_page for spec in pages.specs] == [PAGE] * len(arrays)
    buffers = [bytearray(spec.page_bytes) for spec in pages.specs]
    for page in (0, 3):
        pages.read(page * PAGE, [memoryview(buffer) for buffer in buffers])
        for part, buffer in enumerate(buffers):
            assert bytes(buffer) == expected(part, page, heads, dims[part])
    pages.write(5 * PAGE, [memoryview(buffer) for buffer in buffers])
    pages.read(5 * PAGE, [memoryview(buffer) for buffer in buffers])
    assert bytes(buffers[0]) == expected(0, 3, heads, dims[0])
    if kind != "asymmetric":
        flat = pages.flat_parts(pool.get_data_page(3 * PAGE, flat=True))
        assert [part.tobytes() for part in flat] == [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_recurrent_state_of_sglangs_pool_comes_back(layout: str) -> None:
    """A state is several arrays of different types; one of them left out is a wrong continuation."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    temporal = torch.zeros((2, 8, 3, 5), dtype=torch.float32)
    conv = (torch.zeros((2, 8, 7), dtype=torch.bfloat16),)
    info = MambaStateBufferInfo(temporal=temporal, conv=conv, extra_checkpoint_buffers=())
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, layout=layout)
    pages = open_pool("mamba", pool)
    assert isinstance(pages, StridedPages)
    assert sum(spec.page_bytes for spec in pages.specs) == pool.get_dummy_flat_data_page().numel()
    page = torch.randint(0, 256, (pool.get_dummy_flat_data_page().numel(),), dtype=torch.uint8)
    pool.set_from_flat_data_page(3, page)
    buffers = [bytearray(spec.page_bytes) for spec in pages.specs]
    pages.read(3, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == page.numpy().tobytes()
    pages.write(6, [memoryview(buffer) for buffer in buffers])
    assert torch.equal(pool.get_data_page(6), page)
