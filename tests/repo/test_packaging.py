"""The package list in pyproject.toml, which discovery cannot make: two folders are mapped into hicache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
MAPPED = {"hicache": "hicache", "tiers": "hicache.tiers", "storage_backends": "hicache.storage_backends"}


def _setuptools() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project["tool"]["setuptools"]


def _packages_on_disk() -> set[str]:
    found = set()
    for folder, name in MAPPED.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def test_every_package_on_disk_is_in_the_list() -> None:
    """A package missing from the list would be silently absent from the wheel users install."""
    assert sorted(_setuptools()["packages"]) == sorted(_packages_on_disk())


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without __init__.py works in a checkout and is missing from the wheel."""
    bare = [
        str(module.parent.relative_to(ROOT))
        for folder in MAPPED
        for module in (ROOT / folder).rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    ]
    assert not bare


def test_the_mapped_folders_are_the_ones_on_disk() -> None:
    """tiers/ and storage_backends/ reach users under hicache. only through this map."""
    assert _setuptools()["package-dir"] == {name: folder for folder, name in MAPPED.items()}


@pytest.mark.parametrize("bare", ["tiers", "storage_backends"])
def test_the_bare_names_refuse_to_be_imported(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names for one module would give two classes, and isinstance would fail between them."""
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"hicache.{bare}"):
        __import__(bare)
