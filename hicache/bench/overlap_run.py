"""How much of a load from L2 hides behind the compute of the layers before it.

The reference engine's layers on one compute thread, the executor's copies on one copy thread. The
copies are real and, as a memory copy is faster than any bus, each is held until a bus of the chosen
speed would have delivered it; one more run takes them as fast as memory gives them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from hicache.bench.overlap import OverlapSettings
from hicache.bench.report import JSON
from hicache.engine.architecture import ReferenceConfig, reference_spec
from hicache.engine.model import ReferenceModel
from hicache.engine.runner import TorchRunner
from hicache.errors import HiCacheError
from hicache.request import Request
from hicache.tiers.device import DevicePools
from hicache.tiers.host import HostPools
from hicache.transfer.base import JobId, JobKind, LoadTicket, Move
from hicache.transfer.copy_engine import CpuCopyEngine, LayerPart, Mark, Pages
from hicache.transfer.executor import TransferExecutor
from hicache.types import Component, Slots

FULL = Component.FULL

_TELLING_S = 3e-3  # less than this cannot be told from the scheduler's noise
_PAUSE_S = 0.01  # before each run: on a busy machine whoever has just rested is scheduled first


class BusCopyEngine(CpuCopyEngine):
    """Copies, then holds each layer until a bus of `bytes_per_s` would have brought it."""

    bytes_per_s = float("inf")

    @contextmanager
    def session(self, kind: JobKind, pages: Mapping[Component, Pages], after: Mark) -> Iterator[None]:
        self._due = time.perf_counter()
        yield

    def load_part(self, part: LayerPart, pages: Pages) -> None:
        super().load_part(part, pages)
        size = self._device.geometry(part.pool).pool.layer_page_bytes * len(pages.host)
        self._due += size / self.bytes_per_s

    def mark(self) -> Mark:
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return super().mark()


@dataclass(frozen=True, slots=True)
class _WholeLoad(LoadTicket):
    """Load-then-compute: the first layer already waits for the last one's gate."""

    load: LoadTicket
    last: int

    def wait_layer(self, layer: int) -> None:
        self.load.wait_layer(self.last)

    def done(self) -> bool:
        return self.load.done()


class _Stopwatch(LoadTicket):
    """Opens at once and notes when each layer begins."""

    def __init__(self) -> None:
        self.started = 0.0
        self.begun: list[float] = []

    def start(self) -> LoadTicket:
        self.started = time.perf_counter()
        return self

    def wait_layer(self, layer: int) -> None:
        self.begun.append(time.perf_counter())

    def done(self) -> bool:
        return True


class _Prompt:
    """The prompt's prefix on the host, room for it twice on the device, and the engine that continues it."""

    def __init__(self, settings: OverlapSettings) -> None:
        self.settings = settings
        total = settings.prefix_tokens + settings.new_tokens
        config = ReferenceConfig(
            layers=(FULL,) * settings.layers,
            hidden=settings.hidden,
            mlp=2 * settings.hidden,
            context_length=total,
            seed=settings.seed,
        )
        spec = reference_spec(config, settings.page_size)
        self.pages = settings.prefix_tokens // settings.page_size
        tail = -(-settings.new_tokens // settings.page_size)
        self.home = array("i", range(self.pages))
        self.elsewhere = array("i", range(self.pages + tail, 2 * self.pages + tail))
        self._table = array("i", range(self.pages + tail))
        self._device = DevicePools(spec, {FULL: 2 * self.pages + tail})
        host = HostPools(spec, {FULL: self.pages}, settings.layout)
        self.bus = BusCopyEngine(self._device, host)
        self.executor = TransferExecutor(spec, self._device, host, copy=self.bus)
        self.load_bytes = self.pages * spec[FULL].page_bytes
        self._logits: list[bytes] = []
        self._runner = TorchRunner(
            ReferenceModel(config),
            self._device,
            page_size=settings.page_size,
            observer=lambda _, row: self._logits.append(row.numpy().tobytes()),
        )
        generator = torch.Generator().manual_seed(settings.seed)
        self._tokens = array("I", torch.randint(0, config.vocab, (total,), generator=generator).tolist())
        self._runner.prefill(self._request(None), 0, settings.prefix_tokens)
        self.executor.start_write(JobId(1), [Move(FULL, self.home, self.home)])
        self._drain()
        self.first_token(lambda: None)
        self.truth = self._logits[-1]

    def _request(self, load: LoadTicket | None) -> Request:
        made = Request(rid="overlap", tokens=self._tokens, prompt_length=len(self._tokens), max_new_tokens=1)
        made.full, made.load = self._table, load
        return made

    def _drain(self) -> None:
        if not self.executor.wait(60):
            raise HiCacheError("a copy of the benchmark did not end within 60 s")
        if any(done.failed for done in self.executor.poll()):
            raise HiCacheError("a copy of the benchmark failed")

    def start_load(self, targets: Slots) -> LoadTicket:
        return self.executor.start_load(JobId(1), [Move(FULL, self.home, targets)])

    def first_token(self, begin: Callable[[], LoadTicket | None]) -> float:
        """Seconds from beginning the load (if any) to the first token."""
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        self._runner.prefill(self._request(begin()), self.settings.prefix_tokens, len(self._tokens))
        return time.perf_counter() - started

    def loaded(self, begin: Callable[[], LoadTicket | None], targets: Slots) -> float:
        """first_token() with a load onto poisoned pages, the result checked."""
        self._device.poison(FULL, targets)
        elapsed = self.first_token(begin)
        self._drain()
        if self._logits.pop() != self.truth:
            raise HiCacheError("the first token came from other bytes than the resident prefix gives")
        return elapsed

    def arrivals(self) -> list[float]:
        """When each layer arrives, in seconds from the start of a load with no compute beside it."""
        time.sleep(_PAUSE_S)
        started = time.perf_counter()
        ticket = self.start_load(self.home)
        times = []
        for layer in range(self.settings.layers):
            ticket.wait_layer(layer)
            times.append(time.perf_counter() - started)
        self._drain()
        return times

    def layer_starts(self) -> tuple[list[float], float]:
        """When each layer begins and the token is there, in seconds, with the prefix resident."""
        watch = _Stopwatch()
        total = self.first_token(watch.start)
        self._logits.pop()
        return [begun - watch.started for begun in watch.begun], total

    def close(self) -> None:
        self.executor.close()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds over the repeats. Rates are taken from `best`: what others do on the machine only adds."""

    best: float
    median: float

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        return cls(min(values), statistics.median(values))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One length of load against the same compute. Times to the first token in seconds."""

    load_over_compute: float | None  # asked for; None: as fast as memory gives
    load_s: float  # alone
    load_bytes_per_s: float
    no_load: Timing
    load_then_compute: Timing
    layer_wise: Timing
    beside_load: Timing  # compute that needs no load, while one runs: what sharing the machine costs
    bound_s: float  # layer-wise, from each layer's copy and compute times measured alone
    bound_then_compute_s: float  # load-then-compute from the same
    layers: int

    @property
    def hideable_s(self) -> float:
        """(N-1)/N of the shorter of load and compute: one layer must come first, or be computed last."""
        return min(self.load_s, self.no_load.best) * (self.layers - 1) / self.layers

    @property
    def hidden_s(self) -> float:
        return self.load_then_compute.best - self.layer_wise.best

    @property
    def hidden_share(self) -> float | None:
        """None where there is too little to hide to tell it from noise."""
        return self.hidden_s / self.hideable_s if self.hideable_s >= _TELLING_S else None

    @property
    def no_share_because(self) -> str | None:
        """Why there is no share; None where there is one."""
        if self.hideable_s >= _TELLING_S:
            return None
        return (
            f"{1e3 * self.hideable_s:.2f} ms could be hidden; under {1e3 * _TELLING_S:g} ms a share "
            "cannot be told from noise"
        )

    @property
    def bound_share(self) -> float | None:
        """What could be hidden if copies and compute side by side took what they take alone."""
        if self.hideable_s < _TELLING_S:
            return None
        return (self.bound_then_compute_s - self.bound_s) / self.hideable_s

    def as_json(self) -> dict[str, JSON]:
        modes = ("no_load", "load_then_compute", "layer_wise", "beside_load")
        return {
            "load_over_compute": self.load_over_compute,
            "load_s": self.load_s,
            "load_bytes_per_s": self.load_bytes_per_s,
            "ttft_s": {mode: asdict(getattr(self, mode)) for mode in modes},
            "bound_ttft_s": {
                "load_then_compute": self.bound_then_compute_s,
                "layer_wise": self.bound_s,
            },
            "hideable_s": self.hideable_s,
            "hidden_s": self.hidden_s,
            "hidden_share": self.hidden_share,
            "bound_share": self.bound_share,
            "no_share_because": self.no_share_because,
        }


def measure(
    settings: OverlapSettings, ratios: Sequence[float], *, progress: Callable[[], None] = lambda: None
) -> list[Scenario]:
    """Run every ratio of load to compute, and one load at memory speed. `progress` is called per repeat.

    Everything is interleaved, so that noise falls on all alike. Fixes torch to one thread for the
    process. Raises HiCacheError if any result differs from the one with the prefix resident.
    """
    torch.set_num_threads(1)
    prompt = _Prompt(settings)
    try:
        compute = sum(_quietest_steps([prompt.layer_starts() for _ in range(max(60, settings.repeats))]))
        loads = [_Samples(ratio, prompt.load_bytes / (ratio * compute)) for ratio in ratios]
        loads.append(_Samples(None, float("inf")))
        resident = []
        for _ in range(settings.repeats):
            resident.append(prompt.layer_starts())
            for samples in loads:
                samples.take(prompt)
            progress()
        return [samples.scenario(prompt, resident) for samples in loads]
    finally:
        prompt.close()


class _Samples:
    """Times of one speed of the bus."""

    def __init__(self, ratio: float | None, bytes_per_s: float) -> None:
        self._ratio, self._bytes_per_s = ratio, bytes_per_s
        self._arrivals: list[list[float]] = []
        self._times: dict[str, list[float]] = {"load_then_compute": [], "layer_wise": [], "beside_load": []}

    def take(self, prompt: _Prompt) -> None:
        """Run every mode once."""
        prompt.bus.bytes_per_s = self._bytes_per_s
        home, last = prompt.home, prompt.settings.layers - 1

        def beside() -> None:
            prompt.start_load(prompt.elsewhere)

        self._arrivals.append(prompt.arrivals())
        for mode, begin, targets in (
            ("load_then_compute", lambda: _WholeLoad(prompt.start_load(home), last), home),
            ("layer_wise", lambda: prompt.start_load(home), home),
            ("beside_load", beside, prompt.elsewhere),
        ):
            self._times[mode].append(prompt.loaded(begin, targets))

    def scenario(self, prompt: _Prompt, resident: Sequence[tuple[list[float], float]]) -> Scenario:
        arrivals = [min(times) for times in zip(*self._arrivals, strict=True)]
        steps = _quietest_steps(resident)
        return Scenario(
            load_over_compute=self._ratio,
            load_s=arrivals[-1],
            load_bytes_per_s=prompt.load_bytes / arrivals[-1],
            no_load=Timing.of([seconds for _, seconds in resident]),
            bound_s=_pipeline(arrivals, steps),
            bound_then_compute_s=arrivals[-1] + sum(steps),
            layers=prompt.settings.layers,
            **{mode: Timing.of(times) for mode, times in self._times.items()},
        )


def _quietest_steps(resident: Sequence[tuple[list[float], float]]) -> list[float]:
    """Seconds before the first layer and of each layer, every one from the run that disturbed it least."""
    runs = ([0.0, *begun, total] for begun, total in resident)
    steps = [[later - earlier for earlier, later in pairwise(run)] for run in runs]
    return [min(times) for times in zip(*steps, strict=True)]


def _pipeline(arrivals: Sequence[float], steps: Sequence[float]) -> float:
    """Time to the token if each layer starts when it has arrived and the one before is computed."""
    now = steps[0]
    for arrived, step in zip(arrivals, steps[1:], strict=True):
        now = max(now, arrived) + step
    return now


def environment() -> dict[str, JSON]:
    """Where the numbers were measured."""
    load = os.getloadavg()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average_1m": load[0],
        "torch_threads": torch.get_num_threads(),
        "device": "cpu",
    }
