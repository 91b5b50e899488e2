"""The flow that the design of inbox and outbox promises: sixteen steps, and the short way of a duplicate.

Each test ends with the list of steps in the words of that document; each step is noted where it happens, and looks at
the database from outside where that document says what is committed by then.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from postroom import (
    ClaimTerms,
    Consumer,
    Delivered,
    Delivery,
    Dispatcher,
    Inbox,
    Message,
    Outbox,
    OutboxSubscriber,
    Outcome,
    Retry,
    Router,
    current_connection,
    current_transaction,
    events,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.middleware import InboxMiddleware, Middleware, Next, OutboxMiddleware, TransactionMiddleware
from postroom.store import Settlement
from postroom.stores import SQLiteStore, SQLStore, schema_sql, schema_statements, store_from_url
from postroom.testing.failpoints import Failpoints
from postroom.testing.taps import TappedPublisher, TappedStore, TappedSubscriber
from postroom.testing.waiting import until
from postroom.transaction import in_transaction

from .crash.sites import Site, site_of
from .worlds import DATABASES

SERVICE = "order-service"
NO_TIME = timedelta(milliseconds=1)
LONG = timedelta(seconds=60)


# -- the application: its handler knows of no database and no broker -----------------------------------------------


@dataclass
class PlaceOrder:
    """A command."""

    order_id: int


@dataclass
class OrderPlaced:
    """What came of it."""

    order_id: int


class Orders:
    """The adapter of the application, which finds the transaction by itself."""

    def __init__(self, execute: Callable[[Any, str], Any]) -> None:
        self._execute = execute

    async def save(self, order_id: int) -> None:
        await current_transaction().do(self._execute, f"INSERT INTO orders (id) VALUES ({order_id})")

    async def outbox_rows(self) -> int:
        """Return how many messages can be seen within the transaction."""
        found = await current_transaction().do(self._execute, "SELECT id FROM postroom_outbox")
        return len(found)


async def on_postgres(connection: Any, sql: str) -> list[Any]:  # noqa: ANN401 -- of asyncpg
    return list(await connection.fetch(sql))


async def on_mariadb(connection: Any, sql: str) -> list[Any]:  # noqa: ANN401 -- of asyncmy
    async with connection.cursor() as cursor:
        await cursor.execute(sql)
        return list(await cursor.fetchall())


def on_sqlite(connection: sqlite3.Connection, sql: str) -> list[Any]:
    return connection.execute(sql).fetchall()


# -- where it runs -------------------------------------------------------------------------------------------------


@dataclass
class Shop:
    """A database with the tables of the application and of postroom, and the steps that were noted so far."""

    store: SQLStore
    site: Site
    orders: Orders
    execute: Callable[[Any, str], Any]
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    inbox: Inbox = field(default_factory=lambda: Inbox(SERVICE))
    steps: list[str] = field(default_factory=list[str])
    seen: list[events.Event] = field(default_factory=list[events.Event])

    def committed(self) -> tuple[int, int, int]:
        """Return how many marks, orders and messages others can see."""
        with closing(self.site.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT count(*) FROM orders")
            [[orders]] = cursor.fetchall()
        return self.site.marks(SERVICE), orders, len(self.site.rows("default"))

    def note(self, step: str) -> Callable[[], None]:
        return lambda: self.steps.append(step)

    def router(self) -> Router:
        router = Router(topic="order-events")

        @router.on(PlaceOrder)
        async def place_order(command: PlaceOrder) -> list[OrderPlaced]:
            await self.orders.save(command.order_id)
            self.steps.append("6. Handler: saves the order; its adapter finds the transaction")
            return [OrderPlaced(command.order_id)]

        return router

    def around(self) -> Middleware:
        """Stand between the acknowledgement and the transaction."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            before = self.committed()
            assert in_transaction() is None
            self.steps.append("2. Acking (outermost) calls next")
            outputs = await call_next(message)
            assert in_transaction() is None
            assert outputs == ()
            is_new = self.committed() == (1, 1, 1) != before
            assert is_new or self.committed() == before
            self.steps.append("11. COMMIT: dedup + business state + outbox" if is_new else "5. COMMIT: nothing new")
            return outputs

        return noting

    def inside_transaction(self) -> Middleware:
        """Stand between the transaction and the inbox."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            before = self.committed()
            has_mark = await self.inbox.has(current_transaction(), message)
            self.steps.append("3. BEGIN")
            outputs = await call_next(message)
            assert self.committed() == before, "something can be seen before COMMIT"
            self.steps.append("4. Inbox: duplicate, returns nothing" if has_mark else "10. Inbox returns")
            return outputs

        return noting

    def inside_inbox(self) -> Middleware:
        """Stand between the inbox and the outbox."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            assert await self.inbox.has(current_transaction(), message)
            self.steps.append("4. Inbox: INSERT, new message, proceed")
            outputs = await call_next(message)
            assert await self.orders.outbox_rows() == 1
            self.steps.append("8. Outbox: INSERT of the output within the transaction")
            assert outputs == ()
            self.steps.append("9. Outbox returns no outputs")
            return outputs

        return noting

    def inside_outbox(self) -> Middleware:
        """Stand between the outbox and the handler."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            self.steps.append("5. Outbox calls the handler")
            outputs = await call_next(message)
            assert [(output.type, output.payload) for output in outputs] == [("order.placed", b'{"order_id":42}')]
            self.steps.append("7. Handler returns OrderPlaced")
            return outputs

        return noting

    async def receive(self, command: Message, last: str) -> None:
        """Have the broker deliver a command, until it is acknowledged."""
        points = Failpoints()
        points.on("deliver.after", self.note("1. Broker delivers the message"))
        outbox = self.store.outbox(wake=None)
        consumer = Consumer(
            TappedSubscriber(self.broker.subscribe("commands", group=SERVICE), points),
            self.router(),
            self.around(),
            TransactionMiddleware(self.store),
            self.inside_transaction(),
            InboxMiddleware(self.inbox, listener=self.seen.append),
            self.inside_inbox(),
            OutboxMiddleware(outbox),
            self.inside_outbox(),
            listener=self.seen.append,
        )

        def acknowledged() -> None:
            self.steps.append(last)
            consumer.stop_soon()

        points.on("ack.after", acknowledged)
        await self.broker.publish_batch([command])
        await consumer.run()

    async def publish(self) -> None:
        """Have the dispatcher deliver what is in the outbox."""
        points = Failpoints()
        points.on("claim.after", self.note("13. Publisher: takes the rows that are not published"))
        points.on("publish.before", self.note("14. Publisher: hands OrderPlaced on, with its acking"))
        points.on("publish.confirmed", self.note("15. Broker publisher: published to order-events"))
        points.on("settle.after", self.note("16. Ack: the row is published"))
        await Dispatcher(TappedStore(self.store, points), TappedPublisher(self.broker, points)).run(until_idle=True)


@pytest.fixture(params=DATABASES)
async def shop(request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    """A shop on each database."""
    kind: str = request.param
    execute: Callable[[Any, str], Any]
    match kind:
        case "postgres":
            url, execute = request.getfixturevalue("postgres_dsn"), on_postgres
        case "mariadb":
            url, execute = request.getfixturevalue("mariadb_dsn"), on_mariadb
        case _:
            url, execute = f"sqlite:///{request.getfixturevalue('sqlite_path')}", on_sqlite
    store, site = store_from_url(url), site_of(url)
    assert isinstance(store, SQLStore)
    await store.apply_schema()
    with site.connection() as connection:
        connection.cursor().execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    yield Shop(store, site, Orders(execute), execute)
    await store.close()


@pytest.fixture
def command() -> Message:
    """The message of the document."""
    return Message(topic="commands", type="place.order", payload=b'{"order_id":42}')


# -- the two ways --------------------------------------------------------------------------------------------------


@pytest.mark.requirement(
    "G7", "G8", "F-01", "F-16", "F-18", "S1-01", "S1-03", "S1-06", "S1-14", "S1-24", "S1-42", "S1-43"
)
async def test_the_sixteen_steps_of_a_new_message(shop: Shop, command: Message) -> None:
    """In this order, on every database."""
    await shop.receive(command, "12. Acking: ack")

    assert shop.steps == [
        "1. Broker delivers the message",
        "2. Acking (outermost) calls next",
        "3. BEGIN",
        "4. Inbox: INSERT, new message, proceed",
        "5. Outbox calls the handler",
        "6. Handler: saves the order; its adapter finds the transaction",
        "7. Handler returns OrderPlaced",
        "8. Outbox: INSERT of the output within the transaction",
        "9. Outbox returns no outputs",
        "10. Inbox returns",
        "11. COMMIT: dedup + business state + outbox",
        "12. Acking: ack",
    ]
    assert shop.committed() == (1, 1, 1)
    [waiting] = shop.site.rows("default")
    assert waiting.status == "pending"

    # -- later, the publisher
    shop.steps.clear()
    await shop.publish()

    assert shop.steps == [
        "13. Publisher: takes the rows that are not published",
        "14. Publisher: hands OrderPlaced on, with its acking",
        "15. Broker publisher: published to order-events",
        "16. Ack: the row is published",
    ]
    [_, event] = shop.broker.received
    assert (event.id, event.topic, event.type) == (waiting.id, "order-events", "order.placed")
    assert [row.status for row in shop.site.rows("default")] == ["delivered"]


@pytest.mark.requirement("G7", "G8", "S1-15", "S1-20", "S1-42", "S1-43")
async def test_the_way_of_a_message_that_arrives_again(shop: Shop, command: Message) -> None:
    """No handler, no output, no error, and it is acknowledged."""
    await shop.receive(command, "12. Acking: ack")
    shop.steps.clear()
    before = shop.committed()

    await shop.receive(command, "6. Acking: ack (message consumed, idempotently)")

    assert shop.steps == [
        "1. Broker delivers the message",
        "2. Acking (outermost) calls next",
        "3. BEGIN",
        "4. Inbox: duplicate, returns nothing",
        "5. COMMIT: nothing new",
        "6. Acking: ack (message consumed, idempotently)",
    ]
    assert shop.committed() == before == (1, 1, 1)
    skipped = [event for event in shop.seen if isinstance(event, events.DuplicateSkipped)]
    assert [(event.consumer, event.message_id) for event in skipped] == [(SERVICE, command.id)]
    assert [event for event in shop.seen if isinstance(event, events.HandlingFailed)] == []


@pytest.mark.requirement("S1-31")
async def test_what_is_not_published_is_taken_in_order_and_so_many_at_a_time(shop: Shop) -> None:
    """By the order in which it was added, up to a limit, and never what is published."""
    outbox = shop.store.outbox()
    with shop.site.connection() as connection:
        added = [outbox.add(connection, {"n": n}, topic="order-events").id for n in range(5)]
    terms = ClaimTerms(worker=uuid4())

    first = await shop.store.claim(2, terms)
    await shop.store.settle([Settlement(claim, Delivered()) for claim in first])
    second = await shop.store.claim(2, terms)
    rest = await shop.store.claim(10, terms)

    assert [[claim.message.id for claim in claims] for claims in (first, second, rest)] == [
        added[:2],
        added[2:4],
        added[4:],
    ]


@pytest.mark.requirement("S1-05", "S1-39", "S1-43")
async def test_old_rows_go_from_both_tables_and_what_is_not_published_stays(shop: Shop, command: Message) -> None:
    """The inbox forgets by age, the outbox only what was published."""
    forgetful = shop.store.inbox(SERVICE, retention=NO_TIME)
    transactions = shop.store.transactions()
    await shop.receive(command, "acknowledged")

    assert await shop.store.purge(older_than=timedelta(0)) == 0
    await shop.publish()
    assert await shop.store.purge(older_than=timedelta(0)) == 1
    assert await shop.inbox.purge(transactions) == 0
    assert await forgetful.purge(transactions) == 1
    assert shop.committed() == (0, 1, 0)


@pytest.mark.requirement("S1-04", "S1-12", "S1-43")
async def test_nothing_is_created_unless_somebody_asks_for_it(shop: Shop, command: Message) -> None:
    """Without its tables a message is not handled, not acknowledged, and no table comes about."""
    with shop.site.connection() as connection:
        for table in ("postroom_inbox_processed", "postroom_inbox"):
            kind = "VIEW" if table.endswith("processed") else "TABLE"
            connection.cursor().execute(f"DROP {kind} {table}")
    told: list[Outcome] = []

    async def settle(outcome: Outcome) -> None:
        told.append(outcome)

    stack = transactional(shop.store, consumer=SERVICE)
    consumer = Consumer(
        shop.broker.subscribe("commands", group=SERVICE), shop.router(), stack, listener=shop.seen.append
    )
    await consumer.handle(Delivery(command, settle))

    [outcome] = told
    assert isinstance(outcome, Retry)
    assert "postroom_inbox" in outcome.error
    assert "postroom schema apply" in outcome.error
    assert shop.steps == []
    assert "postroom_inbox" in " ".join(await shop.store.check_schema())


# -- the set-up of the document, line by line ----------------------------------------------------------------------


class OrderRepository:
    """The adapter of the application: it finds the transaction of the handler, or uses its own connection."""

    def __init__(self, execute: Callable[[Any, str], Any], own: object) -> None:
        self._execute = execute
        self._own = own

    def save(self, order_id: int) -> Any:  # noqa: ANN401 -- an awaitable where the library is async
        return self._execute(current_connection(self._own), f"INSERT INTO orders (id) VALUES ({order_id})")


def place_order_handler(orders: OrderRepository, *, is_plain: bool) -> Callable[[PlaceOrder], Any]:
    """Return the handler, which knows the repository and neither a database nor a broker."""

    def place_order(command: PlaceOrder) -> list[OrderPlaced]:
        orders.save(command.order_id)
        return [OrderPlaced(command.order_id)]

    async def place_order_async(command: PlaceOrder) -> list[OrderPlaced]:
        await orders.save(command.order_id)
        return [OrderPlaced(command.order_id)]

    return place_order if is_plain else place_order_async


def initialise(url: str) -> None:
    """Create the tables from the text that can be imported, with nothing but the driver of the database."""
    tables = {"table": "outbox", "inbox": "processed_messages"}
    with closing(site_of(url).connect()) as connection:
        match url.partition(":")[0]:
            case "sqlite":
                connection.executescript(schema_sql("sqlite", **tables))
            case "postgresql":
                connection.execute(schema_sql("postgresql", **tables))
            case _:
                for statement in schema_statements("mysql", **tables):
                    connection.cursor().execute(statement)
        connection.commit()


async def forward(deliveries: OutboxSubscriber, broker: MemoryBroker) -> None:
    """Pipe what the publisher's source hands out into a broker, and acknowledge what was published."""
    async with deliveries:
        async for delivery in deliveries:
            await broker.publish_batch([delivery.message])
            await delivery.ack()


@pytest.mark.requirement(
    "S1-02", "S1-04", "S1-05", "S1-09", "S1-13", "S1-22", "S1-29", "S1-30", "S1-38", "S1-39", "S1-43"
)
async def test_the_set_up_of_the_document_line_by_line(shop: Shop, command: Message) -> None:
    """With the names that it gives.

    The tables are made of imported text, the middlewares are registered one by one in the document's order, the
    adapter finds the transaction, the outbox is read as a stream, and both tables are cleaned.
    """
    is_plain = isinstance(shop.store, SQLiteStore)
    week, minute = timedelta(days=7), timedelta(minutes=1)

    def rows(table: str) -> int:
        with closing(shop.site.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT count(*) FROM {table}")
            [[count]] = cursor.fetchall()
        return int(count)

    @asynccontextmanager
    async def serving(*, retention: timedelta, interval: timedelta) -> AsyncGenerator[Consumer]:
        db = store_from_url(shop.site.url, table="outbox", inbox="processed_messages", keep_delivered=retention)
        assert isinstance(db, SQLStore)
        # Router with full middleware stack
        router = Router()
        consumer = Consumer(
            shop.broker.subscribe("commands", group=SERVICE),
            router,
            TransactionMiddleware(db),
            InboxMiddleware(Inbox(SERVICE, table="processed_messages", retention=retention), cleanup_interval=interval),
            OutboxMiddleware(Outbox(table="outbox"), topic="order-events"),
            listener=shop.seen.append,
        )
        router.add("place-order", place_order_handler(OrderRepository(shop.execute, None), is_plain=is_plain))
        # Outbox publisher
        deliveries = OutboxSubscriber(
            db, poll_interval=timedelta(milliseconds=500), batch=100, cleanup_interval=interval
        )
        tasks = [asyncio.create_task(consumer.run()), asyncio.create_task(forward(deliveries, shop.broker))]
        try:
            yield consumer
        finally:
            await consumer.stop()
            await deliveries.aclose()
            await asyncio.gather(*tasks)
            await db.close()

    # Initialize schemas (once, at startup)
    initialise(shop.site.url)
    placing = replace(command, type="place-order")
    async with serving(retention=week, interval=minute):
        await shop.broker.publish_batch([placing, placing])
        await until(lambda: shop.broker.received[-1].topic == "order-events", "the event", within=LONG)
        await until(lambda: shop.broker.backlog(SERVICE) == 0, "both deliveries being acknowledged", within=LONG)
    assert (rows("processed_messages"), rows("orders"), rows("outbox")) == (1, 1, 1)
    assert len([event for event in shop.seen if isinstance(event, events.DuplicateSkipped)]) == 1

    # Cleanup
    async with serving(retention=NO_TIME, interval=10 * NO_TIME):
        await until(lambda: (rows("processed_messages"), rows("outbox")) == (0, 0), "both being cleaned", within=LONG)
    assert rows("orders") == 1
