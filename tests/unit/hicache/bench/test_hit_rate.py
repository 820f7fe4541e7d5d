"""Hit rate from logs and metrics: sums over sums, and bad input named by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.bench.hit_rate import Sample, measure, read_samples
from hicache.bench.render import console, hit_rate_table
from hicache.bench.scrape import Counters, ScrapeError, parse, sample_over_time
from hicache.cli.hit_rate import hit_rate
from hicache.errors import ConfigError

ROUNDS = [(0, 0, 4096), (1, 4096, 8192), (2, 0, 12288)]


def lines(records: list[object]) -> list[str]:
    return [json.dumps(record) for record in records]


@pytest.mark.parametrize(
    "record",
    [
        lambda r, c, p: {"round": r, "cached_tokens": c, "prompt_tokens": p},
        lambda r, c, p: {"turn": r, "cached": c, "input_tokens": p, "prompt": "text"},
        lambda r, c, p: {"round": r, "text": "x", "meta_info": {"cached_tokens": c, "prompt_tokens": p}},
        lambda r, c, p: {
            "round": r,
            "usage": {"prompt_tokens": p, "prompt_tokens_details": {"cached_tokens": c}},
        },
        lambda r, c, p: [{"round_index": r, "cached_prompt_tokens": c, "prompt_len": p}],
    ],
)
def test_three_rounds_give_0_half_and_0_in_every_form_of_record(record: object) -> None:
    """An operator's log must not need rewriting before it can be measured."""
    text = lines([record(*row) for row in ROUNDS])  # type: ignore[operator]
    measured = measure(read_samples(text, source="log"))
    assert [row.hit_rate for row in measured.rounds] == [0.0, 0.5, 0.0]
    assert measured.overall.hit_rate == 4096 / 24576


def test_a_round_is_the_sum_over_the_sum_and_not_the_mean_of_ratios() -> None:
    """One short prompt with a full hit must not outweigh a long one without."""
    measured = measure([Sample(0, 100, 100), Sample(0, 0, 9900)])
    assert measured.rounds[0].hit_rate == 0.01


def test_records_without_a_round_count_overall_only() -> None:
    """A log without rounds is still worth one number."""
    measured = measure([Sample(None, 50, 100), Sample(3, 0, 100)])
    assert [row.round for row in measured.rounds] == [3]
    assert measured.overall.hit_rate == 0.25


def test_an_idle_interval_has_no_hit_rate_rather_than_zero() -> None:
    """Zero would read as a cache that fails while nobody asked it anything."""
    assert measure([Sample(0, 0, 0)]).rounds[0].hit_rate is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("oops", "malformed"),
        ("3", "expected a JSON object, not int"),
        ('{"round": 1}', "none of the fields prompt_tokens"),
        ('{"cached": 5, "prompt": 3}', "cached 5 exceeds prompt 3"),
        ('{"cached": -5, "prompt": 3}', "cached is -5, which is negative"),
        ('{"cached": 1.5, "prompt": 3}', "cached is 1.5, not a whole number"),
        ('{"cached": true, "prompt": 3}', "cached is True, not a whole number"),
        ('{"round": "a", "cached": 1, "prompt": 3}', "round is 'a', not a whole number"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(line: str, reason: str) -> None:
    """'Something is wrong somewhere in two million lines' helps nobody."""
    text = ['{"cached": 1, "prompt": 2}', "", line]
    with pytest.raises(ConfigError, match="log line 3: ") as caught:
        read_samples(text, source="log")
    assert reason in str(caught.value)


def test_many_bad_lines_are_shown_in_part_and_counted() -> None:
    """A wrong file must not flood the terminal."""
    with pytest.raises(ConfigError, match=r"and 15 more bad lines"):
        read_samples(["x"] * 20, source="log")


def test_bad_lines_can_be_left_out_and_are_reported() -> None:
    """Mixed logs are common; what was left out must be told."""
    problems: list[str] = []
    samples = read_samples(["x", '{"cached": 1, "prompt": 2}'], source="log", skipped=problems.append)
    assert samples == [Sample(None, 1, 2)]
    assert [p.split(":")[0] for p in problems] == ["log line 1"]


def test_the_command_writes_the_same_numbers_as_json(tmp_path: Path) -> None:
    """Scripts read the file, people the table."""
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    log.write_text("\n".join(lines([{"round": r, "cached": c, "prompt": p} for r, c, p in ROUNDS])))
    done = CliRunner().invoke(hit_rate, [str(log), "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "50.0 %" in done.output
    rounds = json.loads(out.read_text())["rounds"]
    assert [(r["round"], r["hit_rate"]) for r in rounds] == [(0, 0.0), (1, 0.5), (2, 0.0)]


@pytest.mark.parametrize("arguments", [[], ["a.jsonl", "--url", "http://127.0.0.1:1"], ["missing.jsonl"]])
def test_the_command_refuses_what_it_cannot_measure(arguments: list[str]) -> None:
    """Neither nothing, nor two things, nor a file that is not there."""
    result = CliRunner().invoke(hit_rate, arguments)
    assert isinstance(result.exception, ConfigError)


SGLANG_PAGE = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m",tp_rank="0"} 1000.0
sglang:prompt_tokens_total{model_name="m",tp_rank="1"} 1000.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",tp_rank="0"} 300.0
sglang:cached_tokens_total{cache_source="host",tp_rank="0"} 100.0
sglang:cached_tokens_total{cache_source="device",tp_rank="1"} 300.0
# TYPE sglang:uncached_tokens_total counter
sglang:uncached_tokens_total 77.0
"""


def test_metrics_of_ranks_are_not_added_up_but_sources_are() -> None:
    """Every tensor-parallel rank repeats the same counters: adding them would double the traffic."""
    assert parse(SGLANG_PAGE) == Counters(cached_tokens=400, prompt_tokens=1000)


def test_a_total_beside_its_parts_is_counted_once() -> None:
    """A source called total already holds the others."""
    page = SGLANG_PAGE + 'sglang:cached_tokens_total{cache_source="total",tp_rank="0"} 400.0\n'
    assert parse(page) == Counters(cached_tokens=400, prompt_tokens=1000)


def test_a_page_without_the_counters_says_which_flag_is_missing() -> None:
    """The usual cause is a server without metrics."""
    with pytest.raises(ScrapeError, match="--enable-metrics"):
        parse("# TYPE up gauge\nup 1.0\n")


def test_counters_over_time_become_intervals_and_a_restart_starts_from_zero() -> None:
    """A restarted server must not give negative hit rates."""
    pages = iter([Counters(0, 1000), Counters(500, 2000), Counters(500, 2000), Counters(10, 100)])
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    samples = list(
        sample_over_time(
            lambda: next(pages), interval_s=2.0, duration_s=6.0, now=lambda: clock[0], sleep=sleep
        )
    )
    assert samples == [Sample(0, 500, 1000), Sample(1, 0, 0), Sample(2, 10, 100)]
    assert clock[0] == 6.0


def test_replies_that_tell_a_ceiling_are_measured_against_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The hit rate alone does not say whether more memory would bring anything."""
    records = [
        {
            "round": n,
            "meta_info": {
                "prompt_tokens": 1000,
                "cached_tokens": 400,
                "hicache": {"ceiling": 900, "missed": {"evicted": 300, "deadline": 200}},
            },
        }
        for n in (0, 1)
    ]
    measured = measure(read_samples(lines(list(records)), source="log"))
    assert measured.overall.ceiling == 0.9
    assert measured.overall.missed == {"evicted": 600, "deadline": 400}
    assert measured.as_json()["overall"]["ceiling"] == 0.9  # type: ignore[index,call-overload]
    console().print(hit_rate_table("log", measured))
    said = capsys.readouterr().out
    assert "ceiling" in said
    assert "90.0 %" in said
    assert "missed evicted 600, deadline 400" in said


def test_a_ceiling_that_some_do_not_tell_is_not_told() -> None:
    """The sum over half of the requests would pass for the whole."""
    measured = measure([Sample(0, 5, 10, 9), Sample(0, 5, 10)])
    assert measured.overall.ceiling is None


@pytest.mark.parametrize("own", [{"ceiling": -1}, {"ceiling": 9, "missed": [1]}, {"ceiling": "all"}])
def test_a_ceiling_that_is_no_count_is_a_bad_line(own: dict[str, object]) -> None:
    """A log that is cut or edited must not become a number."""
    record = {"meta_info": {"prompt_tokens": 10, "cached_tokens": 5, "hicache": own}}
    with pytest.raises(ConfigError, match=r"line 1: hicache\."):
        read_samples(lines([record]), source="log")


def test_counters_give_the_ceiling_and_the_reasons_of_an_interval() -> None:
    """What was missed before somebody looked is no news."""
    page = """
sglang:prompt_tokens_total {prompt}
sglang:cached_tokens_total{{cache_source="device"}} {cached}
hicache_ceiling_tokens_total {ceiling}
hicache_missed_tokens_total{{reason="evicted"}} {evicted}
hicache_missed_tokens_total{{reason="deadline"}} 7
"""
    before = parse(page.format(prompt=100, cached=10, ceiling=50, evicted=33))
    after = parse(page.format(prompt=300, cached=110, ceiling=200, evicted=83))
    assert before.missed == {"evicted": 33, "deadline": 7}
    readings, clock = iter([before, after]), iter(range(100))
    (interval,) = sample_over_time(
        lambda: next(readings), interval_s=1.0, duration_s=1.0, now=lambda: next(clock), sleep=lambda s: None
    )
    row = measure([interval]).overall
    assert (row.cached_tokens, row.ceiling_tokens, row.missed) == (100, 150, {"evicted": 50})
