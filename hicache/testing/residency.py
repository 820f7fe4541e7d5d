"""What an observer of a tree believes, and what the naive cache says it must believe.

Strict: a page that comes twice, or leaves without having come, is a broken law at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.errors import InvariantViolation
from hicache.keys import page_hashes
from hicache.testing.oracle import Oracle
from hicache.testing.oracle_pages import Page
from hicache.tree.residency import Loss, Observer
from hicache.types import Component, Tier

Entry = tuple[bytes, Tier, Component]  # digest, medium, component


class Mirror(Observer):
    """The set that follows from what was told, and the path of every FULL page, by its digest."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = 4 * page_size
        self.held: set[Entry] = set()
        self.parents: dict[bytes, tuple[bytes | None, bytes]] = {}  # digest: parent, tokens of the page
        self.told: dict[str, int] = {}

    def gained(
        self, tier: Tier, component: Component, digests: Sequence[bytes], parent: bytes | None, tokens: bytes
    ) -> None:
        self._count("gained")
        for i, digest in enumerate(digests):
            entry = (digest, tier, component)
            if entry in self.held:
                raise InvariantViolation(f"{component.name} {digest.hex()[:8]} came to {tier.name} twice")
            self.held.add(entry)
            if component is Component.FULL:
                page = tokens[i * self._page_bytes : (i + 1) * self._page_bytes]
                if self.parents.setdefault(digest, (parent, page)) != (parent, page):
                    raise InvariantViolation(f"{digest.hex()[:8]} has two parents, or two contents")
                parent = digest
        if component is Component.FULL and len(tokens) != len(digests) * self._page_bytes:
            raise InvariantViolation(f"{len(tokens)} bytes of tokens for {len(digests)} pages")

    def lost(self, tier: Tier, component: Component, digests: Sequence[bytes], why: Loss) -> None:
        self._count(why.value)
        for digest in digests:
            entry = (digest, tier, component)
            if entry not in self.held:
                raise InvariantViolation(
                    f"{component.name} {digest.hex()[:8]} left {tier.name} without having been there"
                )
            self.held.remove(entry)

    def cleared(self) -> None:
        self._count("cleared")
        self.held.clear()

    def _count(self, what: str) -> None:
        self.told[what] = self.told.get(what, 0) + 1


def truth(oracle: Oracle, page_size: int) -> set[Entry]:
    """Everything the naive cache holds, page by page, named by hashing each path anew."""
    held: set[Entry] = set()
    for scope, root in oracle.roots.items():
        waiting: list[tuple[Page, bytes]] = [(page, page.tokens) for page in root.children.values()]
        for page, path in waiting:
            waiting += [(child, path + child.tokens) for child in page.children.values()]
            digest = page_hashes(scope, path, page_size)[-1]
            for component in Component:
                held |= {
                    (digest, tier, component)
                    for tier in (Tier.DEVICE, Tier.HOST)
                    if page.has(component, tier)
                }
            held |= {
                (digest, Tier.STORAGE, component)
                for component in page.stored
                # A state is forgotten with its last copy, a window's page is not.
                if component is not Component.MAMBA or page.on_any(component)
            }
    return held


def check(mirror: Mirror, oracle: Oracle, page_size: int) -> None:
    """Raise InvariantViolation unless what was told is what is held."""
    expected = truth(oracle, page_size)
    for what, entries in (("missing", expected - mirror.held), ("not held", mirror.held - expected)):
        for digest, tier, component in entries:
            name = f"{component.name} {digest.hex()[:8]} on {tier.name}"
            raise InvariantViolation(f"{len(entries)} told entries are {what}, as {name}")
