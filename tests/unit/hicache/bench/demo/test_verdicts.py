"""The demo's verdicts: what is printed as kept was kept, and nothing else."""

from __future__ import annotations

import io
from array import array

import pytest
from rich.console import Console

from hicache.bench.demo.checks import Checks
from hicache.bench.demo.client import Answer, Tally
from hicache.bench.demo.cliff import _fall
from hicache.bench.demo.sessions import Prompt


def answer(
    prompt_tokens: int = 100, cached: int = 60, device: int = 10, host: int = 20, storage: int = 30
) -> Answer:
    prompt = Prompt("s", 0, array("I", range(100)))
    return Answer("http://x", prompt, array("I", [1]), prompt_tokens, cached, device, host, storage, 0.5)


def rounds(*hit_rates: float) -> list[dict[str, float]]:
    return [{"round": i, "hit_rate": rate} for i, rate in enumerate(hit_rates)]


def test_a_broken_promise_is_shown_and_counted() -> None:
    """A demo that printed a tick for something that did not happen would be worse than none."""
    text = io.StringIO()
    checks = Checks(Console(file=text, width=80))
    checks.that(1, "holds")
    checks.that(0, "does not hold")
    assert (checks.kept, checks.broken) == (1, ["does not hold"])
    assert text.getvalue().split("\n")[:2] == ["  ✓ holds", "  ✗ does not hold"]


@pytest.mark.parametrize(
    ("wrong", "adds_up"),
    [
        ({}, True),
        ({"storage": 31}, False),  # a token counted on two tiers
        ({"prompt_tokens": 99}, False),  # not the prompt that was sent
        ({"cached": 101, "device": 51}, False),  # more than there is
    ],
)
def test_an_answer_adds_up_only_if_every_token_came_from_somewhere(
    wrong: dict[str, int], adds_up: bool
) -> None:
    """Accounts that do not add up hide a tier that is counted twice or not at all."""
    assert answer(**wrong).adds_up is adds_up


def test_a_tally_is_the_sum_of_its_answers() -> None:
    """Tables show sums; a field left out would make a tier look unused."""
    tally = Tally.of([answer(), answer(cached=0, device=0, host=0, storage=0)])
    shown = (
        tally.requests,
        tally.prompt,
        tally.device,
        tally.host,
        tally.storage,
        tally.computed,
        tally.seconds,
    )
    assert shown == (2, 200, 10, 20, 30, 140, 1.0)


@pytest.mark.parametrize(
    ("rates", "fall"),
    [
        ((0.0, 0.5, 0.6, 0.02, 0.0), 3),
        ((0.0, 0.5, 0.6, 0.7, 0.8), None),  # never falls
        ((0.0, 0.5, 0.0, 0.7, 0.8), None),  # recovers
        ((0.0, 0.0, 0.0, 0.0, 0.0), None),  # never stood
    ],
)
def test_a_cliff_is_a_fall_for_good_from_a_height(rates: tuple[float, ...], fall: int | None) -> None:
    """A dip is no cliff, and a cache that never hit anything has none to fall from."""
    assert _fall(rounds(*rates)) == fall
