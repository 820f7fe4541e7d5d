"""Prefetches of queued requests while the host is too small for all of them: what L3 has is not lost."""

from __future__ import annotations

import random
from array import array

import pytest

from hicache.bench.virtual import VirtualRunner
from hicache.build import TierSizes, build_virtual
from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig, HitLoading
from hicache.engine.scheduler import Scheduler
from hicache.request import Request
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.transfer.virtual import VirtualCosts, VirtualStorage
from hicache.types import Component, PrefetchPolicy

PAGE, PROMPT = 4, 40  # 10 pages a prompt


class Replica:
    """One virtual replica over FULL; fetches take a second per page."""

    def __init__(self, *, host_pages: int, policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE) -> None:
        spec = ModelSpec(
            "m", PAGE, (ComponentSpec(Component.FULL, (PoolSpec("full", 1, (1,), "uint8", PAGE),)),)
        )
        self.clock = ManualClock()
        self.cache: HiCache = build_virtual(
            spec,
            TierSizes(device={Component.FULL: 12}, host={Component.FULL: host_pages}),
            CacheConfig(
                hicache_storage_prefetch_policy=policy,
                prefetch_threshold=PAGE,
                chunked_prefill_size=PROMPT,
                mamba_track_interval=PAGE,
                load_or_recompute=HitLoading.ALWAYS,  # so slow a store would be left alone
            ),
            self.clock,
            costs=VirtualCosts(fetch_bandwidth=spec[Component.FULL].page_bytes),
            storage=VirtualStorage(),
        )
        runner = VirtualRunner(self.clock, prefill_tokens_per_s=40.0, decode_tokens_per_s=40.0)
        self.scheduler = Scheduler(self.cache, runner, max_running_requests=1)

    def ask(self, *prompts: int, label: str) -> list[Request]:
        """Queue all prompts (each named by a number) at once and serve them; return them in order."""
        requests = []
        for number in prompts:
            tokens = array("I", random.Random(number).choices(range(1000), k=PROMPT))
            requests.append(Request(f"{label}-{number}", tokens, PROMPT, 1))
            self.scheduler.submit(requests[-1])
        self.scheduler.run_until_idle()
        self.cache.settle()
        return requests


def cached(requests: list[Request]) -> list[int]:
    return [request.cached.cached for request in requests]


def test_what_leaves_the_host_while_a_request_is_queued_is_fetched_again() -> None:
    """It was on the host when the request came, so nothing was fetched; then others pushed it out."""
    replica = Replica(host_pages=24)
    replica.ask(1, 2, 3, 4, 5, label="cold")
    held = replica.ask(5, label="warm")  # 5 is the youngest on the host, 1 the oldest in L3
    assert cached(held) == [36]
    again = replica.ask(1, 2, 3, 5, 4, label="again")
    assert cached(again) == [36] * 5
    assert sum(r.cached.storage for r in again) > 0


def test_queued_requests_wait_for_room_instead_of_fetching_a_part() -> None:
    """Half of L2 holds one prompt; the second one waits for its turn and then gets all of it."""
    replica = Replica(host_pages=24)
    replica.ask(1, 2, 3, 4, 5, 6, label="cold")
    again = replica.ask(1, 2, 3, label="again")
    assert cached(again) == [36, 36, 36]
    assert [r.cached.storage for r in again] == [36, 36, 36]


def test_best_effort_does_not_look_twice() -> None:
    """That policy never waits: what is not there when the request's turn comes is computed."""
    replica = Replica(host_pages=24, policy=PrefetchPolicy.BEST_EFFORT)
    replica.ask(1, 2, 3, 4, 5, 6, label="cold")
    before = replica.clock.now()
    again = replica.ask(1, 2, 3, label="again")
    assert replica.clock.now() - before == pytest.approx(3.0, abs=0.6)  # three prompts of 40 tokens at 40/s
    assert sum(cached(again)) < 3 * 36


def test_prefetches_never_hold_more_than_their_share_of_the_host() -> None:
    """Law 11: under half of L2, or running requests could not write down what they compute."""
    replica = Replica(host_pages=48)
    replica.ask(*range(12), label="cold")
    for number in range(6):
        tokens = array("I", random.Random(number).choices(range(1000), k=PROMPT))
        replica.scheduler.submit(Request(f"again-{number}", tokens, PROMPT, 1))
    while not replica.scheduler.idle:
        held = sum(len(slots) for slots in replica.cache._prefetcher.held().values())
        assert held <= 24
        if not replica.scheduler.step():
            replica.scheduler.wait(0.25)
    replica.cache.settle()
    replica.cache.check_integrity()
