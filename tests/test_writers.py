"""Adding through the caller's transaction, on every library and every database it speaks to."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import sqlite3
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import aiosqlite
import asyncmy
import asyncmy.cursors
import asyncpg
import django  # type: ignore[import-untyped]
import django.db.transaction  # type: ignore[import-untyped]
import psycopg
import psycopg.rows
import pymysql
import pymysql.cursors
import pytest
import sqlalchemy
from django.conf import settings  # type: ignore[import-untyped]
from django.utils.connection import ConnectionProxy  # type: ignore[import-untyped]
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio
from sqlalchemy.pool import NullPool

from postroom import AddResult, Message, Outbox
from postroom.errors import InvalidTopicError, NotInTransactionError, SchemaMissingError, TransactionAbortedError
from postroom.stores import SQLStore, store_from_url
from postroom.testing.clients import MariaDBClient, PostgresClient
from postroom.testing.waiting import until

from .support.server_fixtures import mysqldb

if not settings.configured:
    settings.configure(DATABASES={}, USE_TZ=True)
    django.setup()


# -- the databases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Databases:
    """Where the tests write; each has the outbox and a table of business data."""

    postgres: str
    mariadb: str
    sqlite: Path


@pytest.fixture(scope="module")
def databases(
    postgres_server: PostgresClient, mariadb_server: MariaDBClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Databases]:
    name = f"test_{uuid4().hex}"
    path = tmp_path_factory.mktemp("sqlite") / "shop.sqlite3"
    made = Databases(postgres_server.create_database(name), mariadb_server.create_database(name), path)
    try:
        for url in (made.postgres, made.mariadb, f"sqlite:///{path}"):
            asyncio.run(apply_schema(url))
        for kind in ("postgres", "mariadb", "sqlite"):
            look(made, kind, "CREATE TABLE business (id VARCHAR(36) PRIMARY KEY)")
        yield made
    finally:
        postgres_server.drop_database(name)
        mariadb_server.drop_database(name)


async def apply_schema(url: str) -> None:
    store = store_from_url(url)
    assert isinstance(store, SQLStore)
    await store.apply_schema()
    await store.close()


def mysql_options(url: str) -> dict[str, Any]:
    parsed = sqlalchemy.make_url(url)
    return {
        "host": parsed.host,
        "port": parsed.port,
        "user": parsed.username,
        "password": parsed.password or "",
        "database": parsed.database,
    }


def look(databases: Databases, kind: str, sql: str) -> list[tuple[Any, ...]]:
    """Run a statement on a connection of our own, which sees only what is committed."""
    if kind == "postgres":
        with psycopg.connect(databases.postgres, autocommit=True) as connection:
            found = connection.execute(sql)
            return list(found.fetchall()) if found.description else []
    if kind == "mariadb":
        mysql = pymysql.connect(**mysql_options(databases.mariadb), autocommit=True)
        with mysql, mysql.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())
    link = sqlite3.connect(databases.sqlite, isolation_level=None)
    try:
        return link.execute(sql).fetchall()
    finally:
        link.close()


# -- the libraries ---------------------------------------------------------------------------------------------


class Link:
    """A connection of some library: how it begins and ends a transaction, and what `add` is given."""

    handle: Any

    async def begin(self) -> None:
        """Do nothing: most libraries begin by themselves."""

    async def commit(self) -> None:
        await awaited(self.handle.commit())

    async def rollback(self) -> None:
        await awaited(self.handle.rollback())

    async def execute(self, sql: str) -> None:
        await awaited(self.handle.execute(sql))


async def awaited(value: Any) -> Any:  # noqa: ANN401
    return await value if inspect.isawaitable(value) else value


class AsyncpgLink(Link):
    transaction: Any = None

    async def begin(self) -> None:
        self.transaction = self.handle.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()

    async def rollback(self) -> None:
        await self.transaction.rollback()


class ExplicitLink(Link):
    """Begins with a statement, where the driver was told not to."""

    statement = "BEGIN"

    async def begin(self) -> None:
        await self.execute(self.statement)


class ImmediateLink(ExplicitLink):
    statement = "BEGIN IMMEDIATE"


class MySQLLink(Link):
    async def execute(self, sql: str) -> None:
        if not isinstance(self.handle, asyncmy.Connection):
            with self.handle.cursor() as cursor:
                cursor.execute(sql)
        else:
            async with self.handle.cursor() as cursor:
                await cursor.execute(sql)


class BeginningMySQLLink(MySQLLink):
    async def begin(self) -> None:
        await awaited(self.handle.begin())


class SQLAlchemyLink(Link):
    async def execute(self, sql: str) -> None:
        await awaited(self.handle.execute(sqlalchemy.text(sql)))


class DjangoLink(Link):
    atomic: Any = None

    async def begin(self) -> None:
        self.atomic = django.db.transaction.atomic(using=self.handle.alias)
        self.atomic.__enter__()

    async def commit(self) -> None:
        self.atomic.__exit__(None, None, None)

    async def rollback(self) -> None:
        self.handle.set_rollback(True)
        self.atomic.__exit__(None, None, None)

    async def execute(self, sql: str) -> None:
        with self.handle.cursor() as cursor:
            cursor.execute(sql)


Opener = Callable[[Databases, bool], Any]


@dataclass(frozen=True)
class Library:
    """One library with one setting; ``open`` is also asked for a connection on which everything commits by itself."""

    name: str
    database: str
    open: Callable[[Databases, bool], AsyncGenerator[Link]]

    @asynccontextmanager
    async def opened(self, databases: Databases, *, autocommit: bool = False) -> AsyncGenerator[Link]:
        async with asynccontextmanager(self.open)(databases, autocommit) as link:
            yield link


def link_to(handle: object, kind: type[Link]) -> Link:
    link = kind()
    link.handle = handle
    return link


async def asyncpg_connection(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
    connection = await asyncpg.connect(databases.postgres)
    try:
        yield link_to(connection, AsyncpgLink)
    finally:
        await connection.close()


async def asyncpg_pool(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
    async with asyncpg.create_pool(databases.postgres, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield link_to(connection, AsyncpgLink)


def psycopg_sync(**options: Any) -> Opener:  # noqa: ANN401
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        explicit = options.get("autocommit", False)
        with psycopg.connect(databases.postgres, **{**options, "autocommit": explicit or autocommit}) as connection:
            yield link_to(connection, ExplicitLink if explicit else Link)

    return opened


def psycopg_async(**options: Any) -> Opener:  # noqa: ANN401
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        explicit = options.get("autocommit", False)
        together = {**options, "autocommit": explicit or autocommit}
        async with await psycopg.AsyncConnection.connect(databases.postgres, **together) as connection:
            yield link_to(connection, ExplicitLink if explicit else Link)

    return opened


def bytes_rows(connection: Any) -> None:  # noqa: ANN401
    connection.row_factory = lambda cursor, row: dict(zip([c[0] for c in cursor.description], row, strict=True))
    connection.text_factory = bytes


def sqlite(level: str | None, change: Callable[[Any], None] = lambda _: None) -> Opener:
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        connection = sqlite3.connect(databases.sqlite, isolation_level=None if autocommit else level)  # type: ignore[arg-type]
        change(connection)
        try:
            yield link_to(connection, ImmediateLink if level is None else Link)
        finally:
            connection.close()

    return opened


def sqlite_async(level: str | None, change: Callable[[Any], None] = lambda _: None) -> Opener:
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        chosen: Any = None if autocommit else level
        async with aiosqlite.connect(databases.sqlite, isolation_level=chosen) as connection:
            change(connection)
            yield link_to(connection, ImmediateLink if level is None else Link)

    return opened


def sqlite_by_mode(connect: Callable[..., Any]) -> Opener:
    """Return how to open connections whose ``autocommit`` says what begins a transaction: Python 3.12 and later."""

    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        connection = await awaited(connect(databases.sqlite, autocommit=autocommit))
        try:
            yield link_to(connection, Link)
        finally:
            await awaited(connection.close())

    return opened


def mysql_sync(find: Callable[[], Any] = lambda: pymysql, *, dict_rows: bool = False, **options: Any) -> Opener:  # noqa: ANN401
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        explicit = options.get("autocommit", False)
        together = {**mysql_options(databases.mariadb), **options, "autocommit": explicit or autocommit}
        library = find()
        if dict_rows:
            together["cursorclass"] = importlib.import_module(f"{library.__name__}.cursors").DictCursor
        with library.connect(**together) as connection:
            yield link_to(connection, BeginningMySQLLink if explicit else MySQLLink)

    return opened


def mysql_async(**options: Any) -> Opener:  # noqa: ANN401
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        explicit = options.get("autocommit", False)
        together = {**mysql_options(databases.mariadb), **options, "autocommit": explicit or autocommit}
        async with asyncmy.connect(**together) as connection:
            yield link_to(connection, BeginningMySQLLink if explicit else MySQLLink)

    return opened


def sqlalchemy_url(databases: Databases, driver: str) -> sqlalchemy.URL:
    if driver.startswith("sqlite"):
        return sqlalchemy.URL.create(driver, database=str(databases.sqlite))
    dsn = databases.postgres if driver.startswith("postgresql") else databases.mariadb
    return sqlalchemy.make_url(dsn).set(drivername=driver)


def engine_options(*, autocommit: bool) -> dict[str, Any]:
    return {"poolclass": NullPool, **({"isolation_level": "AUTOCOMMIT"} if autocommit else {})}


def alchemy(
    driver: str, make: Callable[[sqlalchemy.Engine], Any], change: Callable[[sqlalchemy.Engine], None] | None = None
) -> Opener:
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        if driver.endswith("mysqldb"):
            mysqldb()
        engine = sqlalchemy.create_engine(sqlalchemy_url(databases, driver), **engine_options(autocommit=autocommit))
        if change is not None and not autocommit:
            change(engine)
        handle = make(engine)
        try:
            yield link_to(handle, SQLAlchemyLink)
        finally:
            handle.close()
            engine.dispose()

    return opened


def alchemy_async(driver: str, make: Callable[[sa_asyncio.AsyncEngine], Any]) -> Opener:
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        options = engine_options(autocommit=autocommit)
        engine = sa_asyncio.create_async_engine(sqlalchemy_url(databases, driver), **options)
        handle = make(engine)
        if isinstance(handle, sa_asyncio.AsyncConnection):
            await handle.start()
        try:
            yield link_to(handle, SQLAlchemyLink)
        finally:
            await handle.close()
            await engine.dispose()

    return opened


def async_scoped(engine: sa_asyncio.AsyncEngine) -> sa_asyncio.async_scoped_session[sa_asyncio.AsyncSession]:
    return sa_asyncio.async_scoped_session(sa_asyncio.async_sessionmaker(engine), scopefunc=lambda: 1)


def begin_by_event(engine: sqlalchemy.Engine) -> None:
    """Follow SQLAlchemy's recipe for SQLite: take BEGIN away from the driver, and send it in an event."""

    @sqlalchemy.event.listens_for(engine, "connect")
    def take(connection: Any, _record: object) -> None:  # noqa: ANN401
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def send(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def django_connection(database: str) -> Opener:
    async def opened(databases: Databases, autocommit: bool) -> AsyncGenerator[Link]:  # noqa: FBT001
        if database == "postgres":
            url = sqlalchemy.make_url(databases.postgres)
            options: dict[str, Any] = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": url.database,
                "USER": url.username,
                "HOST": url.host,
                "PORT": url.port,
            }
        else:
            options = {"ENGINE": "django.db.backends.sqlite3", "NAME": databases.sqlite}
        alias = f"a{uuid4().hex}"
        known = django.db.connections
        known.databases[alias] = known.configure_settings({"default": {}, alias: options})[alias]
        connection = ConnectionProxy(known, alias)
        try:
            yield link_to(connection, DjangoLink)
        finally:
            connection.close()
            del known[alias]
            del known.databases[alias]

    return opened


FOUND_ROWS = pymysql.constants.CLIENT.FOUND_ROWS
PG, MY, LITE = "postgres", "mariadb", "sqlite"

LIBRARIES: Sequence[Library] = (
    Library("asyncpg", PG, asyncpg_connection),
    Library("asyncpg-pool", PG, asyncpg_pool),
    Library("psycopg", PG, psycopg_sync()),
    Library("psycopg-begin", PG, psycopg_sync(autocommit=True)),
    Library("psycopg-dict-rows", PG, psycopg_sync(row_factory=psycopg.rows.dict_row)),
    Library("psycopg-raw-cursor", PG, psycopg_sync(cursor_factory=psycopg.RawCursor)),
    Library("psycopg-client-cursor", PG, psycopg_sync(cursor_factory=psycopg.ClientCursor)),
    Library("psycopg-async", PG, psycopg_async()),
    Library("psycopg-async-begin", PG, psycopg_async(autocommit=True)),
    Library("psycopg-async-dict-rows", PG, psycopg_async(row_factory=psycopg.rows.dict_row)),
    Library("sqlite3", LITE, sqlite("")),
    Library("sqlite3-deferred", LITE, sqlite("DEFERRED")),
    Library("sqlite3-immediate", LITE, sqlite("IMMEDIATE")),
    Library("sqlite3-begin", LITE, sqlite(None)),
    Library("sqlite3-bytes", LITE, sqlite("", bytes_rows)),
    Library("aiosqlite", LITE, sqlite_async("")),
    Library("aiosqlite-begin", LITE, sqlite_async(None)),
    Library("aiosqlite-bytes", LITE, sqlite_async("", bytes_rows)),
    *(
        Library(name, LITE, sqlite_by_mode(connect))
        for name, connect in (("sqlite3-mode", sqlite3.connect), ("aiosqlite-mode", aiosqlite.connect))
        if sys.version_info >= (3, 12)
    ),
    Library("pymysql", MY, mysql_sync()),
    Library("pymysql-begin", MY, mysql_sync(autocommit=True)),
    Library("pymysql-dict-rows", MY, mysql_sync(dict_rows=True)),
    Library("pymysql-found-rows", MY, mysql_sync(client_flag=FOUND_ROWS)),
    Library("mysqldb", MY, mysql_sync(mysqldb)),
    Library("mysqldb-begin", MY, mysql_sync(mysqldb, autocommit=True)),
    Library("mysqldb-dict-rows", MY, mysql_sync(mysqldb, dict_rows=True)),
    Library("mysqldb-found-rows", MY, mysql_sync(mysqldb, client_flag=FOUND_ROWS)),
    Library("asyncmy", MY, mysql_async()),
    Library("asyncmy-begin", MY, mysql_async(autocommit=True)),
    Library("asyncmy-dict-rows", MY, mysql_async(cursor_cls=asyncmy.cursors.DictCursor)),
    Library("asyncmy-found-rows", MY, mysql_async(client_flag=FOUND_ROWS)),
    Library("sqlalchemy-psycopg", PG, alchemy("postgresql+psycopg", sqlalchemy.Engine.connect)),
    Library("sqlalchemy-sqlite", LITE, alchemy("sqlite", sqlalchemy.Engine.connect)),
    Library("sqlalchemy-sqlite-event", LITE, alchemy("sqlite", sqlalchemy.Engine.connect, begin_by_event)),
    Library("sqlalchemy-pymysql", MY, alchemy("mysql+pymysql", sqlalchemy.Engine.connect)),
    Library("sqlalchemy-mysqldb", MY, alchemy("mysql+mysqldb", sqlalchemy.Engine.connect)),
    Library("session-psycopg", PG, alchemy("postgresql+psycopg", orm.Session)),
    Library("session-sqlite", LITE, alchemy("sqlite", orm.Session)),
    Library("session-mariadb", MY, alchemy("mariadb+pymysql", orm.Session)),
    Library(
        "scoped-session-psycopg",
        PG,
        alchemy("postgresql+psycopg", lambda engine: orm.scoped_session(orm.sessionmaker(engine))),
    ),
    Library("async-connection-asyncpg", PG, alchemy_async("postgresql+asyncpg", sa_asyncio.AsyncEngine.connect)),
    Library("async-connection-psycopg", PG, alchemy_async("postgresql+psycopg", sa_asyncio.AsyncEngine.connect)),
    Library("async-connection-aiosqlite", LITE, alchemy_async("sqlite+aiosqlite", sa_asyncio.AsyncEngine.connect)),
    Library("async-connection-asyncmy", MY, alchemy_async("mysql+asyncmy", sa_asyncio.AsyncEngine.connect)),
    Library("async-session-asyncpg", PG, alchemy_async("postgresql+asyncpg", sa_asyncio.AsyncSession)),
    Library("async-session-psycopg", PG, alchemy_async("postgresql+psycopg", sa_asyncio.AsyncSession)),
    Library("async-session-aiosqlite", LITE, alchemy_async("sqlite+aiosqlite", sa_asyncio.AsyncSession)),
    Library("async-session-asyncmy", MY, alchemy_async("mysql+asyncmy", sa_asyncio.AsyncSession)),
    Library("async-scoped-session-asyncpg", PG, alchemy_async("postgresql+asyncpg", async_scoped)),
    Library("django-sqlite", LITE, django_connection(LITE)),
    Library("django-postgres", PG, django_connection(PG)),
)


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # the tests of sync libraries run in an event loop as well
    chosen: Library = request.param
    return chosen


@pytest.fixture
def outbox() -> Outbox:
    """An outbox whose namespace is this test's own."""
    return Outbox(namespace=f"ns-{uuid4().hex}")


def stored(databases: Databases, library: Library, outbox: Outbox, column: str = "topic") -> list[Any]:
    sql = f"SELECT {column} FROM postroom_outbox WHERE namespace = '{outbox.namespace}' ORDER BY seq"
    return [row[0] for row in look(databases, library.database, sql)]


def business(databases: Databases, library: Library, identity: str) -> int:
    sql = f"SELECT count(*) FROM business WHERE id = '{identity}'"
    count: int = look(databases, library.database, sql)[0][0]
    return count


# -- what holds for all of them --------------------------------------------------------------------------------


@pytest.mark.requirement("G1", "G3", "S2-01", "S2-17", "S2-21", "S4-18")
async def test_message_and_business_row_are_committed_and_rolled_back_together(
    library: Library, databases: Databases, outbox: Outbox
) -> None:
    """Neither exists without the other."""
    kept, dropped = uuid4().hex, uuid4().hex

    async with library.opened(databases) as link:
        await link.begin()
        await link.execute(f"INSERT INTO business (id) VALUES ('{kept}')")
        added = await awaited(outbox.add(link.handle, {"n": 1}, topic="kept"))
        before = stored(databases, library, outbox)
        await link.commit()

        await link.begin()
        await link.execute(f"INSERT INTO business (id) VALUES ('{dropped}')")
        await awaited(outbox.add(link.handle, {"n": 2}, topic="dropped"))
        await link.rollback()

    assert isinstance(added, AddResult)
    assert added.is_new
    assert before == []
    assert stored(databases, library, outbox) == ["kept"]
    assert business(databases, library, kept) == 1
    assert business(databases, library, dropped) == 0


@pytest.mark.requirement("G1", "S2-21")
async def test_message_added_first_is_rolled_back_too(library: Library, databases: Databases, outbox: Outbox) -> None:
    """Also where the library sends BEGIN only with its first statement."""
    async with library.opened(databases) as link:
        await link.begin()
        await awaited(outbox.add(link.handle, {"n": 1}, topic="first"))
        await link.rollback()

    assert stored(databases, library, outbox) == []


@pytest.mark.requirement("G1", "S1-26")
async def test_without_a_transaction_nothing_is_written_unless_asked_for(
    library: Library, databases: Databases, outbox: Outbox
) -> None:
    """A message alone could outlive the business change that was rolled back."""
    async with library.opened(databases, autocommit=True) as link:
        for events in ({"n": 1}, [], [{"n": 1}, {"n": 2}]):
            with pytest.raises(NotInTransactionError, match="outside_transaction=True"):
                await awaited(outbox.add(link.handle, events, topic="refused"))
        refused = stored(databases, library, outbox)

        added = await awaited(outbox.add(link.handle, {"n": 1}, topic="alone", outside_transaction=True))

        assert refused == []
        assert added.is_new
        assert stored(databases, library, outbox) == ["alone"]


class PaymentTaken(NamedTuple):
    order_id: int
    cents: int


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("name", ["sqlite3", "asyncpg"])
async def test_a_named_tuple_is_one_event(name: str, databases: Databases, outbox: Outbox) -> None:
    """As it is to the router, although Python counts it as a tuple."""
    library = named(name)
    async with library.opened(databases) as link:
        await link.begin()

        added = await awaited(outbox.add(link.handle, PaymentTaken(42, 995), topic="payments"))
        many = await awaited(outbox.add(link.handle, (PaymentTaken(43, 1), PaymentTaken(44, 2)), topic="payments"))
        await link.commit()

    assert isinstance(added, AddResult)
    assert [item.is_new for item in many] == [True, True]
    assert stored(databases, library, outbox, "type") == ["payment.taken"] * 3


ASYNC_LIBRARIES = ("asyncpg", "asyncpg-pool", "psycopg-async", "aiosqlite", "asyncmy")


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize(
    "name",
    [library.name for library in LIBRARIES if library.name in ASYNC_LIBRARIES or library.name.startswith("async-")],
)
async def test_an_add_that_is_never_awaited_is_named_in_the_warning(
    name: str,
    many: bool,  # noqa: FBT001
    databases: Databases,
    outbox: Outbox,
) -> None:
    """Python says which call was meant, once, and not which function inside of the library."""
    event: object = [{"n": 1}, {"n": 2}] if many else {"n": 1}
    async with named(name).opened(databases) as link:
        await link.begin()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            forgotten = outbox.add(link.handle, event, topic="t")
            is_coroutine = inspect.iscoroutine(forgotten)
            del forgotten
            gc.collect()

        await link.rollback()
    assert is_coroutine
    # The collector may also have found what another test has left open.
    told = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert told == ["coroutine 'Outbox.add' was never awaited"]


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("name", ASYNC_LIBRARIES)
async def test_messages_are_checked_by_the_call_and_not_when_it_is_awaited(
    name: str, databases: Databases, outbox: Outbox
) -> None:
    """The error is raised where the event is passed."""
    async with named(name).opened(databases) as link:
        with pytest.raises(InvalidTopicError):
            _ = outbox.add(link.handle, {"n": 1}, topic="")


@pytest.mark.requirement("G10", "S1-28", "S2-22", "S2-48")
async def test_one_and_many_are_added_in_their_order_and_duplicates_are_told(
    library: Library, databases: Databases, outbox: Outbox
) -> None:
    """The answer names the message that was there already."""
    message = Message(topic="given", payload=b"\x00\xff")

    async with library.opened(databases) as link:

        async def add(event: object, **options: Any) -> Any:  # noqa: ANN401
            return await awaited(outbox.add(link.handle, event, **options))

        await link.begin()
        first = await add({"n": 1}, topic="one", dedupe_key="k")
        again = await add({"n": 2}, topic="one", dedupe_key="k")
        elsewhere = await add({"n": 3}, topic="two", dedupe_key="k")
        many = await add([{"n": 4}, {"n": 5}], topic="many")
        given = await add([message, message, Message(topic="one", payload=b"", dedupe_key="k")])
        none = await add([], topic="none")
        await link.commit()
        await link.begin()
        later = await add({"n": 6}, topic="one", dedupe_key="k")
        repeated = await add(message)
        await link.commit()

    assert [first.is_new, again, later] == [True, AddResult(first.id, is_new=False), AddResult(first.id, is_new=False)]
    assert elsewhere.is_new
    assert [item.is_new for item in many] == [True, True]
    assert given == [
        AddResult(message.id, is_new=True),
        AddResult(message.id, is_new=False),
        AddResult(first.id, is_new=False),
    ]
    assert repeated == AddResult(message.id, is_new=False)
    assert none == []
    assert stored(databases, library, outbox) == ["one", "two", "many", "many", "given"]
    ids = [as_uuid(value) for value in stored(databases, library, outbox, "id")]
    assert ids == [first.id, elsewhere.id, many[0].id, many[1].id, message.id]


def as_uuid(value: object) -> UUID:
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(str(value))


@pytest.mark.requirement("G11", "S1-28", "S2-24")
async def test_a_batch_larger_than_one_statement_is_added_whole_and_in_order(
    library: Library, databases: Databases, outbox: Outbox
) -> None:
    """No statement grows with the batch."""
    async with library.opened(databases) as link:
        await link.begin()
        added = await awaited(outbox.add(link.handle, [{"n": n} for n in range(1200)], topic="batch", key="k"))
        await link.commit()

    assert len(added) == 1200
    assert all(item.is_new for item in added)
    payloads = [bytes(value) for value in stored(databases, library, outbox, "payload")]
    assert payloads == [b'{"n":%d}' % n for n in range(1200)]
    initial = {(0, 0)}
    assert {
        tuple(pair)
        for pair in zip(*(stored(databases, library, outbox, c) for c in ("attempts", "token")), strict=True)
    } == initial
    assert set(stored(databases, library, outbox, "status")) == {"pending"}
    assert set(stored(databases, library, outbox, "locked_by")) == {None}


@pytest.mark.requirement("G11")
async def test_a_missing_table_is_told_with_its_remedy_and_without_the_payload(
    library: Library, databases: Databases
) -> None:
    """SQLAlchemy shows the parameters of a statement that failed, so they are hidden."""
    elsewhere = Outbox(table="no_such_outbox")

    async with library.opened(databases) as link:
        await link.begin()
        with pytest.raises(SchemaMissingError, match="postroom schema apply") as caught:
            await awaited(elsewhere.add(link.handle, {"card": "canary-4111"}, topic="t", headers={"h": "canary-4111"}))
        await link.rollback()

    assert caught.value.__cause__ is not None
    assert "canary-4111" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.requirement("G1", "S2-21")
@pytest.mark.parametrize(
    "library", [library for library in LIBRARIES if library.database == PG], indirect=True, ids=lambda x: x.name
)
async def test_a_transaction_that_has_failed_is_called_so(
    library: Library, databases: Databases, outbox: Outbox
) -> None:
    """PostgreSQL refuses every statement after an error until the rollback."""
    async with library.opened(databases) as link:
        await link.begin()
        with pytest.raises(Exception, match="no_such_table"):
            await link.execute("SELECT * FROM no_such_table")
        with pytest.raises(Exception, match=r"roll back|atomic") as caught:
            await awaited(outbox.add(link.handle, {"n": 1}, topic="t"))
        await link.rollback()

    assert isinstance(caught.value, TransactionAbortedError) or "django" in type(caught.value).__module__
    assert stored(databases, library, outbox) == []


# -- what holds for some of them -------------------------------------------------------------------------------


def named(name: str) -> Library:
    return next(library for library in LIBRARIES if library.name == name)


@pytest.mark.requirement("G1", "S2-21")
async def test_a_row_written_past_sqlalchemy_escapes_the_rollback_and_ours_does_not(
    databases: Databases, outbox: Outbox
) -> None:
    """SQLAlchemy sends BEGIN with its first statement, so before it asyncpg itself is in no transaction."""
    escaped = uuid4().hex
    library = named("async-connection-asyncpg")

    async with library.opened(databases) as link:
        raw = await link.handle.get_raw_connection()
        await raw.driver_connection.execute(f"INSERT INTO business (id) VALUES ('{escaped}')")
        await link.rollback()
    async with library.opened(databases) as link:
        await outbox.add(link.handle, {"n": 1}, topic="t")
        await link.rollback()

    assert business(databases, library, escaped) == 1
    assert stored(databases, library, outbox) == []


@pytest.mark.requirement("S2-21")
async def test_codecs_that_the_caller_has_set_do_not_change_what_is_stored(
    databases: Databases, outbox: Outbox
) -> None:
    """Asyncpg encodes by the codecs of the connection, whoever set them."""
    library = named("asyncpg")
    async with library.opened(databases) as link:
        for kind in ("json", "jsonb"):
            await link.handle.set_type_codec(kind, encoder=lambda _: '"broken"', decoder=str, schema="pg_catalog")
        await link.handle.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")
        await link.begin()
        one = await outbox.add(link.handle, {"n": 1}, topic="t", headers={"a": "b"}, dedupe_key="k")
        many = await outbox.add(link.handle, [{"n": 1}, {"n": 2}], topic="t", headers={"a": "b"})
        again = await outbox.add(link.handle, {"n": 1}, topic="t", dedupe_key="k")
        await link.commit()

    assert stored(databases, library, outbox, "headers") == [{"a": "b"}] * 3
    assert again == AddResult(one.id, is_new=False)
    assert all(item.is_new for item in many)


@pytest.mark.requirement("S2-17")
async def test_asyncpg_prepares_the_statement_of_add_once(databases: Databases, outbox: Outbox) -> None:
    """A second add on a connection costs one round trip."""
    async with named("asyncpg").opened(databases) as link:
        await link.begin()
        for n in range(5):
            await outbox.add(link.handle, {"n": n}, topic=f"topic-{n}", key=f"key-{n}")
            await outbox.add(link.handle, {"n": n}, topic=f"topic-{n}", delay=timedelta(seconds=n + 1))
        prepared = await link.handle.fetchval(
            "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'INSERT INTO %outbox%'"
        )
        await link.commit()

    assert prepared == 2, "one for messages that have nothing special, one for the others"


@pytest.mark.requirement("G1")
async def test_a_session_that_does_not_begin_by_itself_is_refused_before_it_begins(
    databases: Databases, outbox: Outbox
) -> None:
    """SQLAlchemy's own error would not say what it means for the message."""
    opener = alchemy("postgresql+psycopg", lambda engine: orm.Session(engine, autobegin=False))
    async with Library("session", PG, opener).opened(databases) as link:
        with pytest.raises(NotInTransactionError, match=r"session\.begin"):
            outbox.add(link.handle, {"n": 1}, topic="t")
        with pytest.raises(NotInTransactionError, match=r"session\.begin"):
            outbox.add(link.handle, {"n": 1}, topic="t", outside_transaction=True)
        with link.handle.begin():
            assert outbox.add(link.handle, {"n": 1}, topic="t").is_new

    assert stored(databases, named("psycopg"), outbox) == ["t"]


async def test_a_scoped_session_is_that_of_the_task_which_adds(databases: Databases, outbox: Outbox) -> None:
    """One that was made for the task which only calls ``add`` would never be closed."""

    def scoped_by_task(engine: sa_asyncio.AsyncEngine) -> sa_asyncio.async_scoped_session[sa_asyncio.AsyncSession]:
        return sa_asyncio.async_scoped_session(sa_asyncio.async_sessionmaker(engine), scopefunc=asyncio.current_task)

    async with Library("scoped", LITE, alchemy_async("sqlite+aiosqlite", scoped_by_task)).opened(databases) as link:
        adding = outbox.add(link.handle, {"n": 1}, topic="t")
        is_made_here = link.handle.registry.has()

        async def add() -> None:
            await adding
            await link.handle.rollback()
            await link.handle.remove()

        await asyncio.create_task(add())

    assert not is_made_here


async def test_a_cancelled_batch_stops_after_a_statement(databases: Databases, outbox: Outbox) -> None:
    """The thread goes on with the one that it has begun, and nobody waits for the others."""
    seen: list[str] = []
    async with named("aiosqlite-begin").opened(databases) as link:
        await link.begin()
        await link.handle.set_trace_callback(seen.append)
        adding = asyncio.create_task(outbox.add(link.handle, [{"n": n} for n in range(5000)], topic="t"))
        await until(lambda: bool(seen), "the first statement")
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        await link.handle.set_trace_callback(None)

    assert len(seen) < 3


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("name", ["pymysql", "mysqldb"])
async def test_a_batch_larger_than_a_packet_is_added_whole(name: str, databases: Databases, outbox: Outbox) -> None:
    """MariaDB takes 16 MiB at once, and a payload may double when its bytes are escaped."""
    library = named(name)
    payload = b"\x00'\\\xff" * (64 * 1024)
    async with library.opened(databases) as link:
        added = outbox.add(link.handle, [payload] * 80, topic="t")
        await link.commit()

    assert [item.is_new for item in added] == [True] * 80
    assert stored(databases, library, outbox, "LENGTH(payload)") == [len(payload)] * 80


@pytest.mark.requirement("G10")
async def test_a_duplicate_that_the_snapshot_cannot_see_is_a_serialization_failure_and_no_second_row(
    databases: Databases, outbox: Outbox
) -> None:
    """At REPEATABLE READ PostgreSQL asks for the whole transaction to be run again; then it is told."""
    async with named("asyncpg").opened(databases) as late, named("asyncpg").opened(databases) as early:
        async with early.handle.transaction():
            first = await outbox.add(early.handle, {"n": 0}, topic="t", dedupe_key="seen")
        with pytest.raises(asyncpg.SerializationError):
            async with late.handle.transaction(isolation="repeatable_read"):
                seen = await outbox.add(late.handle, {"n": 1}, topic="t", dedupe_key="seen")
                async with early.handle.transaction():
                    winner = await outbox.add(early.handle, {"n": 1}, topic="t", dedupe_key="unseen")
                await outbox.add(late.handle, {"n": 1}, topic="t", dedupe_key="unseen")
        async with late.handle.transaction(isolation="repeatable_read"):
            again = await outbox.add(late.handle, {"n": 1}, topic="t", dedupe_key="unseen")

    assert seen == AddResult(first.id, is_new=False)
    assert again == AddResult(winner.id, is_new=False)
    assert len(stored(databases, named("asyncpg"), outbox)) == 2


@pytest.mark.requirement("G10", "S2-22")
@pytest.mark.parametrize("kind", ["pymysql", "mysqldb", "asyncmy"])
async def test_a_duplicate_that_the_snapshot_cannot_see_is_told_on_mariadb(
    kind: str, databases: Databases, outbox: Outbox
) -> None:
    """Its default isolation reads a snapshot, past which the id is looked up."""
    async with named(kind).opened(databases) as late, named(kind).opened(databases) as early:
        await late.execute("SELECT count(*) FROM postroom_outbox")
        winner = await awaited(outbox.add(early.handle, {"n": 1}, topic="t", dedupe_key="k"))
        await early.commit()
        loser = await awaited(outbox.add(late.handle, {"n": 2}, topic="t", dedupe_key="k"))
        await late.commit()

    assert loser == AddResult(winner.id, is_new=False)
    assert len(stored(databases, named(kind), outbox)) == 1


@pytest.mark.requirement("S2-17")
async def test_a_producer_without_the_right_to_read_can_add(databases: Databases, outbox: Outbox) -> None:
    """An outbox may be a letter box."""
    role = f"r{uuid4().hex}"
    look(databases, PG, f"CREATE ROLE {role}")
    look(databases, PG, f"GRANT INSERT ON postroom_outbox TO {role}")
    try:
        async with named("asyncpg").opened(databases) as link:
            await link.begin()
            await link.execute(f"SET LOCAL ROLE {role}")
            added = await outbox.add(link.handle, {"n": 1}, topic="one", dedupe_key="k")
            many = await outbox.add(link.handle, [{"n": 1}, {"n": 2}], topic="many")
            await link.commit()
    finally:
        look(databases, PG, f"DROP OWNED BY {role}")
        look(databases, PG, f"DROP ROLE {role}")

    assert [item.is_new for item in (added, *many)] == [True, True, True]
    assert stored(databases, named("asyncpg"), outbox) == ["one", "many", "many"]


@dataclass(frozen=True)
class Placed:
    n: int


@dataclass(frozen=True)
class Paid:
    n: int


@pytest.mark.requirement("S2-16", "S2-24")
@pytest.mark.parametrize("events", [[Placed(1), Placed(2)], [Placed(1), Paid(2)]], ids=["alike", "mixed"])
@pytest.mark.parametrize("name", ["asyncpg", "psycopg", "sqlite3", "pymysql", "mysqldb"])
async def test_many_at_once_are_stored_as_one_by_one(
    name: str, events: list[object], databases: Databases, outbox: Outbox
) -> None:
    """PostgreSQL has a quicker statement for messages that differ in their payload only."""
    tenant, due = uuid4(), datetime(2031, 1, 1, tzinfo=UTC)
    columns = ("topic", "type", "key", "tenant_id", "payload", "content_type", "headers", "next_attempt_at", "status")
    quoted = ["`key`" if column == "key" and named(name).database == MY else column for column in columns]

    async with named(name).opened(databases) as link:
        await link.begin()

        async def add(event: object) -> None:
            options: Any = {"topic": "t", "key": "k", "tenant_id": tenant, "headers": {"a": "b"}, "due_at": due}
            await awaited(outbox.add(link.handle, event, **options))

        await add(events)
        for event in events:
            await add(event)
        await link.commit()

    rows = list(zip(*(stored(databases, named(name), outbox, column) for column in quoted), strict=True))
    assert len(rows) == 4
    assert rows[:2] == rows[2:]


@pytest.mark.requirement("G3", "S2-34")
@pytest.mark.parametrize("name", ["django-sqlite", "django-postgres"])
async def test_django_wakes_after_the_commit_and_not_after_a_rollback(
    name: str, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `on_commit`, which knows of savepoints too."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    rung: list[str] = []
    outbox = Outbox(namespace=f"ns-{uuid4().hex}", wake=lambda: rung.append("woken"))

    async with named(name).opened(databases) as link:
        await link.begin()
        outbox.add(link.handle, {"n": 1}, topic="dropped")
        await link.rollback()
        dropped = list(rung)
        await link.begin()
        outbox.add(link.handle, {"n": 1}, topic="kept")
        before = list(rung)
        await link.commit()
        after = list(rung)
        link.handle.set_autocommit(False)
        outbox.add(link.handle, {"n": 1}, topic="by hand")
        link.handle.commit()
        link.handle.set_autocommit(True)

    assert (dropped, before, after, rung) == ([], [], ["woken"], ["woken"])
    assert stored(databases, named(name), outbox) == ["kept", "by hand"]
