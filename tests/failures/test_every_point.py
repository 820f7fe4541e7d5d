"""One event at every point where a transfer is in flight, and every order of two acknowledgements.

The points of a read are between any two of its objects. The ledger knows what each slot holds, so a page that
is given away, overwritten or published too early ends a test where it happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache.testing.scripted_cache import FULL, ScriptedCache, tokens
from hicache.testing.simulation import SETS
from hicache.transfer.base import JobId, JobKind
from hicache.types import Component, PrefetchPolicy, Tier

PROMPT = tokens(33)  # eight pages and a token
PAGES = 8
FORKED = PROMPT[:20] + tokens(13, seed=3)  # five pages of it, then its own
Event = Callable[[ScriptedCache], None]


# -- transfers -----------------------------------------------------------------------------------


def write(bed: ScriptedCache, rid: str, prompt: Sequence[int]) -> None:
    """It is computed, and on its way to the host."""
    bed.begin(rid, prompt, session="s")  # type: ignore[arg-type]
    bed.step(2)


def store(bed: ScriptedCache, rid: str, prompt: Sequence[int]) -> None:
    """It is on the host, and on its way to storage."""
    write(bed, rid, prompt)
    for job in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(job)


def fetch(bed: ScriptedCache, rid: str, prompt: Sequence[int]) -> None:
    """It is queued, and on its way from storage."""
    bed.begin(rid, prompt, session="s")  # type: ignore[arg-type]


def load(bed: ScriptedCache, rid: str, prompt: Sequence[int]) -> None:
    """It is admitted, and on its way from the host."""
    request = bed.begin(rid, prompt, session="s")  # type: ignore[arg-type]
    assert bed.cache.admit(request)
    bed.scheduler._waiting.remove(request)
    bed.scheduler._running.append(request)


STARTS = {JobKind.WRITE: write, JobKind.STORE: store, JobKind.FETCH: fetch, JobKind.LOAD: load}


def prepared(kinds: Sequence[Component], *transfers: tuple[JobKind, Sequence[int]]) -> ScriptedCache:
    """A cache in which each prompt lies where its transfer begins."""
    bed = ScriptedCache(kinds, hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    for kind, prompt in sorted(transfers, key=lambda t: t[0] is JobKind.LOAD):
        if kind is JobKind.FETCH:
            bed.store_only(prompt)  # type: ignore[arg-type]
        elif kind is JobKind.LOAD:
            bed.run("warm", prompt)  # type: ignore[arg-type]
            evict(Tier.DEVICE, *reversed(kinds))(bed)
    return bed


def points(kinds: Sequence[Component]) -> Iterator[tuple[JobKind, int]]:
    """Every transfer, a read also with each number of its objects read."""
    for kind in STARTS:
        bed = prepared(kinds, (kind, PROMPT))
        STARTS[kind](bed, "r", PROMPT)
        count = len(bed.executor.refs(bed.open(kind))) if kind is JobKind.FETCH else 0
        yield from ((kind, done) for done in range(count + 1))


def at_point(kinds: Sequence[Component], kind: JobKind, done: int) -> tuple[ScriptedCache, JobId]:
    bed = prepared(kinds, (kind, PROMPT))
    STARTS[kind](bed, "r", PROMPT)
    job = bed.open(kind)
    if done:
        bed.executor.read(job, done)
    return bed, job


# -- events --------------------------------------------------------------------------------------


def split(at: int) -> Event:
    def act(bed: ScriptedCache) -> None:
        bed.begin("other", PROMPT[: at * 4] + tokens(9, seed=50 + at))
        bed.step(2)

    return act


def evict(tier: Tier, *components: Component) -> Event:
    """Somebody needs all the memory there is of these components."""

    def act(bed: ScriptedCache) -> None:
        for component in components:
            tree, pools = bed.cache.tree, bed.cache.pools
            pools.free_all(tree.evict(tier, component, tree.resident(tier, component)).freed)
            if (tier, component) == (Tier.HOST, FULL):
                pools.free(tier, FULL, tree.reclaim_duplicates(100))

    return act


def lose_objects(keep: int) -> Event:
    """Storage forgets all but the first objects."""

    def act(bed: ScriptedCache) -> None:
        bed.lose(list(bed.executor.storage or ())[keep:])

    return act


def reattach(bed: ScriptedCache) -> None:
    held = bed.executor.storage or {}
    bed.executor.detach()
    bed.executor.attach(held)


def detach(bed: ScriptedCache) -> None:
    bed.executor.detach()
    bed.cache.tick()


def twin(bed: ScriptedCache) -> None:
    """The same prompt comes again."""
    bed.begin("twin", PROMPT)
    bed.step(2)


def refill(bed: ScriptedCache) -> None:
    """Whatever is free is written over by somebody else's pages."""
    bed.begin("other", tokens(101, seed=7))
    bed.step(5)


def events(kinds: Sequence[Component]) -> dict[str, Event]:
    found: dict[str, Event] = {f"split at {at}": split(at) for at in range(1, PAGES)}
    for tier, component in itertools.product((Tier.DEVICE, Tier.HOST), kinds):
        found[f"evict {component.name} from {tier.name}"] = evict(tier, component)
    return found | {
        "abort": lambda bed: bool(bed.scheduler.abort("r")) and None,
        "flush": lambda bed: bool(bed.cache.flush()) and None,
        "clear storage": lose_objects(0),
        "lose the tail of storage": lose_objects(3),
        "storage starts anew": lambda bed: bed.executor.lose_storage(),
        "attach again": reattach,
        "detach": detach,
        "same prompt": twin,
        "close the session": lambda bed: bool(bed.cache.sessions.close("s")) and None,
        "time passes": lambda bed: bed.clock.advance(1e5),  # every session and prefetch is over
        "let go of the queued": lambda bed: bool(bed.cache.release_waiting()) and None,
        "refill": refill,
    }


# -- tests ---------------------------------------------------------------------------------------


def end_in_every_way(bed: ScriptedCache, kind: JobKind, job: JobId, way: str) -> None:
    """Let a transfer end, if the event has not ended it; a load that ends behind some pages has failed."""
    if bed.executor.is_open(job):
        upto = int(way) if way.isdigit() else None
        bed.end(job, failed=way == "failed" or (upto is not None and kind is JobKind.LOAD), upto=upto)


def ways_to_end(kinds: Sequence[Component], kind: JobKind) -> list[str]:
    """Well, failed as a whole, and behind each of its objects but the last. A write is whole or nothing."""
    bed, job = at_point(kinds, kind, 0)
    count = {JobKind.WRITE: 1, JobKind.LOAD: bed.executor.pages(job)}.get(kind, len(bed.executor.refs(job)))
    return ["well", "failed", *map(str, range(1, count))]


def come_to_rest(bed: ScriptedCache) -> None:
    """Everything ends, the prompts are served once more, and nothing is left."""
    bed.drain()
    for rid, prompt in (("after", PROMPT), ("behind", FORKED)):
        request = bed.run(rid, prompt)
        assert request.cached.cached + request.cached.computed == len(prompt)
    bed.check_quiet()


def check_events(kinds: tuple[Component, ...], name: str, *, thorough: bool = False) -> None:
    ends = {kind: ways_to_end(kinds, kind) if thorough else ["well", "failed"] for kind in STARTS}
    for kind, done, way in [(k, done, way) for k, done in points(kinds) for way in ends[k]]:
        bed, job = at_point(kinds, kind, done)
        try:
            events(kinds)[name](bed)
            bed.cache.check_integrity()
            end_in_every_way(bed, kind, job, way)
            come_to_rest(bed)
        except Exception as error:
            raise AssertionError(
                f"{name} during a {kind.name} with {done} objects read, then {way}"
            ) from error


@pytest.mark.parametrize("name", events(SETS[-1]))
def test_no_event_at_any_point_of_any_transfer_spoils_or_leaks_a_page(name: str) -> None:
    """A page of a transfer that is given away at the wrong moment becomes another request's text."""
    check_events(SETS[-1], name)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kinds", "name"), [(kinds, name) for kinds in SETS for name in events(kinds)], ids=str
)
def test_no_event_at_any_point_and_no_end_of_a_transfer_spoils_a_page(
    kinds: tuple[Component, ...], name: str
) -> None:
    """As above, for every set of components and transfers that end at every object."""
    check_events(kinds, name, thorough=True)


def all_orders(
    kinds: tuple[Component, ...], first: JobKind, second: JobKind
) -> Iterator[tuple[int, int, tuple[bool, bool]]]:
    count = len(both_in_flight(kinds, first, second)[1])
    yield from (
        (a, b, fails)
        for a, b in itertools.permutations(range(count), 2)
        for fails in itertools.product((False, True), repeat=2)
    )


def both_in_flight(
    kinds: tuple[Component, ...], first: JobKind, second: JobKind
) -> tuple[ScriptedCache, list[JobId]]:
    """Two requests whose prompts share five pages, and what they have in flight."""
    bed = prepared(kinds, (first, PROMPT), (second, FORKED))
    STARTS[first](bed, "r", PROMPT)
    STARTS[second](bed, "q", FORKED)
    return bed, bed.executor.open_jobs()


@pytest.mark.parametrize("second", STARTS)
@pytest.mark.parametrize("first", STARTS)
def test_any_two_transfers_of_one_path_may_end_in_either_order_and_either_way(
    first: JobKind, second: JobKind
) -> None:
    """An acknowledgement that overtakes another would publish, or free, what is not its own."""
    for kinds in (SETS[0], SETS[-1]):
        for a, b, fails in all_orders(kinds, first, second):
            bed, jobs = both_in_flight(kinds, first, second)
            try:
                for index, failed in zip((a, b), fails, strict=True):
                    if bed.executor.is_open(jobs[index]):
                        bed.end(jobs[index], failed=failed)
                come_to_rest(bed)
            except Exception as error:
                raise AssertionError(f"{kinds}: {a} then {b} of {len(jobs)}, failed: {fails}") from error


def test_any_two_transfers_are_in_flight_together_in_one_order_or_the_other() -> None:
    """Steps that start a transfer may end the one before: then the test above would have nothing to order."""
    together = set()
    for first, second in itertools.product(STARTS, repeat=2):
        bed, jobs = both_in_flight(SETS[-1], first, second)
        if all(bed.executor.open_jobs(kind) for kind in (first, second)) and len(jobs) == 2:
            together.add(frozenset((first, second)))
    assert together == {frozenset(pair) for pair in itertools.product(STARTS, repeat=2)}


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_an_abort_between_any_two_objects_of_a_read_gives_its_pages_back(
    kinds: tuple[Component, ...],
) -> None:
    """Host memory would shrink with each abort; a page given back too early would be written to twice."""
    for kind, done in points(kinds):
        if kind is not JobKind.FETCH:
            continue
        bed, job = at_point(kinds, kind, done)
        assert bed.scheduler.abort("r")
        held = bed.cache.pools[Tier.HOST, FULL].num_taken
        assert held == PAGES, "a read that has not ended holds its pages"
        bed.end(job)
        assert all(bed.cache.pools.capacity(Tier.HOST, c) == n for c, n in bed.free(Tier.HOST).items())
        come_to_rest(bed)
