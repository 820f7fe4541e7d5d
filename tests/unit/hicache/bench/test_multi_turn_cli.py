"""`hicache bench multi-turn`: flags become workloads, systems and a JSON of a fixed shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.system import SYSTEMS, Source, Tiers
from hicache.cli.multi_turn import multi_turn
from hicache.errors import ConfigError
from hicache.types import Component

SMALL = [
    "--num-clients", "4", "--num-rounds", "3", "--request-length", "40", "--output-length", "8",
    "--page-size", "16", "--chunked-prefill-size", "64", "--max-total-tokens", "1024",
    "--request-rate", "inf",
]  # fmt: skip


def invoke(*arguments: str) -> None:
    done = CliRunner().invoke(multi_turn, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_the_json_has_the_shape_that_scripts_read(tmp_path: Path) -> None:
    """Plots and comparisons of other people read these keys."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    invoke(*SMALL, "--enable-round-barrier", "--json", str(out), "--plot", str(picture))
    report = json.loads(out.read_text())
    assert report["workload"] == "custom"
    assert [run["tiers"] for run in report["runs"]] == ["l1", "l1+l2", "l1+l2+l3"]
    for run in report["runs"]:
        assert run["eviction_policy"] == "adaptive"
        assert run["effective_input_tokens_per_s"] > 0
        assert [row["round"] for row in run["rounds"]] == [0, 1, 2]
        for row in run["rounds"]:
            assert 0 <= row["hit_rate"] <= row["ceiling"] < 1
            assert row["ttft_mean_s"] > 0
            assert sum(row["cached_by_tier"].values()) == row["cached_tokens"]
    assert report["given"]["max_total_tokens"]["value"] == 1024
    traffic = report["traffic"]
    assert (traffic["request_length"], traffic["churn"], traffic["churn_later"]) == (40, 0.0, None)
    assert (traffic["pacing"], traffic["ready_queue"]) == ("barrier", "random")
    assert traffic["request_rate"] == "inf", "JSON has no infinity"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_virtual_time_is_the_same_every_time(tmp_path: Path) -> None:
    """A number that changes from run to run proves nothing."""
    reports = []
    for n in range(2):
        out = tmp_path / f"{n}.json"
        invoke(*SMALL, "--tiers", "l1+l2+l3", "--json", str(out))
        report = json.loads(out.read_text())
        for run in report["runs"]:
            del run["wall_s"]
        reports.append(report)
    assert reports[0] == reports[1]


def test_several_policies_are_run_side_by_side(tmp_path: Path) -> None:
    """The question is always: would another policy have held on longer?"""
    out = tmp_path / "out.json"
    invoke(*SMALL, "--tiers", "l1", "--eviction-policy", "lru,mru", "--json", str(out))
    assert [run["eviction_policy"] for run in json.loads(out.read_text())["runs"]] == ["lru", "mru"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers", "l1,l2"], "--tiers 'l2': choose from l1, l1"),
        (["--components", "full+ssm"], "--components 'full.ssm'"),
        (["--components", "swa"], "must name full"),
        (["--hicache-ratio", "1"], "--hicache-ratio 1.0 must be above 1"),
        (["--l3-size", "lots"], "'lots' is not a size"),
        (["--num-rounds", "0"], "--num-rounds 0"),
        (["--swa-full-tokens-ratio", "1.5"], "--swa-full-tokens-ratio 1.5"),
        (["--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s 0.0"),
        (["--eviction-policy", "oracle"], "oracle"),
        (["--page-size", "48"], "--page-size 48"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: list[str], message: str) -> None:
    """Before anything runs, with the flag in the message."""
    result = CliRunner().invoke(multi_turn, [*SMALL, *arguments])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_number_of_a_published_system_says_where_it_is_from(name: str) -> None:
    """An assumption that passes for a published number would be a false claim."""
    system = SYSTEMS[name]
    grouped = system.as_json()
    assert set(grouped) == {"published", "assumed", "fitted"}
    relevant = {
        "components", "page_size", "max_running_requests", "chunked_prefill_size", "max_total_tokens",
        "hicache_ratio", "l3_bytes", "full_token_bytes", "prefill_tokens_per_s", "decode_tokens_per_s",
        "host_bytes_per_s", "storage_load_bytes_per_s", "storage_store_bytes_per_s", "swa_full_tokens_ratio",
        "sliding_window",
        "swa_token_bytes",
    }  # fmt: skip
    if Component.MAMBA in system.components:
        relevant |= {"mamba_full_memory_ratio", "mamba_state_bytes"}
    assert set(system.origins) == relevant
    fitted = {key for key, origin in system.origins.items() if origin.source is Source.FITTED}
    assert fitted == {"prefill_tokens_per_s", "storage_load_bytes_per_s"}


def test_inkling_has_fewer_swa_tokens_on_l1_than_one_round_brings_and_more_on_l2() -> None:
    """This, not FULL, is why the published L1 curve dies in round 1 and the one with L2 does not."""
    system = SYSTEMS["inkling-small"]
    one_round = 64 * (1216 + 64)
    sizes = system.sizes(Tiers.L1_L2, system.spec("inkling-small"))
    assert sizes.device[Component.SWA] * 64 < one_round < sizes.host[Component.SWA] * 64
    assert sizes.device[Component.FULL] * 64 == 750_080
