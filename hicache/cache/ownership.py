"""Who owns a device slot outside of the tree: a running request's private pages, each held once.

A slot comes in with put() and leaves with a take, which removes it. Only what was taken can be given
to the tree, the quarantine or an allocator, so nothing can be given back twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from hicache.errors import InvariantViolation
from hicache.types import NO_SLOT, Component, Slots


class Private:
    """The private slots of one request: FULL and SWA by page, ascending; MAMBA by their own number."""

    __slots__ = ("_held",)

    def __init__(self, kinds: Iterable[Component]) -> None:
        self._held: dict[Component, dict[int, int]] = {component: {} for component in kinds}

    def put(self, component: Component, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Own a slot for each of these pages, which have none."""
        held = self._held[component]
        for page, slot in zip(pages, slots, strict=True):
            if page in held:
                raise InvariantViolation(f"{component.name} page {page} has slot {held[page]}, not {slot}")
            held[page] = slot

    def put_states(self, slots: Iterable[int]) -> None:
        """Own MAMBA slots."""
        slots = list(slots)
        self.put(Component.MAMBA, slots, slots)

    def take(self, component: Component, start: int, end: int) -> Slots:
        """Let go of pages [start, end): one slot each, NO_SLOT where there is none."""
        pop = self._held[component].pop
        return array("i", [pop(page, NO_SLOT) for page in range(start, end)])

    def take_before(self, component: Component, end: int) -> Slots:
        """Let go of every page before `end`."""
        held = self._held[component]
        pages = []
        for page in held:
            if page >= end:
                break
            pages.append(page)
        return array("i", [held.pop(page) for page in pages])

    def take_states(self, slots: Iterable[int]) -> Slots:
        """Let go of these MAMBA slots, all of which are owned."""
        held = self._held[Component.MAMBA]
        return array("i", [held.pop(slot) for slot in slots])

    def drain(self) -> Mapping[Component, Slots]:
        """Let go of everything."""
        left = {component: array("i", held.values()) for component, held in self._held.items()}
        for held in self._held.values():
            held.clear()
        return left

    def slots(self, component: Component) -> Slots:
        """Return what is owned of a pool; it stays owned."""
        return array("i", self._held.get(component, {}).values())

    def count(self, component: Component) -> int:
        """Return how many slots of a pool are owned."""
        return len(self._held.get(component, ()))
