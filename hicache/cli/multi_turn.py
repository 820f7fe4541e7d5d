"""`hicache bench multi-turn`: flags to a workload and a system, one run per tier set and policy."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import click
from rich.progress import Progress, TaskID

from hicache.bench import render
from hicache.bench.published import PUBLISHED
from hicache.bench.report import JSON, RunReport, TurnResult
from hicache.bench.system import SYSTEMS, SimulatedSystem, Tiers
from hicache.bench.workloads import WORKLOADS, Pacing, ReadyQueue, Workload
from hicache.config.cache import StateCheckpoints
from hicache.config.outputs import OutputFile, write_json
from hicache.config.sizes import ByteSize
from hicache.engine.scheduler import FinalToken
from hicache.errors import ConfigError
from hicache.registry import how_to_install
from hicache.types import Component

CUSTOM = "custom"
_REFERENCE_VOCAB = 256  # every preset of the reference model has these tokens
# What SGLang's multi-turn bench does when nothing is said.
_FREE = Workload(
    name=CUSTOM,
    num_clients=256,
    num_rounds=5,
    request_length=512,
    output_length=64,
    max_parallel=128,
    request_rate=1.0,
    ready_queue=ReadyQueue.RANDOM,
    pacing=Pacing.FREE,
)
_F = TypeVar("_F", bound=Callable[..., object])

_WORKLOAD_FLAGS = (
    click.option("--num-clients", type=int, help="Conversations at once."),
    click.option("--num-rounds", type=int, help="Turns per conversation."),
    click.option("--request-length", type=int, help="New prompt tokens of a turn."),
    click.option(
        "--sub-question-input-length",
        "sub_question_length",
        type=int,
        help="New prompt tokens from the second turn on; 0: as --request-length.",
    ),
    click.option("--output-length", type=int, help="Tokens of each reply."),
    click.option("--max-parallel", type=int, help="Turns under way at once."),
    click.option("--request-rate", type=float, help="Turns sent per second (Poisson); inf sends at once."),
    click.option("--seed", type=int, help="Seeds tokens, arrivals and the random queue."),
    click.option("--ready-queue-policy", "ready_queue", type=click.Choice([q.value for q in ReadyQueue])),
    click.option(
        "--enable-round-barrier/--disable-round-barrier",
        "round_barrier",
        default=None,
        help="Whether a round waits for every client to end the one before.",
    ),
    click.option("--vocab-size", type=int, help="Token ids are drawn below this."),
    click.option("--churn", type=float, help="Share of the conversations replaced by new ones each round."),
    click.option(
        "--churn-later", type=float, help="The same from half-way on, where all of them are replaced at once."
    ),
    click.option("--shared-prefix-length", type=int, help="Tokens that begin every conversation."),
    click.option(
        "--sessions/--no-sessions",
        "sessions",
        default=None,
        help="Name each conversation by a session_id, and close it behind its last turn.",
    ),
    click.option("--num-shared-prefixes", type=int, help="Prefixes there are; drawn by Zipf's law."),
)
_SYSTEM_FLAGS = (
    click.option("--components", help="full, full+swa, full+mamba or full+swa+mamba."),
    click.option("--page-size", type=int),
    click.option("--max-running-requests", type=int),
    click.option("--chunked-prefill-size", type=int),
    click.option("--max-total-tokens", type=int, help="FULL tokens of L1."),
    click.option("--swa-full-tokens-ratio", type=float, help="SWA tokens per FULL token of L1 and L2."),
    click.option("--sliding-window", type=int, help="Tokens of the SWA window."),
    click.option(
        "--enable-swa-islands",
        is_flag=True,
        default=None,
        help="Keep SWA (and states) at chunk ends, branching points and ends only.",
    ),
    click.option("--swa-checkpoint-interval", type=int, help="With islands, tokens between kept windows."),
    click.option(
        "--mamba-prefill-checkpoints",
        type=click.Choice([c.value for c in StateCheckpoints]),
        help="Without islands: states every 256 tokens of a prefill, or at its ends only.",
    ),
    click.option(
        "--mamba-full-memory-ratio", type=float, help="Bytes of MAMBA states per byte of FULL, on L1."
    ),
    click.option("--hicache-ratio", type=float, help="L2 over L1, in every pool; above 1."),
    click.option("--l3-size", "l3_bytes", help="L3, as in 500GiB."),
    click.option("--full-token-bytes", type=int),
    click.option("--swa-token-bytes", type=int),
    click.option("--mamba-state-bytes", type=int),
    click.option("--prefill-tokens-per-s", type=float),
    click.option("--decode-tokens-per-s", type=float, help="Over all running requests."),
    click.option("--host-bytes-per-s", type=float, help="Between L1 and L2, each way."),
    click.option("--storage-load-bytes-per-s", type=float, help="From L3 to L2."),
    click.option("--storage-store-bytes-per-s", type=float, help="From L2 to L3."),
)


def _all(flags: Sequence[Callable[[_F], _F]]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be run, read from the flags."""

    engine: str
    workload: Workload
    system: SimulatedSystem
    tiers: tuple[Tiers, ...]
    policies: tuple[str, ...]
    final_token: FinalToken
    url: str | None
    keys: tuple[str, str] = field(default=("", ""), repr=False)  # for requests, for the flush

    @property
    def runs(self) -> list[tuple[Tiers, str]]:
        return [(tiers, policy) for policy in self.policies for tiers in self.tiers]


@click.command("multi-turn")
@click.option(
    "--workload",
    "workload_name",
    default=CUSTOM,
    show_default=True,
    type=click.Choice([*WORKLOADS, CUSTOM]),
    help="A published workload, or one by flags (its defaults are those of SGLang's bench).",
)
@click.option(
    "--engine",
    type=click.Choice(["virtual", "reference"]),
    default="virtual",
    show_default=True,
    help="Virtual time, or the reference engine in this process; --url drives a server instead.",
)
@click.option("--url", help="A server that answers /generate and /flush_cache: ours, or SGLang's.")
@click.option("--api-key", default="", help="With --url: the server's --api-key, if it has one.")
@click.option("--admin-api-key", default="", help="With --url: its --admin-api-key, for the flush.")
@click.option(
    "--tiers", "tiers_text", help="Comma-separated: l1, l1+l2, l1+l2+l3. With --url, one label for the run."
)
@click.option(
    "--eviction-policy",
    default="adaptive",
    show_default=True,
    help="One or more, comma-separated; in virtual time also belady, which knows the future.",
)
@click.option(
    "--final-token-cached/--no-final-token-cached",
    "final_token_cached",
    default=None,
    help="Whether the last sampled token's KV is computed and cached too, as the published system does. "
    "Default: for published workloads in virtual time. The reference engine does not.",
)
@_all(_WORKLOAD_FLAGS)
@_all(_SYSTEM_FLAGS)
@click.option("--json", "json_path", type=OutputFile(), help="Write the numbers here (- is stdout).")
@click.option("--plot", "plot_path", type=OutputFile(), help="Write a picture (PNG) here.")
@click.option(
    "--overlay-published/--no-overlay-published",
    default=True,
    show_default=True,
    help="Draw published readings, where there are any, into the picture.",
)
def multi_turn(
    workload_name: str,
    engine: str,
    url: str | None,
    api_key: str,
    admin_api_key: str,
    tiers_text: str | None,
    eviction_policy: str,
    final_token_cached: bool | None,
    json_path: Path | None,
    plot_path: Path | None,
    overlay_published: bool,
    **flags: object,
) -> None:
    """Clients that each extend one conversation: hit rate and TTFT per round, throughput overall.

    In virtual time the cache, the tree, the policies, the pools and the scheduler are real; computing
    and copying take time by the rates below, and tensors are absent.
    """
    if engine == "reference" and not url and flags["vocab_size"] is None:
        flags["vocab_size"] = _REFERENCE_VOCAB
    workload = _workload(workload_name, flags)
    system = _system(workload_name, flags)
    if final_token_cached is None:
        final_token_cached = workload_name != CUSTOM and engine == "virtual" and not url
    plan = _Plan(
        engine="http" if url else engine,
        workload=workload,
        system=system,
        tiers=() if url else _tiers(tiers_text),
        policies=tuple(p.strip() for p in eviction_policy.split(",")),
        final_token=FinalToken.COMPUTE if final_token_cached else FinalToken.SKIP,
        url=url,
        keys=(api_key, admin_api_key),
    )
    if system.ratio_warning is not None and not url:
        click.echo(f"hicache: {system.ratio_warning}", err=True)
    if plot_path is not None:
        _plotting()  # refuse before the run, not after it
    runs = _run_http(plan, tiers_text) if plan.url else _run_all(plan)
    published = PUBLISHED.get(workload_name) if overlay_published and not url else None
    if json_path is None or str(json_path) != "-":
        render.console().print(render.runs_table(f"{workload.name}, {plan.engine}", runs))
    if json_path is not None:
        write_json(json_path, _as_json(plan, runs))
    if plot_path is not None:
        where = "virtual time" if plan.engine == "virtual" else plan.engine
        _plotting()(plot_path, f"{workload.name}: hit rate per round ({where})", runs, published)
        click.echo(f"picture: {plot_path}", err=True)


def _workload(name: str, flags: dict[str, object]) -> Workload:
    base = WORKLOADS.get(name, _FREE)
    names = {field.name for field in fields(Workload)}
    given = {key: value for key, value in flags.items() if key in names and value is not None}
    if "ready_queue" in given:
        given["ready_queue"] = ReadyQueue(given["ready_queue"])
    if flags.get("round_barrier") is not None:
        given["pacing"] = Pacing.BARRIER if flags["round_barrier"] else Pacing.FREE
    if given and name in WORKLOADS:
        given["name"] = f"{name} (changed)"
    return replace(base, **given)  # type: ignore[arg-type]


def _system(name: str, flags: dict[str, object]) -> SimulatedSystem:
    names = {field.name for field in fields(SimulatedSystem)}
    given = {key: value for key, value in flags.items() if key in names and value is not None}
    if "components" in given:
        given["components"] = _components(str(given["components"]))
    if "mamba_prefill_checkpoints" in given:
        given["mamba_prefill_checkpoints"] = StateCheckpoints(given["mamba_prefill_checkpoints"])
    if "l3_bytes" in given:
        given["l3_bytes"] = float(int(ByteSize.parse(str(given["l3_bytes"]))))
    return SYSTEMS.get(name, SimulatedSystem()).given(**given)


def _components(text: str) -> tuple[Component, ...]:
    known = {component.name.lower(): component for component in Component}
    parts = text.lower().split("+")
    if not set(parts) <= set(known):
        raise ConfigError(f"--components {text!r}: write some of {', '.join(known)}, joined by +")
    return tuple(sorted({known[part] for part in parts}))


def _tiers(text: str | None) -> tuple[Tiers, ...]:
    if text is None:
        return tuple(Tiers)
    known = {tiers.value for tiers in Tiers}
    parts = [part.strip().lower() for part in text.split(",")]
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise ConfigError(f"--tiers {unknown[0]!r}: choose from {', '.join(t.value for t in Tiers)}")
    return tuple(dict.fromkeys(Tiers(part) for part in parts))


def _run_all(plan: _Plan) -> list[RunReport]:
    runs = []
    with Progress(console=render.console(stderr=True), transient=True) as progress:
        for tiers, policy in plan.runs:
            task = progress.add_task(f"{tiers.value}, {policy}", total=plan.workload.num_requests)
            runs.append(_run_one(plan, tiers, policy, _advance(progress, task)))
    return runs


def _advance(progress: Progress, task: TaskID) -> Callable[[TurnResult], None]:
    return lambda result: progress.advance(task)


def _run_one(plan: _Plan, tiers: Tiers, policy: str, on_result: Callable[[TurnResult], None]) -> RunReport:
    if plan.engine == "reference":
        from hicache.bench.reference import run_reference

        run = run_reference
    else:
        from hicache.bench.virtual import run_virtual

        run = run_virtual
    return run(
        plan.workload,
        plan.system,
        tiers=tiers,
        eviction_policy=policy,
        final_token=plan.final_token,
        on_result=on_result,
    )


def _run_http(plan: _Plan, label: str | None) -> list[RunReport]:
    try:
        from hicache.bench.http import HttpOptions, run_http
    except ImportError as error:
        raise ConfigError(f"--url needs {error.name}; {how_to_install('bench')}") from error
    assert plan.url is not None
    with Progress(console=render.console(stderr=True), transient=True) as progress:
        task = progress.add_task(plan.url, total=plan.workload.num_requests)
        api_key, admin_api_key = plan.keys
        options = HttpOptions(plan.url, api_key=api_key, admin_api_key=admin_api_key, label=label or "server")
        return [run_http(plan.workload, options, _advance(progress, task))]


def _plotting() -> Callable[..., None]:
    try:
        from hicache.bench.plot import plot_runs
    except ImportError as error:
        raise ConfigError(f"--plot needs {error.name}; {how_to_install('bench')}") from error
    return plot_runs


def _plain(value: JSON | enum.Enum) -> JSON:
    """Return a setting as JSON has it: choices as they are typed, and no infinity, which it has not."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _as_json(plan: _Plan, runs: Sequence[RunReport]) -> dict[str, JSON]:
    workload = plan.workload
    report: dict[str, JSON] = {
        "workload": workload.name,
        "runs": [run.as_json() for run in runs],
        "engine": plan.engine,
        "traffic": {field.name: _plain(getattr(workload, field.name)) for field in fields(Workload)},
    }
    if plan.engine == "virtual":
        report |= {"final_token_cached": plan.final_token is FinalToken.COMPUTE, **plan.system.as_json()}
    published = PUBLISHED.get(workload.name)
    if published is not None and not plan.url:
        report["published_readings"] = {
            "source": published.source,
            "rounds": list(published.rounds),
            "hit_percent": {tiers: list(curve) for tiers, curve in published.hit_percent.items()},
            "effective_input_tokens_per_s": dict(published.effective_input_tokens_per_s),
        }
    return report
