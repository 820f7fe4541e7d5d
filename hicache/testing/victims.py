"""Which FULL page the naive cache gives up next, by looking at all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from hicache.tree.adaptive import Adaptive
from hicache.tree.base import TreeRules
from hicache.tree.eviction import EvictionPolicy
from hicache.types import Component, Tier

if TYPE_CHECKING:
    from hicache.testing.oracle_pages import Page

FULL = Component.FULL


def next_full(
    pages: Iterable[Page], kept: Set[Page], tier: Tier, policy: EvictionPolicy, rules: TreeRules
) -> Page:
    """Of the unprotected tails with the fewest sessions, the one that the policy puts first.

    Keys differ, for no two accesses share a time.
    """
    tails = [page for page in pages if page not in kept and _is_tail(page, tier)]
    fewest = min(len(page.sessions) for page in tails)
    keys = {page: _key(page, policy, rules) for page in tails if len(page.sessions) == fewest}
    if isinstance(policy, Adaptive):
        return _lesser_end(policy, keys)
    return min(keys, key=keys.__getitem__)


def _is_tail(page: Page, tier: Tier) -> bool:
    if tier is Tier.DEVICE:
        below = page.children.values()
        return page.has(FULL, tier) and not any(child.has(FULL, tier) for child in below)
    return not page.children and not page.has(FULL, Tier.DEVICE)


def _key(page: Page, policy: EvictionPolicy, rules: TreeRules) -> Any:
    if policy.spares_anchored and not all(page.on_any(component) for component in rules.kinds):
        return policy.unanchored_key(page.stats)
    return policy.key(page.stats, (page.depth - 1) * rules.page_size)


def _lesser_end(policy: Adaptive, keys: Mapping[Page, Any]) -> Page:
    """Of the oldest and the newest of each kind, the one worth least."""
    found = []
    for kind in {key[0] for key in keys.values()}:
        tails = [page for page in keys if keys[page][0] == kind]
        oldest, newest = min(tails, key=keys.__getitem__), max(tails, key=keys.__getitem__)
        worth, is_newest = policy.lesser_end(keys[oldest], keys[newest])
        found.append((worth, newest if is_newest else oldest))
    return min(found, key=lambda end: end[0])[1]
