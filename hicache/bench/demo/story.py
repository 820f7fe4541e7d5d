"""The demo, act by act: share, survive a kill, agree with a cold run, fall off the cliff or not."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache.bench.demo.checks import Checks
from hicache.bench.demo.client import Answer, Tally, ask
from hicache.bench.demo.cliff import show_cliff
from hicache.bench.demo.cluster import VOCAB, Cluster, Replica
from hicache.bench.demo.sessions import Prompt, Scale, read_session
from hicache.bench.render import console as make_console
from hicache.errors import HiCacheError

MAX_NEW_TOKENS = 8
_SESSIONS = 4
_SHARED = 6  # requests of each session that both replicas get before the daemon is killed
_REQUESTS = 10  # of each session


@dataclass(slots=True)
class Demo:
    """What the acts share: the processes, the sessions, and every answer so far."""

    console: Console
    checks: Checks
    cluster: Cluster
    sessions: dict[str, list[Prompt]]
    answers: list[Answer] = field(default_factory=list)

    def serve(self, replica: Replica, prompts: Sequence[Sequence[Prompt]]) -> list[Answer]:
        """Send sessions to a replica: the requests of one in order, sessions side by side."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            served = pool.map(lambda session: [self._ask(replica, p) for p in session], prompts)
            answers = [answer for session in served for answer in session]
        self.answers += answers
        return answers

    def _ask(self, replica: Replica, prompt: Prompt) -> Answer:
        return ask(replica.url, prompt, max_new_tokens=MAX_NEW_TOKENS)


def act_start(demo: Demo) -> None:
    """Start the processes by their flags."""
    _title(demo, 1, "One daemon, two replicas that share it, and a server without tiers to compare with")
    for program in demo.cluster.programs:
        demo.console.print(f"  [dim]$[/dim] {escape(program.command)}", soft_wrap=True, highlight=False)
    started = time.monotonic()
    demo.cluster.start()
    demo.console.print(f"  all ready after {time.monotonic() - started:.1f} s")


def act_share(demo: Demo) -> None:
    """B answers from pages that only A computed."""
    _title(demo, 2, "Recorded agent sessions on A; then the same on B, which has never seen them")
    first, second, third, _ = demo.sessions.values()
    shared = [first[:_SHARED], second[:_SHARED]]
    on_a = demo.serve(demo.cluster.a, [*shared, third])
    stored = demo.cluster.wait_stored()
    read_by_b_before = demo.cluster.b.metric("sglang:cached_tokens_total")
    on_b = demo.serve(demo.cluster.b, shared)
    _table(demo, [("A", on_a), ("B", on_b)])
    # B's first request of a session finds nothing of its own, so whatever it did not compute A had written.
    opening = Tally.of(answer for answer in on_b if answer.prompt.number == 0)
    demo.checks.that(
        read_by_b_before == 0 and opening.storage > 0 and opening.device == opening.host == 0,
        f"B opened both sessions with {opening.storage:,} of {opening.prompt:,} tokens from L3: "
        f"pages that only A wrote ({stored:,} objects)",
    )
    asked_both = {answer.prompt.session for answer in on_b}
    a, b = Tally.of(x for x in on_a if x.prompt.session in asked_both), Tally.of(on_b)
    demo.checks.that(
        b.computed < a.computed, f"B computed {b.computed:,} tokens for what A computed {a.computed:,}"
    )


def act_kill(demo: Demo) -> None:
    """The daemon dies while both replicas serve; nobody notices but the hit rate."""
    _title(demo, 3, "kill -9 of the daemon while both replicas serve")
    first, second, third, _ = demo.sessions.values()
    rest = [(demo.cluster.a, [*first[_SHARED:], *second[_SHARED:]]), (demo.cluster.b, third)]
    answered = threading.Semaphore(0)
    answers: list[Answer] = []
    after_kill: list[Answer] = []
    killed = threading.Event()

    def session(replica: Replica, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            answer = ask(replica.url, prompt, max_new_tokens=MAX_NEW_TOKENS)
            answers.append(answer)
            if killed.is_set():
                after_kill.append(answer)
            answered.release()

    with ThreadPoolExecutor(max_workers=len(rest)) as pool:
        ends = [pool.submit(session, *work) for work in rest]
        for _ in rest:
            answered.acquire(timeout=120)
        demo.cluster.daemon.kill()
        killed.set()
        for end in ends:
            end.result()
    demo.answers += answers
    for _, replica in demo.cluster.replicas:
        replica.program.check_alive()
    expected = sum(len(prompts) for _, prompts in rest)
    _table(demo, [(name, [x for x in answers if x.url == r.url]) for name, r in demo.cluster.replicas])
    demo.checks.that(
        len(answers) == expected and after_kill,
        f"all {expected} requests were answered, {len(after_kill)} of them after the kill",
    )


def act_return(demo: Demo) -> None:
    """The daemon is back, empty; the replicas find it by themselves and share again."""
    _title(demo, 4, "The daemon is back, empty; the replicas reconnect by themselves")
    started = time.monotonic()
    demo.cluster.restart_daemon()
    demo.console.print(f"  both use it again after {time.monotonic() - started:.1f} s")
    *_, fourth = demo.sessions.values()
    on_a = demo.serve(demo.cluster.a, [fourth])
    demo.cluster.wait_stored()
    on_b = demo.serve(demo.cluster.b, [fourth])
    _table(demo, [("A", on_a), ("B", on_b)])
    opening = on_b[0]
    demo.checks.that(
        opening.storage > 0 and opening.device == opening.host == 0,
        f"L3 hits are back: B opened a session that only A knew with {opening.storage:,} of "
        f"{opening.prompt_tokens:,} tokens from L3",
    )


def act_agree(demo: Demo) -> None:
    """Whatever the tiers did, the bytes are those of a server that computed everything."""
    _title(demo, 5, "The same prompts cold: flushed before each one, everything computed")
    prompts = {(a.prompt.session, a.prompt.number): a.prompt for a in demo.answers}
    cold: dict[tuple[str, int], Answer] = {}
    for key, prompt in prompts.items():
        demo.cluster.cold.flush()
        cold[key] = ask(demo.cluster.cold.url, prompt, max_new_tokens=MAX_NEW_TOKENS)
    _table(demo, [("cold", list(cold.values()))])
    hits = [a for a in demo.answers if a.cached_tokens]
    equal = [a for a in demo.answers if a.output == cold[a.prompt.session, a.prompt.number].output]
    whole = all(len(a.output) == MAX_NEW_TOKENS for a in [*demo.answers, *cold.values()])
    demo.checks.that(not any(a.cached_tokens for a in cold.values()), "the cold run had no cached token")
    demo.checks.that(
        whole and len({tuple(a.output) for a in cold.values()}) > 1 and len(equal) == len(demo.answers),
        f"{len(equal)} of {len(demo.answers)} outputs equal the cold run's byte for byte; "
        f"{len(hits)} of them began with a hit",
    )
    every = [*demo.answers, *cold.values()]
    demo.checks.that(
        all(a.adds_up for a in every),
        f"L1 + L2 + L3 + computed = prompt tokens, in each of {len(every)} answers",
    )
    for _, replica in demo.cluster.replicas:
        _check_metrics(demo, replica)


def _check_metrics(demo: Demo, replica: Replica) -> None:
    replied = Tally.of(a for a in demo.answers if a.url == replica.url)
    counted = [
        int(replica.metric("sglang:cached_tokens_total", {"cache_source": tier}))
        for tier in ("device", "host", "storage")
    ]
    counted.append(int(replica.metric("sglang:prompt_tokens_total")))
    expected = [replied.device, replied.host, replied.storage, replied.prompt]
    demo.checks.that(
        counted == expected,
        f"{replica.program.name}: /metrics agrees with the replies on L1, L2, L3, prompt tokens: "
        f"{', '.join(f'{n:,}' for n in counted)}",
    )


def _title(demo: Demo, number: int, text: str) -> None:
    demo.console.print()
    demo.console.rule(f"[bold]{number}  {text}[/bold]", align="left", style="dim")


def _table(demo: Demo, groups: Iterable[tuple[str, Sequence[Answer]]]) -> None:
    table = Table(header_style="bold", box=None, padding=(0, 2))
    table.add_column("replica")
    table.add_column("session")
    for name in ("requests", "prompt tokens", "L1", "L2", "L3", "computed", "mean time"):
        table.add_column(name, justify="right")
    for who, answers in groups:
        for session in sorted({a.prompt.session for a in answers}):
            t = Tally.of(a for a in answers if a.prompt.session == session)
            numbers = [t.requests, t.prompt, t.device, t.host, t.storage, t.computed]
            mean = f"{1000 * t.seconds / t.requests:,.0f} ms"
            table.add_row(who, session, *(f"{n:,}" for n in numbers), mean)
    demo.console.print(table)


@click.command()
@click.option(
    "--sessions",
    "folder",
    default="tests/traces/sessions",
    show_default=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of four recorded sessions.",
)
@click.option(
    "--out", default="out/demo", show_default=True, type=click.Path(path_type=Path), help="Logs and the plot."
)
@click.option(
    "--block-tokens",
    default=8,
    show_default=True,
    type=click.IntRange(2, 8),
    help="Tokens that stand for a recorded block of 64; fewer is faster.",
)
def main(folder: Path, out: Path, block_tokens: int) -> None:
    """Two replicas share one daemon, on recorded traffic; exits non-zero if a promise is broken."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every process ends
    console = make_console()
    checks = Checks(console)
    started = time.monotonic()
    scale = Scale(block_tokens=block_tokens, vocab=VOCAB, requests=_REQUESTS)
    sessions = {path.stem: read_session(path, scale) for path in sorted(folder.glob("*.json"))[:_SESSIONS]}
    if len(sessions) < _SESSIONS:
        raise click.UsageError(f"--sessions {folder}: {len(sessions)} sessions, {_SESSIONS} are needed")
    try:
        with Cluster(out) as cluster:
            demo = Demo(console, checks, cluster, sessions)
            for act in (act_start, act_share, act_kill, act_return, act_agree):
                act(demo)
        _title(demo, 6, "The cliff: growing conversations on L1 alone, with L2, and with L3")
        show_cliff(console, checks, out)
    except (HiCacheError, KeyboardInterrupt) as error:
        console.print(f"\n[bold red]The demo failed:[/bold red] {escape(str(error) or 'interrupted')}")
        sys.exit(1)
    console.print()
    seconds = time.monotonic() - started
    if checks.broken:
        console.print(
            f"[bold red]{len(checks.broken)} promises broken[/bold red], {checks.kept} kept; logs in {out}"
        )
        sys.exit(1)
    console.print(
        f"[bold green]All {checks.kept} promises kept[/bold green] in {seconds:.0f} s; logs in {out}/"
    )
