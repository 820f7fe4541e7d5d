"""KV events over ZMQ from a served engine, read as SGLang's routers read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from hicache.config.kv_events import read_kv_events
from hicache.errors import ConfigError
from hicache.keys import page_hashes
from hicache.testing.served import Served, running_server

zmq = pytest.importorskip("zmq")
block_hash = pytest.importorskip("hicache.server.kv_events").block_hash

WAIT_MS = 10_000
LOCAL = {
    "publisher": "zmq",
    "endpoint": "tcp://127.0.0.1:*",
    "bind": True,
    "replay_endpoint": "tcp://127.0.0.1:*",
}


class BlockStored(msgspec.Struct, tag=True):
    """The fields that SGLang's consumers read; what else is there must not disturb them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


class Router:
    """Subscribes, asks for what it has missed, and keeps who holds what."""

    def __init__(self, described: dict[str, Any], topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(topic)
        self._sub.connect(described["endpoint"])
        self._replay_endpoint = described["replay_endpoint"]
        self.next = 0
        self.held: set[tuple[int, str | None]] = set()
        self.raw: list[dict[str, Any]] = []

    def close(self) -> None:
        self._sub.close(linger=0)
        self._context.term()

    def catch_up(self) -> int:
        """Ask for a replay of everything not seen; return how many batches came."""
        replay = self._context.socket(zmq.DEALER)
        with replay:
            replay.connect(self._replay_endpoint)
            replay.send_multipart([b"", self.next.to_bytes(8, "big")])
            came = 0
            while replay.poll(WAIT_MS):
                _, _, sequence, payload = replay.recv_multipart()
                if int.from_bytes(sequence, "big", signed=True) == -1:
                    return came
                came += self._take(int.from_bytes(sequence, "big"), payload)
        raise AssertionError("the replay has no end")

    def listen(self, until: int) -> None:
        """Take live batches until so many entries are held."""
        while len(self.held) != until:
            assert self._sub.poll(WAIT_MS), f"{len(self.held)} of {until} entries came"
            _, sequence, payload = self._sub.recv_multipart()
            self._take(int.from_bytes(sequence, "big"), payload)

    def _take(self, sequence: int, payload: bytes) -> bool:
        if sequence < self.next:
            return False  # replayed and live
        assert sequence == self.next, "a gap"
        self.next += 1
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self.held |= {(h, event.medium) for h in event.block_hashes}
            else:
                self.held -= {(h, event.medium) for h in event.block_hashes}
        self.raw += msgspec.msgpack.decode(payload)[1]
        return True


@pytest.fixture
def served() -> Iterator[Served]:
    with running_server(
        enable_hierarchical_cache=True, hicache_storage_backend="memory", kv_events_config=LOCAL
    ) as server:
        yield server


def described(server: Served) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/get_server_info").json()["kv_events"])


def ask(server: Served, prompt: list[int]) -> None:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()


def prompt_of(seed: int, pages: int) -> list[int]:
    return [(seed * 37 + 11 * i) % 256 for i in range(16 * pages)]


def test_a_router_that_comes_late_knows_what_one_knows_that_was_there(served: Served) -> None:
    """A router that restarts would otherwise send every request to the wrong replica for hours."""
    early = Router(described(served))
    try:
        early.catch_up()
        for seed in (1, 2):
            ask(served, prompt_of(seed, 8))
        early.listen(2 * 8 * 3)  # each page on three media
        late = Router(described(served))
        try:
            assert late.catch_up() == late.next > 0
            assert late.held == early.held
            ask(served, prompt_of(3, 4))
            early.listen(2 * 8 * 3 + 4 * 3)
            late.catch_up()
            assert late.held == early.held
        finally:
            late.close()
        assert {medium for _, medium in early.held} == {"GPU", "CPU_PINNED", "EXTERNAL"}
        digests = page_hashes(b"", memoryview(b"".join(t.to_bytes(4, "little") for t in prompt_of(3, 4))), 16)
        assert {(block_hash(d), "GPU") for d in digests} <= early.held
    finally:
        early.close()


def test_a_flush_is_told_as_sglang_tells_it(served: Served) -> None:
    """Routers would go on sending requests for pages that are gone."""
    router = Router(described(served))
    try:
        router.catch_up()
        ask(served, prompt_of(1, 4))
        router.listen(4 * 3)
        assert httpx.post(f"{served.url}/flush_cache").status_code == 200
        router.listen(0)
        assert router.raw[-1] == {"type": "AllBlocksCleared"}
    finally:
        router.close()


def test_sglangs_routers_hear_of_full_only_and_ours_of_all_components() -> None:
    """A dropped window would look like a dropped page to a router that knows no components."""
    for components, expected in ((None, {"full"}), (["full", "swa", "mamba"], {"full", "swa", "mamba"})):
        config = LOCAL | ({} if components is None else {"components": components})
        with running_server(kv_events_config=config) as server:
            router = Router(described(server))
            try:
                ask(server, prompt_of(1, 8))
                while {event.get("component", "full") for event in router.raw} != expected:
                    router.catch_up()
            finally:
                router.close()


def test_off_by_default() -> None:
    """A port would be open, with token ids on it, that nobody asked for."""
    with running_server() as server:
        assert httpx.get(f"{server.url}/get_server_info").json()["kv_events"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"publisher": "kafka"}, "publisher 'kafka' must be null or zmq"),
        ({"publisher": "zmq", "endpoint": "127.0.0.1:5557"}, "endpoint '127.0.0.1:5557' must begin with"),
        ({"publisher": "zmq", "buffer_steps": 0}, "buffer_steps 0 must be at least 1"),
        ({"publisher": "zmq", "format": "dynamo"}, "format 'dynamo' is not there"),
        ({"publisher": "zmq", "components": ["kv"]}, "components kv: name some of full, swa, mamba"),
        ({"publisher": "zmq", "topics": "x"}, "topics"),
        ({"publisher": "zmq", "hwm": "many"}, "Expected `int`"),
    ],
)
def test_wrong_settings_are_one_line(values: dict[str, object], message: str) -> None:
    """A router would wait for events on a port that nobody opens."""
    with pytest.raises(ConfigError, match=message) as refused:
        read_kv_events(values)
    assert str(refused.value).startswith("--kv-events-config")


def test_a_port_that_is_taken_is_said_at_start() -> None:
    """Events would go nowhere, silently."""
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    taken.bind("tcp://127.0.0.1:*")
    try:
        config = LOCAL | {"endpoint": taken.get_string(zmq.LAST_ENDPOINT)}
        with (
            pytest.raises(ConfigError, match=r"--kv-events-config.*in use"),
            running_server(kv_events_config=config),
        ):
            pass
    finally:
        taken.close(linger=0)
        context.term()
