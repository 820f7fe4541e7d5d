"""Change the code in one place, run the tests that must notice, and say which changes nobody noticed.

Works on a snapshot of the project, so files may be edited meanwhile. One process for each region collects
its tests; each mutant lives in a fork of that.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

from inside import MutantLoop, Result, first_failure, in_fork, run_region, where
from regions import NOT_MEANT, REGIONS, Region

from hicache.testing.mutation import Mutant, find_mutants, functions, mutate

ROOT = Path(__file__).parents[2]
REGIONS_FILE = "tests/mutation/regions.py"
SURVIVORS = Path(__file__).with_name("SURVIVORS.md")
CARRIED = ("hicache", "tiers", "storage_backends", "tests", "proto", "deploy", "pyproject.toml")
PRELOADED = ("numpy", "torch", "xxhash", "hypothesis", "msgspec", "prometheus_client")
# Smaller random histories: a mutant that needs the large ones is one that `make test` might miss as well.
ENVIRONMENT = {"HICACHE_HISTORY_OPS": "12000", "HICACHE_SIMULATIONS": "16", "OMP_NUM_THREADS": "1"}
OPTIONS = (
    *(
        "-q",
        "--timeout=300",
        "-m",
        "not thorough",
        "--rootdir=.",
        "--capture=no",
        "--no-header",
        "--no-summary",
    ),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # what is imported before the fork
)
AFRESH_S = 3600.0
STATUSES = ("killed", "timed out", "survived")


class MutantLoader(SourceFileLoader):
    """Runs a syntax tree in place of a file's."""

    def __init__(self, fullname: str, path: str, tree: ast.Module) -> None:
        super().__init__(fullname, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec")


class SnapshotFinder(MetaPathFinder):
    """Finds hicache in a snapshot, and a module that has a mutant in memory."""

    def __init__(self, snapshot: Path, mutant: Mutant | None = None) -> None:
        self._snapshot, self._mutant = snapshot, mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "hicache":
            return None
        file = where(self._snapshot, fullname)
        if not file.exists():
            return None
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        loader = SourceFileLoader(fullname, str(file))
        if self._mutant is not None and self._mutant.module == fullname:
            loader = MutantLoader(fullname, str(file), mutate(file.read_text(), self._mutant))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)


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
        source = where(root, module).read_text()
        for function in named(source, patterns):
            for mutant in find_mutants(module, source, function):
                draw = hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()
                if int.from_bytes(draw[:4], "big") < share * 2**32:
                    chosen.append(mutant)
    return chosen


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


class Results:
    """Results on disk, kept as they come; those of other code are hints only."""

    def __init__(self, file: Path, snapshot: str) -> None:
        self._file, self._snapshot = file, snapshot
        before = json.loads(file.read_text()) if file.exists() else {}
        kept, hints = ([Result(**one) for one in before.get(key, ())] for key in ("results", "hints"))
        self._all = {one.name: one for one in (*hints, *kept)}
        self._known = {one.name for one in kept} if before.get("snapshot") == snapshot else set()

    def of(self, mutant: Mutant) -> Result | None:
        return self._all[mutant.name] if mutant.name in self._known else None

    def hints(self, mutants: Sequence[Mutant]) -> dict[str, str]:
        return {m.name: self._all[m.name].by for m in mutants if m.name in self._all}

    def keep(self, result: Result) -> None:
        self._all[result.name] = result
        self._known.add(result.name)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        text: dict[str, object] = {"snapshot": self._snapshot}
        text["results"] = [asdict(one) for name, one in self._all.items() if name in self._known]
        text["hints"] = [asdict(one) for name, one in self._all.items() if name not in self._known]
        partial.write_text(json.dumps(text, indent=1))
        partial.replace(self._file)


def try_region(snapshot: Path, region: Region, mutants: Sequence[Mutant], results: Results) -> str:
    """Try the mutants of a region in a process of its own; return what went wrong with its tests."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _be_region(snapshot, region, mutants, results.hints(mutants), send)
    os.close(send)
    wrong = "its process crashed"
    by_name = {mutant.name: mutant for mutant in mutants}
    with os.fdopen(receive, encoding="utf-8") as pipe:
        for line in pipe:
            told = json.loads(line)
            if isinstance(told, str):
                wrong = told
                continue
            result = Result(**told)
            if result.status == "unsure":
                result = _try_afresh(snapshot, region, by_name[result.name], result)
            results.keep(result)
            row = f"{result.seconds:6.2f} s {result.tests:4} tests  {result.status:9}"
            sys.stdout.write(f"{row} {result.name}  {result.by}\n")
            sys.stdout.flush()
    os.waitpid(child, 0)
    return wrong


def _try_afresh(snapshot: Path, region: Region, mutant: Mutant, result: Result) -> Result:
    """Import the program and collect the tests under the mutant."""

    def test() -> str:
        _enter(snapshot, mutant)
        return first_failure(OPTIONS, region.tests)

    status, name = in_fork(test, AFRESH_S)
    if status == "ended":
        status = "killed" if name else "survived"
    return replace(result, status=status, by=str(name))


def _enter(snapshot: Path, mutant: Mutant | None = None) -> None:
    """Let this process find the program in the snapshot, and nothing that was imported before."""
    os.chdir(snapshot)
    os.environ.update(ENVIRONMENT)
    for name in [n for n in sys.modules if n.partition(".")[0] == "hicache"]:
        del sys.modules[name]
    sys.meta_path.insert(0, SnapshotFinder(snapshot, mutant))


def _be_region(
    snapshot: Path, region: Region, mutants: Sequence[Mutant], hints: dict[str, str], send: int
) -> None:
    """Become the process of a region; does not return."""

    def tell(what: object) -> None:
        os.write(send, json.dumps(what).encode() + b"\n")

    _enter(snapshot)
    files = {m.module: where(snapshot, m.module) for m in mutants}
    sources = [(m, str(files[m.module]), files[m.module].read_text()) for m in mutants]
    loop = MutantLoop(region.name, sources, hints, lambda result: tell(asdict(result)))
    wrong = "its tests could not be run"
    try:
        wrong = run_region(OPTIONS, region.tests, loop)
    finally:
        tell(wrong)
        os._exit(0)


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
        row = [sum(n for (r, s), n in counts.items() if name in ("", r) and s == one) for one in STATUSES]
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


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = arguments.add_argument
    add("--share", type=float, default=0.2, help="share of all mutants to try (0.2)")
    add("--seed", type=int, default=1, help="which share (1)")
    add("--region", action="append", default=[], help="only regions with this in their name; may be repeated")
    add("--only", default="", help="only mutants with this in their name")
    add("--json", type=Path, default=ROOT / "out/mutants.json", help="results, to go on from")
    add("--list", action="store_true", help="list the mutants and try none")
    given = arguments.parse_args()
    regions = [r for r in REGIONS if not given.region or any(part in r.name for part in given.region)]
    with tempfile.TemporaryDirectory(prefix="hicache-mutants-") as folder:
        snapshot = Path(folder)
        results = Results(given.json, take_snapshot(snapshot))
        done: list[Result] = []
        for region in regions:
            drawn = list_mutants(snapshot, region, given.share, given.seed)
            mutants = [m for m in drawn if given.only in m.name]
            if given.list:
                sys.stdout.writelines(f"{region.name}: {m.name}\n" for m in mutants)
                continue
            for name in PRELOADED:
                importlib.import_module(name)
            new = [m for m in mutants if results.of(m) is None]
            wrong = try_region(snapshot, region, new, results) if new else ""
            if wrong:
                sys.stderr.write(f"{region.name}: {wrong}\n")
                return 2
            done += [found for m in mutants if (found := results.of(m)) is not None]
    return 0 if given.list else report(done, whole=not given.region and not given.only)


if __name__ == "__main__":
    sys.exit(main())
