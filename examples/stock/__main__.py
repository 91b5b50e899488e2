"""The wiring: which database, which broker, and what is around the handlers."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from postroom import Consumer, Dispatcher, JSONCodec, Message, transactional
from postroom.brokers import MemoryBroker
from postroom.stores import SQLiteStore

from .handlers import OrderPlaced, stock_router
from .repository import SCHEMA, SQLiteStock

ORDERS = [OrderPlaced(1, "chair", 2), OrderPlaced(2, "table", 1), OrderPlaced(3, "chair", 90)]


def prepare(path: Path) -> None:
    """Make the tables, and put ten chairs and a table on the shelves."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA)
        connection.execute("INSERT INTO stock VALUES ('chair', 10, 0), ('table', 1, 0)")
        SQLiteStore.create_tables(connection)


def announced(order: OrderPlaced) -> Message:
    """Return the message that another service sends about an order."""
    payload = JSONCodec().encode(order)
    return Message(topic="orders", type="order.placed", key=str(order.order_id), payload=payload)


async def main(path: Path) -> None:
    """Receive three orders, one of them twice; reserve; tell what came of it."""
    broker, store = MemoryBroker(), SQLiteStore(path, namespace="stock")
    told: list[Message] = []

    async def tell(message: Message) -> None:
        sys.stdout.write(f"{message.type} {message.payload.decode()}\n")
        told.append(message)
        if len(told) == len(ORDERS):
            dispatcher.stop_soon()

    dispatcher = Dispatcher(store, tell)
    around = transactional(store, consumer="stock", wake=dispatcher.wake)
    consumer = Consumer(broker.subscribe("orders", group="stock"), stock_router(SQLiteStock()), around)
    messages = [announced(order) for order in ORDERS]
    await broker.publish_batch([messages[0], *messages])  # a broker may hand out a message twice
    async with asyncio.TaskGroup() as group:
        consuming = group.create_task(consumer.run())
        await dispatcher.run()
        await consumer.stop()
        await consuming
    await store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stock.sqlite3"
        prepare(file)
        asyncio.run(main(file))
