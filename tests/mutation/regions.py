"""The code that mutation tests change, by qualified name, and the tests that must notice.

Chosen for what a mistake costs there: wrong bytes, lost pages, two owners of one slot. Each region names
its quickest tests first; only tests that run in one process can see a mutant.
"""

from __future__ import annotations

from dataclasses import dataclass

_TREE = (
    "tests/unit/hicache/tree/test_window.py",
    "tests/unit/hicache/tree",
    "tests/failures/test_windows.py",
    "tests/failures/test_in_flight.py",
    "tests/stateful/test_residency_histories.py",
    "tests/stateful/test_tree_histories.py",
    "tests/failures/test_simulation.py",
)
_CACHE = (
    "tests/failures/test_short_reads.py",
    "tests/failures/test_write_policies.py",
    "tests/failures/test_partial_hits.py",
    "tests/failures/test_aborts.py",
    "tests/failures/test_islands.py",
    "tests/failures/test_in_flight.py",
    "tests/failures/test_failed_copies.py",
    "tests/failures/test_waiting_for_storage.py",
    "tests/failures/test_exhaustion.py",
    "tests/failures/test_hung_stores.py",
    "tests/failures/test_storage_changes.py",
    "tests/failures/test_windows.py",
    "tests/failures/test_simulation.py",
    "tests/unit/hicache/cache",
)
_DAEMON = (
    "tests/unit/hicache/daemon",
    "tests/unit/storage_backends/test_arena.py",
    "tests/service/test_daemon.py",
    "tests/service/test_daemon_shm.py",
    "--deselect=tests/service/test_daemon_shm.py::TestDaemonsDeath",  # daemons of their own processes
)
_COPIES = (
    "tests/unit/hicache/transfer/test_copies.py",
    "tests/unit/hicache/transfer/test_load.py",
    "tests/unit/hicache/tiers",
    "tests/unit/hicache/transfer",
    "tests/unit/hicache/engine/test_runner.py",
)


NOT_MEANT = frozenset({"check", "check_integrity", "held", "remembered"})


@dataclass(frozen=True, slots=True)
class Region:
    """Functions that belong together. `Class.*` stands for all methods of a class, `*` for all of a module.

    Stars leave out what only tests call: see NOT_MEANT.
    """

    name: str
    functions: dict[str, tuple[str, ...]]  # by module, as imported
    tests: tuple[str, ...]  # what pytest is given


REGIONS = (
    Region(
        "layer gates",
        {
            "hicache.transfer.load": ("Load.*",),
            "hicache.transfer.copy_engine": (
                "layer_schedule",
                "gather_pages",
                "CpuCopyEngine.*",
                "_move_rows",
            ),
        },
        _COPIES,
    ),
    Region(
        "slot allocators",
        {
            "hicache.tiers.slots": ("SlotAllocator.*",),
            "hicache.tiers.layouts": ("PageGeometry.*", "slot_index"),
            "hicache.transfer.staging": ("StagingPool.*",),
        },
        _COPIES,
    ),
    Region(
        "pages of the pools",
        {"hicache.cache.pools": ("PagePools.*",), "hicache.cache.custody": ("Custody.*",)},
        _CACHE,
    ),
    Region(
        "part tables and checksums",
        {
            "hicache.objects": (
                *("ObjectCodec.size", "ObjectCodec.payload_views", "ObjectCodec.seal", "ObjectCodec.verify"),
                *("ObjectCodec._diagnose", "ObjectCodec._layout", "ObjectCodec._make_layout"),
                *("read_header", "_assemble", "_aligned"),
            )
        },
        ("tests/unit/hicache/test_objects.py", "tests/unit/hicache/transfer"),
    ),
    Region(
        "parts of a family",
        {
            "hicache.spec": (
                *("ModelSpec._pages_of", "ModelSpec.phase", "ModelSpec.absent", "ModelSpec.object_bytes"),
                *("ModelSpec.readers", "ModelSpec._check_sidecar"),
            ),
            "hicache.transfer.base": ("name_objects",),
        },
        (
            "tests/unit/hicache/test_spec.py",
            "tests/unit/hicache/transfer/test_base.py",
            "tests/failures/test_sidecars.py",
        ),
    ),
    Region(
        "reads that are verified, writes in order",
        {
            "hicache.transfer.storage_io": (
                *("StorageLink.probe", "StorageLink.fetch", "StorageLink.store", "StorageLink._fetch_batch"),
                *(
                    "StorageLink._store_batch",
                    "StorageLink._fill",
                    "StorageLink._batches",
                    "StorageLink._retire",
                ),
            )
        },
        (
            "tests/unit/hicache/transfer/test_storage_jobs.py",
            "tests/unit/hicache/transfer/test_storage_trouble.py",
            "tests/unit/hicache/transfer",
        ),
    ),
    Region(
        "reuse boundary",
        {
            "hicache.boundary": ("deepest", "acceptable", "_has_window", "_last_window"),
            "hicache.tree.reading": (
                *("common_bytes", "match", "_walk", "_deepest", "path_to", "slots", "_host_slots"),
                *("_window_slots", "_first_reaching", "presence", "page_hashes"),
            ),
        },
        _TREE,
    ),
    Region(
        "window arithmetic",
        {
            "hicache.tree.window": (
                *("presence", "Window.extend_absent", "Window.extend_device", "Window.put", "Window.slot"),
                *("Window.has", "Window.has_in", "Window.take", "Window.cut", "Window.prune"),
                *("Window.overlapping", "Window.cover", "Window.isolate", "Window._starting_before"),
                *("Window._split_run", "Window.split_into", "Window.absorb", "_drop_empty"),
            )
        },
        _TREE,
    ),
    Region(
        "split and join of nodes",
        {
            "hicache.tree.node": (
                *("TreeLease.first", "Node.extend", "Node.state", "Node.add_state", "Node.mark"),
                *("Node.tail_stats", "Node.hits", "Node.first_colder", "Node.run_start", "Node.cut_marks"),
                *("Node.report", "Node.split_into", "Node.absorb"),
            ),
            "hicache.tree.forest": (
                *("Forest.register", "Forest.unregister", "Forest._pin", "Forest._unpin", "Forest.split"),
                *("Forest.join_idle", "Forest._bury", "Forest.lost_device", "Forest.remove"),
                *("Forest.take_windows", "Forest.take_state", "Forest.drop_idle_roots"),
            ),
        },
        _TREE,
    ),
    Region(
        "leases",
        {
            "hicache.tree.leases": (
                *("lock", "_set_ranges", "release", "move", "touch", "touch_window", "evictable", "_reached"),
                *("_protected_device", "reclaimable", "_protected_host_only", "_protected_swa"),
                "_protected_states",
            )
        },
        _TREE,
    ),
    Region(
        "adopting pages into the tree",
        {
            "hicache.tree.growing": (
                *("insert", "_extend_path", "_join_device", "_adopt_swa", "_grow_device", "_add_runs"),
                *("_adopt_states", "insert_host", "_lay_host", "_join_host", "_grow_host"),
            )
        },
        _TREE,
    ),
    Region(
        "publication of writes",
        {
            "hicache.tree.writing": (
                *("plan_write", "_plan_full", "_plan_swa", "_plan_states", "_add_hashes", "begin_write"),
                *("end_write", "_end_pages", "_publish", "_end_state", "forget_stored"),
            ),
            "hicache.cache.writing": ("WriteDown.*",),
        },
        (
            "tests/unit/hicache/tree/test_writing.py",
            *_CACHE,
            "tests/stateful/test_residency_histories.py",
            "tests/stateful/test_tree_histories.py",
        ),
    ),
    Region(
        "publication of reads",
        {
            "hicache.cache.prefetch": ("Prefetcher.*",),
            "hicache.cache.prefetch_state": ("*",),
            "hicache.cache.fetch_plan": ("*",),
        },
        _CACHE,
    ),
    Region(
        "accounts of requests",
        {"hicache.cache.accounts": ("*",)},
        (*_CACHE, "tests/unit/hicache/cache/test_accounts.py"),
    ),
    Region(
        "what is told of residency",
        {"hicache.tree.residency": ("*",), "hicache.cache.events": ("EventLog.*",)},
        ("tests/stateful/test_residency_histories.py", "tests/unit/hicache/cache/test_events.py"),
    ),
    Region(
        "page tables of requests",
        {
            "hicache.cache.tables": ("PageTables.*", "clear_tables"),
            "hicache.cache.cache": (
                *("HiCache._admit_up_to", "HiCache._start_load", "HiCache._loaded", "HiCache._loadable"),
                *("HiCache.abort", "HiCache.restart", "HiCache._end", "HiCache._release"),
            ),
        },
        _CACHE,
    ),
    Region(
        "the daemon's two-phase commit",
        {
            "hicache.daemon.writes": ("Upload.*", "Writes.*"),
            "hicache.daemon.extents": (
                *("ExtentMap.extend", "ExtentMap.take", "ExtentMap.give", "ExtentMap._join_free"),
                *("ExtentMap._add_free", "ExtentMap._remove_free", "rounded"),
            ),
            "hicache.daemon.arena_store": (
                *(
                    "ArenaStore._allocate",
                    "ArenaStore._let_go",
                    "ArenaStore._free",
                    "ArenaStore._clear_around",
                ),
                *("ArenaStore._clearable", "ArenaStore._evict_coldest", "ArenaStore.locate"),
                *("ArenaStore.holding", "ArenaStore.unpin", "ArenaStore.withdraw", "ArenaStore.read"),
                "extent_of",
            ),
        },
        _DAEMON,
    ),
)
