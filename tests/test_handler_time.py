"""The consumer's timeout: it limits handlers, and nothing that a message waits for before or after its handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncmy
import asyncpg
import psycopg_pool
import pytest

from postroom import Consumer, Message, Router, deadline, events
from postroom.brokers import MemoryBroker
from postroom.errors import RejectError, StoreTimeoutError
from postroom.middleware import DeadlineMiddleware, Middleware, TransactionMiddleware, transactional
from postroom.stores import MySQLStore, PostgresStore, SQLStore
from postroom.stores.sql import source
from postroom.stores.sql.drivers.asyncpg import AsyncpgDriver
from postroom.stores.sql.transactions import SQLTransactions
from postroom.stores.sql.url import Place
from postroom.testing.waiting import until

from .test_transactional import Shop, shop_on
from .test_transactions import LITE, MY, PG

#: The consumer's timeout: handlers that do not hang take a few milliseconds.
TIMEOUT = timedelta(seconds=1)
LONG = timedelta(seconds=60)


def order(number: int) -> Message:
    return Message(topic="orders", type="order.placed", payload=b"%d" % number)


def soon(_: int) -> timedelta:
    return timedelta(milliseconds=10)


class Desk:
    """A consumer of ``count`` orders, and everything that it was told of them."""

    def __init__(self, *middlewares: Middleware, concurrency: int = 30, timeout: timedelta | None = TIMEOUT) -> None:
        self.broker = MemoryBroker()
        self.router = Router()
        self.events: list[events.Event] = []
        self.numbers: dict[Any, int] = {}
        self.consumer = Consumer(
            self.broker.subscribe("orders", group="stock"),
            self.router,
            *middlewares,
            concurrency=concurrency,
            timeout=timeout,
            backoff=soon,
            listener=self.events.append,
        )

    async def put(self, *numbers: int) -> None:
        messages = [order(number) for number in numbers]
        self.numbers.update((message.id, number) for message, number in zip(messages, numbers, strict=True))
        await self.broker.publish_batch(messages)

    def failures(self) -> list[tuple[int, int, str]]:
        """Return number, attempt and error of each message that failed."""
        failed = [event for event in self.events if isinstance(event, events.HandlingFailed | events.DeadLettered)]
        return [(self.numbers[event.message_id], event.attempt, event.error) for event in failed]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        running = asyncio.create_task(self.consumer.run())
        try:
            yield
        finally:
            self.consumer.stop_soon()
            self.consumer.stop_soon()
            async with asyncio.timeout(30):
                await running


@pytest.fixture(params=[LITE, PG, "psycopg", MY])
async def narrow(request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    """A shop whose store has one connection for all handlers."""
    family = PG if request.param == "psycopg" else str(request.param)
    async with shop_on(family, request) as shop:
        if request.param != LITE:
            shop.store = _narrow(request.param, shop.dsn)
        yield shop
        await shop.store.close()


def _narrow(kind: str, dsn: str) -> SQLStore:
    if kind == MY:
        return MySQLStore(dsn, connections=1)
    return PostgresStore(dsn, connections=1, driver="psycopg" if kind == "psycopg" else "asyncpg")


# -- before the handler ------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-25")
async def test_a_message_that_waits_for_a_connection_longer_than_the_timeout_costs_no_attempt(narrow: Shop) -> None:
    """A handler that hangs holds the only connection; it alone spends attempts."""
    desk = Desk(transactional(narrow.store, consumer="stock"))
    handled: list[tuple[int, int]] = []

    @desk.router.on("order.placed")
    async def reserve(number: int, message: Message) -> None:
        if number < 0:
            await asyncio.Event().wait()
        await narrow.write(number)
        handled.append((number, message.attempt))

    await desk.put(-1, -2, *range(1, 11))
    async with desk.open():
        await until(lambda: len(handled) == 10, "the others are handled", within=LONG)

    assert sorted(handled) == [(number, 1) for number in range(1, 11)]
    assert [failure for failure in desk.failures() if failure[0] > 0] == []
    assert {failure[0] for failure in desk.failures()} == {-1, -2}
    assert await narrow.effects() == list(range(1, 11))


@asynccontextmanager
async def pool_of(kind: str, shop: Shop) -> AsyncGenerator[Any]:
    """A pool of the application's, with one connection."""
    pool: Any
    if kind == "asyncpg":
        async with asyncpg.create_pool(shop.dsn, min_size=1, max_size=1) as pool:
            yield pool
    elif kind == "psycopg":
        async with psycopg_pool.AsyncConnectionPool(shop.dsn, min_size=1, max_size=1) as pool:
            yield pool
    else:
        place = Place.parse(shop.dsn, schemes=("mysql",))
        address: dict[str, Any] = {"host": place.host, "port": place.port, "user": place.user, "db": place.database}
        async with asyncmy.create_pool(**address, minsize=1, maxsize=1) as pool:
            yield pool


@pytest.mark.parametrize(
    ("kind", "family"), [("asyncpg", PG), ("psycopg", PG), ("asyncmy", MY)], ids=["asyncpg", "psycopg", "asyncmy"]
)
async def test_a_message_that_waits_for_a_pool_of_yours_longer_than_the_timeout_costs_no_attempt(
    kind: str, family: str, request: pytest.FixtureRequest
) -> None:
    async with shop_on(family, request) as shop, pool_of(kind, shop) as pool:
        desk = Desk(transactional(shop.store, consumer="stock", pool=pool))
        handled: list[tuple[int, int]] = []

        @desk.router.on("order.placed")
        async def reserve(number: int, message: Message) -> None:
            if number < 0:
                await asyncio.Event().wait()
            await shop.write(number)
            handled.append((number, message.attempt))

        await desk.put(-1, -2, 1, 2, 3)
        async with desk.open():
            await until(lambda: len(handled) == 3, "the others are handled", within=LONG)

        assert sorted(handled) == [(1, 1), (2, 1), (3, 1)]
        assert [failure for failure in desk.failures() if failure[0] > 0] == []


@pytest.mark.parametrize("kind", [PG, "psycopg", MY])
async def test_a_message_that_waits_for_the_lock_of_its_mark_costs_no_attempt(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Another worker may have the same message in hand, for as long as its own timeout allows."""
    async with shop_on(MY if kind == MY else PG, request) as shop:
        store = _narrow(kind, shop.dsn)
        desk = Desk(transactional(store, consumer="stock"))
        handled: list[int] = []

        @desk.router.on("order.placed")
        async def reserve(message: Message) -> None:
            handled.append(message.attempt)

        elsewhere = order(1)
        desk.numbers[elsewhere.id] = 1
        marked, leave = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(_mark_and_roll_back(shop, elsewhere, marked, leave))
        await marked.wait()
        await desk.broker.publish_batch([elsewhere])
        async with desk.open():
            await asyncio.sleep(2 * TIMEOUT.total_seconds())  # nothing tells of a message that goes on waiting
            leave.set()
            await other
            await until(lambda: handled == [1], "the message is handled", within=LONG)

        assert desk.failures() == []
        await store.close()


async def _mark_and_roll_back(shop: Shop, message: Message, marked: asyncio.Event, leave: asyncio.Event) -> None:
    with suppress(InterruptedError):
        async with shop.store.transactions().begin() as transaction:
            await shop.store.inbox("stock").admit(transaction, message)
            marked.set()
            await leave.wait()
            raise InterruptedError


async def test_a_plain_handler_that_waits_for_a_thread_costs_no_attempt() -> None:
    desk = Desk()
    release, handled = threading.Event(), list[tuple[int, int]]()

    @desk.router.on("order.placed")
    def reserve(number: int, message: Message) -> None:
        if number < 0 and message.attempt == 1:
            release.wait(60)
        handled.append((number, message.attempt))

    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        await desk.put(-1, 1)
        async with desk.open():
            await asyncio.sleep(2 * TIMEOUT.total_seconds())  # the first is late, and its thread is not free yet
            release.set()
            await until(lambda: (1, 1) in handled, "the second is handled", within=LONG)
            await until(lambda: len(desk.failures()) == 1, "the first has failed", within=LONG)

    assert [failure[:2] for failure in desk.failures()] == [(-1, 1)]


async def test_a_dead_letter_that_waits_for_the_writer_of_sqlite_is_stored_once(request: pytest.FixtureRequest) -> None:
    async with shop_on(LITE, request) as shop:
        desk = Desk(transactional(shop.store, consumer="stock"))

        @desk.router.on("order.placed")
        async def reserve(number: int) -> None:
            if number < 0:
                await asyncio.Event().wait()
            raise RejectError("no such article")

        await desk.put(1, -1, -2, -3)
        async with desk.open():
            await until(_is_dead(shop), "the dead letter is stored", within=LONG)

        told = [event for event in desk.events if isinstance(event, events.HandlingFailed)]
        assert 1 not in {desk.numbers[event.message_id] for event in told}


def _is_dead(shop: Shop) -> Callable[[], Awaitable[bool]]:
    async def is_dead() -> bool:
        return await shop.dead() == 1

    return is_dead


# -- after the handler -------------------------------------------------------------------------------------------

#: Makes every COMMIT of an effect take longer than the timeout.
SLOW_COMMIT = (
    "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2.5); RETURN NULL; END $$",
    """CREATE CONSTRAINT TRIGGER dawdling AFTER INSERT ON business DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION dawdle()""",
)


async def test_a_deadline_inside_a_transaction_has_ended_when_it_commits(request: pytest.FixtureRequest) -> None:
    """The page says to put it there, so that messages that came too late are remembered as handled."""
    async with shop_on(LITE, request) as shop:
        desk = Desk(transactional(shop.store, consumer="stock"), DeadlineMiddleware())

        @desk.router.on("order.placed")
        async def reserve(number: int) -> None:
            await shop.write(number)

        expiry = (datetime.now(UTC) + LONG).isoformat()
        async with desk.open():
            await desk.broker.publish_batch([replace(order(1), headers={"ce-expirytime": expiry})])
            await until(lambda: desk.broker.backlog("stock") == 0, "the message is settled", within=LONG)

        assert await shop.effects() == [1]
        assert [event for event in desk.events if isinstance(event, events.HandlingFailed)] == []


@pytest.mark.parametrize("outermost", [(), (DeadlineMiddleware(),)], ids=["timeout", "expiry"])
async def test_a_message_whose_commit_takes_longer_than_its_time_is_handled(
    outermost: tuple[Middleware, ...], request: pytest.FixtureRequest
) -> None:
    """What was stored must not be reported as late, nor as expired."""
    async with shop_on(PG, request) as shop:
        for statement in SLOW_COMMIT:
            await asyncio.to_thread(shop.ask, statement)
        desk = Desk(*outermost, transactional(shop.store, consumer="stock"), timeout=None if outermost else TIMEOUT)

        @desk.router.on("order.placed")
        async def reserve(number: int) -> None:
            await shop.write(number)

        expiry = (datetime.now(UTC) + 2 * TIMEOUT).isoformat()
        async with desk.open():
            await desk.broker.publish_batch([replace(order(1), headers={"ce-expirytime": expiry} if outermost else {})])
            await until(lambda: desk.broker.backlog("stock") == 0, "the message is settled", within=LONG)

        assert await shop.effects() == [1]
        told = [event for event in desk.events if isinstance(event, events.HandlingFailed | events.DeadLettered)]
        assert told == []
        assert desk.broker.dead("stock") == []


# -- what limits the waiting -------------------------------------------------------------------------------------


async def test_a_pool_that_never_gives_a_connection_costs_no_attempt_and_is_reported(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message must not wait for ever, nor be blamed for a pool whose connections are gone."""
    monkeypatch.setattr(deadline, "STALLED", 0.1)
    async with shop_on(PG, request) as shop, pool_of("asyncpg", shop) as pool:
        desk = Desk(transactional(shop.store, consumer="stock", pool=pool), timeout=timedelta(milliseconds=200))
        handled: list[int] = []

        @desk.router.on("order.placed")
        async def reserve(message: Message) -> None:
            handled.append(message.attempt)

        async with desk.open():
            async with pool.acquire():
                await desk.put(1)
                await until(lambda: len(desk.failures()) >= 3, "the message is given back", within=LONG)
            await until(lambda: handled != [], "the message is handled", within=LONG)

        assert handled == [1]
        assert {attempt for _, attempt, _ in desk.failures()} == {1}
        assert "waited 0.3 s for its transaction" in desk.failures()[0][2]


async def test_a_consumer_stops_while_its_messages_wait_for_the_writer(request: pytest.FixtureRequest) -> None:
    async with shop_on(LITE, request) as shop:
        desk = Desk(transactional(shop.store, consumer="stock"), timeout=None)
        begun = asyncio.Event()

        @desk.router.on("order.placed")
        async def reserve() -> None:
            begun.set()
            await asyncio.Event().wait()

        await desk.put(1, 2, 3)
        async with desk.open():
            await begun.wait()

        assert desk.failures() == []
        assert desk.broker.backlog("stock") == 3
        [stopped] = [event for event in desk.events if isinstance(event, events.ConsumerStopped)]
        assert stopped.released == 3


class HalfOpen:
    """A pool and its connection, which is lost without the client hearing of it: BEGIN is never answered."""

    is_closed = False

    async def acquire(self) -> HalfOpen:
        return self

    def transaction(self) -> HalfOpen:
        return self

    async def start(self) -> None:
        await asyncio.Event().wait()

    def terminate(self) -> None:
        self.is_closed = True

    async def release(self, _: HalfOpen) -> None: ...


async def test_a_begin_that_is_never_answered_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other messages move on, nothing else would ever end it: it passes for one that waits in a queue."""
    pool = HalfOpen()
    monkeypatch.setattr(source, "BEGINNING", timedelta(milliseconds=50))
    middleware = TransactionMiddleware("unused.db")
    middleware.transactions = SQLTransactions(source.Source(AsyncpgDriver(), pool, is_limited=True))

    with pytest.raises(StoreTimeoutError, match="no transaction began") as caught:
        async with asyncio.timeout(10):
            await middleware(Message(topic="t", type="t", payload=b"{}"), Router())

    assert caught.value.is_outage
    assert pool.is_closed


async def test_a_handler_that_hands_messages_on_has_its_time_but_once(request: pytest.FixtureRequest) -> None:
    """Each of them begins a transaction of its own, which waits for a connection and then runs."""
    async with shop_on(LITE, request) as shop:
        inner, handed_on = Router(), 0

        @inner.on("order.placed")
        async def reserve(number: int) -> None:
            nonlocal handed_on
            handed_on += 1
            await asyncio.sleep(0.05)

        hand_on = partial(TransactionMiddleware(shop.store), call_next=inner)
        desk = Desk()

        @desk.router.on("order.placed")
        async def split(message: Message) -> None:
            while True:
                await hand_on(message)

        async with desk.open():
            await desk.put(1)
            await until(lambda: bool(desk.failures()), "the handler is out of time", within=LONG)

        assert desk.failures()[0][2].startswith("TimeoutError: the handler did not end within")
        assert handed_on > 0


async def test_another_time_limit_counts_again_when_a_transaction_is_repeated() -> None:
    """It is switched off for COMMIT, which may fail by contention; then the handler runs once more."""
    async with asyncio.timeout(3600) as expiry:
        until_then = expiry.when()
        work = deadline.Within(deadline.Limit(LONG))
        work.excuse(expiry)
        work.wait()
        work.run()
        work.commit()
        assert expiry.when() is None
        work.run()
        assert expiry.when() is None, "it may have been committed"

        work.wait()
        await asyncio.sleep(0)

        assert expiry.when() == until_then
        work.end()
