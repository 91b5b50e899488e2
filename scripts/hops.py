"""Counts what a reader has to walk through: the functions and files of postroom that one message runs.

Run as ``python -m scripts.hops``; it starts a PostgreSQL of its own. Functions are counted once, however often they
run; a change of file is a call into another file than the call before it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Final

import asyncpg

import postroom
from postroom import Consumer, Dispatcher, Message, Outbox, Router, Transaction, transactional
from postroom.brokers import MemoryBroker
from postroom.stores import PostgresStore
from postroom.testing.servers import PostgresServer

__all__ = ["Walk", "walks"]

_PACKAGE: Final = postroom.__file__.removesuffix("__init__.py")
#: What is defined in the body of a class or a function, which runs as a part of it.
_INNER: Final = frozenset({"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>"})
_UNSETTLED: Final = "SELECT count(*) FROM postroom_outbox WHERE namespace = 'shop' AND status <> 'delivered'"


@dataclass
class OrderPlaced:
    number: int


@dataclass
class StockReserved:
    number: int


@dataclass(slots=True)
class Walk:
    """What was run."""

    functions: set[CodeType] = field(default_factory=set[CodeType])
    files: set[str] = field(default_factory=set[str])
    changes: int = 0
    _last: str = ""

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call, as the interpreter's profiler tells it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name in _INNER:
            return
        self.changes += code.co_filename != self._last
        self._last = code.co_filename
        self.functions.add(code)
        self.files.add(code.co_filename)

    @contextmanager
    def taken(self) -> Generator[None]:
        """Walk along with everything that is run on this thread."""
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def listed(self) -> list[str]:
        """Return each file with its functions."""
        by_file: dict[str, list[str]] = {}
        for code in sorted(self.functions, key=lambda code: (code.co_filename, code.co_firstlineno)):
            by_file.setdefault(code.co_filename.removeprefix(_PACKAGE), []).append(code.co_qualname)
        return [f"    {name}: {', '.join(functions)}" for name, functions in by_file.items()]


async def _adding(dsn: str) -> Walk:
    """Walk from `Outbox.add` on a connection of asyncpg to the row."""
    connection, outbox, walk = await asyncpg.connect(dsn), Outbox(), Walk()
    async with connection.transaction():
        await outbox.add(connection, Message(topic="orders", payload=b"{}"))  # caches are filled
        message = Message(topic="orders", payload=b"{}")
        with walk.taken():
            await outbox.add(connection, message)
    await connection.close()
    return walk


async def _dispatching(dsn: str) -> Walk:
    """Walk from the wake-up of a dispatcher through claim, publish and settlement."""
    broker, outbox, walk = MemoryBroker(), Outbox(namespace="shop"), Walk()
    dispatcher = Dispatcher(PostgresStore(dsn, namespace="shop"), broker)
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=1)

    async def deliver() -> None:
        before = broker.confirmed
        async with pool.acquire() as connection:
            await outbox.add(connection, Message(topic="orders", payload=b"{}"), outside_transaction=True)
            with walk.taken():
                dispatcher.wake()
                while broker.confirmed == before or await connection.fetchval(_UNSETTLED):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        await deliver()
        walk = Walk()
        await deliver()
        await dispatcher.stop()
    await pool.close()
    return walk


async def _handling(dsn: str) -> Walk:
    """Walk from a delivery through `transactional`, a handler and an outbox to the acknowledgement."""
    broker, router, store, walk = MemoryBroker(), Router(), PostgresStore(dsn, namespace="stock"), Walk()

    @router.on
    async def reserve(order: OrderPlaced, transaction: Transaction) -> StockReserved:
        await transaction.connection.execute("SELECT 1")
        return StockReserved(order.number)

    async def handle(number: int) -> None:
        message = Message(topic="orders", type="order.placed", payload=b'{"number": %d}' % number)
        await broker.publish_batch([message])
        with walk.taken():
            while broker.backlog("hops"):  # noqa: ASYNC110 -- the broker tells nobody that it was acknowledged
                await asyncio.sleep(0.001)

    consumer = Consumer(broker.subscribe("orders", group="hops"), router, transactional(store, consumer="hops"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run())
        await handle(1)
        walk = Walk()
        await handle(2)
        await consumer.stop()
    await store.close()
    return walk


async def walks(dsn: str) -> Mapping[str, Walk]:
    """Return what each of the ways of a message runs."""
    store = PostgresStore(dsn)
    await store.apply_schema()
    await store.close()
    return {"add": await _adding(dsn), "dispatch": await _dispatching(dsn), "handle": await _handling(dsn)}


def main() -> None:
    """Print a table, and what is behind it."""
    server = PostgresServer()
    server.start()
    try:
        found = asyncio.run(walks(server.dsn))
    finally:
        server.stop()
    for name, walk in found.items():
        print(f"{name}: {len(walk.functions)} functions in {len(walk.files)} files, {walk.changes} changes of file")
        print("\n".join(walk.listed()))


if __name__ == "__main__":
    main()
