"""Two real SGLang servers that share one `hicache serve`: hits, damage, death and return."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.keys import NO_SCOPE, object_key, page_hashes
from hicache.storage_backends.base import Reservation
from hicache.storage_backends.grpc import GrpcBackend, Options
from hicache.testing.daemon import DaemonProcess
from hicache.testing.sglang_server import START_S, SglangServer, make_model
from hicache.types import Component

PROMPT_TOKENS, PAGE = 1500, 64
HIT = (PROMPT_TOKENS - 1) // PAGE * PAGE
BOUND_S = 60.0


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(PROMPT_TOKENS)]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def extra_config(daemon: DaemonProcess) -> dict[str, object]:
    return {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheStorageBackend",
        "interface_v1": 1,
        "address": daemon.address,
        "timeout_s": 3.0,
        "weight_version": "1",
        "prefetch_timeout_base": 5,
        "prefetch_timeout_per_ki_token": 5,
        "prefetch_timeout_max": 20,
    }


WAIT = ("--hicache-storage-prefetch-policy", "wait_complete")


def both(*servers: SglangServer) -> None:
    """Start servers at the same time; starting takes most of the run."""
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(lambda server: server.start(timeout_s=START_S), servers))


class World:
    """A daemon, two replicas of one model, and a client of ours to look into the store."""

    def __init__(self, folder: Path, kind: str, *, flags: tuple[str, ...] = ()) -> None:
        model = make_model(kind, folder / kind)
        self.daemon = DaemonProcess(folder / "daemon", arguments=["--capacity", "512MiB"]).start()
        config = extra_config(self.daemon)
        self.a = SglangServer(folder / "a", model, extra_config=config, arguments=[*WAIT, *flags])
        self.b = SglangServer(folder / "b", model, extra_config=config, arguments=[*WAIT, *flags])
        both(self.a, self.b)
        self.store = GrpcBackend.from_options(Options(address=self.daemon.address))
        found = re.search(r"fingerprint ([0-9a-f]+), shard (\S+)", self.a.log)
        assert found, self.a.log[-3000:]
        self.fingerprint, self.shard = found.groups()

    def close(self) -> None:
        for server in (self.a, self.b, self.daemon):
            server.kill()
        self.store.close()

    def keys(self, tokens: list[int]) -> list[str]:
        """The keys of a prompt's pages, computed as our own engine would."""
        words = b"".join(token.to_bytes(4, "little") for token in tokens)
        hashes = page_hashes(NO_SCOPE, words, PAGE)[: HIT // PAGE]
        return [object_key(self.fingerprint, self.shard, Component.FULL, page) for page in hashes]

    def stored(self, tokens: list[int]) -> bool:
        return all(self.store.probe(self.keys(tokens)))

    def zero(self, tokens: list[int]) -> None:
        """Replace every object of a prompt by zeros of the same size."""
        keys = self.keys(tokens)
        room = [memoryview(bytearray(1 << 22)) for _ in keys]
        sizes = self.store.read(keys, room)
        assert self.store.delete(keys) == len(keys)
        reservations = self.store.begin_write(keys, sizes)
        for reservation in reservations:
            assert isinstance(reservation, Reservation)
            reservation.buffer[:] = bytes(len(reservation.buffer))
        self.store.commit([one for one in reservations if isinstance(one, Reservation)])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("llama"), "llama")
    yield made
    made.close()


def test_b_hits_what_only_a_computed_and_says_the_same(world: World) -> None:
    """The point of it all: a prefix computed once, anywhere, is not computed again."""
    tokens = prompt(1)
    cold = world.a.generate(tokens)
    assert cold.cached == 0
    until(lambda: world.stored(tokens))
    ours = world.a.generate(tokens)
    theirs = world.b.generate(tokens)
    assert (ours.device, ours.storage) == (HIT, 0)
    assert (theirs.device, theirs.host, theirs.storage) == (0, 0, HIT)
    assert theirs.output_ids == ours.output_ids
    world.b.flush()
    again = world.b.generate(tokens)
    assert (again.storage, again.output_ids) == (HIT, ours.output_ids)


def test_zeroed_objects_are_a_miss_and_never_another_answer(world: World) -> None:
    """Damage in the store may cost time; it may not change what users read."""
    tokens = prompt(2)
    cold = world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    world.zero(tokens)
    reply = world.b.generate(tokens)
    assert (reply.cached, reply.output_ids) == (0, cold.output_ids)
    assert "are unusable and deleted" in world.b.log
    until(lambda: world.stored(tokens))
    world.b.flush()
    assert world.b.generate(tokens).storage == HIT


def test_requests_survive_the_death_of_the_daemon(world: World) -> None:
    """A store that died is a cache that is cold: no request fails, and it comes back by itself."""
    tokens = prompt(3)
    cold = world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    world.daemon.kill()
    world.b.flush()
    reply = world.b.generate(tokens)
    assert (reply.cached, reply.output_ids) == (0, cold.output_ids)
    assert world.a.generate(prompt(4)).cached == 0
    world.daemon.restart()
    deadline = time.monotonic() + BOUND_S
    for seed in range(40, 80):
        fresh = prompt(seed)
        world.a.generate(fresh)
        time.sleep(0.5)
        if world.b.generate(fresh).storage == HIT:
            return
        assert time.monotonic() < deadline
    pytest.fail("no hits after the daemon was back")


def test_requests_survive_a_daemon_that_stands_still(world: World) -> None:
    """A stopped process accepts connections and never answers; nobody may wait for it for long."""
    tokens = prompt(5)
    cold = world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    world.b.flush()
    world.daemon.pause()
    started = time.monotonic()
    reply = world.b.generate(tokens)
    first = time.monotonic() - started
    started = time.monotonic()
    world.b.generate(prompt(6))
    second = time.monotonic() - started
    world.daemon.resume()
    assert (reply.cached, reply.output_ids) == (0, cold.output_ids)
    assert first < 20.0
    assert second < 10.0

    def back() -> bool:
        world.b.flush()
        return world.b.generate(tokens).storage == HIT

    until(back)


def test_the_backend_can_be_taken_off_and_put_back(world: World) -> None:
    """Operators change the store of a running server by HTTP."""
    tokens = prompt(7)
    world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    world.b.flush()
    status, text = world.b.call("DELETE", "/hicache/storage-backend")
    assert status == 200, text
    assert world.b.generate(tokens).storage == 0
    world.b.flush()
    bad = {**extra_config(world.daemon), "wieght_version": "2"}
    body = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(bad),
    }
    status, text = world.b.call("PUT", "/hicache/storage-backend", body)
    assert status == 400
    assert "no key 'wieght_version'; valid are" in text
    body["hicache_storage_backend_extra_config_json"] = json.dumps(extra_config(world.daemon))
    status, text = world.b.call("PUT", "/hicache/storage-backend", body)
    assert status == 200, text
    assert world.b.generate(tokens).storage == HIT


def test_an_update_of_the_weights_turns_l3_off_until_it_is_attached_anew(world: World) -> None:
    """KV of the old weights must not be read with the new ones; SGLang itself empties L1 and L2 only."""
    tokens = prompt(11)
    world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    world.b.flush()
    model = {"model_path": str(world.b.model)}
    status, text = world.b.call("POST", "/update_weights_from_disk", model)
    assert status == 200, text
    assert "the weights are being changed at run time" in world.b.log
    assert world.b.generate(tokens).cached == 0
    world.b.flush()
    assert world.b.call("DELETE", "/hicache/storage-backend")[0] == 200
    new = {**extra_config(world.daemon), "weight_version": "2"}
    body = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(new),
    }
    status, text = world.b.call("PUT", "/hicache/storage-backend", body)
    assert status == 200, text
    assert world.b.generate(tokens).cached == 0


def test_a_restarted_server_hits_also_while_faults_are_injected(world: World) -> None:
    """SGLang's own fault injector on: answers stay those of a hit or of a cold run, the server stays up."""
    tokens = prompt(8)
    cold = world.a.generate(tokens)
    until(lambda: world.stored(tokens))
    hit = world.a.generate(tokens)
    world.b.environment = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    world.b.restart(timeout_s=START_S)
    assert "HiCache storage test injector enabled" in world.b.log
    seen = set()
    for _ in range(12):
        reply = world.b.generate(tokens)
        assert reply.cached in (0, HIT)
        assert reply.output_ids == (hit if reply.cached else cold).output_ids
        seen.add(reply.storage)
        world.b.flush()
    assert seen == {0, HIT}


@pytest.mark.parametrize("kind", ["qwen3"])
def test_other_models_share_as_well(tmp_path: Path, kind: str) -> None:
    """Another architecture has other pools; sharing must not depend on the one it was built with."""
    made = World(tmp_path, kind)
    try:
        tokens = prompt(9)
        made.a.generate(tokens)
        until(lambda: made.stored(tokens))
        ours, theirs = made.a.generate(tokens), made.b.generate(tokens)
        assert (theirs.storage, theirs.output_ids) == (HIT, ours.output_ids)
    finally:
        made.close()


def test_full_and_sliding_windows_share_as_well(tmp_path: Path) -> None:
    """A window pool has its own objects at boundaries; a hit needs them and the full prefix."""
    flags = (
        *("--attention-backend", "triton", "--disable-cuda-graph", "--json-model-override-args"),
        json.dumps({"swa_num_key_value_heads": 2, "swa_head_dim": 32}),
    )
    made = World(tmp_path, "gemma4", flags=flags)
    try:
        assert "pools kv, swa" in made.a.log
        tokens = prompt(10)
        made.a.generate(tokens)
        until(lambda: made.stored(tokens))
        ours = made.a.generate(tokens)
        until(lambda: made.b.generate(tokens).cached > 0)
        made.b.flush()
        theirs = made.b.generate(tokens)
        assert theirs.storage == HIT
        assert theirs.output_ids == ours.output_ids
    finally:
        made.close()
