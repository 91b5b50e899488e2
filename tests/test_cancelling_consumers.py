"""Consumers, cancelled at each of their awaits: nothing stays open, and after a redelivery the effect is there once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest

from postroom import Consumer, Delivered, Delivery, Message, Outcome, Router, Transaction, transactional
from postroom.brokers import MemoryBroker
from postroom.inbox import Mode
from postroom.middleware import InboxMiddleware, OutboxMiddleware, TransactionMiddleware
from postroom.stores import SQLStore
from postroom.testing.cancelling import Cut, cuts
from postroom.testing.faults import FaultProxy
from postroom.testing.waiting import until

from . import test_cancelling as stores
from .test_cancelling import CONNECTIONS, SECOND, Site, both_moments, on

site = stores.site

#: Beside its own connections a store has as many for the transactions of handlers.
ALL_CONNECTIONS = 2 * CONNECTIONS
OUTPUTS = 2
NOTHING = (0, 0, 0)
ALL = (1, 1, OUTPUTS)
on_sql = on("sqlite", "asyncpg", "psycopg", "asyncmy")


def message(key: str | None = None) -> Message:
    return Message(topic="orders", type="order.placed", payload=b"{}", key=key, attempt=1)


async def execute(transaction: Transaction, sql: str) -> None:
    connection = transaction.connection
    if isinstance(connection, sqlite3.Connection):
        await transaction.call(connection.execute, sql)
    elif type(connection).__module__.startswith("asyncmy"):
        async with connection.cursor() as cursor:
            await cursor.execute(sql)
    else:
        await connection.execute(sql)


async def handle(placed: Message, transaction: Transaction) -> list[Message]:
    """Have an effect, and return two messages."""
    await execute(transaction, f"INSERT INTO handled (id) VALUES ('{placed.id}')")
    return [Message(topic="out", type="done", payload=b"{}", headers={"cause": str(placed.id)}) for _ in range(OUTPUTS)]


def router() -> Router:
    made = Router()
    made.add("order.placed", handle)
    return made


@dataclass
class Desk:
    """A consumer, and what its broker was told of each message."""

    site: Site
    store: SQLStore
    consumer: Consumer
    name: str
    told: dict[UUID, list[Outcome]] = field(default_factory=dict[UUID, list[Outcome]])

    def deliver(self, delivered: Message) -> Delivery:
        async def settle(outcome: Outcome) -> None:
            await asyncio.sleep(0)  # a broker that is told of it over a network
            self.told.setdefault(delivered.id, []).append(outcome)

        return Delivery(delivered, settle)

    def is_acked(self, delivered: Message) -> bool:
        return Delivered() in self.told.get(delivered.id, [])

    def state(self, delivered: Message) -> tuple[int, int, int]:
        """Return how many effects, marks and outputs of a message are committed."""
        return state(self.site, self.name, delivered)

    async def serves(self, cut: Cut) -> None:
        """See that there are connections for everybody: of those that a cut lost, none would be left soon."""
        others = [message() for _ in range(CONNECTIONS)]
        try:
            async with asyncio.timeout(10):
                await asyncio.gather(*[self.consumer.handle(self.deliver(other)) for other in others])
        except TimeoutError:
            raise AssertionError(f"{cut}: the consumer serves nobody any more") from None
        assert [self.state(other) for other in others] == [ALL] * CONNECTIONS, cut


def state(site: Site, consumer: str, delivered: Message) -> tuple[int, int, int]:
    identity = f"x'{delivered.id.hex}'" if site.kind == "asyncmy" else f"'{delivered.id}'"
    texts = (
        f"SELECT count(*) FROM handled WHERE id = '{delivered.id}'",
        f"SELECT count(*) FROM postroom_inbox WHERE consumer = '{consumer}' AND message_id = {identity}",
        f"SELECT count(*) FROM postroom_outbox WHERE CAST(headers AS char(2000)) LIKE '%{delivered.id}%'",
    )
    effects, marks, outputs = (site.run(text)[0][0] for text in texts)
    return effects, marks, outputs


@asynccontextmanager
async def opened(site: Site) -> AsyncIterator[SQLStore]:
    """Open a store beside the table of the handler, and see that nothing holds a lock in the end."""
    site.run("CREATE TABLE IF NOT EXISTS handled (id varchar(36) NOT NULL)")
    async with stores.opened(site) as store:
        assert isinstance(store, SQLStore)
        yield store
        if site.kind == "asyncmy":
            site.run("SELECT consumer FROM postroom_inbox FOR UPDATE NOWAIT")
    if site.kind != "sqlite":
        await until(lambda: not site.sessions(), "the end of all connections")


@asynccontextmanager
async def desk(site: Site, mode: Mode = "pessimistic") -> AsyncIterator[Desk]:
    """Set up a consumer with the whole stack."""
    async with opened(site) as store:
        name = f"consumer-{uuid4().hex}"
        stack = transactional(store, consumer=name, mode=mode, listener=lambda _: None)
        yield Desk(site, store, _consumer(stack), name)


def _consumer(*middlewares: object) -> Consumer:
    reader = MemoryBroker().subscribe("orders", group="unused")
    return Consumer(reader, router(), *middlewares, listener=lambda _: None)  # type: ignore[arg-type]


async def is_legal(desk: Desk, cut: Cut, delivered: Message) -> None:
    """See that all of it happened or nothing, all if it was acknowledged, and all of it once after a redelivery."""
    await desk.site.is_quiet(cut, connections=ALL_CONNECTIONS)
    assert desk.state(delivered) in ({ALL} if desk.is_acked(delivered) or not cut.happened else {NOTHING, ALL}), cut
    for _ in range(ALL_CONNECTIONS):  # every idle connection may be broken
        if await desk.consumer.handle(desk.deliver(delivered)) and desk.is_acked(delivered):
            break
    assert desk.is_acked(delivered), cut
    assert desk.state(delivered) == ALL, cut


@pytest.mark.requirement("G1", "G7", "G8", "F-17", "F-20", "S1-01", "S1-21")
@on_sql
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_a_cancelled_handling_has_happened_or_has_not(site: Site, mode: Mode) -> None:
    """With the whole stack, cut at every await of it."""
    async with desk(site, mode) as at:
        for cut in both_moments():
            delivered = message()

            await cut.run(at.consumer.handle(at.deliver(delivered)))

            await is_legal(at, cut, delivered)
            await at.serves(cut)


@pytest.mark.requirement("F-14", "F-20", "S1-02")
@on_sql
async def test_a_cancelled_stack_of_middlewares_has_happened_or_has_not(site: Site) -> None:
    """The same for one that is put together by hand."""
    async with opened(site) as store:
        name = f"consumer-{uuid4().hex}"
        consumer = _consumer(
            TransactionMiddleware(store),
            InboxMiddleware(store.inbox(name), listener=lambda _: None),
            OutboxMiddleware(store.outbox()),
        )
        at = Desk(site, store, consumer, name)
        for cut in cuts(moment="answered"):
            delivered = message()

            await cut.run(consumer.handle(at.deliver(delivered)))

            await is_legal(at, cut, delivered)


@contextmanager
def proxied(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a URL that leads through a proxy, and what cuts it; its loop is its own, so that none of it is counted."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(10)

    async def cut() -> None:
        proxy.cut()

    parts = urlsplit(url)
    proxy = FaultProxy(parts.hostname or "", parts.port or 0)
    try:
        run(proxy.__aenter__())
        login, at, _ = parts.netloc.rpartition("@")
        yield parts._replace(netloc=f"{login}{at}127.0.0.1:{proxy.port}").geturl(), lambda: run(cut())
        run(proxy.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.requirement("G1", "G8", "G12", "S1-19", "S1-27")
@on("asyncpg", "psycopg", "asyncmy")
async def test_a_connection_that_breaks_at_any_await_changes_nothing_by_halves(site: Site) -> None:
    """Wherever it breaks, the message is not acknowledged unless all of it is stored."""
    with proxied(site.url) as (url, break_off):
        async with desk(replace(site, url=url)) as at:
            for cut in cuts(fault=break_off):
                delivered = message()

                await cut.run(at.consumer.handle(at.deliver(delivered)))

                await is_legal(at, cut, delivered)
                await at.serves(cut)


@pytest.mark.requirement("G8", "F-20", "F-25", "S1-21")
@on_sql
async def test_a_handling_whose_time_is_over_at_any_await_has_happened_or_has_not(site: Site) -> None:
    """As if it was cancelled, but told as a failure of the message."""
    async with desk(site) as at:
        limit = at.consumer._limit  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

        def expire() -> None:
            for work in list(limit.watched):
                del limit.watched[work]
                work.expire()

        for cut in cuts(fault=expire):
            delivered = message()

            await cut.run(at.consumer.handle(at.deliver(delivered)))

            await is_legal(at, cut, delivered)
            await at.serves(cut)


def _moment(site: Site) -> Iterator[Cut]:
    return cuts(moment="waiting" if site.kind == "sqlite" else "answered")


@pytest.mark.requirement("G7", "G8", "F-20", "F-25")
@on_sql
async def test_a_cancelled_consumer_gives_back_what_it_held(site: Site) -> None:
    """The whole of it, with its broker; the next one has each effect once, keys in order."""
    async with opened(site) as store:
        for cut in _moment(site):
            broker, name = MemoryBroker(), f"consumer-{uuid4().hex}"
            messages = [message("a"), message("a"), message()]

            consume = partial(_until_handled, site, store, broker, name, messages)
            broker.subscribe("orders", group="stock")
            await broker.publish_batch(messages)

            await cut.run(consume())

            await site.is_quiet(cut, connections=ALL_CONNECTIONS)
            states = [state(site, name, one) for one in messages]
            assert set(states) <= {NOTHING, ALL}, cut
            assert states[:2] != [NOTHING, ALL], f"{cut}: out of order"
            await consume()
            assert [state(site, name, one) for one in messages] == [ALL] * 3, cut
            await _is_empty(broker, cut)


async def _until_handled(site: Site, store: SQLStore, broker: MemoryBroker, name: str, messages: list[Message]) -> None:
    """Run a consumer until there is an effect of every message and the broker has heard of it."""
    consumer = Consumer(
        broker.subscribe("orders", group="stock"),
        router(),
        transactional(store, consumer=name, listener=lambda _: None),
        backoff=lambda _: timedelta(0),
        shutdown_grace=10 * SECOND,
        listener=lambda _: None,
    )
    running = asyncio.create_task(consumer.run())
    try:
        while not running.done() and any(state(site, name, one) != ALL for one in messages):
            await asyncio.wait({running}, timeout=0.005)
    finally:
        await asyncio.shield(asyncio.create_task(_stopped(consumer, running)))


async def _stopped(consumer: Consumer, running: asyncio.Task[None]) -> None:
    consumer.stop_soon()
    await running


async def _is_empty(broker: MemoryBroker, cut: Cut) -> None:
    """See that nothing is left for the group."""
    async with broker.subscribe("orders", group="stock") as deliveries:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                left = await anext(deliveries)
                pytest.fail(f"{cut}: {left} is still there")


# -- the broker in memory --------------------------------------------------------------------------------------------


async def _read(broker: MemoryBroker, acked: list[UUID], late: list[Message], wanted: int) -> None:
    """Acknowledge so many messages, some of which come while this waits."""
    async with broker.subscribe("orders", group="stock") as deliveries:
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, broker.publish_batch(late))
        async for delivery in deliveries:
            await asyncio.sleep(0)
            await delivery.ack()
            acked.append(delivery.message.id)
            if len(acked) == wanted:
                return


@pytest.mark.requirement("G2", "G6")
async def test_a_cancelled_reader_of_the_broker_in_memory_loses_nothing() -> None:
    """What was acknowledged is gone, everything else comes again, and no attempt was spent on it."""
    for cut in both_moments():
        broker = MemoryBroker()
        messages = [message("a"), message("a"), message(), message("a")]
        acked: list[UUID] = []
        broker.subscribe("orders", group="stock")
        await broker.publish_batch(messages[:2])

        await cut.run(_read(broker, acked, messages[2:], len(messages)))

        async with asyncio.timeout(10), broker.subscribe("orders", group="stock") as deliveries:
            while len(acked) < len(messages):
                delivery = await anext(deliveries)
                assert delivery.message.attempt == 1, f"{cut}: given back, and yet an attempt was spent"
                await delivery.ack()
                acked.append(delivery.message.id)
        assert sorted(acked) == sorted(one.id for one in messages), f"{cut}: lost, or handed out after it was acked"
        assert [n for n in acked if n != messages[2].id] == [messages[n].id for n in (0, 1, 3)], f"{cut}: out of order"
        await _is_empty(broker, cut)


async def _take(deliveries: AsyncIterator[Delivery]) -> None:
    await (await anext(deliveries)).ack()


@pytest.mark.requirement("G2")
async def test_a_cancelled_reader_wakes_another_one_that_waits() -> None:
    """A message that came with the cancellation goes to whoever waits behind."""
    for cut in both_moments():
        broker = MemoryBroker()
        first, second = (broker.subscribe("orders", group="stock") for _ in range(2))
        async with asyncio.timeout(5), first, second:
            taking = asyncio.create_task(cut.run(_take(first)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting = asyncio.create_task(_take(second))
            await asyncio.sleep(0)
            await broker.publish_batch([message()])
            await taking
            if not cut.happened:
                await broker.publish_batch([message()])
            await waiting
        await _is_empty(broker, cut)
