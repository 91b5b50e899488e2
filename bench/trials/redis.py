"""What it costs to add messages in Redis, how long a claim of 100 takes there, and how much room a message takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from redis.asyncio.client import Pipeline

from postroom import Outbox, uuid7

from ..claims import claims_in_turns
from ..contender import PAYLOAD
from ..contenders.postroom_redis import PostroomRedis
from ..redis_backlog import KEYS

__all__ = ["BATCH", "contender"]

Work: TypeAlias = Callable[[Pipeline, int], Awaitable[object]]

#: How many messages one MULTI adds.
BATCH = 100
_ENTRIES, _DUE = f"{KEYS.prefix}:by_hand", f"{KEYS.prefix}:by_hand:due"


def _event(number: int) -> dict[str, object]:
    return {"order": number, "customer": "c-17", "total": "12.50", "note": "x" * 80}


class Trial(PostroomRedis):
    """One call for each figure."""

    async def add(self, batches: int, singles: int) -> tuple[float, float]:
        """Return how much longer a MULTI takes with `add` of many messages, and of one."""
        return await self._compared(batches, BATCH), await self._compared(singles, 1)

    async def _compared(self, count: int, batch: int) -> float:
        """Return how much longer a MULTI takes with `add`; both ways take turns, MULTI by MULTI."""
        outbox = Outbox()

        async def ours(pipeline: Pipeline, number: int) -> None:
            await outbox.add(pipeline, [_event(number + n) for n in range(batch)], topic="orders")

        async def theirs(pipeline: Pipeline, number: int) -> None:
            for n in range(batch):
                identity = uuid7().bytes
                pipeline.hset(_ENTRIES, identity, json.dumps(_event(number + n)).encode())
                pipeline.zadd(_DUE, {identity: time.time()})

        await self.fill(0, 0)
        taken: Mapping[Work, list[float]] = {ours: [], theirs: []}
        async with self.client() as client:
            for number in range(count):
                for work in (ours, theirs) if number % 2 else (theirs, ours):
                    began = time.perf_counter()
                    async with client.pipeline(transaction=True) as pipeline:
                        await work(pipeline, number)
                        await pipeline.execute()
                    taken[work].append(time.perf_counter() - began)
            added, by_hand = await client.hlen(KEYS.all[0]), await client.hlen(_ENTRIES)
        if added != count * batch or by_hand != added:
            raise RuntimeError(f"{added} and {by_hand} messages of {count * batch} are there")
        # The first ones open connections and fill caches.
        warm = count // 10
        return statistics.median(taken[ours][warm:]) / statistics.median(taken[theirs][warm:])

    async def room(self, count: int) -> float:
        """Have so many messages waiting; return the bytes that each takes beyond its payload."""
        async with self.client() as client:
            await client.flushdb()
            before = await self._used()
            await self.fill(count, 0)
            return (await self._used() - before) / count - PAYLOAD

    async def _used(self) -> int:
        async with self.client() as client:
            told: Mapping[str, Any] = await client.info("memory")
        return int(told["used_memory"])

    async def medians(self, other: str, count: int) -> list[float]:
        """Return the medians of what a claim takes here and in another database, in seconds."""
        return await claims_in_turns([self.store(), Trial(other).store()], count)


def contender(dsn: str, **options: Any) -> Trial:  # noqa: ANN401 -- as for every contender
    """Return one database to measure on."""
    return Trial(dsn, **options)
