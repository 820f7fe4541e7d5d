"""The reference model's bits depend on tokens and weights, on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from hicache.engine.architecture import PRESETS, ReferenceConfig
from hicache.engine.model import ReferenceModel
from hicache.request import Request
from hicache.testing.paged_model import PagedModel
from hicache.types import NO_SLOT, Component

LENGTH = 165  # more than two windows, and not a multiple of a tile or of a page
CONFIGS = {name: replace(config, window=48) for name, config in PRESETS.items()}
CONFIGS["five-in-thirty"] = replace(CONFIGS["five-in-thirty"], layers=PRESETS["five-in-thirty"].layers[:6])
CONFIGS["dense"] = replace(CONFIGS["dense"], layers=PRESETS["dense"].layers[:2], draft=True)
CONFIGS["compressed"] = replace(CONFIGS["compressed"], draft=True)
TOKENS = [random.Random(7).randrange(512) for _ in range(LENGTH)]


@pytest.fixture(params=list(CONFIGS), scope="module")
def config(request: pytest.FixtureRequest) -> ReferenceConfig:
    return CONFIGS[request.param]


def assert_same_rows(one: PagedModel, a: Request, two: PagedModel, b: Request) -> None:
    end = min(a.computed, b.computed)
    for component in one.spec.kinds:
        if component is Component.MAMBA:
            assert a.computed == b.computed
            pairs = zip(one.state(a.state), two.state(b.state), strict=True)
        else:
            first = 0 if component is Component.FULL else max(0, end - one.config.window)
            pairs = zip(one.rows(a, component, first, end), two.rows(b, component, first, end), strict=True)
        for x, y in pairs:
            assert torch.equal(x, y), component
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_chunking_gives_the_same_logits_and_rows(config: ReferenceConfig, page_size: int) -> None:
    """A different --chunked-prefill-size would change a user's answer, or the bytes in the shared store."""
    whole = PagedModel(config, page_size)
    cold = whole.request(TOKENS)
    whole.prefill(cold, [LENGTH])
    for chunks in ([1], [7], [16], [64], [33, 5, 100]):
        other = PagedModel(config, page_size, seed=1)
        cut = other.request(TOKENS)
        other.prefill(cut, chunks)
        assert torch.equal(other.logits[-1], whole.logits[-1]), chunks
        assert_same_rows(whole, cold, other, cut)


@pytest.mark.parametrize(("page_size", "every"), [(1, 3), (16, 1), (64, 1)])
def test_a_hit_at_any_page_boundary_equals_the_cold_run(
    config: ReferenceConfig, page_size: int, every: int
) -> None:
    """A cache hit would answer differently from a miss."""
    paged = PagedModel(config, page_size)
    boundaries = range(page_size, LENGTH, page_size * every)
    cold = paged.request(TOKENS)
    paged.prefill(cold, [LENGTH], captures=boundaries)
    expected, checkpoints = paged.logits[-1], paged.captured
    for boundary in boundaries:
        hit = paged.resume(cold, boundary, checkpoints[boundary])
        paged.prefill(hit, [LENGTH])
        assert torch.equal(paged.logits[-1], expected), boundary
        assert_same_rows(paged, cold, paged, hit)
        paged.discard(hit, boundary)


def test_a_wrong_number_in_any_pool_of_any_family_shows(config: ReferenceConfig) -> None:
    """Tests that compare answers would not notice a sidecar that was never restored."""
    paged = PagedModel(replace(config, draft=True), 16)
    cold = paged.request(TOKENS)
    paged.prefill(cold, [LENGTH], captures=[144])
    expected, state = paged.logits[-1], paged.captured[144]
    for component in paged.spec.components:
        for pool in component.pools:
            hit = paged.resume(cold, 144, state)
            table = cold.swa if component.component is Component.SWA else cold.full
            # The last page but for rows of 32 tokens, whose last group ends with page 7.
            slot = hit.state if component.component is Component.MAMBA else table[7 if pool.ratio > 16 else 8]
            rows = paged.pools.pool(pool.name)
            before = rows[:, slot].clone()
            rows[:, slot] += 0.5
            paged.prefill(hit, [LENGTH])
            assert not torch.equal(paged.logits[-1], expected), pool.name
            rows[:, slot] = before
            paged.discard(hit, 144)


def test_a_turn_on_what_decode_wrote_equals_the_cold_turn(config: ReferenceConfig) -> None:
    """The second turn of a conversation would depend on whether the first was cached."""
    paged = PagedModel(config, 16)
    first = paged.request(TOKENS)
    first.tokens.append(paged.prefill(first, [64]))
    paged.decode(first, 60)
    history = first.tokens.tolist()

    paged.prefill(first, [1])  # the position of the last token, which a finished request never runs
    again = paged.request(history)
    paged.prefill(again, [len(history)])
    assert torch.equal(paged.logits[-1], paged.logits[-2])
    assert_same_rows(paged, again, paged, first)


def test_a_state_captured_inside_a_tile_is_that_of_a_prompt_that_ended_there() -> None:
    """A checkpoint would stand for other tokens than its key says."""
    paged = PagedModel(CONFIGS["hybrid"], 1)
    positions = (1, 3, 15, 16, 17, 40, 164)
    through = paged.request(TOKENS)
    paged.prefill(through, [LENGTH], captures=positions)
    captured = paged.captured
    for position in positions:
        ended = paged.request(TOKENS[:position])
        paged.prefill(ended, [LENGTH])
        for x, y in zip(paged.state(captured[position]), paged.state(ended.state), strict=True):
            assert torch.equal(x, y), position
        paged.discard(ended)


@pytest.mark.parametrize("pool", ["full_kv", "full_index", "swa_kv", "mamba_state", "mamba_conv"])
def test_a_wrong_row_in_any_pool_changes_the_logits(pool: str) -> None:
    """Byte-equality tests would pass on a cache that restores one pool of a family wrongly."""
    paged = PagedModel(CONFIGS["hybrid"], 16)
    donor = paged.request(TOKENS)
    paged.prefill(donor, [LENGTH], captures=[144])
    hit = paged.resume(donor, 144, paged.captured[144])
    table = {"full": hit.full, "swa_": hit.swa}.get(pool[:4])
    slot = hit.state if table is None else table[7]
    tensor = paged.pools.pool(pool)
    tensor[:, slot] = tensor[:, slot].flip(-1)
    expected = paged.logits[-1]
    paged.prefill(hit, [LENGTH])
    assert not torch.equal(paged.logits[-1], expected)


def test_swa_sees_exactly_the_window_before_a_position() -> None:
    """A window that is off by one would hide a tombstone, or demand a page the tree may drop."""
    config = ReferenceConfig(layers=(Component.SWA, Component.FULL), window=32)
    paged = PagedModel(config, 1)
    donor = paged.request(TOKENS)
    paged.prefill(donor, [LENGTH - 1, 1])
    expected = paged.logits[-1]
    for distance, changes in ((32, True), (33, False)):
        hit = paged.request(TOKENS)
        hit.full, hit.swa, hit.computed = donor.full[:], donor.swa[:], LENGTH - 1
        wrong = paged.slot()
        pool = paged.pools.pool("swa_kv")
        pool[:, wrong] = -pool[:, donor.swa[LENGTH - 1 - distance]]
        hit.swa[LENGTH - 1 - distance] = wrong
        paged.prefill(hit, [1])
        assert torch.equal(paged.logits[-1], expected) is not changes


def test_pages_outside_the_window_may_be_tombstones() -> None:
    """SWA memory could never be given back while a request runs."""
    paged = PagedModel(CONFIGS["full-swa"], 16)
    cold = paged.request(TOKENS)
    paged.prefill(cold, [LENGTH])
    eager = paged.request(TOKENS)
    while eager.computed < LENGTH:
        gone = max(0, eager.computed - paged.config.window) // 16
        for page in range(gone):
            eager.swa[page] = NO_SLOT
        eager.computed += 20
        end = min(eager.computed, LENGTH)
        paged.runner.prefill(eager, eager.computed - 20, end)
    assert torch.equal(paged.logits[-1], paged.logits[0])


def test_weights_follow_from_the_seed_alone() -> None:
    """Two replicas would fill one store with rows of different models under one key."""
    config = CONFIGS["hybrid"]
    hidden = [ReferenceModel(c)._head for c in (config, config, replace(config, seed=1))]
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.equal(hidden[0], hidden[2])
