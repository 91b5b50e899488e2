"""What is asked of everybody who is measured: to take over a backlog, to empty it, and to notice one message."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

__all__ = ["PAYLOAD", "PAYLOAD_SQL", "Arrivals", "Contender", "Drained", "contender", "payload"]

#: How many bytes a message has.
PAYLOAD = 150
#: The payload of message ``n`` in PostgreSQL's words; the same bytes as `payload` makes.
PAYLOAD_SQL = f"rpad('{{\"n\": ' || n || ', \"pad\": \"', {PAYLOAD - 2}, 'x') || '\"}}'"


def payload(number: int) -> bytes:
    """Return the payload of one message: JSON of 150 bytes that tells its number."""
    return f'{{"n": {number}, "pad": "'.encode().ljust(PAYLOAD - 2, b"x") + b'"}'


@dataclass(frozen=True, slots=True)
class Drained:
    """How long it took to empty a backlog, and what was wrong with what came out."""

    seconds: float
    lost: int
    doubled: int
    #: Messages that came after a later one of their key; only told where order was asked for.
    reordered: int


@dataclass(slots=True)
class Arrivals:
    """What was handed to the publisher or handler, in that order; judged only after the clock was stopped."""

    count: int
    keys: int = 0
    payloads: list[bytes] = field(default_factory=list[bytes])

    async def drained(self, is_empty: Callable[[], Awaitable[bool]], *, within: float = 300) -> Drained:
        """Wait until everything has arrived and nothing is left in the table; the clock runs from now on."""
        began = time.perf_counter()
        while len(self.payloads) < self.count or not await is_empty():
            if time.perf_counter() - began > within:
                raise TimeoutError(f"{len(self.payloads)} of {self.count} messages came within {within} s")
            await asyncio.sleep(0.005)
        return self.judged(time.perf_counter() - began)

    def judged(self, seconds: float) -> Drained:
        """Tell what was lost, doubled or out of order."""
        numbers = [json.loads(payload)["n"] for payload in self.payloads]
        last: dict[int, int] = defaultdict(lambda: -1)
        reordered = 0
        for number in numbers if self.keys else ():
            reordered += number < last[number % self.keys]
            last[number % self.keys] = max(number, last[number % self.keys])
        distinct = set(numbers)
        lost = len(set(range(1, self.count + 1)) - distinct)
        return Drained(seconds, lost, len(numbers) - len(distinct), reordered)


class Contender(Protocol):
    """A library, or bare SQL, that works on a queue in a database of its own."""

    async def prepare(self) -> None:
        """Create the tables that are needed, empty."""
        ...

    async def fill(self, count: int, keys: int) -> None:
        """Have messages 1 to ``count`` waiting; number ``n`` has the key ``n % keys``, or none if that is 0."""
        ...

    async def drain(self, count: int, keys: int) -> Drained:
        """Deliver everything to something that does nothing, as one process; order by key if there are keys."""
        ...

    async def latencies(self, count: int) -> Sequence[float]:
        """Send messages one at a time while idle; tell the seconds from each commit until its handler begins."""
        ...


def contender(name: str, dsn: str, **options: Any) -> Contender:  # noqa: ANN401 -- each has options of its own
    """Return whom a module of this package is about, such as ``contenders.raw``, at work on one database."""
    return cast("Contender", import_module(f"bench.{name}").contender(dsn, **options))
