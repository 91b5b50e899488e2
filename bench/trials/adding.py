"""What it costs a producer to add messages: against an INSERT written by hand, in transactions of asyncpg."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import asyncpg

from postroom import Outbox, uuid7
from postroom.stores import PostgresStore

from ..contenders.postroom import Postroom

__all__ = ["contender"]

Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"

_COLUMNS = "(id, namespace, topic, type, key, payload, content_type, next_attempt_at)"
_ONE = f"INSERT INTO postroom_outbox {_COLUMNS} VALUES ($1, $2, $3, $4, $5, $6, $7, now())"
_MANY = f"""
    INSERT INTO postroom_outbox {_COLUMNS}
    SELECT id, $2, $3, $4, $5, payload, $6, now() FROM unnest($1::uuid[], $7::bytea[]) AS t(id, payload)
    """
_BATCH = 100
PRODUCERS = 24


def _event(number: int) -> dict[str, object]:
    return {"order": number, "customer": "c-17", "total": "12.50", "note": "x" * 80}


class Adding(Postroom):
    """One call for each figure; what is compared takes turns, transaction by transaction."""

    async def one(self, count: int) -> float:
        """Return how much longer a transaction takes with `add` of one message."""
        outbox = Outbox()

        async def add(connection: Connection, number: int) -> None:
            await outbox.add(connection, _event(number), topic="orders", key="c-17")

        async def insert(connection: Connection, number: int) -> None:
            data = json.dumps(_event(number)).encode()
            await connection.execute(_ONE, uuid7(), "default", "orders", "orders", "c-17", data, "application/json")

        return await self._compared(add, insert, count)

    async def many(self, count: int) -> float:
        """Return how much longer a transaction takes with `add` of a hundred messages."""
        outbox = Outbox()

        async def add(connection: Connection, number: int) -> None:
            events = [_event(number + n) for n in range(_BATCH)]
            await outbox.add(connection, events, topic="orders", key="c-17")

        async def insert(connection: Connection, number: int) -> None:
            events = [_event(number + n) for n in range(_BATCH)]
            ids = [uuid7() for _ in events]
            data = [json.dumps(event).encode() for event in events]
            await connection.execute(_MANY, ids, "default", "orders", "orders", "c-17", "application/json", data)

        return await self._compared(add, insert, count)

    async def _compared(
        self,
        ours: Callable[[Connection, int], Awaitable[None]],
        theirs: Callable[[Connection, int], Awaitable[None]],
        count: int,
    ) -> float:
        await self.fill(0, 0)
        connection = await asyncpg.connect(self.dsn)
        taken: Mapping[object, list[float]] = {ours: [], theirs: []}
        for number in range(count):
            for work in (ours, theirs) if number % 2 else (theirs, ours):
                began = time.perf_counter()
                async with connection.transaction():
                    await work(connection, number)
                taken[work].append(time.perf_counter() - began)
        await connection.close()
        # The first ones prepare statements and fill caches.
        warm = count // 10
        return statistics.median(taken[ours][warm:]) / statistics.median(taken[theirs][warm:])

    async def commits(self, seconds: float, *, plain: bool) -> float:
        """Return the commits per second of many producers, with `add` and its wake-up or by hand and without one."""
        await self.fill(0, 0)
        store = PostgresStore(self.dsn)
        await store.open()
        pool = await asyncpg.create_pool(self.dsn, min_size=PRODUCERS, max_size=PRODUCERS)
        outbox = Outbox(wake=store.notify)
        commits = 0
        end = time.perf_counter() + seconds

        async def produce_plain(number: int) -> None:
            nonlocal commits
            while time.perf_counter() < end:
                async with pool.acquire() as connection, connection.transaction():
                    data = json.dumps(_event(number)).encode()
                    await connection.execute(
                        _ONE, uuid7(), "default", "orders", "orders", f"c-{number}", data, "application/json"
                    )
                commits += 1

        async def produce(number: int) -> None:
            nonlocal commits
            while time.perf_counter() < end:
                async with outbox.transaction(pool) as connection:
                    await outbox.add(connection, _event(number), topic="orders", key=f"c-{number}")
                commits += 1

        await asyncio.gather(*((produce_plain if plain else produce)(number) for number in range(PRODUCERS)))
        await pool.close()
        await store.close()
        return commits / seconds


def contender(dsn: str, **options: Any) -> Adding:  # noqa: ANN401 -- as for every contender
    """Return producers at work on one database."""
    return Adding(dsn, **options)
