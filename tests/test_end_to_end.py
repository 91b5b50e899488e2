"""From the caller's transaction to the receiver, on real databases."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from datetime import timedelta
from uuid import UUID

import asyncmy
import asyncpg
import pytest

from postroom import Backoff, Delivered, Dispatcher, Message, Outbox, Outcome
from postroom import events as ev
from postroom.errors import BrokerUnavailableError
from postroom.stores import MySQLStore, PostgresStore, SQLiteStore, SQLStore
from postroom.stores.sql.url import Place
from postroom.testing.servers import PostgresServer
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
OUTBOX = Outbox(namespace="shop")


class Shop:
    """A service with a business table, and the outbox beside it."""

    def __init__(self, store: SQLStore, transact: Callable[[int, bool], Awaitable[list[UUID]]]) -> None:
        self.store = store
        self.transact = transact

    async def place_orders(self, count: int, *, commit: bool = True) -> list[UUID]:
        """Write orders and their messages in one transaction; return the ids of the messages."""
        return await self.transact(count, commit)

    async def is_drained(self) -> bool:
        stats = await self.store.stats()
        return stats.pending == 0 and stats.processing == 0


def ids(added: Sequence[object]) -> list[UUID]:
    return [one.id for one in added]  # type: ignore[attr-defined]


def events_of(count: int) -> list[dict[str, int]]:
    return [{"order": n} for n in range(count)]


async def _sqlite(path: str) -> Shop:
    with closing(sqlite3.connect(path)) as setup, setup:
        setup.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, n INTEGER)")

    async def transact(count: int, commit: bool) -> list[UUID]:  # noqa: FBT001
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO orders (n) VALUES (?)", [(n,) for n in range(count)])
            added = OUTBOX.add(connection, events_of(count), topic="orders")
            connection.commit() if commit else connection.rollback()
        return ids(added)

    return Shop(SQLiteStore(path, namespace="shop"), transact)


async def _postgres(dsn: str, driver: str) -> Shop:
    setup = await asyncpg.connect(dsn)
    await setup.execute("CREATE TABLE orders (id bigserial PRIMARY KEY, n int)")
    await setup.close()

    async def transact(count: int, commit: bool) -> list[UUID]:  # noqa: FBT001
        connection = await asyncpg.connect(dsn)
        transaction = connection.transaction()
        await transaction.start()
        await connection.executemany("INSERT INTO orders (n) VALUES ($1)", [(n,) for n in range(count)])
        added = await OUTBOX.add(connection, events_of(count), topic="orders")
        await (transaction.commit() if commit else transaction.rollback())
        await connection.close()
        return ids(added)

    return Shop(PostgresStore(dsn, namespace="shop", driver=driver), transact)  # type: ignore[arg-type]


async def _mariadb(url: str) -> Shop:
    place = Place.parse(url, schemes=("mysql",))
    options = {"host": place.host, "port": place.port, "user": place.user, "db": place.database}
    setup = await asyncmy.connect(**options)
    async with setup.cursor() as cursor:
        await cursor.execute("CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, n INT)")
    setup.close()

    async def transact(count: int, commit: bool) -> list[UUID]:  # noqa: FBT001
        connection = await asyncmy.connect(**options)
        async with connection.cursor() as cursor:
            await cursor.executemany("INSERT INTO orders (n) VALUES (%s)", [(n,) for n in range(count)])
        added = await OUTBOX.add(connection, events_of(count), topic="orders")
        await (connection.commit() if commit else connection.rollback())
        connection.close()
        return ids(added)

    return Shop(MySQLStore(url, namespace="shop"), transact)


@pytest.fixture(params=["sqlite", "postgres-asyncpg", "postgres-psycopg", "mariadb"])
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    kind, _, driver = request.param.partition("-")
    if kind == "sqlite":
        shop = await _sqlite(request.getfixturevalue("sqlite_path"))
    elif kind == "postgres":
        shop = await _postgres(request.getfixturevalue("postgres_dsn"), driver)
    else:
        shop = await _mariadb(request.getfixturevalue("mariadb_dsn"))
    await shop.store.apply_schema()
    await shop.store.open()
    yield shop
    await shop.store.close()


class Receiver:
    """A broker that keeps what it confirms, and can be down."""

    def __init__(self) -> None:
        self.received: list[UUID] = []
        self.is_down = False
        self.refusals = 0

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        if self.is_down:
            self.refusals += 1
            raise BrokerUnavailableError("connection refused")
        self.received += [message.id for message in messages]
        return [Delivered()] * len(messages)


@pytest.mark.requirement("G1", "G2", "G3", "S2-01", "S2-02", "S2-03", "S2-17", "S2-21", "S2-48", "S4-18", "S4-20")
async def test_what_commits_is_delivered_and_what_rolls_back_is_not(shop: Shop) -> None:
    """Delivered = committed, as sets."""
    receiver, committed = Receiver(), set[UUID]()
    dispatcher = Dispatcher(shop.store, receiver, poll_interval=20 * MS)
    running = asyncio.create_task(dispatcher.run())
    for count in (1, 3, 40):
        await shop.place_orders(count, commit=False)
        committed.update(await shop.place_orders(count))
        await shop.place_orders(count, commit=False)
    await until(shop.is_drained, "everything being delivered")
    await dispatcher.stop()
    await running

    assert len(receiver.received) == 44
    assert set(receiver.received) == committed
    assert (await shop.store.stats()).delivered == 44


@pytest.mark.requirement("G13", "S4-20")
async def test_a_ten_minute_outage_on_a_backlog_leaves_no_dead_letter(shop: Shop) -> None:
    """Ten minutes at a 200th of the time: 0 dead, no attempt spent, full delivery."""
    scale = 200
    receiver = Receiver()
    receiver.is_down = True
    committed = {one for _ in range(20) for one in await shop.place_orders(500)}
    dispatcher = Dispatcher(
        shop.store,
        receiver,
        poll_interval=500 * MS / scale,
        backoff=Backoff(base=SECOND / scale, max=300 * SECOND / scale),
        outage_backoff=Backoff(base=SECOND / scale, max=30 * SECOND / scale),
        max_attempts=3,
        listener=lambda _: None,
    )
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: receiver.refusals >= 3, "the outage being noticed")
    await asyncio.sleep(600 / scale)  # the outage is a length of time: there is no condition to wait for
    during = await shop.store.stats()
    receiver.is_down = False
    await until(shop.is_drained, "everything being delivered", within=timedelta(seconds=60))
    await dispatcher.stop()
    await running
    after = await shop.store.stats()

    assert during.dead == 0
    assert set(receiver.received) == committed
    assert len(receiver.received) == 10_000
    assert (after.dead, after.delivered) == (0, 10_000)


@pytest.mark.requirement("G5", "S1-33", "S2-41", "S2-52")
async def test_a_consumer_that_is_idempotent_on_the_id_sees_each_event_once(shop: Shop) -> None:
    """The id is the same over all attempts, so duplicates can be told."""
    placed = set(await shop.place_orders(50))
    effects, deliveries, rng = set[UUID](), 0, random.Random(7)

    async def send(message: Message) -> None:
        nonlocal deliveries
        deliveries += 1
        effects.add(message.id)
        if rng.random() < 0.5:
            raise ConnectionResetError("the answer was lost")

    dispatcher = Dispatcher(
        shop.store,
        send,
        poll_interval=10 * MS,
        backoff=Backoff(base=MS, max=5 * MS),
        max_attempts=100,
        listener=lambda _: None,
    )
    running = asyncio.create_task(dispatcher.run())
    await until(shop.is_drained, "everything being delivered")
    await dispatcher.stop()
    await running

    assert effects == placed
    assert deliveries > 50


@pytest.mark.requirement("S2-04")
async def test_a_damaged_row_is_dead_with_a_reason_and_stops_nothing(sqlite_path: str) -> None:
    """What cannot be decoded is surfaced; the others are delivered."""
    shop = await _sqlite(sqlite_path)
    await shop.store.apply_schema()
    await shop.store.open()
    damaged, *_ = await shop.place_orders(3)
    with closing(sqlite3.connect(sqlite_path)) as connection, connection:
        connection.execute("UPDATE postroom_outbox SET headers = 'no json' WHERE id = ?", (str(damaged),))
    told: list[ev.Event] = []
    await Dispatcher(shop.store, Receiver(), listener=told.append).run(until_idle=True)
    with closing(sqlite3.connect(sqlite_path)) as connection:
        rows = connection.execute("SELECT status, last_error FROM postroom_outbox ORDER BY seq").fetchall()
    await shop.store.close()

    assert [status for status, _ in rows] == ["dead", "delivered", "delivered"]
    assert rows[0][1].startswith("the stored row cannot be decoded: JSONDecodeError")
    assert [event.message_id for event in told if isinstance(event, ev.Died)] == [damaged]


@pytest.mark.requirement("G6")
async def test_a_damaged_row_blocks_its_own_key(sqlite_path: str) -> None:
    """What follows an unreadable message of its key is not published from the same batch."""
    shop = await _sqlite(sqlite_path)
    await shop.store.apply_schema()
    await shop.store.open()
    with closing(sqlite3.connect(sqlite_path)) as connection, connection:
        damaged, *_ = OUTBOX.add(connection, events_of(3), topic="orders", key="k")
        other = OUTBOX.add(connection, {"order": 9}, topic="orders", key="other")
        connection.execute("UPDATE postroom_outbox SET headers = '[]' WHERE id = ?", (str(damaged.id),))
    receiver = Receiver()
    await Dispatcher(shop.store, receiver).run(until_idle=True)
    stats = await shop.store.stats()
    await shop.store.close()

    assert receiver.received == [other.id]
    assert (stats.dead, stats.pending, stats.delivered) == (1, 2, 1)


@pytest.mark.requirement("G2", "S1-34", "S4-13")
async def test_a_database_that_crashes_and_comes_back_costs_nothing(private_postgres: PostgresServer) -> None:
    """Kill -9 of the server in the middle; delivery goes on by itself when it is back."""
    shop = await _postgres(private_postgres.dsn, "asyncpg")
    await shop.store.apply_schema()
    await shop.store.open()
    receiver, told = Receiver(), list[ev.Event]()
    committed = {one for _ in range(10) for one in await shop.place_orders(200)}
    dispatcher = Dispatcher(
        shop.store,
        receiver,
        batch=20,
        poll_interval=20 * MS,
        lease=2 * SECOND,
        publish_timeout=SECOND,
        listener=told.append,
    )
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: len(receiver.received) > 100, "the drain being under way")
    await asyncio.to_thread(private_postgres.kill9)
    await until(lambda: any(isinstance(event, ev.StoreFailed) for event in told), "the failure being told")
    await asyncio.to_thread(private_postgres.start)
    committed.update(await shop.place_orders(10))
    await until(shop.is_drained, "everything being delivered", within=timedelta(seconds=60))
    await dispatcher.stop()
    await running
    await shop.store.close()

    assert committed - set(receiver.received) == set()
    assert set(receiver.received) - committed == set()


@pytest.mark.requirement("S4-23")
async def test_a_notification_wakes_a_dispatcher_of_another_process(postgres_dsn: str) -> None:
    """The hint travels through PostgreSQL, outside the producer's transaction."""
    shop = await _postgres(postgres_dsn, "asyncpg")
    await shop.store.apply_schema()
    producer = PostgresStore(postgres_dsn, namespace="shop")
    await producer.open()
    receiver = Receiver()
    dispatcher = Dispatcher(shop.store, receiver, poll_interval=1000 * SECOND, lease=3600 * SECOND)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: dispatcher._idle > 2, "the dispatcher resting for long")  # noqa: SLF001
    placed = await shop.place_orders(1)
    producer.notify()
    await until(lambda: receiver.received == placed, "the hint being heard", within=timedelta(seconds=2))
    await dispatcher.stop()
    await running
    await producer.close()
    await shop.store.close()


@pytest.mark.requirement("S4-01")
def test_importing_postroom_loads_no_third_party_module() -> None:
    """The kernel needs the standard library alone."""
    code = (
        "import sys; before = set(sys.modules); import postroom, postroom.stores; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - set(sys.stdlib_module_names) - {'postroom'}))"
    )

    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert loaded.stdout.strip() == "[]"
