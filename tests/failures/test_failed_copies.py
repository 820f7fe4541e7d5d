"""Copies between device and host that fail: one request pays with a computation, nobody else notices."""

from __future__ import annotations

import itertools
import queue
from array import array
from collections.abc import Iterator

import pytest

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import PRESETS
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import Scheduler
from hicache.request import Request
from hicache.server.engine_thread import EngineThread, Finish, Progress
from hicache.testing.scripted_cache import FULL, MAMBA, SWA, ScriptedCache, tokens
from hicache.transfer.base import JobKind
from hicache.types import Component, Tier

SETS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]
PROMPT = tokens(41)


def on_host_only(bed: ScriptedCache, prompt: array[int] = PROMPT) -> None:
    """Compute a prompt and push it off the device."""
    bed.run("warm", prompt)
    for component in reversed(bed.cache.spec.kinds):
        count = bed.cache.tree.resident(Tier.DEVICE, component)
        bed.cache.pools.free_all(bed.cache.tree.evict(Tier.DEVICE, component, count).freed)
    assert bed.hit(prompt) == 10


@pytest.mark.parametrize("kinds", SETS, ids=str)
@pytest.mark.parametrize("noticed", ["before its first step", "while it waits for a layer"])
def test_a_request_whose_load_fails_is_computed(kinds: tuple[Component, ...], noticed: str) -> None:
    """What the pages held before would be served as the prompt's, or the whole server would stop."""
    bed = ScriptedCache(kinds, storage=False)
    on_host_only(bed)
    request = bed.submit("r", PROMPT)
    other = bed.submit("other", tokens(20, seed=5))
    if noticed == "before its first step":
        assert bed.cache.admit(request)
        bed.scheduler._waiting.remove(request)
        bed.scheduler._running.append(request)
        bed.end(bed.open(JobKind.LOAD), failed=True)
        bed.step()
    else:
        finish = bed.executor.finish

        def fail(job: object, **how: object) -> None:
            load = job in bed.executor.open_jobs(JobKind.LOAD)
            finish(job, **({"failed": True} if load else how))  # type: ignore[arg-type]

        bed.executor.finish = fail  # type: ignore[method-assign]
        bed.step()
        bed.executor.finish = finish  # type: ignore[method-assign]
    bed.drain()
    assert bed.cache.stats.failed_loads == 1
    assert {r.rid for r in bed.finished} == {"warm", "r", "other"}
    for done in (request, other):
        counts = done.cached
        assert (counts.host, counts.storage) == (0, 0)
        assert counts.cached + counts.computed == done.prompt_length
    assert bed.cache.stats.loaded_pages.total() == 0
    assert bed.cache.stats.prompt_tokens == 41 + 41 + 20
    bed.check_quiet()


def test_a_request_that_is_aborted_while_its_load_fails_is_simply_gone() -> None:
    """Its pages stay busy until the copy has ended, and are then everybody's."""
    for order in itertools.permutations(["abort", "fail"]):
        bed = ScriptedCache(storage=False)
        on_host_only(bed)
        request = bed.submit("r", PROMPT)
        assert bed.cache.admit(request)
        bed.scheduler._waiting.remove(request)
        bed.scheduler._running.append(request)
        held = bed.free(Tier.DEVICE)[FULL]
        for event in order:
            if event == "abort":
                assert bed.scheduler.abort("r")
                bed.cache.check_integrity()
            else:
                bed.end(bed.open(JobKind.LOAD), failed=True)
        assert bed.free(Tier.DEVICE)[FULL] == held + 10
        bed.drain()
        bed.check_quiet()


def test_a_retry_under_the_same_id_is_not_ended_by_the_load_of_the_attempt_before() -> None:
    """The end of an old load would take the new attempt's lease and pages away."""
    bed = ScriptedCache(storage=False)
    on_host_only(bed)
    request = bed.submit("r", PROMPT, new=4)
    assert bed.cache.admit(request)
    bed.scheduler._waiting.remove(request)
    bed.scheduler._running.append(request)
    old = bed.open(JobKind.LOAD)
    bed.scheduler._running.remove(request)
    bed.cache.retract(request)
    assert bed.cache.admit(request)
    bed.scheduler._running.append(request)
    bed.end(old)
    assert request.lease is not None
    assert len(request.full) == 10
    bed.drain()
    assert bed.finished[-1] is request
    bed.check_quiet()


@pytest.mark.parametrize("kinds", SETS, ids=str)
def test_a_write_that_fails_leaves_nothing_on_the_host_and_is_tried_again(
    kinds: tuple[Component, ...],
) -> None:
    """A page listed on the host without its bytes would be loaded as garbage."""
    bed = ScriptedCache(kinds, storage=False)
    bed.submit("r", PROMPT)
    bed.step(3)
    for write in bed.executor.open_jobs(JobKind.WRITE):
        bed.end(write, failed=True)
        assert bed.cache.tree.resident(Tier.HOST, FULL) == 0
    bed.drain()
    assert bed.cache.tree.resident(Tier.HOST, FULL) == 10
    on_host_only(bed)
    assert bed.run("again", PROMPT).cached.host == 40
    bed.check_quiet()


def test_a_write_that_always_fails_is_given_up() -> None:
    """A broken copy path would be tried for ever, instead of serving from the device."""
    bed = ScriptedCache(storage=False)
    bed.submit("r", PROMPT)
    for tries in range(100):
        bed.step()
        writes = bed.executor.open_jobs(JobKind.WRITE)
        for write in writes:
            bed.end(write, failed=True)
        if tries > 10 and not writes:
            break
    else:
        pytest.fail("it is tried for ever")
    assert bed.run("again", PROMPT).cached.device == 40
    bed.check_quiet()


class FailingLoads:
    """A reference engine behind its thread, whose next loads fail when told so."""

    def __init__(self) -> None:
        self.fail = False
        settings = EngineSettings(
            model=PRESETS["full"],
            page_size=16,
            sizes=TierSizes({Component.FULL: 8}, {Component.FULL: 64}),
            cache=CacheConfig(chunked_prefill_size=64, mamba_track_interval=64),
        )

        def make(on_token: object, on_finish: object) -> Scheduler:
            self.engine = ReferenceEngine(settings, on_token=on_token, on_finish=on_finish)  # type: ignore[arg-type]
            copies = self.engine.cache.executor._engine  # type: ignore[attr-defined]
            load_part = copies.load_part

            def load(part: object, pages: object) -> None:
                if self.fail:
                    raise OSError("the copy engine is gone")
                load_part(part, pages)

            copies.load_part = load
            return self.engine.scheduler

        self.thread = EngineThread(make)
        self.thread.start()

    def ask(self, rid: str, prompt: array[int]) -> tuple[list[int], Progress]:
        news: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self.thread.submit(Request(rid, array("I", prompt), len(prompt), 3), news.put).result(60)
        got: list[int] = []
        while True:
            progress = news.get(timeout=30)
            got += progress.tokens
            if progress.finish is not None:
                return got, progress


@pytest.fixture
def served() -> Iterator[FailingLoads]:
    made = FailingLoads()
    yield made
    made.thread.stop(lambda _: None, timeout_s=60)
    made.engine.close()


def test_a_server_outlives_a_load_that_fails(served: FailingLoads) -> None:
    """One bad copy would end the engine, and every request with it."""
    mine, others = array("I", range(65)), array("I", range(200, 310))
    answer, _ = served.ask("cold", mine)
    served.ask("other", others)  # pushes the first off the device
    served.fail = True
    again, last = served.ask("hit", mine)
    assert last.finish is Finish.LENGTH
    assert again == answer
    assert last.cached.host == 0
    assert served.engine.cache.stats.failed_loads == 1
    served.fail = False
    assert served.thread.alive
    served.ask("other again", others)
    again, last = served.ask("hit again", mine)
    assert again == answer
    assert last.cached.host + last.cached.device > 0
