"""A tensor-parallel replica as processes, each rank with a store that loses pages of its own.

reports = run_processes(2, cases, folder)  # per rank, per case: what it answered and decided
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hicache.engine.ranks import GlooRanks
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.replica import Replica
from hicache.errors import BackendUnavailable, HiCacheError
from hicache.registry import create_backend
from hicache.request import Request
from hicache.storage_backends.base import StorageBackend
from hicache.testing.faults import Call, Fault, FaultyBackend, Script
from hicache.types import CachedTokens

_MOST_TURNS = 200
Prompts = list[list[list[int]]]  # steps of prompts that are sent together


class Death(enum.Enum):
    """What becomes of a rank in the middle of a case."""

    KILLED = "killed"
    STOPPED = "stopped"  # it stands still and keeps its connections
    FAILED = "failed"  # an exception that nobody expected ends its loop


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """One engine per rank over one script, twice: the second time L1 and L2 have been dropped."""

    settings: EngineSettings
    script: Prompts
    output: int
    losses: Mapping[int, float] = field(default_factory=dict)  # by rank: share of objects that go wrong
    seed: int = 0
    storage: bool = True
    dies: tuple[int, int, Death] | None = None  # rank, at which of its steps, how
    unreachable: tuple[int, ...] = ()  # ranks that cannot open the store
    # A rank whose store fails this many calls before it works. The script goes on until it has been of use.
    fails: tuple[int, int] | None = None


@dataclass(slots=True)
class RankReport:
    """What one rank saw of a case. Ranks that agree have equal reports."""

    answers: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # tokens, hash of logits
    cached: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # device, host, storage
    ticks: int = 0
    decisions: int = 0
    stats: str = ""
    storage_error: str = ""
    error: str = ""
    breaker_opened: int = field(default=0, compare=False)  # on this rank


def run_processes(
    size: int, cases: Sequence[RankCase], folder: Path, *, timeout_s: float = 60.0, within_s: float = 240.0
) -> list[list[RankReport] | None]:
    """Run cases on `size` new processes; per rank the reports, None for one that ended without a word.

    `timeout_s` bounds each exchange between ranks. Raises AssertionError if a rank is neither done nor gone
    `within_s`; one that a case stops is not waited for.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by every rank of every test
    stopped = {case.dies[0] for case in cases if case.dies is not None and case.dies[2] is Death.STOPPED}
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank_main, args=(rank, size, list(cases), folder, timeout_s, pipes[rank][1]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return [
            None if rank in stopped else _received(receiver, within_s)
            for rank, (receiver, _) in enumerate(pipes)
        ]
    finally:
        for process in processes:
            process.kill()  # a stopped one takes no other signal
            process.join(30)


def _received(receiver: Connection, within_s: float) -> list[RankReport] | None:
    if not receiver.poll(within_s):
        raise AssertionError(f"a rank has neither ended nor failed within {within_s} s")
    try:
        reports: list[RankReport] = receiver.recv()
    except EOFError:
        return None
    return reports


def _rank_main(
    rank: int, size: int, cases: list[RankCase], folder: Path, timeout_s: float, sender: Connection
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reports = []
    owner = GlooRanks.join(f"file://{folder}/meet", rank=rank, size=size, timeout_s=timeout_s)
    group = dist.group.WORLD
    assert group is not None
    for number, case in enumerate(cases):
        report = RankReport()
        reports.append(report)
        try:
            _run_case(GlooRanks(group), case, folder / f"store-{number}", report)
        except HiCacheError as error:
            report.error = f"{type(error).__name__}: {error}"
            break
    sender.send(reports)
    with suppress(RuntimeError):
        owner.close()


def _run_case(ranks: GlooRanks, case: RankCase, store: Path, report: RankReport) -> None:
    hashes: dict[str, hashlib._Hash] = {}

    def observe(request: Request, logits: Tensor) -> None:
        hashes.setdefault(request.rid, hashlib.sha256()).update(logits.numpy().tobytes())

    def finished(request: Request) -> None:
        report.answers[request.rid] = tuple(request.output), hashes[request.rid].hexdigest()
        cached: CachedTokens = request.cached
        report.cached[request.rid] = cached.device, cached.host, cached.storage

    def open_backend(name: str, options: Mapping[str, object]) -> StorageBackend:
        if ranks.rank in case.unreachable:
            raise BackendUnavailable(f"rank {ranks.rank} cannot reach the store")
        loses = case.losses.get(ranks.rank, 0.0)
        script = _losing(loses, f"{case.seed}/{ranks.rank}")
        if case.fails is not None and case.fails[0] == ranks.rank:
            script = _failing(case.fails[1])
        return FaultyBackend(create_backend(name, options), script)

    engine = ReferenceEngine(case.settings, observer=observe, on_finish=finished, ranks=ranks)
    _poison(engine)
    replica = Replica(engine, open_backend=open_backend)
    if case.dies is not None and case.dies[0] == ranks.rank:
        _die_at(replica, case.dies[1], case.dies[2])
    try:
        if ranks.rank == 0:
            _lead(replica, case, store, report)
        else:
            replica.follow()
        engine.cache.check_integrity()
        agreed = engine.agreed
        assert agreed is not None
        report.ticks, report.decisions = agreed.ticks, agreed.decisions
        report.stats, report.storage_error = repr(engine.cache.stats), replica.storage_error
        report.breaker_opened = int(engine.executor.counters().get("breaker_opened", 0))
    finally:
        replica.close()


def _lead(replica: Replica, case: RankCase, store: Path, report: RankReport) -> None:
    """Rank 0's part: attach the store, play the script, drop L1 and L2, play it again."""

    def goes_on(turn: int) -> bool:
        if case.fails is None or turn < 2:
            return turn < 2
        return turn < _MOST_TURNS and not any(storage for _, _, storage in report.cached.values())

    if case.storage:
        replica.attach("file", {"file_storage_path": str(store)})
        replica.run_until_idle()
    for turn in itertools.takewhile(goes_on, itertools.count()):
        for number, prompts in enumerate(case.script):
            for i, prompt in enumerate(prompts):
                rid = f"{turn}.{number}.{i}"
                replica.submit(Request(rid, array("I", prompt), len(prompt), case.output))
            replica.run_until_idle()
        replica.flush()
        replica.run_until_idle()
    if case.storage:
        replica.detach()
    replica.stop()
    while not replica.stopped:
        replica.step()


def _die_at(replica: Replica, step: int, how: Death) -> None:
    """Let this rank end in front of its `step`-th step."""
    inner: Callable[[], bool] = replica.step
    left = [step]

    def dying() -> bool:
        left[0] -= 1
        if left[0] == 0:
            if how is Death.FAILED:
                raise HiCacheError("this rank has failed by itself")
            os.kill(os.getpid(), signal.SIGKILL if how is Death.KILLED else signal.SIGSTOP)
        return inner()

    replica.step = dying  # type: ignore[method-assign]


def _losing(share: float, seed: str) -> Script:
    """Return a script for a store in which this share of objects is missing, short or damaged when read."""

    def script(call: Call) -> Fault | None:
        if not share:
            return None
        rng = random.Random(f"{seed}/{call.operation}/{call.number}")

        def some(part: float) -> set[int]:
            return {i for i in range(len(call.keys)) if rng.random() < share * part}

        if call.operation == "probe":
            return Fault(miss=some(0.5))
        if call.operation == "read":
            return Fault(miss=some(0.4), short=some(0.3), flip=some(0.3))
        if call.operation == "commit":
            return Fault(lose=some(0.2))
        return None

    return script


def _failing(calls: int) -> Script:
    """Return a script for a store that is away for its first calls."""
    left = iter(range(calls))

    def script(call: Call) -> Fault | None:
        away = next(left, None) is not None
        return Fault(error=BackendUnavailable("the store is away")) if away else None

    return script


def _poison(engine: ReferenceEngine) -> None:
    """Make every byte nobody wrote a NaN, on both tiers."""
    for component, pages in engine.settings.sizes.device.items():
        engine.device_pools.poison(component, range(pages))
    if engine.host_pools is not None:
        for component, pages in engine.settings.sizes.host.items():
            engine.host_pools.poison(component, range(pages))
