"""Fills in docs/requirements.md: which tests, named as pytest takes them, prove each requirement.

Tests name requirements by a marker, ``@pytest.mark.requirement("S2-42")``, on a function, on a class or, as
``pytestmark``, on a module. Those of the shipped contract, whose readers know none of the ids, are listed in
``tests/contracts/requirements.py`` instead. Run as ``python -m scripts.requirements`` to write the page.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.contracts.requirements import REQUIREMENTS

__all__ = ["PAGE", "PAGES", "proofs", "rendered"]

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "requirements.md"
#: Requirements on the documentation, and the sections that meet them.
PAGES: Final[Mapping[str, Sequence[str]]] = {
    "S2-25": ("choosing.md#what-is-in-scope",),
    "S4-02": ("words.md",),
    "S4-21": ("guarantees.md",),
    "S4-22": ("choosing.md#what-is-in-scope",),
    "S4-23": ("choosing.md#trade-offs",),
    "S4-24": ("choosing.md#when-and-when-not",),
}
#: The contract runs on every store; one of them stands for all in the page.
_CONTRACT: Final = "tests/contracts/test_stores.py::TestPostgresStoreOverAsyncpg"
_ROW: Final = re.compile(r"^\| ((?:F-|S\d-|G)\d+) \| (.*?) \|(.*)\|$")


def proofs() -> dict[str, list[str]]:
    """Return the tests that prove each requirement."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for place, ids in _marked(ast.parse(path.read_text())):
            target = "::".join((path.relative_to(ROOT).as_posix(), *place))
            for requirement in ids:
                found.setdefault(requirement, []).append(target)
    for name, listed in REQUIREMENTS.items():
        for requirement in listed:
            found.setdefault(requirement, []).append(f"{_CONTRACT}::{name}")
    return found


def _marked(module: ast.Module) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Yield where markers stand, as names of classes and functions, with the ids that they name."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=ast.Call() as mark):
                yield (), _ids(mark)
            case ast.ClassDef():
                yield (node.name,), _ids(*node.decorator_list)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield (node.name, inner.name), _ids(*inner.decorator_list)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield (node.name,), _ids(*node.decorator_list)
            case _:
                pass


def _ids(*marks: ast.expr) -> list[str]:
    return [
        word.value
        for mark in marks
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement"
        for word in mark.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]


def rendered(page: str) -> str:
    """Return the page with what proves each requirement today."""
    tests = proofs()

    def row(line: re.Match[str]) -> str:
        pages = [f"[{target}]({target})" for target in PAGES.get(line[1], ())]
        targets = [f"`{target}`" for target in tests.get(line[1], ())]
        return f"| {line[1]} | {line[2]} | {'<br>'.join([*targets, *pages])} |"

    return "\n".join(row(found) if (found := _ROW.match(line)) else line for line in page.splitlines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
