"""`hicache sglang-flags`: the launch command of an SGLang replica that uses a daemon as its L3."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hicache.errors import BackendError, ConfigError
from hicache.integrations.sglang.launch import Launch, Replica, plan, read_flags
from hicache.integrations.sglang.remarks import Effect
from hicache.integrations.sglang.shape import read_shape


@click.command("sglang-flags")
@click.argument("model")
@click.argument("flags", nargs=-1)
@click.option("--address", default="127.0.0.1:7380", show_default=True, help="The daemon, host:port.")
@click.option("--weight-version", required=True, help="Any text that changes when the weights do.")
@click.option("--model-id", default="", help="Share with replicas that serve this model under another name.")
@click.option(
    "--option", "options", multiple=True, help="Further extra config, as in prefetch_threshold=512."
)
@click.option("--linker", is_flag=True, help="Load from L3 straight to the device, without a host tier.")
@click.option("--adaptive", is_flag=True, help="Evict by our adaptive policy, in SGLang's own tree.")
@click.option("--no-check", is_flag=True, help="Do not ask the daemon whether it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sglang_flags(
    model: str,
    flags: tuple[str, ...],
    address: str,
    weight_version: str,
    model_id: str,
    options: tuple[str, ...],
    linker: bool,
    adaptive: bool,
    no_check: bool,
    as_json: bool,
) -> None:
    """Print the command that starts SGLang with MODEL and a daemon as its shared L3.

    MODEL is what --model-path takes; where it is a folder, its config.json tells how large pages are. Flags
    for SGLang follow --, as in: hicache sglang-flags MODEL --weight-version 1 -- --tp-size 2.
    """
    replica = Replica(
        model=model,
        weight_version=weight_version,
        model_id=model_id,
        options={"address": address, **dict(_option(text) for text in options)},
        flags=flags,
        linker=linker,
        adaptive=adaptive,
    )
    launch = plan(replica)
    capacity = None if no_check else _capacity(address)
    remarks = [*_sizes(model, flags, capacity), *_daemon(address, capacity, asked=not no_check)]
    if as_json:
        click.echo(json.dumps(_as_json(launch, remarks), indent=2))
        return
    click.echo(launch.shell())
    for note in launch.notes:
        click.echo(f"{_LABELS[note.effect]}: {note.text}", err=True)
    for remark in remarks:
        click.echo(f"note: {remark}", err=True)


_LABELS = {
    Effect.REFUSES: "SGLang refuses",
    Effect.REWRITES: "SGLang rewrites",
    Effect.MEANS: "note",
}


def _as_json(launch: Launch, remarks: list[str]) -> dict[str, object]:
    notes = [{"effect": note.effect.value, "text": note.text} for note in launch.notes]
    notes += [{"effect": Effect.MEANS.value, "text": remark} for remark in remarks]
    return {"command": launch.command, "extra_config": launch.extra_config, "notes": notes}


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--option {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _capacity(address: str) -> int | None:
    """Return the bytes the daemon may hold; None if it does not answer."""
    from hicache.storage_backends.grpc import GrpcBackend, Options

    backend = GrpcBackend(Options(address=address, timeout_s=2.0))
    try:
        return backend.stats().capacity_bytes
    except BackendError:
        return None
    finally:
        backend.close()


def _daemon(address: str, capacity: int | None, *, asked: bool) -> list[str]:
    if not asked or capacity is not None:
        return []
    return [
        f"no daemon answers at {address}: start it with `hicache serve --port {address.rpartition(':')[2]}`; "
        "SGLang starts without it and uses it when it comes"
    ]


def _sizes(model: str, flags: tuple[str, ...], capacity: int | None) -> list[str]:
    path = Path(model)
    if not path.exists():
        return []
    shape = read_shape(path)
    given = read_flags(flags)
    page_size = int(given.get("page-size", "64"))
    tp_size = int(given.get("tp-size", given.get("tp", "1")))
    size = shape.page_bytes(page_size, tp_size=tp_size)
    remarks = [f"one page of {page_size} tokens is {size / 1024:.0f} KiB of KV on each rank"]
    if shape.window_layers:
        remarks.append(
            f"{shape.window_layers} layers keep a window of {shape.window} tokens; L3 has their pages at the "
            "ends of prompts and chunks only"
        )
    if capacity is not None and capacity > 0 and size:
        tokens = capacity // (size * tp_size) * page_size
        remarks.append(f"the daemon holds {capacity / 2**30:.1f} GiB: about {tokens:,} tokens of this model")
    return remarks
