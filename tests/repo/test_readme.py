"""The README tells the truth: commands, flags, targets and links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from hicache.cache.accounts import Shortfall
from hicache.cli.main import cli
from hicache.daemon.misses import Fate
from hicache.tree.residency import Loss

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md", "docs/sglang.md")]


def _code_lines(document: Path) -> list[str]:
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]


def _commands() -> list[str]:
    lines = [line for document in DOCUMENTS for line in _code_lines(document)]
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    lines += re.findall(r"^\t@\$\(BIN\)/(hicache .*)$", recipes, re.MULTILINE)
    inline = [c for d in DOCUMENTS for c in re.findall(r"`(hicache [^`\n]+)`", d.read_text())]
    return sorted({line for line in lines + inline if line.startswith("hicache ")})


@pytest.mark.parametrize("line", _commands())
def test_a_command_in_the_documents_exists_with_its_flags(line: str) -> None:
    """What people paste must be accepted by the program they have."""
    words = shlex.split(line, comments=True)[1:]
    if "--" in words:
        words = words[: words.index("--")]  # the rest is for another program
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None, f"no such command: {line}"
        command = found
    known = {
        option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]
    }
    known |= {"--help", "-h", "--version"}
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= known, f"unknown flags in: {line}"


def test_make_targets_in_the_documents_exist() -> None:
    """The two commands that the README leads with must be there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^|`|\$ )make ([a-z-]+)", document.read_text(), re.MULTILINE))
        assert named <= targets, document


def test_files_linked_from_the_documents_exist() -> None:
    """A dead link is the first thing a reader meets."""
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_reason_is_explained() -> None:
    """A reason in a metric or an event that no page explains sends its reader to the code."""
    text = (ROOT / "README.md").read_text()
    for reasons in (Shortfall, Loss, Fate):
        missing = [reason.value for reason in reasons if f"`{reason.value}`" not in text]
        assert not missing, f"{reasons.__name__}: {missing}"
