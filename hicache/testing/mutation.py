"""Small changes to a program, one at a time: would any test notice?

Finds every mutant of a function by fixed operators over its syntax tree, and builds the changed module.
Names of mutants are made of what they change, not of line numbers, so they survive edits elsewhere.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NAMES = {"min": "max", "max": "min", "bisect_left": "bisect_right", "bisect_right": "bisect_left"}
_TIERS = {"DEVICE": "HOST", "HOST": "DEVICE", "STORAGE": "HOST"}
_COMMUTE = frozenset({"isinstance", "min", "max"})
_UNSEEN = (ast.Raise, ast.Assert, ast.JoinedStr)  # what is said, and what is there for the type checker


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one function. `number` tells equal changes of one function apart, from 1 on."""

    module: str  # as imported
    function: str  # qualified
    operator: str
    before: str
    after: str
    number: int
    line: int
    index: int  # among all mutants of the function

    @property
    def name(self) -> str:
        repeated = f" (no. {self.number})" if self.number > 1 else ""
        return f"{self.module}:{self.function} {self.operator}: {self.before} => {self.after}{repeated}"


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replace a child of a node."""

    operator: str
    parent: ast.AST
    field: str
    position: int | None  # in a list of children
    old: ast.AST
    new: ast.AST

    def apply(self) -> None:
        if self.position is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.position] = self.new


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a module by qualified name; inner functions are parts of them."""
    return functions_in(ast.parse(source))


def functions_in(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """See functions(); the nodes are those of the tree."""
    found: dict[str, ast.FunctionDef] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return found


def find_mutants(module: str, source: str, function: str) -> list[Mutant]:
    """Return all mutants of a function, in the order of its text. Raises KeyError if it does not exist."""
    seen: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for index, edit in enumerate(_edits(functions(source)[function])):
        texts = edit.operator, _text(edit.old), _text(edit.new)
        seen[texts] += 1
        line = getattr(edit.old, "lineno", 0)
        mutants.append(Mutant(module, function, *texts, seen[texts], line, index))
    return mutants


def mutate(source: str, mutant: Mutant) -> ast.Module:
    """Return the module's syntax tree with one change, ready to compile."""
    tree = ast.parse(source)
    edit = list(_edits(functions_in(tree)[mutant.function]))[mutant.index]
    if (edit.operator, _text(edit.old), _text(edit.new)) != (mutant.operator, mutant.before, mutant.after):
        raise ValueError(f"the source is not the one that {mutant.name!r} was found in")
    edit.apply()
    return ast.fix_missing_locations(tree)


def _text(node: ast.AST) -> str:
    first = ast.unparse(node).splitlines()
    return first[0] if len(first) == 1 else f"{first[0]} ..."


def _edits(function: ast.FunctionDef) -> Iterator[_Edit]:
    for statement in function.body:
        yield from _within(function, "body", function.body.index(statement), statement)


def _within(parent: ast.AST, field: str, position: int | None, node: ast.AST) -> Iterator[_Edit]:
    """Yield the edits of a node, then of what is in it."""
    for operator, new in _changes(parent, field, node):
        yield _Edit(operator, parent, field, position, node, new)
    if isinstance(node, _UNSEEN) or _is_talk(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "ctx"):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # a check of what is so anyway
        if isinstance(value, ast.AST):
            yield from _within(node, name, None, value)
        elif isinstance(value, list):
            for i, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _within(node, name, i, child)


def _is_talk(node: ast.AST) -> bool:
    """True for docstrings and log messages."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    if isinstance(value, ast.Constant):
        return True
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("logger.")


def _changes(parent: ast.AST, field: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.stmt):
        if _droppable(node):
            yield "drop", ast.Pass()
        if isinstance(node, ast.Continue):
            yield "leave", ast.Break()
        return
    if not isinstance(node, ast.expr):
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negate", node.operand
    elif _is_condition(parent, field) and not _turns_round(node):
        yield "negate", ast.UnaryOp(ast.Not(), node)
    if isinstance(parent, ast.Slice) and field in ("lower", "upper"):
        by = ast.Add() if field == "lower" else ast.Sub()
        yield "shift", ast.BinOp(node, by, ast.Constant(1))
    yield from _operators(node)
    yield from _names(node)
    if isinstance(node, ast.Constant):
        yield from _constants(node)


def _operators(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            new = copy.copy(node)
            new.ops = [*node.ops[:i], _COMPARISONS[type(operator)](), *node.ops[i + 1 :]]
            yield "compare", new
    elif isinstance(node, ast.BoolOp):
        yield "connect", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr | ast.List) for side in (node.left, node.right))


def _names(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "Tier" and node.attr in _TIERS:
            yield "constant", ast.Attribute(node.value, _TIERS[node.attr], node.ctx)
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _NAMES:
            yield "opposite", ast.Call(ast.Name(_NAMES[name], ast.Load()), node.args, node.keywords)
        if name not in _COMMUTE and _can_swap(node.args):
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            yield "swap", ast.Call(node.func, swapped, node.keywords)


def _can_swap(arguments: list[ast.expr]) -> bool:
    if len(arguments) < 2 or any(isinstance(one, ast.Starred | ast.GeneratorExp) for one in arguments[:2]):
        return False
    return ast.dump(arguments[0]) != ast.dump(arguments[1])


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant(value + 1)
    elif isinstance(value, bytes) and value:
        yield "constant", ast.Constant(bytes([value[0] ^ 1, *value[1:]]))


def _turns_round(node: ast.expr) -> bool:
    """True for comparisons whose own mutant is their negation."""
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], _OPPOSITES)


def _is_condition(parent: ast.AST, field: str) -> bool:
    if isinstance(parent, ast.If | ast.While | ast.IfExp):
        return field == "test"
    return isinstance(parent, ast.comprehension) and field == "ifs"


def _droppable(node: ast.stmt) -> bool:
    """True for statements without which the function still means something."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Yield) and not _is_talk(node)
    if isinstance(node, ast.Assign):
        return not any(map(_defines, node.targets))
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Break)


def _defines(target: ast.expr) -> bool:
    """True if a target makes names that later statements need; places that exist anyway are not missed."""
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) for n in ast.walk(target))
