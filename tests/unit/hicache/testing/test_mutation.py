"""Mutants are found by fixed rules, have stable names, and change exactly what they say."""

from __future__ import annotations

import ast
import textwrap

import pytest

from hicache.testing.mutation import Mutant, find_mutants, functions, mutate

SOURCE = textwrap.dedent(
    '''
    class Pool:
        """Says min(1, 2)."""

        def take(self, count: int = 1) -> list[int] | None:
            """Return `count` < 5 slots."""
            if count > len(self.free) or not self.open:
                logger.info("%d of %d", count, 3)
                return None
            if count < 0:
                raise ValueError(f"{count + 1} is too few")
            taken = self.free[-count:]
            self.taken += count
            self.note(taken, max(count, 2))
            return taken


    def other(a, b):
        return a == b
    '''
)


def found() -> list[Mutant]:
    return find_mutants("pool", SOURCE, "Pool.take")


def test_every_operator_finds_its_places_and_nothing_that_is_only_said() -> None:
    """A mutant of a message or an annotation would survive for no reason, and hide those that matter."""
    assert {(m.operator, m.before, m.after) for m in found()} == {
        (
            "negate",
            "count > len(self.free) or not self.open",
            "not (count > len(self.free) or not self.open)",
        ),
        ("connect", "count > len(self.free) or not self.open", "count > len(self.free) and (not self.open)"),
        ("compare", "count > len(self.free)", "count >= len(self.free)"),
        ("negate", "not self.open", "self.open"),
        ("negate", "count < 0", "not count < 0"),
        ("compare", "count < 0", "count <= 0"),
        ("constant", "0", "1"),
        ("drop", "raise ValueError(f'{count + 1} is too few')", "pass"),
        ("shift", "-count", "-count + 1"),
        ("drop", "self.taken += count", "pass"),
        ("drop", "self.note(taken, max(count, 2))", "pass"),
        ("swap", "self.note(taken, max(count, 2))", "self.note(max(count, 2), taken)"),
        ("opposite", "max(count, 2)", "min(count, 2)"),
        ("constant", "2", "3"),
    }


def test_a_mutant_differs_from_its_source_in_what_it_names_only() -> None:
    """A mutant that changed anything else would be killed for another reason than it says."""
    said, original = ast.unparse(ast.parse(SOURCE)).split(" slots.")
    for mutant in found():
        still, changed = ast.unparse(mutate(SOURCE, mutant)).split(" slots.")
        assert still == said
        assert changed == original.replace(mutant.before, mutant.after, 1) != original, mutant.name
        compile(mutate(SOURCE, mutant), "pool.py", "exec")


def test_names_survive_edits_elsewhere_and_tell_equal_changes_apart() -> None:
    """The list of harmless survivors would be worth nothing after the next edit."""
    moved = "import os\n\n\n" + SOURCE.replace("def other", "def first():\n    return 1 + 1\n\n\ndef other")
    assert [m.name for m in find_mutants("pool", moved, "Pool.take")] == [m.name for m in found()]
    names = [m.name for m in find_mutants("pool", moved, "first")]
    assert names == [
        "pool:first arithmetic: 1 + 1 => 1 - 1",
        "pool:first constant: 1 => 2",
        "pool:first constant: 1 => 2 (no. 2)",
    ]


def test_a_mutant_of_another_source_is_refused() -> None:
    """It would change some other place, and its result would be told under the wrong name."""
    with pytest.raises(ValueError, match="not the one"):
        mutate(SOURCE.replace("count < 0", "count < 1"), found()[5])


def test_functions_are_known_by_their_qualified_names() -> None:
    """A region names a method by its class."""
    assert list(functions(SOURCE)) == ["Pool.take", "other"]
