"""Shows accesses to a policy that learns from them: the sampled pages of a path, read or written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from hicache.tree.forest import Forest
from hicache.tree.node import Node
from hicache.tree.reuse import FRESH, REUSED, ReuseAges, Sampler

_REMEMBERED = 3  # records for so many times what has been cached at once
_FEWEST, _MOST = 1024, 1 << 20  # pages that records stand for

_sampler = Sampler()


def saw_read(f: Forest, reuse: ReuseAges, node: Node, depth: int, now: float) -> None:
    """A request began, and found pages [0, depth) of the path that ends in `node`."""
    reuse.access(now)
    if depth:
        path, at = [node], node
        while at.parent is not None:
            at = at.parent
            path.append(at)
        positions = _sampler.positions(depth)
        pages = _pages(path[-2::-1], positions, f.page_bytes)
        _see(reuse, at.scope, positions, pages, 0, REUSED, f.pages)


def saw_written(f: Forest, reuse: ReuseAges, scope: bytes, view: memoryview, start: int, end: int) -> None:
    """The request computed pages [start, end) of `view`, which begins at the root."""
    size = f.page_bytes
    positions = _sampler.positions(end)
    pages = (view[p * size : (p + 1) * size] for p in positions)
    _see(reuse, scope, positions, pages, start, FRESH, f.pages)


def _pages(path: list[Node], positions: list[int], size: int) -> Iterator[bytes | memoryview]:
    nodes = iter(path)
    node = next(nodes)
    for page in positions:
        while page >= node.end:
            node = next(nodes)
        at = (page - node.start) * size
        yield bytes(node.tokens[at : at + size])


def _see(
    reuse: ReuseAges,
    scope: bytes,
    positions: list[int],
    pages: Iterator[bytes | memoryview],
    start: int,
    kind: int,
    cached: int,
) -> None:
    for number, (page, key) in enumerate(zip(positions, Sampler.keys(scope, pages), strict=True)):
        if page >= start:
            reuse.see(key, _sampler.weight(number), kind)
    reuse.bound(min(max(_REMEMBERED * cached, _FEWEST), _MOST))


def see_request(
    reuse: ReuseAges,
    scope: bytes,
    tokens: memoryview,
    page_bytes: int,
    *,
    now: float,
    found: int,
    start: int,
    end: int,
    cached: int,
) -> None:
    """A request showed pages [start, end) of `tokens`, which begins at the root; it found [0, found).

    For trees that are not ours, which tell of a request only when it has computed something. With `start`
    0 it is a new access. `cached` is how many pages can be cached at once.
    """
    if start == 0:
        reuse.access(now)
    positions = _sampler.positions(end)
    for kind, low, high in ((REUSED, start, found), (FRESH, max(start, found), end)):
        if low < high:
            within = positions[: bisect_left(positions, high)]
            pages = (tokens[page * page_bytes : (page + 1) * page_bytes] for page in within)
            _see(reuse, scope, within, pages, low, kind, cached)
