"""postroom's two stores in Redis, with the dispatcher's defaults: batches of 500, four of them in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from postroom import Dispatcher
from postroom.stores.redis import RedisStore, RedisStreamStore

from ..contender import Arrivals, Drained
from ..redis_backlog import connect, fill, fill_stream
from ..sink import Sink

__all__ = ["PostroomRedis", "contender"]


class PostroomRedis:
    """A dispatcher over the store of scripts, or over the one in a stream; neither keeps what was delivered."""

    def __init__(self, dsn: str, *, stream: bool = False) -> None:
        self.dsn = dsn
        self.stream = stream

    def client(self) -> Redis:
        """Return a client of redis-py's on the database."""
        return connect(self.dsn)

    def store(self) -> RedisStore | RedisStreamStore:
        """Return the store; there is nothing to prepare for it."""
        if self.stream:
            return RedisStreamStore(self.dsn, profile="volatile")
        return RedisStore(self.dsn, keep_delivered=timedelta(0), profile="volatile")

    async def prepare(self) -> None:
        await self.fill(0, 0)

    async def fill(self, count: int, keys: int) -> None:
        async with self.client() as client:
            await (fill_stream if self.stream else fill)(client, count)

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count, keys)
        dispatcher = Dispatcher(self.store(), Sink(arrivals))
        began = time.perf_counter()
        await dispatcher.run(until_idle=True)
        return arrivals.judged(time.perf_counter() - began)

    async def latencies(self, count: int) -> Sequence[float]:
        """Refuse: latency is measured on PostgreSQL alone."""
        raise NotImplementedError


def contender(dsn: str, **options: Any) -> PostroomRedis:  # noqa: ANN401 -- as for every contender
    """Return postroom at work on one database."""
    return PostroomRedis(dsn, **options)
