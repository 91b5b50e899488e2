"""What the database itself says of a run: every change of a message, and transactions that nobody ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pymysql
import pytest

from chaos.audit import Effect, Letter, MariaDBTruth, Truth, truth_of
from chaos.consumer import WRITERS
from chaos.desk import desk_for
from postroom import ClaimTerms, Delivered, Message, Outbox, Release, Settlement
from postroom.dead_letters import StoredDeadLetters
from postroom.stores import SQLStore, store_from_url
from postroom.testing.waiting import until
from tests.worlds import DATABASES, SQL_SERVERS


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A store and an empty database of it."""
    name: str = request.param
    if name == "sqlite":
        return name, f"sqlite:///{tmp_path}/chaos.sqlite3"
    dsn: str = request.getfixturevalue(f"{name}_dsn")
    return name, dsn


@pytest.fixture
async def store(url: tuple[str, str]) -> AsyncIterator[SQLStore]:
    """A store whose changes are written down."""
    opened = store_from_url(url[1])
    assert isinstance(opened, SQLStore)
    await opened.apply_schema()
    truth_of(*url).install()
    await opened.open()
    yield opened
    await opened.close()


async def test_every_change_of_a_message_is_written_down_by_the_database(url: tuple[str, str], store: SQLStore) -> None:
    """Two claims and what became of them: tokens, leases and the time are those of the store."""
    truth, outbox = truth_of(*url), Outbox()
    async with desk_for(*url) as desk, desk.transaction(outbox) as connection:
        [added] = await desk.add(outbox, connection, [{"n": 1}], topic="orders", key="k")
        assert added.id is not None
        await desk.note(connection, [added.id])
    terms = ClaimTerms(worker=uuid4(), lease=timedelta(seconds=30))
    for outcome in (Release(), Delivered()):
        [claim] = await store.claim(1, terms)
        assert await store.settle([Settlement(claim, outcome)]) == []

    changes = truth.changes()

    assert truth.business() == {str(added.id)}
    assert [(row.id, row.status, row.token, row.attempts) for row in truth.rows()] == [
        (str(added.id), "delivered", 2, 1)
    ]
    assert [(one.old_status, one.new_status, one.old_token, one.new_token) for one in changes] == [
        ("pending", "processing", 0, 1),
        ("processing", "pending", 1, 1),
        ("pending", "processing", 1, 2),
        ("processing", "delivered", 2, 2),
    ]
    assert all(one.id == str(added.id) for one in changes)
    assert changes[0].new_until == changes[1].old_until
    assert changes[0].at < (changes[0].new_until or 0)
    assert changes[0].at <= changes[1].at <= changes[2].at
    assert truth.unsettled() == (0, 1)


async def test_what_consumers_leave_behind_is_read_past_the_library(url: tuple[str, str], store: SQLStore) -> None:
    """Effects, marks in the inbox and dead letters, each with the consumer that they are of."""
    truth, write = truth_of(*url), WRITERS[url[1].partition(":")[0]]
    handled, given_up = Message(topic="orders", payload=b"{}"), Message(topic="orders", payload=b"{}", attempt=3)
    inbox, transactions = store.inbox("stock"), store.transactions()

    async with transactions.begin() as transaction:
        assert await inbox.admit(transaction, handled)
        await transaction.do(write, "stock", str(handled.id), 7, str(given_up.id))
    await StoredDeadLetters(inbox, transactions).bury(given_up, "it always fails")

    assert truth.effects() == [Effect(consumer="stock", id=str(handled.id), handle=7, output=str(given_up.id))]
    assert truth.marks() == {("stock", str(handled.id))}
    assert truth.letters() == [Letter(consumer="stock", id=str(given_up.id), attempts=3, error="it always fails")]


@contextlib.contextmanager
def idle_in_transaction(truth: Truth) -> Iterator[None]:
    """Begin a transaction, and then do nothing."""
    if isinstance(truth, MariaDBTruth):
        place = truth.place
        with contextlib.closing(pymysql.connect(**place)) as connection, connection.cursor() as cursor:
            connection.begin()
            cursor.execute("INSERT INTO chaos_business (id) VALUES ('1')")
            yield
    else:
        with psycopg.connect(truth.url) as session:
            session.execute("INSERT INTO chaos_business (id) VALUES ('1')")
            yield
            session.rollback()


@pytest.mark.parametrize("url", SQL_SERVERS, indirect=True)
async def test_a_transaction_that_nobody_ends_is_noticed(url: tuple[str, str], store: SQLStore) -> None:
    """Sessions are a leak as well, and one in an open transaction holds locks besides."""
    truth = truth_of(*url)
    await store.close()
    await until(lambda: truth.sessions() == [], "no session")

    with idle_in_transaction(truth):
        await until(lambda: len(truth.idle_transactions()) == 1, "the open transaction being seen")
        assert len(truth.sessions()) == 1
    await until(lambda: truth.idle_transactions() == [] and truth.sessions() == [], "the end of it being seen")
