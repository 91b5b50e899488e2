"""The usage example of the design of the transactional outbox, line by line.

The order service, its publisher and the configuration of the processor are those of that document; comments and names
of tests are its words. Where it waits for an hour or retries after a second, a test puts a shorter time in its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from postroom import Backoff, Dispatcher, Message, Outbox, presets
from postroom import events as ev
from postroom.errors import BrokerUnavailableError
from postroom.stores import PostgresStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
#: As the document has it, but for how long a test would wait.
IN_A_HURRY = replace(
    presets.MODERATE, poll_interval=20 * MS, backoff=Backoff(base=MS, max=2 * MS), cleanup_interval=20 * MS
)


# -- the application -----------------------------------------------------------------------------------------------


@dataclass
class CreateOrder:
    """The command."""

    id: int
    customer_id: str
    amount: int
    correlation_id: str


@dataclass
class OrderCreated:
    """The event."""

    id: int
    customer_id: str
    amount: int
    created_at: str


@dataclass
class BrokerClient:
    """The client of a message broker, which may be down or refuse messages."""

    published: list[tuple[str, bytes, str]] = field(default_factory=list[tuple[str, bytes, str]])
    is_down: bool = False
    #: How many of the next messages it refuses.
    refuses: int = 0

    async def send(self, subject: str, payload: bytes, correlation_id: str) -> None:
        if self.is_down:
            raise BrokerUnavailableError("the broker is down")
        if self.refuses:
            self.refuses -= 1
            raise ValueError("the broker refuses the message")
        self.published.append((subject, payload, correlation_id))

    @property
    def orders(self) -> list[int]:
        return [json.loads(payload)["id"] for _, payload, _ in self.published]


class MyBrokerPublisher:
    """``publisher := &MyBrokerPublisher{client: natsClient}``."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client

    async def publish(self, msg: Message) -> None:
        await self.client.send(msg.type, msg.payload, msg.headers["ce-correlationid"])


async def handle_create_order(command: CreateOrder, outbox: Outbox, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Command handler with transactional outbox."""
    # Start transaction
    async with pool.acquire() as connection, connection.transaction():
        # 1. Save order to database
        await connection.execute(
            "INSERT INTO orders (id, customer_id, amount, created_at) VALUES ($1, $2, $3, NOW())",
            command.id,
            command.customer_id,
            command.amount,
        )
        # 2. Create event message
        event = OrderCreated(command.id, command.customer_id, command.amount, datetime.now(UTC).isoformat())
        msg = Message(
            topic="orders",
            type="OrderCreated",
            payload=json.dumps(asdict(event)).encode(),
            headers={"ce-correlationid": command.correlation_id, "kind": "event"},
        )
        # 3. Store message in outbox (within same transaction!)
        await outbox.add(connection, msg)
    # 4. Commit transaction (atomic!)


# -- setup ---------------------------------------------------------------------------------------------------------


@dataclass
class Service:
    """The order service, with its database, its outbox store, its broker and its processor."""

    dsn: str
    pool: asyncpg.Pool[asyncpg.Record]
    store: PostgresStore
    client: BrokerClient = field(default_factory=BrokerClient)
    outbox: Outbox = field(default_factory=Outbox)
    events: list[ev.Event] = field(default_factory=list[ev.Event])

    async def create(self, number: int) -> None:
        await handle_create_order(CreateOrder(number, "customer", 100, f"story-{number}"), self.outbox, self.pool)

    def processor(self, preset: presets.Preset = IN_A_HURRY) -> Dispatcher:
        return Dispatcher(self.store, MyBrokerPublisher(self.client), **preset.dispatcher, listener=self.events.append)

    @asynccontextmanager
    async def processing(self, preset: presets.Preset = IN_A_HURRY) -> AsyncIterator[Dispatcher]:
        """Start the background processor, and stop it gracefully: ``go processor.Start``, ``defer processor.Stop``."""
        processor = self.processor(preset)
        running = asyncio.create_task(processor.run())
        try:
            yield processor
        finally:
            await processor.stop()
            await running

    async def counts(self) -> dict[str, int]:
        """Return what monitoring shows."""
        stats = await self.store.stats()
        return {"pending": stats.pending, "delivered": stats.delivered, "dead": stats.dead}

    async def until_counts(self, **wanted: int) -> None:
        async def are_so() -> bool:
            return await self.counts() == {"pending": 0, "delivered": 0, "dead": 0, **wanted}

        await until(are_so, f"stats() becoming {wanted}")


@pytest.fixture
async def service(postgres_dsn: str) -> AsyncIterator[Service]:
    """Set up the database and the outbox store, with the document's retention."""
    store = PostgresStore(postgres_dsn, **presets.MODERATE.store)
    await store.apply_schema()
    await store.open()
    async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=2) as pool:
        await pool.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, customer_id text, amount int, created_at timestamptz)"
        )
        yield Service(postgres_dsn, pool, store)
    await store.close()


# -- what the document says of it ------------------------------------------------------------------------------------


@pytest.mark.requirement("S4-10", "S4-11", "S4-18")
async def test_the_usage_example_works_as_it_is_written(service: Service) -> None:
    """With the document's configuration as it is, an order is stored and its event published."""
    async with service.processing(presets.MODERATE):
        await service.create(1)
        await service.until_counts(delivered=1)

    [(subject, payload, correlation_id)] = service.client.published
    event = json.loads(payload)
    assert (subject, correlation_id) == ("OrderCreated", "story-1")
    assert (event["id"], event["customer_id"], event["amount"]) == (1, "customer", 100)
    assert await service.pool.fetchval("SELECT count(*) FROM orders") == 1


@pytest.mark.requirement("S4-18", "S4-20")
async def test_database_rolled_back_message_not_stored_wont_be_published(service: Service) -> None:
    """Both succeed or both fail."""
    await service.create(1)
    with pytest.raises(asyncpg.UniqueViolationError):
        await service.create(1)

    await service.processor().run(until_idle=True)

    assert service.client.orders == [1]
    assert await service.counts() == {"pending": 0, "delivered": 1, "dead": 0}


@pytest.mark.requirement("S4-14", "S4-15", "S4-16")
async def test_publish_failed_automatic_retry(service: Service) -> None:
    """Attempts and the last error are recorded; once published it is marked, and won't retry."""
    service.client.refuses = 2
    async with service.processing():
        await service.create(1)
        await service.until_counts(delivered=1)
        await service.create(2)
        await service.until_counts(delivered=2)

    rows = await service.pool.fetch("SELECT attempts, delivered_at FROM postroom_outbox ORDER BY seq")
    failures = [event for event in service.events if isinstance(event, ev.PublishFailed)]
    assert service.client.orders == [1, 2]
    assert [row["attempts"] for row in rows] == [3, 1]
    assert all(row["delivered_at"] is not None for row in rows)
    assert [failure.error for failure in failures] == ["ValueError: the broker refuses the message"] * 2


@pytest.mark.requirement("S4-10", "S4-14")
async def test_max_retries_exceeded(service: Service) -> None:
    """After ten publish attempts a message is marked as failed, and is not published any more."""
    service.client.refuses = 10
    async with service.processing():
        await service.create(1)
        await service.until_counts(dead=1)
        await service.create(2)
        await service.until_counts(dead=1, delivered=1)

    row = await service.pool.fetchrow("SELECT attempts, last_error FROM postroom_outbox WHERE status = 'dead'")
    assert row is not None
    assert (row["attempts"], row["last_error"]) == (10, "ValueError: the broker refuses the message")
    assert service.client.orders == [2]


@pytest.mark.requirement("S4-20")
async def test_broker_down_messages_accumulate_in_outbox(service: Service) -> None:
    """Automatic retry when the broker recovers; the outage spends no attempt."""
    service.client.is_down = True
    async with service.processing():
        for number in range(1, 6):
            await service.create(number)
        await until(lambda: any(isinstance(event, ev.PublishFailed) for event in service.events), "a failure")
        during = await service.counts()
        service.client.is_down = False
        await service.until_counts(delivered=5)

    assert during["delivered"] == during["dead"] == 0
    assert sorted(service.client.orders) == [1, 2, 3, 4, 5]
    assert await service.pool.fetchval("SELECT max(attempts) FROM postroom_outbox") == 1


@pytest.mark.requirement("S4-12", "S4-20")
async def test_application_crashes_processor_resumes_on_restart(service: Service) -> None:
    """The outbox is in the database, and a new processor finds what the last one left."""
    service.client.is_down = True
    crashing = asyncio.create_task(service.processor().run())
    await service.create(1)
    await until(lambda: any(isinstance(event, ev.PublishFailed) for event in service.events), "a failure")
    crashing.cancel()
    await asyncio.wait({crashing})
    service.client.is_down = False

    async with service.processing():
        await service.until_counts(delivered=1)

    assert service.client.orders == [1]


@pytest.mark.requirement("S4-09", "S4-10")
async def test_cleanup_removes_published_messages_older_than_24_hours(service: Service) -> None:
    """Those that are younger stay, and so does everything that was not published."""
    for number in (1, 2):
        await service.create(number)
    await service.processor().run(until_idle=True)
    await service.pool.execute(
        "UPDATE postroom_outbox SET delivered_at = delivered_at - CASE"
        " WHEN seq = (SELECT min(seq) FROM postroom_outbox) THEN interval '25 hours' ELSE interval '23 hours' END"
    )
    service.client.is_down = True
    await service.create(3)
    await service.pool.execute(
        "UPDATE postroom_outbox SET created_at = now() - interval '2 days' WHERE status = 'pending'"
    )

    async with service.processing():
        await until(lambda: any(isinstance(event, ev.Purged) for event in service.events), "the cleanup")

    payloads = [json.loads(row["payload"]) for row in await service.pool.fetch("SELECT payload FROM postroom_outbox")]
    assert [event.count for event in service.events if isinstance(event, ev.Purged)] == [1]
    assert sorted(event["id"] for event in payloads) == [2, 3]


@pytest.mark.requirement("S4-01")
async def test_monitoring(service: Service) -> None:
    """``stats()`` shows what waits, for how long, and what was published or failed."""
    await service.create(1)
    waiting = await service.store.stats()
    await service.processor().run(until_idle=True)
    done = await service.store.stats()

    assert (waiting.pending, waiting.delivered) == (1, 0)
    assert waiting.oldest_due is not None
    assert waiting.oldest_due >= timedelta(0)
    assert (done.pending, done.delivered, done.oldest_due) == (0, 1, None)
