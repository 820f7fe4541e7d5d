"""Comparing tokens, on which every hit rests."""

from __future__ import annotations

import random

import pytest

from hicache.tree.reading import common_bytes


def naive(held: bytearray, offset: int, view: bytes, start: int, end: int) -> int:
    count = 0
    while offset + count < len(held) and start + count < end and held[offset + count] == view[start + count]:
        count += 1
    return count


@pytest.mark.parametrize("most", [40, 3000, 20000])  # bisected; around the limit; found by words of 8 bytes
def test_tokens_agree_up_to_their_first_difference(most: int) -> None:
    """A long hit would end too early, or go on into another prompt."""
    draw = random.Random(most)
    for _ in range(150):
        offset, start = draw.randrange(4) * 4, draw.randrange(4) * 4
        same = draw.randbytes(draw.randrange(most // 2, most))
        held = bytearray(draw.randbytes(offset) + same + draw.randbytes(draw.randrange(8)))
        view = draw.randbytes(start) + same + draw.randbytes(draw.randrange(8))
        for _ in range(draw.randrange(3)):
            held[offset + draw.randrange(len(same))] ^= 1 << draw.randrange(8)
        end = draw.randrange(start + len(same) // 2, len(view) + 1)
        agreed = common_bytes(held, offset, memoryview(view), start, end)
        assert agreed == naive(held, offset, view, start, end)
