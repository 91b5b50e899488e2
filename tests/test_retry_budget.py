"""What spends the retry budget of a message, and what ends it at once: with transactions and without."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from postroom import Consumer, Match, Message, Outbox, OutboxSubscriber, Router, events, transactional
from postroom.errors import DecodeError, RejectError
from postroom.middleware import DeadLetterMiddleware, Middleware, Next, RetryMiddleware
from postroom.middleware.json_schema import JSONSchemaMiddleware
from postroom.stores import MemoryStore, SQLiteStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
LONG = timedelta(seconds=60)
BUDGET = 3
EventT = TypeVar("EventT", bound=events.Event)


@dataclass(frozen=True)
class OrderPlaced:
    """What the consumer expects."""

    order_id: int


@dataclass
class Desk:
    """The outbox of a shop, and a consumer that reads it."""

    path: Path
    store: SQLiteStore
    is_transactional: bool
    budget: int = BUDGET
    heard: list[events.Event] = field(default_factory=list[events.Event])
    waits: list[int] = field(default_factory=list[int])

    def add(self, payload: bytes = b'{"order_id":"1"}', *, kind: str = "order.placed", source: str = "/shop") -> None:
        message = Message(topic="orders", type=kind, payload=payload, headers={"ce-source": source})
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("BEGIN")
            self.store.outbox().add(connection, message)

    def consumer(self, router: Router, *middlewares: Middleware) -> Consumer:
        # With transactions the dead letters of the consumer keep the message, otherwise its subscriber does.
        subscriber = OutboxSubscriber(
            self.store,
            max_attempts=2 * self.budget if self.is_transactional else self.budget,
            poll_interval=5 * MS,
            listener=self.heard.append,
        )
        if self.is_transactional:
            middlewares = (transactional(self.store, consumer="stock", max_attempts=self.budget), *middlewares)
        return Consumer(subscriber, router, *middlewares, backoff=self._wait, listener=self.heard.append)

    def _wait(self, attempt: int) -> timedelta:
        self.waits.append(attempt)
        return MS

    @asynccontextmanager
    async def consuming(self, router: Router, *middlewares: Middleware) -> AsyncGenerator[None]:
        consumer = self.consumer(router, *middlewares)
        running = asyncio.create_task(consumer.run())
        try:
            yield
        finally:
            await consumer.stop()
            await running

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.heard if isinstance(event, kind)]

    async def hears(self, kind: type[events.Event], count: int = 1) -> None:
        await until(lambda: len(self.of(kind)) >= count, f"{count} of {kind.__name__}", within=LONG)

    async def is_settled(self) -> None:
        await until(
            lambda: not self._rows("SELECT 1 FROM postroom_outbox WHERE status <> 'delivered'"),
            "it is settled",
            within=LONG,
        )

    async def buried(self) -> tuple[bytes, int, str]:
        """Wait for the message that was put aside, and return its payload, its attempts and its error."""
        if self.is_transactional:
            sql = "SELECT payload, attempts, error FROM postroom_inbox_dead"
        else:
            sql = "SELECT payload, attempts, last_error FROM postroom_outbox WHERE status = 'dead'"
        await until(lambda: len(self._rows(sql)) == 1, "it is dead", within=LONG)
        [(payload, attempts, error)] = self._rows(sql)
        return payload, attempts, error

    def _rows(self, sql: str) -> list[tuple[bytes, int, str]]:
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(sql).fetchall()


@pytest.fixture(params=[True, False], ids=["transactional", "bare"])
async def desk(request: pytest.FixtureRequest, sqlite_path: Path) -> AsyncGenerator[Desk]:
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    yield Desk(sqlite_path, store, request.param)
    await store.close()


def expecting(handled: list[int]) -> Router:
    """Return a router whose handler expects a number."""
    router = Router()

    @router.on
    async def placed(order: OrderPlaced) -> None:
        handled.append(order.order_id)

    return router


@pytest.mark.requirement("G9")
async def test_a_payload_that_cannot_be_decoded_spends_the_budget(desk: Desk) -> None:
    """It is nacked with a backoff, and a dead letter after max_attempts; no error shows what stands in it."""
    handled: list[int] = []
    desk.add(b'{"order_id":"4111-1111"}')

    async with desk.consuming(expecting(handled)):
        payload, attempts, error = await desk.buried()

    assert handled == []
    assert (payload, attempts) == (b'{"order_id":"4111-1111"}', BUDGET)
    assert error.startswith("DecodeError: ")
    assert "order_id" in error
    assert "4111" not in error
    assert [event.attempt for event in desk.of(events.HandlingFailed)][:2] == [1, 2]
    assert desk.waits[:2] == [1, 2]


@pytest.mark.requirement("G2")
async def test_a_consumer_deployed_before_its_producer_is_corrected_loses_nothing(desk: Desk) -> None:
    """The next version reads what the first could not."""
    handled: list[int] = []
    desk.budget = 10_000
    desk.add(b'{"order_id":"7"}')

    async with desk.consuming(expecting(handled)):
        await desk.hears(events.HandlingFailed)
    assert desk.of(events.Died) == []
    assert desk.of(events.DeadLettered) == []

    corrected = Router()

    @corrected.on("order.placed")
    async def placed(order: dict[str, str]) -> None:
        handled.append(int(order["order_id"]))

    async with desk.consuming(corrected):
        await desk.is_settled()

    assert handled == [7]


@pytest.mark.requirement("G9")
async def test_a_payload_that_breaks_its_schema_spends_the_budget(desk: Desk) -> None:
    """It is the same question, asked of a schema instead of a class."""
    handled: list[int] = []
    schema = {"properties": {"order_id": {"type": "integer"}}}
    desk.add()

    async with desk.consuming(expecting(handled), JSONSchemaMiddleware({"order.placed": schema})):
        _, attempts, error = await desk.buried()

    assert (handled, attempts) == ([], BUDGET)
    assert (
        error == "DecodeError: the payload of 'order.placed' breaks the rule #/properties/order_id/type of its schema"
    )


@pytest.mark.requirement("G9")
async def test_a_rejection_is_final_at_once(desk: Desk) -> None:
    """Whoever raises it knows that no other attempt will end otherwise."""
    router = Router()

    @router.on("order.placed")
    async def placed(message: Message) -> None:
        raise RejectError("no such customer")

    desk.add()
    async with desk.consuming(router):
        _, attempts, error = await desk.buried()

    assert (attempts, error) == (1, "RejectError: no such customer")
    assert desk.of(events.HandlingFailed) == []
    assert desk.waits == []


@pytest.mark.requirement("G9")
async def test_a_decode_failure_can_be_made_final(desk: Desk) -> None:
    """A middleware turns it into a rejection."""

    async def final(message: Message, call_next: Next) -> Sequence[Message]:
        try:
            return await call_next(message)
        except DecodeError as error:
            raise RejectError(str(error)) from None

    desk.add()
    async with desk.consuming(expecting([]), final):
        _, attempts, _ = await desk.buried()

    assert attempts == 1


@pytest.mark.requirement("G9", "F-21")
async def test_a_type_without_a_handler_spends_the_budget(desk: Desk) -> None:
    """By default; the error names the type, how to add a handler, and how to ignore it."""
    desk.add(kind="order.cancelled")

    async with desk.consuming(expecting([])):
        payload, attempts, error = await desk.buried()

    assert (payload, attempts) == (b'{"order_id":"1"}', BUDGET)
    assert error == (
        "NoHandlerError: no handler takes 'order.cancelled'; add one with router.on('order.cancelled'), or create the "
        "router with Router(unhandled='ignore')"
    )
    assert desk.waits[:2] == [1, 2]


@pytest.mark.requirement("F-21")
async def test_a_type_without_a_handler_can_be_ignored(desk: Desk) -> None:
    """It is acknowledged, and an event says so."""
    router, handled = Router(unhandled="ignore"), list[str]()

    @router.on("order.placed", match=Match(source="/shop"))
    async def placed(message: Message) -> None:
        handled.append(message.source)

    desk.add(kind="order.cancelled")
    desk.add(source="/other")
    desk.add()
    async with desk.consuming(router):
        await desk.is_settled()

    assert handled == ["/shop"]
    ignored = desk.of(events.Ignored)
    assert {(event.type, event.topic) for event in ignored} == {
        ("order.cancelled", "orders"),
        ("order.placed", "orders"),
    }
    assert len(ignored) == 2
    assert len(desk.of(events.Handled)) == 1
    assert {event.level for event in ignored} == {logging.DEBUG}


@pytest.mark.requirement("F-24")
async def test_what_cannot_be_decoded_is_not_tried_again_at_once() -> None:
    """Within one process it would fail the same way each time."""
    calls: list[int] = []

    async def undecodable(message: Message) -> list[Message]:
        calls.append(message.attempt)
        raise DecodeError("no")

    with pytest.raises(DecodeError):
        await RetryMiddleware(5)(Message(topic="orders", payload=b""), undecodable)

    assert len(calls) == 1


class Letters:
    """Keeps dead letters."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    async def bury(self, message: Message, error: str) -> None:
        self.errors.append(error)


@asynccontextmanager
async def by_hand(router: Router, *middlewares: Middleware) -> AsyncGenerator[MemoryStore]:
    """Have a message handled by a router whose handlers acknowledge by hand."""
    store = MemoryStore()
    with store.transaction() as transaction:
        Outbox().add(transaction, {"order_id": 1}, topic="order.placed")
    consumer = Consumer(OutboxSubscriber(store, poll_interval=5 * MS), router, *middlewares, acking="manual")
    running = asyncio.create_task(consumer.run())
    try:
        yield store
    finally:
        await consumer.stop()
        await running


@pytest.mark.requirement("F-05")
async def test_what_no_handler_takes_is_acknowledged_where_handlers_do_that_by_hand() -> None:
    """An ignored message, and one that became a dead letter, reach no handler that could."""
    letters = Letters()
    async with (
        by_hand(Router(unhandled="ignore")) as ignored,
        by_hand(Router(), DeadLetterMiddleware(letters, max_attempts=1)) as dead,
    ):
        for store in (ignored, dead):
            await until(lambda: [row.status for row in store.rows] == ["delivered"], "it is acknowledged", within=LONG)  # noqa: B023

    assert [error.partition(":")[0] for error in letters.errors] == ["NoHandlerError"]
