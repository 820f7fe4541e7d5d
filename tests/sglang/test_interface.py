"""The adapter against the interface in SGLang's own wheel."""

from __future__ import annotations

import inspect
import logging
import types

import pytest
import torch

from hicache.errors import ConfigError
from hicache.integrations.sglang import TESTED_VERSIONS, guard
from hicache.testing.sglang_pools import FakeConfig, MHATokenToKVPoolHost, indices

KEY = "ab" * 32


@pytest.fixture
def interface() -> types.ModuleType:
    from sglang.srt.mem_cache import hicache_storage

    return hicache_storage


def test_the_wheel_has_everything_the_adapter_uses(interface: types.ModuleType) -> None:
    """A name that SGLang renamed would show as a crash in a serving scheduler."""
    assert guard.differences(interface) == []


def test_our_methods_take_what_sglang_passes(interface: types.ModuleType) -> None:
    """SGLang calls some arguments by name; one spelt differently ends the attach or every backup."""
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

    assert issubclass(HiCacheStorageBackend, interface.HiCacheStorage)
    assert not inspect.isabstract(HiCacheStorageBackend)
    for name in guard.METHODS:
        theirs = list(inspect.signature(getattr(interface.HiCacheStorage, name)).parameters)
        assert list(inspect.signature(getattr(HiCacheStorageBackend, name)).parameters) == theirs, name


def test_sglang_makes_the_backend_from_its_extra_config(
    interface: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Flags alone must do: SGLang's own factory makes our class from module path and class name."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheStorageBackend",
        "interface_v1": 1,
        "backend": "memory",
        "capacity_bytes": 1 << 20,
        "weight_version": "1",
        "prefetch_timeout_max": 5,
        "file_storage_path": "/where/sglang/says",
    }
    config = interface.HiCacheStorageConfig(
        *(0, 1, 0, 1, 0, 1, False, False, False), model_name="m", extra_config=extra
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    pool = MHATokenToKVPoolHost()
    with caplog.at_level(logging.INFO):
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
    assert "L3 on memory; pools kv" in caplog.text
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [True]
    assert backend.batch_exists([KEY]) == 1
    backend.close()
    backend.close()
    assert backend.batch_exists([KEY]) == 0


def test_sglangs_fault_injector_goes_around_it(
    interface: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators rehearse failures with SGLang's own variable."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    extra = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheStorageBackend",
        "backend": "memory",
        "weight_version": "1",
    }
    config = interface.HiCacheStorageConfig(
        *(0, 1, 0, 1, 0, 1, False, False, False), model_name="m", extra_config=extra
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    pool = MHATokenToKVPoolHost()
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [False]
    assert backend.batch_exists_v2([KEY], []).kv_hit_pages == 0
    backend.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"backend": "nowhere", "weight_version": "1"}, "does not exist; there are memory"),
        ({"weigth_version": "1"}, "no key 'weigth_version'; valid are .*weight_version.* address"),
        ({"weight_version": 1}, "Expected `str`"),
        ({"weight_version": "1", "prefetch_timeout_max": -1}, "prefetch_timeout_max=-1.* must be positive"),
        ({"weight_version": "1", "backend": "memory", "address": "x:1"}, "no key 'address'"),
    ],
)
def test_an_extra_config_that_cannot_be_right_is_refused(extra: dict[str, object], said: str) -> None:
    """A misspelt key that is silently ignored leaves an operator without L3 for weeks."""
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

    with pytest.raises(ConfigError, match=said):
        HiCacheStorageBackend(FakeConfig(extra_config=extra), {})


def test_without_a_weight_version_l3_stays_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Two checkpoints under one name would share KV; SGLang must go on serving all the same."""
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

    backend = HiCacheStorageBackend(FakeConfig(extra_config={"backend": "memory"}), {})
    pool = MHATokenToKVPoolHost()
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert [record.message for record in caplog.records if "L3 is off" in record.message] == [
        "HiCache: L3 is off, SGLang serves without it: SGLang does not say which weights it serves: add "
        '"weight_version" to --hicache-storage-backend-extra-config, any text that changes when the '
        "weights do"
    ]
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [False]
    assert backend.batch_set([KEY], [pool.get_data_page(0)]) is False
    assert backend.batch_exists([KEY]) == 0
    assert backend.batch_get([KEY], [pool.get_dummy_flat_data_page()]) == [None]
    backend.close()


def test_an_unknown_sglang_with_another_interface_is_refused(
    interface: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments in another order would store one page's bytes under another's key."""
    from hicache.integrations.sglang import storage

    def batch_set_v1(self: object, host_indices: object, keys: object) -> None: ...

    monkeypatch.setattr(interface.HiCacheStorage, "batch_set_v1", batch_set_v1)
    monkeypatch.delattr(interface.HiCacheStorage, "on_host_pools_registered")
    monkeypatch.setattr(storage, "_sglang_version", lambda: "9.9.9")
    backend = storage.HiCacheStorageBackend(FakeConfig(), {})
    backend.register_mem_pool_host(MHATokenToKVPoolHost())
    backend.on_host_pools_registered()
    assert "SGLang 9.9.9 differs from 0.5.23" in backend.off_because
    assert "batch_set_v1 takes ('host_indices', 'keys')" in backend.off_because
    assert "on_host_pools_registered is missing" in backend.off_because
    assert backend.batch_exists([KEY]) == 0


def test_an_unknown_sglang_with_the_same_interface_is_used_and_named(interface: types.ModuleType) -> None:
    """A patch release should not cost L3, but the log must say that nobody tried it."""
    assert guard.check(TESTED_VERSIONS[0], interface) == ("", "")
    refused, notice = guard.check("0.5.24", interface)
    assert not refused
    assert "SGLang 0.5.24 was never tested" in notice


def test_a_query_before_the_pools_are_known_is_a_miss(interface: types.ModuleType) -> None:
    """SGLang's query thread runs before its pools are registered."""
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

    backend = HiCacheStorageBackend(FakeConfig(), {})
    pool = MHATokenToKVPoolHost()
    assert backend.batch_exists([KEY]) == 0
    result = backend.batch_exists_v2([KEY], [])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    backend.register_mem_pool_host(pool)
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [False]
    assert backend.batch_get_v1([KEY], indices(pool, 0)) == [False]
    assert backend.get(KEY, torch.zeros(4)) is None
    assert backend.set(KEY, torch.zeros(4)) is False
    assert backend.exists(KEY) is False


def test_changed_weights_turn_l3_off(interface: types.ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """After an update in place, KV of the old weights would be served to the new ones."""
    from hicache.integrations.sglang import live
    from hicache.integrations.sglang.storage import HiCacheStorageBackend

    backend = HiCacheStorageBackend(FakeConfig(), {})
    pool = MHATokenToKVPoolHost()
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [True]
    live.weights_changed()
    assert backend.batch_exists([KEY]) == 0
    assert backend.batch_set_v1([KEY], indices(pool, 0)) == [False]
    assert "attach L3 anew with another weight_version" in caplog.text
    backend.close()
    live.weights_changed()


def test_sglang_has_the_methods_by_which_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed method would leave the old weights' KV in use, and only a log line of SGLang would tell."""
    import ast
    from importlib import util

    from sglang.srt.plugins import hook_registry

    from hicache.integrations.sglang import plugin

    registered: list[str] = []
    monkeypatch.setattr(
        hook_registry.HookRegistry, "register", lambda target, hook, kind: registered.append(target)
    )
    plugin._listen()
    assert registered == list(plugin.UPDATES)
    module, class_name, _ = plugin.UPDATES[0].rsplit(".", 2)
    found = util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    with open(found.origin) as source:
        tree = ast.parse(source.read())
    (updater,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    methods = {node.name for node in updater.body if isinstance(node, ast.FunctionDef)}
    assert {target.rsplit(".", 1)[1] for target in plugin.UPDATES} == {
        name for name in methods if name.startswith("update_weights_from_")
    }
