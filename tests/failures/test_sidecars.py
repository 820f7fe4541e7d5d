"""Sidecars: a hit needs every pool of every family whole, and no pool beyond what its boundary needs."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

import pytest

from hicache.build import TierSizes
from hicache.config.cache import CacheConfig
from hicache.engine.architecture import preset_config
from hicache.engine.reference import EngineSettings, ReferenceEngine
from hicache.keys import object_key, page_hashes
from hicache.objects import ObjectCodec
from hicache.request import Request
from hicache.spec import ComponentSpec, ModelSpec, PoolSpec
from hicache.storage_backends.base import Reservation
from hicache.storage_backends.memory import MemoryBackend
from hicache.testing.faults import corrupt
from hicache.testing.scripted_cache import FULL, SWA, ScriptedCache, tokens
from hicache.transfer.base import ObjectRef
from hicache.types import Component, PrefetchPolicy

PAGE, PAGES, WINDOW = 16, 10, 32


def packed_spec(page: int, ratio: int, *, state: bool) -> ModelSpec:
    """FULL with one row per `ratio` tokens besides, and SWA that holds the unfinished group or does not."""
    rows = max(1, page // ratio)
    full = (PoolSpec("kv", 1, (1,), "uint8", page), PoolSpec("packed", 1, (1,), "uint8", rows, ratio=ratio))
    swa = [PoolSpec("swa", 1, (1,), "uint8", page)]
    if state:
        swa.append(PoolSpec("state", 1, (1,), "uint8", 1, state_of=("packed",)))
    components = (ComponentSpec(FULL, full), ComponentSpec(SWA, tuple(swa), window=page))
    return ModelSpec("packed", page, components, weight_version="1")


@pytest.mark.parametrize(
    ("page", "ratio", "state", "prefix", "hit"),
    [
        (256, 128, False, 512, 512),
        (64, 128, False, 192, 128),
        (64, 128, True, 192, 192),
        (64, 128, True, 256, 256),
        (64, 512, False, 448, 0),
        (64, 512, True, 448, 448),
    ],
)
def test_a_prefix_is_resumed_where_groups_end_or_their_state_is_there(
    page: int, ratio: int, state: bool, prefix: int, hit: int
) -> None:
    """States would be demanded where nothing is unfinished, or missed where something is."""
    spec = packed_spec(page, ratio, state=state)
    bed = ScriptedCache((FULL, SWA), spec=spec)
    prompt = tokens(prefix + 1)
    bed.store_only(prompt)
    again = bed.run("again", prompt)
    assert again.cached.storage == hit
    bed.check_quiet()


def test_without_its_state_a_boundary_inside_a_group_gives_way_to_the_one_before() -> None:
    """The row that goes on at the boundary would lack what its first tokens had added."""
    bed = ScriptedCache((FULL, SWA), spec=packed_spec(64, 128, state=True))
    prompt = tokens(193)
    bed.store_only(prompt)
    hashes = page_hashes(b"", prompt, 64)
    bed.lose([ObjectRef(SWA, hashes[2], bed.cache.spec.phase(SWA, 2))])
    assert bed.run("again", prompt).cached.storage == 128
    bed.check_quiet()


class Engine:
    """The compressed reference model over a store whose objects can be damaged pool by pool."""

    def __init__(self) -> None:
        model = preset_config("compressed-draft")
        sizes: Mapping[Component, int] = {FULL: 40, SWA: 40}
        self.store = MemoryBackend(capacity_bytes=64 << 20)
        self.engine = ReferenceEngine(
            EngineSettings(
                model=model,
                page_size=PAGE,
                sizes=TierSizes(sizes, sizes),
                cache=CacheConfig(
                    prefetch_threshold=1,
                    hicache_storage_prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
                    chunked_prefill_size=64,
                    mamba_track_interval=64,
                    store_host_share=0.5,
                ),
            ),
            storage=self.store,
        )
        self.spec = self.engine.spec
        self.codec = ObjectCodec(self.spec, "0of1")
        self.prompt = array("I", (random.Random(5).randrange(512) for _ in range(PAGES * PAGE + 1)))
        self.hashes = page_hashes(b"", self.prompt, PAGE)

    def ask(self) -> tuple[list[int], Request]:
        request = Request("r", array("I", self.prompt), len(self.prompt), 4)
        self.engine.scheduler.submit(request)
        self.engine.scheduler.run_until_idle()
        assert self.engine.cache.settle()
        return list(request.output), request

    def key(self, component: Component, page: int) -> str:
        return object_key(self.spec.fingerprint, "0of1", component, self.hashes[page])

    def objects(self) -> dict[str, bytes]:
        held = {}
        for component in (FULL, SWA):
            for page in range(PAGES):
                phase = self.spec.phase(component, page)
                data = bytearray(self.codec.size(component, absent=self.spec.absent(component, phase)))
                assert self.store.read([self.key(component, page)], [memoryview(data)]) == [len(data)]
                held[self.key(component, page)] = bytes(data)
        return held

    def put(self, objects: Mapping[str, bytes]) -> None:
        self.store.clear("")
        reservations = self.store.begin_write(list(objects), [len(data) for data in objects.values()])
        for reservation, data in zip(reservations, objects.values(), strict=True):
            assert isinstance(reservation, Reservation)
            reservation.buffer[:] = data
        self.store.commit([r for r in reservations if isinstance(r, Reservation)])

    def damage(self, component: Component, page: int, pool: str) -> bool:
        """Flip a bit of one pool in the object of a page; False if the page has none of it."""
        absent = self.spec.absent(component, self.spec.phase(component, page))
        if pool in absent:
            return False
        index = [p.name for p in self.spec[component].pools].index(pool)

        def flip(data: bytearray) -> None:
            self.codec.payload_views(component, memoryview(data), absent=absent)[index][0] ^= 1

        corrupt(self.store, self.key(component, page), flip)
        return True


def test_a_flipped_bit_in_any_pool_of_any_page_costs_that_page_and_no_more() -> None:
    """A sidecar that is believed unseen gives a fluent answer to another prompt."""
    bed = Engine()
    pools = [(c.component, pool.name) for c in bed.spec.components for pool in c.pools]
    hit_by: set[str] = set()
    try:
        expected, request = bed.ask()
        assert request.cached.cached == 0
        whole = bed.objects()
        for seed in range(20):
            rng = random.Random(seed)
            bed.put(whole)
            bad = set()
            for _ in range(rng.randint(1, 4)):
                component, pool = pools[(seed + rng.randrange(2)) % len(pools)]
                page = rng.choice([rng.randrange(PAGES), rng.randrange(6, PAGES)])
                if (component, page) not in bad and bed.damage(component, page, pool):
                    bad.add((component, page))
                    hit_by.add(pool)
            best = max(
                b
                for b in range(PAGES + 1)
                if not any((FULL, p) in bad for p in range(b))
                and not any((SWA, p) in bad for p in range(max(0, b - WINDOW // PAGE), b))
            )
            assert bed.engine.cache.flush()
            answer, request = bed.ask()
            assert answer == expected, seed
            assert request.cached.storage == best * PAGE, seed
        assert hit_by == {pool for _, pool in pools}
    finally:
        bed.engine.close()
        bed.store.close()
