"""The harnesses of the stores that come with postroom, on real servers."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncmy
import asyncpg
import psycopg
import pytest

pytest.register_assert_rewrite("postroom.testing.contracts", "postroom.testing.machine")

from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore, SQLStore  # noqa: E402
from postroom.stores.sql.sessions import Pooler  # noqa: E402
from postroom.testing.clients import MariaDBClient, PostgresClient, RedisClient, SqlClient  # noqa: E402
from postroom.testing.contracts import StoredRow, StoreHarness  # noqa: E402
from postroom.testing.pgbouncer import PgBouncer  # noqa: E402
from tests.support.server_fixtures import run_private  # noqa: E402
from tests.worlds import REDIS_PLACES  # noqa: E402

from .in_redis import RedisHarness  # noqa: E402
from .in_redis_stream import RedisStreamHarness  # noqa: E402

#: Makes a harness on an empty store, in the event loop that is running.
MakeHarness: TypeAlias = Callable[[], Awaitable[StoreHarness]]

C = TypeVar("C")


class MemoryHarness(StoreHarness):
    """A clock that can be put forward, and several stores on one list of rows."""

    def __init__(self) -> None:
        self._ahead = timedelta(0)
        self._first = MemoryStore(clock=self._now)
        self.store = self._first

    def _now(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    async def another(self, *, namespace: str | None = None, keep_delivered: timedelta | None = None) -> MemoryStore:
        first = self._first
        keep = first.keep_delivered if keep_delivered is None else keep_delivered
        store = MemoryStore(namespace=namespace or first.namespace, clock=self._now, keep_delivered=keep)
        store.rows = first.rows
        return store

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        with self._first.transaction() as transaction:
            yield transaction

    async def advance(self, by: timedelta) -> None:
        self._ahead += by

    async def rows(self) -> list[StoredRow]:
        now = self._now()
        return [
            StoredRow(
                id=row.message.id,
                status=row.status,
                attempts=row.message.attempt,
                token=row.message.token,
                due_in=row.due - now,
                worker=row.worker,
                lease_left=None if row.locked_until is None else row.locked_until - now,
                last_error=row.error,
                unchanged_for=now - row.changed,
            )
            for row in self._first.rows
        ]

    async def close(self) -> None:
        await self.store.close()


class SQLHarness(StoreHarness):
    """Looks at the table through a connection of its own, and moves its moments instead of the server's clock."""

    can_damage = True
    #: How many milliseconds after now a column is.
    from_now: str
    #: A column so many milliseconds earlier.
    shifted: str
    broken_headers = "{broken"

    def __init__(self, make: Callable[..., SQLStore]) -> None:
        self._make = make
        self.store: SQLStore = make()
        self._stores = [self.store]

    async def start(self) -> None:
        """Empty the table, and open the store."""
        await self.execute("DELETE FROM postroom_outbox")
        await self.store.open()

    @abstractmethod
    async def execute(self, sql: str, *params: object) -> Sequence[Sequence[Any]]:
        """Run a statement with ``%s`` parameters in a transaction of its own and return its rows."""

    async def another(self, *, namespace: str | None = None, keep_delivered: timedelta | None = None) -> SQLStore:
        chosen = {"namespace": namespace, "keep_delivered": keep_delivered}
        store = self._make(**{name: value for name, value in chosen.items() if value is not None})
        self._stores.append(store)
        await store.open()
        return store

    async def advance(self, by: timedelta) -> None:
        columns = ["next_attempt_at", "locked_until", "delivered_at", "created_at", "updated_at"]
        changes = ", ".join(f"{name} = {self.shifted.format(name)}" for name in columns)
        amount = by // timedelta(milliseconds=1)
        await self.execute(f"UPDATE postroom_outbox SET {changes}", *[amount] * len(columns))

    async def rows(self) -> list[StoredRow]:
        due, lease, changed = (self.from_now.format(n) for n in ("next_attempt_at", "locked_until", "updated_at"))
        text = (
            f"SELECT id, status, attempts, token, {due}, locked_by, {lease}, last_error, {changed} FROM postroom_outbox"
        )
        return [
            StoredRow(
                id=to_uuid(row[0]),
                status=row[1],
                attempts=row[2],
                token=row[3],
                due_in=timedelta(milliseconds=float(row[4])),
                worker=None if row[5] is None else to_uuid(row[5]),
                lease_left=None if row[6] is None else timedelta(milliseconds=float(row[6])),
                last_error=row[7],
                unchanged_for=timedelta(milliseconds=-float(row[8])),
            )
            for row in await self.execute(f"{text} ORDER BY seq")
        ]

    async def damage(self, message_id: UUID) -> None:
        change = "UPDATE postroom_outbox SET headers = %s WHERE id = %s"
        await self.execute(change, self.broken_headers, self.stored(message_id))

    def stored(self, identity: UUID) -> object:
        return identity

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


def to_uuid(value: UUID | str | bytes) -> UUID:
    if isinstance(value, UUID):
        return value
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(value)


class Idle(Generic[C]):
    """Connections that are used again, since to connect takes longer than most of what tests do."""

    def __init__(self, connect: Callable[[], Awaitable[C]]) -> None:
        self._connect = connect
        self.connections: list[C] = []

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[C]:
        connection = self.connections.pop() if self.connections else await self._connect()
        yield connection
        self.connections.append(connection)


class SQLiteHarness(SQLHarness):
    from_now = "{} - CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    shifted = "{} - %s"

    def __init__(self, path: Path) -> None:
        super().__init__(lambda **options: SQLiteStore(path, **options))
        self._path = path

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()

    async def execute(self, sql: str, *params: object) -> Sequence[Sequence[Any]]:
        async with self.transaction() as connection:
            return connection.execute(sql.replace("%s", "?"), params).fetchall()

    def stored(self, identity: UUID) -> str:
        return str(identity)


class PostgresHarness(SQLHarness):
    from_now = "extract(epoch FROM {} - clock_timestamp()) * 1000"
    shifted = "{} - make_interval(secs => %s::float8 / 1000)"
    broken_headers = "[]"  # the column takes JSON only

    def __init__(self, dsn: str, driver: Literal["asyncpg", "psycopg"], pooler: Pooler | None = None) -> None:
        super().__init__(lambda **options: PostgresStore(dsn, driver=driver, pooler=pooler, **options))
        self._dsn = dsn
        prepared_after = 5 if pooler is None else None
        self._psycopg = Idle(lambda: psycopg.AsyncConnection.connect(dsn, prepare_threshold=prepared_after))

    @asynccontextmanager
    async def psycopg_transaction(self) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
        async with self._psycopg.borrow() as connection:
            try:
                yield connection
                await connection.commit()
            except BaseException:
                await connection.close()
                raise

    async def execute(self, sql: str, *params: object) -> Sequence[Sequence[Any]]:
        async with self.psycopg_transaction() as connection:
            cursor = await connection.execute(sql, params)
            return await cursor.fetchall() if cursor.description else []

    async def hint(self) -> None:
        store = await self.another()
        assert isinstance(store, PostgresStore)
        store.notify()

    async def close(self) -> None:
        await super().close()
        for connection in self._psycopg.connections:
            await connection.close()


class PsycopgHarness(PostgresHarness):
    def __init__(self, dsn: str, pooler: Pooler | None = None) -> None:
        super().__init__(dsn, "psycopg", pooler)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.psycopg_transaction()


class AsyncpgHarness(PostgresHarness):
    def __init__(self, dsn: str, pooler: Pooler | None = None) -> None:
        super().__init__(dsn, "asyncpg", pooler)
        cache = 100 if pooler is None else 0
        self._asyncpg: Idle[asyncpg.Connection[Any]] = Idle(lambda: asyncpg.connect(dsn, statement_cache_size=cache))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._asyncpg.borrow() as connection:
            try:
                async with connection.transaction():
                    yield connection
            except BaseException:
                await connection.close()
                raise

    async def close(self) -> None:
        await super().close()
        for connection in self._asyncpg.connections:
            await connection.close()


class MariaDBHarness(SQLHarness):
    from_now = "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {}) / 1000"
    shifted = "{} - INTERVAL 1000 * %s MICROSECOND"

    def __init__(self, dsn: str) -> None:
        super().__init__(lambda **options: MySQLStore(dsn, **options))
        url = urlsplit(dsn)
        options = {"host": url.hostname, "port": url.port, "user": url.username, "db": url.path[1:]}
        self._asyncmy: Idle[Any] = Idle(lambda: asyncmy.connect(**options))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._asyncmy.borrow() as connection:
            try:
                await connection.begin()
                yield connection
                await connection.commit()
            except BaseException:
                connection.close()
                raise

    async def execute(self, sql: str, *params: object) -> Sequence[Sequence[Any]]:
        async with self.transaction() as connection, connection.cursor() as cursor:
            await cursor.execute(sql, params or None)
            rows: Sequence[Sequence[Any]] = await cursor.fetchall() if cursor.description else ()
            return rows

    async def close(self) -> None:
        await super().close()
        for connection in self._asyncmy.connections:
            connection.close()

    def stored(self, identity: UUID) -> bytes:
        return identity.bytes


def _prepared(server: SqlClient, store: Callable[[str], SQLStore]) -> Iterator[str]:
    """Make one database with its tables, which tests then empty: to make one for each takes longer than the tests."""
    name = f"test_{uuid4().hex}"
    dsn = server.create_database(name)
    try:
        asyncio.run(_apply(store(dsn)))
        yield dsn
    finally:
        server.drop_database(name)


async def _apply(store: SQLStore) -> None:
    await store.apply_schema()
    await store.close()


@pytest.fixture(scope="session")
def postgres_tables(postgres_server: PostgresClient) -> Iterator[str]:
    yield from _prepared(postgres_server, PostgresStore)


@pytest.fixture(scope="session")
def mariadb_tables(mariadb_server: MariaDBClient) -> Iterator[str]:
    yield from _prepared(mariadb_server, MySQLStore)


@pytest.fixture
def make_memory() -> MakeHarness:
    async def make() -> StoreHarness:
        return MemoryHarness()

    return make


@pytest.fixture
def make_sqlite(sqlite_path: Path) -> MakeHarness:
    asyncio.run(_apply(SQLiteStore(sqlite_path)))
    return lambda: _started(SQLiteHarness(sqlite_path))


@pytest.fixture
def make_asyncpg(postgres_tables: str) -> MakeHarness:
    return lambda: _started(AsyncpgHarness(postgres_tables))


@pytest.fixture
def make_psycopg(postgres_tables: str) -> MakeHarness:
    return lambda: _started(PsycopgHarness(postgres_tables))


@pytest.fixture(scope="session")
def pooled_tables(postgres_tables: str) -> Iterator[str]:
    """The tables through a PgBouncer whose clients share three server sessions."""
    for pooler in run_private(PgBouncer(postgres_tables, pool_size=3)):
        yield pooler.through(postgres_tables)


@pytest.fixture
def make_pooled_asyncpg(pooled_tables: str) -> MakeHarness:
    return lambda: _started(AsyncpgHarness(pooled_tables, "transaction"))


@pytest.fixture
def make_pooled_psycopg(pooled_tables: str) -> MakeHarness:
    return lambda: _started(PsycopgHarness(pooled_tables, "transaction"))


@pytest.fixture
def make_mariadb(mariadb_tables: str) -> MakeHarness:
    return lambda: _started(MariaDBHarness(mariadb_tables))


async def _started(harness: SQLHarness | RedisHarness | RedisStreamHarness) -> StoreHarness:
    await harness.start()
    return harness


@pytest.fixture
def make_valkey(valkey_url: str) -> MakeHarness:
    return lambda: _started(RedisHarness(valkey_url))


def in_cluster(server: RedisClient) -> str:
    """Return the URL by which a store knows that a server is one of a cluster."""
    return server.dsn.replace("redis:", "redis+cluster:", 1)


@pytest.fixture
def redis_cluster_url(redis_cluster: RedisClient) -> str:
    return in_cluster(redis_cluster)


@pytest.fixture
def valkey_cluster_url(valkey_cluster: RedisClient) -> str:
    return in_cluster(valkey_cluster)


@pytest.fixture(params=REDIS_PLACES)
def redis_place(request: pytest.FixtureRequest) -> str:
    """Everything that a store in Redis may be kept in."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def make_in_redis(redis_place: str) -> MakeHarness:
    return lambda: _started(RedisHarness(redis_place))


@pytest.fixture
def make_in_stream(redis_place: str) -> MakeHarness:
    return lambda: _started(RedisStreamHarness(redis_place))
