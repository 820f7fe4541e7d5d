"""Keys: the same bytes as SGLang, and no two meanings under one name."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache import keys
from hicache.keys import TokenUnit, page_hashes, page_hashes_wide, scope
from hicache.types import Component, TokenBuffer

# Computed with the native hash extension and the seed function of SGLang 0.5.23.
SCOPES = {
    ("tenant", None): "16129d9ea8f65230ba7ac321d8fe33feba2d788a6a5633063b0b6c4aa1c199b0",
    (None, "salt"): "43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e",
    ("", None): "fd649dd130277fa0773e23e84ddfa4ec779d9df77087968a60d7cefb9050ab1d",
    (None, ""): "906782eeabf820a68eef4455ab98e5e86e311f658f7d7721723a97a90b81427e",
    ("a", "b"): "c8c5acd517d9109ddf84843ef6f4603af6c4fe55b093a70ed9de8e7ee5769282",
    ("ab", ""): "5381adf71a8d0d76db073cf2e301b7e61dd519d0f58e7b2b226752497af60785",
    ("größe", "塩"): "5950271087f2730db06416fee277a5a4e246b6dd93d86b697794b2f05bd65283",
}
PLAIN = [
    "1d533aec2cd826f8f398589c20e169718d95dc7b123918889d58e0d09b7960c7",
    "2be5b730d7617a19b1b69dac4c2006c6e7bfd529c18f7580d47ab872f44b17bb",
]
SEEDED = [
    "91b093073f8914529746b07c8dd62f32675d60d9307b60944759c304dce82ca2",
    "1bc875f56e05f2505bdb6517170d20ad54a464b837347c2452ba330243390489",
]
PAGE_OF_ONE = [
    "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119",
    "53f69ec6a1c7effbd864307243e74feaafa8b26bbdc9d066fe8b22ed64a010bb",
    "fe6d1e3db87cdc1f39e33917dab889bbfa0c46666a57e944d55110fc568d7c04",
]
WIDE = [
    "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
    "0cd29dd050cb8f82ce7c4266656445d203fcc706f9f386abd5e132e8cb6ce09b",
    "d1a5468d360a467c42cb463f6d39b6d5951847296bae54369fd65a9656ee9b11",
]
BIGRAM = [
    "7fa792d930d8e2559b572e4bdd311a30fe530ec023738e18b10c3bb9f4e0f6a9",
    "512eb5f43562a74c4489e0eea0ed2b7e08c2eb2563b1507df022ceb7b7a7b24b",
]
WIDE_BIGRAM = [
    "351c6574adc8db6e4bf38e28607bad52822b5a4c4ccc41dac276e9555d79f169",
    "ef1ba32beee418738da09569a377a25ea2490484f049b726420b88b89755670c",
    "1eece97b6e29492995ed58ac1805b441c78a5c8fb13948447d7a12bb7b7d396a",
]

parts = st.none() | st.sampled_from(["", "a", "b", "ab", "\x00", "\x01"]) | st.text(max_size=4)


def hexes(hashes: list[bytes]) -> list[str]:
    return [digest.hex() for digest in hashes]


@pytest.mark.parametrize(("arguments", "expected"), SCOPES.items())
def test_scope_equals_sglangs_seed(arguments: tuple[str | None, str | None], expected: str) -> None:
    """Objects written by SGLang for a salted request would never be found by our engine."""
    assert scope(*arguments).hex() == expected


def test_page_hashes_equal_sglangs() -> None:
    """The plug-in and our engine could not share one store."""
    tokens = array("I", range(1000, 1010))
    assert hexes(page_hashes(b"", tokens, 4)) == PLAIN
    assert hexes(page_hashes(scope("tenant", "salt"), tokens, 4)) == SEEDED
    assert hexes(page_hashes(b"", array("I", [0, 1, 2**32 - 1]), 1)) == PAGE_OF_ONE


def test_wide_and_bigram_page_hashes_equal_sglangs() -> None:
    """Multimodal ids above u32 and EAGLE trees would miss everything the other side stored."""
    wide = array("Q", [1, 2, 3, 4, 5, 2**32, 7, 8, 9, 10, 11, 12])
    assert hexes(page_hashes_wide(b"", wide, 4)) == WIDE
    pairs = array("Q", range(1000, 1009))
    assert hexes(page_hashes_wide(b"", pairs, 4, unit=TokenUnit.BIGRAM)) == BIGRAM
    wide_pairs = array("Q", [1, 2, 3, 4, 2**40, 6, 7, 8, 9, 10, 11, 12, 13])
    seed = scope(None, "x")
    assert hexes(page_hashes_wide(seed, wide_pairs, 4, unit=TokenUnit.BIGRAM)) == WIDE_BIGRAM


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.integers(0, 5))
def test_hashing_may_be_split_at_any_page(tokens: list[int], page_size: int, cut: int) -> None:
    """A node hashed in two steps would have other keys than one hashed at once."""
    whole = page_hashes(b"", array("I", tokens), page_size)
    assert len(whole) == len(tokens) // page_size
    at = min(cut, len(whole))
    head = page_hashes(b"", array("I", tokens[: at * page_size]), page_size)
    tail = page_hashes(head[-1] if head else b"", array("I", tokens[at * page_size :]), page_size)
    assert head + tail == whole
    assert page_hashes_wide(b"", array("Q", tokens), page_size) == whole


def test_every_token_buffer_type_gives_the_same_hashes() -> None:
    """An engine that hands over bytes would not share with one that hands over arrays."""
    tokens = array("I", range(32))
    kinds: list[TokenBuffer] = [
        tokens.tobytes(),
        bytearray(tokens.tobytes()),
        memoryview(tokens),
        memoryview(tokens.tobytes()),
    ]
    assert all(page_hashes(b"", kind, 8) == page_hashes(b"", tokens, 8) for kind in kinds)


@given(st.tuples(parts, parts, parts), st.tuples(parts, parts, parts))
def test_scopes_collide_only_when_all_parts_are_equal(
    one: tuple[str | None, str | None, str | None], two: tuple[str | None, str | None, str | None]
) -> None:
    """One tenant, salt or adapter would be served another's KV."""
    assert (scope(*one) == scope(*two)) == (one == two)


def test_absent_empty_and_moved_parts_are_all_different() -> None:
    """The cases that a naive concatenation confuses would share KV."""
    values = list(itertools.product([None, "", "x", "xx"], repeat=3))
    assert len({scope(*value) for value in values}) == len(values)
    assert scope() == keys.NO_SCOPE == b""


@pytest.mark.parametrize(
    ("previous", "tokens", "page_size"),
    [(b"short", array("I", [1]), 1), (b"", array("I", [1]), 0), (b"", array("Q", [1]), 1)],
)
def test_malformed_input_is_refused(previous: bytes, tokens: array[int], page_size: int) -> None:
    """Hashing u64 memory as u32 tokens would give silent, wrong keys."""
    with pytest.raises(ValueError, match=r"must|has"):
        page_hashes(previous, tokens, page_size)


def test_wide_ids_beyond_int64_and_torn_buffers_are_refused() -> None:
    """They would hash to something that SGLang refuses."""
    with pytest.raises(ValueError, match="64-bit"):
        page_hashes_wide(b"", array("Q", [2**63]), 1)
    with pytest.raises(ValueError, match="u64"):
        page_hashes_wide(b"", b"1234", 1)


def test_object_keys_begin_with_what_clear_is_given() -> None:
    """Clearing a model would leave its objects, or take another model's."""
    key = keys.object_key("f" * 32, "tp0of2", Component.SWA, bytes(32))
    assert key == "f" * 32 + "/tp0of2/swa/" + "00" * 32
    assert key.startswith(keys.key_prefix("f" * 32))
    assert key.startswith(keys.key_prefix("f" * 32, "tp0of2"))
    assert not key.startswith(keys.key_prefix("f" * 32, "tp0of"))
    assert not key.startswith(keys.key_prefix("f" * 31))


@pytest.mark.parametrize(("fingerprint", "shard"), [("a/b", "s"), ("", "s"), ("f", "a/b"), ("f", "x y")])
def test_names_that_could_forge_a_key_are_refused(fingerprint: str, shard: str) -> None:
    """A shard called `a/full` could name another shard's objects."""
    with pytest.raises(ValueError, match="only letters"):
        keys.object_key(fingerprint, shard, Component.FULL, bytes(32))


def test_an_object_key_needs_a_shard() -> None:
    """All ranks of a replica would overwrite each other."""
    with pytest.raises(ValueError, match="shard"):
        keys.object_key("f", "", Component.FULL, bytes(32))
