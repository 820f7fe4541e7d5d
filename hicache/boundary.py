"""The one function that says which page boundaries a hybrid model can resume from.

Used alike by the tree, by the storage probe and by prefetch planning, over flat presence vectors
of one token path: one byte per page, nonzero where the page is resident.
"""

from __future__ import annotations

from collections.abc import Sequence


def deepest(
    limit: int,
    *,
    window_pages: int,
    swa: bytes | bytearray | None,
    checkpoints: Sequence[int] | None,
    align: int = 1,
) -> int:
    """Return the deepest acceptable boundary <= `limit`, in pages; 0 always is.

    FULL must be present in [0, limit): the caller clips `limit` to its FULL run. `swa` is None
    without SWA, else at least `limit` bytes; a boundary b needs pages [max(0, b - window_pages), b)
    present. `checkpoints` is None without MAMBA, else the ascending page boundaries that have a
    state; b must be one of them. b must be a multiple of `align` pages: where groups of compressed
    rows end whose unfinished state nobody keeps.
    """
    if checkpoints is None:
        limit -= limit % align
        return limit if swa is None else _last_window(limit, window_pages, swa, align)
    for boundary in reversed(checkpoints):
        if (
            boundary <= limit
            and boundary % align == 0
            and (swa is None or _has_window(boundary, window_pages, swa))
        ):
            return boundary
    return 0


def acceptable(
    limit: int,
    *,
    window_pages: int,
    swa: bytes | bytearray | None,
    checkpoints: Sequence[int] | None,
    align: int = 1,
) -> list[int]:
    """Return every acceptable boundary in (0, limit], ascending; `deepest` is its last, or 0."""
    if checkpoints is None:
        candidates: Sequence[int] = range(align, limit + 1, align)
    else:
        candidates = [b for b in checkpoints if 0 < b <= limit and b % align == 0]
    return [b for b in candidates if swa is None or _has_window(b, window_pages, swa)]


def _has_window(boundary: int, window_pages: int, swa: bytes | bytearray) -> bool:
    return swa.find(0, max(0, boundary - window_pages), boundary) < 0


def _last_window(limit: int, window_pages: int, swa: bytes | bytearray, align: int) -> int:
    boundary = limit
    while boundary > 0:
        hole = swa.rfind(0, max(0, boundary - window_pages), boundary)
        if hole < 0:
            return boundary
        boundary = len(swa[:hole].rstrip(b"\0"))  # the end of the live run below the hole
        boundary -= boundary % align
    return 0
