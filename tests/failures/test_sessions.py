"""Sessions in a whole cache: they wedge nothing, end once, and refer to nothing after their end."""

from __future__ import annotations

import random
from array import array

import pytest

from hicache.build import TierSizes, build_cache
from hicache.cache import HiCache, SessionRefused
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig
from hicache.engine.scheduler import RequestRefused, Scheduler
from hicache.request import Request
from hicache.testing.ledger import Faults, LedgerExecutor, LedgerRunner, make_request
from hicache.testing.simulation import SETS, tiny_spec
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
PAGE = 4


class Replica:
    """A cache over L1, L2 and L3 whose pages carry their identity, on a manual clock."""

    def __init__(self, kinds=(FULL,), *, pages: int = 64, seed: int = 1, **config: object) -> None:
        spec = tiny_spec(kinds, PAGE, 2 * PAGE)
        self.clock = ManualClock()
        self.executor = LedgerExecutor(self.clock, random.Random(seed), storage=True, faults=Faults())
        sizes = {FULL: pages, SWA: pages, MAMBA: 12}
        self.cache: HiCache = build_cache(
            spec,
            TierSizes({c: sizes[c] for c in kinds}, {c: 2 * sizes[c] for c in kinds}),
            CacheConfig(
                chunked_prefill_size=8 * PAGE, mamba_track_interval=PAGE, prefetch_threshold=PAGE, **config
            ),
            self.executor,
            self.clock,
        )
        runner = LedgerRunner(spec, self.executor, self.clock, vocabulary=50)
        self.scheduler = Scheduler(self.cache, runner, max_running_requests=4)
        self.sent = 0

    def send(self, tokens: array[int], session: str | None, new: int = PAGE) -> Request:
        self.sent += 1
        request = make_request(f"r{self.sent}", tokens, new)
        request.session_id = session
        self.scheduler.submit(request)
        return request

    def run(self) -> None:
        while not self.scheduler.idle:
            if not self.scheduler.step():
                self.scheduler.wait(0.1)
            self.cache.check_integrity()
        assert self.cache.settle()
        self.cache.check_integrity()

    def ask(self, tokens: array[int], session: str | None) -> Request:
        request = self.send(tokens, session)
        self.run()
        return request

    def references(self, request: Request) -> set[int]:
        found = self.cache.tree.match(request.scope, request.tokens, len(request.tokens))
        return set(self.cache.tree.references(found))

    def resident(self, request: Request) -> int:
        return self.cache.tree.match(request.scope, request.tokens, len(request.tokens)).full_device


def prompt(seed: int, pages: int = 10) -> array[int]:
    return array("I", random.Random(seed).choices(range(50), k=pages * PAGE))


@pytest.mark.parametrize("kinds", SETS)
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_sessions_that_together_are_larger_than_the_cache_all_complete(kinds, policy: str) -> None:
    """Session pages grow until nothing can be evicted, and the worker stands still for good."""
    r = Replica(kinds, radix_eviction_policy=policy)
    conversations = {f"s{i}": prompt(i, 12) for i in range(6)}
    for turn in range(3):
        requests = {name: r.send(tokens, name) for name, tokens in conversations.items()}
        r.run()
        for name, request in requests.items():
            assert request.finished
            conversations[name] = request.tokens + prompt(100 + turn, 1)
    assert len(r.cache.sessions) == 6
    assert r.cache.tree.evictable(Tier.DEVICE, FULL) == r.cache.tree.resident(Tier.DEVICE, FULL)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_an_open_session_outlives_traffic_that_would_push_it_out(policy: str) -> None:
    """The agent comes back from its tool, and computes its whole context again."""
    r = Replica(radix_eviction_policy=policy)
    mine, others = r.ask(prompt(0), "mine"), r.ask(prompt(1), None)
    for seed in range(2, 30):
        r.ask(prompt(seed), None)
    assert r.resident(mine) == 10
    assert r.resident(others) == 0
    assert r.cache.sessions.close("mine")
    for seed in range(30, 60):
        r.ask(prompt(seed), None)
    assert r.resident(mine) == 0


@pytest.mark.parametrize("moment", ["queued", "running", "written", "stored"])
@pytest.mark.parametrize("how", ["close", "expire", "displace"])
@pytest.mark.parametrize("kinds", SETS)
def test_a_session_may_end_at_any_moment(kinds, moment: str, how: str) -> None:
    """A close while its request runs would crash the worker, or the request would bring the session back."""
    r = Replica(kinds, session_timeout=5.0, max_sessions=1)
    first = r.ask(prompt(0), "s")
    second = r.send(first.tokens + prompt(1, 4), "s")
    if moment != "queued":
        while not second.finished if moment in ("written", "stored") else not second.computed:
            if not r.scheduler.step():
                r.scheduler.wait(0.1)
    if moment == "stored":
        r.cache.tick()
    in_use = not second.finished
    if how == "close":
        assert r.cache.sessions.close("s")
        assert not r.cache.sessions.close("s")
    elif how == "expire":
        r.clock.advance(6.0)
        r.cache.tick()
    else:
        r.cache.sessions.open("another")
    r.cache.check_integrity()
    r.run()
    assert second.finished
    if how == "expire" and in_use:
        assert r.references(second) >= {1}  # it was not idle
        r.clock.advance(6.0)
        r.cache.tick()
    if how == "displace" and in_use:
        assert len(r.cache.sessions) == 1
        r.cache.sessions.close("s")
    assert r.references(first) | r.references(second) == {0}
    assert not any(r.cache.remembered().values())


def test_a_request_of_a_closed_session_is_not_counted_to_the_next_of_that_name() -> None:
    """A late answer of an old conversation would be kept for the new one."""
    r = Replica()
    late = r.send(prompt(0), "s")
    r.scheduler.step()
    r.cache.sessions.close("s")
    new = r.send(prompt(1), "s")
    r.run()
    assert r.references(late) == {0}
    assert r.references(new) == {0, 1} or r.references(new) == {1}
    r.cache.sessions.close("s")
    assert r.references(new) == {0}


def test_an_aborted_request_refers_to_nothing_and_the_turn_before_stays() -> None:
    """A client that gives up would lose what it had, or keep what nobody asked for to the end."""
    r = Replica()
    first = r.ask(prompt(0), "s")
    second = r.send(first.tokens + prompt(1, 6), "s")
    r.scheduler.step()
    r.scheduler.abort(second.rid)
    r.run()
    path = r.cache.tree.match(b"", second.tokens, len(second.tokens))
    counted = r.cache.tree.references(path)
    assert counted[:10] == [1] * 10
    assert not any(counted[11:])


def test_a_session_times_out_after_its_last_request_has_ended() -> None:
    """Who never says goodbye would hold the cache for ever; who waits long would lose it meanwhile."""
    r = Replica(session_timeout=10.0)
    r.cache.sessions.open("short", timeout_s=2.0)
    r.ask(prompt(0), "long")
    r.clock.advance(3.0)
    r.cache.tick()
    assert len(r.cache.sessions) == 1
    r.clock.advance(5.0)
    request = r.ask(prompt(0), "long")
    r.clock.advance(9.0)
    r.cache.tick()
    assert len(r.cache.sessions) == 1
    r.clock.advance(2.0)
    r.cache.tick()
    assert len(r.cache.sessions) == 0
    assert r.references(request) == {0}
    assert r.cache.stats.sessions == {"opened": 2, "expired": 2}


def test_too_many_sessions_end_the_one_that_was_idle_longest() -> None:
    """A client that makes up a session for each request would fill the server's memory."""
    r = Replica(max_sessions=2)
    a, b = r.ask(prompt(0), "a"), r.ask(prompt(1), "b")
    r.ask(prompt(0), "a")
    r.ask(prompt(2), "c")
    assert (r.references(a), r.references(b)) == ({1}, {0})
    for number in range(500):
        r.ask(prompt(number % 7), f"once {number}")
    assert len(r.cache.sessions) == 2
    assert len(r.cache.sessions._due) <= 70


@pytest.mark.parametrize("session", ["x", "\0", " ", "\u00e9", "e\u0301", "\U0001f600" * 256, "a" * 1024])
def test_any_text_names_a_session_and_no_other(session: str) -> None:
    """Two users whose ids look alike would keep, or close, each other's pages."""
    r = Replica()
    request = r.ask(prompt(0), session)
    for other in ("\u00e9", "e\u0301", "\0\0", "a" * 1023, "X"):
        assert r.cache.sessions.close(other) == (other == session)
        if other == session:
            return
    assert r.references(request) == {1}
    with pytest.raises(SessionRefused, match="is open already"):
        r.cache.sessions.open(session)
    assert r.cache.sessions.close(session)
    assert r.references(request) == {0}


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        ("", "is empty"),
        ("a\ud800", "half a character"),
        ("a" * 1025, "1025 bytes"),
        ("\u00e9" * 513, "1026 bytes"),
        ("x" * 10_000_000, "most is 1024"),
    ],
)
def test_an_id_that_can_name_nothing_is_refused_with_its_reason(session: str, reason: str) -> None:
    """Ten megabytes would be kept for each request; an empty id would make one conversation of all."""
    r = Replica()
    with pytest.raises(RequestRefused, match=reason) as error:
        r.send(prompt(0), session)
    assert len(str(error.value)) < 300
    for call in (r.cache.sessions.open, r.cache.sessions.close):
        with pytest.raises(SessionRefused, match=reason):
            call(session)
    assert r.scheduler.idle
    assert len(r.cache.sessions) == 0


def test_without_the_flag_ids_have_no_effect_and_control_is_refused() -> None:
    """An operator who switches sessions off must not find them on."""
    r = Replica(enable_session_radix_cache=False)
    request = r.ask(prompt(0), "s")
    assert r.references(request) == {0}
    for call in (r.cache.sessions.open, r.cache.sessions.close):
        with pytest.raises(SessionRefused, match="--enable-session-radix-cache"):
            call("s")


def test_a_time_out_of_nothing_is_refused() -> None:
    """The session would be over before its first request."""
    r = Replica()
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(SessionRefused, match="timeout="):
            r.cache.sessions.open("s", timeout)


def test_storage_is_told_what_open_sessions_will_ask_for_and_when_they_are_over() -> None:
    """A shared store would drop the conversation that this replica keeps, and find nothing on another."""
    r = Replica((FULL, SWA, MAMBA))
    told: list[tuple[str, object]] = []
    r.executor.pin = lambda session, refs, ttl_s: told.append((session, refs))  # type: ignore[method-assign]
    r.executor.close_session = lambda session: told.append((session, None))  # type: ignore[method-assign]
    first = r.ask(prompt(0), "private id")
    r.ask(first.tokens + prompt(1, 5), "private id")
    r.ask(prompt(2), None)
    r.cache.sessions.close("private id")
    assert len({session for session, _ in told}) == 1
    assert "private" not in told[0][0]
    counted = [[sum(ref.component is c for ref in refs) for c in (FULL, SWA, MAMBA)] for _, refs in told[:2]]
    assert counted == [[10, 2, 1], [6, 2, 1]]  # what is new, and where it goes on
    assert told[2:] == [(told[0][0], None)]
