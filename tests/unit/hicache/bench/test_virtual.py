"""The published curves in virtual time: where they fall, why, and how fast the system is."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from hicache.bench.published import PUBLISHED
from hicache.bench.report import RunReport
from hicache.bench.system import SYSTEMS, SimulatedSystem, Tiers
from hicache.bench.virtual import VirtualRunner, invented_token, run_virtual
from hicache.bench.workloads import WORKLOADS, Workload
from hicache.clock import ManualClock
from hicache.engine.scheduler import FinalToken
from hicache.request import Request
from hicache.transfer.virtual import VirtualTicket

Run = Callable[[str, Tiers], RunReport]


def run(workload: Workload, system: SimulatedSystem, tiers: Tiers, *, policy: str = "lru") -> RunReport:
    return run_virtual(
        workload,
        system,
        tiers=tiers,
        eviction_policy=policy,
        final_token=FinalToken.COMPUTE,
        on_result=lambda result: None,
    )


@cache
def published(name: str, tiers: Tiers) -> RunReport:
    """A published workload at its full size."""
    return run(WORKLOADS[name], SYSTEMS[name], tiers)


@cache
def a_quarter(name: str, tiers: Tiers) -> RunReport:
    """The same with a quarter of the clients, the pools and the parallelism: the cliffs stay in place,
    but fall over two or three rounds, as every client weighs four times as much."""
    workload, system = WORKLOADS[name], SYSTEMS[name]
    workload = replace(workload, num_clients=workload.num_clients // 4, max_parallel=4)
    system = replace(system, max_total_tokens=system.max_total_tokens // 4, max_running_requests=4)
    return run(workload, system, tiers)


def percents(report: RunReport) -> list[float]:
    return [100 * r.hit_rate for r in report.rounds]


def cliff(report: RunReport) -> int:
    """The first round that finds less than half of what had been said."""
    return next(
        (r.round for r in report.rounds if r.round and r.hit_rate < r.ceiling / 2), len(report.rounds)
    )


def test_inkling_with_l2_falls_off_the_published_cliff() -> None:
    """95 % in one round and nothing two rounds later: the reason to measure before buying memory."""
    measured = percents(published("inkling-small", Tiers.L1_L2))
    readings = PUBLISHED["inkling-small"].hit_percent["l1+l2"]
    assert measured[:18] == pytest.approx(readings[:18], abs=1.0)
    assert 20 < measured[18] < 90
    assert measured[19:] == [0.0] * 11


def test_inkling_without_l2_dies_in_the_first_rounds_of_too_little_swa() -> None:
    """FULL alone would last to round 9; the strictest pool decides, and the counters name it."""
    report = published("inkling-small", Tiers.L1)
    measured = percents(report)
    assert measured[1] < 10.0
    assert measured[3:] == [0.0] * 27
    half = replace(WORKLOADS["inkling-small"], num_rounds=8)
    roomy = replace(SYSTEMS["inkling-small"], swa_full_tokens_ratio=0.8, mamba_full_memory_ratio=0.8)
    relieved = run(half, roomy, Tiers.L1)
    assert percents(relieved)[7] > 80.0


@pytest.mark.parametrize("round_", range(30))
def test_inkling_with_l3_stays_within_a_point_of_the_ceiling(round_: int) -> None:
    """What L2 loses in round 18 must come back from L3, in every round from then on."""
    row = published("inkling-small", Tiers.L1_L2_L3).rounds[round_]
    assert 100 * row.distance < 1.0
    assert row.by_tier is not None
    assert (row.by_tier.storage > 0) == (round_ >= 18)


def test_inkling_with_l3_ends_at_the_published_rate() -> None:
    """96.8 % in the last round."""
    assert percents(published("inkling-small", Tiers.L1_L2_L3))[-1] == pytest.approx(96.8, abs=0.05)


def test_inkling_gains_from_l2_what_was_published_with_one_prefill_rate() -> None:
    """L1 is fitted, so L2 / L1 is the prediction: 1.4 within 15 %."""
    rates = {t: published("inkling-small", t).effective_input_tokens_per_s for t in Tiers}
    readings = PUBLISHED["inkling-small"].effective_input_tokens_per_s
    assert rates[Tiers.L1] == pytest.approx(readings["l1"], rel=0.03)
    assert rates[Tiers.L1_L2] / rates[Tiers.L1] == pytest.approx(1.4, rel=0.15)
    assert rates[Tiers.L1_L2_L3] == pytest.approx(readings["l1+l2+l3"], rel=0.03)


@pytest.mark.parametrize(
    "scale",
    [pytest.param(a_quarter, id="quarter"), pytest.param(published, id="full", marks=pytest.mark.thorough)],
)
class TestDeepSeek:
    """DeepSeek-V4-Flash; at its full size it takes a minute, so by default a quarter of it."""

    def test_the_cliffs_are_where_they_were_published(self, scale: Run) -> None:
        """L1 between rounds 15 and 20, L1+L2 between 35 and 40; nothing is found ever after."""
        for tiers, first, last in ((Tiers.L1, 15, 20), (Tiers.L1_L2, 35, 40)):
            report = scale("deepseek-v4-flash", tiers)
            assert first < cliff(report) <= last
            assert max(r.distance for r in report.rounds[: first + 1]) < 0.01
            assert percents(report)[last + 2 :] == [0.0] * (57 - last + 1)

    def test_l3_holds_98_percent(self, scale: Run) -> None:
        """Every round within a point of the ceiling."""
        report = scale("deepseek-v4-flash", Tiers.L1_L2_L3)
        assert max(r.distance for r in report.rounds) < 0.01
        assert percents(report)[-1] > 97.9

    def test_l2_gains_what_was_published(self, scale: Run) -> None:
        """L2 / L1 is 1.5 within 15 %, from one prefill rate."""
        l1, l2 = (scale("deepseek-v4-flash", t).effective_input_tokens_per_s for t in (Tiers.L1, Tiers.L1_L2))
        assert l2 / l1 == pytest.approx(1.5, rel=0.15)


@pytest.mark.thorough
@pytest.mark.parametrize("tiers", [Tiers.L1, Tiers.L1_L2, Tiers.L1_L2_L3])
def test_deepseek_gives_every_published_reading_within_a_point(tiers: Tiers) -> None:
    """Twelve readings a curve, the throughput with L1 and L3 (fitted), and L3's mean TTFT below 9 s."""
    readings, report = PUBLISHED["deepseek-v4-flash"], published("deepseek-v4-flash", tiers)
    measured = percents(report)
    assert [measured[r] for r in readings.rounds] == pytest.approx(
        list(readings.hit_percent[tiers.value]), abs=1.0
    )
    speed = readings.effective_input_tokens_per_s[tiers.value]
    assert report.effective_input_tokens_per_s == pytest.approx(speed, rel=0.03)
    if tiers is Tiers.L1_L2_L3:
        assert sum(r.ttft_mean_s for r in report.rounds) / len(report.rounds) < 9.0


def test_a_queue_of_reads_is_no_reason_to_compute() -> None:
    """48 conversations come at once: whoever is computed because many read before it waits far longer."""
    workload, system = WORKLOADS["deepseek-v4-flash"], SYSTEMS["deepseek-v4-flash"]
    workload = replace(workload, num_rounds=10, max_parallel=workload.num_clients)
    system = replace(system, max_total_tokens=system.max_total_tokens // 16)
    report = run(workload, system, Tiers.L1_L2_L3)
    assert max(r.distance for r in report.rounds) < 0.01


def test_without_the_final_token_a_turn_of_whole_pages_loses_its_last_page() -> None:
    """The published system counts the last sampled token as cached; an engine that does not, loses a page."""
    workload = Workload("w", num_clients=1, num_rounds=3, request_length=112, output_length=16)
    system = SimulatedSystem(page_size=64, max_total_tokens=6400)
    rates = [
        run_virtual(
            workload,
            system,
            tiers=Tiers.L1,
            eviction_policy="lru",
            final_token=final,
            on_result=lambda result: None,
        )
        .rounds[1]
        .cached_tokens
        for final in (FinalToken.COMPUTE, FinalToken.SKIP)
    ]
    assert rates == [128, 64]


def test_a_load_hides_behind_compute_but_for_its_last_layer() -> None:
    """TTFT in virtual time must not charge for copies that overlap, nor forget those that do not."""
    clock = ManualClock()
    runner = VirtualRunner(clock, prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0, num_layers=4)
    request = Request("r", array("I", range(100)), 100, 1)
    assert runner.prefill(request, 0, 50) is None
    assert clock.now() == pytest.approx(0.5)
    request.load = VirtualTicket(clock, finish_at=0.75)  # ends within the compute
    assert runner.prefill(request, 50, 100) is not None
    assert clock.now() == pytest.approx(1.0)
    request.load = VirtualTicket(clock, finish_at=3.0)  # outlasts it: one layer is left to compute
    runner.prefill(request, 0, 100)
    assert clock.now() == pytest.approx(3.25)


def test_invented_tokens_differ_between_requests_and_positions() -> None:
    """Equal replies would give two conversations a common prefix that no model would."""
    tokens = [invented_token(f"c{c}-r0", position) for c in range(64) for position in range(100, 164)]
    assert len(set(tokens)) == len(tokens)
    assert max(tokens) < 2**31
