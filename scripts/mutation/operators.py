"""Operators: the changes that can be made to a module, found in its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, TypeAlias

from .mutant import Mutant, mutant
from .scopes import Scope, scopes
from .sql import sql_changes

__all__ = ["mutants_of"]

#: Where a change begins and ends, in characters of the source, and what stands there afterwards.
Change: TypeAlias = tuple[int, int, str]
Operator: TypeAlias = Callable[["Text", Scope], Iterator[tuple[str, Change]]]

#: Up to which number the next one makes a difference, and how much larger a duration has to be.
_FEW: Final = 10
_FAR: Final = 100
_COMPARISONS: Final = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


class Text:
    """The source of a module, in which nodes of its syntax tree are found."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return where a place of the syntax tree is, whose columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends."""
        assert node.end_lineno is not None  # noqa: S101 -- every parsed node has one
        assert node.end_col_offset is not None  # noqa: S101
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.source[start:end]


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module; a few of them may not be valid Python."""
    text = Text(source)
    for scope in scopes(ast.parse(source)):
        for changes in _OPERATORS:
            for operator, change in changes(text, scope):
                one = mutant(path, scope.name, operator, source, change)
                if one.before != one.after:
                    yield one


def _comparisons(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    for node in scope.find(ast.Compare):
        for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            old, new = _COMPARISONS[type(operator)]
            start, end = text.span(left)[1], text.span(right)[0]
            found = re.search(old.replace(" ", r"\s+"), text.source[start:end])
            if found:
                yield "comparison", (start + found.start(), start + found.end(), new)


def _conditions(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    tests = [node.test for node in scope.nodes if isinstance(node, ast.If | ast.While | ast.IfExp)]
    tests += [test for node in scope.find(ast.comprehension) for test in node.ifs]
    for test in tests:
        # Single comparisons are swapped above, and a `not` is dropped below.
        if not isinstance(test, ast.Constant | ast.UnaryOp) and not (
            isinstance(test, ast.Compare) and len(test.ops) == 1
        ):
            start, end = text.span(test)
            yield "condition", (start, end, f"not ({text.source[start:end]})")
    for node in scope.find(ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            yield "condition", (*text.span(node), f"({text.of(node.operand)})")


def _connectives(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    for node in scope.find(ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            start, end = text.span(left)[1], text.span(right)[0]
            found = re.search(rf"\b{old}\b", text.source[start:end])
            if found:
                yield "connective", (start + found.start(), start + found.end(), new)


def _constants(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    durations = {part for call in scope.find(ast.Call) if text.of(call.func) == "timedelta" for part in ast.walk(call)}
    for node in scope.find(ast.Constant):
        match node.value:
            case bool(value):
                new = str(not value)
            case int(value) | float(value):
                new = str(_other_number(value, is_duration=node in durations))
            case str(value) if node in scope.defaults:
                new = repr(f"{value}x")
            case _:
                continue
        operator = "default" if node in scope.defaults else "constant"
        yield operator, (*text.span(node), new)


def _other_number(value: float, *, is_duration: bool) -> float:
    """Return another number: the next one of a few, or one that is far away, since little depends on the exact one."""
    if is_duration or isinstance(value, float):
        return value * _FAR or type(value)(1)
    return value + 1 if abs(value) < _FEW else 0


def _statements(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    for node in scope.statements:
        match node:
            case ast.Expr(value=ast.Await(value=awaited)):
                yield "await", (*text.span(node), text.of(awaited))
                yield "statement", (*text.span(node), "pass")
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
                yield "statement", (*text.span(node), "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) if not scope.is_constructor:
                yield "statement", (*text.span(node), "pass")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "return", (*text.span(value), "None")
            case ast.Break():
                yield "statement", (*text.span(node), "pass")
            case _:
                pass


def _sql(text: Text, scope: Scope) -> Iterator[tuple[str, Change]]:
    for node in scope.texts:
        start, end = text.span(node)
        for first, last, new in sql_changes(text.source[start:end]):
            yield "sql", (start + first, start + last, new)


_OPERATORS: Final[tuple[Operator, ...]] = (_comparisons, _conditions, _connectives, _constants, _statements, _sql)
