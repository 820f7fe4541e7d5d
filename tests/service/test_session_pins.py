"""Sessions as far as L3, with two replicas and a daemon as processes: what open ones need is dropped last."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hicache.testing.daemon import DaemonProcess
from hicache.testing.services import Service

START_S = 60.0
CAPACITY = "2MiB"
FLOOD = 8
PROMPT = 400  # tokens: 25 pages of 16
EXTRA = {"prefetch_threshold": 16, "prefetch_timeout_base": 20.0}


class Replica(Service):
    """`hicache launch-server` with L2 and the daemon at `address` as L3."""

    executable = "hicache"

    def _command(self) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name(self.executable)), "launch-server"),
            *(
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--model-preset",
                "hybrid",
                "--page-size",
                "16",
            ),
            *("--max-total-tokens", "1024", "--chunked-prefill-size", "256", "--context-length", "512"),
            *("--enable-hierarchical-cache", "--hicache-storage-backend", "grpc"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", json.dumps(EXTRA | {"address": self.daemon})),
        ]

    def __init__(self, folder: Path, daemon: str) -> None:
        super().__init__(folder)
        self.daemon = daemon

    def post(self, path: str, **body: Any) -> httpx.Response:
        reply = httpx.post(f"http://{self.address}{path}", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text
        return reply

    def ask(self, ids: list[int], **fields: Any) -> int:
        """Answer a prompt; how many of its tokens came from L3."""
        reply = self.post("/generate", input_ids=ids, sampling_params={"max_new_tokens": 4}, **fields)
        return int(reply.json()["meta_info"]["cached_tokens_details"]["storage"])

    def flush(self) -> None:
        """Empty L1 and L2, when all that was computed is in L3."""
        self.post("/flush_cache")


class World:
    """A daemon with room for a few prompts, and two replicas."""

    def __init__(self, folder: Path) -> None:
        self.daemon = DaemonProcess(folder / "daemon", arguments=["--capacity", CAPACITY]).start()
        self.a, self.b = (Replica(folder / name, self.daemon.address) for name in "ab")
        for replica in (self.a, self.b):
            replica.start(timeout_s=START_S)
        self._seed = 100

    def close(self) -> None:
        for process in (self.a, self.b, self.daemon):
            process.kill()

    def flood(self) -> None:
        """The other replica's traffic: twice what L3 has room for, of no session."""
        for _ in range(FLOOD):
            self._seed += 1
            self.b.ask(prompt(self._seed))
        self.b.flush()


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=PROMPT)


def next_turn(ids: list[int]) -> list[int]:
    """What a session asks next: it needs the pages, and the window and state where they end."""
    return [*ids, *prompt(5)[:50]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("pins"))
    yield world
    world.close()


def test_what_an_open_session_needs_outlives_other_traffic_in_l3_until_it_is_closed(world: World) -> None:
    """An agent's context would be gone from L3 whenever other replicas are busy, or stay when it is over."""
    agent, over, nobody = prompt(1), prompt(2), prompt(3)
    world.a.ask(agent, session_id="agent")
    world.a.ask(over, session_id="over")
    world.a.ask(nobody)
    closed = world.a.post("/close_session", session_id="over").json()
    assert closed == {"session_id": "over", "closed": True}
    world.a.flush()
    world.flood()
    assert world.b.ask(next_turn(nobody)) == 0
    assert world.b.ask(next_turn(over)) == 0
    assert world.b.ask(next_turn(agent)) == PROMPT
    world.b.flush()
    world.a.post("/close_session", session_id="agent")


def test_a_session_goes_on_from_l3_when_its_replica_was_killed(world: World) -> None:
    """What was pinned for it would be of no use if a restart began with nothing."""
    agent = prompt(4)
    world.a.ask(agent, session_id="agent")
    world.a.flush()
    world.a.kill()
    world.flood()
    world.a.restart(timeout_s=START_S)
    assert world.a.ask(next_turn(agent), session_id="agent") == PROMPT
    world.a.post("/close_session", session_id="agent")


def test_what_a_killed_replica_pinned_goes_when_the_session_would_have_timed_out(world: World) -> None:
    """Every crash would take a piece of L3 away for good."""
    short, long = prompt(6), prompt(7)
    for ids, name, timeout in ((short, "short", 3.0), (long, "long", 3600.0)):
        world.a.post("/open_session", capacity_of_str_len=1000, session_id=name, timeout=timeout)
        world.a.ask(ids, session_id=name)
    world.a.flush()
    world.a.kill()
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        world.flood()
    for _ in range(3):
        world.flood()
    assert world.b.ask(next_turn(short)) == 0
    assert world.b.ask(next_turn(long)) == PROMPT
