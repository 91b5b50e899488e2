"""A shop that writes an order and its message together, and a dispatcher that delivers the message.

Needs nothing but postroom: ``python examples/shop.py``
"""  # noqa: INP001 -- a script

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from postroom import Dispatcher, Message, Outbox
from postroom.stores import SQLiteStore

outbox = Outbox(namespace="shop")


@dataclass
class OrderPlaced:
    """What the rest of the world wants to know of an order."""

    order_id: int
    cents: int


def place_order(connection: sqlite3.Connection, order_id: int, cents: int) -> None:
    """Store an order and tell of it: both happen, or neither."""
    with connection:
        connection.execute("INSERT INTO orders VALUES (?, ?)", (order_id, cents))
        outbox.add(connection, OrderPlaced(order_id, cents), topic="orders", key=str(order_id))
        if cents < 0:
            raise ValueError("a price cannot be negative")


async def send(message: Message) -> None:
    """Deliver one message; yours would call a broker. To return means that it was delivered."""
    sys.stdout.write(f"{message.type} {message.payload.decode()}\n")


async def main(path: Path) -> None:
    """Place three orders, one of which is refused, and deliver the messages of the others."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, cents INTEGER)")
        SQLiteStore.create_tables(connection)
        for order_id, cents in [(1, 990), (2, -1), (3, 450)]:
            try:
                place_order(connection, order_id, cents)
            except ValueError as error:
                sys.stdout.write(f"order {order_id} refused: {error}\n")

    store = SQLiteStore(path, namespace="shop")
    await Dispatcher(store, send).run(until_idle=True)
    await store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder) / "shop.sqlite3"))
