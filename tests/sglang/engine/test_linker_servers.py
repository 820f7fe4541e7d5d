"""Real SGLang servers without a host tier, their device pools on one `hicache serve`: hits, damage, death."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.keys import NO_SCOPE, object_key, page_hashes
from hicache.storage_backends.base import Reservation
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.daemon import DaemonProcess
from hicache.testing.sglang_server import START_S, Reply, SglangServer, make_model
from hicache.types import Component

PROMPT_TOKENS = 1500
BOUND_S = 60.0
LOOKUP_S = 1.0
SLIDING = (
    *("--attention-backend", "triton", "--disable-cuda-graph", "--json-model-override-args"),
    json.dumps({"swa_num_key_value_heads": 2, "swa_head_dim": 32}),
)


class LinkerServer(SglangServer):
    """A server with the external linker instead of a host tier."""

    def _command(self) -> list[str]:
        whole = super()._command()
        start = whole.index("--enable-hierarchical-cache")
        end = whole.index("--hicache-storage-backend-extra-config") + 2
        config = {
            "linker": "HiCacheLinker",
            "linker_module_path": "hicache.integrations.sglang.linker",
            "linker_extra_config": self._extra_config,
        }
        ours = [
            *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend"),
            *("dynamic", "--unified-cache-external-linker-config", json.dumps(config)),
        ]
        return [*whole[:start], *ours, *whole[end:]]


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(PROMPT_TOKENS)]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def both(*servers: SglangServer) -> None:
    """Start servers at the same time; starting takes most of the run."""
    threads = [threading.Thread(target=server.start, kwargs={"timeout_s": START_S}) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        assert server.pid


class Store:
    """A daemon and a client of ours to look into it."""

    def __init__(self, folder: Path) -> None:
        self.daemon = DaemonProcess(folder / "daemon", arguments=["--capacity", "512MiB"]).start()
        self.client = GrpcBackend.from_options(Options(address=self.daemon.address))

    @property
    def config(self) -> dict[str, object]:
        return {"address": self.daemon.address, "timeout_s": 3.0, "weight_version": "1"}

    def keys(self, server: SglangServer, tokens: list[int], page: int) -> list[str]:
        """The keys of a prompt's pages, computed as our own engine would."""
        found = re.search(r"fingerprint ([0-9a-f]+), shard ([^\s,]+)", server.log)
        assert found, server.log[-3000:]
        words = b"".join(token.to_bytes(4, "little") for token in tokens)
        hashes = page_hashes(NO_SCOPE, words, page)[: (len(tokens) - 1) // page]
        return [object_key(*found.groups(), Component.FULL, one) for one in hashes]

    def zero(self, keys: list[str]) -> None:
        """Replace objects by zeros of the same size."""
        room = [memoryview(bytearray(1 << 20)) for _ in keys]
        sizes = self.client.read(keys, room)
        assert self.client.delete(keys) == len(keys)
        for reservation in (made := self.client.begin_write(keys, sizes)):
            assert isinstance(reservation, Reservation)
            reservation.buffer[:] = bytes(len(reservation.buffer))
        self.client.commit([one for one in made if isinstance(one, Reservation)])

    def close(self) -> None:
        self.client.close()
        self.daemon.kill()


def restored(reply: Reply) -> int:
    """Tokens that the linker brought: SGLang counts them as the host's."""
    return reply.host + reply.storage


PAGE = 16
HIT = (PROMPT_TOKENS - 1) // PAGE * PAGE


class World:
    """Two replicas of one model on one store."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        model = make_model("llama", folder / "llama")
        flags = ["--page-size", str(PAGE)]
        config = {**self.store.config, "lookup_timeout_s": LOOKUP_S}
        self.a = LinkerServer(folder / "a", model, extra_config=config, arguments=flags)
        python = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}  # A has SGLang's Rust core
        self.b = LinkerServer(folder / "b", model, extra_config=config, arguments=flags, environment=python)
        both(self.a, self.b)

    def computed(self, tokens: list[int]) -> Reply:
        """Let A compute a prompt, and return its answer once the pages are stored."""
        cold = self.a.generate(tokens)
        keys = self.store.keys(self.a, tokens, PAGE)
        until(lambda: all(self.store.client.probe(keys)))
        return cold

    def close(self) -> None:
        for server in (self.a, self.b):
            server.kill()
        self.store.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("linker"))
    yield made
    made.close()


def test_b_restores_what_only_a_computed_and_says_the_same(world: World) -> None:
    """A model of plain attention, which SGLang's own linkers refuse, is served as well."""
    tokens = prompt(1)
    assert world.computed(tokens).cached == 0
    ours, theirs = world.a.generate(tokens), world.b.generate(tokens)
    assert (ours.device, restored(ours)) == (HIT, 0)
    assert (theirs.device, restored(theirs)) == (0, HIT)
    assert theirs.output_ids == ours.output_ids
    world.b.flush()
    again = world.b.generate(tokens)
    assert (restored(again), again.output_ids) == (HIT, ours.output_ids)
    longer = [*tokens, *prompt(2)[:400]]
    assert world.b.generate(longer).device == HIT


def test_zeroed_objects_are_a_miss_and_never_another_answer(world: World) -> None:
    """Damage in the store may cost time; it may not change what users read, nor end a request."""
    tokens = prompt(3)
    cold = world.computed(tokens)
    keys = world.store.keys(world.a, tokens, PAGE)
    world.store.zero(keys[40:])
    reply = world.b.generate(tokens)
    assert restored(reply) == 40 * PAGE
    assert reply.output_ids in (cold.output_ids, world.a.generate(tokens).output_ids)
    assert "are unusable and deleted" in world.b.log

    def repaired() -> bool:
        until(lambda: all(world.store.client.probe(keys)))
        world.b.flush()
        return restored(world.b.generate(tokens)) == HIT

    until(repaired)  # each look finds and deletes what it reads, and the next write replaces it
    world.store.zero(keys)
    world.b.flush()
    reply = world.b.generate(tokens)
    assert (reply.cached, reply.output_ids) == (0, cold.output_ids)


def test_requests_survive_a_daemon_that_stands_still(world: World) -> None:
    """A stopped process accepts connections and never answers; the scheduler waits for it once, briefly."""
    tokens = prompt(4)
    cold = world.computed(tokens)
    world.b.flush()
    warm = [prompt(50), prompt(51)]
    began = time.monotonic()
    world.b.generate(warm[0])
    usual = time.monotonic() - began
    world.store.daemon.pause()
    times = []
    for one in (tokens, warm[1]):
        began = time.monotonic()
        reply = world.b.generate(one)
        times.append(time.monotonic() - began)
        assert reply.cached == 0
        if one is tokens:
            assert reply.output_ids == cold.output_ids
    world.store.daemon.resume()
    assert times[0] < usual + LOOKUP_S + 3
    assert times[1] < usual + 3

    def back() -> bool:
        world.b.flush()
        return restored(world.b.generate(tokens)) == HIT

    until(back)


def test_requests_survive_the_death_of_the_daemon(world: World) -> None:
    """A store that died is a cache that is cold: no request fails, and it comes back by itself."""
    tokens = prompt(5)
    cold = world.computed(tokens)
    world.store.daemon.kill()
    reply = world.b.generate(tokens)
    assert (reply.cached, reply.output_ids) == (0, cold.output_ids)
    assert world.a.generate(prompt(6)).cached == 0
    world.store.daemon.restart()
    deadline = time.monotonic() + BOUND_S
    for seed in range(60, 100):
        fresh = prompt(seed)
        world.a.generate(fresh)
        time.sleep(0.5)
        if restored(world.b.generate(fresh)) == HIT:
            return
        assert time.monotonic() < deadline
    pytest.fail("no hits after the daemon was back")


def test_an_update_of_the_weights_ends_sharing(world: World) -> None:
    """KV of the old weights must not be read with the new ones; SGLang itself empties the device only."""
    tokens = prompt(9)
    world.computed(tokens)
    status, text = world.b.call("POST", "/update_weights_from_disk", {"model_path": str(world.b.model)})
    assert status == 200, text
    assert "the weights are being changed at run time" in world.b.log
    assert world.b.generate(tokens).cached == 0
    assert world.b.generate(tokens).device == HIT
    world.b.flush()
    assert world.b.generate(tokens).cached == 0


def test_two_ranks_restore_the_same_and_lose_it_together(tmp_path: Path) -> None:
    """Each rank has its own objects; ranks that disagreed about a hit would hang in a collective."""
    store = Store(tmp_path)
    server = LinkerServer(
        tmp_path / "a",
        make_model("llama", tmp_path / "llama"),
        extra_config=store.config,
        arguments=["--page-size", str(PAGE), "--tp-size", "2"],
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    try:
        both(server)
        tokens = prompt(10)
        server.generate(tokens)
        ours = server.generate(tokens)
        assert ours.device == HIT
        first = store.keys(server, tokens, PAGE)
        ranks = [[re.sub("/tp.of2/", f"/tp{rank}of2/", key) for key in first] for rank in (0, 1)]
        until(lambda: all(store.client.probe([*ranks[0], *ranks[1]])))
        server.flush()
        again = server.generate(tokens)
        assert (restored(again), again.output_ids) == (HIT, ours.output_ids)
        store.client.delete(ranks[1][50:])
        server.flush()
        assert restored(server.generate(tokens)) == 50 * PAGE
        until(lambda: all(store.client.probe(ranks[1])))
        store.zero(ranks[0][:1])
        server.flush()
        assert server.generate(tokens).cached == 0
    finally:
        server.kill()
        store.close()


def test_windows_are_shared_with_a_replica_that_has_a_host_tier(tmp_path: Path) -> None:
    """One fleet may have replicas of both kinds; what one computed the other restores, windows included."""
    page = 64
    hit = (PROMPT_TOKENS - 1) // page * page
    store = Store(tmp_path)
    model = make_model("gemma4", tmp_path / "gemma4")
    tiered = {
        **store.config,
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheStorageBackend",
        "interface_v1": 1,
    }
    wait = ("--hicache-storage-prefetch-policy", "wait_complete")
    a = SglangServer(tmp_path / "a", model, extra_config=tiered, arguments=[*wait, *SLIDING])
    b = LinkerServer(tmp_path / "b", model, extra_config=store.config, arguments=SLIDING)
    try:
        both(a, b)
        assert "external linker on grpc; pools kv, swa" in b.log
        first, second = prompt(7), prompt(8)
        a.generate(first)
        until(lambda: all(store.client.probe(store.keys(a, first, page))))
        assert store.keys(a, first, page) == store.keys(b, first, page)
        ours = a.generate(first)

        def windows_too() -> bool:
            b.flush()
            return restored(b.generate(first)) == hit

        until(windows_too)
        b.flush()
        assert b.generate(first).output_ids == ours.output_ids
        b.generate(second)
        ours = b.generate(second)
        until(lambda: all(store.client.probe(store.keys(b, second, page))))

        def windows_back() -> bool:
            a.flush()
            return a.generate(second).storage == hit

        until(windows_back)
        a.flush()
        assert a.generate(second).output_ids == ours.output_ids
    finally:
        for server in (a, b):
            server.kill()
        store.close()
