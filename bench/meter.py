"""One call of a benchmark as a process of its own, with the processor time that the call and the server took for it.

Run as ``python -P bench/meter.py JSON`` with a ``PYTHONPATH`` that names the tree to measure: ``bench`` and
``postroom`` are that tree's, and only this file belongs to the tree that compares. So it imports nothing that another
commit may lack, and holds the workloads that other commits have no module for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis

import postroom
from bench.contender import contender
from postroom import Outbox

__all__ = ["processor_time"]

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PROCESSES = Path("/proc")


def processor_time(pid: int) -> float:
    """Return the seconds of processor time of a process, of its descendants and of those that have ended.

    A backend that ends hands its time on to the process that waits for it, so that nothing is missing from the sum.
    Number 0 stands for a store without a server.
    """
    times: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for number, parent, seconds in _processes():
        times[number] = seconds
        children.setdefault(parent, []).append(number)
    total, left = 0.0, [pid] if pid else []
    while left:
        number = left.pop()
        total += times.get(number, 0.0)
        left += children.get(number, [])
    return total


def _processes() -> Iterator[tuple[int, int, float]]:
    """Give the number, the parent and the processor time of every process, ended children included."""
    for folder in _PROCESSES.iterdir():
        if folder.name.isdigit():
            try:
                # The name of the program comes first, in parentheses, and may contain anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended meanwhile
            yield int(folder.name), int(fields[1]), sum(map(int, fields[11:15])) * _TICK


class Adding:
    """A producer that adds events to PostgreSQL, in transactions of its own."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._table = contender("contenders.postroom", dsn)

    async def prepare(self) -> None:
        await self._table.prepare()

    async def fill(self, count: int, keys: int) -> None:
        await self._table.fill(count, keys)

    async def add(self, count: int, batch: int) -> None:
        """Make ``count`` transactions with so many messages each."""
        outbox, connection = Outbox(), await asyncpg.connect(self.dsn)
        for number in range(count):
            events = [_event(number + n) for n in range(batch)]
            async with connection.transaction():
                await outbox.add(connection, events if batch > 1 else events[0], topic="orders", key="c-17")
        await connection.close()


class AddingRedis:
    """A producer that adds events to Redis, in pipelines of its own."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._keys = contender("contenders.postroom_redis", dsn)

    async def prepare(self) -> None:
        await self._keys.prepare()

    async def fill(self, count: int, keys: int) -> None:
        await self._keys.fill(count, keys)

    async def add(self, count: int, batch: int) -> None:
        """Execute ``count`` pipelines with so many messages each."""
        outbox = Outbox()
        async with Redis.from_url(self.dsn, retry=None) as client:
            for number in range(count):
                async with client.pipeline(transaction=True) as pipeline:
                    await outbox.add(pipeline, [_event(number + n) for n in range(batch)], topic="orders")
                    await pipeline.execute()


def _event(number: int) -> dict[str, object]:
    return {"order": number, "customer": "c-17", "total": "12.50", "note": "x" * 80}


_OWN = {"meter.adding": Adding, "meter.adding_redis": AddingRedis}


async def measured(order: dict[str, Any]) -> dict[str, float]:
    """Make calls, and return the processor time of the last one in seconds: the client's and the server's."""
    if not Path(postroom.__file__).is_relative_to(order["tree"]):
        raise RuntimeError(f"{postroom.__file__} would be measured, which is not in {order['tree']}")
    own = _OWN.get(order["contender"])
    subject: Any = own(order["dsn"]) if own else contender(order["contender"], order["dsn"], **order["options"])
    *before, (call, arguments) = order["calls"].items()
    for name, values in before:
        await getattr(subject, name)(**values)
    gc.collect()
    server, client = processor_time(order["server"]), time.process_time()
    answer = await getattr(subject, call)(**arguments)
    taken = {"client": time.process_time() - client, "server": processor_time(order["server"]) - server}
    if getattr(answer, "lost", 0) or getattr(answer, "doubled", 0) or getattr(answer, "reordered", 0):
        raise RuntimeError(f"the work was not done right, so its time says nothing: {answer}")
    return taken


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(json.loads(sys.argv[1])))))
