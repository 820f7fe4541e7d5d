"""What became of every token of a prompt, and of every token that storage was asked for.

Two sums always reconcile, per request and in all: device + host + storage + computed = prompt, and
asked = storage + failed by reason. What an infinite cache would have had is cached + missed by reason.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from hicache.cache.stats import CacheStats
from hicache.errors import InvariantViolation
from hicache.request import Request
from hicache.transfer.base import Why
from hicache.tree.base import TreeRules
from hicache.types import TOKEN_BYTES, CachedTokens, Component


class Shortfall(enum.Enum):
    """Why tokens did not come from where they might have come from."""

    NOT_STORED = "not_stored"  # storage does not have them
    NO_BOUNDARY = "no_boundary"  # it has their FULL pages, not the windows or states to go on from
    BELOW_THRESHOLD = "below_threshold"  # too few to fetch
    HOST_CAPACITY = "host_capacity"  # no host pages to fetch them to
    MISSING = "missing"  # gone between the question and the read
    SHORT = "short"  # an object with fewer bytes or parts than its family has
    CORRUPT = "corrupt"  # an object that does not verify
    TIMEOUT = "timeout"  # a call to the store took too long
    ERROR = "error"  # the store failed
    BREAKER_OPEN = "breaker_open"  # the store is left alone after failures
    DETACHED = "detached"  # the store was detached meanwhile
    DEADLINE = "deadline"  # the prefetch policy's time was up
    CUT_OFF = "cut_off"  # best_effort: the request was scheduled
    CANCELLED = "cancelled"  # the request was withdrawn while it was queued
    COVERED = "covered"  # device or host had them after all when the request began
    EVICTED = "evicted"  # no tier had them any more when the request began
    NO_ROOM = "no_room"  # a tier had them, and the device had no room to use them
    RECOMPUTE = "recompute"  # computing them was faster, as measured
    LOAD_FAILED = "load_failed"  # they could not be copied to the device


_BY_WHY = {
    Why.MISSING: Shortfall.MISSING,
    Why.SHORT: Shortfall.SHORT,
    Why.CORRUPT: Shortfall.CORRUPT,
    Why.TIMEOUT: Shortfall.TIMEOUT,
    Why.ERROR: Shortfall.ERROR,
    Why.BYPASSED: Shortfall.BREAKER_OPEN,
    Why.DETACHED: Shortfall.DETACHED,
    Why.CANCELLED: Shortfall.CANCELLED,
}
_BY_REASON = {
    "deadline": Shortfall.DEADLINE,
    "cut_off": Shortfall.CUT_OFF,
    "aborted": Shortfall.CANCELLED,
    "host_capacity": Shortfall.HOST_CAPACITY,
    "below_threshold": Shortfall.BELOW_THRESHOLD,
}

Marks = Sequence[tuple[int, Shortfall]]  # ascending ends, in pages: what is true of the pages before each


@dataclass(frozen=True, slots=True)
class Ask:
    """What storage was asked for one request: pages [known, limit), of which it published up to `reached`.

    `marks` say of the others why they did not come; they reach up to `limit`.
    """

    known: int = 0
    limit: int = 0
    reached: int = 0
    marks: Marks = ()


def marks_of(
    reason: str, why: Why | None, *, crowded: bool, run: int, target: int, reached: int, limit: int
) -> Marks:
    """Say what kept the pages of a prefetch back. `reason` is how it ended, `why` what its reads lacked.

    In pages: storage has FULL up to `run` (0: it was never known), it set out for `target` (0: for nothing).
    """
    if reason in ("store_failed", "incomplete"):
        failed = _BY_WHY[why or (Why.ERROR if reason == "store_failed" else Why.MISSING)]
    else:
        failed = _BY_REASON.get(reason, Shortfall.NO_BOUNDARY)
    if crowded:
        failed = Shortfall.HOST_CAPACITY
    if not run:
        return [(limit, failed if reason != "not_stored" else Shortfall.NOT_STORED)]
    if not target:
        return [(run, failed), (limit, Shortfall.NOT_STORED)]
    return [
        (reached, Shortfall.EVICTED),
        (max(target, reached), failed),
        (max(run, target, reached), Shortfall.NO_BOUNDARY),
        (limit, Shortfall.NOT_STORED),
    ]


def _spans(start: int, end: int, marks: Marks) -> Iterator[tuple[Shortfall, int]]:
    """Cut pages [start, end) by marks; yields reasons and how many pages."""
    for stop, reason in marks:
        if start < min(stop, end):
            yield reason, min(stop, end) - start
            start = min(stop, end)


class Accounts:
    """The accounts of one cache: of its requests, and in all. Owned by the cache's thread."""

    def __init__(self, rules: TreeRules, stats: CacheStats, *, ceiling_pages: int) -> None:
        self._page, self._stats = rules.page_size, stats
        self._ceiling = Ceiling(rules, ceiling_pages) if ceiling_pages else None

    def committed(self, request: Request, start: int, end: int, states: Sequence[int]) -> None:
        """Pages [start, end) of a request were computed or loaded, with states at these boundaries."""
        if self._ceiling is not None:
            self._ceiling.saw(request, start, end, states)

    def admitted(self, request: Request, ask: Ask, *, device: int, hit: int, whole: int) -> None:
        """A request begins with a hit of `hit` pages, `device` of them from the device.

        `whole` is the hit that device and host offered. A request that comes again after a retraction
        is not counted again.
        """
        cached, page = request.cached, self._page
        if cached.computed:
            return
        device = min(device, hit)
        storage = min(hit - device, max(0, min(hit, ask.reached) - ask.known))
        shrunk = Shortfall.RECOMPUTE if request.too_dear else Shortfall.NO_ROOM
        shrunk = Shortfall.LOAD_FAILED if request.load_failed else shrunk
        marks = [(whole, shrunk), (ask.known, Shortfall.EVICTED), *ask.marks]
        ceiling = hit
        if self._ceiling is not None:
            ceiling = max(hit, self._ceiling.reusable(request, (len(request.tokens) - 1) // page))
        marks.append((max(ceiling, ask.limit), Shortfall.EVICTED))

        cached.device, cached.storage = device * page, storage * page
        cached.host = (hit - device - storage) * page
        cached.computed = len(request.tokens) - hit * page
        cached.ceiling = ceiling * page
        for reason, pages in _spans(hit, ceiling, marks):
            _add(cached.missed, reason, pages * page)
        self._count(cached)
        failed: dict[str, int] = {}
        _add(failed, Shortfall.COVERED, (max(0, min(hit, ask.limit) - ask.known) - storage) * page)
        for reason, pages in _spans(max(hit, ask.known), ask.limit, marks):
            _add(failed, reason, pages * page)
        self._settle(cached, (ask.limit - ask.known) * page, failed)

    def withdrawn(self, ask: Ask) -> None:
        """A request was withdrawn before it began: nothing it asked for was of use."""
        tokens = (ask.limit - ask.known) * self._page
        self._settle(CachedTokens(), tokens, {Shortfall.CANCELLED.value: tokens} if tokens else {})

    def load_failed(self, request: Request) -> None:
        """A hit could not be loaded; the request begins again, and is counted again when it does."""
        cached, stats = request.cached, self._stats
        again = CachedTokens(asked=cached.asked, failed=dict(cached.failed))
        _add(again.failed, Shortfall.LOAD_FAILED, cached.storage)
        request.cached = again
        stats.prompt_tokens -= cached.cached + cached.computed
        stats.device_tokens -= cached.device
        stats.host_tokens -= cached.host
        stats.storage_tokens -= cached.storage
        stats.computed_tokens -= cached.computed
        stats.ceiling_tokens -= cached.ceiling
        stats.missed_tokens.subtract(cached.missed)
        if cached.storage:
            stats.failed_tokens[Shortfall.LOAD_FAILED.value] += cached.storage

    def _settle(self, cached: CachedTokens, asked: int, failed: Mapping[str, int]) -> None:
        """Add what storage was asked for, and what of it failed, to a request's account and to the sums."""
        cached.asked += asked
        self._stats.asked_tokens += asked
        for reason, tokens in failed.items():
            cached.failed[reason] = cached.failed.get(reason, 0) + tokens
            self._stats.failed_tokens[reason] += tokens

    def _count(self, cached: CachedTokens) -> None:
        stats = self._stats
        stats.prompt_tokens += cached.cached + cached.computed
        stats.device_tokens += cached.device
        stats.host_tokens += cached.host
        stats.storage_tokens += cached.storage
        stats.computed_tokens += cached.computed
        stats.ceiling_tokens += cached.ceiling
        stats.missed_tokens.update(cached.missed)


def _add(counts: dict[str, int], reason: Shortfall, tokens: int) -> None:
    if tokens:
        counts[reason.value] = counts.get(reason.value, 0) + tokens


_NAMED_AT_ONCE = 64  # pages; what lies behind the first unknown one needs no name yet


class Ceiling:
    """Remembers the paths that were computed, to say what an infinite cache would have had of a prompt.

    Pages are known by a chained 64-bit hash. At most about `most_pages` are kept, those met last: beyond
    that the ceiling is a lower bound. Windows need no memory of their own: a computed page once had one.
    """

    def __init__(self, rules: TreeRules, most_pages: int) -> None:
        self._page_bytes = rules.page_size * TOKEN_BYTES
        self._mamba = Component.MAMBA in rules.kinds
        self._half = max(1, most_pages // 2)
        self._young: dict[int, bool] = {}  # page to whether a state was kept where it ends
        self._old: dict[int, bool] = {}

    def saw(self, request: Request, start: int, end: int, states: Sequence[int]) -> None:
        """Pages [start, end) exist now, and states at these boundaries."""
        keys = self._keys(request, end)
        for key in keys[start:end]:
            self._keep(key, self._young.get(key, False) or self._old.get(key, False))
        for boundary in states:
            self._keep(keys[boundary - 1], True)

    def reusable(self, request: Request, limit: int) -> int:
        """Return the deepest boundary, in pages up to `limit`, that an infinite cache would have."""
        found = at = 0
        while at < limit:
            keys = self._keys(request, min(limit, at + _NAMED_AT_ONCE))
            for key in keys[at : at + _NAMED_AT_ONCE]:
                state = self._young.get(key)
                if state is None:
                    state = self._old.get(key)
                    if state is None:
                        return found
                    self._keep(key, state)
                at += 1
                if at > limit:
                    return found
                if state or not self._mamba:
                    found = at
        return found

    def _keep(self, key: int, state: bool) -> None:
        self._young[key] = state
        if len(self._young) > self._half:
            self._young, self._old = {}, self._young

    def _keys(self, request: Request, end: int) -> Sequence[int]:
        """The names of pages [0, end), computed once per request."""
        keys = request.page_keys
        if len(keys) < end:
            size, digest = self._page_bytes, xxhash.xxh3_64_intdigest
            view = memoryview(request.tokens).cast("B")[len(keys) * size : end * size]
            last = keys[-1] if keys else digest(request.scope)
            for at in range(0, len(view), size):
                last = digest(view[at : at + size], last)
                keys.append(last)
        return keys


def check_request(request: Request, prompt_tokens: int) -> None:
    """Raise InvariantViolation unless the account of a request that has begun adds up."""
    cached = request.cached
    parts = (cached.device, cached.host, cached.storage, cached.computed)
    if min(parts) < 0 or sum(parts) < prompt_tokens or cached.ceiling > sum(parts):
        raise InvariantViolation(f"{request.rid}: {cached} of a prompt of {prompt_tokens} tokens")
    _check_sums(request.rid, cached.storage, cached.asked, cached.failed)
    _check_sums(request.rid, cached.cached, cached.ceiling, cached.missed)


def check_stats(stats: CacheStats) -> None:
    """Raise InvariantViolation unless the sums over all requests add up."""
    cached = stats.device_tokens + stats.host_tokens + stats.storage_tokens
    if cached + stats.computed_tokens != stats.prompt_tokens:
        raise InvariantViolation(
            f"{cached} cached + {stats.computed_tokens} computed of {stats.prompt_tokens}"
        )
    _check_sums("all", stats.storage_tokens, stats.asked_tokens, stats.failed_tokens)
    _check_sums("all", cached, stats.ceiling_tokens, stats.missed_tokens)


def _check_sums(whose: str, had: int, might: int, reasons: Mapping[str, int]) -> None:
    if min(reasons.values(), default=0) < 0 or had < 0 or had + sum(reasons.values()) != might:
        raise InvariantViolation(f"{whose}: {had} tokens and {dict(reasons)} are not {might}")
