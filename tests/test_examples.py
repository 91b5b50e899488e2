"""The examples do what they show."""

from __future__ import annotations

import ast
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from examples.stock.__main__ import ORDERS, announced, main, prepare
from examples.stock.handlers import stock_router
from examples.stock.repository import SQLiteStock
from postroom.stores import SQLiteStore
from postroom.testing.idempotency import check_idempotency

ROOT = Path(__file__).parents[1]
HANDLERS = ROOT / "examples" / "stock" / "handlers.py"
FORBIDDEN = {"sqlite3", "aiosqlite", "asyncpg", "sqlalchemy", "psycopg", "asyncmy", "pymysql", "django", "redis"}
FORBIDDEN_PARTS = ("postroom.stores", "postroom.transaction", "postroom.middleware", "postroom.brokers")
FORBIDDEN_NAMES = {"Transaction", "current_transaction", "current_connection", "TransactionMiddleware", "transactional"}


def imports(source: str) -> set[str]:
    """Return the full names of everything that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def forbidden(names: set[str]) -> set[str]:
    """Return which of the names know a database, a transaction or a broker."""
    return {
        name
        for name in names
        if name.partition(".")[0] in FORBIDDEN
        or name.startswith((*FORBIDDEN_PARTS, "."))
        or name.rpartition(".")[2] in FORBIDDEN_NAMES
    }


def levels(path: Path) -> dict[str, tuple[int, int]]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT item, free, reserved FROM stock").fetchall()
    return {item: (free, reserved) for item, free, reserved in rows}


def test_the_handlers_know_neither_sql_nor_transactions() -> None:
    """F-18, S0-05: what a handler imports is what it knows."""
    names = imports(HANDLERS.read_text())

    assert "postroom.Router" in names
    assert forbidden(names) == set()


def test_the_adapter_does_know_them() -> None:
    """F-18: so the check can tell a module that does from one that does not."""
    names = imports((HANDLERS.parent / "repository.py").read_text())

    assert forbidden(names) == {"sqlite3", "postroom.current_transaction"}
    assert forbidden({".repository", "postroom.stores.SQLiteStore", "postroom.transaction"}) != set()


async def test_an_order_that_comes_twice_is_reserved_once(sqlite_path: Path) -> None:
    """G7, S1-42, S1-43: reserved, told of, and skipped the second time."""
    prepare(sqlite_path)

    await main(sqlite_path)

    assert levels(sqlite_path) == {"chair": (8, 2), "table": (0, 1)}


def test_the_example_runs_as_a_program() -> None:
    """S1-42: as the first lines of the example say."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.stock"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        'stock.missing {"order_id":3,"item":"chair"}',
        'stock.reserved {"order_id":1,"item":"chair","quantity":2}',
        'stock.reserved {"order_id":2,"item":"table","quantity":1}',
    ]


async def test_the_example_is_idempotent(sqlite_path: Path) -> None:
    """G7, S1-21: in every way in which its orders may come."""
    prepare(sqlite_path)

    def refill() -> None:
        with closing(sqlite3.connect(sqlite_path)) as connection, connection:
            connection.execute("UPDATE stock SET free = free + reserved, reserved = 0")

    await check_idempotency(
        stock_router(SQLiteStock()),
        [announced(order) for order in ORDERS],
        store=SQLiteStore(sqlite_path, namespace="stock"),
        state=lambda: levels(sqlite_path),
        reset=refill,
    )
