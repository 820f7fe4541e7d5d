"""The SWA pages of one node against a naive model: a page, its slot on either tier, and its run."""

from __future__ import annotations

import random
from array import array

import pytest

from hicache.tree.eviction import Stats
from hicache.tree.node import Node
from hicache.tree.window import HOLE, Run, Window
from hicache.types import NO_SLOT, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class Model:
    """A node's window, and what each of its pages should have: {page: slot} by tier."""

    def __init__(self, draw: random.Random, start: int) -> None:
        self.draw = draw
        self.node = Node(None, start, swa=True)
        self.slots: dict[Tier, dict[int, int]] = {DEVICE: {}, HOST: {}}
        self.gone: set[Run] = set()
        self.next_slot = 0

    @property
    def window(self) -> Window:
        assert self.node.swa is not None
        return self.node.swa

    def forget(self, run: Run) -> None:
        assert run.node is None
        assert run not in self.gone, "a run is gone once"
        self.gone.add(run)

    def new_slots(self, count: int) -> array[int]:
        self.next_slot += count
        return array("i", range(self.next_slot - count, self.next_slot))

    def span(self) -> tuple[int, int]:
        low, high = sorted(self.draw.randint(self.node.start, self.node.end) for _ in range(2))
        return low, high

    # -- operations ------------------------------------------------------------------------------

    def grow(self) -> None:
        count, end = self.draw.randint(1, 6), self.node.end
        self.node.end += count
        self.node.tokens += bytes(4 * count)
        if self.draw.random() < 0.3:
            self.window.extend_absent(count)
            return
        slots = array("i", (s if self.draw.random() < 0.7 else NO_SLOT for s in self.new_slots(count)))
        has = self.window.extend_device(slots)
        assert list(has) == [slot >= 0 for slot in slots]
        for i, slot in enumerate(slots):
            if slot >= 0:
                self.slots[DEVICE][end + i] = slot
                self.window.cover(end + i, end + i + 1, Stats())

    def put(self) -> None:
        tier = self.draw.choice([DEVICE, HOST])
        low, high = self.span()
        while low < high and low in self.slots[tier]:
            low += 1
        stop = low
        while stop < high and stop not in self.slots[tier]:
            stop += 1
        if stop > low:
            slots = self.new_slots(stop - low)
            self.window.put(tier, low, slots)
            self.slots[tier].update(zip(range(low, stop), slots, strict=True))
            runs = self.window.cover(low, stop, Stats())
            assert runs == self.window.overlapping(low, stop)
            assert [page for run in runs for page in range(run.start, run.end) if low <= page < stop] == list(
                range(low, stop)
            )

    def take(self) -> None:
        tier = self.draw.choice([DEVICE, HOST])
        low, high = self.span()
        taken = self.window.take(tier, low, high)
        wanted = [self.slots[tier].pop(page) for page in range(low, high) if page in self.slots[tier]]
        assert list(taken) == wanted
        self.window.prune(low, high, self.forget)

    def isolate(self) -> None:
        low, high = self.span()
        if low == high:
            return
        before = {run for run in self.window.runs if run.start < high and run.end > low}
        inside, fresh = self.window.isolate(low, high, self.forget)
        assert all(low <= run.start < run.end <= high and run.node is self.node for run in inside)
        held = {page for tier in (DEVICE, HOST) for page in self.slots[tier] if low <= page < high}
        assert held <= {page for run in inside for page in range(run.start, run.end)}
        changed = [r for r in self.window.runs if r not in before and r.start < high and r.end > low]
        assert set(changed) <= set(fresh)
        assert all(run.node is self.node for run in fresh)

    def cut(self) -> None:
        end = self.draw.randint(self.node.start, self.node.end)
        for tier in (DEVICE, HOST):
            self.window.take(tier, end, self.node.end)
            for page in range(end, self.node.end):
                self.slots[tier].pop(page, None)
        self.window.cut(end, self.forget)
        self.node.end = end
        del self.node.tokens[4 * (end - self.node.start) :]

    def split_and_join(self) -> None:
        """Both halves are whole, and so are they again as one."""
        if self.node.end - self.node.start < 2:
            return
        at = self.draw.randint(self.node.start + 1, self.node.end - 1)
        upper = Node(None, self.node.start, swa=True)
        assert upper.swa is not None
        upper.end = at
        self.window.split_into(upper.swa, at, self.forget)
        start, self.node.start = self.node.start, at
        for node in (upper, self.node):
            assert node.swa is not None
            node.swa.check()
            self.compare(node)
        self.window.absorb(upper.swa)
        self.node.start = start

    # -- checks ----------------------------------------------------------------------------------

    def compare(self, node: Node) -> None:
        window, draw = node.swa, self.draw
        assert window is not None
        for tier in (DEVICE, HOST):
            truth = [self.slots[tier].get(page, NO_SLOT) for page in range(node.start, node.end)]
            assert [window.slot(tier, page) for page in range(node.start, node.end)] == truth
            assert [bool(has) for has in window.has(tier)] == [slot >= 0 for slot in truth]
            low, high = sorted(draw.randint(node.start, node.end) for _ in range(2))
            part = truth[low - node.start : high - node.start]
            assert [bool(has) for has in window.has_in(tier, low, high)] == [slot >= 0 for slot in part]
        low, high = sorted(draw.randint(node.start, node.end) for _ in range(2))
        wanted = [r for r in window.runs if r.start < high and r.end > low]
        assert window.overlapping(low, high) == wanted or low == high
        assert all(run.node is node for run in window.runs)
        assert not self.gone.intersection(window.runs)


OPERATIONS = (Model.grow, Model.put, Model.put, Model.take, Model.isolate, Model.cut, Model.split_and_join)


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_of_a_window_equal_the_naive_model(seed: int) -> None:
    """A page off by one is a hole that looks full: a wrong answer, or a slot that nobody gives back."""
    draw = random.Random(seed)
    model = Model(draw, draw.choice([0, 7, 100]))
    for _ in range(120):
        draw.choice(OPERATIONS)(model)
        if model.node.end - model.node.start > 40:
            model.cut()
        model.window.check()
        model.compare(model.node)


def test_flags_follow_the_pages_of_a_split_and_of_a_join() -> None:
    """What is known to be stored would be believed of other pages."""
    node, upper = Node(None, 4, swa=True), Node(None, 4, swa=True)
    assert node.swa is not None
    assert upper.swa is not None
    node.end = 10
    node.swa.extend_device(array("i", range(6)))
    node.swa.cover(4, 10, Stats())
    node.swa.make_flags()[:] = bytes(range(1, 7))
    upper.end = 6
    node.swa.split_into(upper.swa, 6, lambda run: None)
    node.start = 6
    assert (upper.swa.flags, node.swa.flags) == (bytearray([1, 2]), bytearray([3, 4, 5, 6]))
    lower, node.swa.flags = node.swa.flags, None  # nothing is known of these
    node.swa.absorb(upper.swa)
    node.start = 4
    assert node.swa.flags == bytearray([1, 2, 0, 0, 0, 0])
    upper = Node(None, 4, swa=True)
    assert upper.swa is not None
    node.swa.split_into(upper.swa, 6, lambda run: None)
    node.start, upper.end = 6, 6
    node.swa.flags, upper.swa.flags = lower, None  # nor of these
    node.swa.absorb(upper.swa)
    node.start = 4
    assert node.swa.flags == bytearray([0, 0, 3, 4, 5, 6])
    node.swa.cut(7, lambda run: None)
    node.end = 7
    assert node.swa.flags == bytearray([0, 0, 3])
    node.end = 9
    node.swa.extend_absent(2)
    assert node.swa.flags == bytearray([0, 0, 3, 0, 0])
    assert node.swa.device[3:] == HOLE * 2
