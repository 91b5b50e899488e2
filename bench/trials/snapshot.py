"""Claims under a steady load, while another transaction keeps the database from cleaning up."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import asyncpg

from postroom import Delivered, Dispatcher, Message, Outbox, Outcome
from postroom.store import Claim, ClaimTerms
from postroom.stores.sql.store import SQLStore

from ..contender import payload
from ..contenders.postroom import Postroom

__all__ = ["KEYED_RATE", "KEYS", "contender"]

RATE = 500
_BATCH = 10
_WARM = 2
#: The load of messages with keys: how many a second, over how many keys, and how many in a transaction.
KEYED_RATE = 1800
KEYS = 1000
_KEYED_BATCH = 20
#: One after the other, the commits of a busy disk would be too slow.
_PRODUCERS = 3


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

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        self.delivered += len(messages)
        return [Delivered()] * len(messages)


class Late:
    """Takes note of when each message was delivered, and how long after its transaction began."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.arrived: list[tuple[float, float]] = []

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome]:
        now = time.monotonic()
        self.arrived += [(now - self.began, now - json.loads(message.payload)["at"]) for message in messages]
        return [Delivered()] * len(messages)

    def median(self, start: float, end: float) -> float:
        """Return the median latency of what was delivered within a span of seconds; nothing at all took for ever."""
        latencies = [latency for at, latency in self.arrived if start <= at < end]
        return statistics.median(latencies) if latencies else float("inf")


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

    async def latencies_of_keys(self, spans: Sequence[tuple[float, float]], rate: int, *, hold: bool) -> dict[str, Any]:
        """Return the median latencies of messages with keys, in spans of seconds since the transaction was opened."""
        await self.fill(0, 0)
        dispatcher = Dispatcher(self.store(), late := Late())
        running = asyncio.create_task(dispatcher.run())
        producers = [asyncio.create_task(self._produce_keyed(dispatcher, rate, nth)) for nth in range(_PRODUCERS)]
        stranger = await asyncpg.connect(self.dsn)
        await asyncio.sleep(_WARM)
        transaction = stranger.transaction(isolation="repeatable_read")
        if hold:
            await transaction.start()
            await stranger.fetchval("SELECT count(*) FROM postroom_outbox WHERE status = 'dead'")
        late.began = time.monotonic()
        late.arrived.clear()
        await asyncio.sleep(max(end for _, end in spans))
        medians, delivered = [late.median(*span) for span in spans], len(late.arrived)
        seconds = time.monotonic() - late.began
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers)
        await dispatcher.stop()
        await running
        await stranger.close()
        return {"medians": medians, "rate": delivered / seconds}

    async def _produce_keyed(self, dispatcher: Dispatcher, rate: int, nth: int) -> None:
        """Add messages over a part of the keys, so that those of a key are added one after the other."""
        outbox, produced = Outbox(), 0
        keys = range(nth, KEYS, _PRODUCERS)
        connection = await asyncpg.connect(self.dsn)
        began = time.monotonic()
        try:
            while True:
                data = json.dumps({"at": time.monotonic()}).encode()
                messages = [
                    Message(topic="orders", key=f"c-{keys[(produced + n) % len(keys)]}", payload=data)
                    for n in range(_KEYED_BATCH)
                ]
                async with connection.transaction():
                    await outbox.add(connection, messages)
                produced += _KEYED_BATCH
                dispatcher.wake()
                await asyncio.sleep(max(began + produced * _PRODUCERS / rate - time.monotonic(), 0))
        except asyncio.CancelledError:
            connection.terminate()

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
