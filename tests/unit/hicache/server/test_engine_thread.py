"""The engine thread answers every command, whatever happens to the engine."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Iterator

import pytest

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import PRESETS
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.engine.scheduler import RequestRefused, Scheduler
from hicache.errors import ConfigError, InvariantViolation
from hicache.request import Request
from hicache.server.engine_thread import EngineStopped, EngineThread, Finish, Progress
from hicache.types import Component

SETTINGS = EngineSettings(
    model=PRESETS["full"],
    page_size=16,
    sizes=TierSizes({Component.FULL: 64}, {}),
    cache=CacheConfig(chunked_prefill_size=64, mamba_track_interval=64),
)


class Harness:
    def __init__(self) -> None:
        self.failed = threading.Event()
        self.engine: ReferenceEngine | None = None

        def make(on_token: Callable[[Request, int], None], on_finish: Callable[[Request], None]) -> Scheduler:
            self.engine = ReferenceEngine(SETTINGS, on_token=on_token, on_finish=on_finish)
            return self.engine.scheduler

        self.thread = EngineThread(make, on_failure=self.failed.set)
        self.thread.start()

    def submit(self, request: Request) -> queue.SimpleQueue[Progress]:
        news: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self.thread.submit(request, news.put).result(60)
        return news


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.thread.stop(lambda _: None, timeout_s=60)
    assert made.engine is not None
    made.engine.close()


def prompt(rid: str, *, new: int = 3, stop: frozenset[int] = frozenset()) -> Request:
    return Request(rid, array("I", range(40)), 40, new, stop_tokens=stop)


def read(news: queue.SimpleQueue[Progress]) -> tuple[list[int], Progress]:
    tokens: list[int] = []
    while True:
        progress = news.get(timeout=60)
        tokens += progress.tokens
        if progress.finish is not None:
            return tokens, progress


def test_tokens_come_one_by_one_and_the_end_says_why(harness: Harness) -> None:
    """A stream would stand still, or never end."""
    tokens, last = read(harness.submit(prompt("a")))
    assert len(tokens) == 3
    assert last.finish is Finish.LENGTH
    tokens_again, last = read(harness.submit(prompt("b", new=9, stop=frozenset({tokens[1]}))))
    assert tokens_again == tokens[:2]
    assert last.finish is Finish.STOP
    assert last.cached.device == 32


def test_a_refused_request_leaves_the_engine_running(harness: Harness) -> None:
    """One bad request would take everybody's away."""
    with pytest.raises(RequestRefused, match="exceed"):
        harness.submit(prompt("a", new=10_000))
    with pytest.raises(ConfigError, match="no"):
        harness.thread.call(raise_config_error).result(60)
    assert read(harness.submit(prompt("b")))[1].finish is Finish.LENGTH


def raise_config_error(_: Scheduler) -> None:
    raise ConfigError("no")


def test_an_abort_reaches_the_one_who_waits(harness: Harness) -> None:
    """A client would wait for ever for a request that is gone."""
    news = harness.submit(prompt("a", new=900))
    news.get(timeout=60)
    assert harness.thread.abort("a").result(60) is True
    assert read(news)[1].finish is Finish.ABORT
    assert harness.thread.abort("a").result(60) is False


def test_a_broken_law_ends_the_engine_and_tells_everybody(harness: Harness) -> None:
    """Law: a crash, never a wrong answer; and never a silent one."""
    news = harness.submit(prompt("a", new=900))
    news.get(timeout=60)

    def break_a_law(_: Scheduler) -> None:
        raise InvariantViolation("slot 3 has two owners")

    with pytest.raises(InvariantViolation):
        harness.thread.call(break_a_law).result(60)
    _, last = read(news)
    assert last.finish is Finish.ABORT
    assert "slot 3 has two owners" in last.message
    assert harness.failed.wait(60)
    assert not harness.thread.alive
    with pytest.raises(EngineStopped, match="slot 3"):
        harness.thread.submit(prompt("b"), lambda _: None).result(60)
    assert harness.thread.stop(lambda _: None, timeout_s=60) is False


def test_stopping_ends_requests_and_runs_the_last_work(harness: Harness) -> None:
    """A shutdown would leave clients hanging, or dirty pages unwritten."""
    news = harness.submit(prompt("a", new=900))
    flushed: list[bool] = []
    assert harness.thread.stop(lambda scheduler: flushed.append(scheduler.idle), timeout_s=60)
    assert flushed == [True]
    assert "shutting down" in read(news)[1].message
    with pytest.raises(EngineStopped):
        harness.thread.call(lambda _: None).result(60)
