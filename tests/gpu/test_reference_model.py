"""The reference model is as exact on a CUDA device: its bits do not depend on how the work is cut."""

from __future__ import annotations

import random

import pytest
import torch

from hicache.engine.architecture import PRESETS
from hicache.testing.paged_model import PagedModel

DEVICE = "cuda"
TOKENS = [random.Random(7).randrange(512) for _ in range(165)]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_chunks_hits_and_decoded_history_agree_with_a_cold_run(preset: str) -> None:
    """On a GPU, answers would depend on the cache."""
    paged = PagedModel(PRESETS[preset], 16, device=DEVICE)
    cold = paged.request(TOKENS)
    first = paged.prefill(cold, [165], captures=[64])
    expected, checkpoint = paged.logits[-1], paged.captured[64]
    for chunks in ([1], [7], [33, 5, 100]):
        paged.prefill(paged.request(TOKENS), chunks)
        assert torch.equal(paged.logits[-1], expected), chunks
    paged.prefill(paged.resume(cold, 64, checkpoint), [165])
    assert torch.equal(paged.logits[-1], expected)

    cold.tokens.append(first)
    paged.decode(cold, 30)
    paged.prefill(cold, [1])
    paged.prefill(paged.request(cold.tokens.tolist()), [len(cold.tokens)])
    assert torch.equal(paged.logits[-1], paged.logits[-2])
