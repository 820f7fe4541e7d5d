"""`hicache plan islands` gives the published arithmetic, and refuses what it cannot plan with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from hicache.cli.plan import plan
from hicache.errors import ConfigError


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(plan, ["islands", "--json", "-", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_the_defaults_give_the_published_figures() -> None:
    """A plan that disagrees with what was published would not be believed."""
    report = planned()
    assert report["swa_floor_tokens"] == 68_608
    assert report["terms"]["retained_tokens_with_islands"] == 1_088
    third, sixth, tenth = report["ratios"]
    assert third["bytes_per_token"] == pytest.approx(50_140)
    assert sixth["bytes_per_token"] == pytest.approx(35_890)
    assert third["tokens_that_fit"] == pytest.approx(738_000, rel=1e-3)
    assert sixth["tokens_that_fit"] == pytest.approx(1_031_000, rel=1e-3)
    assert tenth["tokens_that_fit"] == pytest.approx(1_270_000, rel=5e-3)
    assert third["full_tokens"] == 740_000
    assert sixth["full_tokens"] == 980_000
    assert round(third["running_without_islands"], 1) == 15.3
    assert round(sixth["running_without_islands"], 1) == 10.7
    assert [round(r["swa_pool_over_floor"], 1) for r in report["ratios"]] == [3.5, 2.4, 1.8]


def test_without_given_totals_as_many_tokens_as_fit_are_planned() -> None:
    """The published table of splits: pools of 236 K, 175 K and 127 K tokens over the floor."""
    report = planned("--max-total-tokens", "")
    assert [r["swa_tokens"] // 1000 for r in report["ratios"]] == [236, 175, 126]
    assert [round(r["swa_pool_over_floor"], 1) for r in report["ratios"]] == [3.4, 2.6, 1.8]


def test_every_flag_moves_its_term() -> None:
    """A flag that changed nothing would plan somebody else's machine."""
    report = planned(
        "--memory", "10GB", "--full-token-bytes", "1000", "--swa-token-bytes", "2000",
        "--other-token-bytes", "0", "--swa-full-tokens-ratio", "0.5", "--max-total-tokens", "0",
        "--sliding-window", "100", "--page-size", "16", "--chunked-prefill-size", "1024",
        "--max-running-requests", "10", "--hold-tokens", "1000",
    )  # fmt: skip
    (only,) = report["ratios"]
    assert only["bytes_per_token"] == 2000
    assert only["tokens_that_fit"] == 5_000_000
    assert only["swa_tokens"] == 2_500_000
    assert only["running_without_islands"] == 2500
    assert report["terms"]["retained_tokens_with_islands"] == 128
    assert report["swa_floor_tokens"] == 1024 + 10 * 128
    assert only["running_with_islands"] == pytest.approx((2_500_000 - 1024) / 128)


def test_the_table_shows_the_terms_of_the_formulas() -> None:
    """A figure without its formula cannot be checked by hand."""
    done = CliRunner().invoke(plan, ["islands"], catch_exceptions=False)
    assert "c(r) = 9,500 + 95,000 r + 10,240" in done.output
    assert "16,384 + 48 x 1,088 = 68,608 tokens" in done.output
    assert "50.1 KB" in done.output
    assert "35.9 KB" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "'lots' is not a size"),
        (["--swa-full-tokens-ratio", "0"], "--swa-full-tokens-ratio 0 must be in"),
        (["--swa-full-tokens-ratio", "a,b"], "--swa-full-tokens-ratio 'a,b': write numbers"),
        (["--max-total-tokens", "-5"], "--max-total-tokens -5 must be at least 1"),
        (
            ["--swa-full-tokens-ratio", "0.2", "--max-total-tokens", "9,8"],
            "--max-total-tokens 9,8: 2 totals for 1 of --swa-full-tokens-ratio",
        ),
        (["--full-token-bytes", "0"], "--full-token-bytes 0 must be above 0"),
        (["--other-token-bytes", "-1"], "--other-token-bytes -1 must be 0 or more"),
        (["--hold-tokens", "0"], "--hold-tokens 0 must be at least 1"),
        (["--page-size", "0"], "--page-size 0 must be at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], message: str) -> None:
    """A division by zero, or a plan for a machine that cannot exist."""
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(plan, ["islands", *arguments], catch_exceptions=False)
