"""`hicache hit-rate`: what a cache earns today, from logs or from a live server."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hicache.bench import hit_rate as logs
from hicache.bench import render, scrape
from hicache.config.outputs import OutputFile, write_json
from hicache.errors import ConfigError


@click.command("hit-rate")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--url", help="Sample this server's /metrics instead of reading logs.")
@click.option("--interval", "interval_s", default=5.0, show_default=True, help="Seconds between samples.")
@click.option("--duration", "duration_s", default=60.0, show_default=True, help="Seconds to sample for.")
@click.option("--skip-bad-lines", is_flag=True, help="Leave out lines that cannot be read, and count them.")
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
def hit_rate(
    paths: tuple[Path, ...],
    url: str | None,
    interval_s: float,
    duration_s: float,
    skip_bad_lines: bool,
    json_path: Path | None,
) -> None:
    """Hit rate per round and overall: sum of cached prompt tokens / sum of prompt tokens.

    PATHS are JSONL logs (- is stdin). A line is one record with cached and prompt tokens and, if
    there are rounds, a round: cached_tokens | cached | cached_prompt_tokens; prompt_tokens | prompt |
    input_tokens | input_length | prompt_len; round | round_index | turn. SGLang's replies are read as
    they come (meta_info), and so is OpenAI's usage.
    """
    if bool(paths) == bool(url):
        raise ConfigError("give either log files or --url, so that there is one thing to measure")
    if url:
        if interval_s <= 0 or duration_s <= 0:
            raise ConfigError(f"--interval {interval_s} and --duration {duration_s} must be above 0")
        samples = _watch(url, interval_s, duration_s)
        title, unit = url, "interval"
    else:
        samples = _read(paths, skip_bad_lines=skip_bad_lines)
        title, unit = ", ".join(map(str, paths)), "round"
    measured = logs.measure(samples)
    if json_path is None or str(json_path) != "-":
        render.console().print(render.hit_rate_table(title, measured, unit=unit))
    if json_path is not None:
        write_json(json_path, measured.as_json(unit))


def _read(paths: tuple[Path, ...], *, skip_bad_lines: bool) -> list[logs.Sample]:
    samples: list[logs.Sample] = []
    bad: list[str] = []
    for path in paths:
        try:
            with click.open_file(str(path), encoding="utf-8", errors="replace") as lines:
                samples += logs.read_samples(
                    lines, source=str(path), skipped=bad.append if skip_bad_lines else None
                )
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    for problem in bad[: logs.MAX_ERRORS_SHOWN]:
        click.echo(f"skipped: {problem}", err=True)
    if len(bad) > logs.MAX_ERRORS_SHOWN:
        click.echo(f"skipped: {len(bad)} bad lines in all", err=True)
    if not samples:
        raise ConfigError(f"{', '.join(map(str, paths))}: no record to measure")
    return samples


def _watch(url: str, interval_s: float, duration_s: float) -> list[logs.Sample]:
    samples: list[logs.Sample] = []
    stream = scrape.sample_over_time(
        lambda: scrape.fetch(url),
        interval_s=interval_s,
        duration_s=duration_s,
        now=time.monotonic,
        sleep=time.sleep,
    )
    for sample in stream:
        samples.append(sample)
        rate = logs.measure([sample]).overall.hit_rate
        shown = "no prompts" if rate is None else render.percent(rate)
        click.echo(f"interval {sample.round}: {shown} of {sample.prompt_tokens:,} prompt tokens", err=True)
    return samples
