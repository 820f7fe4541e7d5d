"""Recorded agent sessions at a reduced scale: a block of 64 tokens becomes a few.

What matters for a cache is kept: which prompt shares how many leading blocks with which.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache.bench.traces import read_trace
from hicache.types import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a session, in tokens of the reference model's vocabulary."""

    session: str
    number: int
    tokens: array[int]


@dataclass(frozen=True, slots=True)
class Scale:
    """How far a session is shrunk."""

    block_tokens: int  # instead of the block's own 64
    vocab: int
    requests: int  # the first so many of each session


def read_session(path: Path, scale: Scale) -> list[Prompt]:
    """Return the first requests of one session. Equal blocks give equal tokens, others different ones."""
    requests = read_trace(path)[: scale.requests]
    return [
        Prompt(path.stem, number, _expand(path.stem, request.blocks, scale))
        for number, request in enumerate(requests)
    ]


def _expand(session: str, blocks: tuple[int, ...], scale: Scale) -> array[int]:
    tokens = array("I")
    for block in blocks:
        drawn = hashlib.shake_256(f"{session}/{block}".encode()).digest(TOKEN_BYTES * scale.block_tokens)
        tokens.frombytes((np.frombuffer(drawn, dtype="<u4") % scale.vocab).astype("<u4").tobytes())
    return tokens
