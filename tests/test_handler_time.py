"""The consumer's timeout: it limits handlers, and nothing that a message has to wait for before or after its handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncmy
import asyncpg
import psycopg_pool
import pytest

from postroom import Consumer, Message, Router, events
from postroom.brokers import MemoryBroker
from postroom.errors import RejectError
from postroom.middleware import DeadlineMiddleware, Middleware, TransactionMiddleware, transactional
from postroom.stores import MySQLStore, PostgresStore, SQLStore
from postroom.testing.waiting import until

from .test_transactional import Shop, shop_on
from .test_transactions import LITE, MY, PG

#: The consumer's timeout: handlers that do not hang take a few milliseconds.
TIMEOUT = timedelta(seconds=1)
LONG = timedelta(seconds=60)


def order(number: int) -> Message:
    return Message(topic="orders", type="order.placed", payload=b"%d" % number)


def soon(_: int) -> timedelta:
    return timedelta(milliseconds=10)


class Desk:
    """A consumer of ``count`` orders, and everything that it was told of them."""

    def __init__(self, *middlewares: Middleware, concurrency: int = 30, timeout: timedelta | None = TIMEOUT) -> None:
        self.broker = MemoryBroker()
        self.router = Router()
        self.events: list[events.Event] = []
        self.numbers: dict[Any, int] = {}
        self.consumer = Consumer(
            self.broker.subscribe("orders", group="stock"),
            self.router,
            *middlewares,
            concurrency=concurrency,
            timeout=timeout,
            backoff=soon,
            listener=self.events.append,
        )

    async def put(self, *numbers: int) -> None:
        messages = [order(number) for number in numbers]
        self.numbers.update((message.id, number) for message, number in zip(messages, numbers, strict=True))
        await self.broker.publish(messages)

    def failures(self) -> list[tuple[int, int, str]]:
        """Return number, attempt and error of each message that failed."""
        failed = [event for event in self.events if isinstance(event, events.HandlingFailed | events.DeadLettered)]
        return [(self.numbers[event.message_id], event.attempt, event.error) for event in failed]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        running = asyncio.create_task(self.consumer.run())
        try:
            yield
        finally:
            self.consumer.stop_soon()
            self.consumer.stop_soon()
            async with asyncio.timeout(30):
                await running


@pytest.fixture(params=[LITE, PG, "psycopg", MY])
async def narrow(request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    """A shop whose store has one connection for all handlers."""
    family = PG if request.param == "psycopg" else str(request.param)
    async with shop_on(family, request) as shop:
        if request.param != LITE:
            shop.store = _narrow(request.param, shop.dsn)
        yield shop
        await shop.store.close()


def _narrow(kind: str, dsn: str) -> SQLStore:
    if kind == MY:
        return MySQLStore(dsn, connections=1)
    return PostgresStore(dsn, connections=1, driver="psycopg" if kind == "psycopg" else "asyncpg")


# -- before the handler ------------------------------------------------------------------------------------------


async def test_a_message_that_waits_for_a_connection_longer_than_the_timeout_costs_no_attempt(narrow: Shop) -> None:
    """A handler that hangs holds the only connection; it alone spends attempts."""
    desk = Desk(transactional(narrow.store, consumer="stock"))
    handled: list[tuple[int, int]] = []

    @desk.router.on("order.placed")
    async def reserve(number: int, message: Message) -> None:
        if number < 0:
            await asyncio.Event().wait()
        await narrow.write(number)
        handled.append((number, message.attempt))

    await desk.put(-1, -2, *range(1, 11))
    async with desk.open():
        await until(lambda: len(handled) == 10, "the others are handled", within=LONG)

    assert sorted(handled) == [(number, 1) for number in range(1, 11)]
    assert [failure for failure in desk.failures() if failure[0] > 0] == []
    assert {failure[0] for failure in desk.failures()} == {-1, -2}
    assert await narrow.effects() == list(range(1, 11))


@pytest.fixture(params=["asyncpg", "psycopg", "asyncmy"])
async def pooled(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Shop, Any]]:
    """A shop, and a pool of the application's with one connection."""
    async with shop_on(MY if request.param == "asyncmy" else PG, request) as shop:
        if request.param == "asyncpg":
            async with asyncpg.create_pool(shop.dsn, min_size=1, max_size=1) as pool:
                yield shop, pool
        elif request.param == "psycopg":
            async with psycopg_pool.AsyncConnectionPool(shop.dsn, min_size=1, max_size=1) as pool:
                yield shop, pool
        else:
            address = shop.store._driver._place  # type: ignore[attr-defined]  # noqa: SLF001
            pool = await asyncmy.create_pool(
                host=address.host, port=address.port, user=address.user, db=address.database, minsize=1, maxsize=1
            )
            yield shop, pool
            pool.close()
            await pool.wait_closed()


async def test_a_message_that_waits_for_a_pool_of_yours_longer_than_the_timeout_costs_no_attempt(
    pooled: tuple[Shop, Any],
) -> None:
    shop, pool = pooled
    desk = Desk(transactional(shop.store, consumer="stock", pool=pool))
    handled: list[tuple[int, int]] = []

    @desk.router.on("order.placed")
    async def reserve(number: int, message: Message) -> None:
        if number < 0:
            await asyncio.Event().wait()
        await shop.write(number)
        handled.append((number, message.attempt))

    await desk.put(-1, -2, 1, 2, 3)
    async with desk.open():
        await until(lambda: len(handled) == 3, "the others are handled", within=LONG)

    assert sorted(handled) == [(1, 1), (2, 1), (3, 1)]
    assert [failure for failure in desk.failures() if failure[0] > 0] == []
