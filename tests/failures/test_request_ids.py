"""Request ids of any string: used twice, aborted before, twice, too late, or never seen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from hicache.engine.scheduler import RequestRefused
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.types import PrefetchPolicy, Tier

PROMPT, OTHER = tokens(41), tokens(41, seed=2)


def new_bed() -> ScriptedCache:
    bed = ScriptedCache((FULL, SWA, MAMBA), hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    bed.store_only(PROMPT)
    return bed


def probing(bed: ScriptedCache) -> None:
    bed.submit("r", PROMPT, new=20)


def fetching(bed: ScriptedCache) -> None:
    bed.begin("r", PROMPT, new=20)


def loading(bed: ScriptedCache) -> None:
    fetching(bed)
    bed.end(bed.open(JobKind.FETCH))
    (request,) = bed.scheduler._waiting
    assert bed.cache.ready(request)
    assert bed.cache.admit(request)
    bed.scheduler._running.append(bed.scheduler._waiting.popleft())


def decoding(bed: ScriptedCache) -> None:
    fetching(bed)
    bed.end(bed.open(JobKind.FETCH))
    bed.step(3)


def retracted(bed: ScriptedCache) -> None:
    decoding(bed)
    bed.scheduler._retract_youngest()


STATES: dict[str, Callable[[ScriptedCache], None]] = {
    "probing": probing,
    "fetching": fetching,
    "loading": loading,
    "decoding": decoding,
    "retracted": retracted,
}


def state_of(bed: ScriptedCache) -> object:
    """All that a call that changes nothing must leave as it is."""
    cache = bed.cache
    return copy.deepcopy(
        (cache.stats, cache.remembered(), cache.in_flight, bed.executor.open_jobs(), bed.free(Tier.DEVICE))
    ), bed.free(Tier.HOST)


@pytest.mark.parametrize("state", STATES)
def test_an_id_that_is_in_use_is_refused_and_nothing_changes(state: str) -> None:
    """Two requests of one id would get each other's tokens, and an abort would end the wrong one."""
    bed = new_bed()
    STATES[state](bed)
    before = state_of(bed)
    for prompt in (PROMPT, OTHER):
        with pytest.raises(RequestRefused, match="'r' is in use"):
            bed.submit("r", prompt)
    assert state_of(bed) == before
    bed.drain()
    done = bed.finished[-1]
    assert (done.rid, done.tokens[: len(PROMPT)]) == ("r", PROMPT)
    assert len(done.tokens) == len(PROMPT) + 20
    assert bed.run("r", OTHER).finished, "an id that has ended is free"
    bed.check_quiet()


@pytest.mark.parametrize("state", STATES)
def test_aborts_of_what_is_not_there_any_more_change_nothing(state: str) -> None:
    """Clients repeat their aborts; a second one would free what others own by now."""
    bed = new_bed()
    assert not bed.scheduler.abort("r"), "before it came"
    STATES[state](bed)
    assert bed.scheduler.abort("r")
    before = state_of(bed)
    for rid in ("r", "unknown", "", "stored"):
        assert not bed.scheduler.abort(rid)
        bed.cache.check_integrity()
    assert state_of(bed) == before
    bed.drain()
    for rid in ("r", "stored"):
        assert not bed.scheduler.abort(rid), "after its end"
    assert [request.rid for request in bed.finished] == ["stored"]
    bed.check_quiet()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("step", range(4))
def test_an_id_is_free_again_as_soon_as_its_request_is_aborted(state: str, step: int) -> None:
    """A client that repeats a request would be refused, or lose its pages to the end of the one before."""
    bed = new_bed()
    STATES[state](bed)
    bed.step(step)
    assert bed.scheduler.abort("r")
    again = bed.submit("r", OTHER, new=3)
    bed.drain()
    assert again.finished
    assert again.cached.cached + again.cached.computed == len(OTHER)
    assert [request.rid for request in bed.finished] == ["stored", "r"]
    bed.check_quiet()


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (tokens(0), 1, "the prompt is empty"),
        (tokens(5), 0, "max_new_tokens=0 must be at least 1"),
        (tokens(5), -3, "max_new_tokens=-3 must be at least 1"),
        (tokens(256), 1, "256 prompt tokens [+] 1 new tokens = 257 exceed the limit of 256"),
    ],
)
def test_a_refused_request_leaves_its_id_free_and_looks_nothing_up(
    prompt: object, new: int, message: str
) -> None:
    """A request that never ran would block its id for ever, or keep host pages that nobody gives back."""
    bed = new_bed()
    before = state_of(bed)
    with pytest.raises(RequestRefused, match=message):
        bed.submit("r", prompt, new=new)  # type: ignore[arg-type]
    assert state_of(bed) == before
    assert bed.run("r", PROMPT).cached.storage == 40
    bed.check_quiet()


@pytest.mark.parametrize(
    "rid",
    ["", " ", "\0", "a\nb", "€", "\ud800", "r" * 100_000, "../../etc/passwd", "%s"],
    ids=lambda rid: ascii(rid[:20]),
)
def test_an_id_may_be_any_string(rid: str) -> None:
    """Ids come from clients; one that is treated as more than a name breaks a server."""
    bed = new_bed()
    bed.begin(rid, PROMPT, new=4)
    with pytest.raises(RequestRefused, match="is in use") as refused:
        bed.submit(rid, PROMPT)
    assert len(str(refused.value)) < 100, "a log line, and an answer, as long as the client likes"
    bed.drain()
    assert bed.finished[-1].rid == rid
    bed.begin(rid, PROMPT, new=4)
    assert bed.scheduler.abort(rid)
    bed.drain()
    bed.check_quiet()
