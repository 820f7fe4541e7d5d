"""The argument tree. Commands are imported when asked for, so that --help stays light."""

from __future__ import annotations

import importlib
import logging
import sys

import click

from hicache.errors import HiCacheError

# name: (module:attribute, one line of help)
_COMMANDS = {
    "serve": ("hicache.cli.serve:serve", "Run the shared L3 daemon."),
    "launch-server": ("hicache.cli.launch_server:launch_server", "Serve the reference engine over HTTP."),
    "bench": ("hicache.cli.bench:bench", "Measure: multi-turn, islands, overlap, tree."),
    "plan": ("hicache.cli.plan:plan", "Plan memory: pools of published models, pool splits."),
    "replay": ("hicache.cli.replay:replay", "Replay a recorded trace against given tier sizes."),
    "sglang-flags": ("hicache.cli.sglang_flags:sglang_flags", "The command that starts SGLang with our L3."),
    "verify": ("hicache.cli.verify:verify", "Whether two servers give the same tokens."),
    "hit-rate": ("hicache.cli.hit_rate:hit_rate", "Hit rate per round from logs or a server's metrics."),
}

# Libraries that commands need and the base install lacks, and the extra that brings each.
_EXTRAS = {
    "torch": "torch",
    "starlette": "torch",
    "uvicorn": "torch",
    "redis": "redis",
    "mooncake": "mooncake",
    "matplotlib": "bench",
    "aiohttp": "bench",
    "zmq": "events",
}


class LazyGroup(click.Group):
    """A group whose commands are named in a table and imported on use."""

    def __init__(self, *args: object, table: dict[str, tuple[str, str]], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._table:
            return None
        module, attribute = self._table[name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])


@click.group(cls=LazyGroup, table=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hicache-tiered", prog_name="hicache")
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def cli(log_level: str) -> None:
    """A tiered KV cache for hybrid-attention language models."""
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


def main() -> None:
    """Run the command line; a refused setting is one line on stderr and exit code 2."""
    try:
        cli(prog_name="hicache")
    except HiCacheError as error:
        click.echo(f"hicache: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        from hicache.registry import how_to_install

        click.echo(f"hicache: {error.name} is missing; {how_to_install(extra)}", err=True)
        sys.exit(2)
