"""Text and ids are two spellings of the same tokens."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hicache.server.tokenizer import MAX_VOCAB, decode, encode


@given(st.lists(st.integers(0, MAX_VOCAB - 1)))
@example(list("\U000f0041".encode()))
@example([0xE2, 0x82, 300, 0xAC])
def test_ids_survive_text(ids: list[int]) -> None:
    """A conversation kept as text would miss the cache that its own answers filled."""
    assert encode(decode(ids)) == ids


@given(st.lists(st.integers(0, 511)), st.lists(st.integers(0, 511)))
def test_texts_join_like_ids(one: list[int], two: list[int]) -> None:
    """Prompt plus answer plus question as text would be other tokens than as ids."""
    assert encode(decode(one) + decode(two)) == one + two


@given(st.text(st.characters(codec="utf-8", max_codepoint=0xEFFFF)))
def test_text_survives_ids(text: str) -> None:
    """A prompt would not be what the user typed."""
    assert decode(encode(text)) == text


def test_ascii_is_its_bytes() -> None:
    """A reader of a log could not tell what was asked."""
    assert encode("Hi!") == [72, 105, 33]
    assert decode([72, 105, 33]) == "Hi!"
