"""Loading against computing, as measured: evidence first, no flapping, and a way back."""

from __future__ import annotations

import pytest

from hicache.policy.recompute import Choice, LoadOrRecompute
from hicache.types import Tier

MB = 1_000_000


def policy(*, load_s: float, prefill_tokens_per_s: float = 1000.0, times: int = 4) -> LoadOrRecompute:
    """A policy that has seen `times` reads of 1 MB from storage, and as many steps of prefill."""
    made = LoadOrRecompute(margin=0.25, retry_s=30.0)
    for _ in range(times):
        made.loaded(Tier.STORAGE, MB, load_s)
        made.computed(100, 100 / prefill_tokens_per_s)
    return made


def choose(made: LoadOrRecompute, *, tokens: int = 1000, size: int = MB, now: float = 0.0) -> Choice:
    return made.choose(Tier.STORAGE, size=size, tokens=tokens, now=now)


@pytest.mark.parametrize(
    ("load_s", "choice"),
    [(0.1, Choice.LOAD), (1.2, Choice.LOAD), (1.3, Choice.RECOMPUTE), (60.0, Choice.RECOMPUTE)],
)
def test_a_hit_that_costs_more_than_it_saves_is_computed(load_s: float, choice: Choice) -> None:
    """A slow store would make every answer slower than no store at all."""
    assert choose(policy(load_s=load_s)) is choice  # computing 1000 tokens takes 1 s; the margin is a quarter


def test_without_evidence_a_hit_is_loaded() -> None:
    """One slow read after the start would switch a good store off."""
    assert choose(LoadOrRecompute(margin=0.25, retry_s=30.0)) is Choice.LOAD
    assert choose(policy(load_s=60.0, times=2)) is Choice.LOAD


def test_a_transfer_of_another_size_is_no_evidence() -> None:
    """A store that takes 10 ms for anything would lose its large hits for the sake of small ones."""
    assert choose(policy(load_s=60.0), size=100 * MB, tokens=1000) is Choice.LOAD
    assert choose(policy(load_s=60.0), size=2 * MB, tokens=1000) is Choice.RECOMPUTE


def test_one_transfer_that_was_held_up_changes_nothing() -> None:
    """A hiccup of the network, or of the machine, would cost hits."""
    made = policy(load_s=0.1)
    made.loaded(Tier.STORAGE, MB, 500.0)
    assert choose(made) is Choice.LOAD


def test_a_decision_does_not_flap_around_the_break_even_point() -> None:
    """Every second request would wait for nothing."""
    made = policy(load_s=1.3)
    assert choose(made) is Choice.RECOMPUTE
    for _ in range(4):
        made.loaded(Tier.STORAGE, MB, 0.9)  # a little faster than computing: not enough to go back
    assert choose(made) is Choice.RECOMPUTE
    for _ in range(4):
        made.loaded(Tier.STORAGE, MB, 0.7)
    assert choose(made) is Choice.LOAD
    for _ in range(4):
        made.loaded(Tier.STORAGE, MB, 1.1)
    assert choose(made) is Choice.LOAD


def test_a_store_that_has_become_fast_is_found_out_and_used_again() -> None:
    """What is not used is not measured: without trials a slow hour would switch L3 off for ever."""
    made = policy(load_s=60.0)
    assert [choose(made, now=at) for at in (0.0, 29.0)] == [Choice.RECOMPUTE] * 2
    assert choose(made, now=31.0) is Choice.TRIAL
    assert choose(made, now=32.0) is Choice.RECOMPUTE  # one at a time
    made.loaded(Tier.STORAGE, MB, 0.01)
    assert choose(made, now=33.0) is Choice.LOAD


def test_what_was_not_measured_says_nothing() -> None:
    """Executors that do not measure report 0 s, which is no infinite bandwidth."""
    made = LoadOrRecompute(margin=0.25, retry_s=30.0)
    for _ in range(5):
        made.loaded(Tier.HOST, MB, 0.0)
        made.computed(100, 0.0)
    assert made.bytes_per_s(Tier.HOST) is None
    assert made.prefill_tokens_per_s is None


def test_tiers_are_weighed_apart() -> None:
    """A slow store would switch L2 off."""
    made = policy(load_s=60.0)
    for _ in range(4):
        made.loaded(Tier.HOST, MB, 0.001)
    assert made.choose(Tier.HOST, size=MB, tokens=1000, now=0.0) is Choice.LOAD
    assert choose(made) is Choice.RECOMPUTE
