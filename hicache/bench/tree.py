"""`hicache bench tree`: the prefix tree alone, operation by operation, beside SGLang's cores on demand.

Every operation is timed on its own; tokens, slots and pools are prepared outside of the timed
regions and the garbage collector is off. `lock` includes touch(), so that ours and SGLang's match +
lock do the same work: SGLang stamps accesses while it matches.
"""

from __future__ import annotations

import enum
import gc
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hicache.bench.references import Row, run_references
from hicache.config.outputs import OutputFile
from hicache.errors import ConfigError
from hicache.tree import TreeRules, UnifiedTree, make_policy
from hicache.types import NO_SLOT, Component, Slots, Tier

FULL, SWA, MAMBA = Component.FULL, Component.SWA, Component.MAMBA
SETS: dict[str, tuple[Component, ...]] = {
    "full": (FULL,),
    "full+swa": (FULL, SWA),
    "full+mamba": (FULL, MAMBA),
    "full+swa+mamba": (FULL, SWA, MAMBA),
}
SHAPES = ("linear", "forked", "short")
OPERATIONS = ("match", "gather", "lock", "insert", "release", "evict")
WINDOW_TOKENS = 128
EVICT_TOKENS = 256
GROWTH_PAGES = (10_000, 100_000, 1_000_000)
DRIVER = Path(__file__).resolve().parents[2] / "bench" / "sglang_tree.py"

Result: TypeAlias = "dict[str, float | int | str]"
_clock = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: `turns` of tokens_in + tokens_out in each of `conversations`, round robin.

    linear: conversations only grow. forked: every turn gets a second answer, so that no span can be
    joined. short: two turns of one page each, prompts of one and three pages.
    """

    components: str
    shape: str
    page_size: int
    conversations: int
    turns: int
    tokens_in: int
    tokens_out: int
    seed: int = 1

    @property
    def window_pages(self) -> int:
        return -(-WINDOW_TOKENS // self.page_size) if SWA in SETS[self.components] else 0


def cases(
    sets: list[str], shapes: list[str], pages: list[int], conversations: list[int], turns: int
) -> list[Case]:
    """List the workloads of a run."""
    found = []
    for shape, name, page in itertools.product(shapes, sets, pages):
        if shape == "short":
            found.append(Case(name, shape, page, 256, 2, page, page))
        else:
            found += [Case(name, shape, page, convs, turns, 100, 100) for convs in conversations]
    return found


class _Slots:
    """Slots that are never used twice: what allocation costs is not the tree's."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> Slots:
        slots = array("i", range(self.next, self.next + count))
        self.next += count
        return slots


def run_case(case: Case) -> Result:
    """Time one workload on our core; medians in microseconds."""
    kinds = SETS[case.components]
    tree = UnifiedTree(TreeRules(case.page_size, kinds, case.window_pages), make_policy("lru"), host=False)
    rng = np.random.default_rng(case.seed)
    spent: dict[str, list[int]] = {name: [] for name in OPERATIONS}
    spent["match_last"] = []
    pools = {kind: _Slots() for kind in kinds}
    histories = [array("I") for _ in range(case.conversations)]
    now = 0.0
    gc.collect()
    gc.disable()
    for turn in range(case.turns):
        for history in histories:
            now += 1.0
            _turn(case, tree, history, rng, pools, spent, now)
            if turn == case.turns - 1:
                spent["match_last"].append(spent["match"][-1])
    pages = tree.resident(Tier.DEVICE, FULL)
    aside = _drain(case, tree, spent)
    gc.enable()
    if any(tree.resident(Tier.DEVICE, kind) for kind in kinds):
        raise RuntimeError(f"{case}: pages were left after eviction")
    out: Result = {"core": "hicache", **asdict(case), "pages": pages, **aside}
    for name, samples in spent.items():
        out[f"{name}_us"] = statistics.median(samples) / 1e3
    out["match_p99_us"] = sorted(spent["match"])[int(len(spent["match"]) * 0.99)] / 1e3
    out["insert_p99_us"] = sorted(spent["insert"])[int(len(spent["insert"]) * 0.99)] / 1e3
    return out


def _draw(rng: np.random.Generator, count: int) -> array[int]:
    return array("I", rng.integers(1, 100_000, count, dtype=np.uint32).tobytes())


def _turn(
    case: Case,
    tree: UnifiedTree,
    history: array[int],
    rng: np.random.Generator,
    pools: dict[Component, _Slots],
    spent: dict[str, list[int]],
    now: float,
) -> None:
    history.extend(_draw(rng, case.tokens_in))
    limit = len(history)

    a = _clock()
    found = tree.match(b"", history, limit)
    b = _clock()
    matched = found.device
    c = _clock()
    tree.slots(found, matched)
    d = _clock()
    lease = tree.lock(found, matched, Tier.DEVICE)
    tree.touch(lease, now)
    e = _clock()
    spent["match"].append(b - a)
    spent["gather"].append(d - c)
    spent["lock"].append(e - d)

    history.extend(_draw(rng, case.tokens_out))
    end = len(history) // case.page_size
    full, swa, states = _offer(case, matched, end, pools)
    a = _clock()
    done = tree.insert(lease, history, matched, end, full=full, swa=swa, states=states, now=now)
    b = _clock()
    tree.release(lease)
    c = _clock()
    spent["insert"].append(b - a)
    spent["release"].append(c - b)
    if done.duplicates or done.new_pages != end - matched:
        raise RuntimeError(f"{case}: {done.new_pages} new pages of {end - matched}")
    if case.shape == "forked":
        other = history[:limit] + _draw(rng, case.tokens_out)
        lease = tree.lock(tree.match(b"", other, limit), matched, Tier.DEVICE)
        full, swa, states = _offer(case, matched, end, pools)
        tree.insert(lease, other, matched, end, full=full, swa=swa, states=states, now=now)
        tree.release(lease)


def _offer(
    case: Case, start: int, end: int, pools: dict[Component, _Slots]
) -> tuple[Slots, Slots | None, list[tuple[int, int]]]:
    """Slots of a turn's new pages: SWA for the last window only, one state at the end."""
    count = end - start
    swa: Slots | None = None
    if SWA in pools:
        live = min(case.window_pages, count)
        swa = array("i", [NO_SLOT]) * (count - live) + pools[SWA].take(live)
    states = [(end, pools[MAMBA].take(1)[0])] if MAMBA in pools and count else []
    return pools[FULL].take(count), swa, states


def _drain(case: Case, tree: UnifiedTree, spent: dict[str, list[int]]) -> Result:
    """Tombstone some windows and states one by one, then empty the tree by FULL requests."""
    out: Result = {}
    for kind in SETS[case.components][1:]:
        samples = []
        for _ in range(min(case.conversations * case.turns // 2, tree.evictable(Tier.DEVICE, kind))):
            a = _clock()
            tree.evict(Tier.DEVICE, kind, 1)
            samples.append(_clock() - a)
        out[f"evict_{kind.name.lower()}_us"] = statistics.median(samples) / 1e3
    count = max(1, EVICT_TOKENS // case.page_size)
    while tree.resident(Tier.DEVICE, FULL):
        a = _clock()
        tree.evict(Tier.DEVICE, FULL, count)
        spent["evict"].append(_clock() - a)
    return out


class Caches(str, enum.Enum):
    """What the processor's caches hold before a timed match."""

    ACTIVE = "active"  # as many paths are asked for in each tree, as in a server whose users come and go
    WARM = "warm"  # any path is asked for: from some size on neither tokens nor tree fit in the caches
    COLD = "cold"  # nothing of the tree or the prompt: a forward pass ran in between


def run_growth(page_size: int, path_pages: int, queries: int, caches: Caches) -> list[Result]:
    """Time match of equally long paths in trees of 10 k, 100 k and 1 M pages, in random order.

    The trees take turns of 50 queries, so that a noisy moment of the machine meets all of them.
    """
    rng = np.random.default_rng(2)
    spoiler = np.zeros(8_000_000)  # 64 MB, larger than a last-level cache
    grown = {total: _grow(total // path_pages, path_pages, page_size, rng) for total in GROWTH_PAGES}
    samples: dict[int, list[int]] = {total: [] for total in GROWTH_PAGES}
    active = min(len(paths) for _, paths in grown.values())
    gc.collect()
    gc.disable()
    for _ in range(queries // 50):
        for total, (tree, paths) in grown.items():
            for i in rng.integers(0, active if caches is Caches.ACTIVE else len(paths), 50):
                tokens = array("I", paths[i])  # fresh from the request, as a server has it
                if caches is Caches.COLD:
                    spoiler += 1.0
                a = _clock()
                match = tree.match(b"", tokens, len(tokens))
                samples[total].append(_clock() - a)
                if match.device != path_pages:
                    raise RuntimeError(f"matched {match.device} of {path_pages} pages")
    gc.enable()
    shape: Result = {"page_size": page_size, "path_pages": path_pages, "caches": caches.value}
    return [
        {**shape, "pages": total, "match_p50_us": statistics.median(times) / 1e3}
        for total, times in samples.items()
    ]


def _grow(
    count: int, path_pages: int, page_size: int, rng: np.random.Generator
) -> tuple[UnifiedTree, list[array[int]]]:
    """Build a tree of `count` unrelated paths; return it and the paths."""
    tree = UnifiedTree(TreeRules(page_size, (FULL,)), make_policy("lru"), host=False)
    paths = [_draw(rng, path_pages * page_size) for _ in range(count)]
    for i, tokens in enumerate(paths):
        lease = tree.lock(tree.match(b"", tokens, len(tokens)), 0, Tier.DEVICE)
        tree.insert(lease, tokens, 0, path_pages, full=array("i", range(path_pages)), now=float(i))
        tree.release(lease)
    return tree, paths


# -- SGLang's cores --------------------------------------------------------------------------------


def _check_sglang(python: str) -> None:
    """Refuse at once what would fail after minutes of our own runs."""
    if not DRIVER.exists():
        raise ConfigError(f"--sglang-python needs a checkout: {DRIVER.name} is not part of the package")
    if shutil.which(python) is None:
        raise ConfigError(f"--sglang-python {python}: there is no such program")


def run_sglang(python: str, todo: list[tuple[Case, str]]) -> Iterator[Result]:
    """Run the same workloads on SGLang's tree cores, in an interpreter that has SGLang."""
    work = [
        {**asdict(case), "core": core, "window": WINDOW_TOKENS, "evict_tokens": EVICT_TOKENS}
        for case, core in todo
    ]
    with subprocess.Popen(
        [python, str(DRIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(work))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise ConfigError(f"--sglang-python {python}: the driver ended with {process.returncode}")


def environment() -> dict[str, str | int | float]:
    """Describe the machine that a result was measured on."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": model,
        "cpus": os.cpu_count() or 0,
        "load_1min": os.getloadavg()[0],
    }


def _key(result: Result) -> tuple[object, ...]:
    return tuple(result[k] for k in ("components", "shape", "page_size", "conversations"))


def _turn_us(result: Result) -> float:
    return sum(float(result[f"{name}_us"]) for name in OPERATIONS[:5])


def ratios(ours: list[Result], theirs: list[Result]) -> list[Result]:
    """Divide SGLang's medians by ours, per operation and for a turn of match to release."""
    mine = {_key(result): result for result in ours}
    out = []
    for result in theirs:
        own = mine.get(_key(result))
        if own is None or "error" in result:
            continue
        line: Result = {k: result[k] for k in ("core", "components", "shape", "page_size", "conversations")}
        for name in OPERATIONS:
            if f"{name}_us" in result:
                line[name] = float(result[f"{name}_us"]) / float(own[f"{name}_us"])
        line["turn"] = _turn_us(result) / _turn_us(own)
        out.append(line)
    return out


def _table(title: str, rows: list[Result], columns: tuple[str, ...], digits: int) -> Table:
    table = Table(title=title)
    for name in ("core", "components", "shape", "page", "convs"):
        table.add_column(name)
    for name in columns:
        table.add_column(name.removesuffix("_us"), justify="right")
    for row in rows:
        values = [f"{float(row[name]):.{digits}f}" if name in row else "-" for name in columns]
        table.add_row(
            *(str(row[k]) for k in ("core", "components", "shape", "page_size", "conversations")), *values
        )
    return table


def _growth(page_size: int) -> list[Result]:
    """Paths of about 5,000 tokens, or ten pages if those are longer."""
    path_pages = next(n for n in (5000, 1000, 100, 50, 10) if n * page_size <= 6400 or n == 10)
    queries = {Caches.ACTIVE: 2000, Caches.WARM: 2000, Caches.COLD: 100}
    return [line for caches, n in queries.items() for line in run_growth(page_size, path_pages, n, caches)]


def _growth_table(growth: list[Result]) -> Table:
    table = Table(title="match p50 in microseconds, by pages in the tree")
    for name in ("page", "tokens matched", "caches", "10 k", "100 k", "1 M", "1 M / 10 k"):
        table.add_column(name, justify="right")
    for i in range(0, len(growth), 3):
        first = growth[i]
        times = [float(line["match_p50_us"]) for line in growth[i : i + 3]]
        table.add_row(
            str(first["page_size"]),
            str(int(first["path_pages"]) * int(first["page_size"])),
            str(first["caches"]),
            *(f"{t:.1f}" for t in times),
            f"{times[2] / times[0]:.2f}",
        )
    return table


def _references_table(rows: list[Row]) -> Table:
    table = Table(title="evict 4 pages in microseconds, by the share of conversations that sessions refer to")
    for name in ("policy", "referred", "evict p50", "evict p99", "p50 / none referred", "close a session"):
        table.add_column(name, justify="right")
    none = {row["policy"]: float(row["evict_us"]) for row in rows if row["referred_percent"] == 0}
    for row in rows:
        times = [float(row[k]) for k in ("evict_us", "evict_p99_us")]
        ratio = times[0] / none[row["policy"]]
        cells = (*(f"{t:.1f}" for t in times), f"{ratio:.2f}", f"{float(row['close_us']):.1f}")
        table.add_row(str(row["policy"]), f"{row['referred_percent']} %", *cells)
    return table


def _numbers(_context: click.Context, option: click.Parameter, value: str) -> list[int]:
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of integers", param=option) from error
    if min(found) < 1:
        raise click.BadParameter(f"{value!r} must be positive", param=option)
    return found


def _names(known: tuple[str, ...]):  # type: ignore[no-untyped-def]
    def parse(_context: click.Context, option: click.Parameter, value: str) -> list[str]:
        found = value.split(",")
        for name in found:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}", param=option)
        return found

    return parse


@click.command("tree")
@click.option("--sets", default=",".join(SETS), callback=_names(tuple(SETS)), help="Component sets.")
@click.option("--shapes", default=",".join(SHAPES), callback=_names(SHAPES), help="Workload shapes.")
@click.option("--pages", default="1,64", callback=_numbers, help="Page sizes in tokens.")
@click.option("--conversations", default="1,8,64", callback=_numbers, help="Concurrent conversations.")
@click.option("--turns", default=200, type=click.IntRange(1), help="Turns of 100 + 100 tokens.")
@click.option("--sglang-python", help="An interpreter that has SGLang: its cores run the same workloads.")
@click.option("--sglang-cores", default="python,rust", callback=_names(("python", "rust")))
@click.option(
    "--sglang-slow-limit",
    default=8,
    type=click.IntRange(0),
    help="Leave out SGLang's Python core, which takes minutes, above this many conversations.",
)
@click.option("--json", "json_path", type=OutputFile(parents=True), help="Write results here.")
def tree_command(
    sets: list[str],
    shapes: list[str],
    pages: list[int],
    conversations: list[int],
    turns: int,
    sglang_python: str | None,
    sglang_cores: list[str],
    sglang_slow_limit: int,
    json_path: Path | None,
) -> None:
    """The prefix tree alone: match, gather, lock, insert, release and evict, in microseconds."""
    if sglang_python:
        _check_sglang(sglang_python)
    console = Console(width=max(Console().width, 125))
    todo = cases(sets, shapes, pages, conversations, turns)
    ours = [run_case(case) for case in track(todo, "hicache", console=console)]
    columns = tuple(f"{name}_us" for name in OPERATIONS)
    extra = ("evict_swa_us", "evict_mamba_us")
    console.print(_table("microseconds, median", ours, columns + extra, 1))
    growth = [line for page in pages for line in _growth(page)]
    console.print(_growth_table(growth))
    referred = run_references()
    console.print(_references_table(referred))
    report: dict[str, object] = {
        "environment": environment(),
        "results": ours,
        "growth": growth,
        "references": referred,
    }
    if sglang_python:
        work = [
            (case, core)
            for case in sorted(todo, key=lambda case: case.conversations * case.turns)
            for core in sglang_cores
            if core != "python" or case.shape == "short" or case.conversations <= sglang_slow_limit
        ]
        theirs: list[Result] = []
        for result in track(run_sglang(sglang_python, work), "sglang", total=len(work), console=console):
            theirs.append(result)
            if "error" in result:
                console.print(f"SGLang refused {_key(result)} on {result['core']}: {result['error']}")
            report |= {"sglang": theirs, "ratios": ratios(ours, theirs)}
            _write(json_path, report)  # after every case: the run takes minutes
        console.print(_table("SGLang, microseconds, median", theirs, columns, 1))
        console.print(_table("SGLang / hicache", ratios(ours, theirs), (*OPERATIONS, "turn"), 1))
    _write(json_path, report)
    if json_path is not None:
        console.print(f"wrote {json_path}")


def _write(path: Path | None, report: dict[str, object]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
