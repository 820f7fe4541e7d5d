"""What one client may hold, and which names it sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.clock import ManualClock
from hicache.daemon.scope import Scope
from hicache.daemon.sessions import Identity, Sessions, TooManySessions, UnknownSession


def make(clock: ManualClock, **limits: int) -> Sessions:
    settings = {"limit": 2, "lease_bytes": 100, "reservation_bytes": 100} | limits
    return Sessions(clock=clock, **settings)


def test_leases_count_once_per_object_and_end_with_time() -> None:
    """A client that asks again would use up its share, or keep it for good."""
    clock = ManualClock()
    session = make(clock).open(Identity())
    assert session.lease(["a", "b"], [40, 40], seconds=10.0) == 2
    clock.advance(5.0)
    assert session.lease(["a", "c", "b"], [40, 40, 40], seconds=10.0) == 1  # renewed; c does not fit
    assert session.leased() == 80
    clock.advance(5.0)
    assert session.leased() == 40  # b has ended, a was renewed
    clock.advance(5.0)
    assert session.leased() == 0


def test_misses_use_nothing_of_the_share() -> None:
    """Asking for what is not there would cost a client its protection."""
    session = make(ManualClock()).open(Identity())
    assert session.lease(["a", "b", "c"], [-1, 100, -1], seconds=1.0) == 3
    assert session.leased() == 100


def test_a_session_with_a_reservation_is_not_idle() -> None:
    """A slow write would lose its session in the middle."""
    clock = ManualClock()
    sessions = make(clock)
    busy, idle = sessions.open(Identity("busy")), sessions.open(Identity("idle"))
    assert busy.reserve([10]) == [True]
    clock.advance(601.0)
    sessions.drop_idle()
    assert sessions.get(busy.id) is busy
    with pytest.raises(UnknownSession):
        sessions.get(idle.id)


def test_a_silent_client_is_forgotten_soon_but_not_one_that_is_connected() -> None:
    """Replicas on other hosts that died would count for ten minutes, or quiet ones here map memory anew."""
    clock = ManualClock()
    sessions = make(clock)
    connected, away = sessions.open(Identity("connected")), sessions.open(Identity("away"))
    sessions.is_attached = {connected.id}.__contains__
    clock.advance(61.0)
    sessions.drop_idle()
    assert sessions.find(connected.id) is connected
    assert sessions.find(away.id) is None
    clock.advance(600.0)
    sessions.drop_idle()
    assert sessions.find(connected.id) is None


def test_a_full_table_makes_room_by_dropping_the_idle_only() -> None:
    """A burst of clients would throw out those at work, or a full table would never recover."""
    clock = ManualClock()
    sessions = make(clock)
    first = sessions.open(Identity("a"))
    sessions.open(Identity("b"))
    with pytest.raises(TooManySessions):
        sessions.open(Identity("c"))
    clock.advance(601.0)
    sessions.get(first.id)
    sessions.open(Identity("c"))
    assert sessions.get(first.id) is first


def test_only_sessions_of_the_same_model_name_are_compared() -> None:
    """Every daemon with two models would warn of isolation."""
    sessions = make(ManualClock(), limit=9)
    sessions.open(Identity(model_name="m", fingerprint="a"))
    sessions.open(Identity(model_name="n", fingerprint="b"))
    assert sessions.other_fingerprints(Identity(model_name="m", fingerprint="a")) == []
    assert sessions.other_fingerprints(Identity(model_name="m", fingerprint="c")) == ["a"]
    assert sessions.other_fingerprints(Identity(fingerprint="c")) == []


keys = st.text(alphabet="ab/", min_size=1, max_size=6)
fingerprints = st.sampled_from(["a", "b", "ab", "ba"])


@given(fingerprint=fingerprints, other=fingerprints, key=keys, others_key=keys)
def test_names_of_two_fingerprints_never_meet_and_keys_come_back(
    fingerprint: str, other: str, key: str, others_key: str
) -> None:
    """A replica would load the KV of another model under a key that looks like its own."""
    scope, others = Scope(fingerprint), Scope(other)
    assert scope.key(scope.name(key)) == key
    if fingerprint != other:
        assert scope.name(key) != others.name(others_key)
        assert others.key(scope.name(key)) is None


@given(fingerprint=fingerprints, other=fingerprints, key=keys, prefix=st.text(alphabet="ab/", max_size=3))
def test_a_prefix_covers_a_clients_keys_that_begin_with_it_and_no_others(
    fingerprint: str, other: str, key: str, prefix: str
) -> None:
    """Clearing one model would spare some of its objects or take another model's."""
    prefixes = tuple(Scope(fingerprint).name_prefixes(prefix))
    covered = Scope(other).name(key).startswith(prefixes)
    assert covered == (fingerprint == other and key.startswith(prefix))


def test_keys_of_the_cache_keep_their_names() -> None:
    """Redis or Mooncake behind a daemon would not share with replicas that reach them directly."""
    assert Scope("f0").name("f0/tp0/full/ab") == "f0/tp0/full/ab"
    assert Scope("").name("anything") == "anything"
