"""arq in a virtual environment of its own, since it asks for a redis-py that is older than ours.

A hundred jobs at a time, results not kept, and so many ids read at once that one look at the queue is enough. Ten jobs
or five hundred, and looks without a pause, were alike: each job is begun after the one before it, by five commands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from arq.connections import RedisSettings, create_pool
from arq.constants import default_queue_name, job_key_prefix
from arq.jobs import serialize_job
from arq.worker import Worker, func

from ..contender import Arrivals, Drained, payload

__all__ = ["Arq", "contender"]

_DAY = 86_400_000


class Arq:
    """A worker with one function; arq knows no order by key."""

    def __init__(self, dsn: str, *, jobs: int = 100, read: int = 5000, poll: float = 0.1) -> None:
        self.settings = RedisSettings.from_dsn(dsn)
        self.jobs = jobs
        self.read = read
        self.poll = poll

    async def prepare(self) -> None:
        await self.fill(0, 0)

    async def fill(self, count: int, keys: int) -> None:
        """Write what `enqueue_job` would write, a thousand jobs at a time."""
        pool = await create_pool(self.settings)
        await pool.flushdb()
        moment = int(time.time() * 1000)
        for first in range(1, count + 1, 1000):
            async with pool.pipeline(transaction=True) as pipeline:
                for number in range(first, min(first + 1000, count + 1)):
                    job = serialize_job("orders", (payload(number),), {}, None, moment)
                    pipeline.psetex(f"{job_key_prefix}{number:032x}", _DAY, job)
                    pipeline.zadd(default_queue_name, {f"{number:032x}": moment})
                await pipeline.execute()
        await pool.close()

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count)

        async def orders(_: dict[Any, Any], data: bytes) -> None:
            arrivals.payloads.append(data)

        worker = Worker(
            [func(orders, name="orders")],
            redis_settings=self.settings,
            burst=True,
            max_jobs=self.jobs,
            queue_read_limit=self.read,
            poll_delay=self.poll,
            keep_result=0,
            log_results=False,
            handle_signals=False,
        )
        began = time.perf_counter()
        await worker.async_run()
        seconds = time.perf_counter() - began
        left = await worker.pool.zcard(default_queue_name)
        await worker.close()
        if left:
            raise RuntimeError(f"{left} jobs were left")
        return arrivals.judged(seconds)

    async def latencies(self, count: int) -> Sequence[float]:
        """Refuse: latency is measured on PostgreSQL alone."""
        raise NotImplementedError


def contender(dsn: str, **options: Any) -> Arq:  # noqa: ANN401 -- as for every contender
    """Return arq at work on one database."""
    return Arq(dsn, **options)
