"""`hicache verify`: whether two servers that differ in one switch give the same tokens."""

from __future__ import annotations

from pathlib import Path

import click

from hicache.cli.numbers import numbers
from hicache.config.outputs import OutputFile, write_json
from hicache.errors import ConfigError

_DIFFERENT, _UNPROVEN = 1, 3


@click.command("verify")
@click.option("--url", "urls", multiple=True, metavar="URL", help="A server; give two.")
@click.option("--prompts", default=6, show_default=True, help="How many prompts.")
@click.option("--lengths", help="Prompt lengths in tokens, as 100,500; by default from the page size.")
@click.option("--output-length", default=16, show_default=True, help="Tokens to generate each time.")
@click.option("--extend-by", default=24, show_default=True, help="Tokens added for the extended prompt.")
@click.option("--vocab-size", default=256, show_default=True, help="Prompt tokens are below this.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--restored", is_flag=True, help="Ask once more after a flush of L1 and L2: hits from L3.")
@click.option("--hit-with-cold", is_flag=True, help="Compare also where only one of the two was a hit.")
@click.option("--other-models", is_flag=True, help="Go on although the servers name different models.")
@click.option("--api-key", envvar="HICACHE_API_KEY", help="Bearer token of both servers.")
@click.option("--admin-api-key", help="Their --admin-api-key, for the flush of --restored.")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="Seconds for one answer.")
@click.option("--json", "json_path", type=OutputFile(), help="Write all comparisons here (- is stdout).")
def verify(
    urls: tuple[str, ...],
    prompts: int,
    lengths: str | None,
    output_length: int,
    extend_by: int,
    vocab_size: int,
    seed: int,
    restored: bool,
    hit_with_cold: bool,
    other_models: bool,
    api_key: str | None,
    admin_api_key: str | None,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Compare two servers, ours or SGLang's, that should give the same tokens.

    Each prompt is asked cold, again (a hit), and extended (a longer hit), greedily, one at a time. Hits
    are compared with hits and cold answers with cold ones; what was meant to be a hit and was not is
    said. The servers' caches are not flushed but by --restored; nothing cached before is hit.

    Exits with 0 if all is equal, 1 if a token differs, 2 if a server cannot be asked, and 3 if a stage
    shows nothing, as when a server has no cache.
    """
    from hicache.bench import verify as work

    if len(urls) != 2:
        times = "once" if len(urls) == 1 else f"{len(urls)} times"
        raise ConfigError(f"--url is given {times}; give it for each of two servers")
    if timeout_s <= 0:
        raise ConfigError(f"--timeout {timeout_s:g} must be above 0")
    plan = work.Plan(
        prompts=prompts,
        lengths=() if lengths is None else tuple(numbers("--lengths", lengths, int)),
        output_length=output_length,
        extend_by=extend_by,
        vocab_size=vocab_size,
        seed=seed,
        restored=restored,
        hit_with_cold=hit_with_cold,
        other_models=other_models,
    )
    a, b = (
        work.Server(url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s) for url in urls
    )
    verdict = work.verify((a, b), plan)
    quiet = str(json_path) == "-"
    for line in work.explain(verdict):
        click.echo(line, err=quiet)
    if json_path is not None:
        write_json(json_path, verdict.as_json())
    if verdict.first is not None:
        raise SystemExit(_DIFFERENT)
    if verdict.unproven:
        raise SystemExit(_UNPROVEN)
