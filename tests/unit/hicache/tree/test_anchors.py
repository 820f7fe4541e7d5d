"""The reuse boundary that every component accepts, on the examples that must hold."""

from __future__ import annotations

from array import array

import pytest

from hicache.tree import TreeRules, UnifiedTree, make_policy
from hicache.types import NO_SLOT, Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
PAGE = 4


def four_pages(*kinds: Component, parts: tuple[int, ...] = (4,)) -> tuple[UnifiedTree, array[int]]:
    """Four pages of four tokens, SWA missing on page 3 (tokens 8..12), states at tokens 4 and 12."""
    tree = UnifiedTree(TreeRules(PAGE, kinds, 1 if SWA in kinds else 0), make_policy("lru"))
    tokens = array("I", range(100, 117))
    lease = tree.lock(tree.match(b"", tokens, 0), 0, Tier.DEVICE)
    start = 0
    for end in parts:
        tree.insert(
            lease,
            tokens,
            start,
            end,
            full=array("i", range(start, end)),
            swa=array("i", [NO_SLOT if page == 2 else page for page in range(start, end)])
            if SWA in kinds
            else None,
            states=[(at, slot) for at, slot in ((1, 0), (3, 1)) if start < at <= end and MAMBA in kinds],
            now=float(end),
        )
        start = end
    tree.release(lease)
    tree.check_integrity()
    return tree, tokens


@pytest.mark.parametrize("parts", [(4,), (1, 2, 3, 4), (2, 4)])
@pytest.mark.parametrize(
    ("kinds", "tokens"),
    [((FULL, SWA, MAMBA), 4), ((FULL, SWA), 16), ((FULL,), 16), ((FULL, MAMBA), 12)],
)
def test_the_reuse_boundary_is_the_deepest_that_every_component_accepts(
    kinds: tuple[Component, ...], tokens: int, parts: tuple[int, ...]
) -> None:
    """A wrong boundary resumes a model from a window or a state that is not there: wrong output."""
    tree, prompt = four_pages(*kinds, parts=parts)
    found = tree.match(b"", prompt, 16)
    assert found.device * PAGE == tokens
    assert found.host * PAGE == tokens
    assert found.full * PAGE == 16
    assert found.branch == ((4,) if tokens < 16 else ())


def test_the_limit_is_in_tokens_and_floored_to_pages() -> None:
    """An engine that must compute the last position would otherwise be given all of it."""
    tree, prompt = four_pages(FULL)
    assert [tree.match(b"", prompt, limit).device for limit in (0, 3, 4, 7, 15, 16, 17, 99)] == [
        0,
        0,
        1,
        1,
        3,
        4,
        4,
        4,
    ]


def test_scopes_share_nothing() -> None:
    """Two adapters with the same prompt must not read each other's pages."""
    tree, prompt = four_pages(FULL)
    assert tree.match(b"x" * 32, prompt, 16).full == 0
