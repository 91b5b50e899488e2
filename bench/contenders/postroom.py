"""postroom itself, with its defaults: batches of 500, four of them in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import asyncpg

from postroom import Dispatcher, Message, Outbox
from postroom.stores import PostgresStore, store_from_url
from postroom.stores.sql.store import SQLStore

from ..backlog import fill
from ..contender import Arrivals, Drained
from ..idle import Bell
from ..sink import Sink

__all__ = ["Postroom", "contender"]


class Postroom:
    """A dispatcher over one of postroom's own stores."""

    def __init__(self, dsn: str, *, keep: bool = False, batch: int = 500, near: bool = False) -> None:
        self.dsn = dsn
        #: Whether delivered messages stay, and whether the dispatcher is told of a commit without the database.
        self.keep = keep
        self.near = near
        self.batch = batch

    def store(self) -> SQLStore:
        """Return the store, which keeps delivered messages if that was asked for."""
        keep = timedelta(days=7) if self.keep else timedelta(0)
        return cast("SQLStore", store_from_url(self.dsn, keep_delivered=keep))

    async def prepare(self) -> None:
        store = self.store()
        await store.apply_schema()
        await store.close()

    async def fill(self, count: int, keys: int) -> None:
        await fill(self.dsn, count, keys)

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        dispatcher = Dispatcher(self.store(), Sink(arrivals), batch=self.batch)
        began = time.perf_counter()
        await dispatcher.run(until_idle=True)
        return arrivals.judged(time.perf_counter() - began)

    async def latencies(self, count: int) -> Sequence[float]:
        store = PostgresStore(self.dsn)
        await store.open()
        bell = Bell()

        async def publish(_: Message) -> None:
            bell.ring()

        dispatcher = Dispatcher(store, publish)
        running = asyncio.create_task(dispatcher.run())
        pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=1)
        outbox = Outbox(wake=dispatcher.wake if self.near else store.notify)

        async def commit(data: bytes) -> None:
            async with outbox.transaction(pool) as connection:
                await outbox.add(connection, data, topic="orders")

        latencies = await bell.latencies(count, commit)
        await dispatcher.stop()
        await running
        await pool.close()
        await store.close()
        return latencies


def contender(dsn: str, **options: Any) -> Postroom:  # noqa: ANN401 -- as for every contender
    """Return postroom at work on one database."""
    return Postroom(dsn, **options)
