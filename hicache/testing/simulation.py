"""Random histories of a whole cache from one seed: requests, transfers, faults, aborts, flushes, detaches.

Time is virtual and every page carries its identity (testing.ledger), so a history replays exactly from
its seed, and a foreign page, a leak, a hang or a broken law ends it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.build import TierSizes, build_cache
from hicache.cache import HiCache, SessionRefused
from hicache.cache.accounts import check_request, check_stats
from hicache.clock import ManualClock
from hicache.config.cache import CacheConfig, HitLoading, HostMemoryMode, StateCheckpoints
from hicache.engine.scheduler import FinalToken, Runner, Scheduler
from hicache.errors import InvariantViolation
from hicache.keys import page_hashes
from hicache.request import Request
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.testing.families import random_spec, with_islands
from hicache.testing.ledger import Faults, Identity, LedgerExecutor, LedgerRunner, identity, make_request
from hicache.testing.ranks import RankedRunner
from hicache.transfer.agreed import AgreedExecutor
from hicache.transfer.agreement import Collective
from hicache.transfer.base import ObjectRef
from hicache.types import Component, PrefetchPolicy, Tier, WritePolicy

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
SETS = [(FULL,), (FULL, SWA), (FULL, MAMBA), (FULL, SWA, MAMBA)]
SCOPES = [b"", b"", b"s" * 32]
SESSIONS = ["a", "b", "\0", "\u00e9", "b" * 1024]
TIMEOUT_MAX = 0.05  # s
MOST_STEPS = 5000  # until everything has ended; a hundred are usual
FAULTS = [
    Faults(),
    Faults(slow=0.3, slow_s=0.2),
    Faults(store_fails=0.1, object_lost=0.1, put_refused=0.05),
    Faults(object_short=0.1, copy_fails=0.05, put_refused=0.1, slow=0.1, slow_s=1.0),
    Faults(store_fails=0.3, copy_fails=0.2, slow=0.5, slow_s=10.0),
]
RARE_FAULTS = [
    Faults(),
    Faults(slow=0.1, slow_s=0.2),
    Faults(store_fails=0.02, object_lost=0.02, put_refused=0.01),
    Faults(object_short=0.02, copy_fails=0.02, put_refused=0.01, slow=0.05, slow_s=1.0),
]


def tiny_spec(kinds: Sequence[Component], page_size: int, window: int, *, islands: bool = False) -> ModelSpec:
    """A model whose pages hold nothing but their identity."""
    components = [
        ComponentSpec(
            component,
            (PoolSpec(component.name.lower(), 1, (1,), "uint8", 1 if component is MAMBA else page_size),),
            window=window if component is SWA else 0,
            islands=islands and component is SWA,
        )
        for component in kinds
    ]
    return ModelSpec("tiny", page_size, tuple(components), weight_version="1")


@dataclass
class World:
    """One cache, its scheduler and everything random about them."""

    seed: int
    rng: random.Random  # of the actions
    own: random.Random  # of what happens to this rank alone; the same one where there is one rank
    clock: ManualClock
    cache: HiCache
    executor: LedgerExecutor
    faults: Faults
    trouble: float  # how often something happens to storage
    scheduler: Scheduler = field(init=False)
    prompts: list[array[int]] = field(default_factory=list)
    keeps: int = 13  # prompts that may come again
    again: float = 0.0  # how often one does, as it was
    rests: float = 0.0  # how often everything ends before something new begins
    live: dict[str, Request] = field(default_factory=dict)
    seen: list[Request] = field(default_factory=list)
    finished: int = 0
    aborted: int = 0
    refused_sessions: int = 0  # opened twice, or switched off
    storage_lost: bool = False
    detached: dict[ObjectRef, Identity] | None = None  # what the detached storage holds
    held_back: dict[Request, float] = field(default_factory=dict)  # since when ready() has said no

    def end(self, request: Request) -> None:
        """A request has finished: its prompt is accounted for, tier by tier."""
        self.finished += 1
        del self.live[request.rid]
        check_request(request, request.prompt_length)


def make_world(seed: int, collective: Collective | None = None) -> World:
    """Draw a world: components, sizes, policies, faults.

    With a collective it is one rank's world: all ranks draw the same one and the same actions, but their
    transfers end, fail and lose objects each in its own way, and their clocks differ.
    """
    rng = random.Random(seed)
    tiers = rng.choice(["l1", "l1+l2", *["l1+l2+l3"] * 5])
    asked_again = tiers == "l1+l2+l3" and rng.random() < 0.8
    kinds = rng.choice(SETS)
    page = rng.choice([1, 2, 4])
    chunk = page * rng.choice([2, 4, 8])
    window = rng.choice([1, page, 2 * page + 1, 3 * page])
    islands = SWA in kinds and rng.random() < 0.5
    spec = random_spec(rng, kinds, page, window)
    if islands:
        spec = with_islands(spec)
    config = _draw_config(rng, page, chunk, islands=islands, tiers=tiers, asked_again=asked_again)
    sizes = _draw_sizes(rng, spec, chunk, tiers=tiers, asked_again=asked_again)
    clock, faults = ManualClock(), rng.choice([*RARE_FAULTS * 2, *FAULTS[1:]] if asked_again else FAULTS)
    own = rng if collective is None else random.Random(f"{seed}/{collective.rank}")
    longest_s = rng.choice([0.0, 0.05, 1.0])  # against 0.001 a token computed
    executor = LedgerExecutor(clock, own, storage=tiers == "l1+l2+l3", faults=faults, longest_s=longest_s)
    runner: Runner = LedgerRunner(spec, executor, clock, vocabulary=3)
    if collective is None:
        cache = build_cache(spec, sizes, config, executor, clock)
    else:
        clock.advance(collective.rank * 17.0)
        agreed = AgreedExecutor(executor, collective, clock, longest_wait_s=0.1)
        cache = build_cache(spec, sizes, config, agreed, agreed.clock)
        runner = RankedRunner(runner, collective)
    # Where storage is never left in peace, little of it is ever read.
    trouble = rng.choice([0.0, 0.003] if asked_again else [0.0, 0.003, 0.03])
    world = World(seed, rng, own, clock, cache, executor, faults, trouble)
    if asked_again:
        world.keeps, world.again, world.rests = 30, 0.85, 0.1
    world.scheduler = Scheduler(
        world.cache,
        runner,
        max_running_requests=rng.choice([1, 3, 6]),
        final_token=rng.choice(list(FinalToken)),
        accept_length=rng.choice([None, lambda _: rng.randint(1, 16)]),
        on_finish=world.end,
    )
    return world


def _draw_sizes(
    rng: random.Random, spec: ModelSpec, chunk: int, *, tiers: str, asked_again: bool
) -> TierSizes:
    """Draw pages for L1 and L2. Where prompts are asked again, a few fit, and the others are in storage."""
    swa_need = spec.window_pages + max(chunk, 8 * spec.page_size) // spec.page_size + 1
    device = {
        FULL: rng.choice([30] if asked_again else [24, 40]),
        SWA: swa_need + rng.choice([1, 8, 20] if asked_again else [0, 1, 8, 20]),
        MAMBA: rng.choice([6, 12] if asked_again else [2, 3, 6, 12]),
    }
    host = {
        FULL: rng.choice([8, 16, 30] if asked_again else [8, 30, 60]),
        SWA: rng.choice([2, 8, 30, 30] if asked_again else [2, 8, 30]),
        MAMBA: rng.choice([2, 8] if asked_again else [1, 2, 8]),
    }
    return TierSizes({c: device[c] for c in spec.kinds}, {c: host[c] for c in spec.kinds if tiers != "l1"})


def _draw_config(
    rng: random.Random, page: int, chunk: int, *, islands: bool, tiers: str, asked_again: bool
) -> CacheConfig:
    """Draw policies and limits. Where prompts are asked again, most leave a read the time it needs."""
    buffer_only = tiers == "l1+l2+l3" and rng.random() < 0.3
    mode = HostMemoryMode.BUFFER_ONLY if buffer_only else HostMemoryMode.CACHE
    policies = [p for p in WritePolicy if not (buffer_only and p is WritePolicy.WRITE_BACK)]
    waits = [*PrefetchPolicy, *[PrefetchPolicy.WAIT_COMPLETE] * 6 * asked_again]
    return CacheConfig(
        hicache_host_memory_mode=mode,
        hicache_write_policy=rng.choice([*policies, *[WritePolicy.WRITE_THROUGH] * 3 * asked_again]),
        hicache_storage_prefetch_policy=rng.choice(waits),
        prefetch_threshold=rng.choice([1] if asked_again else [1, 2 * page]),
        prefetch_timeout_base=rng.choice([0.01, 0.04] if asked_again else [0.01]),
        prefetch_timeout_per_ki_token=0.01,
        prefetch_timeout_max=TIMEOUT_MAX,
        radix_eviction_policy=rng.choice(
            ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo", "tlru", "adaptive"]
        ),
        chunked_prefill_size=chunk,
        mamba_track_interval=page * rng.choice([2, 4] if asked_again else [8]),
        mamba_prefill_checkpoints=rng.choice(list(StateCheckpoints)),
        swa_checkpoint_interval=rng.choice([0, page, 3 * page]) if islands else 0,
        store_host_share=rng.choice([0.5] if asked_again else [0.1, 0.25, 0.5]),
        enable_session_radix_cache=rng.random() < 0.9,
        session_timeout=rng.choice([0.05, 1.0, float("inf")]),
        max_sessions=rng.choice([1, 3, 8]),
        load_or_recompute=rng.choice([*HitLoading, *[HitLoading.ALWAYS] * 4 * asked_again]),
        recompute_margin=rng.choice([0.0, 0.25]),
        recompute_retry_seconds=rng.choice([0.0, 0.1, 30.0]),
    )


def next_prompt(world: World) -> array[int]:
    """A new prompt, a known one again, an extension, or a branch off one."""
    rng = world.rng
    if world.prompts and rng.random() < world.again:
        return rng.choice(world.prompts)
    base = array("I", rng.choice(world.prompts)) if world.prompts and rng.random() < 0.8 else array("I")
    base = base[: rng.randint(0, len(base))] if rng.random() < 0.5 else base
    longer = world.cache.spec.page_size * rng.randint(2, 8) if world.again else 0
    base.extend(rng.randrange(3) for _ in range(rng.randint(1, 20) + longer))
    base = base[: world.cache.max_request_tokens - 12]
    world.prompts = [*world.prompts[1 - world.keeps :], base]
    return base


def act(world: World) -> None:
    """One action, drawn at random."""
    rng, scheduler = world.rng, world.scheduler
    action = rng.random()
    if action < 0.25:
        if scheduler.num_waiting < 6:
            _submit(world)
    elif action < 0.28:
        _abort(world)
    elif action < 0.30:
        (scheduler if action < 0.29 else world.cache).flush()  # the second with anything in flight
    elif action < 0.31:
        _let_go(world)
    elif action < 0.31 + world.trouble:
        _trouble_storage(world)
    elif action < 0.31 + world.trouble + world.rests:
        rest(world)
    elif action > 0.97:
        _meet_sessions(world)
    elif not scheduler.step():
        scheduler.wait(rng.choice([0.01, 0.1]))


def rest(world: World) -> None:
    """Let everything end. A few requests that take so many steps wait for something that cannot come."""
    world.executor.release_readers()
    steps = 0
    while not world.scheduler.idle:
        if (steps := steps + 1) > MOST_STEPS:
            raise InvariantViolation(f"{len(world.live)} requests have not ended in {MOST_STEPS} steps")
        if not world.scheduler.step():
            world.scheduler.wait(1.0)
    if not world.cache.settle(1e3):
        raise InvariantViolation("transfers did not end")


def _let_go(world: World) -> None:
    """Drop what is kept for queued requests; or let readers of slots given back not end, or end."""
    if world.rng.random() < 0.5:
        world.cache.release_waiting()
    elif world.executor.issued is None:
        world.executor.hold_readers()
    else:
        world.executor.release_readers()


def _submit(world: World) -> None:
    """Queue a request; its id may be one that has been there before."""
    rng = world.rng
    rid = f"r{rng.randrange(40)}"
    if rid in world.live:
        return
    new = make_request(
        rid, next_prompt(world), rng.randint(1, 12), scope=b"" if world.again else rng.choice(SCOPES)
    )
    new.priority = rng.randrange(3)
    new.session_id = rng.choice([None, *SESSIONS])
    world.scheduler.submit(new)
    world.live[rid] = new
    world.seen.append(new)


def _abort(world: World) -> None:
    if not world.live:
        return
    rid = world.rng.choice(list(world.live))
    if not world.scheduler.abort(rid):
        raise InvariantViolation(f"{rid} is neither queued nor running, and has not ended")
    del world.live[rid]
    world.aborted += 1


def _meet_sessions(world: World) -> None:
    """A session is opened, or closed (perhaps again, perhaps with requests and transfers under way)."""
    rng, sessions = world.rng, world.cache.sessions
    session_id = rng.choice([*SESSIONS, "never used"])
    try:
        if rng.random() < 0.3:
            sessions.open(session_id, rng.choice([None, 0.01, 0.5]))
        elif sessions.close(session_id) and sessions.close(session_id):
            raise InvariantViolation(f"session {session_id!a} could be closed twice")
    except SessionRefused:
        world.refused_sessions += 1


def _trouble_storage(world: World) -> None:
    """Storage loses objects, restarts empty, is detached, or is attached again."""
    rng, executor = world.own, world.executor
    trouble = rng.choice(["lose", "lose", "restart", "detach", "attach", "attach"])
    if trouble == "attach" and world.detached is not None:
        executor.attach(world.detached)
        world.detached = None
    if executor.storage is None:
        return
    if trouble == "detach":
        world.detached = executor.storage
        executor.detach()
    elif trouble == "restart":
        world.storage_lost = True
        executor.lose_storage()
    elif trouble == "lose":
        world.storage_lost = True
        for ref in list(executor.storage)[:: rng.randint(1, 5)]:
            del executor.storage[ref]


def check_waits(world: World) -> None:
    """Nobody is held back for longer than the policy's bound (law 9)."""
    config, now = world.cache.config, world.cache.clock.now()
    bound = {
        PrefetchPolicy.BEST_EFFORT: 0.0,
        PrefetchPolicy.TIMEOUT: TIMEOUT_MAX,
    }.get(config.hicache_storage_prefetch_policy)
    for rid, request in world.live.items():
        if bound is None or request.lease is not None or world.cache.ready(request):
            world.held_back.pop(request, None)
            continue
        since = world.held_back.setdefault(request, now)
        if now - since > bound + 1e-9:
            raise InvariantViolation(f"{rid} has been held back for {now - since} s, the bound is {bound} s")
    for request in [r for r in world.held_back if world.live.get(r.rid) is not r]:
        del world.held_back[request]


def check_storage(world: World) -> None:
    """Every object is what its name says; without faults, nothing is stored without its ancestors."""
    spec = world.cache.spec
    page = spec.page_size
    truth: dict[ObjectRef, Identity] = {}
    parents: dict[bytes, bytes] = {}
    for request in world.seen:
        hashes = page_hashes(request.scope, request.tokens, page)
        for i, page_hash in enumerate(hashes):
            what = identity(request, (i + 1) * page)
            for component in spec.kinds:
                behind = component is MAMBA
                truth[ObjectRef(component, page_hash, spec.phase(component, i + behind))] = what
            if i:
                parents[page_hash] = hashes[i - 1]
    held = world.executor.storage or {}
    for ref, what in held.items():
        if truth.get(ref) != what:
            raise InvariantViolation(f"object {ref} holds {what}, not {truth.get(ref)}")
        parent = parents.get(ref.page_hash) if ref.component is FULL else ref.page_hash
        complete = not world.storage_lost and not world.faults.object_lost and not world.faults.object_short
        whole = complete and not world.faults.put_refused and not world.faults.store_fails
        if (
            whole
            and parent is not None
            and not any(ObjectRef(FULL, parent, phase) in held for phase in range(spec.periods[FULL]))
        ):
            raise InvariantViolation(f"object {ref} is stored without its ancestors")


def check_sessions(world: World) -> None:
    """What is opened ends once; no session outlives its time-out; closing all leaves no reference."""
    cache, counts = world.cache, world.cache.stats.sessions
    ended = counts["closed"] + counts["expired"] + counts["displaced"]
    if counts["opened"] != ended + len(cache.sessions) or len(cache.sessions) > cache.config.max_sessions:
        raise InvariantViolation(f"{len(cache.sessions)} sessions are open, counted {dict(counts)}")
    if world.rng.random() < 0.5 and cache.config.session_timeout < float("inf"):
        world.clock.advance(cache.config.session_timeout + 1.0)
        cache.tick()
        if len(cache.sessions):
            raise InvariantViolation(f"{len(cache.sessions)} idle sessions outlive their time-out")
    for session_id in SESSIONS if cache.sessions.enabled else ():
        cache.sessions.close(session_id)
    cache.check_integrity()
    for request in world.seen:
        found = cache.tree.match(request.scope, request.tokens, len(request.tokens))
        if any(cache.tree.references(found)):
            raise InvariantViolation(f"pages of {request.rid} are referred to by sessions that are over")


def check_quiet(world: World) -> None:
    """Nothing is in flight, locked, or remembered; everything can be dropped."""
    cache = world.cache
    cache.check_integrity()
    if world.finished + world.aborted != len(world.seen) or world.live:
        raise InvariantViolation(f"{len(world.seen)} requests, {world.finished} finished")
    stats = cache.stats
    remembered = cache.remembered()
    if cache.in_flight or any(remembered.values()):
        raise InvariantViolation(f"{cache.in_flight} jobs in flight; remembered: {remembered}")
    check_stats(stats)
    check_storage(world)
    check_sessions(world)
    if cache.config.hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY:
        cache.tick()
        left = [cache.pools[pool].num_taken for pool in cache.pools.kinds if pool[0] is Tier.HOST]
        if any(left):
            raise InvariantViolation(f"buffer_only: {left} host pages are kept")
    if not cache.flush():
        raise InvariantViolation("a quiet cache could not be dropped")
    for tier, component in cache.pools.kinds:
        if cache.pools[tier, component].num_taken or cache.tree.evictable(tier, component):
            raise InvariantViolation(f"{tier.name} {component.name}: not empty after a flush")
    if cache.tree.resident(Tier.DEVICE, FULL):
        raise InvariantViolation("pages in a flushed tree")


def run(world: World, steps: int) -> None:
    """Act `steps` times, checking every law after each; then come to rest, and check that nothing is left."""
    for _ in range(steps):
        act(world)
        world.cache.check_integrity()
        check_stats(world.cache.stats)
        if world.rng.random() < 0.2:
            check_waits(world)
    come_to_rest(world)


def come_to_rest(world: World) -> None:
    """Let everything end, and check that nothing is left."""
    rest(world)
    check_quiet(world)
