"""`transactions_for` and `SQLStore.transactions`: what is committed, what is rolled back, and who may use it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sqlite3
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import aiosqlite
import asyncmy
import asyncpg
import django  # type: ignore[import-untyped]
import django.db.transaction  # type: ignore[import-untyped]
import psycopg_pool
import pytest
import sqlalchemy
import sqlalchemy.exc
import sqlalchemy.orm
from django.conf import settings  # type: ignore[import-untyped]
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from postroom import Message, Outbox
from postroom.codec import JSONCodec
from postroom.errors import (
    CommitUnknownError,
    ConfigurationError,
    PostroomError,
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreContentionError,
    StoreTimeoutError,
    StoreUnavailableError,
    TransactionAbortedError,
    TransactionClosedError,
    UnknownConnectionError,
)
from postroom.handler import bound
from postroom.middleware import TransactionMiddleware
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.sql import drivers
from postroom.stores.sql.driver import finish_async
from postroom.stores.sql.drivers import driver_of
from postroom.stores.sql.statement import Statement
from postroom.stores.sql.transactions import transactions_for
from postroom.testing.faults import FaultProxy
from postroom.testing.waiting import until
from postroom.transaction import (
    Transaction,
    current_connection,
    current_transaction,
    entered,
    running_on,
    transactions_of,
)

from .support import fakedb
from .support.server_fixtures import mysqldb

if not settings.configured:
    settings.configure(DATABASES={}, USE_TZ=True)
    django.setup()

#: A server is reached through a proxy of this test's own only where it is asked for.
PG, MY, LITE = "postgres", "mariadb", "sqlite"


# -- every kind of pool ----------------------------------------------------------------------------------------


@dataclass
class World:
    """A pool of some kind, and a way to look at its database from outside."""

    kind: str
    dsn: str
    pool: Any
    look: Callable[[str], Any]

    @property
    def family(self) -> str:
        return family(self.kind)

    async def run(self, transaction: Transaction, sql: str) -> None:
        """Run a statement in a transaction, as an adapter would that knows its library."""
        await transaction.do(_run_async if transactions_of(self.pool).is_async else _run, sql)  # type: ignore[attr-defined]

    async def rows(self) -> list[int]:
        return sorted(row[0] for row in await asyncio.to_thread(self.look, "SELECT id FROM business"))


def _run(connection: Any, sql: str) -> None:  # noqa: ANN401
    package = type(connection).__module__.partition(".")[0]
    if package == "sqlalchemy":
        connection.execute(sqlalchemy.text(sql))
    elif package in {"django", "fakedb"}:
        with connection.cursor() as cursor:
            cursor.execute(sql)
    else:
        connection.execute(sql)


async def _run_async(connection: Any, sql: str) -> None:  # noqa: ANN401
    package = type(connection).__module__.partition(".")[0]
    if package == "sqlalchemy":
        await connection.execute(sqlalchemy.text(sql))
    elif package == "asyncmy":
        async with connection.cursor() as cursor:
            await cursor.execute(sql)
    else:
        await connection.execute(sql)


def family(kind: str) -> str:
    return kind.partition("-")[0]


KINDS = (
    "postgres-asyncpg",
    "postgres-psycopg",
    "postgres-psycopg-sync",
    "postgres-engine-asyncpg",
    "postgres-engine-psycopg",
    "postgres-session-asyncpg",
    "postgres-engine-sync",
    "postgres-session-sync",
    "postgres-store-asyncpg",
    "postgres-store-psycopg",
    "postgres-django",
    "mariadb-asyncmy",
    "mariadb-store",
    "mariadb-engine-asyncmy",
    "mariadb-engine-sync",
    "mariadb-engine-mysqldb-sync",
    "mariadb-django",
    "mariadb-fake",
    "sqlite-path",
    "sqlite-connection",
    "sqlite-aiosqlite",
    "sqlite-store",
    "sqlite-engine-sync",
    "sqlite-engine-aiosqlite",
    "sqlite-django",
)
SERVERS = tuple(kind for kind in KINDS if family(kind) != LITE)
POSTGRES = tuple(kind for kind in KINDS if family(kind) == PG)
MARIADB = tuple(kind for kind in KINDS if family(kind) == MY)
SQLITE = tuple(kind for kind in KINDS if family(kind) == LITE)
SQLALCHEMY = tuple(kind for kind in KINDS if "engine" in kind or "session" in kind)

#: Those that use mysqlclient, the only library that Django takes for MySQL and MariaDB.
MYSQLDB = ("mariadb-engine-mysqldb-sync", "mariadb-django")

_SYNC_DRIVERS = {PG: "postgresql+psycopg", MY: "mysql+pymysql", LITE: "sqlite", MYSQLDB[0]: "mysql+mysqldb"}


@asynccontextmanager
async def pool_on(kind: str, dsn: str) -> AsyncGenerator[Any]:  # noqa: C901, PLR0912 -- a line for each kind
    """Open a pool of some kind."""
    pool: Any
    where, _, shape = kind.partition("-")
    url = sqlalchemy.make_url(f"sqlite:///{dsn}" if where == LITE else dsn)
    if kind in MYSQLDB:
        mysqldb()
    if shape == "asyncpg":
        async with asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
            yield pool
    elif shape == "psycopg":
        async with psycopg_pool.AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False) as pool:
            yield pool
    elif shape == "psycopg-sync":
        with psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=2, open=True) as pool:
            yield pool
    elif shape == "asyncmy":
        pool = await asyncmy.create_pool(
            minsize=0, maxsize=2, host=url.host, port=url.port, user=url.username or "root", db=url.database
        )
        yield pool
        pool.close()
        await pool.wait_closed()
    elif shape.endswith("-sync"):
        engine = sqlalchemy.create_engine(url.set(drivername=_SYNC_DRIVERS[kind if kind in MYSQLDB else where]))
        yield sessionmaker(engine) if shape.startswith("session") else engine
        engine.dispose()
    elif shape.startswith(("engine", "session")):
        scheme = {PG: "postgresql", MY: "mysql", LITE: "sqlite"}[where]
        async_engine = create_async_engine(url.set(drivername=f"{scheme}+{shape.partition('-')[2]}"))
        yield async_sessionmaker(async_engine) if shape.startswith("session") else async_engine
        await async_engine.dispose()
    elif shape.startswith("store"):
        store = _store(kind, dsn)
        yield store
        await store.close()
    elif shape == "django":
        with django_on(where, url) as atomic:
            yield atomic
    elif shape == "fake":
        with registered("fakedb", fakedb):
            pool = fakedb.Pool(host=url.host, port=url.port, user=url.username, database=url.database)
            yield pool
            for connection in pool:
                connection.close()
    elif shape == "path":
        yield dsn
    elif shape == "connection":
        with contextlib.closing(sqlite3.connect(dsn, check_same_thread=False)) as connection:
            yield connection
    else:
        async with aiosqlite.connect(dsn) as connection:
            yield connection


@contextlib.contextmanager
def registered(package: str, module: ModuleType) -> Iterator[None]:
    """Have a module be the driver module of a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(drivers._MODULES, package, package)  # noqa: SLF001
        patch.setitem(sys.modules, f"{drivers.__name__}.{package}", module)
        yield


def _store(kind: str, dsn: str) -> PostgresStore | MySQLStore | SQLiteStore:
    if family(kind) == PG:
        return PostgresStore(dsn, driver="psycopg" if kind.endswith("psycopg") else "asyncpg", connections=2)
    return MySQLStore(dsn, connections=2) if family(kind) == MY else SQLiteStore(dsn)


@contextlib.contextmanager
def django_on(where: str, url: sqlalchemy.URL) -> Any:  # noqa: ANN401
    options = (
        {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
        if where == LITE
        else {
            "ENGINE": f"django.db.backends.{'postgresql' if where == PG else 'mysql'}",
            "NAME": url.database,
            "USER": url.username,
            "HOST": url.host,
            "PORT": url.port,
        }
    )
    alias = f"a{uuid4().hex}"
    known = django.db.connections
    known.databases[alias] = known.configure_settings({"default": {}, alias: options})[alias]
    try:
        yield partial(django.db.transaction.atomic, using=alias)
    finally:
        del known.databases[alias]


TABLE = {
    PG: "CREATE TABLE business (id int PRIMARY KEY, again int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
    MY: "CREATE TABLE business (id int PRIMARY KEY, again int) ENGINE = InnoDB",
    LITE: "CREATE TABLE business (id int PRIMARY KEY, again int)",
}


def asking(where: str, dsn: str) -> Callable[[str], Any]:
    """Return what runs a statement apart from the pool."""
    url = sqlalchemy.make_url(f"sqlite:///{dsn}" if where == LITE else dsn).set(drivername=_SYNC_DRIVERS[where])

    def ask(sql: str) -> Any:  # noqa: ANN401
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        with engine.begin() as connection:
            answer = connection.execute(sqlalchemy.text(sql))
            return answer.fetchall() if answer.returns_rows else None

    return ask


@asynccontextmanager
async def world_of(kind: str, request: pytest.FixtureRequest) -> AsyncGenerator[World]:
    names = {PG: "postgres_dsn", MY: "mariadb_dsn", LITE: "sqlite_path"}
    dsn = str(request.getfixturevalue(names[family(kind)]))
    ask = asking(family(kind), dsn)
    await asyncio.to_thread(ask, TABLE[family(kind)])
    async with pool_on(kind, dsn) as pool:
        yield World(kind, dsn, pool, ask)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of pool, for tests that name their own."""
    return str(request.param)


@pytest.fixture
async def world(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[World]:
    """A pool of each kind in turn."""
    async with world_of(kind, request) as opened:
        yield opened


every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
every_server = pytest.mark.parametrize("kind", SERVERS, indirect=True)
every_postgres = pytest.mark.parametrize("kind", POSTGRES, indirect=True)
every_mariadb = pytest.mark.parametrize("kind", MARIADB, indirect=True)


class Interruption(BaseException):
    """As KeyboardInterrupt is: no Exception."""


# -- begin, commit, roll back ----------------------------------------------------------------------------------


@pytest.mark.requirement("F-14")
@every_kind
async def test_a_block_that_ends_well_is_committed(world: World) -> None:
    """And nobody sees anything of it before; what waits for the commit is called once after it."""
    transactions = transactions_of(world.pool)
    seen: list[str] = []

    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
        transaction.after_commit(lambda: seen.append("committed"))
        before = list(seen)

    assert before == []
    assert seen == ["committed"]
    assert await world.rows() == [1]


@pytest.mark.requirement("F-14", "F-15", "F-20")
@every_kind
@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError, Interruption, TimeoutError])
async def test_whatever_a_block_raises_rolls_it_back(world: World, error: type[BaseException]) -> None:
    """More often than the pool has connections, and it can be used after it."""
    transactions = transactions_of(world.pool)
    seen: list[str] = []

    for _ in range(3):
        with pytest.raises(error):
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                transaction.after_commit(lambda: seen.append("committed"))
                raise error
    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (2)")

    assert seen == []
    assert await world.rows() == [2]


@pytest.mark.requirement("F-17")
@every_kind
async def test_a_transaction_cannot_be_used_after_its_end(world: World) -> None:
    """What comes late must not be written alone."""
    transactions = transactions_of(world.pool)

    async with transactions.begin() as transaction:
        pass

    with pytest.raises(TransactionClosedError):
        _ = transaction.connection
    with pytest.raises(TransactionClosedError):
        transaction.after_commit(print)
    with pytest.raises(TransactionClosedError):
        await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
    with entered(transaction), pytest.raises(TransactionClosedError):
        current_connection("fallback")
    with pytest.raises(TransactionClosedError):
        await transaction.call(here)
    with entered(transaction), pytest.raises(TransactionClosedError):
        await running_on()(here)
    assert await world.rows() == []


@every_kind
async def test_a_transaction_that_has_ended_is_not_left_to_the_garbage_collector(world: World) -> None:
    """Which would have to look for one with every message."""
    transactions = transactions_of(world.pool)
    async with transactions.begin():
        pass

    gc.collect()
    gc.disable()
    try:
        async with transactions.begin() as transaction:
            pass
        ended = weakref.ref(transaction)
        del transaction
        await asyncio.sleep(0)
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.requirement("F-12", "F-13")
@every_kind
async def test_an_adapter_finds_the_connection_of_its_transaction(world: World) -> None:
    """And outside of one it gets its own back."""
    transactions = transactions_of(world.pool)

    async with transactions.begin() as transaction:
        with entered(transaction):
            inside = current_connection("fallback")
            found = current_transaction()
        held = transaction.connection

    assert inside is held
    assert found is transaction
    assert current_connection("fallback") == "fallback"


@pytest.mark.requirement("F-14")
@every_kind
async def test_a_savepoint_is_undone_alone(world: World) -> None:
    """What came before and after it stays; one that ends well is kept."""
    transactions = transactions_of(world.pool)

    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
        with suppress(LookupError):
            async with transactions.savepoint(transaction):
                await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
                raise LookupError
        async with transactions.savepoint(transaction):
            await world.run(transaction, "INSERT INTO business (id) VALUES (3)")

    assert await world.rows() == [1, 3]


@pytest.mark.requirement("G1", "F-14")
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.endswith(("-sync", "django", "path", "connection"))], indirect=True
)
async def test_a_savepoint_that_is_cancelled_while_a_thread_makes_it_dooms_the_transaction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what is written after it belongs to a savepoint that nobody leaves, and may be lost with it."""
    transactions: Any = transactions_of(world.pool)
    driver = transactions.source.driver
    mark, begun, is_cancelled = driver.mark, threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> Any:  # noqa: ANN401
        begun.set()
        is_cancelled.wait(10)
        return (yield from mark(*arguments))

    async def nest(transaction: Transaction) -> None:
        async with transactions.savepoint(transaction):
            pass

    with pytest.raises(TransactionAbortedError):
        async with transactions.begin() as transaction:
            with monkeypatch.context() as patched:
                patched.setattr(driver, "mark", slowly)
                nesting = asyncio.create_task(nest(transaction))
                await until(begun.is_set, "the thread makes the savepoint")
            nesting.cancel()
            with suppress(asyncio.CancelledError):
                await nesting
            is_cancelled.set()
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (2)")

    assert await world.rows() == [2]


@pytest.mark.requirement("G1", "F-14")
@every_kind
async def test_a_savepoint_that_was_kept_is_undone_with_the_transaction(world: World) -> None:
    """Also if nothing was written before it, when some drivers have not begun yet."""
    transactions = transactions_of(world.pool)

    with pytest.raises(LookupError):
        async with transactions.begin() as transaction:
            async with transactions.savepoint(transaction):
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
            raise LookupError

    assert await world.rows() == []


@pytest.mark.requirement("F-14")
@every_kind
async def test_a_statement_that_fails_in_a_savepoint_does_not_spoil_the_rest(world: World) -> None:
    """Also on PostgreSQL, where an error ends everything else."""
    transactions = transactions_of(world.pool)

    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
        with suppress(Exception):
            async with transactions.savepoint(transaction):
                await world.run(transaction, "SELECT * FROM no_such_table")
        await world.run(transaction, "INSERT INTO business (id) VALUES (2)")

    assert await world.rows() == [1, 2]


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("kind", ["postgres-asyncpg", "mariadb-asyncmy", "postgres-engine-psycopg"], indirect=True)
async def test_a_savepoint_that_cannot_be_undone_dooms_the_transaction(world: World) -> None:
    """Whoever catches a time-out of a nested handler must not commit half of it."""
    transactions = transactions_of(world.pool)

    with pytest.raises(TransactionAbortedError):
        async with transactions.begin() as transaction:
            with suppress(TimeoutError):
                async with transactions.savepoint(transaction):
                    await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                    raise TimeoutError

    assert await world.rows() == []


@pytest.mark.requirement("G12")
async def test_a_callback_that_fails_is_logged_and_the_others_are_called(
    sqlite_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error after the commit must not look like a commit that failed."""
    seen: list[int] = []
    await asyncio.to_thread(sqlite_path.touch)

    with caplog.at_level(logging.WARNING, "postroom"):
        async with transactions_for(sqlite_path).begin() as transaction:
            transaction.after_commit(lambda: 1 / 0)
            transaction.after_commit(lambda: seen.append(1))

    assert seen == [1]
    assert "a callback after a commit failed" in caplog.text


# -- plain libraries and threads -------------------------------------------------------------------------------


def here() -> str:
    return threading.current_thread().name


SYNC = tuple(kind for kind in KINDS if kind.endswith(("-sync", "django", "fake", "path", "connection", "sqlite-store")))


@pytest.mark.requirement("F-14")
@pytest.mark.parametrize("kind", SYNC, indirect=True)
async def test_a_plain_library_works_on_one_thread_that_is_used_again(world: World) -> None:
    """Never on the event loop's; Django's connections, for one, belong to threads."""
    transactions = transactions_of(world.pool)
    threads: list[str] = []

    for number in range(3):
        async with transactions.begin() as transaction:
            threads += [await transaction.call(here), await transaction.call(here)]
            await world.run(transaction, f"INSERT INTO business (id) VALUES ({number})")

    assert len(set(threads)) == 1
    assert threads[0] != here()
    assert await world.rows() == [0, 1, 2]


@pytest.mark.requirement("F-13", "F-18")
@every_kind
async def test_a_plain_handler_sees_the_transaction_of_its_message(world: World) -> None:
    """On whatever thread it runs; for an async library it only finds the transaction."""
    middleware = TransactionMiddleware(world.pool)
    is_async = transactions_of(world.pool).is_async  # type: ignore[attr-defined]
    found: list[object] = []

    def handle(message: Message) -> None:
        transaction = current_transaction()
        found.append(transaction)
        if not is_async:
            _run(transaction.connection, "INSERT INTO business (id) VALUES (1)")

    call = bound(handle, JSONCodec())

    async def call_next(message: Message) -> list[Message]:
        await call(message)
        found.append(current_transaction())
        return []

    await middleware(Message(topic="t", payload=b"{}"), call_next)

    assert found[0] is found[1]
    assert await world.rows() == ([] if is_async else [1])


@pytest.mark.requirement("S4-03")
async def test_a_connection_that_is_bound_to_its_thread_is_refused(sqlite_path: Path) -> None:
    """The error says how to open it."""
    connection = sqlite3.connect(sqlite_path)

    with pytest.raises(ConfigurationError, match="check_same_thread=False"):
        async with transactions_for(connection).begin():
            pass

    connection.close()


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("kind", ["sqlite-connection", "sqlite-aiosqlite"], indirect=True)
async def test_the_open_transaction_of_somebody_else_is_left_alone(world: World) -> None:
    """On a connection of the caller's; what cannot be begun must not be rolled back."""
    is_async = transactions_of(world.pool).is_async  # type: ignore[attr-defined]
    await _on(world.pool, "INSERT INTO business (id) VALUES (1)", is_async=is_async)

    with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
        async with transactions_of(world.pool).begin():
            pass

    assert world.pool.in_transaction
    await _on(world.pool, "COMMIT", is_async=is_async)
    assert await world.rows() == [1]
    async with transactions_of(world.pool).begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
    assert await world.rows() == [1, 2]


async def _on(connection: Any, sql: str, *, is_async: bool) -> None:  # noqa: ANN401
    if is_async:
        await connection.execute(sql)
    else:
        connection.execute(sql)


LONG = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {}) SELECT count(*) FROM c"


@pytest.mark.requirement("G1", "F-20")
@pytest.mark.parametrize("kind", ["sqlite-aiosqlite"], indirect=True)
@pytest.mark.parametrize("is_theirs", [True, False])
async def test_who_is_cancelled_while_it_begins_rolls_back_only_its_own(world: World, *, is_theirs: bool) -> None:
    """The thread begins all the same, or finds that somebody else has."""
    connection = world.pool
    if is_theirs:
        await connection.execute("INSERT INTO business (id) VALUES (1)")
    busy = asyncio.create_task(connection.execute(LONG.format(5_000_000)))
    await asyncio.sleep(0)
    begin = transactions_of(connection).begin()
    entering = asyncio.create_task(begin.__aenter__())
    await asyncio.sleep(0.01)
    assert not busy.done()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    await (await busy).close()

    # Whoever is cancelled waits a few seconds for its ROLLBACK, which comes after that statement however long it takes.
    await until(lambda: connection.in_transaction is is_theirs, "the ROLLBACK")
    await connection.commit()
    assert await world.rows() == ([1] if is_theirs else [])


@pytest.mark.requirement("G1")
def test_one_connection_is_used_by_one_event_loop_at_a_time(sqlite_path: Path) -> None:
    """Another loop waits, and neither ends the transaction of the other."""
    connection = sqlite3.connect(sqlite_path, check_same_thread=False)
    connection.execute(TABLE[LITE])
    is_inside, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    async def first() -> None:
        async with transactions.begin() as transaction:
            await transaction.do(_run, "INSERT INTO business (id) VALUES (1)")
            is_inside.set()
            await asyncio.to_thread(may_end.wait, 10)
            await transaction.do(_run, "INSERT INTO business (id) VALUES (2)")
            order.append("first")

    async def second() -> None:
        cancelled = asyncio.create_task(transactions.begin().__aenter__())
        waiting = asyncio.create_task(transactions.begin().__aenter__())
        await asyncio.sleep(0.05)
        cancelled.cancel()
        waiting.cancel()
        await asyncio.wait({cancelled, waiting})
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        async with transactions.begin() as transaction:
            await transaction.do(_run, "INSERT INTO business (id) VALUES (3)")
            order.append("second")

    transactions = transactions_for(connection)
    thread = threading.Thread(target=lambda: asyncio.run(first()))
    thread.start()
    assert is_inside.wait(10)
    asyncio.run(second())
    thread.join()

    assert order == ["first", "second"]
    assert connection.execute("SELECT id FROM business ORDER BY id").fetchall() == [(1,), (2,), (3,)]
    connection.close()


@pytest.mark.requirement("F-25")
async def test_transactions_on_one_file_wait_for_each_other(sqlite_path: Path) -> None:
    """In order and off the event loop, however many there are."""
    sqlite3.connect(sqlite_path).close()  # nothing else creates the file
    transactions = transactions_for(sqlite_path)
    async with transactions.begin() as transaction:
        transaction.connection.execute(TABLE[LITE])

    async def add(number: int) -> None:
        async with transactions.begin() as transaction:
            await transaction.do(_run, f"INSERT INTO business (id) VALUES ({number})")
            await asyncio.sleep(0)

    await asyncio.gather(*(add(number) for number in range(20)))

    async with transactions.begin() as transaction:
        assert transaction.connection.execute("SELECT count(*) FROM business").fetchone() == (20,)
        assert transaction.connection.execute("PRAGMA synchronous").fetchone() == (2,)


# -- which pools are known -------------------------------------------------------------------------------------


@pytest.mark.requirement("F-14")
@every_kind
async def test_one_pool_has_one_way_to_open_transactions(world: World) -> None:
    """That is how a nested handler knows the transaction it may join."""
    assert transactions_of(world.pool) is transactions_of(world.pool)


def test_a_library_of_the_usual_kind_is_supported_in_less_than_sixty_lines() -> None:
    """With the library itself, which passes the tests of every kind and of every server here."""
    assert "mariadb-fake" in MARIADB
    assert len(Path(fakedb.__file__).read_text().splitlines()) < 60


@pytest.mark.requirement("S4-03")
@pytest.mark.parametrize(
    "pool", [object(), "postgresql://localhost/shop", ":memory:", print], ids=["object", "url", "memory", "function"]
)
def test_what_is_no_pool_is_refused(pool: object) -> None:
    """The error names what is accepted."""
    with pytest.raises(UnknownConnectionError, match="asyncpg's Pool"):
        transactions_for(pool)


# mysqlclient never knows that its connection is closed, and SQLAlchemy remembers it alone.
@pytest.mark.requirement("F-15")
@pytest.mark.parametrize("kind", [kind for kind in SERVERS if kind != "mariadb-django"], indirect=True)
async def test_an_error_of_a_library_on_a_lost_connection_is_an_outage(world: World) -> None:
    """Whatever it says; the loss may be the reason."""
    with pytest.raises(StoreUnavailableError):
        async with transactions_of(world.pool).begin() as transaction:
            for statement in (KILL[world.family], "SELECT 1", "SELECT 1"):  # asyncmy notices late
                with suppress(Exception):
                    await world.run(transaction, statement)
            raise sqlite3.IntegrityError("a constraint is violated")

    assert await world.rows() == []


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("kind", ["postgres-session-asyncpg", "postgres-session-sync"], indirect=True)
async def test_what_a_session_writes_last_in_a_failed_transaction_says_that_it_had_failed(world: World) -> None:
    """As everywhere else, and not that its own statement was refused."""
    with pytest.raises(TransactionAbortedError):
        async with transactions_of(world.pool).begin() as transaction:
            with suppress(Exception):
                await world.run(transaction, "SELECT * FROM no_such_table")
            transaction.connection.add(Business(id=1))

    assert await world.rows() == []


@pytest.mark.requirement("G13", "F-15")
async def test_a_database_that_is_down_is_an_error_of_the_store() -> None:
    """So that no message becomes a dead letter for it."""
    nowhere = "postgresql://nobody@127.0.0.1:1/shop"
    engine = sqlalchemy.create_engine(nowhere.replace("postgresql", "postgresql+psycopg"))
    async with asyncpg.create_pool(nowhere, min_size=0) as pool:
        for source in (pool, engine, PostgresStore(nowhere), PostgresStore(nowhere, driver="psycopg")):
            with pytest.raises(StoreUnavailableError):
                async with transactions_of(source).begin():
                    pass


# -- how COMMIT may end ----------------------------------------------------------------------------------------


@pytest.mark.requirement("G1", "G12")
@every_postgres
async def test_an_error_that_was_caught_does_not_pass_for_a_commit(world: World) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK."""
    transactions = transactions_of(world.pool)
    seen: list[int] = []
    async with transactions.begin() as transaction:  # which teaches how to hear the answer
        await world.run(transaction, "SELECT 1")

    for _ in range(3):
        with pytest.raises(TransactionAbortedError):
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                transaction.after_commit(lambda: seen.append(1))
                with suppress(Exception):
                    await world.run(transaction, "SELECT * FROM no_such_table")

    assert seen == []
    assert await world.rows() == []


@pytest.mark.requirement("G12", "F-15")
@every_postgres
async def test_a_commit_that_the_database_refuses_is_told_as_the_library_tells_it(world: World) -> None:
    """A rule that is checked by COMMIT; the connection can be used again."""
    transactions = transactions_of(world.pool)

    for _ in range(3):
        with pytest.raises(Exception, match="duplicate key") as caught:
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business VALUES (1, 7), (2, 7)")
        assert not isinstance(caught.value, CommitUnknownError)

    assert await world.rows() == []


KILL = {PG: "SELECT pg_terminate_backend(pg_backend_pid())", MY: "KILL CONNECTION_ID()"}


@pytest.mark.requirement("G1", "G12", "F-15")
@every_server
async def test_a_lost_connection_that_was_caught_does_not_pass_for_a_commit(world: World) -> None:
    """Nothing was committed, and that is no fault of the message."""
    transactions = transactions_of(world.pool)
    seen: list[int] = []

    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                transaction.after_commit(lambda: seen.append(1))
                with suppress(Exception):
                    await world.run(transaction, KILL[world.family])

    assert seen == []
    assert await world.rows() == []


@pytest.mark.requirement("F-15")
@every_server
async def test_what_comes_after_a_lost_connection_is_an_error_of_the_store(world: World) -> None:
    """Whatever the library calls it, once the first error was caught."""
    with pytest.raises(StoreUnavailableError):
        async with transactions_of(world.pool).begin() as transaction:
            with suppress(Exception):
                await world.run(transaction, KILL[world.family])
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")

    assert await world.rows() == []


@pytest.mark.requirement("G13", "F-15")
@every_postgres
@pytest.mark.parametrize(
    ("state", "kind_of_error"),
    [("57014", StoreTimeoutError), ("25006", ReadOnlyStoreError), ("28000", StoreAuthenticationError)],
)
async def test_what_the_server_is_to_blame_for_is_an_error_of_the_store(
    world: World, state: str, kind_of_error: type[Exception]
) -> None:
    """It took too long, is a replica, lets nobody in: no message becomes a dead letter for it."""
    with pytest.raises(kind_of_error) as caught:
        async with transactions_of(world.pool).begin() as transaction:
            await world.run(transaction, f"DO $$ BEGIN RAISE SQLSTATE '{state}'; END $$")

    assert caught.value.__cause__ is not None


class Row(sqlalchemy.orm.DeclarativeBase):
    """Base of what sessions write."""


class Business(Row):
    """A row of the table."""

    __tablename__ = "business"
    id: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)
    again: sqlalchemy.orm.Mapped[str]


CARD = "4111-1111"


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("kind", SQLALCHEMY, indirect=True)
async def test_an_error_does_not_show_what_was_written(world: World) -> None:
    """Errors end up in logs and dead letters; SQLAlchemy shows the parameters unless told otherwise."""
    statement = sqlalchemy.text("INSERT INTO no_such_table VALUES (:secret)")

    def write(connection: Any) -> Any:  # noqa: ANN401
        return connection.execute(statement, {"secret": CARD})

    with pytest.raises(RuntimeError) as caught:
        async with transactions_of(world.pool).begin() as transaction:
            try:
                await transaction.do(write)
            except sqlalchemy.exc.SQLAlchemyError as error:
                raise RuntimeError from error
    told = "".join(traceback.format_exception(caught.value))
    assert "no_such_table" in told
    assert CARD not in told


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("kind", ["postgres-session-sync"], indirect=True)
@pytest.mark.parametrize("is_caught", [True, False])
async def test_an_error_of_a_session_does_not_show_what_was_written(world: World, *, is_caught: bool) -> None:
    """Also one that comes with the commit, or of another one that was caught."""
    await asyncio.to_thread(world.look, "DROP TABLE business")

    def write(session: Any) -> None:  # noqa: ANN401
        session.add(Business(id=1, again=CARD))
        if is_caught:
            with suppress(sqlalchemy.exc.SQLAlchemyError):
                session.flush()
            session.execute(sqlalchemy.text("SELECT 1"))

    with pytest.raises(Exception) as caught:  # noqa: PT011 -- the library's, or ours
        async with transactions_of(world.pool).begin() as transaction:
            await transaction.do(write)

    assert isinstance(caught.value, TransactionAbortedError) is is_caught
    assert CARD not in "".join(traceback.format_exception(caught.value))


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("kind", SQLITE + MARIADB, indirect=True)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_handler_that_goes_on_in_a_transaction_of_its_own_is_found_out(world: World, end: str) -> None:
    """What it does after that is not committed as if it had belonged to the message."""
    transactions = transactions_of(world.pool)

    for _ in range(2):
        with pytest.raises(TransactionAbortedError):
            async with transactions.begin() as transaction:
                await world.run(transaction, end)
                await world.run(transaction, "BEGIN")
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")

    assert await world.rows() == []


# With a driver that begins a transaction by itself, nothing tells a ROLLBACK by hand from one that has done nothing.
@pytest.mark.requirement("G1")
@pytest.mark.parametrize(
    "kind",
    [kind for kind in SERVERS if family(kind) == MY or not kind.endswith(("-sync", "engine-psycopg", "django"))],
    indirect=True,
)
async def test_a_handler_that_ends_the_transaction_by_hand_is_found_out(world: World) -> None:
    """What it did after that was no longer part of it."""
    transactions = transactions_of(world.pool)

    with pytest.raises(TransactionAbortedError):
        async with transactions.begin() as transaction:
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
            await world.run(transaction, "ROLLBACK")

    assert await world.rows() == []


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("kind", SQLALCHEMY, indirect=True)
async def test_a_handler_that_ends_the_transaction_of_sqlalchemy_is_found_out(world: World) -> None:
    """SQLAlchemy would begin the next one by itself."""
    transactions = transactions_of(world.pool)

    with pytest.raises(TransactionAbortedError, match="a COMMIT or ROLLBACK was sent in it"):
        async with transactions.begin() as transaction:
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
            await transaction.do(lambda connection: connection.rollback())
            await world.run(transaction, "INSERT INTO business (id) VALUES (2)")

    assert await world.rows() == []


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
@pytest.mark.parametrize("is_caught", [True, False])
async def test_a_transaction_that_was_ended_by_hand_does_not_spoil_the_next_one(
    postgres_dsn: str, driver: Literal["asyncpg", "psycopg"], *, is_caught: bool
) -> None:
    """They share a connection of the store, and only the first handler is to blame."""
    store = PostgresStore(postgres_dsn, driver=driver, connections=1)
    await store.apply_schema()
    transactions = store.transactions()

    with pytest.raises(TransactionAbortedError if is_caught else ValueError):
        async with transactions.begin() as transaction:
            await transaction.connection.execute("COMMIT")
            if not is_caught:
                raise ValueError("the handler fails as well")
    async with transactions.begin() as transaction:
        await transaction.connection.execute("CREATE TABLE business (id int)")

    await store.close()


def through(dsn: str, proxy: FaultProxy) -> str:
    url = urlsplit(dsn)
    user = f"{url.username}@" if url.username else ""
    return url._replace(netloc=f"{user}127.0.0.1:{proxy.port}").geturl()


NO_TLS = {"postgres-engine-asyncpg": "?ssl=disable", "postgres-session-asyncpg": "?ssl=disable"}


@asynccontextmanager
async def faulty(kind: str, request: pytest.FixtureRequest) -> AsyncGenerator[tuple[World, FaultProxy]]:
    """A pool whose connections go through a proxy."""
    dsn = str(request.getfixturevalue("postgres_dsn" if family(kind) == PG else "mariadb_dsn"))
    ask = asking(family(kind), dsn)
    await asyncio.to_thread(ask, TABLE[family(kind)])
    url = urlsplit(dsn)
    async with FaultProxy(str(url.hostname), url.port or 0) as proxy:
        default = "" if kind == "postgres-django" or family(kind) == MY else "?sslmode=disable"
        async with pool_on(kind, through(dsn, proxy) + NO_TLS.get(kind, default)) as pool:
            yield World(kind, dsn, pool, ask), proxy


@pytest.mark.requirement("G12")
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_commit_without_an_answer_is_called_unknown(kind: str, request: pytest.FixtureRequest) -> None:
    """It was stored here, and nobody was told; the pool can be used after it."""
    async with faulty(kind, request) as (world, proxy):
        transactions = transactions_of(world.pool)
        seen: list[int] = []
        async with transactions.begin() as transaction:
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")

        with pytest.raises(CommitUnknownError) as caught:
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
                transaction.after_commit(lambda: seen.append(1))
                proxy.drop_reply(b"COMMIT")
        proxy.heal()

        assert caught.value.__cause__ is not None
        assert seen == []
        with pytest.raises(ConfigurationError, match="nothing tells"):
            await caught.value.resolve()

        async def is_back() -> bool:
            try:
                async with transactions.begin() as transaction:
                    await world.run(transaction, "INSERT INTO business (id) VALUES (3)")
            except StoreUnavailableError:
                return False
            return True

        await until(is_back, "a new connection")
        assert await world.rows() == [1, 2, 3]


@pytest.mark.requirement("G12", "F-20")
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_cancelled_commit_is_waited_for(kind: str, request: pytest.FixtureRequest) -> None:
    """Then the cancellation goes on, and what was committed is told to those who wait for it."""
    async with faulty(kind, request) as (world, proxy):
        transactions = transactions_of(world.pool)
        seen: list[int] = []
        is_committing = asyncio.Event()

        async def work() -> None:
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                transaction.after_commit(lambda: seen.append(1))
                proxy.black_hole("replies")
                is_committing.set()

        task = asyncio.create_task(work())
        await is_committing.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        proxy.heal()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert seen == [1]
        assert await world.rows() == [1]
        async with transactions.begin() as transaction:
            await world.run(transaction, "INSERT INTO business (id) VALUES (2)")


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("kind", ["postgres-asyncpg", "postgres-psycopg", "postgres-store-asyncpg", "mariadb-asyncmy"])
async def test_a_cancelled_commit_is_not_waited_for_without_end(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that answers nothing is broken, and never used again."""
    monkeypatch.setattr("postroom.stores.sql.transactions.PATIENCE", 0.1)
    async with faulty(kind, request) as (world, proxy):
        transactions = transactions_of(world.pool)
        accepted = 0

        async def work() -> None:
            nonlocal accepted
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
                proxy.black_hole()
                accepted = proxy.accepted

        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await work()
            proxy.heal()
            async with transactions.begin() as transaction:
                await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
        assert proxy.accepted > accepted


@pytest.mark.requirement("F-20")
@every_server
async def test_a_handler_that_is_cancelled_in_a_statement_leaves_no_lock_behind(world: World) -> None:
    """And its connection does not go back to the pool as it is."""
    transactions = transactions_of(world.pool)
    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
    pause = "SELECT pg_sleep(0.3)" if world.family == PG else "SELECT sleep(0.3)"

    async def work() -> None:
        async with transactions.begin() as transaction:
            await world.run(transaction, "UPDATE business SET again = 1 WHERE id = 1")
            await world.run(transaction, pause)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await work()

    async def is_free() -> bool:
        async with transactions.begin() as transaction:
            await world.run(transaction, "UPDATE business SET again = 2 WHERE id = 1")
        return True

    await until(is_free, "the end of the lock")
    assert await asyncio.to_thread(world.look, "SELECT again FROM business") == [(2,)]


@pytest.mark.requirement("G11", "F-20")
@pytest.mark.parametrize("kind", [*SYNC, "sqlite-aiosqlite"], indirect=True)
@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_statement_on_a_thread_does_not_hold_up_a_time_limit_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_nested: bool
) -> None:
    """After a while its connection is broken, and the pool can be used again."""
    monkeypatch.setattr("postroom.stores.sql.transactions.PATIENCE", 0.1)
    transactions = transactions_of(world.pool)
    pause = {PG: "SELECT pg_sleep(25)", MY: "SELECT sleep(25)", LITE: LONG.format(300_000_000)}[world.family]
    loop = asyncio.get_running_loop()

    async def work() -> None:
        async with transactions.begin() as transaction:
            await world.run(transaction, "INSERT INTO business (id) VALUES (1)")
            if is_nested:
                async with transactions.savepoint(transaction):
                    await world.run(transaction, pause)
            else:
                await world.run(transaction, pause)

    started = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await work()
    assert loop.time() - started < 15

    async with transactions.begin() as transaction:
        await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
    gate = transactions.source._lanes._gate  # type: ignore[attr-defined]  # noqa: SLF001
    await until(lambda: gate._inside == [], "the end of the statement")  # noqa: SLF001
    assert loop.time() - started < 15
    assert await world.rows() == [2]


# -- contention ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G7", "F-14")
@every_postgres
async def test_a_serialization_failure_runs_the_whole_handler_again(world: World) -> None:
    """In a new transaction, which sees what stood in the way."""
    middleware = TransactionMiddleware(world.pool)
    await asyncio.to_thread(world.look, "INSERT INTO business (id, again) VALUES (1, 0)")
    runs: list[Transaction] = []

    async def handle(message: Message) -> list[Message]:
        transaction = current_transaction()
        runs.append(transaction)
        await world.run(transaction, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await world.run(transaction, "SELECT again FROM business")
        await world.run(transaction, f"INSERT INTO business (id) VALUES ({len(runs) + 10})")
        if len(runs) == 1:
            await asyncio.to_thread(world.look, "UPDATE business SET again = 5")
        await world.run(transaction, "UPDATE business SET again = again + 1 WHERE id = 1")
        return []

    await middleware(Message(topic="t", payload=b""), handle)

    assert len(runs) == 2
    assert runs[0] is not runs[1]
    assert await world.rows() == [1, 12]
    assert await asyncio.to_thread(world.look, "SELECT again FROM business WHERE id = 1") == [(6,)]


@pytest.mark.requirement("F-15")
@every_postgres
async def test_contention_that_does_not_end_is_told_after_a_few_tries(world: World) -> None:
    """As an error of the store, with the library's own chained."""
    middleware = TransactionMiddleware(world.pool, retries=2)
    runs = 0

    async def handle(message: Message) -> list[Message]:
        nonlocal runs
        runs += 1
        await world.run(current_transaction(), "DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
        return []

    with pytest.raises(StoreContentionError) as caught:
        await middleware(Message(topic="t", payload=b""), handle)

    assert runs == 3
    assert caught.value.__cause__ is not None


@pytest.mark.requirement("G7", "F-20")
@every_mariadb
async def test_waiting_too_long_for_a_lock_rolls_back_everything(world: World) -> None:
    """By itself 1205 undoes only its own statement."""
    transactions = transactions_of(world.pool)
    await asyncio.to_thread(world.look, "INSERT INTO business (id, again) VALUES (1, 0)")

    async with asyncio.timeout(30):
        async with transactions.begin() as holder:
            await world.run(holder, "UPDATE business SET again = 1 WHERE id = 1")
            with pytest.raises(StoreContentionError):
                async with transactions.begin() as transaction:
                    await world.run(transaction, "SET SESSION innodb_lock_wait_timeout = 1")
                    await world.run(transaction, "INSERT INTO business (id) VALUES (2)")
                    await world.run(transaction, "UPDATE business SET again = 2 WHERE id = 1")

    assert await world.rows() == [1]


@pytest.mark.requirement("G1", "G12")
@every_mariadb
async def test_a_deadlock_that_was_caught_does_not_pass_for_a_commit(world: World) -> None:
    """The server has rolled back everything, and would commit what comes after it."""
    transactions = transactions_of(world.pool)
    await asyncio.to_thread(world.look, "INSERT INTO business (id, again) VALUES (1, 0), (2, 0)")
    both = asyncio.Barrier(2)

    async def work(first: int, second: int) -> str:
        try:
            async with transactions.begin() as transaction:
                await world.run(transaction, f"UPDATE business SET again = {first} WHERE id = {first}")
                await both.wait()
                caught = False
                try:
                    await world.run(transaction, f"UPDATE business SET again = {first} WHERE id = {second}")
                except Exception:  # noqa: BLE001 -- as a careless handler does
                    caught = True
                await world.run(transaction, f"INSERT INTO business (id) VALUES ({first + 10})")
        except TransactionAbortedError:
            return "aborted" if caught else "?"
        return "committed"

    ends = await asyncio.gather(work(1, 2), work(2, 1))

    assert sorted(ends) == ["aborted", "committed"]
    winner = 1 + ends.index("committed")
    assert {row[0] for row in await asyncio.to_thread(world.look, "SELECT again FROM business WHERE id < 10")} == {
        winner
    }


@pytest.mark.requirement("F-15")
async def test_a_file_that_is_locked_by_another_is_contention(sqlite_path: Path) -> None:
    """Told after the time that SQLite waits."""
    with contextlib.closing(sqlite3.connect(sqlite_path, isolation_level=None)) as other:
        store = SQLiteStore(sqlite_path)
        store._pool._busy_timeout /= 100  # type: ignore[attr-defined]  # noqa: SLF001
        transactions = store.transactions()
        async with transactions.begin():
            pass
        other.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreContentionError):
            async with transactions.begin():
                pass
        await store.close()


# -- nested ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-14")
@every_kind
async def test_a_nested_handler_joins_the_transaction_of_its_pool(world: World) -> None:
    """Both are committed together, or neither."""
    outer, inner = TransactionMiddleware(world.pool), TransactionMiddleware(world.pool)
    found: list[Transaction] = []
    message = Message(topic="t", payload=b"")

    async def nested(message: Message) -> list[Message]:
        found.append(current_transaction())
        await world.run(current_transaction(), "INSERT INTO business (id) VALUES (1)")
        return []

    async def handle(message: Message) -> list[Message]:
        found.append(current_transaction())
        await inner(message, nested)
        raise LookupError

    with pytest.raises(LookupError):
        await outer(message, handle)

    assert found[0] is found[1]
    assert await world.rows() == []


@pytest.mark.requirement("F-14")
@every_kind
async def test_a_nested_handler_may_have_a_savepoint(world: World) -> None:
    """Its failure is its own, if the outer handler goes on."""
    outer, inner = TransactionMiddleware(world.pool), TransactionMiddleware(world.pool, nested="savepoint")
    message = Message(topic="t", payload=b"")

    async def nested(message: Message) -> list[Message]:
        await world.run(current_transaction(), "INSERT INTO business (id) VALUES (1)")
        raise LookupError

    async def handle(message: Message) -> list[Message]:
        with suppress(LookupError):
            await inner(message, nested)
        await world.run(current_transaction(), "INSERT INTO business (id) VALUES (2)")
        return []

    await outer(message, handle)

    assert await world.rows() == [2]


@pytest.mark.requirement("F-14")
async def test_a_transaction_on_another_pool_is_its_own(postgres_dsn: str) -> None:
    """It is committed although the outer one is not."""
    await asyncio.to_thread(asking(PG, postgres_dsn), TABLE[PG])
    async with pool_on("postgres-asyncpg", postgres_dsn) as first, pool_on("postgres-psycopg", postgres_dsn) as second:
        outer, inner = TransactionMiddleware(first), TransactionMiddleware(second)

        async def nested(message: Message) -> list[Message]:
            await _run_async(current_connection(second), "INSERT INTO business (id) VALUES (1)")
            return []

        async def handle(message: Message) -> list[Message]:
            await inner(message, nested)
            await _run_async(current_connection(first), "INSERT INTO business (id) VALUES (2)")
            raise LookupError

        with pytest.raises(LookupError):
            await outer(Message(topic="t", payload=b""), handle)

    assert await asyncio.to_thread(asking(PG, postgres_dsn), "SELECT id FROM business") == [(1,)]


# -- connections of a store ------------------------------------------------------------------------------------


@pytest.mark.requirement("F-14")
@pytest.mark.parametrize("kind", ["postgres-store-asyncpg", "postgres-store-psycopg"], indirect=True)
async def test_a_handler_has_a_session_with_the_settings_of_its_server(world: World) -> None:
    """But for what durability asks for; our own statements have plans that others need not."""
    async with transactions_of(world.pool).begin() as transaction:
        found = {}
        for name in ("enable_seqscan", "plan_cache_mode", "synchronous_commit"):
            driver = driver_of(transaction.connection)
            assert driver is not None
            answer = await finish_async(driver.execute(transaction.connection, _show(name)))
            found[name] = answer.rows[0][0]

    assert found == {"enable_seqscan": "on", "plan_cache_mode": "auto", "synchronous_commit": "on"}


def _show(name: str) -> Statement:
    return Statement(f"SHOW {name}", {}, returns=True)


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("kind", ["postgres-store-asyncpg", "postgres-store-psycopg", "mariadb-store"], indirect=True)
async def test_handlers_do_not_hold_up_the_store(world: World) -> None:
    """Their connections are as many, and others; one more handler waits, and not for ever."""
    store = world.pool
    await store.apply_schema()
    transactions = store.transactions()

    async with transactions.begin(), transactions.begin():
        stats = await store.stats()
        transactions.source._timeout = timedelta(milliseconds=50)  # noqa: SLF001
        with pytest.raises(StoreTimeoutError):
            async with transactions.begin():
                pass

    assert stats.pending == 0


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("kind", ["postgres-store-asyncpg", "postgres-store-psycopg", "mariadb-store"])
async def test_a_closed_store_leaves_no_connection_of_a_handler_open(kind: str, request: pytest.FixtureRequest) -> None:
    """Also of a handler that was at work when it was closed."""
    async with faulty(kind, request) as (world, proxy):
        transactions = transactions_of(world.pool)
        async with transactions.begin(), transactions.begin():
            pass
        assert proxy.open == 2
        async with transactions.begin():
            await world.pool.close()

        await until(lambda: proxy.open == 0, "the end of the connections")


@pytest.mark.requirement("F-20")
@pytest.mark.parametrize("kind", ["postgres-store-asyncpg", "postgres-store-psycopg", "mariadb-store"], indirect=True)
async def test_a_cancelled_handler_costs_only_its_own_connection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on with theirs; a connection that was lost costs all of them, since they may be lost too."""
    transactions = transactions_of(world.pool)
    connector, opened = world.pool._pool._connector, 0  # noqa: SLF001
    connect = connector.connect_plain

    async def counted() -> Any:  # noqa: ANN401
        nonlocal opened
        opened += 1
        return await connect()

    monkeypatch.setattr(connector, "connect_plain", counted)
    async with transactions.begin(), transactions.begin():
        assert opened == 2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), transactions.begin() as transaction:
            await world.run(transaction, "SELECT pg_sleep(3)" if world.family == PG else "SELECT sleep(3)")
    async with transactions.begin(), transactions.begin():
        assert opened == 3
    with pytest.raises(StoreUnavailableError):
        async with transactions.begin() as transaction:
            await world.run(transaction, KILL[world.family])
    async with transactions.begin(), transactions.begin():
        assert opened == 5


# -- Outbox.transaction goes the same way ----------------------------------------------------------------------


ASYNC_POOLS = ("postgres-asyncpg", "postgres-psycopg", "postgres-engine-asyncpg", "mariadb-asyncmy")


@pytest.mark.requirement("G12")
@pytest.mark.parametrize("kind", ASYNC_POOLS, indirect=True)
async def test_a_transaction_of_the_outbox_tells_errors_as_the_library_does(world: World) -> None:
    """What a service does about the errors of its own library goes on to work."""
    sqlstate = "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"
    sql = sqlstate if world.family == PG else "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"

    with pytest.raises(Exception) as caught:  # noqa: PT011 -- each library has its own
        async with Outbox().transaction(world.pool) as connection:
            await _run_async(connection, "INSERT INTO business (id) VALUES (1)")
            await _run_async(connection, sql)

    assert not isinstance(caught.value, PostroomError)
    with pytest.raises(StoreContentionError):
        async with transactions_of(world.pool).begin() as transaction:
            await world.run(transaction, sql)
    assert await world.rows() == []


@pytest.mark.requirement("S2-34")
@pytest.mark.parametrize("kind", ASYNC_POOLS, indirect=True)
async def test_a_transaction_of_the_outbox_wakes_after_its_commit(world: World) -> None:
    """On every async pool."""
    seen: list[int] = []

    async with Outbox(wake=lambda: seen.append(1)).transaction(world.pool) as connection:
        await _run_async(connection, "INSERT INTO business (id) VALUES (1)")
        before = list(seen)

    assert (before, seen) == ([], [1])
    assert await world.rows() == [1]


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg"])
async def test_an_error_that_may_pass_shows_no_row(kind: str, postgres_dsn: str) -> None:
    """The server tells the row in lines of their own, and a text on one line would hide where they begin."""
    store = PostgresStore(postgres_dsn, driver="psycopg" if kind == "psycopg" else "asyncpg")
    refuse = "DO $$ BEGIN RAISE 'busy' USING ERRCODE = '40001', DETAIL = 'row (canary)'; END $$"

    with pytest.raises(StoreContentionError) as caught:
        async with store.transactions().begin() as transaction:
            await transaction.connection.execute(refuse)

    await store.close()
    assert "busy" in str(caught.value)
    assert "canary" not in str(caught.value)
