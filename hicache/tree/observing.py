"""Shows accesses to a policy that learns from them: the sampled pages of a path, read or written."""

from __future__ import annotations

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
        _see(f, reuse, at.scope, positions, _pages(path[-2::-1], positions, f.page_bytes), 0, REUSED)


def saw_written(f: Forest, reuse: ReuseAges, scope: bytes, view: memoryview, start: int, end: int) -> None:
    """The request computed pages [start, end) of `view`, which begins at the root."""
    size = f.page_bytes
    positions = _sampler.positions(end)
    pages = (view[p * size : (p + 1) * size] for p in positions)
    _see(f, reuse, scope, positions, pages, start, FRESH)


def _pages(path: list[Node], positions: list[int], size: int) -> Iterator[bytes | memoryview]:
    nodes = iter(path)
    node = next(nodes)
    for page in positions:
        while page >= node.end:
            node = next(nodes)
        at = (page - node.start) * size
        yield bytes(node.tokens[at : at + size])


def _see(
    f: Forest,
    reuse: ReuseAges,
    scope: bytes,
    positions: list[int],
    pages: Iterator[bytes | memoryview],
    start: int,
    kind: int,
) -> None:
    for number, (page, key) in enumerate(zip(positions, Sampler.keys(scope, pages), strict=True)):
        if page >= start:
            reuse.see(key, _sampler.weight(number), kind)
    reuse.bound(min(max(_REMEMBERED * f.pages, _FEWEST), _MOST))
