"""Which tests should notice a mutant, and in which order they are run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final, TypeAlias

from .coverage_map import CoverageMap, CoveringTest
from .mutant import Mutant

__all__ = ["Pass", "covering_tests", "passes"]

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

#: For how many seconds, as they were recorded, the tests of each pass may run.
FIRST: Final = 30.0
SECOND: Final = 150.0
#: What compares texts with texts notices every change of them, whatever it means; it runs last, in a pass of its own.
SNAPSHOTS: Final = ("tests/test_sql_snapshots.py",)


@dataclass(frozen=True, slots=True)
class Pass:
    """Tests that are run together."""

    name: str
    tests: Sequence[CoveringTest]

    @property
    def seconds(self) -> float:
        """How long the tests take on the sources as they are."""
        return sum(test.seconds for test in self.tests)


def passes(found: CoverageMap, one: Mutant, root: Path) -> list[Pass]:
    """Return the tests that should notice a mutant: the fastest of them, the others, and the snapshots."""
    covering = covering_tests(found, one, root)
    own = f"test_{PurePath(one.path).stem}.py"
    in_turn = sorted(covering, key=lambda test: (not test.is_quick, PurePath(test.file).name != own, test.seconds))
    tests = [test for test in in_turn if test.file not in SNAPSHOTS]
    first = _within(FIRST, [test for test in tests if test.is_quick])
    second = _within(SECOND, [test for test in tests if test not in first])
    snapshots = [test for test in in_turn if test.file in SNAPSHOTS]
    all_passes = Pass("fastest", first), Pass("others", second), Pass("snapshots", snapshots)
    return [part for part in all_passes if part.tests]


def _within(seconds: float, tests: Sequence[CoveringTest]) -> list[CoveringTest]:
    """Return the first tests that fit into a time, without those that are too slow for it; one at least."""
    chosen = list[CoveringTest]()
    for test in tests:
        if test.seconds <= seconds:
            seconds -= test.seconds
            chosen.append(test)
    return chosen or sorted(tests, key=lambda test: test.seconds)[:1]


def covering_tests(found: CoverageMap, one: Mutant, root: Path) -> list[CoveringTest]:
    """Return the tests that run a mutant's line, or those that use what is changed if that happens at import."""
    if one.path.endswith(".lua"):
        return _tests_of_script(found, one.path)
    tree = ast.parse((root / one.path).read_text())
    function = _function_at(tree, one.line)
    if function is None:
        return _tests_of_name(found, one, tree)
    # A line that was written after the map was made is run by no test that is known; its function may be.
    return found.covering(one.path, _lines_with_it(function, one.line)) or found.covering(one.path, _body(function))


def _function_at(tree: ast.AST, line: int) -> _Function | None:
    """Return the innermost function that a line is in, its signature included."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Function) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _body(function: _Function) -> range:
    return range(function.body[0].lineno, (function.end_lineno or function.lineno) + 1)


def _lines_with_it(function: _Function, line: int) -> range:
    """Return the lines that run together with one: those of its statement, or of the head of that."""
    around = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or node.lineno)]
    if not around:
        return _body(function)  # it is in the signature
    innermost = max(around, key=lambda node: node.lineno)
    block: list[ast.stmt] = getattr(innermost, "body", [])
    last = block[0].lineno - 1 if block else innermost.end_lineno or innermost.lineno
    return range(innermost.lineno, max(last, innermost.lineno) + 1)


def _tests_of_name(found: CoverageMap, one: Mutant, tree: ast.Module) -> list[CoveringTest]:
    """Return the tests of functions that use a constant, by its name or those of constants made from it."""
    names = _used_names(tree, one.line)
    own = found.covering(one.path, _lines_of_functions(tree))
    using = {test.id for path, lines in _lines_with(names, found.sources) for test in found.covering(path, lines)}
    both = [test for test in own if test.id in using]
    return both or own or [test for test in found.tests.values() if test.id in using]


def _used_names(tree: ast.Module, line: int) -> set[str]:
    """Return the names of the constant at a line, and of the module's other constants that contain it."""
    constants = {
        name.id: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(name, ast.Name)
    }
    names = {name for name, node in constants.items() if node.lineno <= line <= (node.end_lineno or node.lineno)}
    while True:
        pattern = _pattern(names)
        more = {name for name, node in constants.items() if names and pattern.search(ast.unparse(node))} - names
        if not more:
            return names
        names |= more


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")


def _lines_of_functions(tree: ast.Module) -> set[int]:
    return {line for node in ast.walk(tree) if isinstance(node, _Function) for line in _body(node)}


def _lines_with(names: set[str], sources: Mapping[str, str]) -> Iterator[tuple[str, set[int]]]:
    if not names:
        return
    pattern = _pattern(names)
    for path, source in sources.items():
        if pattern.search(source):
            in_functions = _lines_of_functions(ast.parse(source))
            lines = {number for number, text in enumerate(source.splitlines(), 1) if pattern.search(text)}
            yield path, lines & in_functions


def _tests_of_script(found: CoverageMap, path: str) -> list[CoveringTest]:
    """Return the tests of functions that name a script, or of all modules beside its folder if none does."""
    folder = PurePath(path).parents[1].as_posix()
    naming = re.compile(rf"""["']{PurePath(path).stem}["']""")
    by_name, beside = dict[str, CoveringTest](), dict[str, CoveringTest]()
    for module, source in found.sources.items():
        if module.startswith(f"{folder}/"):
            inside = _lines_of_functions(ast.parse(source))
            named = {number for number, line in enumerate(source.splitlines(), 1) if naming.search(line)}
            by_name |= {test.id: test for test in found.covering(module, inside & named)}
            beside |= {test.id: test for test in found.covering(module, inside)}
    return list((by_name or beside).values())
