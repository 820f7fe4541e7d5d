"""Text to token ids and back, without a vocabulary file: a token below 256 is a byte of UTF-8.

Lossless both ways: encode(decode(ids)) == ids for any ids, so a conversation kept as text hits the
same cache entries as one kept as ids. A token that is no readable text (an id from 256 on, a byte
that is not part of valid UTF-8) is written as one private-use character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PRIVATE = 0xF0000  # the character of token i is chr(_PRIVATE + i)
MAX_VOCAB = 0xFFFE  # private-use characters on that plane
_BYTES = 256
_SURROGATE = 0xDC00  # Python's stand-in for a byte that is not valid UTF-8


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    ids: list[int] = []
    for character in text:
        code = ord(character)
        if _PRIVATE <= code < _PRIVATE + MAX_VOCAB:
            ids.append(code - _PRIVATE)
        else:
            ids += character.encode("utf-8", "replace")  # a lone surrogate is no text
    return ids


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids below MAX_VOCAB."""
    pieces: list[str] = []
    run = bytearray()
    for token in ids:
        if token < _BYTES:
            run.append(token)
            continue
        pieces.append(_readable(run))
        pieces.append(chr(_PRIVATE + token))
        run.clear()
    pieces.append(_readable(run))
    return "".join(pieces)


def _readable(run: bytearray) -> str:
    text = run.decode("utf-8", "surrogateescape")
    if text.isascii():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if _SURROGATE <= code < _SURROGATE + _BYTES:
        return _private([code - _SURROGATE])
    if _PRIVATE <= code < _PRIVATE + MAX_VOCAB:  # bytes that happen to spell one of our stand-ins
        return _private(character.encode())
    return character


def _private(ids: Iterable[int]) -> str:
    return "".join(chr(_PRIVATE + token) for token in ids)
