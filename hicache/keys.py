"""Names of pages and objects: the chained page hash, the scope that seeds it, and the storage key.

Page hashes and the scope of `extra_key` and `cache_salt` are byte for byte what SGLang computes, so
that objects written through either side are found by the other.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import re
import struct
from functools import lru_cache

from hicache.types import TOKEN_BYTES, Component, TokenBuffer

NO_SCOPE = b""  # the scope of a request that adds nothing to the key
HASH_BYTES = 32

_SCOPE_LABEL = b"sglang-cache-namespace-v1"
_ABSENT = b"\x00"
_PRESENT = b"\x01"
_LORA = b"\x02"  # ours: follows the two parts above, so no SGLang scope has this form
_WIDE_PAGE = b"\xff"  # an odd byte in front tells a page of u64 words from one of u32 words
_U32_MAX = 0xFFFF_FFFF
_I64_MAX = 0x7FFF_FFFF_FFFF_FFFF
_NAME = re.compile(r"[A-Za-z0-9._=-]+")


class TokenUnit(enum.Enum):
    """What one position of a page is: a token, or the pair (token, next token) of draft-model trees."""

    SINGLE = "single"
    BIGRAM = "bigram"


def page_hashes(previous: bytes, tokens: TokenBuffer, page_size: int) -> list[bytes]:
    """Return the 32-byte digest of every whole page of `tokens` (LE u32); a rest is ignored.

    Digest i is SHA-256(digest i-1 || page i), so it names the whole prefix. `previous` is the digest
    before the first page: the scope for page 0, else 32 bytes.
    """
    _check(previous, page_size)
    data = _token_bytes(tokens)
    step = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    append = hashes.append
    for start in range(0, len(data) - step + 1, step):
        previous = sha256(previous + data[start : start + step]).digest()
        append(previous)
    return hashes


def page_hashes_wide(
    previous: bytes, tokens: TokenBuffer, page_size: int, *, unit: TokenUnit = TokenUnit.SINGLE
) -> list[bytes]:
    """Return page digests of tokens held as LE u64: ids above u32, and bigram units.

    A page whose ids all fit in u32 has the digest that `page_hashes` gives. With BIGRAM a page of
    `page_size` pairs reads one token more than it advances. Off the hot path.
    """
    _check(previous, page_size)
    view = memoryview(tokens).cast("B")
    if len(view) % 8:
        raise ValueError(f"{len(view)} bytes are no whole number of u64 tokens")
    ids = struct.unpack(f"<{len(view) // 8}Q", view)
    reach = 1 if unit is TokenUnit.BIGRAM else 0
    hashes = []
    for start in range(0, len(ids) - page_size - reach + 1, page_size):
        page = ids[start : start + page_size + reach]
        previous = hashlib.sha256(previous + _wide_page(page, unit)).digest()
        hashes.append(previous)
    return hashes


def _wide_page(page: tuple[int, ...], unit: TokenUnit) -> bytes:
    top = max(page)
    if top > _I64_MAX:
        raise ValueError(f"token id {top} does not fit in a signed 64-bit integer")
    words = page
    if unit is TokenUnit.BIGRAM:
        words = tuple(word for pair in itertools.pairwise(page) for word in pair)
    if top > _U32_MAX:
        return _WIDE_PAGE + struct.pack(f"<{len(words)}Q", *words)
    return struct.pack(f"<{len(words)}I", *words)


def scope(extra_key: str | None = None, cache_salt: str | None = None, lora: str | None = None) -> bytes:
    """Return what seeds the first page's hash: NO_SCOPE if all are absent, else 32 bytes.

    Without `lora` this is SGLang's seed. Absent, empty, and equal strings in different arguments all
    give different scopes.
    """
    if extra_key is None and cache_salt is None and lora is None:
        return NO_SCOPE
    digest = hashlib.sha256(_SCOPE_LABEL)
    for part in (extra_key, cache_salt):
        digest.update(_ABSENT if part is None else _tagged(_PRESENT, part))
    if lora is not None:
        digest.update(_tagged(_LORA, lora))
    return digest.digest()


def _tagged(tag: bytes, text: str) -> bytes:
    encoded = text.encode()
    return tag + struct.pack("<Q", len(encoded)) + encoded


def object_key(fingerprint: str, shard: str, component: Component, page_hash: bytes) -> str:
    """Return the storage key of one object: fingerprint/shard/component/hash, ASCII, readable.

    A MAMBA state is named by the hash of the page that it ends. `shard` is not empty.
    """
    return _family_prefix(fingerprint, shard, component) + page_hash.hex()


def key_prefix(fingerprint: str, shard: str = "") -> str:
    """Return what the keys of a model (and of one shard of it) begin with, for StorageBackend.clear."""
    for name in (fingerprint, shard or "-"):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} may hold only letters, digits and . _ = -")
    return f"{fingerprint}/{shard}/" if shard else f"{fingerprint}/"


@lru_cache(maxsize=256)
def _family_prefix(fingerprint: str, shard: str, component: Component) -> str:
    if not shard:
        raise ValueError("an object key needs a shard id")
    return f"{key_prefix(fingerprint, shard)}{component.name.lower()}/"


def _token_bytes(tokens: TokenBuffer) -> bytes:
    if isinstance(tokens, bytes):
        return tokens
    view = memoryview(tokens)
    if view.itemsize not in (1, TOKEN_BYTES):
        raise ValueError(f"tokens must be u32, not items of {view.itemsize} bytes")
    return view.tobytes()


def _check(previous: bytes, page_size: int) -> None:
    if len(previous) not in (0, HASH_BYTES):
        raise ValueError(f"a previous hash has 0 or {HASH_BYTES} bytes, not {len(previous)}")
    if page_size < 1:
        raise ValueError(f"page size {page_size} must be positive")
