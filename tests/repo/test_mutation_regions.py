"""The regions of mutation tests name code and tests that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/mutation"))
_spec = importlib.util.spec_from_file_location("mutation_run", ROOT / "tests/mutation/run.py")
assert _spec is not None
assert _spec.loader is not None
mutation_run = importlib.util.module_from_spec(_spec)
sys.modules["mutation_run"] = mutation_run
_spec.loader.exec_module(mutation_run)
sys.path.remove(str(ROOT / "tests/mutation"))


@pytest.mark.parametrize("region", mutation_run.REGIONS, ids=lambda region: region.name.replace(" ", "-"))
def test_a_region_names_functions_and_tests_that_exist(region: mutation_run.Region) -> None:
    """A function that was renamed would silently never be changed again."""
    assert mutation_run.list_mutants(ROOT, region, 1.0, 1)
    for test in region.tests:
        assert (ROOT / test.removeprefix("--deselect=").partition("::")[0]).exists()


def test_results_of_other_code_are_hints_and_never_counted(tmp_path: Path) -> None:
    """A run that is stopped and gone on with after an edit would count what it has not tried again."""
    old, new = mutation_run.list_mutants(ROOT, mutation_run.REGIONS[0], 1.0, 1)[:2]
    results = [
        mutation_run.Result(mutant.name, "leases", 1, "killed", f"test {mutant.number}", 1, 0.1)
        for mutant in (old, new)
    ]
    mutation_run.Results(tmp_path / "r.json", "before").keep(results[0])
    mutation_run.Results(tmp_path / "r.json", "after").keep(results[1])
    again = mutation_run.Results(tmp_path / "r.json", "after")
    assert again.of(old) is None
    assert again.of(new) == results[1]
    assert set(again.hints([old, new])) == {old.name, new.name}
