"""`Outbox.transaction`: what is committed, what is rolled back, and what is not known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from postroom import Outbox
from postroom.errors import CommitUnknownError, TransactionAbortedError, UnknownConnectionError
from postroom.stores import PostgresStore
from postroom.stores.sql.transactions import transaction
from postroom.testing.faults import FaultProxy


class Bell:
    """Counts how often it was rung, and what was visible to others then."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        self.rung += 1


@pytest.fixture
async def dsn(postgres_dsn: str) -> str:
    """A database with the outbox and a table whose rule is only checked by COMMIT."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    await store.close()
    await ask(
        postgres_dsn, "CREATE TABLE business (id int PRIMARY KEY, again int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
    )
    return postgres_dsn


async def ask(dsn: str, sql: str) -> Any:  # noqa: ANN401
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def stored(dsn: str) -> int:
    count: int = await ask(dsn, "SELECT count(*) FROM postroom_outbox")
    return count


KINDS = ("asyncpg", "engine-asyncpg", "engine-psycopg", "session-asyncpg", "session-psycopg")


@asynccontextmanager
async def pool_on(kind: str, dsn: str) -> AsyncGenerator[Any]:
    """Open a pool of some kind."""
    shape, _, driver = kind.partition("-")
    if shape == "asyncpg":
        async with asyncpg.create_pool(dsn, min_size=0, max_size=2) as pool:
            yield pool
        return
    engine = create_async_engine(sqlalchemy.make_url(dsn).set(drivername=f"postgresql+{driver}"))
    try:
        yield async_sessionmaker(engine) if shape == "session" else engine
    finally:
        await engine.dispose()


async def execute(connection: Any, sql: str) -> None:  # noqa: ANN401
    await connection.execute(sql if isinstance(connection, asyncpg.pool.PoolConnectionProxy) else sqlalchemy.text(sql))


@pytest.fixture(params=KINDS)
async def pool(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[Any]:
    """A pool of each kind in turn."""
    async with pool_on(request.param, dsn) as opened:
        yield opened


@pytest.mark.requirement("G1", "S2-34", "S4-18")
async def test_a_transaction_commits_and_wakes_once_after_it(pool: Any, dsn: str) -> None:  # noqa: ANN401
    """Also when several messages were added."""
    bell = Bell()
    outbox = Outbox(wake=bell)

    async with outbox.transaction(pool) as connection:
        await execute(connection, "INSERT INTO business VALUES (1)")
        await outbox.add(connection, {"n": 1}, topic="t")
        await outbox.add(connection, {"n": 2}, topic="t")
        before = (bell.rung, await stored(dsn))

    assert before == (0, 0)
    assert (bell.rung, await stored(dsn)) == (1, 2)
    assert await ask(dsn, "SELECT count(*) FROM business") == 1


@pytest.mark.requirement("G1", "G3", "S1-27", "S2-21")
async def test_an_error_rolls_back_and_wakes_nobody(pool: Any, dsn: str) -> None:  # noqa: ANN401
    """And the connection can be used again."""
    bell = Bell()
    outbox = Outbox(wake=bell)

    for _ in range(3):  # more than the pool holds
        with pytest.raises(LookupError, match="mine"):
            async with outbox.transaction(pool) as connection:
                await outbox.add(connection, {"n": 1}, topic="t")
                raise LookupError("mine")

    assert (bell.rung, await stored(dsn)) == (0, 0)
    async with outbox.transaction(pool) as connection:
        await outbox.add(connection, {"n": 1}, topic="t")
    assert (bell.rung, await stored(dsn)) == (1, 1)


@pytest.mark.requirement("G12")
async def test_a_commit_that_the_database_refuses_is_known_to_have_failed(pool: Any, dsn: str) -> None:  # noqa: ANN401
    """A rule that is checked by COMMIT is told as the library tells it."""
    bell = Bell()
    outbox = Outbox(wake=bell)

    with pytest.raises((asyncpg.UniqueViolationError, IntegrityError)):
        async with outbox.transaction(pool) as connection:
            await execute(connection, "INSERT INTO business VALUES (1, 7), (2, 7)")
            await outbox.add(connection, {"n": 1}, topic="t")

    assert (bell.rung, await stored(dsn)) == (0, 0)


@pytest.mark.requirement("G1", "G12")
async def test_an_error_that_was_caught_does_not_pass_for_a_commit(pool: Any, dsn: str) -> None:  # noqa: ANN401
    """PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK, and no library tells."""
    bell = Bell()
    outbox = Outbox(wake=bell)

    for _ in range(2):  # the first commit teaches how to hear the answer of the second
        with pytest.raises(TransactionAbortedError, match="roll back and start again"):
            async with outbox.transaction(pool) as connection:
                await outbox.add(connection, {"n": 1}, topic="t")
                with suppress(asyncpg.PostgresError, DBAPIError):
                    await execute(connection, "SELECT * FROM no_such_table")
        assert (bell.rung, await stored(dsn)) == (0, 0)

        async with outbox.transaction(pool) as connection:
            await execute(connection, "SELECT 1")
        bell.rung = 0


class Silent(asyncpg.Connection):
    """A connection whose answers nobody hears."""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> None:  # type: ignore[override]  # noqa: ANN401, ASYNC109
        await super().execute(query, *args, timeout=timeout)


@pytest.mark.requirement("G1", "G12")
async def test_a_pool_whose_commits_cannot_be_heard_never_passes_a_failure_for_a_commit(postgres_dsn: str) -> None:
    """What another pool's connections answer says nothing about this one's."""
    bell = Bell()
    outbox = Outbox(wake=bell)
    plain = await asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1)
    silent = await asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1, connection_class=Silent)
    async with outbox.transaction(plain) as connection:
        await connection.execute("SELECT 1")
    bell.rung = 0

    with pytest.raises((CommitUnknownError, TransactionAbortedError)):
        async with outbox.transaction(silent) as connection:
            with suppress(asyncpg.PostgresError):
                await connection.execute("SELECT * FROM no_such_table")

    assert bell.rung == 0
    await plain.close()
    await silent.close()


@pytest.mark.requirement("G12")
async def test_a_connection_that_breaks_before_the_commit_is_no_unknown_outcome(pool: Any, dsn: str) -> None:  # noqa: ANN401
    """Nothing was stored, since COMMIT was not sent."""
    bell = Bell()
    outbox = Outbox(wake=bell)

    with pytest.raises(Exception) as caught:  # noqa: PT011 -- each library has its own
        async with outbox.transaction(pool) as connection:
            await outbox.add(connection, {"n": 1}, topic="t")
            await ask(
                dsn,
                # It returns once the other end is gone: until then COMMIT could still be sent, in vain.
                "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
                " WHERE state = 'idle in transaction' AND datname = current_database()",
            )

    assert not isinstance(caught.value, CommitUnknownError)
    assert (bell.rung, await stored(dsn)) == (0, 0)


# -- COMMIT without an answer ----------------------------------------------------------------------------------

Moment = Literal["before", "after"]


class Base(DeclarativeBase):
    """What a service of its own has."""


class Order(Base):
    """A row that notices when somebody else has changed it."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column()
    name: Mapped[str]
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 -- as its base declares it


def refuse(*_: object) -> None:
    raise ValueError("stock must not be negative")


async def change_what_is_stale(session: AsyncSession) -> None:
    order = await session.get_one(Order, 1)
    await session.execute(sqlalchemy.text("UPDATE orders SET version = 99"))  # as another writer
    order.name = "b"


async def add_what_a_hook_refuses(session: AsyncSession, hook: str) -> None:
    sqlalchemy.event.listen(session.sync_session, hook, refuse)
    session.add(Order(id=2, name="x"))


@pytest.mark.requirement("G12")
@pytest.mark.parametrize(
    ("work", "error"),
    [
        (change_what_is_stale, StaleDataError),
        (partial(add_what_a_hook_refuses, hook="before_flush"), ValueError),
        (partial(add_what_a_hook_refuses, hook="before_commit"), ValueError),
    ],
    ids=["stale", "before_flush", "before_commit"],
)
@pytest.mark.parametrize("kind", ["session-asyncpg", "session-psycopg"])
async def test_what_fails_before_the_commit_is_told_as_it_is(
    kind: str, dsn: str, work: Callable[[AsyncSession], Awaitable[None]], error: type[Exception]
) -> None:
    """A flush that fails, or a hook of the service, has stored nothing, and there is nothing to find out."""
    await ask(dsn, "CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL, name text NOT NULL)")
    await ask(dsn, "INSERT INTO orders VALUES (1, 1, 'a')")
    bell = Bell()
    outbox = Outbox(wake=bell)

    async with pool_on(kind, dsn) as pool:
        with pytest.raises(error):
            async with outbox.transaction(pool) as session:
                await outbox.add(session, {"n": 1}, topic="t")
                await work(session)

    assert (bell.rung, await stored(dsn)) == (0, 0)
    assert await ask(dsn, "SELECT count(*) FROM orders WHERE name = 'a' AND version = 1") == 1


class Cutter:
    """A proxy on the loopback that cuts a connection when COMMIT goes by: before the server has it, or after."""

    def __init__(self, dsn: str, moment: Moment) -> None:
        self._url = sqlalchemy.make_url(dsn)
        self._moment = moment
        self.cut = 0

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        async with server:
            yield self._url.set(port=port).render_as_string(hide_password=False)

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, ask_server = await asyncio.open_connection(self._url.host, self._url.port)
        back = asyncio.create_task(pump(server, answer))
        try:
            while data := await client.read(65536):
                if b"COMMIT" in data:
                    self.cut += 1
                    back.cancel()
                    await asyncio.wait([back])  # two cannot read at once
                    if self._moment == "after":
                        ask_server.write(data)
                        await server.read(65536)  # the server has answered, so it has committed
                    return
                ask_server.write(data)
        finally:
            back.cancel()
            for writer in (ask_server, answer):
                writer.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@pytest.mark.requirement("G12")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_commit_without_an_answer_is_called_unknown(kind: str, moment: Moment, dsn: str) -> None:
    """From the outside both look alike, and the error says how to find out."""
    cutter, bell = Cutter(dsn, moment), Bell()
    outbox = Outbox(wake=bell)

    async with cutter.listening() as address, pool_on(kind, f"{address}?{NO_TLS[kind]}") as pool:
        with pytest.raises(CommitUnknownError, match="look for the message id") as caught:
            async with outbox.transaction(pool) as connection:
                added = await outbox.add(connection, {"n": 1}, topic="t")

    assert cutter.cut == 1
    assert caught.value.__cause__ is not None
    assert bell.rung == 0
    found = await ask(dsn, f"SELECT count(*) FROM postroom_outbox WHERE id = '{added.id}'")
    assert found == (1 if moment == "after" else 0)


NO_TLS = {kind: "ssl=disable" if kind.endswith("-asyncpg") else "sslmode=disable" for kind in KINDS}


# -- the rest --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("G12")
async def test_a_connection_that_breaks_after_the_commit_does_not_pass_for_a_failure(dsn: str) -> None:
    """The pool cannot take the connection back, but the commit was answered: nobody may hear of an error."""
    url = urlsplit(dsn)
    bell = Bell()
    async with FaultProxy(str(url.hostname), url.port or 5432) as proxy:
        through = url._replace(netloc=f"{url.username}@127.0.0.1:{proxy.port}").geturl()
        async with asyncpg.create_pool(through, min_size=1, max_size=1) as pool:
            proxy.drop_reply(b"RESET ALL")
            async with transaction(pool, bell) as connection:
                await execute(connection, "INSERT INTO business VALUES (1, 1)")

    assert proxy.dropped == 1
    assert bell.rung == 1
    assert await ask(dsn, "SELECT count(*) FROM business") == 1


@pytest.mark.requirement("S4-03")
@pytest.mark.parametrize(
    "make",
    [object, lambda: "postgresql://localhost/shop", lambda: sqlalchemy.create_engine("sqlite://")],
    ids=["object", "url", "sync engine"],
)
async def test_what_is_no_pool_is_refused(make: Callable[[], object]) -> None:
    """The error names what is accepted."""
    with pytest.raises(UnknownConnectionError, match=r"asyncpg's Pool, SQLAlchemy's AsyncEngine or async_sessionmaker"):
        async with Outbox().transaction(make()):
            pass


@pytest.mark.requirement("G1")
async def test_without_a_wake_up_a_transaction_commits_all_the_same(dsn: str) -> None:
    """The hint is an option."""
    async with asyncpg.create_pool(dsn, min_size=0) as pool, transaction(pool, None) as connection:
        await Outbox().add(connection, {"n": 1}, topic="t")

    assert await stored(dsn) == 1


@pytest.mark.requirement("G1", "G3")
async def test_a_transaction_on_mariadb_commits_and_rolls_back(mariadb_dsn: str) -> None:
    """Through SQLAlchemy on asyncmy."""
    from postroom.stores import MySQLStore  # noqa: PLC0415

    store = MySQLStore(mariadb_dsn)
    await store.apply_schema()
    await store.close()
    engine: AsyncEngine = create_async_engine(sqlalchemy.make_url(mariadb_dsn).set(drivername="mysql+asyncmy"))
    bell = Bell()
    outbox = Outbox(wake=bell)
    try:
        async with outbox.transaction(engine) as connection:
            await outbox.add(connection, {"n": 1}, topic="kept")
        with pytest.raises(LookupError):
            async with outbox.transaction(engine) as connection:
                await outbox.add(connection, {"n": 1}, topic="dropped")
                raise LookupError
        async with engine.connect() as connection:
            found = (await connection.execute(sqlalchemy.text("SELECT topic FROM postroom_outbox"))).scalars().all()
    finally:
        await engine.dispose()

    assert list(found) == ["kept"]
    assert bell.rung == 1
