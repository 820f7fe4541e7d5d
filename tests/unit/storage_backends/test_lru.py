"""Recency with leases: the same victims as a naive model, whatever the history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.storage_backends.lru import Entry, LeasedLru

KEYS = [f"k{i}" for i in range(6)]
LEASE_S = 10.0
MAX_LEASED = 60

operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(KEYS), st.integers(1, 30)),
        st.tuples(st.sampled_from(["pop", "evict"]), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.sampled_from(["touch", "lease"]), st.sampled_from(KEYS), st.integers(1, 3)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 12)),
    ),
    max_size=40,
)


class Naive:
    """Two plain lists and sums over them."""

    def __init__(self) -> None:
        self.cold: list[str] = []
        self.leased: list[tuple[str, float]] = []
        self.sizes: dict[str, int] = {}

    def leased_keys(self) -> list[str]:
        return [key for key, _ in self.leased]

    def end(self, now: float) -> None:
        while self.leased and (
            self.leased[0][1] <= now or sum(self.sizes[k] for k in self.leased_keys()) > MAX_LEASED
        ):
            self.cold.append(self.leased.pop(0)[0])

    def lease(self, keys: list[str], now: float) -> None:
        for key in reversed(keys):
            if key in self.sizes:
                self.cold = [k for k in self.cold if k != key]
                self.leased = [*(pair for pair in self.leased if pair[0] != key), (key, now + LEASE_S)]
        while sum(self.sizes[k] for k in self.leased_keys()) > MAX_LEASED:
            self.cold.append(self.leased.pop(0)[0])

    def touch(self, keys: list[str]) -> None:
        for key in reversed(keys):
            if key in self.cold:
                self.cold.remove(key)
                self.cold.append(key)

    def pop(self, key: str) -> None:
        self.sizes.pop(key, None)
        self.cold = [k for k in self.cold if k != key]
        self.leased = [pair for pair in self.leased if pair[0] != key]


@given(operations)
def test_any_history_gives_the_victims_of_the_naive_model(history: list[tuple[str, str, int]]) -> None:
    """A leased object would be evicted under its reader, or bytes would be counted wrongly."""
    lru: LeasedLru[Entry] = LeasedLru(lease_s=LEASE_S, max_leased_bytes=MAX_LEASED)
    naive = Naive()
    now = 0.0
    for operation, key, number in history:
        keys = [KEYS[(KEYS.index(key) + i) % len(KEYS)] for i in range(number)] if key else []
        if operation == "add" and key not in lru:
            lru.add(key, Entry(number))
            naive.sizes[key] = number
            naive.cold.append(key)
        elif operation == "pop":
            assert (lru.pop(key) is not None) == (key in naive.sizes)
            naive.pop(key)
        elif operation == "touch":
            lru.touch(keys)
            naive.touch(keys)
        elif operation == "lease":
            found = lru.lease(keys, now)
            assert [entry is not None for entry in found] == [k in naive.sizes for k in keys]
            naive.lease(keys, now)
        elif operation == "wait":
            now += number
        else:
            lru.end_leases(now)
            naive.end(now)
            victim = lru.pop_coldest()
            assert (victim[0] if victim else None) == (naive.cold[0] if naive.cold else None)
            if victim:
                naive.pop(victim[0])
        assert sorted(lru) == sorted(naive.sizes)
        assert lru.used_bytes == sum(naive.sizes.values())
        assert lru.leased_bytes == sum(naive.sizes[k] for k in naive.leased_keys()) <= MAX_LEASED
        assert lru.evictable_bytes == sum(naive.sizes[k] for k in naive.cold)
