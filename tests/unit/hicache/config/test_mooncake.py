"""Mooncake's settings are found where SGLang finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache.config.mooncake import parse_size, prepare_environment, resolve
from hicache.errors import ConfigError


def test_variables_alone_are_enough() -> None:
    """A deployment made for SGLang would not start here."""
    settings = resolve(
        {},
        {
            "MOONCAKE_MASTER": "10.0.0.1:50051",
            "MOONCAKE_LOCAL_HOSTNAME": "node-7",
            "MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "8gb",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_DEVICE": "mlx5_0",
            "MOONCAKE_MASTER_METRICS_PORT": "9999",
            "MOONCAKE_CHECK_SERVER": "true",
            "MOONCAKE_TENANT_ID": "blue",
        },
    )
    assert settings.master_server_address == "10.0.0.1:50051"
    assert (settings.master_host, settings.master_port) == ("10.0.0.1", 50051)
    assert settings.local_hostname == "node-7"
    assert settings.metadata_server == "http://10.0.0.1:8080/metadata"
    assert settings.segment_bytes == 8 << 30
    assert (settings.protocol, settings.device_name, settings.tenant_id) == ("tcp", "mlx5_0", "blue")
    assert settings.master_metrics_port == 9999
    assert settings.check_server is True


def test_defaults_are_those_of_sglang() -> None:
    """The same command line would set up another store."""
    settings = resolve({"master_server_address": "m:1"}, {})
    assert settings.segment_bytes == 4 << 30
    assert (settings.protocol, settings.metadata_server) == ("rdma", "P2PHANDSHAKE")
    assert (settings.local_hostname, settings.master_metrics_port) == ("localhost", 9003)
    assert not settings.check_server
    assert not settings.standalone_storage


def test_an_address_in_the_extra_config_sets_the_variables_aside() -> None:
    """Attaching another store at run time would mix it with the one in the environment."""
    env = {"MOONCAKE_MASTER": "old:1", "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_PROTOCOL": "tcp"}
    settings = resolve({"master_server_address": "new:2"}, env)
    assert settings.master_server_address == "new:2"
    assert settings.device_name == ""
    assert settings.protocol == "tcp"  # an image's protocol holds unless the config names one


def test_a_file_comes_before_variables_and_the_extra_config_before_both(tmp_path: Path) -> None:
    """An operator's override would be ignored without a word."""
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps({"master_server_address": "file:1", "global_segment_size": 5, "tenant_id": "t"})
    )
    env = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_MASTER": "env:1"}
    settings = resolve({"global_segment_size": "2 MB"}, env)
    assert settings.master_server_address == "file:1"
    assert settings.segment_bytes == 2 << 20
    assert settings.tenant_id == "t"


@pytest.mark.parametrize("variable", ["MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"])
def test_the_hosts_own_name_wins_over_a_shared_config(variable: str) -> None:
    """Every node would announce itself under the name of one."""
    shared = {"master_server_address": "m:1", "local_hostname": "node-1"}
    assert resolve(shared, {variable: "node-2"}).local_hostname == "node-2"
    assert resolve(shared, {}).local_hostname == "node-1"


@pytest.mark.parametrize(
    ("explicit", "env", "named"),
    [
        ({}, {}, "MOONCAKE_MASTER"),
        ({"client_server_address": "c:1"}, {}, "standalone_storage"),
        ({"master_server_address": "m:1", "metadata_server": "redis://r:6379"}, {}, "metadata_server"),
        ({"master_server_address": "m:1", "device_name": '{"0": "mlx5_0"}'}, {}, "device_name"),
        ({"master_server_address": "m:1", "global_segment_size": "gb"}, {}, "global_segment_size"),
        ({}, {"MOONCAKE_MASTER": "m:1", "MOONCAKE_MASTER_METRICS_PORT": "x"}, "master_metrics_port"),
        ({}, {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": "/does/not/exist"}, "CONFIG_PATH"),
    ],
)
def test_a_wrong_setting_is_named(explicit: dict[str, object], env: dict[str, str], named: str) -> None:
    """The store would fail later, somewhere else, or end the process."""
    with pytest.raises(ConfigError, match=named):
        resolve(explicit, env)


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path) -> None:
    """A typo would leave a default in force."""
    file = tmp_path / "mooncake.json"
    file.write_text('{"master_server_adress": "m:1"}')
    with pytest.raises(ConfigError, match="master_server_adress"):
        resolve({}, {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(file)})


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), ("123", 123), ("4gb", 4 << 30), ("4 GB", 4 << 30), ("512MB", 512 << 20), ("1tb", 1 << 40)],
)
def test_sizes_are_read_with_their_units(text: int | str, size: int) -> None:
    """A segment would be a thousand times too small."""
    assert parse_size("x", text) == size


def test_several_masters_have_no_single_host() -> None:
    """Asking one name of three for a connection would report an outage that is none."""
    assert resolve({"master_server_address": "etcd://a:1;b:2"}, {}).master_host is None


def test_an_operators_time_outs_are_left_alone() -> None:
    """A tuned deployment would be untuned by us."""
    env = {"MC_RPC_TIMEOUT_MS": "7"}
    prepare_environment(3.0, env)
    assert env == {
        "MC_RPC_TIMEOUT_MS": "7",
        "MC_TCP_STATUS_TIMEOUT_SEC": "3",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }
