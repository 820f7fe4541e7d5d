"""Long simulations count what they did, and name the seed of what they broke."""

from __future__ import annotations

import pytest

from hicache.errors import InvariantViolation
from hicache.testing import endurance


def test_histories_add_up_to_the_operations_asked_for() -> None:
    """A million operations that were fewer would prove less than they say."""
    done = endurance.run_histories(250, 7, steps=100)
    assert done["operations"] == 250
    assert done["histories"] == 3
    assert done["requests"] == done["finished"] + done["aborted"] > 0


def test_storage_answers_many_requests_and_prefetches_end_in_every_way() -> None:
    """Histories in which storage is hardly ever read say nothing of what comes from there.

    About one request in eight hits; of so few histories the share differs by a third either way.
    """
    done = endurance.run_histories(8000, 0)
    assert done["requests with a hit in storage"] * 15 > done["requests"]
    ends = {"complete", "incomplete", "cut_off", "deadline", "aborted", "store_failed", "not_stored"}
    assert {f"prefetches: {end}" for end in ends} <= set(done)


def test_a_broken_law_is_told_with_the_seed_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure that nobody can see again cannot be mended."""
    ran = []

    def run(world: object, steps: int) -> None:
        ran.append((world, steps))
        if world == 8:
            raise InvariantViolation("a slot with two owners")

    monkeypatch.setattr(endurance, "make_world", lambda seed: seed)
    monkeypatch.setattr(endurance, "what_happened", lambda world: {})
    monkeypatch.setattr(endurance, "run", run)
    assert endurance.main(["--operations", "1000", "--seed", "7", "--steps", "100"]) == 1
    assert ran == [(7, 100), (8, 100)]
    told = capsys.readouterr().err
    assert "seed 8 breaks a law" in told
    assert "a slot with two owners" in told
    assert "make test-simulation SEED=8 OPS=100" in told
