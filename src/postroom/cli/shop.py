"""The shop of the demo: orders in SQLite, two services behind them, a broker that fails, and a tally of it all."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from .. import events
from ..brokers import MemoryBroker
from ..codec import JSONCodec
from ..dispatcher import Dispatcher
from ..message import Message
from ..middleware import Next
from ..outbox import Outbox
from ..retry import Backoff
from ..store import Outcome, Retry, Stats
from ..stores import SQLiteStore
from .services import EFFECTS, OrderPlaced, shipping, stock
from .verdict import Verdict

__all__ = ["Counter", "Shop", "StumblingBroker"]

NAMESPACE = "shop"
DESKS = 3
CUSTOMERS = 8
#: How many orders a desk takes in a second, and how many of them it gives up in the middle of the transaction.
PACE = 60
DECLINED = 0.1
#: One message in so many fails at its first attempt, and one in so many arrives twice.
STUMBLES = 200
REPEATS = 20
PATIENCE = timedelta(seconds=30)
MILLISECOND = timedelta(milliseconds=1)

ORDERS = """
    CREATE TABLE orders (message_id TEXT PRIMARY KEY, customer TEXT NOT NULL, number INTEGER NOT NULL, cents INTEGER)
"""


class StumblingBroker(MemoryBroker):
    """A broker that now and then refuses a message at its first attempt, and takes every twentieth twice."""

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        """Confirm a batch, except what it stumbles over and what must not overtake that."""
        held_back: set[str | None] = set()
        stumbled: dict[UUID, Retry | None] = {}
        for message in messages:
            if message.key in held_back:
                stumbled[message.id] = None
            elif message.attempt == 1 and random.random() < 1 / STUMBLES:
                held_back.add(message.key)
                stumbled[message.id] = Retry("the broker stumbled")
        taken = [message for message in messages if message.id not in stumbled]
        # At the end of the batch: others of the same customer come between a message and its double.
        doubles = [message for place, message in enumerate(taken, self.confirmed) if place % REPEATS == 0]
        confirmed = iter(await super().publish_batch([*taken, *doubles]))
        return [stumbled[message.id] if message.id in stumbled else next(confirmed) for message in messages]


@dataclass(slots=True)
class Counter:
    """What the dispatcher and the consumers told."""

    delivered: int = 0
    retries: int = 0
    dead: int = 0
    #: What went through a consumer, duplicates and dead letters included.
    handled: int = 0
    absorbed: int = 0
    buried: int = 0
    down: set[str | None] = field(default_factory=set[str | None])
    outages: int = 0
    recoveries: int = 0

    def listen(self, event: events.Event) -> None:
        """Count an event."""
        match event:
            case events.MessagesDelivered(count):
                self.delivered += count
            case events.Retried() | events.HandlingFailed():
                self.retries += 1
            case events.Died():
                self.dead += 1
            case events.DuplicateSkipped():
                self.absorbed += 1
            case events.DeadLettered():
                self.buried += 1
            case events.BreakerOpened(destination):
                self.down.add(destination)
                self.outages += 1
            case events.BreakerClosed(destination):
                self.down.discard(destination)
                self.recoveries += 1
            case _:
                pass

    async def count(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Count what was handled; a middleware may be a plain method."""
        outputs = await call_next(message)
        self.handled += 1
        return outputs


class _DeclinedError(Exception):
    """The payment was declined, after everything was written."""


class Shop:
    """Takes orders for a while, has them put aside and shipped, through an outage of the broker in the middle third."""

    def __init__(self, folder: Path, *, seconds: float, broker: MemoryBroker | None = None) -> None:
        self.seconds = seconds
        self.broker: MemoryBroker = broker or StumblingBroker(keep=1_000_000)
        self.counter: Counter = Counter()
        self.outage: timedelta = timedelta(0)
        #: The ids of messages whose transactions were rolled back, as the desks saw it.
        self.rolled_back: list[UUID] = []
        self.placed: int = 0
        self._path = folder / "shop.sqlite3"
        self._store = SQLiteStore(self._path, namespace=NAMESPACE)
        self._outbox = Outbox(namespace=NAMESPACE)
        self._dispatcher = Dispatcher(
            self._store,
            self.broker,
            backoff=Backoff(base=100 * MILLISECOND, max=timedelta(seconds=1)),
            outage_backoff=Backoff(base=50 * MILLISECOND, max=250 * MILLISECOND),
            listener=self.counter.listen,
        )
        self._services = (
            stock(
                self.broker.subscribe("orders", group="stock"),
                self._store,
                self.counter.count,
                wake=self._dispatcher.wake,
                listener=self.counter.listen,
            ),
            shipping(
                self.broker.subscribe("stock", group="shipping"),
                self._store,
                self.counter.count,
                listener=self.counter.listen,
            ),
        )
        self._closed = threading.Event()
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """How many seconds ago the shop opened."""
        return time.monotonic() - self._started

    async def stats(self) -> Stats:
        """Ask the store how it is doing."""
        return await self._store.stats()

    async def run(self) -> Verdict:
        """Open, live through it, close, deliver the rest, and count."""
        await self._store.apply_schema()
        with closing(self._connect()) as connection:
            connection.execute(ORDERS)
            for effect in EFFECTS:
                connection.execute(f"CREATE TABLE {effect} (customer TEXT NOT NULL, number INTEGER NOT NULL)")
        self._started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._dispatcher, *self._services):
                    group.create_task(work.run())
                try:
                    await self._trade()
                    await self._drain()
                finally:
                    self._closed.set()
                    for work in (*self._services, self._dispatcher):
                        await work.stop()
            return await self._tally()
        finally:
            await self._store.close()

    async def _trade(self) -> None:
        desks = [asyncio.create_task(asyncio.to_thread(self._serve, desk)) for desk in range(DESKS)]
        try:
            await asyncio.sleep(self.seconds / 3)
            began = time.monotonic()
            self.broker.down()
            await asyncio.sleep(self.seconds / 3)
            await self._until_noticed()
            self.broker.up()
            self.outage = timedelta(seconds=time.monotonic() - began)
            await asyncio.sleep(self.seconds / 3)
        finally:
            self._closed.set()
            await asyncio.gather(*desks)

    async def _until_noticed(self) -> None:
        """Wait until the dispatcher has met the outage; on a busy machine a short one might pass in between."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE.total_seconds()):
                while not self.counter.outages:  # noqa: ASYNC110 -- the counter is told by events
                    await asyncio.sleep(0.01)

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE.total_seconds()):
                while not await self._is_idle():  # noqa: ASYNC110 -- only asking tells
                    await asyncio.sleep(0.05)

    async def _is_idle(self) -> bool:
        """Tell whether nothing is under way: all that the broker took had been handled before the store was empty."""
        handled = self.counter.handled
        stats = await self.stats()
        return not stats.pending and not stats.processing and handled >= self.broker.confirmed

    # -- a desk, on a thread of its own ---------------------------------------------------------------------------

    def _serve(self, desk: int) -> None:
        """Take orders until the shop closes; a customer always comes to the same desk."""
        chance = random.Random()
        numbers = {f"customer-{desk}-{customer}": 1 for customer in range(CUSTOMERS)}
        with closing(self._connect()) as connection:
            while not self._closed.wait(chance.expovariate(PACE)):
                customer = chance.choice(list(numbers))
                with suppress(_DeclinedError):
                    self._place(connection, customer, numbers[customer], declined=chance.random() < DECLINED)
                    numbers[customer] += 1

    def _place(self, connection: sqlite3.Connection, customer: str, number: int, *, declined: bool) -> None:
        order = OrderPlaced(customer, number, cents=random.randrange(100, 10_000))
        with self._transaction(connection):
            added = self._outbox.add(connection, order, topic="orders", key=customer)
            connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (str(added.id), customer, number, order.cents))
            if declined and added.id is not None:
                self.rolled_back.append(added.id)
                raise _DeclinedError
        self.placed += 1
        self._dispatcher.wake()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=PATIENCE.total_seconds(), isolation_level=None)

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection) -> Generator[None]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    # -- the tally, from sources that know nothing of each other --------------------------------------------------

    async def _tally(self) -> Verdict:
        with closing(self._connect()) as connection:
            orders = connection.execute("SELECT message_id, customer, number FROM orders").fetchall()
            effects = [
                connection.execute(f"SELECT customer, number FROM {effect} ORDER BY rowid").fetchall()  # noqa: S608
                for effect in EFFECTS
            ]
        received = self.broker.received
        return Verdict.count(
            committed={UUID(identity): (customer, number) for identity, customer, number in orders},
            rolled_back=self.rolled_back,
            arrived=[(message.id, *_order(message)) for message in received if message.topic == "orders"],
            effects=effects,
            repeated=len(received) - len({message.id for message in received}),
            absorbed=self.counter.absorbed,
            dead=(await self.stats()).dead + self.counter.buried,
            outage=self.outage,
            recovered=self.counter.recoveries > 0 and not self.counter.down,
        )


def _order(message: Message) -> tuple[str, int]:
    order = JSONCodec().decode(message.payload, OrderPlaced)
    return order.customer, order.number
