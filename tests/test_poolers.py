"""PostgreSQL behind PgBouncer: nothing outlives a transaction, whichever session it was given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import asyncpg
import psycopg
import psycopg_pool
import pytest

from postroom import Consumer, Dispatcher, Message, Outbox, Router, transactional
from postroom.brokers import MemoryBroker
from postroom.decisions import Decisions
from postroom.errors import ConfigurationError, PoolerError
from postroom.store import ClaimTerms, Delivered, Retry, Settlement
from postroom.stores import PostgresStore, store_from_url
from postroom.stores.sql.statement import Result, Script, Statement
from postroom.testing.clients import PostgresClient
from postroom.testing.faults import FaultProxy
from postroom.testing.pgbouncer import PgBouncer
from postroom.testing.waiting import until
from postroom.transaction import current_transaction
from tests.support.server_fixtures import run_private

Driver: TypeAlias = Literal["asyncpg", "psycopg"]
DRIVERS: tuple[Driver, ...] = ("asyncpg", "psycopg")
MINUTE = timedelta(minutes=1)
TERMS = ClaimTerms(worker=uuid4(), lease=MINUTE)
PATIENCE = timedelta(seconds=90)


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    chosen: Driver = request.param
    return chosen


@pytest.fixture
def pooled_dsn(private_pgbouncer: PgBouncer, postgres_dsn: str) -> str:
    """An empty database through a pooler in transaction mode with three server sessions."""
    return private_pgbouncer.through(postgres_dsn)


@asynccontextmanager
async def opened(dsn: str, driver: Driver, **options: Any) -> AsyncGenerator[PostgresStore]:  # noqa: ANN401
    store = PostgresStore(dsn, driver=driver, pooler="transaction", **options)
    await store.apply_schema()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def application(dsn: str, driver: Driver) -> AsyncIterator[Any]:
    """A pool of the application's own, as its libraries say that it is to be set up for a pooler."""
    if driver == "asyncpg":
        async with asyncpg.create_pool(dsn, min_size=1, max_size=4, statement_cache_size=0) as pool:
            yield pool
    else:
        options = {"prepare_threshold": None}
        async with psycopg_pool.AsyncConnectionPool(dsn, kwargs=options, min_size=1, max_size=4, open=False) as pool:
            yield pool


@asynccontextmanager
async def transaction_of(pool: Any) -> AsyncIterator[Any]:  # noqa: ANN401 -- of two libraries
    if isinstance(pool, asyncpg.Pool):
        async with pool.acquire() as connection, connection.transaction():
            yield connection
    else:
        async with pool.connection() as connection, connection.transaction():
            yield connection


def numbered(number: int, **fields: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=str(number).encode(), **fields)


async def session_states(dsn: str, sessions: int) -> dict[int, dict[str, str]]:
    """Return all settings and named statements of each server session, by its process, through the same pooler."""
    async with AsyncExitStack() as stack:
        found: dict[int, dict[str, str]] = {}
        for _ in range(sessions):  # one transaction for each, at the same time
            connection = await stack.enter_async_context(
                await psycopg.AsyncConnection.connect(dsn, prepare_threshold=None)
            )
            answers = await (await connection.execute("SHOW ALL")).fetchall()
            # Those of a language are there from when a session first runs a function in it.
            state = {name: value for name, value, _ in answers if not name.startswith("plpgsql.")}
            own = "locktype = 'advisory' AND pid = pg_backend_pid()"  # other tests have theirs on the same server
            for what, text in {
                "prepared": "SELECT string_agg(statement, ';') FROM pg_prepared_statements",
                "listening": "SELECT string_agg(name, ';') FROM pg_listening_channels() AS name",
                "advisory locks": f"SELECT count(*) FROM pg_locks WHERE {own}",
                "temporary tables": "SELECT count(*) FROM pg_class WHERE relpersistence = 't' AND relkind = 'r'",
            }.items():
                state[what] = str((await (await connection.execute(text)).fetchall())[0][0])
            [[pid]] = await (await connection.execute("SELECT pg_backend_pid()")).fetchall()
            found[pid] = state
        return found


# -- found out ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-49")
async def test_a_transaction_pooler_is_refused_at_open_and_the_error_names_the_option(
    driver: Driver, pooled_dsn: str
) -> None:
    """Before anything is set on a session that belongs to others as well."""
    before = await session_states(pooled_dsn, 3)
    store = PostgresStore(pooled_dsn, driver=driver)
    try:
        for call in (store.open, store.apply_schema, store.transactions().begin().__aenter__):
            with pytest.raises(PoolerError, match='pooler="transaction"'):
                await call()
    finally:
        await store.close()

    assert await session_states(pooled_dsn, 3) == before


@pytest.mark.requirement("S2-49")
@pytest.mark.parametrize("round_robin", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_transaction_pooler_is_noticed_however_it_deals_out_sessions(
    driver: Driver, postgres_dsn: str, size: int, round_robin: str
) -> None:
    """The last one that came back, or one after the other."""
    for pooler in run_private(PgBouncer(postgres_dsn, pool_size=size, settings={"server_round_robin": round_robin})):
        dsn = pooler.through(postgres_dsn)

        async def main(dsn: str = dsn) -> None:
            busy = [asyncio.create_task(chatter(dsn)) for _ in range(4)]
            store = PostgresStore(dsn, driver=driver)
            try:
                with pytest.raises(PoolerError):
                    await store.open()
            finally:
                await store.close()
                for task in busy:
                    task.cancel()
                await asyncio.wait(busy)

        asyncio.run(main())


async def chatter(dsn: str) -> None:
    """Use the sessions of a pooler without end."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        while True:
            await connection.execute("SELECT pg_sleep(0.001)")


@pytest.fixture
def sessions_dsn(postgres_dsn: str) -> Iterator[str]:
    """An empty database through a pooler that keeps a session for each client."""
    for pooler in run_private(PgBouncer(postgres_dsn, mode="session", pool_size=20)):
        yield pooler.through(postgres_dsn)


@pytest.mark.requirement("S2-34", "S2-49")
async def test_a_pooler_in_session_mode_needs_no_option(driver: Driver, sessions_dsn: str) -> None:
    """Sessions are set as on a direct connection, and hints arrive."""
    store = PostgresStore(sessions_dsn, driver=driver)
    await store.apply_schema()
    await store.open()
    woken = asyncio.Event()
    listening = asyncio.create_task(store.listen(woken.set))
    try:
        await asyncio.wait_for(woken.wait(), 30)
        woken.clear()
        store.notify()
        await asyncio.wait_for(woken.wait(), 30)
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        await store.close()


@pytest.mark.requirement("S2-49")
async def test_a_direct_connection_is_never_taken_for_a_pooler(driver: Driver, postgres_dsn: str) -> None:
    """Also when many open at once, and through a proxy that passes on bytes."""
    await schema_on(postgres_dsn)
    url = psycopg.conninfo.conninfo_to_dict(postgres_dsn)
    async with FaultProxy(str(url["host"]), int(str(url["port"]))) as proxy:
        proxied = postgres_dsn.replace(f":{url['port']}/", f":{proxy.port}/")
        stores = [PostgresStore(dsn, driver=driver) for dsn in (postgres_dsn, proxied) for _ in range(10)]
        try:
            assert await asyncio.gather(*[store.open() for store in stores]) == [True] * 20
        finally:
            for store in stores:
                await store.close()


async def schema_on(dsn: str) -> None:
    store = PostgresStore(dsn)
    await store.apply_schema()
    await store.close()


@pytest.mark.requirement("G13")
def test_an_unknown_pooler_is_refused() -> None:
    """With what would be known."""
    with pytest.raises(ConfigurationError, match="must be one of None, 'transaction'"):
        PostgresStore("postgresql://localhost/shop", pooler="statement")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="PostgreSQL only"):
        store_from_url("sqlite:///shop.sqlite3", pooler="transaction")


# -- nothing left behind ------------------------------------------------------------------------------------------


async def everything(store: PostgresStore, pool: Any) -> None:  # noqa: ANN401
    """Do once whatever a store, an outbox, an inbox, tickets, a dispatcher and a consumer do."""
    await add_everything(store.outbox(), pool)
    store.notify()
    [one, *rest] = await store.claim(5, TERMS)
    await store.extend([one, *rest], MINUTE)
    await store.settle([Settlement(one, Retry("later", timedelta(0))), *(Settlement(c, Delivered()) for c in rest)])
    await store.sweep(TERMS)
    await store.stats()
    broker = MemoryBroker()
    stacks = {"a": transactional(store, consumer="a"), "b": transactional(store, consumer="b", pool=pool)}
    subscribers = {group: broker.subscribe("orders", group=group) for group in stacks}
    await Dispatcher(store, broker).run(until_idle=True)
    async with transaction_of(pool) as connection:
        await connection.execute("CREATE TABLE effects (number int)")
    for group, stack in stacks.items():
        await handle_all(broker, group, Consumer(subscribers[group], inserting(), stack))
    await store.purge(older_than=timedelta(0))
    await store.check_schema()


async def add_everything(outbox: Outbox, pool: Any) -> None:  # noqa: ANN401
    decisions, now = Decisions(outbox), datetime.now(UTC)
    for number in range(12):
        async with transaction_of(pool) as connection:
            extra: dict[str, Any] = {"key": "a"} if number % 2 else {"dedupe_key": str(number % 4)}
            await outbox.add(connection, numbered(number, **extra))
    async with transaction_of(pool) as connection:
        await Outbox(strict_order=True).add(connection, [numbered(12, key="b"), numbered(13, key="c")])
        await decisions.schedule(connection, "ticket", now)
        await decisions.find_due(connection)
        await decisions.decide(connection, "ticket", now, numbered(14))
        await decisions.forget(connection, older_than=timedelta(0))


def inserting() -> Router:
    """Return a router whose handler writes the number of each message, and has an output."""
    router = Router()

    @router.on("order.placed")
    async def handle(message: Message) -> list[Message]:
        await current_transaction().connection.execute(f"INSERT INTO effects VALUES ({int(message.payload)})")
        return [Message(topic="done", payload=message.payload)]

    return router


async def handle_all(broker: MemoryBroker, group: str, consumer: Consumer) -> None:
    running = asyncio.create_task(consumer.run())
    try:
        await until(lambda: broker.backlog(group) == 0 or running.done(), "the last message", within=PATIENCE)
    finally:
        await consumer.stop()
        await running


@pytest.mark.requirement("S2-49")
async def test_other_clients_of_the_pooler_see_no_trace_of_what_was_done(driver: Driver, pooled_dsn: str) -> None:
    """Every setting of every session is what it was, nothing is prepared, locked or listened to."""
    async with application(pooled_dsn, driver) as pool:
        before = await session_states(pooled_dsn, 3)
        async with opened(pooled_dsn, driver) as store:
            await everything(store, pool)
            after = await session_states(pooled_dsn, 3)

    assert len(before) == 3
    assert after == before


@pytest.fixture
def unusual_dsn(pooled_dsn: str, postgres_server: PostgresClient) -> str:
    """A database whose sessions lose commits in a crash, fail in each other's way, and have time for nothing."""
    name = pooled_dsn.rpartition("/")[2]
    for setting in (
        "synchronous_commit = off",
        "default_transaction_isolation = 'repeatable read'",
        "plan_cache_mode = force_generic_plan",
    ):
        postgres_server.query(f'ALTER DATABASE "{name}" SET {setting}')
    return pooled_dsn


WITNESS = """
    CREATE TABLE seen (what text, synchronous_commit text, isolation text, seqscan text, plans text, longest text);
    CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO seen SELECT tg_table_name || ' ' || tg_op, current_setting('synchronous_commit'),
            current_setting('transaction_isolation'), current_setting('enable_seqscan'),
            current_setting('plan_cache_mode'), current_setting('statement_timeout');
        RETURN NULL;
    END $$;
    CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON postroom_outbox
        FOR EACH STATEMENT EXECUTE FUNCTION witness();
    CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON postroom_inbox
        FOR EACH STATEMENT EXECUTE FUNCTION witness();
"""


@pytest.mark.requirement("S2-49")
async def test_claims_are_durable_and_set_whatever_the_database_has_by_default(
    driver: Driver, unusual_dsn: str
) -> None:
    """What the store needs is set in each of its transactions; a handler's is durable, and else its own."""
    async with opened(unusual_dsn, driver) as store, application(unusual_dsn, driver) as pool:
        async with await psycopg.AsyncConnection.connect(unusual_dsn, autocommit=True) as connection:
            await connection.execute(WITNESS)
        async with transaction_of(pool) as connection:
            await store.outbox().add(connection, [numbered(1), numbered(2, key="a")])
        for _ in range(2):
            claims = await store.claim(1, TERMS)
            await store.extend(claims, MINUTE)
            assert await store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
        await store.purge(older_than=timedelta(0))
        async with store.transactions().begin() as transaction:
            await store.inbox("stock").admit(transaction, numbered(3))
        async with await psycopg.AsyncConnection.connect(unusual_dsn, autocommit=True) as connection:
            seen = set(await (await connection.execute("SELECT DISTINCT * FROM seen")).fetchall())

    own = ("on", "read committed", "off", "force_custom_plan", "20s")
    assert seen == {
        ("postroom_outbox INSERT", "off", "repeatable read", "on", "force_generic_plan", "0"),
        ("postroom_outbox UPDATE", *own),
        ("postroom_outbox DELETE", *own),
        ("postroom_inbox INSERT", "on", "repeatable read", "on", "force_generic_plan", "0"),
    }


@pytest.mark.requirement("S2-49")
async def test_adding_names_no_statement_that_its_connection_is_not_set_up_for(driver: Driver, pooled_dsn: str) -> None:
    """Asyncpg with statement_cache_size=0, psycopg with prepare_threshold=None."""
    async with opened(pooled_dsn, driver) as store, application(pooled_dsn, driver) as pool:
        outbox = store.outbox()
        for number in range(20):
            async with transaction_of(pool) as connection:
                await outbox.add(connection, numbered(number, key="a", dedupe_key=str(number % 7)))
        found = await session_states(pooled_dsn, 3)

        assert [state["prepared"] for state in found.values()] == ["None"] * 3
        assert (await store.stats()).pending == 7


@pytest.mark.requirement("S2-49")
@pytest.mark.parametrize(
    "text",
    [
        "CREATE INDEX CONCURRENTLY late ON postroom_outbox (id)",
        "SELECT pg_try_advisory_lock(1)",
        "SELECT set_config('statement_timeout', '0', false)",
    ],
)
async def test_what_needs_a_session_of_its_own_is_refused_behind_a_pooler(
    driver: Driver, pooled_dsn: str, text: str
) -> None:
    """An upgrade that builds an index while others write runs on a direct connection."""

    def script() -> Script[Result]:
        return (yield Statement(text, {}))

    async with opened(pooled_dsn, driver) as store:
        with pytest.raises(ConfigurationError, match="direct connection"):
            await store._pool.run(script(), atomic=False, timeout=MINUTE)  # noqa: SLF001
        assert (await store.stats()).pending == 0


# -- hints --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-34")
async def test_a_dispatcher_polls_behind_a_pooler_and_says_so_once(
    driver: Driver, pooled_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Instead of listening in vain."""
    broker = MemoryBroker()
    async with opened(pooled_dsn, driver) as store, application(pooled_dsn, driver) as pool:
        dispatcher = Dispatcher(store, broker)
        with caplog.at_level(logging.INFO, "postroom"):
            running = asyncio.create_task(dispatcher.run())
            async with transaction_of(pool) as connection:
                await store.outbox().add(connection, numbered(1))
            await until(lambda: len(broker.received) == 1, "the message", within=PATIENCE)
            await dispatcher.stop()
            await running

    [record] = [record for record in caplog.records if "LISTEN" in record.message]
    assert record.levelno == logging.INFO
    assert "polling" in record.message
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.requirement("S2-34")
async def test_a_hint_that_is_sent_through_a_pooler_reaches_those_who_listen_directly(
    driver: Driver, pooled_dsn: str, postgres_dsn: str
) -> None:
    """An application behind the pooler wakes a dispatcher that is not."""
    direct = PostgresStore(postgres_dsn, driver=driver)
    woken = asyncio.Event()
    async with opened(pooled_dsn, driver) as store:
        listening = asyncio.create_task(direct.listen(woken.set))
        try:
            await asyncio.wait_for(woken.wait(), 30)
            woken.clear()
            store.notify()
            await asyncio.wait_for(woken.wait(), 30)
        finally:
            listening.cancel()
            await asyncio.wait({listening})
            await direct.close()


# -- from end to end ------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """Producers, two dispatchers and a consumer, all of them behind one pooler."""

    dsn: str
    driver: Driver
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    added: list[int] = field(default_factory=list)

    async def produce(self, pool: Any, outbox: Outbox, numbers: Sequence[int]) -> None:  # noqa: ANN401
        for number in numbers:
            while number not in self.added:
                try:
                    async with transaction_of(pool) as connection:
                        await outbox.add(connection, numbered(number, key=str(number % 5), dedupe_key=str(number)))
                except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, psycopg.Error, TimeoutError):
                    await asyncio.sleep(0.05)  # it may be there all the same, which the dedupe key tells
                else:
                    self.added.append(number)

    async def run(self, count: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[int]:
        """Send messages through all of them; return the effects."""
        async with AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(opened(self.dsn, self.driver)) for _ in range(3)]
            pool = await stack.enter_async_context(application(self.dsn, self.driver))
            subscriber = self.broker.subscribe("orders", group="stock")
            # A claim whose answer was lost with the pooler is found again after its lease.
            lease, limit = timedelta(seconds=5), timedelta(seconds=3)
            dispatchers = [Dispatcher(store, self.broker, lease=lease, publish_timeout=limit) for store in stores[:2]]
            consumer = Consumer(subscriber, inserting(), transactional(stores[2], consumer="stock"))
            async with stores[2].transactions().begin() as transaction:
                await transaction.connection.execute("CREATE TABLE effects (number int)")
            workers: list[Dispatcher | Consumer] = [*dispatchers, consumer]
            running = [asyncio.create_task(worker.run()) for worker in workers]
            outbox = stores[0].outbox()
            halves = range(count // 2), range(count // 2, count)
            await asyncio.gather(
                *[self.produce(pool, outbox, numbers) for numbers in halves], *([meanwhile()] if meanwhile else [])
            )
            await until(
                lambda: self._is_done(count), "every effect", within=PATIENCE, every=timedelta(milliseconds=200)
            )
            for worker in workers:
                await worker.stop()
            await asyncio.gather(*running)
        return await self.effects()

    async def _is_done(self, count: int) -> bool:
        return len(set(await self.effects())) == count

    async def effects(self) -> list[int]:
        try:
            async with await psycopg.AsyncConnection.connect(self.dsn, prepare_threshold=None) as connection:
                answer = await connection.execute("SELECT number FROM effects ORDER BY number")
                return [row[0] for row in await answer.fetchall()]
        except psycopg.Error:
            return []


@pytest.mark.requirement("S2-49")
async def test_producers_dispatchers_and_a_consumer_share_three_sessions(driver: Driver, pooled_dsn: str) -> None:
    """Every message has its effect, once."""
    assert await Line(pooled_dsn, driver).run(60) == list(range(60))


@pytest.mark.requirement("S2-49")
async def test_nothing_is_lost_when_the_pooler_is_killed_under_load(
    driver: Driver, private_pgbouncer: PgBouncer, pooled_dsn: str
) -> None:
    """Dispatchers and consumers come back by themselves."""
    line = Line(pooled_dsn, driver)

    async def trouble() -> None:
        for part in (20, 60):
            await until(lambda part=part: len(line.added) >= part, "the load", within=PATIENCE)  # type: ignore[misc]
            await asyncio.to_thread(private_pgbouncer.kill9)
            await asyncio.to_thread(private_pgbouncer.start)

    assert await line.run(100, trouble) == list(range(100))
