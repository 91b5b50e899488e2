"""taskiq on the streams of taskiq-redis, which is its broker that acknowledges.

Results are not kept and parameters not validated; 500 messages are read at once, and a hundred tasks run at a time.
Twenty tasks or four hundred, 100 messages at once, and orjson for its messages were alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from taskiq.message import TaskiqMessage
from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

from ..contender import Arrivals, Drained, payload

__all__ = ["Taskiq", "contender"]

_QUEUE = "taskiq"
_AT_ONCE = 1000


class Taskiq:
    """A receiver with one task; taskiq knows no order by key."""

    def __init__(self, dsn: str, *, read: int = 500, tasks: int = 100, prefetch: int = 500) -> None:
        self.dsn = dsn
        self.broker = RedisStreamBroker(dsn, queue_name=_QUEUE, consumer_id="0", xread_count=read)
        self.tasks = tasks
        self.prefetch = prefetch

    async def prepare(self) -> None:
        await self.fill(0, 0)

    async def fill(self, count: int, keys: int) -> None:
        """Write what `kiq` would write, a thousand tasks at a time."""
        async with Redis.from_url(self.dsn) as client:
            await client.flushdb()
            for first in range(1, count + 1, _AT_ONCE):
                async with client.pipeline(transaction=True) as pipeline:
                    for number in range(first, min(first + _AT_ONCE, count + 1)):
                        pipeline.xadd(_QUEUE, {b"data": self._message(number)})
                    await pipeline.execute()

    def _message(self, number: int) -> bytes:
        arguments = [payload(number).decode()]
        message = TaskiqMessage(task_id=f"{number:032x}", task_name="orders", labels={}, args=arguments, kwargs={})
        written: bytes = self.broker.formatter.dumps(message).message
        return written

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count)

        async def orders(data: str) -> None:
            arrivals.payloads.append(data.encode())

        self.broker.register_task(orders, task_name="orders")
        receiver = Receiver(self.broker, validate_params=False, max_async_tasks=self.tasks, max_prefetch=self.prefetch)
        finish = asyncio.Event()
        async with Redis.from_url(self.dsn) as client:

            async def is_empty() -> bool:
                return not (await client.xpending(_QUEUE, "taskiq"))["pending"]

            running = asyncio.create_task(receiver.listen(finish))
            drained = await arrivals.drained(is_empty)
        finish.set()
        await running
        await self.broker.shutdown()
        return drained

    async def latencies(self, count: int) -> Sequence[float]:
        """Refuse: latency is measured on PostgreSQL alone."""
        raise NotImplementedError


def contender(dsn: str, **options: Any) -> Taskiq:  # noqa: ANN401 -- as for every contender
    """Return taskiq at work on one database."""
    return Taskiq(dsn, **options)
