"""procrastinate with psycopg, deleting jobs that succeeded; arguments are JSON there, so the payload is a text in it.

Five jobs at a time drain about 1.2 times as fast as one, ten are no faster, and twenty are slower: each job is fetched
and finished by a transaction of its own, and only one is fetched at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from procrastinate import App, PsycopgConnector
from psycopg import AsyncConnection

from ..contender import PAYLOAD_SQL, Arrivals, Drained
from ..idle import Bell
from ..peer import emptiness, refill

__all__ = ["Procrastinate", "contender"]

_FILL = f"""
    INSERT INTO procrastinate_jobs (queue_name, task_name, priority, args)
    SELECT 'default', 'orders', 0, jsonb_build_object('payload', {PAYLOAD_SQL})
    FROM generate_series(1, $1::bigint) AS n
    """


class Procrastinate:
    """A worker with one task; order by key would need its locks, which are not measured."""

    def __init__(self, dsn: str, *, concurrency: int = 5) -> None:
        self.dsn = dsn
        self.concurrency = concurrency
        size = concurrency + 2
        self.app = App(connector=PsycopgConnector(conninfo=dsn, min_size=size, max_size=size))

    @asynccontextmanager
    async def working(self, handle: Callable[..., Awaitable[None]]) -> AsyncGenerator[None]:
        """Have the worker running, and stop it at the end."""
        self.app.task(name="orders")(handle)
        async with self.app.open_async():
            running = asyncio.create_task(
                self.app.run_worker_async(
                    concurrency=self.concurrency, delete_jobs="successful", install_signal_handlers=False
                )
            )
            try:
                yield
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    async def prepare(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def fill(self, count: int, keys: int) -> None:
        tables = "procrastinate_jobs", "procrastinate_events", "procrastinate_periodic_defers"
        await refill(self.dsn, _FILL, count, tables=tables)

    async def drain(self, count: int, keys: int) -> Drained:
        arrivals = Arrivals(count)

        async def handle(payload: str) -> None:
            arrivals.payloads.append(payload.encode())

        async with emptiness(self.dsn, "procrastinate_jobs") as is_empty, self.working(handle):
            return await arrivals.drained(is_empty)

    async def latencies(self, count: int) -> Sequence[float]:
        bell = Bell()

        async def handle(**_: str) -> None:
            bell.ring()

        async with self.working(handle), await AsyncConnection.connect(self.dsn) as connection:
            task = self.app.configure_task("orders", connection=connection)

            async def commit(payload: bytes) -> None:
                async with connection.transaction():
                    await task.defer_async(payload=payload.decode())

            return await bell.latencies(count, commit)


def contender(dsn: str, **options: Any) -> Procrastinate:  # noqa: ANN401 -- as for every contender
    """Return procrastinate at work on one database."""
    return Procrastinate(dsn, **options)
