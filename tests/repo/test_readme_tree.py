"""The annotated tree in the README is the real tree. Run this file to write it anew."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"

# Folders shown with every module; the rest of the top level has one line each, here.
WITH_MODULES = ["hicache", "tiers", "storage_backends"]
TOP_LEVEL = {
    "proto": "the wire contract of the daemon; generated code goes to hicache/rpc/v1",
    "deploy": "Dockerfile, compose, systemd, Kubernetes, Prometheus, and hicache.toml with every option",
    "bench": "results, and scripts for machines with a GPU",
    "tests": "unit, contract, stateful, service, gpu, repo; traces cut from real agent sessions",
}
_WIDTH = 34


def _summary(module: Path) -> str:
    """The first sentence of a module's docstring, which says what the file decides."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)])[.;](?:\s|$)", first, maxsplit=1)[0].rstrip(".")
    if len(sentence) <= 96:
        return sentence
    cut = max(sentence.rfind(mark, 0, 96) for mark in (", ", ": ", " (", " - "))
    return sentence[: cut if cut > 40 else 96].rstrip(",:( ")


def _line(depth: int, name: str, what: str) -> str:
    return f"{'  ' * depth}{name}".ljust(_WIDTH) + (f"  {what}" if what else "")


def _tracked(folder: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return [folder / name for name in listed.stdout.split("\0") if name and (folder / name).exists()]


def _folder(folder: Path, depth: int, shown_as: str) -> list[str]:
    tracked = _tracked(folder)
    init = folder / "__init__.py"
    lines = [_line(depth, shown_as, _summary(init) if init.exists() else "")]
    for module in sorted(path for path in tracked if path.parent == folder):
        if module.name not in ("__init__.py", "__main__.py") and "_pb2" not in module.name:
            lines.append(_line(depth + 1, module.name, _summary(module)))
    for child in sorted(p.parent for p in tracked if p.name == "__init__.py" and p.parent.parent == folder):
        lines += _folder(child, depth + 1, f"{child.name}/")
    return lines


def render(root: Path) -> str:
    lines: list[str] = []
    for name in WITH_MODULES:
        lines += _folder(root / name, 0, f"{name}/")
    for name, what in TOP_LEVEL.items():
        if (root / name).is_dir():
            lines.append(_line(0, f"{name}/", what))
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def test_the_tree_in_the_readme_is_the_real_tree() -> None:
    """A newcomer follows the tree; a file it lacks or invents sends them the wrong way."""
    text = README.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert shown.strip() == render(ROOT).strip(), "run: python tests/repo/test_readme_tree.py"


def test_every_module_says_what_it_is_for() -> None:
    """A line without an annotation tells a reader nothing."""
    bare = [line for line in render(ROOT).splitlines() if re.fullmatch(r"\s*\S+\.py", line)]
    assert not bare


if __name__ == "__main__":
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{render(ROOT)}\n{END}{rest.split(END)[1]}")
