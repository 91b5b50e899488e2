"""The examples do what they show."""

from __future__ import annotations

import ast
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import cast
from zipfile import ZipFile

import pytest

import examples.orders.__main__ as shop
from examples.orders.handlers import order_router
from examples.orders.repository import RedisOrders
from examples.stock.__main__ import ORDERS, announced, main, prepare
from examples.stock.handlers import stock_router
from examples.stock.repository import SQLiteStock
from postroom.stores import SQLiteStore
from postroom.stores.redis import RedisStore
from postroom.stores.redis.scripts import script
from postroom.testing.clients import RedisClient
from postroom.testing.idempotency import check_idempotency

ROOT = Path(__file__).parents[1]
HANDLERS = ROOT / "examples" / "stock" / "handlers.py"
ALL_HANDLERS = sorted((ROOT / "examples").glob("*/handlers.py"))
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


@pytest.mark.requirement("F-18", "S0-05", "S0-14", "S0-29")
@pytest.mark.parametrize("handlers", ALL_HANDLERS, ids=lambda path: path.parent.name)
def test_the_handlers_know_neither_databases_nor_transactions(handlers: Path) -> None:
    """What a handler imports is what it knows; those on Redis have no import of Redis."""
    names = imports(handlers.read_text())

    assert "postroom.Router" in names
    assert forbidden(names) == set()


@pytest.mark.requirement("F-18")
def test_the_adapter_does_know_them() -> None:
    """So the check can tell a module that does from one that does not."""
    names = imports((HANDLERS.parent / "repository.py").read_text())

    assert forbidden(names) == {"sqlite3", "postroom.current_transaction"}
    assert "redis.asyncio" in forbidden(imports((ROOT / "examples" / "orders" / "repository.py").read_text()))
    assert forbidden({".repository", "postroom.stores.SQLiteStore", "postroom.transaction"}) != set()


@pytest.mark.requirement("G7", "S1-42", "S1-43")
async def test_an_order_that_comes_twice_is_reserved_once(sqlite_path: Path) -> None:
    """Reserved, told of, and skipped the second time."""
    prepare(sqlite_path)

    await main(sqlite_path)

    assert levels(sqlite_path) == {"chair": (8, 2), "table": (0, 1)}


@pytest.mark.requirement("S1-42")
def test_the_example_runs_as_a_program() -> None:
    """As the first lines of the example say."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.stock"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        'stock.missing {"order_id":3,"item":"chair"}',
        'stock.reserved {"order_id":1,"item":"chair","quantity":2}',
        'stock.reserved {"order_id":2,"item":"table","quantity":1}',
    ]


@pytest.mark.requirement("G7", "S1-21")
async def test_the_example_is_idempotent(sqlite_path: Path) -> None:
    """In every way in which its orders may come."""
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


def books(url: str) -> dict[str, dict[str, str]]:
    """Return what is in the books of the shop."""
    client = RedisClient(url)
    keys = sorted(cast("list[str]", client.ask("KEYS", "{shop}:order:*")))
    rows = {key: cast("list[str]", client.ask("HGETALL", key)) for key in keys}
    return {key: dict(zip(row[::2], row[1::2], strict=True)) for key, row in rows.items()}


@pytest.mark.requirement("G7", "S0-58", "S0-61")
def test_an_order_in_redis_that_comes_twice_is_placed_once(redis_like_url: str) -> None:
    """As a program, as the first lines of the example say; written down, told of, and skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.orders", redis_like_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ['order.placed {"order_id":"xyy"}', 'order.placed {"order_id":"xyz"}']
    assert books(redis_like_url) == {
        "{shop}:order:xyy": {"product_id": "table", "quantity": "1", "status": "placed"},
        "{shop}:order:xyz": {"product_id": "chair", "quantity": "2", "status": "placed"},
    }


@pytest.mark.requirement("G7", "S0-02", "S0-58")
async def test_the_example_in_redis_is_idempotent(redis_like_url: str) -> None:
    """In every way in which its commands may come."""
    store = RedisStore(redis_like_url, namespace=shop.NAMESPACE)

    def forget() -> None:
        for key in books(redis_like_url):
            RedisClient(redis_like_url).ask("DEL", key)

    await check_idempotency(
        order_router(RedisOrders(store.client, shop.NAMESPACE)),
        [shop.sent(command) for command in shop.COMMANDS],
        store=store,
        state=lambda: books(redis_like_url),
        reset=forget,
    )
    await store.close()


@pytest.mark.requirement("S0-61")
def test_the_package_builds_and_has_everything_that_is_needed(tmp_path: Path) -> None:
    """Without a network; every script and every module is in it, and it can be used as it is."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, timeout=60, check=True)
    [wheel] = tmp_path.glob("*.whl")
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for kind in ("*.py", "*.lua", "py.typed") for path in source.rglob(kind)}
    use = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import postroom; from postroom.stores.redis import scripts;"
        "print(postroom.__file__, scripts.script('claim').digest)"
    )
    # What is run from the wheel is not the source that coverage is measured of.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    command = [sys.executable, "-c", use]
    used = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=True)

    with ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
    assert used.stdout.startswith(str(wheel))
    assert script("claim").digest in used.stdout
