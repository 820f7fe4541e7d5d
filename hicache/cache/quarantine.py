"""Device slots given back by requests that run on, kept from loads until nobody reads them any more.

Work of the compute stream that comes later may have such a slot at once: it is ordered behind the
readers. A load runs on another stream: it gets the slot only when a fence recorded behind the last
reader has passed, and not before the step that gave it back has ended.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from hicache.types import Component, Slots

Fence = object  # the executor's; what it says has passed stays passed


class Quarantine:
    """Owned by the cache's thread. Invariant: a slot is here once, and its allocator counts it as taken."""

    def __init__(self, fence: Callable[[], Fence], passed: Callable[[Fence], bool]) -> None:
        self._fence, self._passed = fence, passed
        self._fresh: dict[Component, Slots] = {}  # of the step under way
        self._behind: deque[tuple[Fence, dict[Component, Slots]]] = deque()  # oldest first

    def put(self, component: Component, slots: Slots) -> None:
        """Take over slots that work already issued may read."""
        if slots:
            self._fresh.setdefault(component, array("i")).extend(slots)

    def take(self, component: Component, count: int) -> Slots:
        """Hand out up to `count` slots to work that the compute stream will do behind the readers."""
        taken: Slots = array("i")
        for group in (*(group for _, group in self._behind), self._fresh):
            held = group.get(component)
            if held and len(taken) < count:
                missing = count - len(taken)
                taken += held[-missing:]
                del held[-missing:]
        return taken

    def lapse(self) -> dict[Component, Slots]:
        """End a step: fence what it gave back, and hand out what has no reader left."""
        if any(self._fresh.values()):
            self._behind.append((self._fence(), self._fresh))
            self._fresh = {}
        free: dict[Component, Slots] = {}
        while self._behind and self._passed(self._behind[0][0]):
            for component, slots in self._behind.popleft()[1].items():
                free.setdefault(component, array("i")).extend(slots)
        return free

    def slots(self, component: Component) -> Slots:
        """Return what is held of a pool; it stays."""
        held: Slots = array("i")
        for group in (*(group for _, group in self._behind), self._fresh):
            held += group.get(component, array("i"))
        return held

    def count(self, component: Component) -> int:
        """Return how many slots of a pool are held."""
        groups = (*(group for _, group in self._behind), self._fresh)
        return sum(len(group.get(component, ())) for group in groups)

    def __len__(self) -> int:
        return sum(len(s) for group in (*(g for _, g in self._behind), self._fresh) for s in group.values())
