"""Change the code in one place, run the tests that must notice, and say which changes nobody noticed.

Works on a snapshot of the project, so files may be edited meanwhile. Each mutant lives in a forked
process of its own, which finds the changed module in memory; the parent holds what is slow to import.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

import pytest
from regions import NOT_MEANT, REGIONS, Region

from hicache.testing.mutation import Mutant, find_mutants, functions, mutate

ROOT = Path(__file__).parents[2]
REGIONS_FILE = "tests/mutation/regions.py"
SURVIVORS = Path(__file__).with_name("SURVIVORS.md")
CARRIED = ("hicache", "tiers", "storage_backends", "tests", "proto", "deploy", "pyproject.toml")
ELSEWHERE = {"hicache.tiers": "tiers", "hicache.storage_backends": "storage_backends"}
PRELOADED = (
    "numpy",
    "torch",
    "xxhash",
    "hypothesis",
    "msgspec",
    "prometheus_client",
)
# Smaller random histories: a mutant that needs the large ones is one that `make test` might miss as well.
ENVIRONMENT = {
    "HICACHE_HISTORY_OPS": "24000",
    "HICACHE_HISTORIES": "16",
    "OMP_NUM_THREADS": "1",
}
TEST_SECONDS = 20  # of one test, before it counts as hanging
OPTIONS = (
    *("-x", "-q", f"--timeout={TEST_SECONDS}", "-m", "not thorough", "--rootdir=."),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # what is imported before the fork
)
MEMORY_BYTES = 8 << 30  # a mutant that loops may also allocate


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant. `by` is the test that noticed."""

    name: str
    region: str
    line: int
    status: str  # killed, survived, timed out
    by: str
    seconds: float


class SnapshotFinder(MetaPathFinder):
    """Finds hicache in a snapshot, and one of its modules in memory."""

    def __init__(self, snapshot: Path, module: str, tree: ast.Module | None) -> None:
        self._snapshot, self._module, self._tree = snapshot, module, tree

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "hicache":
            return None
        file = source_file(self._snapshot, fullname)
        if not file.exists():
            return None
        tree = self._tree if fullname == self._module else None
        loader = (
            SourceFileLoader(fullname, str(file)) if tree is None else MutantLoader(fullname, str(file), tree)
        )
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)


class MutantLoader(SourceFileLoader):
    """Runs a syntax tree in place of a file's."""

    def __init__(self, fullname: str, path: str, tree: ast.Module) -> None:
        super().__init__(fullname, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec")  # type: ignore[no-any-return]


class FirstFailure:
    """A pytest plugin that remembers what failed first."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"import of {report.nodeid}"


def source_file(root: Path, module: str) -> Path:
    """Return the file of a module in a tree laid out as the repository is."""
    for package, folder in ELSEWHERE.items():
        if f"{module}.".startswith(f"{package}."):
            base = root.joinpath(folder, *module.split(".")[len(package.split(".")) :])
            break
    else:
        base = root.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def named(source: str, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the functions that a region names. Raises KeyError for one that does not exist."""
    known = functions(source)
    for pattern in patterns:
        found = [name for name in known if name == pattern]
        if pattern.endswith("*"):
            found = [name for name in known if name.startswith(pattern[:-1])]
            found = [name for name in found if name.rpartition(".")[2] not in NOT_MEANT]
        if not found:
            raise KeyError(f"no function {pattern}; name it as it is called now in {REGIONS_FILE}")
        yield from found


def list_mutants(root: Path, region: Region, share: float, seed: int) -> list[Mutant]:
    """Return a share of a region's mutants, drawn by name: edits elsewhere do not change the draw."""
    chosen = []
    for module, patterns in region.functions.items():
        source = source_file(root, module).read_text()
        for function in named(source, patterns):
            for mutant in find_mutants(module, source, function):
                draw = hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()
                if int.from_bytes(draw[:4], "big") < share * 2**32:
                    chosen.append(mutant)
    return chosen


def run_tests(snapshot: Path, mutant: Mutant | None, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Run tests in a process of their own, up to the first failure; return a status and what failed."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _be_tested(snapshot, mutant, tests, send)
    os.close(send)
    answer = b""
    until = time.monotonic() + limit_s
    with os.fdopen(receive, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            piece = pipe.read(65536)
            if not piece:
                break
            answer += piece
        else:
            answer = b'["timed out", ""]'
    with _ignored(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    status, name = json.loads(answer or b'["killed", "the process crashed"]')
    return status, name


def _be_tested(snapshot: Path, mutant: Mutant | None, tests: Sequence[str], send: int) -> None:
    """Become the process that runs tests; does not return."""
    try:
        os.setsid()
        if mutant is not None:
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        os.chdir(snapshot)
        os.environ.update(ENVIRONMENT)
        tree = None
        if mutant is not None:
            tree = mutate(source_file(snapshot, mutant.module).read_text(), mutant)
        for name in [n for n in sys.modules if n.partition(".")[0] == "hicache"]:
            del sys.modules[name]
        sys.meta_path.insert(0, SnapshotFinder(snapshot, mutant.module if mutant is not None else "", tree))
        first = FirstFailure()
        code = pytest.main([*OPTIONS, *tests], plugins=[first])
        status = {0: "survived", 4: "no such test", 5: "no such test"}.get(int(code), "killed")
        os.write(send, json.dumps([status, first.name]).encode())
    except BaseException:  # noqa: BLE001  # whatever it is, the process ends here
        traceback.print_exc()
    finally:
        os._exit(0)


class _ignored:
    """contextlib.suppress without an import of its own in a forked process."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return kind is not None and issubclass(kind, self._errors)


def take_snapshot(target: Path) -> str:
    """Copy what tests need; return a digest of the copy, which tells whose results are whose."""
    for name in CARRIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    digest = hashlib.sha256()
    for file in sorted(target.rglob("*.py")):
        digest.update(str(file.relative_to(target)).encode() + file.read_bytes())
    return digest.hexdigest()


def check_region(snapshot: Path, region: Region) -> float:
    """Return how long a region's tests take on the code as it is. Raises SystemExit unless they pass."""
    started = time.monotonic()
    status, name = run_tests(snapshot, None, region.tests, 900)
    if status != "survived":
        sys.exit(f"{region.name}: the tests do not pass on the code as it is: {status} {name}")
    return time.monotonic() - started


def try_mutant(snapshot: Path, region: Region, mutant: Mutant, hint: str, limit_s: float) -> Result:
    """Run the test that noticed a mutant before, then all of its region's."""
    started = time.monotonic()
    status, name = "", ""
    if "::" in hint:
        status, name = run_tests(snapshot, mutant, [hint], limit_s)
    if status != "killed":
        status, name = run_tests(snapshot, mutant, region.tests, limit_s)
    return Result(mutant.name, region.name, mutant.line, status, name, round(time.monotonic() - started, 1))


def explained() -> set[str]:
    """Return the names of the survivors that SURVIVORS.md says are harmless."""
    text = SURVIVORS.read_text() if SURVIVORS.exists() else ""
    return set(re.findall(r"^- `(.+)`", text, flags=re.MULTILINE))


def report(results: Sequence[Result], *, whole: bool) -> int:
    """Print the counts and what nobody explains; return the exit status."""
    out = sys.stdout.write
    counts = Counter((r.region, r.status) for r in results)
    out(f"\n{'region':42} {'mutants':>8} {'killed':>8} {'timed out':>10} {'survived':>9}\n")
    for name in [*dict.fromkeys(r.region for r in results), ""]:
        row = [
            sum(n for (r, s), n in counts.items() if name in ("", r) and s == status) for status in STATUSES
        ]
        out(f"{name or 'all':42} {sum(row):8} {row[0]:8} {row[1]:10} {row[2]:9}\n")
    harmless = explained()
    survivors = [r for r in results if r.status == "survived"]
    unexplained = [r for r in survivors if r.name not in harmless]
    stale = sorted(harmless - {r.name for r in survivors}) if whole else []
    for result in unexplained:
        out(f"survived, and nobody says why: {result.name} (line {result.line}, {result.region})\n")
    for name in stale:
        out(f"listed in {SURVIVORS.name}, but does not survive: {name}\n")
    return 1 if unexplained or stale else 0


STATUSES = ("killed", "timed out", "survived")


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add("--share", type=float, default=0.25, help="share of all mutants to try (0.25)")
    add("--seed", type=int, default=1, help="which share (1)")
    add(
        "--region", action="append", default=[], help="only regions whose name contains this; may be repeated"
    )
    add("--only", default="", help="only mutants with this in their name")
    add(
        "--json", type=Path, default=ROOT / "out/mutants.json", help="results; a run that was stopped goes on"
    )
    add("--list", action="store_true", help="list the mutants and try none")
    given = arguments.parse_args()
    regions = [r for r in REGIONS if not given.region or any(part in r.name for part in given.region)]
    with tempfile.TemporaryDirectory(prefix="hicache-mutants-") as folder:
        snapshot = Path(folder)
        digest = take_snapshot(snapshot)
        plan = [
            (
                region,
                [m for m in list_mutants(snapshot, region, given.share, given.seed) if given.only in m.name],
            )
            for region in regions
        ]
        if given.list:
            sys.stdout.writelines(f"{region.name}: {m.name}\n" for region, mutants in plan for m in mutants)
            return 0
        results = _try_all(snapshot, digest, plan, given.json)
    return report(results, whole=not given.region and not given.only)


def _try_all(
    snapshot: Path, digest: str, plan: Sequence[tuple[Region, Sequence[Mutant]]], kept: Path
) -> list[Result]:
    """Try every mutant that the kept results do not tell of, and keep the results as they come."""
    for name in PRELOADED:
        importlib.import_module(name)
    before = json.loads(kept.read_text()) if kept.exists() else {"results": []}
    known = {r["name"]: Result(**r) for r in before["results"]}
    current = before.get("snapshot") == digest
    results: list[Result] = []
    total = sum(len(mutants) for _, mutants in plan)
    for region, mutants in plan:
        seconds = 0.0
        for mutant in mutants:
            old = known.get(mutant.name)
            if old is not None and current:
                results.append(old)
                continue
            seconds = seconds or check_region(snapshot, region)
            hint = old.by if old is not None else ""
            results.append(try_mutant(snapshot, region, mutant, hint, max(60.0, 6 * seconds)))
            last = results[-1]
            sys.stdout.write(
                f"{len(results)}/{total} {last.seconds:5.1f} s {last.status:9} {last.name}  {last.by[-90:]}\n"
            )
            sys.stdout.flush()
            _keep(
                kept, digest, [*results, *(r for n, r in known.items() if n not in {x.name for x in results})]
            )
    return results


def _keep(kept: Path, digest: str, results: Sequence[Result]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps({"snapshot": digest, "results": [asdict(r) for r in results]}, indent=1))
    partial.replace(kept)


if __name__ == "__main__":
    sys.exit(main())
