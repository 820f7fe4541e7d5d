"""How many requests a pool of windows lets run: long prompts and replies in virtual time, island on and off.

The real cache, scheduler and allocators; a runner that computes nothing. Besides this cache with and
without islands there is the published arrangement without them, in which a request's last chunk stays.
"""

from __future__ import annotations

import enum
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hicache.bench.report import JSON
from hicache.bench.system import SimulatedSystem, Tiers
from hicache.build import build_tree
from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.engine.scheduler import Scheduler
from hicache.errors import ConfigError, InvariantViolation
from hicache.request import Request
from hicache.transfer.virtual import VirtualExecutor
from hicache.tree import Lease
from hicache.types import Component, Tier

SWA = Component.SWA


class Windows(str, enum.Enum):
    """What becomes of the SWA of a running request."""

    CHUNK_LOCKS = "chunk-locks"  # its last chunk stays locked while it runs, as in the published baseline
    PAGE_LEASES = "page-leases"  # this cache: the window is leased, what lies before it is cached
    ISLANDS = "islands"  # this cache: what lies before it is given back, but for islands


@dataclass(frozen=True, slots=True)
class Arm:
    """One system under the workload."""

    windows: Windows
    ratio: float
    total_tokens: int


# The published pair, and what a smaller pool does without islands.
ARMS = (
    Arm(Windows.CHUNK_LOCKS, 0.32, 740_000),
    Arm(Windows.CHUNK_LOCKS, 0.17, 980_000),
    Arm(Windows.PAGE_LEASES, 0.17, 980_000),
    Arm(Windows.ISLANDS, 0.17, 980_000),
)


@dataclass(frozen=True, slots=True)
class LongRequests:
    """Requests with nothing in common, `concurrency` of them sent and not answered. Lengths in tokens.

    A length is drawn between `range_ratio` times the given one and the given one.
    """

    num_prompts: int = 96
    concurrency: int = 96
    input_length: int = 32_768
    output_length: int = 16_384
    range_ratio: float = 1.0
    accept_lengths: tuple[int, int] = (1, 16)  # tokens of a decode step, drawn in between
    seed: int = 20260626

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--max-concurrency", self.concurrency),
            ("--random-input-len", self.input_length),
            ("--random-output-len", self.output_length),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio {self.range_ratio}: must be in [0, 1]")
        if not 1 <= self.accept_lengths[0] <= self.accept_lengths[1]:
            raise ConfigError(
                f"--accept-length {'-'.join(map(str, self.accept_lengths))}: write least-most, as in 1-16"
            )

    def requests(self) -> list[Request]:
        """Draw all of them; the same for the same seed."""
        rng = random.Random(self.seed)
        made = []
        for number in range(self.num_prompts):
            prompt = self._length(rng, self.input_length)
            reply = self._length(rng, self.output_length)
            tokens = array("I", bytes(4 * prompt))
            tokens[0] = number + 1
            made.append(Request(f"r{number}", tokens, prompt, reply))
        return made

    def _length(self, rng: random.Random, longest: int) -> int:
        return rng.randint(max(1, int(longest * self.range_ratio)), longest)


@dataclass(slots=True)
class IslandRun:
    """What one arm showed. Means are over the steps in which more requests wait, here or unsent."""

    arm: Arm
    requests: int
    steps: int = 0  # until the last request ended
    sampled: int = 0
    running: int = 0  # sums over sampled steps
    computing: int = 0
    held: int = 0
    most_computing: int = 0
    retracted: int = 0
    evicted_windows: int = 0  # SWA pages
    wall_s: float = 0.0

    def mean(self, total: int) -> float:
        return total / self.sampled if self.sampled else 0.0

    @property
    def hold(self) -> float:
        """SWA tokens that nobody else can have, per running request."""
        return self.held / self.running if self.running else 0.0

    def as_json(self) -> dict[str, JSON]:
        return {
            "windows": self.arm.windows.value,
            "swa_full_tokens_ratio": self.arm.ratio,
            "max_total_tokens": self.arm.total_tokens,
            "requests": self.requests,
            "running_mean": round(self.mean(self.running), 2),
            "running_max": self.most_computing,
            "computing_mean": round(self.mean(self.computing), 2),
            "swa_hold_per_request": round(self.hold),
            "retractions": self.retracted,
            "steps": self.steps,
            "evicted_swa_pages": self.evicted_windows,
            "wall_s": round(self.wall_s, 1),
        }


class ChunkLocks(HiCache):
    """The published arrangement without islands: locks are of whole nodes, and a chunk is one."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        HiCache.__init__(self, *parts, **settings)
        self._chunks: dict[Request, Lease] = {}

    def computed(self, request: Request, end: int, *, decode: bool = False) -> None:
        start = request.computed // self.rules.page_size
        HiCache.computed(self, request, end, decode=decode)
        if not decode and request.lease is not None:
            before = self._chunks.pop(request, None)
            depth = request.lease.depth
            self._chunks[request] = self.tree.lock(
                request.lease, depth, Tier.DEVICE, swa_start=start, states=()
            )
            if before is not None:
                self.tree.release(before)

    def finish(self, request: Request) -> None:
        self._unlock(request)
        HiCache.finish(self, request)

    def abort(self, request: Request) -> None:
        self._unlock(request)
        HiCache.abort(self, request)

    def _unlock(self, request: Request) -> None:
        lock = self._chunks.pop(request, None)
        if lock is not None:
            self.tree.release(lock)


class _NoCompute:
    """Returns at once; remembers who computed since it was last asked."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def prefill(self, request: Request, start: int, end: int) -> int | None:
        self.seen.add(request.rid)
        return 0 if end == len(request.tokens) else None

    def decode(self, request: Request) -> int:
        self.seen.add(request.rid)
        return 0


def run_arm(
    arm: Arm,
    workload: LongRequests,
    system: SimulatedSystem,
    on_request: Callable[[], None] = lambda: None,
) -> IslandRun:
    """Serve the workload to its end on a cold system. `system` says all but ratio, tokens and islands."""
    started = time.perf_counter()
    system = system.given(
        swa_full_tokens_ratio=arm.ratio,
        max_total_tokens=arm.total_tokens,
        enable_swa_islands=arm.windows is Windows.ISLANDS,
    )
    spec, config, clock = system.spec("islands"), system.config("lru"), ManualClock()
    sizes = system.sizes(Tiers.L1, spec)
    made = ChunkLocks if arm.windows is Windows.CHUNK_LOCKS else HiCache
    cache = made(
        spec,
        build_tree(spec, sizes, config),
        VirtualExecutor(spec, clock),
        device=sizes.device,
        host=sizes.host,
        config=config,
        clock=clock,
    )
    rng = random.Random(workload.seed)
    runner, report = _NoCompute(), IslandRun(arm, workload.num_prompts)
    waiting = deque(workload.requests())
    out: set[str] = set()

    def finished(request: Request) -> None:
        out.discard(request.rid)
        on_request()

    scheduler = Scheduler(
        cache,
        runner,
        max_running_requests=system.max_running_requests,
        accept_length=lambda _: rng.randint(*workload.accept_lengths),
        on_finish=finished,
    )
    while waiting or out:
        while waiting and len(out) < workload.concurrency:
            request = waiting.popleft()
            out.add(request.rid)
            scheduler.submit(request)
        runner.seen.clear()
        if not scheduler.step():
            raise InvariantViolation(f"{scheduler.num_running} requests run, {len(out)} wait, none moves")
        clock.advance(1.0)
        report.steps += 1
        if waiting or scheduler.num_waiting:
            _sample(report, cache, scheduler, len(runner.seen))
    report.retracted = cache.stats.retracted
    report.evicted_windows = cache.stats.evicted_pages["device.swa"]
    report.wall_s = time.perf_counter() - started
    _check_empty(cache)
    return report


def _sample(report: IslandRun, cache: HiCache, scheduler: Scheduler, computing: int) -> None:
    report.sampled += 1
    report.running += scheduler.num_running
    report.computing += computing
    report.most_computing = max(report.most_computing, computing)
    report.held += cache.pools.held(Tier.DEVICE, SWA) * cache.rules.page_size


def _check_empty(cache: HiCache) -> None:
    """Both pools must be back to where they began once everything is evicted."""
    cache.tick()
    if not cache.flush() or any(cache.pools[key].num_taken for key in cache.pools.kinds):
        raise InvariantViolation("slots are missing after everything was evicted")
