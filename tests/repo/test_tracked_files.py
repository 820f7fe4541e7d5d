"""What must not be in the repository: traces of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Spelled in pieces so that this file passes its own test.
_FORBIDDEN = {
    "a path of one machine": r"(?<![\w.-])/("
    + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me/"])
    + r")(/|\b)",
    "a package registry's host": "|".join(
        ["py" + r"pi\.org", "python" + "hosted", r"deb\." + "debian", "npm" + "js"]
    ),
    "a note to self": r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b",
}


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    """A path that exists on one machine, or a registry's address, breaks the project on every other."""
    found = []
    for path in _tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for what, pattern in _FORBIDDEN.items():
            for number, line in enumerate(text.splitlines(), 1):
                if re.search(pattern, line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_no_large_file_is_tracked() -> None:
    """A clone must stay quick: data above a megabyte does not belong here."""
    large = [str(p.relative_to(ROOT)) for p in _tracked() if p.stat().st_size > 1 << 20]
    assert not large


def test_ci_runs_the_tests_that_people_run() -> None:
    """A CI that ran something else would be green while `make test` fails."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert re.search(r"^exec make test\b|^make test\b", script.read_text(), re.MULTILINE)
