# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What users write, for the type checkers to read; it is never run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, assert_type

import aiosqlite
import asyncpg
import psycopg
import pymysql
import redis.asyncio
from asyncpg.pool import PoolConnectionProxy
from redis.asyncio.client import Pipeline
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from postroom import (
    AddResult,
    Consumer,
    Delivery,
    Dispatcher,
    Local,
    Match,
    Message,
    Outbox,
    Outcome,
    Router,
    Transaction,
    TransactionMiddleware,
    current_connection,
    current_delivery,
    current_transaction,
    presets,
    share,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.cqrs import CommandHandler, command_handler, command_handler_with_outbox
from postroom.decisions import Decisions, Due, Duplicate, Enqueued, Expired, NotDue, Revoked, Scheduled, Stale
from postroom.middleware import CorrelationMiddleware, LogMiddleware, Next, RetryMiddleware
from postroom.stores import PostgresStore

outbox = Outbox()
decisions = Decisions(outbox)
message = Message(topic="orders", payload=b"{}")
router = Router(topic="stock", source="/stock")
REGION = Local[str]("region")


@dataclass
class OrderPlaced:
    """An event."""

    order_id: int


@dataclass
class StockReserved:
    """Another."""

    order_id: int


class PaymentTaken(NamedTuple):
    """An event that is a tuple to type checkers."""

    order_id: int


@dataclass
class StockCounted:
    """A third."""

    left: int


@dataclass
class StockRecounted:
    """A fourth."""

    left: int


@router.on("order.placed", match=Match(type="order.*", source="/shop/*"))
async def reserve(order: OrderPlaced) -> list[StockReserved]:
    """Handle an event."""
    return [StockReserved(order.order_id)]


@router.on(StockReserved, topic="audit")
def audit(stock: StockReserved, message: Message, *, delivery: Delivery, transaction: Transaction) -> Message | None:
    """Handle one with all that there is."""
    return message if delivery.outcome is None and transaction.connection else None


@router.on
async def count(stock: StockCounted) -> None:
    """Handle one that the annotation names."""


@router.on()
def recount(stock: StockRecounted, message: Message) -> StockCounted:
    """Handle another, with parentheses."""
    return StockCounted(stock.left + message.attempt)


async def empty(message: Message, call_next: Next) -> Sequence[Message]:
    """Do nothing around a handler."""
    return await call_next(message)


async def with_asyncpg(
    connection: asyncpg.Connection[asyncpg.Record], pooled: PoolConnectionProxy[asyncpg.Record]
) -> None:
    """Add through asyncpg."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), Coroutine[Any, Any, AddResult]).close()
    assert_type(await outbox.add(pooled, message), AddResult)
    assert_type(await outbox.add(connection, [message, message]), list[AddResult])
    assert_type(outbox.add(pooled, (message,)), Coroutine[Any, Any, list[AddResult]]).close()
    assert_type(await outbox.add(connection, PaymentTaken(1), topic="payments"), AddResult)


def with_psycopg(connection: psycopg.Connection) -> None:
    """Add through psycopg."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), AddResult)
    assert_type(outbox.add(connection, [message]), list[AddResult])


async def with_async_psycopg(connection: psycopg.AsyncConnection) -> None:
    """Add through psycopg's async half."""
    assert_type(outbox.add(connection, {"a": 1}, topic="orders"), Coroutine[Any, Any, AddResult]).close()
    assert_type(await outbox.add(connection, [message]), list[AddResult])


def with_sqlite(connection: sqlite3.Connection) -> None:
    """Add through the standard library."""
    assert_type(outbox.add(connection, message), AddResult)
    assert_type(outbox.add(connection, PaymentTaken(1), topic="payments"), AddResult)
    assert_type(outbox.add(connection, [message]), list[AddResult])


async def with_aiosqlite(connection: aiosqlite.Connection) -> None:
    """Add through aiosqlite."""
    assert_type(outbox.add(connection, message), Coroutine[Any, Any, AddResult]).close()
    assert_type(await outbox.add(connection, [message]), list[AddResult])


def with_pymysql(connection: pymysql.Connection[pymysql.cursors.Cursor]) -> None:
    """Add through PyMySQL."""
    assert_type(outbox.add(connection, message), AddResult)


def with_sqlalchemy(connection: Connection, session: Session, scoped: scoped_session[Session]) -> None:
    """Add through SQLAlchemy."""
    assert_type(outbox.add(connection, message), AddResult)
    assert_type(outbox.add(session, message), AddResult)
    assert_type(outbox.add(scoped, message), AddResult)
    assert_type(outbox.add(session, [message]), list[AddResult])


async def with_async_sqlalchemy(
    connection: AsyncConnection, session: AsyncSession, scoped: async_scoped_session[AsyncSession]
) -> None:
    """Add through SQLAlchemy's async half."""
    assert_type(outbox.add(connection, message), Coroutine[Any, Any, AddResult]).close()
    assert_type(await outbox.add(session, message), AddResult)
    assert_type(await outbox.add(scoped, message), AddResult)
    assert_type(await outbox.add(session, [message]), list[AddResult])


async def with_tickets(
    connection: asyncpg.Connection[asyncpg.Record], plain: sqlite3.Connection, client: redis.asyncio.Redis
) -> None:
    """Decide about tickets: what `add` takes, `Decisions` takes."""
    moment = datetime.now(UTC)
    assert_type(await decisions.schedule(connection, "t", moment), Scheduled | Stale | Revoked | Expired)
    assert_type(decisions.find_due(plain), list[Due])
    assert_type(await decisions.find_due(client, limit=5), list[Due])
    decided = decisions.decide(plain, "t", moment, {"a": 1}, topic="tickets")
    assert_type(decided, Enqueued | Duplicate | Revoked | NotDue | Stale)
    cancelled = await decisions.cancel(client, "t", message)
    assert_type(cancelled, Enqueued | Duplicate | Revoked | Expired | Stale)
    assert_type(decisions.forget(plain, older_than=timedelta(days=7)), int)


def with_options(connection: sqlite3.Connection) -> None:
    """Say everything that can be said of a message."""
    outbox.add(
        connection,
        b"raw",
        topic="orders",
        key="42",
        type="order.placed",
        tenant_id=None,
        dedupe_key="order-42",
        headers={"a": "b"},
        content_type="application/json",
        delay=timedelta(seconds=1),
        outside_transaction=True,
    )
    outbox.add(connection, {"a": 1}, topic="orders", due_at=datetime.now(UTC))


async def with_a_router() -> None:
    """Handle messages; a decorated function keeps its type."""
    assert_type(await reserve(OrderPlaced(1)), list[StockReserved])
    assert_type(
        audit(StockReserved(1), message, delivery=current_delivery(), transaction=current_transaction()), Message | None
    )
    assert_type(await router(message), Sequence[Message])
    assert_type(router.types, tuple[str, ...])
    router.add("order.cancelled", reserve, match=lambda message: message.key is not None)


async def with_a_consumer(store: PostgresStore, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Receive messages."""
    broker = MemoryBroker()
    consumer = Consumer(
        broker.subscribe("orders", group="stock"),
        router,
        LogMiddleware(),
        CorrelationMiddleware(),
        RetryMiddleware(3),
        empty,
        transactional(store, consumer="stock", pool=pool),
        acking="on_success",
        concurrency=3,
        timeout=timedelta(seconds=5),
    )
    Consumer(
        broker.subscribe("orders", group="b"), router, TransactionMiddleware(pool), acking="forward", publisher=broker
    )
    assert_type(await consumer.run(), None)
    assert_type(await consumer.stop(), None)
    assert_type(current_connection(pool), asyncpg.Pool[asyncpg.Record])


class Client:
    """Delivers one message."""

    def publish(self, message: Message) -> None: ...


async def with_publishers(dsn: str) -> None:
    """Deliver with whatever delivers, plain or async, from a store or its URL."""
    store = PostgresStore(dsn, **presets.MODERATE.store)
    Dispatcher(store, print, **presets.MODERATE.dispatcher)
    Dispatcher(store, Client(), **presets.MODERATE.dispatcher, lease=timedelta(minutes=1))
    Dispatcher("sqlite:///shop.sqlite3", MemoryBroker())
    transactional("sqlite:///shop.sqlite3", consumer="stock")


async def with_deliveries(delivery: Delivery) -> None:
    """Acknowledge by hand."""
    await delivery.nack("no stock", delay=timedelta(seconds=1))
    assert_type(await delivery.settled(), Outcome)
    assert_type(delivery.outcome, Outcome | None)
    assert_type(delivery.error, str | None)
    assert_type(share(delivery, [message]), list[Delivery])


def with_locals() -> None:
    """Carry a value within the process."""
    assert_type(REGION.put(message, "eu"), Message)
    assert_type(REGION.of(message), str | None)


def with_commands(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Handle commands."""
    assert_type(command_handler(reserve, source="/stock", naming="kebab"), CommandHandler)
    assert_type(command_handler_with_outbox(pool, outbox, reserve, source="/stock"), CommandHandler)
    name: str = command_handler(reserve, source="/stock").type
    decorate: Callable[[Callable[[bytes], None]], Callable[[bytes], None]] = router.on(name)
    print(decorate)  # noqa: T201


async def with_decorators() -> None:
    """Call handlers as they are, whichever way they were registered."""
    assert_type(await count(StockCounted(1)), None)
    assert_type(recount(StockRecounted(1), message), StockCounted)
    assert_type(await reserve(OrderPlaced(1)), list[StockReserved])


async def with_mistakes_in_handling(delivery: Delivery) -> None:
    """Be told of mistakes of the receiving half."""
    router.on(42)  # type: ignore[call-overload]
    router.on(OrderPlaced(42))  # type: ignore[call-overload]
    router.on("order.placed", match="order.*")  # type: ignore[call-overload]
    router.add("order.placed", "reserve")  # type: ignore[arg-type]
    router.add(reserve, audit)  # type: ignore[arg-type]
    await delivery.nack(ValueError())  # type: ignore[arg-type]
    REGION.put(message, 42)  # type: ignore[arg-type]
    command_handler(reserve, source="/stock", naming="camel")  # type: ignore[arg-type]
    Consumer(MemoryBroker(), router)  # type: ignore[arg-type]
    Consumer(MemoryBroker().subscribe("a", group="b"), router, acking="never")  # type: ignore[arg-type]


async def with_mistakes(
    connection: sqlite3.Connection, asynchronous: aiosqlite.Connection, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    """Be told of mistakes; a checker that finds none complains about the comment."""
    outbox.add(connection, {"a": 1}, topic="orders", dedup_key="k")  # type: ignore[call-overload]
    outbox.add(connection, {"a": 1}, topic="orders", delay=5)  # type: ignore[call-overload]
    outbox.add(connection, {"a": 1}, topic=b"orders")  # type: ignore[call-overload]
    outbox.add(object(), {"a": 1}, topic="orders")  # type: ignore[call-overload]
    await outbox.add(pool, {"a": 1}, topic="orders")  # type: ignore[call-overload]
    await outbox.add(connection, {"a": 1}, topic="orders")  # type: ignore[misc]
    print((await outbox.add(asynchronous, message)).is_knew)  # type: ignore[attr-defined]  # noqa: T201


async def with_a_forgotten_await(  # noqa: PLR0913, PLR0917 -- one for each kind of connection whose calls are awaited
    raw: asyncpg.Connection[asyncpg.Record],
    pooled: PoolConnectionProxy[asyncpg.Record],
    psycopg_connection: psycopg.AsyncConnection,
    sqlite_connection: aiosqlite.Connection,
    sqlalchemy_connection: AsyncConnection,
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    client: redis.asyncio.Redis,
    pipeline: Pipeline,
) -> None:
    """Be told of an `add` that is never awaited, and so never written, by what both checkers report by default."""
    outbox.add(raw, message)  # type: ignore[unused-coroutine]
    outbox.add(raw, [message])  # type: ignore[unused-coroutine]
    outbox.add(pooled, message)  # type: ignore[unused-coroutine]
    outbox.add(psycopg_connection, message)  # type: ignore[unused-coroutine]
    outbox.add(sqlite_connection, message)  # type: ignore[unused-coroutine]
    outbox.add(sqlalchemy_connection, message)  # type: ignore[unused-coroutine]
    outbox.add(session, {"a": 1}, topic="orders")  # type: ignore[unused-coroutine]
    outbox.add(session, PaymentTaken(1), topic="payments")  # type: ignore[unused-coroutine]
    outbox.add(scoped, message)  # type: ignore[unused-coroutine]
    outbox.add(client, message)  # type: ignore[unused-coroutine]
    outbox.add(pipeline, [message])  # type: ignore[unused-coroutine]
    decisions.schedule(raw, "t", datetime.now(UTC))  # type: ignore[unused-coroutine]
