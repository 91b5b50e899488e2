"""The flow that the design of transactions in Redis promises: thirteen steps, and the short way of a duplicate.

Each test ends with the list of steps in the words of that document; each step is noted where it happens, and looks at
the server from outside where that document says what is there by then. In two things the steps differ from the
document, which loses a message whose handler crashes: what is marked first is a claim with a lease, and the mark that
stays is written together with the effect, so that the inbox returns before everything is executed and not after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, get_args

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from examples.orders.handlers import OrderPlaced, PlaceOrder, order_router
from examples.orders.repository import RedisOrders
from postroom import Consumer, Dispatcher, Message, events
from postroom.brokers import MemoryBroker
from postroom.middleware import InboxMiddleware, Middleware, Next, OutboxMiddleware, TransactionMiddleware
from postroom.stores.redis import RedisInbox, RedisStreamStore, RedisTransactions, current_pipeline
from postroom.stores.redis.transactions import CommitMode
from postroom.testing.failpoints import Failpoints
from postroom.testing.taps import TappedPublisher, TappedStore, TappedSubscriber
from postroom.transaction import in_transaction

SERVICE = "order-service"
NAMESPACE = "shop"

# The library's own types name neither commands nor what they answer.
Foreign: TypeAlias = Any


class NotedOrders(RedisOrders):
    """The adapter of the example, which notes when it was called."""

    def __init__(self, client: Foreign, note: Callable[[str], None]) -> None:
        super().__init__(client, NAMESPACE)
        self._note = note

    async def save(self, order: PlaceOrder) -> None:
        await super().save(order)
        self._note("7. Handler: saves the order; its adapter queues HSET on the pipeline")


@dataclass
class Shop:
    """A server, what runs on it, and the steps that were noted so far."""

    client: Foreign
    command: Message
    mode: CommitMode
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    inbox: RedisInbox = field(default_factory=lambda: RedisInbox(SERVICE, retention=timedelta(hours=24)))
    steps: list[str] = field(default_factory=list[str])
    seen: list[events.Event] = field(default_factory=list[events.Event])

    def __post_init__(self) -> None:
        self.store = RedisStreamStore(self.client, namespace=NAMESPACE)
        self.transactions = RedisTransactions(self.client, tag=NAMESPACE, mode=self.mode)
        self.orders = NotedOrders(self.client, self.steps.append)

    async def mark(self) -> str:
        """Return what the inbox has of the command: nothing, a claim (p) or that it is done."""
        state: bytes | None = await self.client.get(self.inbox.key(NAMESPACE, self.command))
        return (state or b"").decode().partition(":")[0]

    async def there(self) -> tuple[str, int, int]:
        """Return what others see: the mark, how many orders there are, and how many entries in the outbox."""
        orders = len(await self.client.keys(self.orders.key("*")))
        return await self.mark(), orders, await self.client.xlen(self.store.outbox().stream)

    def around(self) -> Middleware:
        """Stand between the acknowledgement and the transaction."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            before = await self.there()
            self.steps.extend(("2. Router receives the message", "3. Acking (outermost) calls next"))
            outputs = await call_next(message)
            assert (in_transaction(), outputs) == (None, ())
            if await self.there() != before:
                assert await self.there() == ("done", 1, 1)
                self.steps.append("12. Tx: executes HSET, XADD and the mark, all together")
            return outputs

        return noting

    def outside_inbox(self) -> Middleware:
        """Stand between the transaction and the inbox."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            before = await self.there()
            outputs = await call_next(message)
            assert outputs == ()
            if before[0] == "done":
                assert await self.there() == before
                self.steps.append("4. Inbox: the mark is there, it is a duplicate")
                self.steps.append("5. Inbox returns nothing")
            else:
                assert await self.there() == ("p", 0, 0), "something can be seen too early"
                self.steps.append("11. Inbox returns nothing")
            return outputs

        return noting

    def inside_inbox(self) -> Middleware:
        """Stand between the inbox and the outbox."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            assert await self.there() == ("p", 0, 0)
            self.steps.append("4. Inbox: sets the mark, which was not there; new message, proceed")
            assert current_pipeline(self.client) is not self.client
            self.steps.append("5. Tx: a pipeline is in the context")
            self.steps.append("6. Outbox calls next")
            outputs = await call_next(message)
            queued = [command.words[0] for command in current_pipeline(self.client).recorded]
            assert queued == [b"HSET", b"XADD"]
            self.steps.append("9. Outbox: queues XADD on the pipeline")
            assert outputs == ()
            self.steps.append("10. Outbox returns nothing: outputs are swallowed")
            return outputs

        return noting

    def inside_outbox(self) -> Middleware:
        """Stand between the outbox and the handler."""

        async def noting(message: Message, call_next: Next) -> Sequence[Message]:
            outputs = await call_next(message)
            assert [(output.type, output.payload) for output in outputs] == [("order.placed", b'{"order_id":"xyz"}')]
            self.steps.append(f"8. Handler returns {OrderPlaced.__name__}")
            return outputs

        return noting

    async def receive(self, last: str) -> None:
        """Have the broker deliver the command, until it is acknowledged."""
        points = Failpoints()
        points.on("deliver.after", lambda: self.steps.append("1. Broker delivers the message"))
        consumer = Consumer(
            TappedSubscriber(self.broker.subscribe("commands", group=SERVICE), points),
            order_router(self.orders),
            self.around(),
            TransactionMiddleware(self.transactions),
            self.outside_inbox(),
            InboxMiddleware(self.inbox, listener=self.seen.append),
            self.inside_inbox(),
            OutboxMiddleware(self.store.outbox()),
            self.inside_outbox(),
            listener=self.seen.append,
        )

        def acknowledged() -> None:
            self.steps.append(last)
            consumer.stop_soon()

        points.on("ack.after", acknowledged)
        await self.broker.publish_batch([self.command])
        await consumer.run()


@pytest.fixture(params=get_args(CommitMode))
async def shop(redis_like_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Shop]:
    """A shop on Redis, and one on Valkey; with the script that looks first, and with MULTI and EXEC as they are."""
    client = redis.asyncio.Redis.from_url(redis_like_url, retry=Retry(NoBackoff(), 0))
    payload = b'{"order_id":"xyz","product_id":"chair","quantity":2}'
    yield Shop(client, Message(topic="commands", type="place.order", payload=payload), request.param)
    await client.aclose()


async def test_the_thirteen_steps_of_a_new_message(shop: Shop) -> None:
    """S0-01, S0-03, S0-05, S0-09, S0-12, S0-13, S0-14, S0-15, S0-28, S0-43, S0-44, S0-58, S0-59, S0-60, G7, G8."""
    await shop.receive("13. Acking: ack, after everything is executed")

    assert shop.steps == [
        "1. Broker delivers the message",
        "2. Router receives the message",
        "3. Acking (outermost) calls next",
        "4. Inbox: sets the mark, which was not there; new message, proceed",
        "5. Tx: a pipeline is in the context",
        "6. Outbox calls next",
        "7. Handler: saves the order; its adapter queues HSET on the pipeline",
        "8. Handler returns OrderPlaced",
        "9. Outbox: queues XADD on the pipeline",
        "10. Outbox returns nothing: outputs are swallowed",
        "11. Inbox returns nothing",
        "12. Tx: executes HSET, XADD and the mark, all together",
        "13. Acking: ack, after everything is executed",
    ]
    order = await shop.client.hgetall(shop.orders.key("xyz"))
    assert order == {b"product_id": b"chair", b"quantity": b"2", b"status": b"placed"}
    assert 0 < await shop.client.ttl(shop.inbox.key(NAMESPACE, shop.command)) <= 24 * 3600
    assert [event for event in shop.seen if isinstance(event, events.HandlingFailed)] == []


async def test_the_way_of_a_message_that_arrives_again(shop: Shop) -> None:
    """S0-02, S0-11, S0-35, S0-60, G7, G8: no handler, no output, no error, and it is acknowledged."""
    await shop.receive("13. Acking: ack, after everything is executed")
    shop.steps.clear()

    await shop.receive("6. Acking: ack (nothing was processed)")

    assert shop.steps == [
        "1. Broker delivers the message",
        "2. Router receives the message",
        "3. Acking (outermost) calls next",
        "4. Inbox: the mark is there, it is a duplicate",
        "5. Inbox returns nothing",
        "6. Acking: ack (nothing was processed)",
    ]
    assert await shop.there() == ("done", 1, 1)
    skipped = [event for event in shop.seen if isinstance(event, events.DuplicateSkipped)]
    assert [(event.consumer, event.message_id) for event in skipped] == [(SERVICE, shop.command.id)]
    assert [event for event in shop.seen if isinstance(event, events.HandlingFailed)] == []


async def test_the_publisher_hands_the_event_on_and_acknowledges_its_entry(shop: Shop) -> None:
    """S0-50, S0-51, S0-53, S0-54: from the stream to the broker, then XACK; nothing is left of it then."""
    await shop.receive("13. Acking: ack, after everything is executed")
    shop.steps.clear()
    points = Failpoints()
    points.on("claim.after", lambda: shop.steps.append("1. Publisher: XREADGROUP of its group"))
    points.on("publish.confirmed", lambda: shop.steps.append("2. Destination: confirmed"))
    points.on("settle.after", lambda: shop.steps.append("3. Publisher: XACK"))

    await Dispatcher(TappedStore(shop.store, points), TappedPublisher(shop.broker, points)).run(until_idle=True)

    assert shop.steps[:3] == [
        "1. Publisher: XREADGROUP of its group",
        "2. Destination: confirmed",
        "3. Publisher: XACK",
    ]
    [_, event] = shop.broker.received
    assert (event.topic, event.type, event.source) == ("order-events", "order.placed", "/orders")
    stream = shop.store.outbox().stream
    [group] = await shop.client.xinfo_groups(stream)
    assert (group["name"], group["pending"], await shop.client.xlen(stream)) == (b"outbox-publisher", 0, 0)


async def test_the_adapter_works_at_once_without_a_transaction_and_tells_of_errors(shop: Shop) -> None:
    """S0-06, S0-24, S0-58: the same code, with the client that it has."""
    await shop.orders.save(PlaceOrder("at-once", "chair", 1))
    await shop.client.set(shop.orders.key("taken"), "by something else")

    assert await shop.client.hget(shop.orders.key("at-once"), "status") == b"placed"
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        await shop.orders.save(PlaceOrder("taken", "chair", 1))
