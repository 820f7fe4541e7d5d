"""What an eviction costs while sessions refer to none, half, nearly all or all of the cached conversations.

Every conversation is a path of its own; those that are referred to are spread over all ages.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array

import numpy as np

from hicache.tree import SessionRefs, TreeRules, UnifiedTree, make_policy
from hicache.types import Component, Tier

SHARES = (0, 50, 99, 100)  # percent
POLICIES = ("lru", "adaptive")
_CONVERSATIONS = 10_000
_PAGES = 16
_EVICTIONS = 1_000

Row = dict[str, float | int | str]


def run_references() -> list[Row]:
    """Time evictions of four pages (median, p99), and closing all sessions (mean of each); microseconds."""
    return [_run(policy, share) for policy in POLICIES for share in SHARES]


def _run(policy: str, share: int) -> Row:
    tree = UnifiedTree(TreeRules(1, (Component.FULL,)), make_policy(policy), host=False)
    rng = np.random.default_rng(3)
    sessions = []
    for i in range(_CONVERSATIONS):
        tokens = array("I", rng.integers(1, 1 << 30, _PAGES, dtype=np.uint32).tobytes())
        lease = tree.lock(tree.match(b"", tokens, _PAGES), 0, Tier.DEVICE)
        tree.touch(lease, float(i))
        slots = array("i", range(i * _PAGES, (i + 1) * _PAGES))
        tree.insert(lease, tokens, 0, _PAGES, full=slots, now=float(i))
        if i * 37 % 100 < share:
            sessions.append(SessionRefs())
            tree.refer(lease, sessions[-1])
        tree.release(lease)
    samples = []
    gc.collect()
    gc.disable()
    for _ in range(_EVICTIONS):
        began = time.perf_counter_ns()
        tree.evict(Tier.DEVICE, Component.FULL, 4)
        samples.append(time.perf_counter_ns() - began)
    began = time.perf_counter_ns()
    for session in sessions:
        tree.unrefer(session)
    closed = time.perf_counter_ns() - began
    gc.enable()
    return {
        "policy": policy,
        "referred_percent": share,
        "conversations": _CONVERSATIONS,
        "evict_us": statistics.median(samples) / 1e3,
        "evict_p99_us": sorted(samples)[int(len(samples) * 0.99)] / 1e3,
        "close_us": closed / max(1, len(sessions)) / 1e3,
    }
