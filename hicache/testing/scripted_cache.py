"""A whole cache in which no transfer ends by itself: the test decides which one does, when, and how.

For the failures that users report: a page is short, a write stops half-way, somebody aborts in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hicache.build import TierSizes, build_cache
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig
from hicache.engine.scheduler import AcceptLength, Scheduler
from hicache.errors import InvariantViolation
from hicache.request import Request
from hicache.spec import ModelSpec
from hicache.testing.ledger import LedgerRunner, ScriptedLedger, make_request
from hicache.testing.simulation import tiny_spec
from hicache.transfer.base import JobId, JobKind, ObjectRef
from hicache.types import Component, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
ROOMY = {FULL: 64, SWA: 64, MAMBA: 32}


def tokens(count: int, *, seed: int = 1) -> array[int]:
    """A token path; paths of different seeds share nothing."""
    return array("I", (seed * 100_000 + i for i in range(count)))


class ScriptedCache:
    """A cache, its scheduler, and transfers on cue. Every move ends with a check of every law."""

    def __init__(
        self,
        kinds: Sequence[Component] = (FULL,),
        *,
        page_size: int = 4,
        window: int = 8,
        device: Mapping[Component, int] = ROOMY,
        host: Mapping[Component, int] = ROOMY,
        storage: bool = True,
        max_running_requests: int = 4,
        islands: bool = False,
        spec: ModelSpec | None = None,
        accept_length: AcceptLength | None = None,
        **settings: Any,
    ) -> None:
        """`spec` is of `kinds`, and decides page size and window."""
        spec = spec or tiny_spec(kinds, page_size, window, islands=islands)
        page_size = spec.page_size
        sizes = TierSizes({c: device[c] for c in kinds}, {c: host[c] for c in kinds if c in host})
        chosen: dict[str, Any] = {
            "prefetch_threshold": 1,
            "chunked_prefill_size": 8 * page_size,
            "mamba_track_interval": 8 * page_size,
            **settings,
        }
        self.clock = ManualClock()
        self.executor = ScriptedLedger(self.clock, storage=storage)
        self.cache = build_cache(spec, sizes, CacheConfig(**chosen), self.executor, self.clock)
        self.finished: list[Request] = []
        self.scheduler = Scheduler(
            self.cache,
            LedgerRunner(spec, self.executor, self.clock, vocabulary=3),
            max_running_requests=max_running_requests,
            accept_length=accept_length,
            on_finish=self.finished.append,
        )

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self, rid: str, prompt: array[int], *, new: int = 1, scope: bytes = b"", session: str | None = None
    ) -> Request:
        request = make_request(rid, prompt, new, scope=scope)
        request.session_id = session
        self.scheduler.submit(request)
        self.cache.check_integrity()
        return request

    def begin(
        self, rid: str, prompt: array[int], *, new: int = 1, scope: bytes = b"", session: str | None = None
    ) -> Request:
        """Queue a request, and let storage answer at once what it has of it."""
        request = self.submit(rid, prompt, new=new, scope=scope, session=session)
        for probe in self.executor.open_jobs(JobKind.PROBE):
            self.end(probe)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()
            self.cache.check_integrity()

    def run(self, rid: str, prompt: array[int], *, new: int = 1, scope: bytes = b"") -> Request:
        """Serve a request, every transfer ending well."""
        request = self.submit(rid, prompt, new=new, scope=scope)
        self.drain()
        return request

    def drain(self) -> None:
        """End everything well, in the order it was started, until nothing is left to do."""
        for _ in range(10_000):
            for job in self.executor.open_jobs():
                self.executor.finish(job)
            self.step()
            if self.scheduler.idle and not self.cache.in_flight:
                return
        raise InvariantViolation("requests or transfers never end")

    def store_only(self, prompt: array[int], *, scope: bytes = b"") -> None:
        """Compute a prompt, store it, and drop it from L1 and L2."""
        self.run("stored", prompt, scope=scope)
        self.drop_memory()

    def drop_memory(self) -> None:
        if not self.cache.flush():
            raise InvariantViolation("something is still in use")

    # -- transfers -----------------------------------------------------------------------------

    def open(self, kind: JobKind) -> JobId:
        """Return the one transfer of this kind in flight."""
        (job,) = self.executor.open_jobs(kind)
        return job

    def end(self, job: JobId, *, failed: bool = False, upto: int | None = None) -> None:
        """End a transfer and let it take effect."""
        self.executor.finish(job, failed=failed, upto=upto)
        self.cache.tick()
        self.cache.check_integrity()

    def fetching(self, prompt: array[int], rid: str = "r") -> tuple[Request, JobId]:
        """Queue a request whose prompt is in storage; return it with its FETCH in flight."""
        request = self.submit(rid, prompt)
        self.end(self.open(JobKind.PROBE))
        return request, self.open(JobKind.FETCH)

    def stored(self, component: Component = FULL) -> set[bytes]:
        """Names of the objects in storage."""
        return {ref.page_hash for ref in self.executor.storage or () if ref.component is component}

    def lose(self, refs: Iterable[ObjectRef]) -> None:
        """Let objects vanish from storage."""
        assert self.executor.storage is not None
        for ref in refs:
            self.executor.storage.pop(ref, None)

    # -- looking -------------------------------------------------------------------------------

    def hit(self, prompt: array[int], *, scope: bytes = b"") -> int:
        """Pages of a prompt that memory could serve, with no last-token rule."""
        return self.cache.tree.match(scope, prompt, len(prompt)).host

    def free(self, tier: Tier) -> dict[Component, int]:
        pools = self.cache.pools
        return {c: pools[t, c].num_free for t, c in pools.kinds if t is tier}

    def check_quiet(self) -> None:
        """Nothing is in flight, held, leased or remembered; whatever is cached can be dropped."""
        self.cache.pools.lapse()  # the last step has ended
        self.cache.check_integrity()
        remembered = self.cache.remembered()
        if self.cache.in_flight or any(remembered.values()):
            raise InvariantViolation(f"{self.cache.in_flight} in flight, remembered: {remembered}")
        for tier, component in self.cache.pools.kinds:
            pool = self.cache.pools[tier, component]
            if pool.num_taken != self.cache.tree.resident(tier, component):
                raise InvariantViolation(f"{tier.name} {component.name}: {pool.num_taken} taken")
        self.drop_memory()
