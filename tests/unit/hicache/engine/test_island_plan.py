"""What a running request retains, as the cache gives SWA back, and the pool ratios that assume islands."""

from __future__ import annotations

import pytest

from hicache.engine.island_plan import ratio_warning, retained_tokens
from hicache.tree import TreeRules
from hicache.tree.islands import frontier
from hicache.types import Component


def kept(length: int, window: int, page_size: int) -> int:
    """Tokens from the cache's frontier to the page boundary at `length`."""
    rules = TreeRules(page_size, (Component.FULL, Component.SWA), -(-window // page_size))
    return length - page_size * frontier(length // page_size, rules)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [1, 4, 16, 64, 100, 1024])
def test_the_frontier_keeps_the_window_and_a_page_at_every_page_boundary(page_size: int, window: int) -> None:
    """A frontier too far on frees what the next token reads; one too far back frees nothing."""
    for length in range(0, 40 * page_size, page_size):
        held = kept(length, window, page_size)
        assert held == min(length, retained_tokens(window, page_size))
        assert held >= min(length, window + page_size)
        assert held < max(window, page_size) + 2 * page_size


def test_the_published_window_retains_1088_tokens() -> None:
    """The figure that the published floor is made of."""
    assert retained_tokens(1024, 64) == 1088
    assert 32_000 - kept(32_000, 1024, 64) == 30_912


def test_a_split_that_assumes_islands_is_named_with_both_ways_out() -> None:
    """Hits would be lost for days before anybody looked at the ratio."""
    given = {"full_tokens": 980_000, "chunk": 16_384, "running": 48, "window": 1024, "page_size": 64}
    text = ratio_warning(swa_tokens=166_600, **given)
    assert text is not None
    assert "--swa-full-tokens-ratio 0.17 assumes islands" in text
    assert "--enable-swa-islands (that is enough with them)" in text
    assert "at least 0.5" in text
    assert ratio_warning(swa_tokens=490_000, **given) is None


def test_the_default_ratio_and_few_requests_assume_nothing() -> None:
    """A warning at every start is one that nobody reads."""
    given = {"full_tokens": 16_384, "chunk": 2048, "window": 64, "page_size": 64}
    assert ratio_warning(swa_tokens=13_107, running=16, **given) is None
    assert ratio_warning(swa_tokens=2785, running=1, **given) is None
    assert ratio_warning(swa_tokens=2785, running=16, **given) is not None
