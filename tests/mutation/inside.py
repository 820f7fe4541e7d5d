"""Inside pytest: tests are collected once, then each mutant lives in a fork that runs those that reach it.

A mutant replaces the code of one function object, so everything that refers to the function sees it. What
a function was called for while tests were collected has been done by its old code: see Result.status.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest

from hicache.testing.mutation import Mutant, functions_in, mutate

MEMORY_BYTES = 12 << 30  # of addresses; a mutant that loops may also allocate
BASELINE_S = 3600.0
HANG_S = 3600.0  # of a mutant that waits for ever, which TEST_CPU_S cannot see
TEST_CPU_S = 15.0  # of one test; computing time, so that a busy machine does not look like a mutant
TELL = "__hicache_mutants_reached__"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant. `by` is the test that noticed; `tests` are those that reach it.

    `status` is killed, survived or timed out; or unsure: it survived, but its function has also been called
    while tests were collected, so they have to be collected under the mutant.
    """

    name: str
    region: str
    line: int
    status: str
    by: str
    tests: int
    seconds: float


class FirstFailure:
    """Remembers what failed first."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid


class MutantLoop:
    """A pytest plugin that runs the collected tests once for the code as it is, and once for each mutant."""

    def __init__(
        self,
        region: str,
        mutants: Sequence[tuple[Mutant, str, str]],
        hints: dict[str, str],
        tell: Callable[[Result], None],
    ) -> None:
        """`mutants` come with their module's file and source; `hints` are tests that noticed them before."""
        self._region, self._mutants, self._hints, self._tell = region, mutants, hints, tell
        self._reached: dict[str, list[str]] = {}  # tests, by module:function
        self._called_early: set[tuple[str, int]] = set()  # file and line of functions
        self._called: set[str] = set()  # by the test that runs
        self._made_by: dict[str, set[str]] = {}  # what shared fixtures called when they were made, by name
        self.broken = ""

    def pytest_sessionstart(self) -> None:
        sys.setprofile(self._note_early)

    def _note_early(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._called_early.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        before, self._called = self._called, set()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._made_by.setdefault(fixturedef.argname, set()).update(self._called)
            self._called |= before

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        if session.testsfailed:
            self.broken = "its tests cannot be collected"
            return True
        status, answer = in_fork(lambda: self._baseline(session), BASELINE_S)
        if status != "ended" or answer["failed"]:
            self.broken = f"its tests do not pass on the code as it is: {status} {answer}"
            return True
        self._reached = answer["reached"]
        for mutant, file, source in self._mutants:
            self._tell(self._try(session, mutant, file, source))
        return True

    def _baseline(self, session: pytest.Session) -> dict[str, object]:
        """Run every test, noting who calls the functions that are going to be changed."""
        sources = {mutant.module: (file, source) for mutant, file, source in self._mutants}
        functions = {(m.module, m.function) for m, _, _ in self._mutants}
        for module, (file, source) in sources.items():
            tree = telling(source, module, {name for where, name in functions if where == module})
            code = compile(tree, file, "exec")
            for name in [name for where, name in functions if where == module]:
                function_of(module, name).__code__ = code_of(code, name)
        setattr(builtins, TELL, lambda name: self._called.add(name))
        reached: dict[str, list[str]] = {f"{module}:{name}": [] for module, name in functions}
        first = FirstFailure()
        session.config.pluginmanager.register(first)
        for item, following in _with_next(session.items):
            self._called.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            names: Sequence[str] = getattr(item, "fixturenames", ())
            for name in self._called.union(*(self._made_by.get(fixture, ()) for fixture in names)):
                reached[name].append(item.nodeid)
            if first.name:
                break
        return {"failed": first.name, "reached": reached}

    def _try(self, session: pytest.Session, mutant: Mutant, file: str, source: str) -> Result:
        started = time.monotonic()
        reached = set(self._reached[f"{mutant.module}:{mutant.function}"])
        items = [item for item in session.items if item.nodeid in reached]
        hint = self._hints.get(mutant.name, "")
        items.sort(key=lambda item: item.nodeid != hint)

        def test() -> str:
            install(mutate(source, mutant), mutant, file)
            return _first_to_fail(session, items)

        status, name = in_fork(test, HANG_S) if items else ("ended", "")
        if status == "ended":
            code = function_of(mutant.module, mutant.function).__code__
            early = (code.co_filename, code.co_firstlineno) in self._called_early
            status = "killed" if name else "unsure" if early else "survived"
        seconds = round(time.monotonic() - started, 2)
        return Result(mutant.name, self._region, mutant.line, status, str(name), len(items), seconds)


def first_failure(options: Sequence[str], tests: Sequence[str]) -> str:
    """Collect and run tests in this process, up to the first that fails; return its name."""
    first = FirstFailure()
    code = pytest.main([*options, "-x", *tests], plugins=[first])
    return first.name or ("" if code == pytest.ExitCode.OK else f"pytest ended with {code!r}")


def _first_to_fail(session: pytest.Session, items: Sequence[pytest.Item]) -> str:
    first = FirstFailure()
    session.config.pluginmanager.register(first)
    signal.signal(signal.SIGPROF, _too_long)
    for item, following in _with_next(items):
        signal.setitimer(signal.ITIMER_PROF, TEST_CPU_S)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if first.name:
            break
    return first.name


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"the test has computed for {TEST_CPU_S} s")


def _with_next(items: Sequence[pytest.Item]) -> list[tuple[pytest.Item, pytest.Item | None]]:
    return list(zip(items, [*items[1:], None], strict=True))


def function_of(module: str, function: str) -> FunctionType:
    """Return the function object of a name, whatever it is wrapped in."""
    found: object = importlib.import_module(module)
    for name in function.split("."):
        found = vars(found)[name]
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        inner = [
            getattr(found, "__wrapped__", None),
            getattr(found, "fget", None),
            getattr(found, "__func__", None),
        ]
        found = next(one for one in inner if one is not None)
    return found


def code_of(code: CodeType, function: str) -> CodeType:
    """Return the code of a function in that of its module."""
    for name in function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code


def telling(source: str, module: str, names: set[str]) -> ast.Module:
    """Return a module in which these functions tell when they are called."""
    tree = ast.parse(source)
    for name, function in functions_in(tree).items():
        if name in names:
            call = ast.Call(ast.Name(TELL, ast.Load()), [ast.Constant(f"{module}:{name}")], [])
            function.body.insert(0, ast.Expr(call))
    return ast.fix_missing_locations(tree)


def install(tree: ast.Module, mutant: Mutant, file: str) -> None:
    """Give a function the code that it has in a changed module."""
    code = code_of(compile(tree, file, "exec"), mutant.function)
    function_of(mutant.module, mutant.function).__code__ = code


def in_fork(work: Callable[[], object], limit_s: float) -> tuple[str, object]:
    """Do work in a forked process and return what it says: ("ended", answer), or how it went wrong.

    The process, and all that it started, is gone afterwards.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _work_and_leave(work, send)
    os.close(send)
    answer = bytearray()
    until = time.monotonic() + limit_s
    status = "killed"
    with os.fdopen(receive, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                status = "timed out"
                break
            piece = pipe.read(1 << 16)
            if not piece:
                break
            answer += piece
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)  # before it had a group of its own; a zombie until it is waited for
    os.waitpid(child, 0)
    if status == "timed out":
        return status, ""
    return ("ended", json.loads(answer)) if answer else (status, "the process crashed")


def _work_and_leave(work: Callable[[], object], send: int) -> None:
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        answer = json.dumps(work()).encode()
        while answer:
            answer = answer[os.write(send, answer) :]
    except BaseException:  # noqa: BLE001  # whatever it is, the process ends here
        traceback.print_exc()
    finally:
        os._exit(0)


def run_region(
    options: Sequence[str],
    tests: Sequence[str],
    loop: MutantLoop,
) -> str:
    """Run pytest for one region in this process; return what is wrong with it, if anything is."""
    code = pytest.main([*options, *tests], plugins=[loop])
    return loop.broken or ("" if code == pytest.ExitCode.OK else f"pytest ended with {code!r}")


def where(root: Path, module: str) -> Path:
    """Return the file of a module in a tree laid out as the repository is."""
    elsewhere = {"hicache.tiers": "tiers", "hicache.storage_backends": "storage_backends"}
    for package, folder in elsewhere.items():
        if f"{module}.".startswith(f"{package}."):
            base = root.joinpath(folder, *module.split(".")[len(package.split(".")) :])
            break
    else:
        base = root.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
