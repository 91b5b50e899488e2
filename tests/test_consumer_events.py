"""What a consumer's listener hears: every event of its messages once, whichever middleware it comes from."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import redis.asyncio

from postroom import Consumer, Message, Outcome, Router, events
from postroom.broker import Subscriber
from postroom.brokers import MemoryBroker
from postroom.dead_letters import StoredDeadLetters
from postroom.delivery import Delivery
from postroom.errors import PartlyAppliedError, RejectError
from postroom.message import uuid7
from postroom.middleware import (
    DeadLetterMiddleware,
    EventsMiddleware,
    InboxMiddleware,
    Middleware,
    OutboxMiddleware,
    TransactionMiddleware,
    transactional,
)
from postroom.stores import SQLiteStore
from postroom.stores.redis import RedisInbox, RedisTransactions, current_pipeline
from postroom.testing.waiting import until

from .test_transactional import Shop, shop_on
from .test_transactions import LITE, MY, PG

LONG = timedelta(seconds=60)
EventT = TypeVar("EventT", bound=events.Event)


def order(**parts: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=b"{}", **parts)


class Desk:
    """A consumer with a listener, and a broker that hands it messages."""

    def __init__(self, *middlewares: Middleware, subscriber: Subscriber | None = None, **options: Any) -> None:  # noqa: ANN401
        self.broker = MemoryBroker()
        self.router = Router()
        self.heard: list[events.Event] = []
        subscriber = subscriber or self.broker.subscribe("orders", group="stock")
        self.consumer = Consumer(subscriber, self.router, *middlewares, listener=self.heard.append, **options)

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.heard if isinstance(event, kind)]

    async def hears(self, kind: type[events.Event], count: int = 1) -> None:
        await until(lambda: len(self.of(kind)) >= count, f"{kind.__name__} is reported", within=LONG)

    async def idle(self) -> None:
        await until(lambda: self.broker.backlog("stock") == 0, "every message is settled", within=LONG)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        running = asyncio.create_task(self.consumer.run())
        try:
            yield
        finally:
            await self.consumer.stop()
            await running


@pytest.fixture
async def shop(request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    async with shop_on(LITE, request) as opened:
        yield opened


def whole(shop: Shop, listener: events.Listener | None = None) -> tuple[Middleware, ...]:
    """The whole stack as one middleware."""
    return (transactional(shop.store, consumer="stock", max_attempts=2, listener=listener),)


def single(shop: Shop, listener: events.Listener | None = None) -> tuple[Middleware, ...]:
    """The same stack of single middlewares."""
    inbox, transaction = shop.store.inbox("stock"), TransactionMiddleware(shop.store)
    return (
        DeadLetterMiddleware(StoredDeadLetters(inbox, transaction.transactions), max_attempts=2, listener=listener),
        transaction,
        InboxMiddleware(inbox, listener=listener),
        OutboxMiddleware(shop.store.outbox()),
    )


STACKS = pytest.mark.parametrize("stack", [whole, single])
Stack = Callable[..., tuple[Middleware, ...]]


@STACKS
async def test_a_handled_message_is_reported_once(shop: Shop, stack: Stack) -> None:
    desk = Desk(*stack(shop))
    message = order()

    @desk.router.on("order.placed")
    async def reserve() -> None:
        await shop.write(1)

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()

    [handled] = desk.of(events.Handled)
    assert (handled.message_id, handled.type) == (message.id, "order.placed")
    assert handled.duration > timedelta(0)
    assert {type(event) for event in desk.heard} == {events.ConsumerStarted, events.Handled, events.ConsumerStopped}


@STACKS
async def test_a_duplicate_is_reported_as_skipped_and_not_as_handled(shop: Shop, stack: Stack) -> None:
    desk = Desk(*stack(shop))
    message = order()

    @desk.router.on("order.placed")
    async def reserve() -> None: ...

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()
        await desk.broker.publish_batch([message])
        await desk.idle()

    assert [event.message_id for event in desk.of(events.Handled)] == [message.id]
    assert [event.message_id for event in desk.of(events.DuplicateSkipped)] == [message.id]


@STACKS
async def test_a_dead_letter_is_reported_once_and_not_as_handled(shop: Shop, stack: Stack) -> None:
    desk = Desk(*stack(shop))
    message = order()

    @desk.router.on("order.placed")
    async def reserve() -> None:
        raise RejectError("no such article")

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()

    [dead] = desk.of(events.DeadLettered)
    assert (dead.message_id, dead.attempt) == (message.id, 1)
    assert desk.of(events.Handled) == []
    assert await shop.dead() == 1


@STACKS
async def test_a_failure_is_reported_for_each_attempt(shop: Shop, stack: Stack) -> None:
    desk = Desk(*stack(shop), backoff=lambda _: timedelta(milliseconds=1))

    @desk.router.on("order.placed")
    async def reserve() -> None:
        raise RuntimeError("out of shelves")

    async with desk.open():
        await desk.broker.publish_batch([order()])
        await desk.idle()

    assert [event.attempt for event in desk.of(events.HandlingFailed)] == [1]
    assert [event.attempt for event in desk.of(events.DeadLettered)] == [2]


@STACKS
async def test_one_listener_that_is_given_to_everything_hears_each_event_once(shop: Shop, stack: Stack) -> None:
    heard: list[events.Event] = []
    desk = Desk(EventsMiddleware(heard.append), *stack(shop, heard.append))
    desk.heard = heard
    desk.consumer = Consumer(
        desk.broker.subscribe("orders", group="stock"),
        desk.router,
        EventsMiddleware(heard.append),
        *stack(shop, heard.append),
        listener=heard.append,
        backoff=lambda _: timedelta(milliseconds=1),
    )
    first, second = order(), order()

    @desk.router.on("order.placed")
    async def reserve(message: Message) -> None:
        if message.id == second.id:
            raise RuntimeError("out of shelves")

    async with desk.open():
        for message in (first, first, second):
            await desk.broker.publish_batch([message])
            await desk.idle()

    kinds = (events.Handled, events.DuplicateSkipped, events.HandlingFailed, events.DeadLettered)
    assert [len(desk.of(kind)) for kind in kinds] == [1, 1, 1, 1]


@STACKS
async def test_a_listener_of_a_middleware_hears_its_events_beside_the_consumers(shop: Shop, stack: Stack) -> None:
    own: list[events.Event] = []
    desk = Desk(*stack(shop, own.append))
    message = order()

    @desk.router.on("order.placed")
    async def reserve() -> None: ...

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()
        await desk.broker.publish_batch([message])
        await desk.idle()

    assert [type(event) for event in own] == [events.DuplicateSkipped]
    assert len(desk.of(events.DuplicateSkipped)) == 1


async def test_a_message_that_a_handler_hands_on_does_not_hide_that_its_own_was_handled(shop: Shop) -> None:
    desk = Desk(*whole(shop))
    message, inner = order(), order()
    nested = transactional(shop.store, consumer="nested", max_attempts=None)

    async def nothing(_: Message) -> list[Message]:
        return []

    @desk.router.on("order.placed")
    async def reserve() -> None:
        await nested(inner, nothing)
        await nested(inner, nothing)

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()

    assert [event.message_id for event in desk.of(events.DuplicateSkipped)] == [inner.id]
    assert [event.message_id for event in desk.of(events.Handled)] == [message.id]


async def test_an_acknowledgement_that_fails_is_reported() -> None:
    message = order(attempt=1)

    async def refuse(_: Outcome) -> None:
        raise ConnectionError("the broker is gone")

    desk = Desk()

    @desk.router.on("order.placed")
    async def reserve() -> None: ...

    await desk.consumer.handle(Delivery(message, refuse))

    assert [event.message_id for event in desk.of(events.AckFailed)] == [message.id]
    assert len(desk.of(events.Handled)) == 1


async def test_a_transaction_that_was_applied_in_part_is_reported(redis_url: str) -> None:
    """Only ``mode="multi"`` meets it: a command there may fail after another one was applied."""
    client = redis.asyncio.Redis.from_url(redis_url, retry=None)
    transactions = RedisTransactions(client, mode="multi", tag=f"t{uuid7().hex}", profile="volatile")
    desk = Desk(TransactionMiddleware(transactions), InboxMiddleware(RedisInbox("stock")))

    @desk.router.on("order.placed")
    async def reserve() -> None:
        pipeline: Any = current_pipeline(None)
        await pipeline.set(transactions.key("text"), "a")
        await pipeline.incr(transactions.key("text"))

    async with desk.open():
        await desk.broker.publish_batch([order()])
        await desk.hears(events.PartlyApplied)
        await desk.idle()

    await client.aclose()
    assert len(desk.of(events.PartlyApplied)) == 1
    assert PartlyAppliedError.__name__ in desk.of(events.HandlingFailed)[0].error


# -- cleaning the inbox ------------------------------------------------------------------------------------------


#: So short that every mark is past it, and how often that is looked for.
RETENTION, OFTEN = timedelta(milliseconds=1), timedelta(milliseconds=10)


def cleaned_whole(shop: Shop) -> tuple[Middleware, ...]:
    return (transactional(shop.store, consumer="stock", retention=RETENTION, cleanup_interval=OFTEN),)


def cleaned_single(shop: Shop) -> tuple[Middleware, ...]:
    inbox = shop.store.inbox("stock", retention=RETENTION)
    return TransactionMiddleware(shop.store), InboxMiddleware(inbox, cleanup_interval=OFTEN)


@pytest.mark.requirement("S1-05", "S1-38", "S1-40")
@pytest.mark.parametrize("stack", [cleaned_whole, cleaned_single])
@pytest.mark.parametrize("family", [PG, MY, LITE])
async def test_every_stack_cleans_its_inbox(request: pytest.FixtureRequest, family: str, stack: Stack) -> None:
    """Marks would grow for ever, in a stack of single middlewares as in the whole one."""
    async with shop_on(family, request) as shop:
        async with TransactionMiddleware(shop.store).transactions.begin() as opened:
            for _ in range(3):
                await shop.store.inbox("stock").admit(opened, replace(order(), id=uuid7()))
        desk = Desk(*stack(shop))

        async with desk.open():
            await until(lambda: sum(event.count for event in desk.of(events.InboxPurged)) == 3, "it", within=LONG)

        assert await shop.marks() == 0


@pytest.mark.requirement("S1-05", "S1-38")
async def test_an_inbox_in_redis_forgets_by_itself_in_every_stack(redis_url: str) -> None:
    """A mark ends with its retention, and the cleanup finds nothing to do, nor to complain of."""
    client = redis.asyncio.Redis.from_url(redis_url, retry=None)
    transactions = RedisTransactions(client, tag=f"t{uuid7().hex}", profile="volatile")
    inbox, message = RedisInbox("stock", retention=timedelta(hours=1)), order()
    cleaning = InboxMiddleware(inbox, cleanup_interval=timedelta(milliseconds=1))
    desk = Desk(TransactionMiddleware(transactions), cleaning)

    @desk.router.on("order.placed")
    async def reserve() -> None: ...

    async with desk.open():
        await desk.broker.publish_batch([message])
        await desk.idle()

    left = await client.pttl(inbox.key(transactions.tag, message))
    await client.aclose()
    assert 0 < left <= 3_600_000
    assert len(desk.of(events.Handled)) == 1
    assert desk.of(events.StoreFailed) == []


async def test_an_inbox_in_transactions_of_your_own_is_cleaned_after_the_first_message(shop: Shop) -> None:
    inbox = shop.store.inbox("stock", retention=timedelta(milliseconds=1))
    around = TransactionMiddleware(shop.store)

    class Own:
        layer = TransactionMiddleware.layer

        async def __call__(self, message: Message, call_next: Any) -> Any:  # noqa: ANN401
            return await around(message, call_next)

    desk = Desk(Own(), InboxMiddleware(inbox, cleanup_interval=timedelta(milliseconds=10)))

    @desk.router.on("order.placed")
    async def reserve() -> None: ...

    async with desk.open():
        await desk.broker.publish_batch([order()])
        await desk.hears(events.InboxPurged)

    assert await shop.marks() == 0


async def test_an_inbox_that_cannot_be_cleaned_is_reported_and_cleaned_later(shop: Shop) -> None:
    inbox = shop.store.inbox("stock", retention=timedelta(milliseconds=1))
    transaction = TransactionMiddleware(SQLiteStore(shop.dsn, timeout=timedelta(milliseconds=100)))
    async with shop.store.transactions().begin() as opened:
        await inbox.admit(opened, order())
    desk = Desk(transaction, InboxMiddleware(inbox, cleanup_interval=timedelta(milliseconds=10)))

    with closing(sqlite3.connect(shop.dsn, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with desk.open():
            await desk.hears(events.StoreFailed)
            other.execute("ROLLBACK")
            await desk.hears(events.InboxPurged)

    assert [event.operation for event in desk.of(events.StoreRecovered)] == ["purge inbox"]
