"""Windows and states: the hit is the deepest boundary at which every component can resume."""

from __future__ import annotations

import random

import pytest

from hicache.boundary import acceptable, deepest
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.types import Component, Tier

SETS = [(FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]


def test_any_pattern_of_holes_and_states_equals_brute_force() -> None:
    """A window with a hole that is accepted reads freed memory."""
    rng = random.Random(5)
    for _ in range(3000):
        pages, window = rng.randint(1, 64), rng.randint(1, 16)
        swa = bytearray(rng.random() < rng.choice([0.5, 0.9, 0.98]) for _ in range(pages))
        states = sorted(rng.sample(range(1, pages + 1), rng.randint(0, min(4, pages))))
        align = rng.choice([1, 1, 2, 3, 8])
        for has_swa, has_states in ((True, False), (False, True), (True, True)):
            good = [
                b
                for b in range(1, pages + 1)
                if b % align == 0
                and (not has_swa or all(swa[max(0, b - window) : b]))
                and (not has_states or b in states)
            ]
            given = {
                "window_pages": window,
                "swa": swa if has_swa else None,
                "checkpoints": states if has_states else None,
                "align": align,
            }
            assert deepest(pages, **given) == max(good, default=0)  # type: ignore[arg-type]
            assert acceptable(pages, **given) == good  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 4, 16, 64, 100])
@pytest.mark.parametrize("islands", [False, True])
def test_every_window_and_page_size_keeps_the_last_page_and_counts_right(
    page_size: int, window: int, islands: bool
) -> None:
    """A window smaller than a page would tombstone the very page that is being written."""
    pages = -(-window // page_size)
    room = pages + 8 + 1 + 4
    bed = ScriptedCache(
        (FULL, SWA),
        page_size=page_size,
        window=window,
        device={FULL: 60 + pages, SWA: room},
        host={FULL: 200, SWA: 200},
        storage=False,
        islands=islands,
    )
    for length in (1, page_size, page_size + 1, 9 * page_size, 20 * page_size + 1):
        prompt = tokens(length, seed=length)
        bed.run(f"a{length}", prompt)
        again = bed.run(f"b{length}", prompt)
        assert again.cached.cached == (length - 1) // page_size * page_size
        bed.cache.tick()
        taken = room - bed.free(Tier.DEVICE)[SWA]
        assert taken == bed.cache.tree.resident(Tier.DEVICE, SWA)
    bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_states_and_windows_that_leave_the_device_stay_on_the_host(kinds: tuple[Component, ...]) -> None:
    """Backups would be made for nothing: the host has the pages, and the prompt is computed again."""
    bed = ScriptedCache(kinds, storage=False)
    prompt = tokens(41)
    bed.run("warm", prompt)
    count = bed.cache.tree.resident(Tier.DEVICE, FULL)
    bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, count).freed)
    assert not any(bed.cache.tree.resident(Tier.DEVICE, c) for c in kinds)
    again = bed.run("again", prompt)
    assert again.cached.host == 40
    assert bed.cache.stats.host_tokens == 40
    assert all(bed.cache.stats.loaded_pages[c.name.lower()] for c in kinds)
    bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("where", [Tier.DEVICE, Tier.HOST])
def test_losing_windows_or_states_on_one_tier_shortens_the_hit_and_never_spoils_it(
    kinds: tuple[Component, ...], where: Tier
) -> None:
    """FULL pages on the host, whose window or state was on the device alone, would be resumed without it."""
    for lost in kinds[1:]:
        for count in range(1, 12):
            bed = ScriptedCache(kinds, storage=False)
            prompt = tokens(41)
            bed.run("warm", prompt)
            bed.cache.pools.free_all(bed.cache.tree.evict(where, lost, count).freed)
            full = bed.cache.tree.resident(Tier.DEVICE, FULL)
            bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, FULL, full // 2).freed)
            other = Tier.HOST if where is Tier.DEVICE else Tier.DEVICE
            bed.cache.pools.free_all(bed.cache.tree.evict(other, lost, count // 2).freed)
            bed.cache.check_integrity()
            again = bed.run("again", prompt, new=5)  # the runner checks every page that it reads
            assert again.cached.cached + again.cached.computed == len(prompt)
            bed.check_quiet()


def test_a_hit_makes_a_window_recent() -> None:
    """Hot windows would go first, and each hit on them would be the last."""
    bed = ScriptedCache((FULL, SWA), storage=False, host={})
    a, b = tokens(33), tokens(33, seed=2)
    bed.run("a", a)
    bed.run("b", b)
    bed.run("a again", a)
    live = bed.cache.tree.resident(Tier.DEVICE, SWA)
    evicted = bed.cache.tree.evict(Tier.DEVICE, SWA, live - 3)
    assert len(evicted.freed[Tier.DEVICE, SWA]) == live - 3
    bed.cache.pools.free_all(evicted.freed)
    assert bed.hit(a) == 8
    assert bed.hit(b) < 8
    bed.check_quiet()
