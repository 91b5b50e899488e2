"""Messages handled so that each has its effect once: by a consumer, and by the same SQL written by hand.

Both have eight messages under way on eight connections of asyncpg, and do for each message: BEGIN, a row in the inbox,
a row of the handler's, a row in the outbox, COMMIT.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg

from postroom import Consumer, Message, Router, Transaction, transactional, uuid7
from postroom.brokers import MemoryBroker
from postroom.middleware import Next
from postroom.stores import PostgresStore

from ..contender import Drained, payload

__all__ = ["CONCURRENCY", "contender"]

CONCURRENCY = 8
_TABLES = ("handled", "postroom_inbox", "postroom_outbox")
_EFFECT = "INSERT INTO handled (n) VALUES ($1)"
_ADMIT = """
    INSERT INTO postroom_inbox (consumer, tenant_id, message_id, created_at) VALUES ($1, $2, $3, clock_timestamp())
    ON CONFLICT DO NOTHING
    """
_ADD = """
    INSERT INTO postroom_outbox (id, namespace, topic, type, key, payload, content_type, next_attempt_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, now())
    """
_NO_TENANT = "00000000-0000-0000-0000-000000000000"


@dataclass
class OrderPlaced:
    """What comes in."""

    n: int
    pad: str


@dataclass
class StockReserved:
    """What goes out."""

    n: int


async def _reserve(order: OrderPlaced, transaction: Transaction) -> StockReserved:
    await transaction.connection.execute(_EFFECT, order.n)
    return StockReserved(order.n)


class _Goal:
    """A middleware that tells when as many messages were handled as were wanted."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._left = 0

    def raise_by(self, count: int) -> None:
        self._left += count
        self.reached.clear()

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        outputs = await call_next(message)
        self._left -= 1
        if not self._left:
            self.reached.set()
        return outputs


class Consuming:
    """Handles messages that are in memory."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    async def prepare(self) -> None:
        """Create the tables."""
        store = PostgresStore(self.dsn)
        await store.apply_schema()
        await store.close()
        connection = await asyncpg.connect(self.dsn)
        await connection.execute("CREATE TABLE handled (n bigint NOT NULL)")
        await connection.close()

    async def consumer(self, count: int) -> Drained:
        """Handle messages with a router, `transactional` and a consumer."""
        broker, store = MemoryBroker(keep=1, capacity=2 * count), PostgresStore(self.dsn, connections=CONCURRENCY)
        await store.open()
        router = Router(topic="stock")
        router.add(OrderPlaced, _reserve)
        goal = _Goal()
        around = transactional(store, consumer="stock", cleanup_interval=timedelta(hours=1))
        subscriber = broker.subscribe("orders", group="stock")
        running = asyncio.create_task(Consumer(subscriber, router, goal, around, concurrency=CONCURRENCY).run())

        async def handle(messages: Sequence[Message]) -> None:
            goal.raise_by(len(messages))
            await broker.publish_batch(messages)
            await goal.reached.wait()

        drained = await self._measured(handle, count)
        running.cancel()
        await asyncio.wait({running})
        await store.close()
        return drained

    async def by_hand(self, count: int) -> Drained:
        """Handle messages with statements that are written here, in as many loops as there are connections."""
        connections = [await asyncpg.connect(self.dsn) for _ in range(CONCURRENCY)]

        async def work(connection: asyncpg.Connection[Any], messages: list[Message]) -> None:
            while messages:
                message = messages.pop()
                async with connection.transaction():
                    if await connection.execute(_ADMIT, "stock", _NO_TENANT, message.id) == "INSERT 0 1":
                        number = json.loads(message.payload)["n"]
                        await connection.execute(_EFFECT, number)
                        output = json.dumps({"n": number}).encode()
                        topic, kind = "stock", "stock.reserved"
                        await connection.execute(
                            _ADD, uuid7(), "default", topic, kind, None, output, "application/json"
                        )

        async def handle(messages: Sequence[Message]) -> None:
            left = list(messages)[::-1]
            await asyncio.gather(*(work(connection, left) for connection in connections))

        drained = await self._measured(handle, count)
        for connection in connections:
            await connection.close()
        return drained

    async def _measured(self, handle: Callable[[Sequence[Message]], Awaitable[None]], count: int) -> Drained:
        """Handle a tenth to warm up and then all; tell how long that took and what was wrong with it."""
        await self._empty()
        await handle(_messages(count // 10))
        await self._empty()
        messages = _messages(count)
        began = time.perf_counter()
        await handle(messages)
        return await self._judged(count, time.perf_counter() - began)

    async def _empty(self) -> None:
        connection = await asyncpg.connect(self.dsn)
        await connection.execute(f"TRUNCATE {', '.join(_TABLES)}")
        await connection.execute("CHECKPOINT")
        await connection.close()

    async def _judged(self, count: int, seconds: float) -> Drained:
        """Look for effects and outputs that are missing or there twice."""
        connection = await asyncpg.connect(self.dsn)
        numbers = [
            [row[0] for row in await connection.fetch(f"SELECT {number} FROM {table}")]
            for table, number in (
                ("handled", "n"),
                ("postroom_outbox", "(convert_from(payload, 'UTF8')::json ->> 'n')::bigint"),
            )
        ]
        await connection.close()
        lost = sum(len(set(range(1, count + 1)) - set(found)) for found in numbers)
        return Drained(seconds, lost, sum(len(found) - len(set(found)) for found in numbers), 0)


def _messages(count: int) -> list[Message]:
    return [
        Message(topic="orders", type="order.placed", payload=payload(number), attempt=1)
        for number in range(1, count + 1)
    ]


def contender(dsn: str, **_: Any) -> Consuming:  # noqa: ANN401 -- as for every contender
    """Return handling at work on one database."""
    return Consuming(dsn)
