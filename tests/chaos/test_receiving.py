"""What the broken variants of the receiving half get wrong, one script for each, on a real database.

All of them pass on the sound library; `tests/test_variants.py` shows that each fails on the variant it is meant for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.audit import SqlTruth, Truth, truth_of
from chaos.consumer import WRITERS
from postroom import (
    Consumer,
    Dead,
    Delivered,
    Delivery,
    Message,
    Outcome,
    Release,
    Retry,
    Router,
    Transaction,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.errors import RejectError
from postroom.inbox import Mode
from postroom.middleware.transactional import TransactionalStore
from postroom.stores import PostgresStore, SQLiteStore

Handle = Callable[[Message, Transaction], Awaitable[None]]


class Room:
    """A database with an outbox and an inbox, and consumers of it that are given one delivery at a time."""

    def __init__(self, name: str, url: str, store: TransactionalStore) -> None:
        self.truth: Truth = truth_of(name, url)
        self.store = store
        self._write = WRITERS[url.partition(":")[0]]

    async def effect(self, message: Message, transaction: Transaction, *, consumer: str = "stock") -> None:
        """Have the effect of a message, in its transaction."""
        await transaction.do(self._write, consumer, str(message.id), message.token, str(message.id))

    def consumer(self, handle: Handle, *, name: str = "stock", mode: Mode = "pessimistic") -> Consumer:
        router = Router()

        @router.on("orders")
        async def call(message: Message, transaction: Transaction) -> None:
            await handle(message, transaction)

        around = transactional(self.store, consumer=name, mode=mode, max_attempts=3, wake=lambda: None)
        return Consumer(MemoryBroker().subscribe("orders", group=name), router, around)

    async def deliver(self, consumer: Consumer, message: Message) -> tuple[Outcome, int, int]:
        """Have a message handled; return what was said of it, and how many effects and letters there were then."""
        said: list[tuple[Outcome, int, int]] = []

        async def settle(outcome: Outcome) -> None:
            said.append((outcome, len(self.truth.effects()), len(self.truth.letters())))

        await consumer.handle(Delivery(message, settle))
        [one] = said
        return one


@pytest.fixture
async def on_sqlite(sqlite_path: Path) -> AsyncIterator[Room]:
    """A room on SQLite."""
    store = SQLiteStore(sqlite_path)
    await store.apply_schema()
    room = Room("sqlite", f"sqlite:///{sqlite_path}", store)
    room.truth.install()
    yield room
    await store.close()


@pytest.fixture
async def on_postgres(postgres_dsn: str) -> AsyncIterator[Room]:
    """A room on PostgreSQL."""
    store = PostgresStore(postgres_dsn)
    await store.apply_schema()
    room = Room("postgres", postgres_dsn, store)
    room.truth.install()
    yield room
    await store.close()


def tables_of(room: Room) -> SqlTruth:
    assert isinstance(room.truth, SqlTruth)
    return room.truth


def message() -> Message:
    return Message(topic="orders", type="orders", payload=b"{}", attempt=1, token=1)


@pytest.mark.requirement("G8")
async def test_a_message_is_acknowledged_when_its_effect_is_there_for_all_to_see(on_sqlite: Room) -> None:
    """At the moment of the ack, another connection finds the effect."""
    said = await on_sqlite.deliver(on_sqlite.consumer(on_sqlite.effect), message())

    assert said == (Delivered(), 1, 0)


@pytest.mark.requirement("G7")
async def test_a_duplicate_is_acknowledged_and_has_no_effect(on_postgres: Room) -> None:
    """Also where the statement that finds it could have spoilt the transaction."""
    consumer, twice = on_postgres.consumer(on_postgres.effect), message()

    first = await on_postgres.deliver(consumer, twice)
    second = await on_postgres.deliver(consumer, replace(twice, attempt=2, token=2))

    assert (first, second) == ((Delivered(), 1, 0), (Delivered(), 1, 0))


@pytest.mark.requirement("G7")
async def test_a_message_whose_handler_failed_is_handled_when_it_comes_again(on_postgres: Room) -> None:
    """Its mark in the inbox is gone with its effect."""

    async def fail_once(received: Message, transaction: Transaction) -> None:
        await on_postgres.effect(received, transaction)
        if received.attempt == 1:
            raise RuntimeError("once")

    consumer, sent = on_postgres.consumer(fail_once), message()

    first, effects, _ = await on_postgres.deliver(consumer, sent)
    assert isinstance(first, Retry)
    assert effects == 0
    assert on_postgres.truth.marks() == set()
    assert await on_postgres.deliver(consumer, replace(sent, attempt=2)) == (Delivered(), 1, 0)


@pytest.mark.requirement("G8")
async def test_a_message_whose_handler_swallowed_an_error_is_not_acknowledged(on_postgres: Room) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK, and calls that success."""

    async def stumble(received: Message, transaction: Transaction) -> None:
        await on_postgres.effect(received, transaction)
        if received.attempt == 1:
            with contextlib.suppress(Exception):  # as careless code does
                await transaction.connection.execute("INSERT INTO nowhere VALUES (1)")

    consumer, sent = on_postgres.consumer(stumble), message()

    first, effects, _ = await on_postgres.deliver(consumer, sent)
    assert isinstance(first, Retry), "an effect that was rolled back was acknowledged"
    assert effects == 0
    assert await on_postgres.deliver(consumer, replace(sent, attempt=2)) == (Delivered(), 1, 0)


@pytest.mark.requirement("G7")
async def test_two_consumers_of_a_message_each_have_its_effect(on_sqlite: Room) -> None:
    """The inbox goes by consumer and message."""
    sent = message()
    for name in ("stock", "billing"):

        async def handle(received: Message, transaction: Transaction, name: str = name) -> None:
            await on_sqlite.effect(received, transaction, consumer=name)

        await on_sqlite.deliver(on_sqlite.consumer(handle, name=name), sent)

    assert [effect.consumer for effect in on_sqlite.truth.effects()] == ["stock", "billing"]


@pytest.mark.requirement("G8", "G12")
async def test_a_message_whose_commit_got_no_answer_is_not_acknowledged(on_postgres: Room) -> None:
    """The session dies in the middle of COMMIT, and nothing was stored."""
    tables_of(on_postgres).query("""
        CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$
        """)
    tables_of(on_postgres).query("""
        CREATE CONSTRAINT TRIGGER dying AFTER INSERT ON chaos_effects DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.handle = 1) EXECUTE FUNCTION die()
        """)
    consumer, sent = on_postgres.consumer(on_postgres.effect), message()

    first, effects, _ = await on_postgres.deliver(consumer, sent)
    assert isinstance(first, Release), "a message without an effect was acknowledged"
    assert effects == 0
    assert await on_postgres.deliver(consumer, replace(sent, attempt=2, token=2)) == (Delivered(), 1, 0)


@pytest.mark.requirement("G8", "G13")
async def test_a_message_that_the_database_was_away_for_has_lost_no_attempt(on_postgres: Room) -> None:
    """It is given back, neither acknowledged nor failed."""

    async def lose(received: Message, transaction: Transaction) -> None:
        await on_postgres.effect(received, transaction)
        if received.attempt == 1:
            await transaction.connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    consumer, sent = on_postgres.consumer(lose), message()

    first, effects, _ = await on_postgres.deliver(consumer, sent)
    assert isinstance(first, Release), f"an outage led to {first}"
    assert effects == 0
    assert await on_postgres.deliver(consumer, replace(sent, attempt=2)) == (Delivered(), 1, 0)


@pytest.mark.requirement("G7")
async def test_two_deliveries_at_once_have_one_effect_where_a_message_is_marked_last(on_postgres: Room) -> None:
    """Both handlers run, and one of them is undone."""
    together = asyncio.Barrier(2)

    async def meet(received: Message, transaction: Transaction) -> None:
        await on_postgres.effect(received, transaction)
        await together.wait()

    consumer, twice = on_postgres.consumer(meet, mode="optimistic"), message()
    async with asyncio.timeout(20):
        said = await asyncio.gather(
            on_postgres.deliver(consumer, twice), on_postgres.deliver(consumer, replace(twice, token=2))
        )

    assert len(on_postgres.truth.effects()) == 1, "the effect happened twice"
    assert [outcome for outcome, _, _ in said] == [Delivered(), Delivered()]


@pytest.mark.requirement("G8", "G9")
async def test_a_message_that_is_put_aside_is_acknowledged_when_the_letter_is_there(on_sqlite: Room) -> None:
    """At the moment of the ack, another connection finds the dead letter and no effect."""

    async def reject(received: Message, transaction: Transaction) -> None:
        await on_sqlite.effect(received, transaction)
        raise RejectError("never")

    said = await on_sqlite.deliver(on_sqlite.consumer(reject), message())

    assert said == (Delivered(), 0, 1)
    assert not isinstance(said[0], Dead)
