"""Nothing secret is logged: neither payloads nor headers nor passwords, whatever fails."""

from __future__ import annotations

import asyncio
import io
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from postroom import (
    Consumer,
    Dead,
    Delivered,
    Delivery,
    Dispatcher,
    Message,
    Outbox,
    OutboxSubscriber,
    Outcome,
    Release,
    Retry,
    Router,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.errors import BrokerUnavailableError, RejectError
from postroom.middleware import LogMiddleware
from postroom.stores import MemoryStore, PostgresStore, SQLiteStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
LONG = timedelta(seconds=60)

PAYLOAD, HEADER, PASSWORD = "payload-canary", "header-canary", "password-canary"
#: PostgreSQL shows bytes as hexadecimal digits.
CANARIES = (PAYLOAD, PAYLOAD.encode().hex(), HEADER, PASSWORD)


class Everything(logging.Handler):
    """Keeps all that a record holds, as text."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.stream = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        plain = logging.Formatter("%(levelname)s %(name)s %(message)s")
        kept = {name: value for name, value in record.__dict__.items() if name != "exc_info"}
        self.stream.write(f"{plain.format(record)}\n{kept!r}\n")


@pytest.fixture
def logged() -> Iterator[Everything]:
    handler, root, ours = Everything(), logging.getLogger(), logging.getLogger("postroom")
    root.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    ours.setLevel(logging.NOTSET)


def is_silent(logged: Everything, *said: str) -> None:
    """Fail if a canary was logged, or if what should be was not."""
    text = logged.stream.getvalue()
    assert [canary for canary in CANARIES if canary in text] == []
    assert [one for one in said if one not in text] == []


def order(number: int) -> Message:
    return Message(
        topic="orders",
        type="order.placed",
        key=str(number),
        payload=f'{{"card": "{PAYLOAD}"}}'.encode(),
        headers={"authorization": HEADER},
    )


@asynccontextmanager
async def in_memory(_: pytest.FixtureRequest) -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    with store.transaction() as transaction:
        Outbox().add(transaction, [order(number) for number in range(8)])
    yield store


@asynccontextmanager
async def in_sqlite(request: pytest.FixtureRequest) -> AsyncIterator[SQLiteStore]:
    path: Path = request.getfixturevalue("sqlite_path")
    with closing(sqlite3.connect(path)) as connection, connection:
        SQLiteStore.create_tables(connection)
        Outbox().add(connection, [order(number) for number in range(8)])
    yield SQLiteStore(path)


@asynccontextmanager
async def in_postgres(request: pytest.FixtureRequest) -> AsyncIterator[PostgresStore]:
    url = with_password(request.getfixturevalue("postgres_dsn"))
    store = PostgresStore(url)
    await store.apply_schema()
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await Outbox().add(connection, [order(number) for number in range(8)])
    await connection.close()
    yield store
    await store.close()


def with_password(dsn: str) -> str:
    """Return a DSN with the password, which the server of the tests does not ask for."""
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{parts.username}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()


STORES = [pytest.param(store, id=store.__name__) for store in (in_memory, in_sqlite, in_postgres)]


async def fail(message: Message) -> object:
    """Fail in all the ways there are, one for each key."""
    match message.key:
        case "0":
            raise ConnectionRefusedError("refused")
        case "1":
            raise RejectError("rejected")
        case "2":
            raise BrokerUnavailableError("down")
        case "3":
            await asyncio.sleep(60)
        case "4":
            return Retry("later")
        case "5":
            return Dead("never")
        case "6":
            return Release()
        case _:
            raise ValueError("no")
    return None


class Batch:
    """A publisher of batches that answers in all the ways there are, one after the other."""

    def __init__(self) -> None:
        self.calls = 0

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self.calls += 1
        match self.calls % 4:
            case 0:
                raise ValueError("no")
            case 1:
                return [Delivered()] * (len(messages) + 1)
            case 2:
                raise ConnectionRefusedError("refused")
            case _:
                return [None if message.key in {"1", "2"} else Retry("later") for message in messages]


@pytest.mark.parametrize("make_publisher", [lambda: fail, Batch], ids=["function", "batch"])
@pytest.mark.parametrize("make", STORES)
async def test_failed_deliveries_log_no_secret(
    make: Callable[..., Any], make_publisher: Callable[[], Any], request: pytest.FixtureRequest, logged: Everything
) -> None:
    """Whatever a publisher raises or returns, on its first attempt and on its last."""
    async with make(request) as store:
        dispatcher = Dispatcher(
            store,
            make_publisher(),
            max_attempts=3,
            backoff=lambda _: MS,
            outage_backoff=lambda _: MS,
            publish_timeout=timedelta(seconds=1),
        )
        running = asyncio.create_task(dispatcher.run())
        await until(lambda: " is dead: " in logged.stream.getvalue(), "a dead message", within=LONG)
        await until(lambda: " is down: " in logged.stream.getvalue(), "an outage", within=LONG)
        await dispatcher.stop()
        await running

    is_silent(logged, "delivery failed: ", "Traceback (most recent call last)")


async def test_a_refused_settlement_logs_no_row(request: pytest.FixtureRequest, logged: Everything) -> None:
    """PostgreSQL shows the whole row that breaks a constraint."""
    async with in_postgres(request) as store:
        connection = await asyncpg.connect(request.getfixturevalue("postgres_dsn"))
        await connection.execute("ALTER TABLE postroom_outbox ADD CONSTRAINT canary CHECK (status <> 'delivered')")

        async def send(_: Message) -> None:
            """Deliver."""

        dispatcher = Dispatcher(store, send)
        running = asyncio.create_task(dispatcher.run())
        await until(lambda: "store call 'settle' failed" in logged.stream.getvalue(), "the refusal", within=LONG)
        await connection.execute("ALTER TABLE postroom_outbox DROP CONSTRAINT canary")
        await connection.close()
        await dispatcher.stop()
        await running

    is_silent(logged, "CheckViolation", 'violates check constraint "canary"')


@pytest.mark.parametrize("hurt", ["port", "database"])
async def test_a_store_that_cannot_be_opened_logs_no_password(hurt: str, postgres_dsn: str, logged: Everything) -> None:
    """A wrong port is retried, a wrong database ends the dispatcher; both are logged with a reason."""
    parts = urlsplit(with_password(postgres_dsn))
    wrong = parts._replace(path="/nowhere") if hurt == "database" else parts
    url = wrong.geturl().replace(f":{parts.port}/", ":1/" if hurt == "port" else f":{parts.port}/")
    dispatcher = Dispatcher(PostgresStore(url), fail)

    running = asyncio.create_task(dispatcher.run())
    await until(lambda: " failed" in logged.stream.getvalue(), "the failure in the log", within=LONG)
    await dispatcher.stop()
    await asyncio.wait({running})
    running.exception()

    is_silent(logged, "check the user, the password" if hurt == "database" else "check that the server runs")


@pytest.mark.parametrize("make", STORES)
async def test_failed_handlers_log_no_secret(
    make: Callable[..., Any], request: pytest.FixtureRequest, logged: Everything
) -> None:
    """Handlers that raise, payloads that do not fit, messages without a handler, and acknowledgements that are lost."""
    router = Router()

    @router.on("order.placed")
    async def place(order: dict[str, str], message: Message) -> None:
        if message.key == "7":
            raise LookupError("no stock")
        if message.key == "6":
            await asyncio.sleep(60)
        raise RejectError("no such customer")

    @router.on("order.counted")
    async def count(order: dict[str, int]) -> None:
        """Take what the payload does not hold."""

    async def lose(_: Outcome) -> None:
        raise ConnectionError("gone")

    async with make(request) as store:
        reading = OutboxSubscriber(store, backoff=lambda _: MS, max_attempts=2)
        consumer = Consumer(reading, router, LogMiddleware(), timeout=timedelta(seconds=1), backoff=lambda _: MS)
        running = asyncio.create_task(consumer.run())
        for kind in ("order.placed", "order.counted", "order.unheard"):
            message = Message(topic="orders", type=kind, payload=order(0).payload, headers=order(0).headers, attempt=1)
            await consumer.handle(Delivery(message, lose))

        async def all_dead() -> bool:
            return bool((await store.stats()).dead == 8)

        await until(all_dead, "all messages dead", within=LONG)
        await consumer.stop()
        await running

    is_silent(
        logged, "handling failed: ", "was dead-lettered: ", "acknowledgement failed", "DecodeError", "LookupError"
    )


async def test_failed_transactions_log_no_secret(postgres_dsn: str, logged: Everything) -> None:
    """A handler's own message that the outbox refuses shows in its error, and must not show its payload."""
    url = with_password(postgres_dsn)
    store = PostgresStore(url)
    await store.apply_schema()
    connection = await asyncpg.connect(url)
    await connection.execute("ALTER TABLE postroom_outbox ADD CHECK (topic <> 'stock')")
    await connection.close()
    router, broker = Router(topic="stock"), MemoryBroker()

    @router.on("order.placed")
    async def place(_: dict[str, str]) -> Message:
        consumer.stop_soon()
        return Message(topic="stock", type="t", payload=order(0).payload, headers=order(0).headers)

    around = transactional(store, consumer="stock")
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, around, backoff=lambda _: LONG)
    await broker.publish_batch([order(1)])
    await consumer.run()

    is_silent(logged, "handling failed: ", "Violation")


def test_a_message_shows_neither_payload_nor_headers() -> None:
    """A repr ends up in a log sooner or later."""
    shown = f"{order(1)!r} {order(1)} {Delivery(order(1), print)!r}"  # type: ignore[arg-type]

    assert [canary for canary in CANARIES if canary in shown] == []
