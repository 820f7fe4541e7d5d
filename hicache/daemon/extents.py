"""Which bytes of the arena are whose: extents of any size, best fit, neighbours that are free joined.

Metadata only: no memory is touched. Best fit keeps the few sizes that a model has apart by itself: a
freed extent goes whole to the next object of its size.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from hicache.errors import DoubleFree

GRAIN = 64  # bytes that every extent is rounded up to, and starts at a multiple of: a cache line
SPANS_TRIED = 8  # free spans that clearing() looks around at, the largest


class Extent:
    """Bytes [offset, offset + size) of the arena, for one object or one reservation.

    `slot` of the table of generations holds `generation` from take() until the extent's end, and
    another value ever after. Invariant: pins >= 0, and an extent with pins stays taken.
    """

    __slots__ = ("checksum", "generation", "key", "offset", "orphan", "pins", "size", "slot", "span")

    def __init__(self, offset: int, *, size: int, span: int, slot: int, generation: int) -> None:
        self.offset = offset
        self.size = size
        self.span = span  # size, rounded up
        self.slot = slot
        self.generation = generation
        self.checksum: int | None = None  # None: not known yet
        self.key: str | None = None  # of the object it holds; None while it holds none
        self.pins = 0
        self.orphan = False  # nothing owns it any more; it ends with its last pin

    def __len__(self) -> int:
        return self.size


class ExtentMap:
    """The arena's spans, taken and free. Not thread-safe; the store locks.

    Invariant: taken and free spans are disjoint and cover [start, end); no two free spans touch.
    """

    def __init__(self, start: int) -> None:
        self.end = start
        self.free_bytes = 0
        self._sizes: list[int] = []  # of free spans, distinct and sorted
        self._by_size: dict[int, dict[int, None]] = {}  # size: offsets of free spans, last freed last
        self._free_at: dict[int, int] = {}  # offset: size
        self._free_end: dict[int, int] = {}  # end: offset
        self._at: dict[int, Extent] = {}
        self._ends: dict[int, Extent] = {}

    @property
    def largest(self) -> int:
        """Size of the largest free span."""
        return self._sizes[-1] if self._sizes else 0

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._at.values())

    def extend(self, size: int) -> None:
        """Add `size` free bytes, a multiple of GRAIN, at the end."""
        start, self.end = self.end, self.end + size
        self._join_free(start, self.end)

    def take(self, size: int, *, slot: int, generation: int) -> Extent | None:
        """Take the smallest free span that holds `size` bytes, or return None."""
        span = rounded(size)
        index = bisect_left(self._sizes, span)
        if index == len(self._sizes):
            return None
        found = self._sizes[index]
        offset = next(reversed(self._by_size[found]))
        self._remove_free(offset, found)
        if found > span:
            self._add_free(offset + span, found - span)
        extent = Extent(offset, size=size, span=span, slot=slot, generation=generation)
        self._at[offset] = self._ends[offset + span] = extent
        self.free_bytes -= span
        return extent

    def give(self, extent: Extent) -> None:
        """Free an extent. Raises DoubleFree if it is not taken."""
        offset, end = extent.offset, extent.offset + extent.span
        if self._at.get(offset) is not extent:
            raise DoubleFree(f"arena: no such extent is taken at offset {offset}")
        del self._at[offset], self._ends[end]
        self._join_free(offset, end)

    def _join_free(self, offset: int, end: int) -> None:
        """Make [offset, end) free, one with the free spans beside it."""
        self.free_bytes += end - offset
        before = self._free_end.get(offset)
        if before is not None:
            self._remove_free(before, offset - before)
            offset = before
        behind = self._free_at.get(end)
        if behind is not None:
            self._remove_free(end, behind)
            end += behind
        self._add_free(offset, end - offset)

    def around(self) -> Iterator[tuple[int, Iterator[Extent], Iterator[Extent]]]:
        """Yield places to clear: a free span's own size, and the extents on either side of
        it, nearest first, up to the next ones that are free. Largest spans first."""
        tried = 0
        for free in reversed(self._sizes):
            for offset in tuple(self._by_size[free]):
                yield free, self._leftwards(offset), self._rightwards(offset + free)
                tried += 1
                if tried == SPANS_TRIED:
                    return

    def _leftwards(self, end: int) -> Iterator[Extent]:
        while (extent := self._ends.get(end)) is not None:
            yield extent
            end = extent.offset

    def _rightwards(self, start: int) -> Iterator[Extent]:
        while (extent := self._at.get(start)) is not None:
            yield extent
            start = extent.offset + extent.span

    def _add_free(self, offset: int, size: int) -> None:
        offsets = self._by_size.get(size)
        if offsets is None:
            insort(self._sizes, size)
            offsets = self._by_size[size] = {}
        offsets[offset] = None
        self._free_at[offset] = size
        self._free_end[offset + size] = offset

    def _remove_free(self, offset: int, size: int) -> None:
        offsets = self._by_size[size]
        del offsets[offset]
        if not offsets:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        del self._free_at[offset], self._free_end[offset + size]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant holds. O(extents)."""
        spans = [(extent.offset, extent.span, 0) for extent in self._at.values()]
        spans += [(offset, size, 1) for offset, size in self._free_at.items()]
        spans.sort()
        for (at, size, free), (following, _, other) in itertools.pairwise(spans):
            if at + size != following or (free and other):
                raise AssertionError(
                    f"arena: [{at}, {at + size}) is followed by {following}, free {free, other}"
                )
        if spans and spans[-1][0] + spans[-1][1] != self.end:
            raise AssertionError(
                f"arena: the last span ends at {sum(spans[-1][:2])}, the arena at {self.end}"
            )
        if self.free_bytes != sum(self._free_at.values()):
            raise AssertionError(f"arena: free_bytes {self.free_bytes} is not {sum(self._free_at.values())}")
        if sorted({*self._free_at.values()}) != self._sizes:
            raise AssertionError("arena: the list of free sizes is stale")


def rounded(size: int) -> int:
    """Return the bytes of the arena that an object of `size` bytes takes."""
    return -(-size // GRAIN) * GRAIN
