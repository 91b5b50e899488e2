"""The flow that the design of transactions in Redis promises: thirteen steps, and the short way of a duplicate.

The middlewares stand in the order of that document: inbox, transaction, outbox. Each test ends with the list of steps
in its words; each step is noted where it happens, and looks at the server from outside where the document says what is
there by then. The order that SQL databases need, with the transaction outermost, works as well and has a test.

Where we differ from the document, and why:

- It marks a message with SETNX for the whole retention before anything is done, and so loses a message whose process
  crashes: the redelivery is acknowledged as a duplicate. Here the mark is first a claim with a lease (``p``), and a
  redelivery meanwhile is released and not acknowledged. The mark that stays (``done``) is written by the commit, in one
  step with the effect and the event, so step 11 executes one thing more. ``mode="setnx_may_lose_messages"`` is the
  protocol of the document.
- It deletes the mark if a handler fails, whoever has set it by then. Here only a claim with the own token is deleted.
- The stream of the outbox is named once, by the store that reads it, and not by the middleware and the publisher.
- A consumer is known by host, process and object instead of the host alone, where two processes would collide.
- An idle time never takes over what a worker has leased for longer, and entries that other workers have left are looked
  for at every claim unless ``claim_interval`` is set.
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
STREAM = "outbox:events"

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
        self.store = RedisStreamStore(self.client, namespace=NAMESPACE, stream=STREAM)
        self.transactions = RedisTransactions(self.client, tag=NAMESPACE, mode=self.mode)
        self.orders = NotedOrders(self.client, self.steps.append)

    async def mark(self) -> str:
        """Return what the inbox has of the command: nothing, a claim (p) or that it is done."""
        state: bytes | None = await self.client.get(self.inbox.key(NAMESPACE, self.command))
        return (state or b"").decode().partition(":")[0]

    async def there(self) -> tuple[str, int, int]:
        """Return what others see: the mark, how many orders there are, and how many entries in the outbox."""
        orders = len(await self.client.keys(self.orders.key("*")))
        return await self.mark(), orders, await self.client.xlen(STREAM)

    # -- who notes the steps -----------------------------------------------------------------------------------

    async def around(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand between the acknowledgement and the rest."""
        self.steps.extend(("2. Router receives the message", "3. Acking (outermost) calls next"))
        outputs = await call_next(message)
        assert (in_transaction(), outputs) == (None, ())
        return outputs

    async def outside_inbox(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand right outside of the inbox."""
        before = await self.there()
        outputs = await call_next(message)
        assert outputs == ()
        if before[0] == "done":
            assert await self.there() == before
            self.steps.append("4. Inbox: the mark is there, it is a duplicate")
        self.steps.append(f"{len(self.steps) + 1}. Inbox returns nothing")
        return outputs

    async def inside_inbox(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand right inside of the inbox."""
        assert await self.there() == ("p", 0, 0)
        self.steps.append("4. Inbox: sets the mark, which was not there; new message, proceed")
        return await call_next(message)

    async def outside_transaction(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand right outside of the transaction."""
        assert current_pipeline(self.client) is self.client
        before = await self.there()
        outputs = await call_next(message)
        if await self.there() != before:
            assert await self.there() == ("done", 1, 1)
            self.steps.append(f"{len(self.steps) + 1}. Tx: executes HSET, XADD and the mark, all together")
        return outputs

    async def outside_outbox(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand right outside of the outbox."""
        assert current_pipeline(self.client) is not self.client
        self.steps.extend(("5. Tx: a pipeline is in the context", "6. Outbox calls next"))
        outputs = await call_next(message)
        queued = [command.words[0] for command in current_pipeline(self.client).recorded]
        assert queued == [b"HSET", b"XADD"]
        assert outputs == ()
        assert await self.there() == ("p", 0, 0), "something can be seen too early"
        self.steps.append("9. Outbox: queues XADD on the pipeline")
        self.steps.append("10. Outbox returns nothing: outputs are swallowed")
        return outputs

    async def inside_outbox(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Stand between the outbox and the handler."""
        outputs = await call_next(message)
        assert [(output.type, output.payload) for output in outputs] == [("order.placed", b'{"order_id":"xyz"}')]
        self.steps.append(f"8. Handler returns {OrderPlaced.__name__}")
        return outputs

    def stack(self, *, inbox_first: bool) -> list[Middleware]:
        """Return the three middlewares, with those that note the steps in between."""
        inbox = (self.outside_inbox, InboxMiddleware(self.inbox, listener=self.seen.append), self.inside_inbox)
        transaction = (self.outside_transaction, TransactionMiddleware(self.transactions))
        outbox = (self.outside_outbox, OutboxMiddleware(self.store.outbox()), self.inside_outbox)
        outer, inner = (inbox, transaction) if inbox_first else (transaction, inbox)
        return [self.around, *outer, *inner, *outbox]

    async def receive(self, last: str, *, inbox_first: bool = True) -> None:
        """Have the broker deliver the command, until it is acknowledged."""
        points = Failpoints()
        points.on("deliver.after", lambda: self.steps.append("1. Broker delivers the message"))
        consumer = Consumer(
            TappedSubscriber(self.broker.subscribe("commands", group=SERVICE), points),
            order_router(self.orders),
            *self.stack(inbox_first=inbox_first),
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


#: The first ten steps are the same in both orders.
TEN = [
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
]


@pytest.mark.requirement(
    "S0-01",
    "S0-03",
    "S0-05",
    "S0-09",
    "S0-10",
    "S0-12",
    "S0-13",
    "S0-14",
    "S0-15",
    "S0-28",
    "S0-43",
    "S0-44",
    "S0-58",
    "S0-59",
    "S0-60",
)
async def test_the_thirteen_steps_of_a_new_message(shop: Shop) -> None:
    await shop.receive("13. Acking: ack, after everything is executed")

    assert shop.steps == [
        *TEN,
        "11. Tx: executes HSET, XADD and the mark, all together",
        "12. Inbox returns nothing",
        "13. Acking: ack, after everything is executed",
    ]
    order = await shop.client.hgetall(shop.orders.key("xyz"))
    assert order == {b"product_id": b"chair", b"quantity": b"2", b"status": b"placed"}
    assert 0 < await shop.client.ttl(shop.inbox.key(NAMESPACE, shop.command)) <= 24 * 3600
    assert [event for event in shop.seen if isinstance(event, events.HandlingFailed)] == []


@pytest.mark.requirement("S0-15", "S0-59", "S0-60")
async def test_the_thirteen_steps_with_the_transaction_outermost(shop: Shop) -> None:
    """The inbox returns before everything is executed; what is there at the end is the same."""
    await shop.receive("13. Acking: ack, after everything is executed", inbox_first=False)

    assert shop.steps == [
        *TEN,
        "11. Inbox returns nothing",
        "12. Tx: executes HSET, XADD and the mark, all together",
        "13. Acking: ack, after everything is executed",
    ]
    assert await shop.there() == ("done", 1, 1)


@pytest.mark.requirement("G7", "G8", "S0-02", "S0-11", "S0-35", "S0-60")
async def test_the_way_of_a_message_that_arrives_again(shop: Shop) -> None:
    """No handler, no output, no error, and it is acknowledged."""
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


@pytest.mark.requirement("S0-50", "S0-51", "S0-53", "S0-54")
async def test_the_publisher_hands_the_event_on_and_acknowledges_its_entry(shop: Shop) -> None:
    """From the stream to the broker, then XACK; nothing is left of it then."""
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
    [group] = await shop.client.xinfo_groups(STREAM)
    assert (group["name"], group["pending"], await shop.client.xlen(STREAM)) == (b"outbox-publisher", 0, 0)


class FailingOrders(RedisOrders):
    """An adapter that queues a command, and fails then."""

    async def save(self, order: PlaceOrder) -> None:
        await super().save(order)
        raise RuntimeError("sold out")


@pytest.mark.requirement("S0-10", "S0-21", "S0-22", "S0-35", "S0-41", "S0-48")
async def test_the_set_up_and_the_recovery_from_errors_as_printed(shop: Shop) -> None:
    """The set-up of the document line by line, with its own knobs.

    A handler that fails leaves neither mark nor effect, and its message is handled when it comes again.
    """
    client, broker = shop.client, shop.broker
    inbox = RedisInbox(SERVICE, retention=timedelta(hours=24), key_func=lambda message: str(message.id))
    publisher = RedisStreamStore(
        client,
        stream=STREAM,
        group="outbox-publisher",
        consumer="till-1",
        batch=10,
        block=timedelta(seconds=1),
        claim_interval=timedelta(seconds=30),
        min_idle=timedelta(seconds=60),
    )
    failures: list[events.Event] = []

    def consumer_of(orders: RedisOrders) -> Consumer:
        def heard(event: events.Event) -> None:
            failures.extend([event] if isinstance(event, events.HandlingFailed) else [])
            if isinstance(event, events.Handled | events.HandlingFailed | events.DuplicateSkipped):
                consumer.stop_soon()

        consumer = Consumer(
            broker.subscribe("commands", group=SERVICE),
            order_router(orders),
            InboxMiddleware(inbox),
            TransactionMiddleware(client),
            OutboxMiddleware(publisher.outbox()),
            listener=heard,
        )
        return consumer

    failing = consumer_of(FailingOrders(client, NAMESPACE))
    await broker.publish_batch([shop.command])
    await failing.run()
    after_error = await client.keys("*")
    await consumer_of(RedisOrders(client, NAMESPACE)).run()
    await broker.publish_batch([shop.command])
    await consumer_of(FailingOrders(client, NAMESPACE)).run()  # a duplicate, so it is not called
    await Dispatcher(publisher, broker).run(until_idle=True)

    assert [type(event) for event in failures] == [events.HandlingFailed]
    assert [key for key in after_error if b":commit:" not in key] == []
    assert await client.hget(shop.orders.key("xyz"), "status") == b"placed"
    assert [message.type for message in broker.received if message.topic == "order-events"] == ["order.placed"]


@pytest.mark.requirement("S0-06", "S0-24", "S0-58")
async def test_the_adapter_works_at_once_without_a_transaction_and_tells_of_errors(shop: Shop) -> None:
    """The same code, with the client that it has."""
    await shop.orders.save(PlaceOrder("at-once", "chair", 1))
    await shop.client.set(shop.orders.key("taken"), "by something else")

    assert await shop.client.hget(shop.orders.key("at-once"), "status") == b"placed"
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        await shop.orders.save(PlaceOrder("taken", "chair", 1))
