"""The page that says which test proves which requirement."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "requirements.md"
#: How many requirements each document has.
_COUNTS = {"F": 25, "S0": 61, "S1": 43, "S2": 52, "S3": 29, "S4": 24}
REQUIRED = [f"{document}-{number:02}" for document, count in _COUNTS.items() for number in range(1, count + 1)]
_ID = re.compile(r"\b(?:F|S\d)-\d\d\b")
_ROW = re.compile(r"^\| ((?:F|S\d)-\d\d) \| (.*?) \|(.*)\|$")


def proofs_by_requirement() -> dict[str, list[str]]:
    """Return which tests say in their docstring that they prove a requirement."""
    found: dict[str, list[str]] = {}
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "postroom" / "testing").rglob("*.py")]
    for source in sorted(sources):
        for name, docstring in _tests(ast.parse(source.read_text())):
            for requirement in dict.fromkeys(_ID.findall(docstring)):
                found.setdefault(requirement, []).append(f"`{source.relative_to(ROOT)}::{name}`")
    return found


def _tests(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


def pages_by_requirement() -> dict[str, list[str]]:
    """Return which pages name a requirement that is prose."""
    found: dict[str, list[str]] = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page != PAGE:
            for requirement in dict.fromkeys(_ID.findall(page.read_text())):
                found.setdefault(requirement, []).append(f"[{page.name}]({page.name})")
    return found


def rendered() -> str:
    """Return the page with what proves each requirement today."""
    tests, pages = proofs_by_requirement(), pages_by_requirement()
    lines: list[str] = []
    for line in PAGE.read_text().splitlines():
        row = _ROW.match(line)
        if row:
            targets = "<br>".join([*tests.get(row[1], []), *pages.get(row[1], [])])
            line = f"| {row[1]} | {row[2]} | {targets} |"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_list_of_requirements_is_complete() -> None:
    """Every requirement has a row, and every row a test or a page."""
    rows = [row for row in map(_ROW.match, PAGE.read_text().splitlines()) if row]

    assert sorted(row[1] for row in rows) == sorted(REQUIRED)
    assert [row[1] for row in rows if not row[3].strip()] == []


def test_the_targets_of_the_list_are_those_that_exist() -> None:
    """The page is what the tests and pages say today; UPDATE_DOCS=1 writes it anew."""
    wanted = rendered()
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(wanted)

    assert PAGE.read_text() == wanted
