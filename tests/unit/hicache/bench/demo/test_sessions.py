"""Recorded sessions at a reduced scale keep what a cache sees: who shares which prefix with whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.bench.demo.sessions import Scale, read_session
from hicache.bench.traces import read_trace

SESSIONS = sorted((Path(__file__).parents[4] / "traces" / "sessions").glob("*.json"))
SCALE = Scale(block_tokens=4, vocab=512, requests=6)


def shared(one: object, other: object) -> int:
    """Length of the common beginning of two sequences."""
    pairs = zip(one, other, strict=False)  # type: ignore[call-overload]
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", SESSIONS, ids=lambda p: p.stem)
def test_prompts_share_as_many_blocks_as_were_recorded(path: Path) -> None:
    """A replay that shared more or less than the recording would show hits that are not real."""
    recorded = [r.blocks for r in read_trace(path)[: SCALE.requests]]
    prompts = read_session(path, SCALE)
    assert len(prompts) == SCALE.requests
    for one, blocks in zip(prompts, recorded, strict=True):
        assert len(one.tokens) == len(blocks) * SCALE.block_tokens
        assert max(one.tokens) < SCALE.vocab
        for other, other_blocks in zip(prompts, recorded, strict=True):
            assert shared(one.tokens, other.tokens) // SCALE.block_tokens == shared(blocks, other_blocks)


def test_sessions_share_nothing() -> None:
    """Ids are local to a session: a hit across sessions would be an accident of the numbering."""
    prompts = [read_session(path, SCALE)[0].tokens for path in SESSIONS]
    assert len(prompts) == 4
    for i, one in enumerate(prompts):
        assert all(shared(one, other) < SCALE.block_tokens for other in prompts[:i])
