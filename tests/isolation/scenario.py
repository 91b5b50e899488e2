"""Healthy messages beside destinations that are down: what is delivered, how late, and how often is probed.

``make isolation`` prints a table of all stores, on servers that it starts itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from chaos.run import server_of
from postroom import Dispatcher, Message, Outbox
from postroom.errors import BrokerUnavailableError
from postroom.store import Store
from postroom.stores import MemoryStore, SQLStore, store_from_url
from postroom.testing.server import SqlServer
from postroom.testing.waiting import until
from postroom.transaction import transactions_of

Fault: TypeAlias = Literal["none", "keys", "backlog", "many"]
#: Stores messages in one transaction.
Add: TypeAlias = Callable[[Sequence[Message]], Awaitable[None]]

TOPIC = "orders"
CHUNK = 5_000
#: The goals: p99 with a fault over p99 without, and probes in any second.
MAX_RATIO = 2.0
MAX_PROBES = 20


@dataclass(slots=True)
class Figures:
    """What became of the healthy messages, and when the faulty destinations were tried."""

    added: int = 0
    latencies: list[float] = field(default_factory=list[float])
    #: When something was tried that had failed before.
    probes: list[float] = field(default_factory=list[float])

    def quantile(self, share: float) -> float:
        """Return the latency that a share of the healthy messages did not exceed, in seconds."""
        return sorted(self.latencies)[min(int(len(self.latencies) * share), len(self.latencies) - 1)]

    def most_probes(self, *, within: float = 1.0) -> int:
        """Return the most probes in any so many seconds."""
        return max((sum(at <= other < at + within for other in self.probes) for at in self.probes), default=0)


@dataclass(slots=True)
class Scenario:
    """A number of healthy messages each second, and a fault that was there before them."""

    store: Store
    add: Add
    fault: Fault
    seconds: float = 30.0
    rate: int = 10
    rows: int = 100_000
    destinations: int = 5_000
    publish_timeout: timedelta = timedelta(seconds=5)
    figures: Figures = field(default_factory=Figures)
    _begun: dict[Any, float] = field(default_factory=dict[Any, float])
    _tried: Counter[str] = field(default_factory=Counter[str])

    async def run(self) -> Figures:
        """Run, and return the figures once every healthy message was delivered."""
        await self._prepare()
        gc.disable()  # rows in memory stand for a database, which nothing would collect
        dispatcher = Dispatcher(
            self.store,
            self._send,
            listener=lambda _: None,
            publish_timeout=self.publish_timeout,
            lease=max(2 * self.publish_timeout, timedelta(seconds=30)),
        )
        running = asyncio.create_task(dispatcher.run())
        try:
            await asyncio.sleep(2)
            await self._add_healthy(dispatcher)
            await until(self._is_done, "every healthy message being delivered", within=timedelta(seconds=120))
        finally:
            dispatcher.stop_soon()
            dispatcher.stop_soon()
            await running
            gc.enable()
        return self.figures

    def _is_done(self) -> bool:
        return len(self.figures.latencies) == self.figures.added

    async def _prepare(self) -> None:
        match self.fault:
            case "none":
                faulty = []
            case "keys":
                faulty = [Message(topic=TOPIC, payload=b"bad", key=key) for key in ("refuses", "hangs")]
            case "backlog":
                faulty = [Message(topic="dead", payload=b"bad") for _ in range(self.rows)]
            case "many":
                faulty = [Message(topic=f"dead {number}", payload=b"bad") for number in range(self.destinations)]
        for first in range(0, len(faulty), CHUNK):
            await self.add(faulty[first : first + CHUNK])

    async def _add_healthy(self, dispatcher: Dispatcher) -> None:
        began = time.monotonic()
        for number in range(int(self.seconds * self.rate)):
            await asyncio.sleep(max(began + number / self.rate - time.monotonic(), 0))
            message = Message(topic=TOPIC, payload=b"good", key=f"key {number % 50}")
            self._begun[message.id] = time.monotonic()
            self.figures.added += 1
            await self.add([message])
            dispatcher.wake()

    async def _send(self, message: Message) -> None:
        now = time.monotonic()
        if message.payload == b"good":
            self.figures.latencies.append(now - self._begun.pop(message.id))
            return
        place = f"{message.topic} {message.key}"
        self._tried[place] += 1
        if self._tried[place] > (3 if self.fault == "backlog" else 1):
            self.figures.probes.append(now)
        if message.key == "hangs":
            await asyncio.Event().wait()
        raise BrokerUnavailableError("connection refused")


def adder(store: Store) -> Add:
    """Return what adds messages to a store, as a program beside the dispatcher would."""
    outbox = Outbox(namespace=store.namespace)
    if isinstance(store, MemoryStore):

        async def add_to_memory(messages: Sequence[Message]) -> None:
            with store.transaction() as transaction:
                outbox.add(transaction, list(messages))

        return add_to_memory

    async def add(messages: Sequence[Message]) -> None:
        async with transactions_of(store).begin() as transaction:
            await transaction.do(outbox.add, list(messages))

    return add


async def measured(make: Callable[[], Store], fault: Fault, **options: Any) -> Figures:  # noqa: ANN401
    """Run a scenario on a new store."""
    store = make()
    beside = store if isinstance(store, MemoryStore) else make()
    if isinstance(store, SQLStore):
        await store.apply_schema()
    if beside is not store:
        await beside.open()
    try:
        return await Scenario(store, adder(beside), fault, **options).run()
    finally:
        await beside.close()


@contextmanager
def places() -> Iterator[Iterator[tuple[str, str]]]:
    """Yield the name and the URL of every kind of store, on servers that run until the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:

        def opened() -> Iterator[tuple[str, str]]:
            yield "memory", ""
            yield "sqlite", f"sqlite:///{Path(folder) / 'outbox.db'}"
            for name in ("postgres", "mariadb", "redis"):
                server = servers.enter_context(server_of(name))
                yield name, server.create_database("isolation") if isinstance(server, SqlServer) else server.dsn

        yield opened()


async def report(store: str, url: str, seconds: float) -> bool:
    """Print a line for each fault; return whether all of them keep the goals."""
    usual, is_good = 0.0, True
    for fault in get_args(Fault):
        namespace = f"isolation-{time.time_ns()}"
        figures = await measured(
            partial(store_from_url, url, namespace=namespace) if url else MemoryStore, fault, seconds=seconds
        )
        usual = usual or figures.quantile(0.99)
        ratio = figures.quantile(0.99) / usual
        is_kept = ratio <= MAX_RATIO and figures.most_probes() <= MAX_PROBES
        is_good = is_good and is_kept
        print(  # noqa: T201
            f"{store:9}{fault:9}{len(figures.latencies):5} of {figures.added:4}"
            f"{figures.quantile(0.5) * 1000:9.1f}{figures.quantile(0.99) * 1000:9.1f}{ratio:7.2f}"
            f"{figures.most_probes():10}   {'ok' if is_kept else 'MISSED'}",
            flush=True,
        )
    return is_good


def main() -> int:
    """Print a table of all stores, or of those named, and fail if a goal is missed."""
    parser = argparse.ArgumentParser(prog="make isolation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long healthy messages are added")
    parser.add_argument("--store", help="only this one: memory, sqlite, postgres, mariadb or redis")
    chosen = parser.parse_args()
    print("store    fault     delivered   p50 ms   p99 ms  ratio  probes/s", flush=True)  # noqa: T201
    with places() as found:
        kept = [
            asyncio.run(report(store, url, chosen.seconds)) for store, url in found if chosen.store in {None, store}
        ]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
