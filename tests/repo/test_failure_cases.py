"""The table of failure cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/failures"
ROWS = [line for line in (FOLDER / "CASES.md").read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip().replace(", ", "-"))
def test_a_case_names_files_and_tests_that_exist(row: str) -> None:
    """A case whose test was renamed would look as if it were still met."""
    source = ""
    for name in re.findall(r"`([^`]+)`", row):
        file, _, test = name.partition("::")
        if file and not re.search(r"\.py$|/", file):
            continue  # a name of something else
        if file:
            path = (ROOT if "/" in file else FOLDER) / file
            assert path.exists(), name
            source = path.read_text() if path.is_file() else ""
        assert not test or f"def {test}(" in source, name
