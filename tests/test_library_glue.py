"""How much there is between a dialect's text and a database library, and where a library may be named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

SQL: Final = Path(__file__).parents[1] / "src" / "postroom" / "stores" / "sql"
DRIVERS: Final = sorted((SQL / "drivers").glob("*.py"))
#: Everything that executes what a dialect says.
GLUE: Final = (
    *(
        SQL / f"{name}.py"
        for name in ("commit_errors", "driver", "errors", "pool", "source", "sqlite_pool", "transactions", "writer")
    ),
    *DRIVERS,
)
#: The packages of each library, and the modules that may name them: its own, and the registry.
LIBRARIES: Final = {
    "asyncpg": {"asyncpg.py"},
    "psycopg": {"psycopg.py"},
    "psycopg_pool": {"psycopg.py"},
    "asyncmy": {"mysql.py"},
    "pymysql": {"mysql.py"},
    "MySQLdb": {"mysql.py"},
    "sqlalchemy": {"sqlalchemy.py"},
    "django": {"django.py"},
    "aiosqlite": {"sqlite.py"},
}
REGISTRY: Final = "__init__.py"
#: Where a user chooses between two libraries.
STORE: Final = "store.py"


@pytest.mark.parametrize("module", DRIVERS, ids=lambda path: path.name)
def test_a_library_is_described_in_one_short_module(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= 300


def test_the_glue_stays_small() -> None:
    """Three descriptions of each library had 55 classes in 21 modules."""
    classes = [node for path in GLUE for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]

    assert len(classes) <= 37
    assert len(GLUE) <= 16
    assert sum(len(path.read_text().splitlines()) for path in GLUE) <= 3240


@pytest.mark.parametrize("module", sorted(SQL.rglob("*.py")), ids=lambda path: str(path.relative_to(SQL)))
def test_only_the_module_of_a_library_names_it(module: Path) -> None:
    named = {name for name in _names(_tree(module)) if module.name not in LIBRARIES.get(name, ())}

    if module == SQL / "drivers" / REGISTRY:
        return
    if module == SQL / STORE:
        named -= {"asyncpg", "psycopg"}
    assert named & LIBRARIES.keys() == set()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module names as code: by importing them, or in a text that is nothing but a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value.partition(".")[0]
