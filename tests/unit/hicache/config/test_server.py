"""What a combination of server flags means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config.cache import HostMemoryMode
from hicache.config.server import (
    IoBackend,
    MemLayout,
    load_server_config,
    read_mapping,
    server_config,
    split_extra_config,
)
from hicache.errors import ConfigError
from hicache.types import PrefetchPolicy, WritePolicy

L3 = {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake"}


@pytest.mark.parametrize(
    ("given", "io", "layout"),
    [
        ({}, "kernel", "page_first"),
        ({"hicache_mem_layout": "page_first_direct"}, "direct", "page_first_direct"),
        ({"hicache_io_backend": "direct"}, "direct", "page_first_direct"),
        ({"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}, "direct", "layer_first"),
        ({**L3, "hicache_mem_layout": "layer_first"}, "kernel", "page_first"),
        (
            {**L3, "hicache_mem_layout": "layer_first", "hicache_io_backend": "direct"},
            "direct",
            "page_first_direct",
        ),
    ],
)
def test_layout_and_io_are_rewritten_as_sglang_does(given: dict[str, object], io: str, layout: str) -> None:
    """The same command line would mean something else here."""
    config = server_config(given).rewritten()
    assert (config.hicache_io_backend, config.hicache_mem_layout) == (IoBackend(io), MemLayout(layout))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"enable_session_radix_cache": False, "session_timeout": 3.0},
            "--session-timeout 3.0 has no effect without --enable-session-radix-cache",
        ),
        (
            {"hicache_write_policy": "write_back"},
            "--hicache-write-policy write_back has no effect without --enable-hierarchical-cache",
        ),
        ({"hicache_ratio": 3.0}, "--hicache-ratio 3.0 has no effect without --enable-hierarchical-cache"),
    ],
)
def test_a_flag_of_a_feature_that_is_off_is_said_to_have_no_effect(
    given: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """People would measure for hours what they believe to be write_back."""
    server_config(given).rewritten()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [said]


@pytest.mark.parametrize(
    "given", [{}, L3, {**L3, "hicache_write_policy": "write_back", "session_timeout": 3.0}]
)
def test_flags_that_have_an_effect_are_not_talked_about(
    given: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings that are always there are not read."""
    server_config(given).rewritten()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_buffer_only_needs_storage_and_rewrites_as_sglang_does() -> None:
    """Without storage the host's memory would be of no use; written back later, pages would be lost."""
    with pytest.raises(ConfigError, match="buffer_only needs --hicache-storage-backend"):
        server_config({"enable_hierarchical_cache": True, "hicache_host_memory_mode": "buffer_only"})
    given = {**L3, "hicache_host_memory_mode": "buffer_only", "hicache_write_policy": "write_back"}
    config = server_config(given).rewritten()
    assert config.hicache_write_policy is WritePolicy.WRITE_THROUGH
    assert config.cache_config().hicache_host_memory_mode is HostMemoryMode.BUFFER_ONLY


def test_the_host_has_sglangs_share_by_mode_unless_told() -> None:
    """Half of the machine's memory would stay unused, or a buffer take what a cache should have."""
    buffer = {**L3, "hicache_host_memory_mode": "buffer_only"}
    assert server_config(L3).host_ratio == 2.0
    assert server_config(buffer).host_ratio == 1.2
    assert server_config({**buffer, "hicache_ratio": 0.5}).host_ratio == 0.5


def test_the_extra_config_is_split_between_cache_and_backend() -> None:
    """Prefetch settings would be refused as unknown options of the backend."""
    extra = {"prefetch_threshold": 512, "prefetch_timeout_max": 9, "url": "x", "tp_lcm_size": 8}
    assert split_extra_config(extra) == ({"prefetch_threshold": 512, "prefetch_timeout_max": 9}, {"url": "x"})
    config = server_config({**L3, "hicache_storage_backend_extra_config": extra})
    assert config.cache_config().prefetch_threshold == 512
    assert config.storage_options() == {"url": "x"}


def test_policies_reach_the_cache() -> None:
    """A flag would be accepted and do nothing."""
    config = server_config(
        {
            "hicache_write_policy": "write_back",
            "hicache_storage_prefetch_policy": "best_effort",
            "chunked_prefill_size": 512,
            "mamba_track_interval": 128,
        }
    ).cache_config()
    assert config.hicache_write_policy is WritePolicy.WRITE_BACK
    assert config.hicache_storage_prefetch_policy is PrefetchPolicy.BEST_EFFORT
    assert (config.chunked_prefill_size, config.mamba_track_interval) == (512, 128)


def test_the_file_backend_gets_its_path_from_the_flag_unless_told_twice() -> None:
    """--file-storage-path would be ignored, or would win over the more specific setting."""
    base = {**L3, "hicache_storage_backend": "file", "file_storage_path": "/a"}
    assert server_config(base).storage_options() == {"file_storage_path": "/a"}
    extra = {"hicache_storage_backend_extra_config": {"file_storage_path": "/b"}}
    assert server_config(base | extra).storage_options() == {"file_storage_path": "/b"}


def test_mappings_are_read_from_text_and_files(tmp_path: Path) -> None:
    """A long configuration could only be pasted into a shell."""
    (tmp_path / "a.json").write_text('{"x": 1}')
    (tmp_path / "a.toml").write_text("x = 1\n")
    for text in ('{"x": 1}', f"@{tmp_path}/a.json", f"@{tmp_path}/a.toml"):
        assert read_mapping(text, flag="--f") == {"x": 1}


@pytest.mark.parametrize("text", ["", "[1]", "{", "@/no/such/file.json"])
def test_a_mapping_that_is_none_is_refused_by_flag(text: str) -> None:
    """A typing mistake would be a stack trace."""
    with pytest.raises(ConfigError, match=r"--f .*give a JSON object"):
        read_mapping(text, flag="--f")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """A one-off on the command line would be silently undone."""
    path = tmp_path / "hicache.toml"
    path.write_text("[server]\npage_size = 16\nport = 1\n[cache]\nstore_attempts = 5\n")
    config = load_server_config(path, {"port": 2})
    assert (config.page_size, config.port) == (16, 2)
    assert config.cache_config().store_attempts == 5
    path.write_text("[server]\npage_sice = 16\n")
    with pytest.raises(ConfigError, match="page_sice"):
        load_server_config(path, {})


def test_json_nested_without_end_is_refused() -> None:
    """A traceback of a thousand lines would hide which flag it was."""
    with pytest.raises(ConfigError, match="; give a JSON object, or @FILE"):
        read_mapping('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", flag="--kv-events-config")
