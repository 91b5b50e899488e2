"""The flow that the design of the leased outbox promises: enqueue, claim, publish, ack or nack, and dead at the end.

Each test follows one part of that document and uses its own example, the usage of chat turns. The document's names
stand in comments beside ours.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from postroom import (
    AddResult,
    Backoff,
    Claim,
    ClaimTerms,
    Consumer,
    Delivered,
    Dispatcher,
    Message,
    Outbox,
    Retry,
    Router,
    current_transaction,
    events,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.errors import TenantMismatchError
from postroom.inbox import Mode
from postroom.store import Settlement
from postroom.stores import SQLStore, store_from_url
from postroom.testing.waiting import until

from .crash.sites import Site, site_of
from .worlds import DATABASES

NAMESPACE, TOPIC = "mini-chat", "usage"
TENANT = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")
TURN, REQUEST = "turn-1", "request-1"
#: ``"{tenant_id}/{turn_id}/{request_id}"``, the canonical format of the document.
DEDUPE_KEY = f"{TENANT}/{TURN}/{REQUEST}"
WORKER, OTHER_WORKER = UUID(int=1), UUID(int=2)
#: Long enough that no lease of a slow machine ends by itself, and so short that it has ended at once.
LONG, OVER = timedelta(minutes=10), timedelta(milliseconds=1)


def claim_cfg(worker_id: UUID, *, lease: timedelta = LONG, max_attempts: int = 3) -> ClaimTerms:
    """``ClaimCfg`` with ``worker_id``: its batch size is the first argument of ``claim``."""
    return ClaimTerms(worker=worker_id, lease=lease, max_attempts=max_attempts)


@dataclass
class Chat:
    """A database with a table of turns and the outbox beside it."""

    store: SQLStore
    site: Site
    execute: Callable[[Any, str], Any]
    outbox: Outbox = field(init=False)
    broker: MemoryBroker = field(default_factory=MemoryBroker)

    def __post_init__(self) -> None:
        self.outbox = self.store.outbox()

    def finalize(self, *, fails: bool = False) -> AddResult:
        """Finalize a turn: its side effect and ``enqueue(runner, msg)`` in one transaction."""
        with self.site.connection() as connection:
            connection.cursor().execute("INSERT INTO turns (id) VALUES ('turn-1')")
            result: AddResult = self.enqueue(connection)
            if fails:
                raise ConnectionError("the operation fails before COMMIT")
        return result

    def enqueue(self, connection: Any) -> AddResult:  # noqa: ANN401 -- of whatever library
        payload = {"turn_id": TURN, "request_id": REQUEST, "tokens": 995}
        result: AddResult = self.outbox.add(connection, payload, topic=TOPIC, tenant_id=TENANT, dedupe_key=DEDUPE_KEY)
        return result

    def enqueue_again(self) -> AddResult:
        with self.site.connection() as connection:
            return self.enqueue(connection)

    def count(self, table: str) -> int:
        with closing(self.site.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"SELECT count(*) FROM {table}")
            [[count]] = cursor.fetchall()
        return int(count)

    def last_error(self) -> str:
        with closing(self.site.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT last_error FROM postroom_outbox")
            [[error]] = cursor.fetchall()
        return str(error)

    def states(self) -> list[tuple[str, int]]:
        """Return ``status`` and ``attempts`` of all rows."""
        return [(row.status, row.attempts) for row in self.site.rows(NAMESPACE)]

    async def claim_batch(self, terms: ClaimTerms) -> list[Claim]:
        return await self.store.claim(10, terms)

    async def ack(self, claims: list[Claim]) -> list[Claim]:
        return await self.store.settle([Settlement(claim, Delivered()) for claim in claims])

    async def nack(self, claims: list[Claim], err: str) -> list[Claim]:
        return await self.store.settle([Settlement(claim, Retry(err, timedelta(0))) for claim in claims])


async def on_postgres(connection: Any, sql: str) -> None:  # noqa: ANN401 -- of asyncpg
    await connection.execute(sql)


async def on_mariadb(connection: Any, sql: str) -> None:  # noqa: ANN401 -- of asyncmy
    async with connection.cursor() as cursor:
        await cursor.execute(sql)


def on_sqlite(connection: sqlite3.Connection, sql: str) -> None:
    connection.execute(sql)


@pytest.fixture(params=DATABASES)
async def chat(request: pytest.FixtureRequest) -> AsyncIterator[Chat]:
    """The chat on each database."""
    kind: str = request.param
    execute: Callable[[Any, str], Any]
    match kind:
        case "postgres":
            url, execute = request.getfixturevalue("postgres_dsn"), on_postgres
        case "mariadb":
            url, execute = request.getfixturevalue("mariadb_dsn"), on_mariadb
        case _:
            url, execute = f"sqlite:///{request.getfixturevalue('sqlite_path')}", on_sqlite
    store, site = store_from_url(url, namespace=NAMESPACE), site_of(url)
    assert isinstance(store, SQLStore)
    await store.apply_schema()
    with site.connection() as connection:
        connection.cursor().execute("CREATE TABLE turns (id VARCHAR(36) PRIMARY KEY)")
        connection.cursor().execute("CREATE TABLE charges (tokens integer)")
    yield Chat(store, site, execute)
    await store.close()


# -- Operation Commit Enqueues Outbox Row ------------------------------------------------------------------------


@pytest.mark.requirement("S2-22", "S2-48")
async def test_an_operation_that_commits_enqueues_exactly_one_event(chat: Chat) -> None:
    """And who loses an idempotency race observes "already enqueued"."""
    first = chat.finalize()
    again = chat.enqueue_again()

    assert (first.is_new, again.is_new, again.id) == (True, False, first.id)
    assert chat.count("turns") == 1
    # status = 'pending', attempts = 0
    assert chat.states() == [("pending", 0)]


@pytest.mark.requirement("S2-21")
async def test_an_operation_that_fails_leaves_neither_side_effect_nor_event(chat: Chat) -> None:
    """The described side effects and outbox insertion MUST both roll back."""
    with pytest.raises(ConnectionError):
        chat.finalize(fails=True)

    assert (chat.count("turns"), chat.states()) == (0, [])


@pytest.mark.requirement("S2-15")
async def test_a_dedupe_key_of_another_tenant_is_an_error_and_no_row(chat: Chat) -> None:
    """When both are populated, the key begins with the tenant."""
    with chat.site.connection() as connection, pytest.raises(TenantMismatchError):
        chat.outbox.add(connection, {}, topic=TOPIC, tenant_id=TENANT, dedupe_key="someone-else/turn-1/request-1")

    assert chat.states() == []


# -- Outbox Dispatcher Publishes Events --------------------------------------------------------------------------


@pytest.mark.requirement("S2-20", "S2-27")
async def test_claim_publish_ack(chat: Chat) -> None:
    """Claim_batch leases to one worker; ack makes the row delivered, for good."""
    chat.finalize()

    [claim] = await chat.claim_batch(claim_cfg(WORKER))
    others = await chat.claim_batch(claim_cfg(OTHER_WORKER))
    processing = chat.states()
    lost = await chat.ack([claim])
    after = await chat.claim_batch(claim_cfg(OTHER_WORKER))

    # ClaimedMessage
    message = claim.message
    assert (message.namespace, message.topic, message.tenant_id) == (NAMESPACE, TOPIC, TENANT)
    assert (message.dedupe_key, message.attempt) == (DEDUPE_KEY, 1)
    assert (others, processing) == ([], [("processing", 1)])
    assert (lost, after, chat.states()) == ([], [], [("delivered", 1)])


@pytest.mark.requirement("S2-40")
async def test_a_worker_whose_lease_was_taken_over_cannot_ack(chat: Chat) -> None:
    """Ack reports the loss, and nothing is nacked."""
    chat.finalize()
    claims = await chat.claim_batch(claim_cfg(WORKER, lease=OVER))  # the worker crashes here

    taken: list[Claim] = []

    async def is_reclaimed() -> bool:
        taken.extend(await chat.claim_batch(claim_cfg(OTHER_WORKER)))
        return bool(taken)

    await until(is_reclaimed, "the end of the lease")
    [reclaimed] = taken
    lost = await chat.ack(claims)

    assert lost == claims
    assert reclaimed.message.attempt == 2
    assert chat.states() == [("processing", 2)]


@pytest.mark.requirement("S2-30", "S2-45")
async def test_a_publish_that_fails_is_tried_again_and_then_dead(chat: Chat) -> None:
    """Nack returns the row to pending with its error; at max_attempts the dispatcher makes it dead."""
    chat.finalize()
    seen: list[events.Event] = []

    async def publish(message: Message) -> None:
        if message.attempt == 3:
            dispatcher.stop_soon()
        raise ValueError("the consumer is not there")

    dispatcher = Dispatcher(
        chat.store,
        publish,
        max_attempts=3,
        backoff=Backoff(base=OVER, max=OVER),  # base_delay, max_delay
        listener=seen.append,
    )
    claims = await chat.claim_batch(claim_cfg(WORKER))
    await chat.nack(claims, "the consumer is not there")
    after_nack = chat.states()
    await dispatcher.run()

    assert after_nack == [("pending", 1)]
    assert chat.states() == [("dead", 3)]
    assert "the consumer is not there" in chat.last_error()
    assert [event.attempt for event in seen if isinstance(event, events.Died)] == [3]


# -- Enforce Idempotent Publish Contract -------------------------------------------------------------------------


@pytest.mark.requirement("S2-41", "S2-52")
@pytest.mark.parametrize("mode", ["pessimistic", "optimistic"])
async def test_downstream_processing_is_idempotent_on_the_dedupe_key(chat: Chat, mode: Mode) -> None:
    """A second message of the same logical event has another id, and the same key."""
    chat.finalize()
    await Dispatcher(chat.store, chat.broker).run(until_idle=True)
    [published] = chat.broker.received
    sent_again = replace(published, id=uuid4())
    unrelated = Message(topic=TOPIC, payload=published.payload, type=TOPIC)
    router, seen = Router(), list[events.Event]()

    @router.on(TOPIC)
    async def charge(usage: dict[str, Any]) -> None:
        await current_transaction().do(chat.execute, f"INSERT INTO charges VALUES ({usage['tokens']})")

    def note(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.Handled) and event.message_id == unrelated.id:
            consumer.stop_soon()

    consumer = Consumer(
        chat.broker.subscribe(TOPIC, group="billing"),
        router,
        transactional(chat.store, consumer="billing", mode=mode, by="dedupe_key"),
        concurrency=1,
        listener=note,
    )
    await chat.broker.publish_batch([published, sent_again, unrelated])
    await consumer.run()

    assert published.dedupe_key == DEDUPE_KEY
    skipped = [event.message_id for event in seen if isinstance(event, events.DuplicateSkipped)]
    assert sent_again.id in skipped
    # A message without a key is known by its id.
    assert unrelated.id not in skipped
    assert chat.count("charges") == 2
