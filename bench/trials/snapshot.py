"""Claims under a steady load, while another transaction keeps the database from cleaning up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from postroom import Delivered, Dispatcher, Message, Outbox, Outcome
from postroom.store import Claim, ClaimTerms
from postroom.stores.sql.store import SQLStore

from ..contender import payload
from ..contenders.postroom import Postroom

__all__ = ["contender"]

RATE = 500
_BATCH = 10
_WARM = 2


class Timed:
    """Takes the time of every claim of a store that brings something, and counts what is delivered."""

    def __init__(self, store: SQLStore) -> None:
        self.taken: dict[str, list[float]] = {}
        self.phase = "warming up"
        self.delivered = 0
        self._claim = store.claim
        store.claim = self.claim  # type: ignore[method-assign]

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        began = time.perf_counter()
        claims = await self._claim(limit, terms)
        if claims:
            self.taken.setdefault(self.phase, []).append(time.perf_counter() - began)
        return claims

    async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        self.delivered += len(messages)
        return [Delivered()] * len(messages)


class Snapshot(Postroom):
    """One dispatcher and one producer, with a stranger who leaves a transaction open."""

    async def percentiles(self, before: float, held: float, after: float) -> dict[str, float]:
        """Return the 99th percentile of what a claim takes before, while and after the transaction is open."""
        await self.fill(0, 0)
        store = self.store()
        timed = Timed(store)
        dispatcher = Dispatcher(store, timed)
        running = asyncio.create_task(dispatcher.run())
        producer = asyncio.create_task(self._produce(dispatcher))
        stranger = await asyncpg.connect(self.dsn)
        await asyncio.sleep(_WARM)
        timed.phase = "before"
        await asyncio.sleep(before)
        async with stranger.transaction(isolation="repeatable_read"):
            await stranger.fetchval("SELECT count(*) FROM postroom_outbox WHERE status = 'dead'")
            timed.phase = "held"
            await asyncio.sleep(held)
            timed.phase = "ending"
        await asyncio.sleep(_WARM)
        timed.phase = "after"
        await asyncio.sleep(after)
        producer.cancel()
        produced = await producer
        await dispatcher.stop()
        await running
        await stranger.close()
        values = {phase: sorted(times)[int(len(times) * 0.99)] for phase, times in timed.taken.items()}
        return {**values, "missing": produced - timed.delivered, "claims": sum(map(len, timed.taken.values()))}

    async def _produce(self, dispatcher: Dispatcher) -> int:
        outbox = Outbox()
        produced = 0
        connection = await asyncpg.connect(self.dsn)
        began = time.perf_counter()
        try:
            while True:
                async with connection.transaction():
                    messages = [payload(produced + n) for n in range(_BATCH)]
                    await outbox.add(connection, messages, topic="orders")
                produced += _BATCH
                dispatcher.wake()
                await asyncio.sleep(max(began + produced / RATE - time.perf_counter(), 0))
        except asyncio.CancelledError:
            connection.terminate()
            # What was being added when time was up is committed or not: the table knows.
            return produced


def contender(dsn: str, **options: Any) -> Snapshot:  # noqa: ANN401 -- as for every contender
    """Return a steady load at work on one database."""
    return Snapshot(dsn, **options)
