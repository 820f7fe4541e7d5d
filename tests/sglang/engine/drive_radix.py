"""SGLang's own tree with our eviction policy, made as a scheduler makes it, under random conversations.

    python drive_radix.py COMPONENTS TIERS SEED REQUESTS [POLICY]

COMPONENTS: full or full+swa; TIERS: l1 or l1+l2; POLICY: one of SGLang's, of which only the classes are told.
Requests are SGLang's own, admitted, published and released by its own functions. Every leaf that goes is
compared with the one that a plain reading of the policy over all leaves names, from records kept here;
SGLang's own checks run after every request. Prints one line of JSON.
"""

from __future__ import annotations

import random
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from drive_tree import Engine as TreeEngine
from drive_tree import join, leave, serve_with

PAGE, SLOTS, WINDOW = 16, 1280, 32
LONGEST = 512


class Records:
    """What each page of each path was used for, by its whole prefix: last time and hits."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.time = 0
        self.pages: dict[tuple[int, ...], list[int]] = {}

    def paths(self) -> dict[int, tuple[int, ...]]:
        """The tokens from the root to the end of every node."""
        found: dict[int, tuple[int, ...]] = {}
        stack = [(self.core.root_node, ())]
        while stack:
            node, before = stack.pop()
            found[node.id] = before
            stack += [(child, before + tuple(child.key)) for child in node.children.values()]
        return found

    def known(self) -> set[tuple[int, ...]]:
        """Every page in the tree, by its prefix."""
        return {path[:end] for path in self.paths().values() for end in range(PAGE, len(path) + 1, PAGE)}

    def publish(self, ids: list[int], *, found: int, start: int, there: set[tuple[int, ...]]) -> None:
        self.time += 1
        for end in range(PAGE, len(ids) // PAGE * PAGE + 1, PAGE):
            page = tuple(ids[:end])
            if page not in there or page not in self.pages:
                self.pages[page] = [self.time, 1]
            self.pages[page][0] = self.time
            if start == 0 and end <= found:
                self.pages[page][1] += 1

    def key(self, node: Any, path: tuple[int, ...]) -> tuple[int, float]:
        last, hits = self.pages[path]
        if any(
            node.component_data[kind].value is None and node.component_data[kind].host_value is None
            for kind in self.core.component_types[1:]
        ):
            return (-1, float(last))
        return (1 if hits >= 2 else 0, float(last))

    def next_leaf(self, leaves: Any) -> Any:
        """Of the oldest and the newest leaf of each kind, the one worth least."""
        paths = self.paths()
        keys = {node: self.key(node, paths[node.id]) for node in leaves}
        ends = []
        for kind in sorted({key[0] for key in keys.values()}):
            of_kind = [node for node in keys if keys[node][0] == kind]
            oldest = min(of_kind, key=lambda node: (keys[node], node.id))
            newest = max(of_kind, key=lambda node: (keys[node], node.id))
            worth, is_newest = self.core.policy.lesser_end(keys[oldest], keys[newest])
            ends.append((worth, newest if is_newest else oldest))
        return min(ends, key=lambda end: end[0])[1]


class Engine(TreeEngine):
    """A cache with its pools, and requests on it."""

    page, slots, window = PAGE, SLOTS, WINDOW
    layers, heads, dim = 2, 1, 8

    def __init__(self, components: str, tiers: str) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.runtime_context import get_server_args

        self.swa = components == "full+swa"
        self._make_pools()
        self._evict_params = EvictParams
        worker = SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None)
        self.cache = create_tree_cache(
            TreeCacheBuildContext(
                server_args=get_server_args(),
                params=self._params(),
                is_hybrid_swa=self.swa,
                is_hybrid_ssm=False,
                enable_hierarchical_cache=tiers == "l1+l2",
                disable_radix_cache=False,
                tp_worker=worker,
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
                full_tokens_per_layer=1,
            )
        )
        self.component = ComponentType.FULL
        self.core = self.cache.tree_core
        self.records = Records(self.core)
        if not hasattr(self.core, "policy"):
            return
        self.compared = {"device": 0, "host": 0, "not the oldest": 0, "useless": 0}
        self.wrong: list[str] = []
        self._compare()

    def _compare(self) -> None:
        """Look at every leaf as it goes."""
        core = self.core
        component = core.components_by_type[self.component]
        device, host = core.evict_device_leaf, core._evict_host_leaf

        def on_device(node_id: int, is_write_back: bool) -> Any:
            if component.is_evict_device_ongoing:
                self._judge("device", core.node_by_id(node_id), core.evictable_device_leaves)
            return device(node_id, is_write_back)

        def on_host(node: Any, *rest: Any, **named: Any) -> Any:
            if self._driving is self.component:
                self._judge("host", node, core.evictable_host_leaves)
            return host(node, *rest, **named)

        self._driving: Any = None
        drive = core.drive_host_eviction

        def driving(component_type: Any, num_tokens: int) -> Any:
            self._driving = component_type
            try:
                return drive(component_type, num_tokens)
            finally:
                self._driving = None

        core.evict_device_leaf, core._evict_host_leaf = on_device, on_host
        core.drive_host_eviction = driving

    def _judge(self, tier: str, gone: Any, leaves: Any) -> None:
        wanted = self.records.next_leaf(leaves)
        paths = self.records.paths()
        keys = {node: self.records.key(node, paths[node.id]) for node in leaves}
        self.compared[tier] += 1
        self.compared["not the oldest"] += keys[wanted][1] > min(last for _, last in keys.values())
        self.compared["useless"] += keys[wanted][0] == -1
        if wanted is not gone:
            self.wrong.append(f"{tier}: {gone.id} went, {wanted.id} should have")

    def take_slots(self, count: int) -> torch.Tensor:
        available = self.cache._component_available_size(self.component)
        short = max(0, count - available)
        window = max(0, count - self.allocator.swa_available_size()) if self.swa else 0
        if short or window:
            self.cache.evict(self._evict_params(num_tokens=short, swa_num_tokens=window))
        return super().take_slots(count)

    def start(self, rid: str, ids: list[int], reply: int) -> Any:
        """Admit a request, compute its prompt and publish it."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.common import checkpoint_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req(rid, "", array("q", ids), SamplingParams(max_new_tokens=reply))
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        self.cache.req_to_token_pool.alloc([req])
        found = req.prefix_len
        row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        row[:found] = self.cache.prefix_device_indices(req)
        pages = -(-(len(ids) + reply) // PAGE) - found // PAGE
        row[found : found + pages * PAGE] = self.take_slots(pages * PAGE).to(row.dtype)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = len(ids)
        there = self.records.known()
        checkpoint_kv_cache(req, self.cache)
        if req.kv.cache_inserted_len:
            self.records.publish(ids, found=found, start=0, there=there)
        return req, found

    def end(self, req: Any, found: int, reply: list[int]) -> None:
        """Let a request finish with this reply and give back what it holds."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req.output_ids.extend(reply)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(req.origin_input_ids) + len(reply)
        req.finished_reason = FINISH_LENGTH(length=len(reply))
        before, there = req.kv.cache_inserted_len, self.records.known()
        release_kv_cache(req, self.cache, checkpoint=True)
        if req.kv.cache_inserted_len > before:
            ids = list(req.origin_input_ids) + reply
            self.records.publish(ids, found=found, start=before, there=there)

    def look(self, ids: list[int], chance: random.Random) -> None:
        """Match some of a path, as for a request that waits and is never admitted: that uses nothing."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        upto = chance.randrange(len(ids))
        self.match(RadixKey(array("q", ids[:upto])))

    def write_through(self) -> None:
        """Wait until L2 has what is on its way there."""
        if self.cache.cache_controller is not None:
            assert self.settle(lambda: not self.cache.ongoing_write_through)


def play(engine: Engine, seed: int, requests: int) -> dict[str, Any]:
    """Conversations that begin, go on in turns of two at once, and end; some share how they begin."""
    chance = random.Random(seed)
    openings = [[chance.randrange(500) for _ in range(4 * PAGE)] for _ in range(3)]
    talks: list[list[int]] = []
    hits = asked = 0
    for number in range(0, requests, 2):
        running = []
        for rid in (number, number + 1):
            if len(talks) < 8 or chance.random() < 0.15:
                talks.append(list(chance.choice(openings)))
            talk = talks[chance.randrange(len(talks))] if chance.random() < 0.3 else talks[rid % len(talks)]
            talk += [chance.randrange(500) for _ in range(chance.randrange(1, 3 * PAGE))]
            reply = [chance.randrange(500) for _ in range(chance.randrange(1, PAGE))]
            req, found = engine.start(str(rid), list(talk), len(reply))
            hits, asked = hits + found, asked + len(talk)
            running.append((req, found, reply, talk))
        engine.look(chance.choice(talks), chance)
        chance.shuffle(running)
        for req, found, reply, talk in running:
            engine.end(req, found, reply)
            talk += reply
        talks = [talk for talk in talks if len(talk) < LONGEST]
        engine.write_through()
        engine.cache.sanity_check()
    room = engine.allocator.full_available_size() if engine.swa else engine.allocator.available_size()
    held = engine.cache.full_evictable_size() + engine.cache.full_protected_size()
    return {"hits": hits, "asked": asked, "slots": room + held}


def main() -> None:
    components, tiers, seed, requests, *policy = sys.argv[1:]
    join()
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        device="cpu",
        radix_cache_backend="hicache",
        radix_eviction_policy=policy[0] if policy else "lru",
        enable_hierarchical_cache=tiers == "l1+l2",
        hicache_ratio=1.2,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
    )
    serve_with(arguments)
    engine = Engine(components, tiers)
    report = {"cache": type(engine.cache).__name__, "core": type(engine.core).__name__}
    if not policy:
        report |= play(engine, int(seed), int(requests))
        report |= {"compared": engine.compared, "wrong": engine.wrong[:5]}
    leave(report)


if __name__ == "__main__":
    main()
