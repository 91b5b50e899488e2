"""What the transaction of a handler is set to: its consumer's timeout limits it, and no setting of the store's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import asyncpg
import psycopg_pool
import pytest

from postroom import Consumer, Message, Router, transactional
from postroom.brokers import MemoryBroker
from postroom.errors import StoreTimeoutError
from postroom.middleware import Middleware, TransactionMiddleware
from postroom.stores import MySQLStore, PostgresStore
from postroom.testing.clients import PostgresClient
from postroom.transaction import current_transaction

from .test_transactions import MY, asking

Driver: TypeAlias = Literal["asyncpg", "psycopg"]
DRIVERS: tuple[Driver, ...] = ("asyncpg", "psycopg")
MINUTE = timedelta(minutes=1)
#: Longer than the server lets a statement of the store run, shorter than the handler may.
SLOW = "SELECT pg_sleep(3)"
WATCHED = (
    "statement_timeout",
    "idle_in_transaction_session_timeout",
    "enable_seqscan",
    "plan_cache_mode",
    "synchronous_commit",
    "default_transaction_isolation",
    "transaction_isolation",
)
#: What a session has on a server that was left as it comes.
DEFAULTS = {
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "enable_seqscan": "on",
    "plan_cache_mode": "auto",
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "transaction_isolation": "read committed",
}


async def fetch(connection: Any, sql: str) -> list[Any]:  # noqa: ANN401 -- of two libraries
    if hasattr(connection, "fetch"):
        return [tuple(row) for row in await connection.fetch(sql)]
    return await (await connection.execute(sql)).fetchall()  # type: ignore[no-any-return]


async def settings_inside() -> dict[str, str]:
    connection = current_transaction().connection
    return {name: (await fetch(connection, f"SHOW {name}"))[0][0] for name in WATCHED}


async def consume_one(middleware: Middleware, work: Callable[[], Any], timeout: timedelta | None) -> Any:  # noqa: ANN401, ASYNC109
    """Have one message handled by ``work``, and return what that returned."""
    router = Router()
    answers: list[Any] = []

    @router.on("order.placed")
    async def handle(_: Message) -> None:
        answers.append(await work())
        consumer.stop_soon()

    broker = MemoryBroker()
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, middleware, timeout=timeout)
    await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
    async with asyncio.timeout(60):
        await consumer.run()
    return answers[0]


@asynccontextmanager
async def opened(dsn: str, driver: Driver, **options: Any) -> AsyncGenerator[PostgresStore]:  # noqa: ANN401
    store = PostgresStore(dsn, driver=driver, **options)
    await store.apply_schema()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def pool_of(driver: Driver, dsn: str) -> AsyncGenerator[Any]:
    if driver == "asyncpg":
        async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
            yield pool
    else:
        async with psycopg_pool.AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False) as pool:
            yield pool


@pytest.mark.requirement("F-25")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_statement_of_a_handler_may_take_longer_than_one_of_its_store(
    driver: Driver, postgres_dsn: str
) -> None:
    """The store gives up a statement after a second or two, the consumer after a minute."""
    async with opened(postgres_dsn, driver, timeout=timedelta(seconds=1)) as store:
        stack = transactional(store, consumer="stock")

        async def work() -> str:
            await fetch(current_transaction().connection, SLOW)
            return "done"

        assert await consume_one(stack, work, timeout=MINUTE) == "done"


@pytest.mark.requirement("F-14", "F-25")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_handler_on_a_connection_of_the_store_has_a_limit_from_its_consumer_alone(
    driver: Driver, postgres_dsn: str
) -> None:
    """Twice its timeout, for a process that hangs in a transaction; all else is as the server has it."""
    async with opened(postgres_dsn, driver, timeout=timedelta(seconds=10)) as store:
        found = await consume_one(transactional(store, consumer="stock"), settings_inside, timeout=5 * MINUTE)
        short = await consume_one(transactional(store, consumer="b"), settings_inside, timeout=MINUTE / 60)

    assert found == {**DEFAULTS, "idle_in_transaction_session_timeout": "10min"}
    assert short == found  # of several consumers the longest counts


@pytest.mark.requirement("F-25")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_handler_whose_time_is_short_leaves_the_server_a_minute(driver: Driver, postgres_dsn: str) -> None:
    """The consumer ends it; what the server does is for processes that hang."""
    async with opened(postgres_dsn, driver) as store:
        found = await consume_one(TransactionMiddleware(store), settings_inside, timeout=timedelta(seconds=10))

    assert found == {**DEFAULTS, "idle_in_transaction_session_timeout": "1min"}


@pytest.mark.requirement("F-25")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_without_a_timeout_nothing_limits_a_handler(driver: Driver, postgres_dsn: str) -> None:
    """Neither the consumer nor the server."""
    async with opened(postgres_dsn, driver) as store:
        found = await consume_one(transactional(store, consumer="stock"), settings_inside, timeout=None)

    assert found == DEFAULTS


@pytest.mark.requirement("F-14")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_handler_on_a_pool_of_the_application_has_the_settings_of_that_pool(
    driver: Driver, postgres_dsn: str
) -> None:
    """Nothing is set there, not even for one transaction."""
    async with opened(postgres_dsn, driver) as store, pool_of(driver, postgres_dsn) as pool:
        stack = transactional(store, consumer="stock", pool=pool)
        found = await consume_one(stack, settings_inside, timeout=MINUTE)

    assert found == DEFAULTS


@pytest.mark.requirement("S1-28")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_what_a_handler_committed_is_durable_whatever_the_database_has_by_default(
    driver: Driver, postgres_dsn: str, postgres_server: PostgresClient
) -> None:
    """The message is acknowledged after it; isolation and all else are the database's."""
    name = postgres_dsn.rpartition("/")[2]
    for setting in ("synchronous_commit = off", "default_transaction_isolation = 'repeatable read'"):
        postgres_server.query(f'ALTER DATABASE "{name}" SET {setting}')
    async with opened(postgres_dsn, driver) as store:
        found = await consume_one(transactional(store, consumer="stock"), settings_inside, timeout=None)

    isolation = dict.fromkeys(("default_transaction_isolation", "transaction_isolation"), "repeatable read")
    assert found == {**DEFAULTS, **isolation}


@pytest.mark.requirement("F-14")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_session_that_a_handler_was_given_keeps_nothing_of_its_transaction(
    driver: Driver, postgres_dsn: str
) -> None:
    """What is set for a handler ends with its transaction."""
    show = "SHOW idle_in_transaction_session_timeout"
    async with opened(postgres_dsn, driver) as store:
        TransactionMiddleware(store).limit_to(MINUTE)
        async with store.transactions().begin() as transaction:
            connection = transaction.connection
            inside = await fetch(connection, show)
        after = await fetch(connection, show)

    assert (inside, after) == ([("2min",)], [("0",)])


@pytest.mark.requirement("G13", "S1-21")
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_message_that_another_consumer_has_waits_as_long_as_a_call_of_the_store(
    driver: Driver, postgres_dsn: str
) -> None:
    """Nothing of the handler has begun by then, so it costs no attempt."""
    content = Message(topic="orders", type="order.placed", payload=b"{}", attempt=1)

    async def never(_: Message) -> list[Message]:
        pytest.fail("the handler was called")

    async with (
        opened(postgres_dsn, driver) as holder,
        opened(postgres_dsn, driver, timeout=timedelta(seconds=1)) as store,
    ):
        stack = transactional(store, consumer="stock")
        async with holder.transactions().begin() as transaction:
            await holder.inbox("stock").admit(transaction, content)
            with pytest.raises(StoreTimeoutError, match="no transaction began within 1 s") as caught:
                await stack(content, never)
        assert await stack(content, never) == ()

    assert caught.value.is_outage


@pytest.mark.requirement("F-14")
async def test_a_handler_on_mariadb_has_the_isolation_of_its_server(mariadb_dsn: str) -> None:
    """Claims need another one, on sessions of their own."""
    store = MySQLStore(mariadb_dsn)
    await store.apply_schema()
    ask = asking(MY, mariadb_dsn)
    [(server,)] = await asyncio.to_thread(ask, "SELECT @@GLOBAL.tx_isolation")
    try:
        async with store.transactions().begin() as transaction, transaction.connection.cursor() as cursor:
            await cursor.execute("SELECT @@SESSION.tx_isolation")
            found = (await cursor.fetchone())[0]
    finally:
        await store.close()

    assert found == server == "REPEATABLE-READ"
