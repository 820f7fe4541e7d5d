"""A read that ends short gives the deepest boundary that every component accepts: not less, and not more."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from hicache.keys import page_hashes
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.testing.simulation import SETS
from hicache.transfer.base import JobId, JobKind, ObjectRef
from hicache.types import Component, PrefetchPolicy, Tier

PAGE = 4

Entry = tuple[Component, int]  # a page, or the boundary of a state


def oracle(kinds: Iterable[Component], have: set[Entry], pages: int, window: int) -> int:
    """The deepest acceptable boundary in pages, by trying all of them token by token."""
    best = 0
    for boundary in range(1, pages + 1):
        end = boundary * PAGE
        full = all((FULL, t // PAGE) in have for t in range(end))
        swa = SWA not in kinds or all((SWA, t // PAGE) in have for t in range(max(0, end - window), end))
        state = MAMBA not in kinds or (MAMBA, boundary) in have
        if full and swa and state:
            best = boundary
    return best


class Bed:
    """A cache whose storage holds a prompt, with states everywhere: every boundary may be acceptable."""

    def __init__(self, kinds: tuple[Component, ...], pages: int, window: int, **settings: object) -> None:
        self.kinds, self.pages, self.window = kinds, pages, window
        self.prompt = tokens(pages * PAGE + 1)
        roomy = {FULL: 2 * pages + 8, SWA: 2 * pages + 40, MAMBA: 2 * pages + 8}
        self.cache = ScriptedCache(
            kinds,
            window=window,
            **{"device": roomy, "host": roomy, "mamba_track_interval": PAGE, **settings},  # type: ignore[arg-type]
        )
        self.cache.run("cold", self.prompt)
        self.hashes = page_hashes(b"", self.prompt, PAGE)

    def ref(self, entry: Entry) -> ObjectRef:
        component, position = entry
        return ObjectRef(component, self.hashes[position - (component is MAMBA)])

    def stored(self) -> set[Entry]:
        held = self.cache.executor.storage or {}
        return {e for e in self.everything() if self.ref(e) in held}

    def everything(self) -> list[Entry]:
        paged = [(c, p) for c in (FULL, SWA) if c in self.kinds for p in range(self.pages)]
        return paged + [(MAMBA, b) for b in range(1, self.pages + 1) if MAMBA in self.kinds]

    def local(self) -> set[Entry]:
        """What is on device or host of the prompt."""
        tree = self.cache.cache.tree
        found = tree.match(b"", self.prompt, self.pages * PAGE)
        presence = tree.presence(found)
        have = {(FULL, p) for p in range(found.full)}
        have |= {(SWA, p) for p, live in enumerate(presence.swa or b"") if live}
        return have | {(MAMBA, b) for b in presence.checkpoints or ()}

    def forget_locally(self, rng: random.Random) -> None:
        """Let a random part of the prompt leave device and host, component by component."""
        tree, pools = self.cache.cache.tree, self.cache.cache.pools
        for tier in (Tier.DEVICE, Tier.HOST):
            for component in self.kinds:
                # All of the device goes, so that what is left is what the host kept.
                count = tree.resident(tier, component)
                kept = 0 if tier is Tier.DEVICE else rng.choice([0, count // 3, count - 1, count])
                pools.free_all(tree.evict(tier, component, count - kept).freed)

    def best(self, have: set[Entry]) -> int:
        return oracle(self.kinds, have, self.pages, self.window)


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_any_set_of_absent_and_unreadable_objects_leaves_the_deepest_boundary(
    kinds: tuple[Component, ...],
) -> None:
    """One bad object in the last window would cost the whole prompt."""
    depths = set()
    for seed in range(60):
        rng = random.Random(seed)
        bed = Bed(kinds, rng.choice([3, 10, 24]), rng.choice([1, PAGE, 8, 13]))
        bed.forget_locally(rng)
        stored, share = sorted(bed.stored()), rng.choice([0.02, 0.1, 0.4])
        absent = {e for e in stored if rng.random() < share * rng.choice([0, 1])}
        unreadable = {e for e in stored if rng.random() < share}
        local = bed.local()
        host = bed.cache.free(Tier.HOST)
        bed.cache.lose(map(bed.ref, absent))
        request = bed.cache.submit("r", bed.prompt)
        for probe in bed.cache.executor.open_jobs(JobKind.PROBE):
            bed.cache.executor.finish(probe)
            bed.cache.lose(map(bed.ref, unreadable))  # the probe has seen them, the read will not
            bed.cache.cache.tick()
        while bed.cache.executor.open_jobs(JobKind.FETCH):
            bed.cache.end(bed.cache.open(JobKind.FETCH))
        expected = bed.best(local | (set(stored) - absent - unreadable))
        assert bed.cache.hit(bed.prompt) == expected, f"seed {seed}"
        depths.add(expected - bed.best(local))
        taken = {c: host[c] - n for c, n in bed.cache.free(Tier.HOST).items()}
        assert taken[FULL] <= max(0, expected - sum(e[0] is FULL for e in local)), f"seed {seed}"
        bed.cache.drain()
        assert request in bed.cache.finished
        bed.cache.check_quiet()
    assert len(depths) > 4


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_read_that_is_cut_off_anywhere_has_completed_boundaries_on_its_way(
    kinds: tuple[Component, ...],
) -> None:
    """Windows and states that are read last would be missing whenever a deadline cuts the read off."""
    pages, window = 96, 8
    depths = []
    for count in (0, 1, 30, 50, 60, 80, 95, 200):
        bed = Bed(kinds, pages, window, hicache_storage_prefetch_policy=PrefetchPolicy.TIMEOUT)
        bed.cache.drop_memory()
        request, fetch = bed.cache.fetching(bed.prompt)
        assert not bed.cache.cache.ready(request)
        refs = bed.cache.executor.refs(fetch)
        bed.cache.executor.read(fetch, min(count, len(refs)))
        bed.cache.clock.advance(100.0)
        assert bed.cache.cache.ready(request)
        named = {e for e in bed.everything() if bed.ref(e) in set(refs[:count])}
        depths.append(bed.cache.hit(bed.prompt))
        assert depths[-1] == bed.best(named)
        bed.cache.drain()
        bed.cache.check_quiet()
    assert depths == sorted(depths)
    assert depths[-1] == pages
    assert depths[2] > 0 or SWA not in kinds
    assert 0 < depths[4] < pages


@pytest.mark.parametrize("short", [SWA, MAMBA])
def test_a_window_that_does_not_fit_on_the_host_gives_way_to_one_that_does(short: Component) -> None:
    """With a page too little for the deepest window, nothing at all would be fetched."""
    kinds = (FULL, short)
    roomy = {FULL: 64, SWA: 64, MAMBA: 64}
    bed = Bed(kinds, 10, 8, device=roomy, host={**roomy, short: 1})
    bed.cache.drop_memory()
    source = Bed(kinds, 10, 8)
    bed.cache.executor.attach(dict(source.cache.executor.storage or {}))
    bed.cache.run("r", bed.prompt)
    # One page of a window of two is enough at the first boundary only; one state is enough everywhere.
    assert bed.cache.finished[-1].cached.storage == (PAGE if short is SWA else 10 * PAGE)
    bed.cache.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_load_that_fails_in_part_gives_the_deepest_boundary_without_what_failed(
    kinds: tuple[Component, ...],
) -> None:
    """One bad page of the host would cost all of a prompt that the host holds."""
    hits = set()
    for upto in range(14):
        bed = Bed(kinds, 10, 8, storage=False)
        bed.cache.drop_memory()
        bed.cache.run("warm", bed.prompt)
        tree, pools = bed.cache.cache.tree, bed.cache.cache.pools
        for component in reversed(kinds):
            count = tree.resident(Tier.DEVICE, component)
            pools.free_all(tree.evict(Tier.DEVICE, component, count).freed)
        host = bed.local()
        request = bed.cache.submit("r", bed.prompt, new=3)
        assert bed.cache.cache.admit(request)
        bed.cache.scheduler._waiting.remove(request)
        bed.cache.scheduler._running.append(request)
        window = [(SWA, 8), (SWA, 9)] if SWA in kinds else []
        state = [(MAMBA, 10)] if MAMBA in kinds else []
        loaded = [*((FULL, p) for p in range(10)), *window, *state]
        bed.cache.end(bed.cache.open(JobKind.LOAD), failed=True, upto=upto)
        expected = (
            bed.best(host - set(loaded[upto:])) if upto < len(loaded) else bed.best(host - {loaded[-1]})
        )
        bed.cache.drain()
        assert request in bed.cache.finished
        assert request.cached.host == expected * PAGE, upto
        assert request.cached.cached + request.cached.computed == len(bed.prompt)
        hits.add(expected)
        bed.cache.check_quiet()
    assert len(hits) >= 9


def test_a_load_that_goes_on_failing_is_given_up() -> None:
    """A host that says that its pages are good, and cannot copy them, would be asked for ever."""
    bed = Bed((FULL,), 10, 8, storage=False)
    tree, pools = bed.cache.cache.tree, bed.cache.cache.pools
    pools.free_all(tree.evict(Tier.DEVICE, FULL, 10).freed)
    request = bed.cache.submit("r", bed.prompt)
    finish, loads = bed.cache.executor.finish, []

    def fail(job: JobId, **how: Any) -> None:
        if job in bed.cache.executor.open_jobs(JobKind.LOAD):
            loads.append(job)
            how = {"failed": True, "upto": 10}
        finish(job, **how)

    bed.cache.executor.finish = fail  # type: ignore[method-assign]
    for _ in range(20):
        bed.cache.step()
    bed.cache.executor.finish = finish  # type: ignore[method-assign]
    assert request in bed.cache.finished
    assert len(loads) == 2
    assert request.cached.cached == 0
    bed.cache.drain()
    bed.cache.check_quiet()
