"""The runner honours gates, page tables and captures, and refuses what it cannot compute."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from hicache.engine.architecture import PRESETS
from hicache.errors import InvariantViolation
from hicache.request import Capture
from hicache.testing.paged_model import PagedModel
from hicache.types import NO_SLOT, Component

TOKENS = [random.Random(3).randrange(512) for _ in range(100)]


class LazyLoad:
    """A load whose layer arrives at the moment it is waited for, and not before."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._hidden = {
            pool.name: paged.pools.pool(pool.name).clone() for c in paged.spec.components for pool in c.pools
        }
        self.waited: list[int] = []
        for name in self._hidden:
            paged.pools.pool(name).fill_(float("nan"))

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)
        spec = self._paged.spec
        component = spec.layers[layer]
        at = spec.layers[:layer].count(component)
        for pool in spec[component].pools:
            self._paged.pools.pool(pool.name)[at] = self._hidden[pool.name][at]

    def done(self) -> bool:
        return len(self.waited) == len(self._paged.spec.layers)


def test_no_layer_is_touched_before_its_gate() -> None:
    """With layer-wise loading a layer would compute on bytes that have not arrived."""
    paged = PagedModel(PRESETS["hybrid"], 16)
    donor = paged.request(TOKENS)
    paged.prefill(donor, [100], captures=[64])
    expected = paged.logits[-1]
    hit = paged.resume(donor, 64, paged.captured[64])
    load = LazyLoad(paged)
    hit.load = load
    paged.prefill(hit, [100])
    assert load.waited == list(range(8))
    assert torch.equal(paged.logits[-1], expected)


def test_a_token_is_sampled_only_behind_the_last_position() -> None:
    """A chunk in the middle of a prompt would emit a token."""
    paged = PagedModel(PRESETS["full"], 16)
    request = paged.request(TOKENS)
    assert paged.runner.prefill(request, 0, 50) is None
    token = paged.runner.prefill(request, 50, 100)
    assert token == int(paged.logits[-1].argmax())


def test_interleaved_requests_do_not_change_each_other() -> None:
    """An answer would depend on what else the server was doing."""
    paged = PagedModel(PRESETS["hybrid"], 16)
    alone = paged.request(TOKENS)
    paged.prefill(alone, [100])
    expected = paged.logits[-1]
    a, b = paged.request(TOKENS), paged.request(TOKENS[::-1])
    for start in range(0, 100, 10):
        paged.runner.prefill(a, start, start + 10)
        if start == 90:
            assert torch.equal(paged.logits[-1], expected)
        paged.runner.prefill(b, start, start + 10)


def test_a_page_table_with_a_hole_is_refused() -> None:
    """A tombstone inside the window would be read as slot -1: another page's bytes."""
    paged = PagedModel(PRESETS["full-swa"], 16)
    request = paged.request(TOKENS)
    paged.prefill(request, [80, 20])
    hole, request.swa[4] = request.swa[4], NO_SLOT
    with pytest.raises(InvariantViolation, match=r"SWA pages \[1, 7\)"):
        paged.runner.prefill(request, 80, 100)
    request.swa[4], request.full = hole, array("i", request.full[:5])
    with pytest.raises(InvariantViolation, match="FULL pages"):
        paged.runner.prefill(request, 80, 100)


def test_a_capture_outside_of_the_step_is_refused() -> None:
    """A checkpoint that is never written would be published with whatever its slot held."""
    paged = PagedModel(PRESETS["full-mamba"], 16)
    request = paged.request(TOKENS)
    request.captures = [Capture(64, paged.slot())]
    with pytest.raises(InvariantViolation, match="capture at 64"):
        paged.runner.prefill(request, 0, 48)


@pytest.mark.parametrize(("start", "end"), [(0, 101), (10, 10), (-1, 5)])
def test_positions_outside_of_the_tokens_are_refused(start: int, end: int) -> None:
    """A scheduler bug would read past a prompt."""
    paged = PagedModel(PRESETS["full"], 16)
    request = paged.request(TOKENS)
    with pytest.raises(InvariantViolation, match="positions"):
        paged.runner.prefill(request, start, end)


def test_a_recurrent_request_needs_a_private_state() -> None:
    """Two requests would advance one state."""
    paged = PagedModel(PRESETS["full-mamba"], 16)
    request = paged.request(TOKENS)
    request.state = NO_SLOT
    with pytest.raises(InvariantViolation, match="no private MAMBA state"):
        paged.runner.prefill(request, 0, 10)
    assert Component.MAMBA in paged.spec.kinds
