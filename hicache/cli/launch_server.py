"""`hicache launch-server`: SGLang's flags to settings; the server itself is hicache.server.run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from hicache.config.cache import HostMemoryMode
from hicache.config.outputs import OutputFile, write_ready
from hicache.config.server import IoBackend, MemLayout, ServerConfig, load_server_config, read_mapping
from hicache.engine.architecture import DRAFT_SUFFIX, PRESETS
from hicache.types import PrefetchPolicy, WritePolicy

_F = TypeVar("_F", bound=Callable[..., Any])

_SERVING, _MODEL, _MEMORY, _HICACHE, _STORAGE = (
    "Serving",
    "The model (random weights; it exists to prove and to show)",
    "L1 and scheduling",
    "L2 (--enable-hierarchical-cache)",
    "L3 (--hicache-storage-backend)",
)
_DEFAULTS: Mapping[str, object] = {
    f.name: f.default if f.default is not msgspec.NODEFAULT else None
    for f in msgspec.structs.fields(ServerConfig)
}


class _GroupedOption(click.Option):
    """An option that --help shows under a heading."""

    def __init__(self, *args: Any, group: str = "Other", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class _GroupedCommand(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _BackendName(click.types.StringParamType):
    """A storage backend's name; which exist is looked up when it is needed."""

    name = "name"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        from hicache.registry import available_backends

        return "[" + "|".join(available_backends()) + "]"


def _option(group: str, name: str, help_text: str, **attributes: Any) -> Callable[[_F], _F]:
    default = _DEFAULTS.get(name)
    if default not in (None, False) and not isinstance(default, Mapping):
        shown = "enabled" if default is True else getattr(default, "value", default)
        help_text += f"  [default: {shown}]"
    declarations = attributes.pop("declarations", [f"--{name.replace('_', '-')}"])
    return click.option(
        *declarations, name, cls=_GroupedOption, group=group, help=help_text, default=None, **attributes
    )


def _flags(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _values(
    kind: type[HostMemoryMode | WritePolicy | PrefetchPolicy | IoBackend | MemLayout],
) -> click.Choice[str]:
    return click.Choice([member.value for member in kind])


@click.command("launch-server", cls=_GroupedCommand)
@_flags(
    _option(
        _SERVING,
        "config",
        "TOML file with [server] and [cache] sections; flags win.",
        type=click.Path(path_type=Path),
    ),
    _option(_SERVING, "host", "Address to listen on."),
    _option(_SERVING, "port", "Port; 0 takes any free one.", type=int),
    _option(_SERVING, "enable_metrics", "Serve Prometheus /metrics.", is_flag=True),
    _option(_SERVING, "drain_seconds", "How long running requests may take after SIGTERM.", type=float),
    _option(
        _SERVING,
        "kv_events_config",
        "Publish KV events: SGLang's JSON or @FILE (publisher, endpoint, replay_endpoint, buffer_steps, "
        "...), and components, of which only full is told by default.",
    ),
    _option(
        _SERVING,
        "ready_file",
        "Write the URL there once requests are taken.",
        type=OutputFile(replaced=True),
    ),
    _option(_MODEL, "model_preset", f"{', '.join(PRESETS)}; each with {DRAFT_SUFFIX} behind it too."),
    _option(_MODEL, "layers", "Instead of the preset's: a letter per layer, F(ull), S(wa), M(amba)."),
    _option(_MODEL, "sliding_window", "Tokens that SWA layers look back.", type=int),
    _option(_MODEL, "hidden_size", "Width of the model.", type=int),
    _option(_MODEL, "vocab_size", "Token ids are below this; at least 256.", type=int),
    _option(_MODEL, "context_length", "Most tokens of prompt and output together.", type=int),
    _option(
        _MODEL,
        "seed",
        "Seed of the weights, and so their version: replicas that share L3 need the same.",
        type=int,
        declarations=["--seed", "--weight-version"],
    ),
    _option(_MODEL, "device", "cpu or cuda[:N]."),
    _option(_MEMORY, "page_size", "Tokens per page; must divide the chunk and the track interval.", type=int),
    _option(_MEMORY, "max_total_tokens", "Tokens that L1 holds.", type=int),
    _option(_MEMORY, "max_running_requests", "Requests that run at once.", type=int),
    _option(_MEMORY, "chunked_prefill_size", "Prompt tokens computed per step.", type=int),
    _option(_MEMORY, "swa_full_tokens_ratio", "L1's SWA tokens per FULL token, in (0, 1].", type=float),
    _option(_MEMORY, "mamba_full_memory_ratio", "L1's MAMBA bytes per FULL byte.", type=float),
    _option(_MEMORY, "max_mamba_cache_size", "MAMBA states on L1, instead of the ratio.", type=int),
    _option(_MEMORY, "mamba_track_interval", "Tokens between MAMBA checkpoints.", type=int),
    _option(
        _MEMORY,
        "enable_swa_islands",
        "Keep SWA only where a prompt may be resumed, so that a small --swa-full-tokens-ratio is enough.",
        is_flag=True,
    ),
    _option(
        _MEMORY,
        "swa_checkpoint_interval",
        "With islands, tokens between windows that are kept; 0 keeps those at chunk ends.",
        type=int,
    ),
    _option(_MEMORY, "radix_eviction_policy", "adaptive, lru, lfu, slru, priority, fifo, mru, filo or tlru."),
    _option(_MEMORY, "radix_eviction_policy_config", "The policy's own options, as JSON or @FILE."),
    _option(
        _MEMORY,
        "enable_session_radix_cache",
        "Evict what open sessions refer to last.",
        is_flag=True,
        declarations=["--enable-session-radix-cache/--disable-session-radix-cache"],
    ),
    _option(_MEMORY, "session_timeout", "Seconds without a request that end a session.", type=float),
    _option(
        _HICACHE,
        "enable_hierarchical_cache",
        "Keep evicted pages in host memory.",
        is_flag=True,
        declarations=["--enable-hierarchical-cache", "--enable-hicache"],
    ),
    _option(
        _HICACHE,
        "hicache_host_memory_mode",
        "Keep pages in host memory, or only pass them between L1 and L3.",
        type=_values(HostMemoryMode),
    ),
    _option(
        _HICACHE,
        "hicache_ratio",
        "Host / L1 size; above 1 unless buffer_only.  [default: 2.0, or 1.2 with buffer_only]",
        type=float,
    ),
    _option(_HICACHE, "hicache_size", "L2 size in GB (10^9 bytes); over the ratio.", type=float),
    _option(_HICACHE, "hicache_write_policy", "When pages go to the next tier.", type=_values(WritePolicy)),
    _option(_HICACHE, "hicache_io_backend", "How pages are copied.", type=_values(IoBackend)),
    _option(_HICACHE, "hicache_mem_layout", "The order of bytes on the host.", type=_values(MemLayout)),
    _option(_STORAGE, "hicache_storage_backend", "Where L3 is.", type=_BackendName()),
    _option(
        _STORAGE,
        "hicache_storage_prefetch_policy",
        "How long a queued request may wait for L3.",
        type=_values(PrefetchPolicy),
    ),
    _option(
        _STORAGE,
        "hicache_storage_backend_extra_config",
        "JSON or @FILE (.json, .toml): prefetch_threshold, prefetch_timeout_base, "
        "prefetch_timeout_per_ki_token, prefetch_timeout_max, and the backend's own options.",
    ),
    _option(_STORAGE, "file_storage_path", "Folder of the file backend."),
)
def launch_server(
    config: Path | None,
    ready_file: Path | None,
    kv_events_config: str | None,
    radix_eviction_policy_config: str | None,
    hicache_storage_backend_extra_config: str | None,
    **flags: object,
) -> None:
    """Serve a small reference model over HTTP, with SGLang's flags and routes.

    Answers are the same bytes whatever the cache does. SGLang is what people deploy.
    """
    for name, text in (
        ("kv_events_config", kv_events_config),
        ("radix_eviction_policy_config", radix_eviction_policy_config),
        ("hicache_storage_backend_extra_config", hicache_storage_backend_extra_config),
    ):
        if text is not None:
            flags[name] = read_mapping(text, flag=f"--{name.replace('_', '-')}")
    settings = load_server_config(config, flags).rewritten()
    from hicache.server.run import Server

    def ready(url: str) -> None:
        if ready_file is not None:
            write_ready(ready_file, f"{url}\n")
        click.echo(f"ready on {url}")

    report = Server(settings).serve(ready)
    click.echo(report.text)
    if report.failed:
        raise SystemExit(1)
