"""Belady's reference, and the adaptive policy beside it, in virtual time."""

from __future__ import annotations

from array import array

import pytest

from hicache.bench.belady import NEVER, Future
from hicache.bench.report import RunReport
from hicache.bench.system import SimulatedSystem, Tiers
from hicache.bench.virtual import run_virtual
from hicache.bench.workloads import Workload
from hicache.engine.scheduler import FinalToken
from hicache.errors import ConfigError
from hicache.types import Component

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA

# 48 conversations of 32 pages at the end; L2 holds 960 pages.
LOOP = Workload(
    name="loop",
    num_clients=48,
    num_rounds=16,
    request_length=56,
    output_length=8,
    max_parallel=4,
)
SYSTEM = SimulatedSystem(
    page_size=32,
    max_running_requests=4,
    chunked_prefill_size=512,
    max_total_tokens=480 * 32,
    sliding_window=64,
    swa_full_tokens_ratio=0.5,
    mamba_full_memory_ratio=40.0,
)


def rates(policy: str, workload: Workload = LOOP, *components: Component) -> list[float]:
    report: RunReport = run_virtual(
        workload,
        SYSTEM.given(components=components or (FULL,)),
        tiers=Tiers.L1_L2,
        eviction_policy=policy,
        final_token=FinalToken.COMPUTE,
        on_result=lambda _: None,
    )
    return [row.hit_rate for row in report.rounds]


def test_a_page_is_next_used_by_the_first_later_prompt_that_holds_it() -> None:
    """A reference that sees the wrong future is beaten by the policies it is to judge."""
    a, b = array("I", [1, 1, 2, 2]), array("I", [1, 1, 3, 3])
    future = Future([(b"", a), (b"", b), (b"s", a), (b"", a)], page_size=2)
    first, second = a[:2].tobytes(), a[2:].tobytes()
    assert [future.next_use(b"", 0, first, now) for now in (0, 1, 2, 4)] == [1, 2, 4, NEVER]
    assert [future.next_use(b"", 1, second, now) for now in (0, 1, 4)] == [1, 4, NEVER]
    assert future.next_use(b"s", 1, second, 0) == 3
    assert future.next_use(b"", 2, second, 0) == NEVER


def test_beyond_the_cliff_adaptive_stays_near_belady_where_lru_finds_nothing() -> None:
    """The cliff: one conversation more than fits, and every request computes its whole history again."""
    belady, adaptive, lru = rates("belady"), rates("adaptive"), rates("lru")
    assert lru[-1] < 0.05
    assert belady[-1] > 0.5
    assert all(mine >= 0.95 * best for mine, best in zip(adaptive, belady, strict=True))


@pytest.mark.parametrize("components", [(FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)])
def test_windows_and_states_are_there_where_the_pages_that_were_kept_end(components) -> None:
    """FULL pages that no window or state belongs to are room without a hit."""
    adaptive, lru = rates("adaptive", LOOP, *components), rates("lru", LOOP, *components)
    assert lru[-1] < 0.05
    assert adaptive[-1] > 0.35


def test_belady_is_refused_where_there_is_no_future_to_know() -> None:
    """A server that took it would have to guess."""
    from hicache.tree import make_policy

    with pytest.raises(ConfigError, match="belady"):
        make_policy("belady")
