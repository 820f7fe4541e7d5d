"""Backends by name: nothing loaded before it is needed, and every refusal says what would work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache import registry
from hicache.errors import ConfigError
from hicache.registry import available_backends, create_backend, describe_options
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend

BUILT_IN = ("memory", "file", "redis", "mooncake", "grpc")
THIRD_PARTY = """
import msgspec
from hicache.storage_backends.base import StorageBackend
from hicache.storage_backends.memory import MemoryBackend

class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    token: str
    size: int = 7
    tags: list[str] = []

class Backend(MemoryBackend):
    @classmethod
    def from_options(cls, options):
        if options.token == "needs":
            import surely_not_installed_anywhere
        return cls(capacity_bytes=options.size)
"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    registry._sources.cache_clear()
    yield
    registry._sources.cache_clear()


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Install entry points, as (name, value, distribution), with the module above."""
    (tmp_path / "somebodys_store.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(str(tmp_path))

    def provide(*points: tuple[str, str, str]) -> None:
        found = [
            SimpleNamespace(
                name=name,
                module=value.partition(":")[0],
                attr=value.partition(":")[2],
                dist=SimpleNamespace(name=distribution),
            )
            for name, value, distribution in points
        ]
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else []
        )

    return provide


def test_built_in_backends_are_listed_without_loading_them() -> None:
    """`--help` would need every store's client library."""
    assert available_backends()[:5] == BUILT_IN
    script = (
        "import sys; from hicache.registry import available_backends; available_backends();"
        "print([m for m in sys.modules if 'storage_backends' in m or m.split('.')[0] in "
        "('grpc', 'redis', 'mooncake', 'torch')])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_options_reach_the_backend() -> None:
    """A limit given on the command line would be ignored."""
    backend = create_backend("memory", {"capacity_bytes": 4096})
    assert isinstance(backend, MemoryBackend)
    assert backend.stats().capacity_bytes == 4096
    backend.close()


def test_an_unknown_backend_lists_what_exists() -> None:
    """A typing slip would leave the operator searching the source."""
    for ask in (lambda: create_backend("memroy", {}), lambda: describe_options("memroy")):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert "'memroy'" in str(caught.value)
        assert all(name in str(caught.value) for name in BUILT_IN)


def test_an_unknown_option_lists_what_is_valid_with_types() -> None:
    """A misspelt option would silently do nothing."""
    with pytest.raises(ConfigError) as caught:
        create_backend("memory", {"capacity": 1})
    message = str(caught.value)
    assert "'memory'" in message
    assert "'capacity'" in message
    assert "capacity_bytes: int = 1073741824" in message


def test_a_malformed_option_is_named_but_its_value_is_not_shown() -> None:
    """The wrong option would have to be guessed; or a password would stand in the log."""
    with pytest.raises(ConfigError) as caught:
        create_backend("memory", {"lease_s": 1, "capacity_bytes": "hunter2"})
    message = str(caught.value)
    assert "option 'capacity_bytes': Expected `int`, got `str`" in message
    assert "lease_s: float" in message
    assert "hunter2" not in message


def test_a_value_out_of_range_says_which_range() -> None:
    """A refusal would name the type that was right and not the value that was wrong."""
    with pytest.raises(ConfigError, match="capacity_bytes=0 must be positive"):
        create_backend("memory", {"capacity_bytes": 0})


def test_a_missing_client_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack trace would stand where `pip install` should."""
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "hicache.storage_backends.redis", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[redis\]'"):
        create_backend("redis", {})


def test_third_parties_register_by_entry_point(provide: object) -> None:
    """A store of one's own would need a fork."""
    provide(("theirs", "somebodys_store:Backend", "somebodys-dist"))  # type: ignore[operator]
    assert available_backends() == (*BUILT_IN, "theirs")
    assert describe_options("theirs") == {"token": "str, required", "size": "int = 7", "tags": "list[str]"}
    backend = create_backend("theirs", {"token": "t", "size": 9})
    assert backend.stats().capacity_bytes == 9
    with pytest.raises(ConfigError, match="token"):
        create_backend("theirs", {})
    with pytest.raises(ConfigError, match="reinstall somebodys-dist"):
        create_backend("theirs", {"token": "needs"})


@pytest.mark.parametrize("name", ["memory", "theirs"])
def test_two_backends_of_one_name_are_refused(provide: object, name: str) -> None:
    """Which store is used would depend on the order of installation."""
    provide((name, "somebodys_store:Backend", "dist-a"), ("theirs", "somebodys_store:Backend", "dist-b"))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"is provided by (HiCache|dist-a) and by dist-[ab]"):
        available_backends()


def test_an_entry_point_to_something_else_is_refused(provide: object) -> None:
    """A mistake in somebody's packaging would end in an AttributeError."""
    provide(("theirs", "somebodys_store:Nothing", "dist"))  # type: ignore[operator]
    with pytest.raises(ConfigError, match="from_options"):
        create_backend("theirs", {})


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_name_leads_to_a_backend_of_that_name(name: str) -> None:
    """A backend that was renamed or moved could not be opened any more."""
    backend, _ = registry._load(name, registry._sources()[name])
    assert issubclass(backend, StorageBackend)
    assert backend.name == name
    assert describe_options(name)
