"""The GRANT blocks of docs/postgresql.md: each role can do its job, and is refused everything else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from postroom import Consumer, Dispatcher, Message, Outbox, Router, transactional
from postroom.broker import Each
from postroom.brokers import MemoryBroker
from postroom.decisions import Decisions, Enqueued
from postroom.errors import RejectError, StorePermissionError
from postroom.retry import Backoff
from postroom.stores import PostgresStore
from postroom.testing.clients import PostgresClient
from postroom.testing.waiting import until

PAGE = Path(__file__).parents[1] / "docs" / "postgresql.md"
BLOCKS: Mapping[str, str] = {
    match[1]: match[2] for match in re.finditer(r"```sql\n-- role: (\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
}
#: Every relation, with a column that anything can be tried on.
RELATIONS = {
    "postroom_outbox": "payload",
    "postroom_outbox_tickets": "ticket",
    "postroom_outbox_version": "version",
    "postroom_outbox_published": "topic",
    "postroom_outbox_messages": "payload",
    "postroom_inbox": "consumer",
    "postroom_inbox_dead": "payload",
    "postroom_inbox_processed": "message_id",
}
VERBS = {
    "SELECT": "SELECT {column} FROM {relation} LIMIT 0",
    "INSERT": "INSERT INTO {relation} ({column}) SELECT NULL WHERE false",
    "UPDATE": "UPDATE {relation} SET {column} = NULL WHERE false",
    "DELETE": "DELETE FROM {relation} WHERE false",
    "TRUNCATE": "TRUNCATE {relation}",
}
ALLOWED: Mapping[str, set[str]] = {
    "producer": {
        "INSERT postroom_outbox",
        "SELECT postroom_outbox_version",
        *(f"{verb} postroom_outbox_tickets" for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
    },
    "dispatcher": {
        *(f"{verb} postroom_outbox" for verb in ("SELECT", "UPDATE", "DELETE")),
        "SELECT postroom_outbox_version",
    },
    "consumer": {
        *(f"{verb} postroom_inbox" for verb in ("SELECT", "INSERT", "UPDATE", "DELETE")),
        "INSERT postroom_inbox_dead",
        "INSERT postroom_outbox",
        "SELECT postroom_outbox_version",
    },
    "operator": {f"SELECT {relation}" for relation in RELATIONS},
}


@dataclass
class Site:
    """A database with tables, and roles that have what the page grants them."""

    dsn: str
    server: PostgresClient
    names: dict[str, str]

    def url(self, role: str) -> str:
        return self.dsn.replace("postgres@", f"{self.names[role]}@")

    def store(self, role: str, **options: Any) -> PostgresStore:  # noqa: ANN401
        return PostgresStore(self.url(role), **options)

    def grant(self, role: str, block: str | None = None) -> None:
        text = re.sub(rf"\bTO {role}\b", f"TO {self.names[role]}", block or BLOCKS[role])
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(text.encode())

    def run(self, text: str) -> None:
        with psycopg.connect(self.dsn) as connection:
            connection.execute(text.encode())

    def look(self, text: str) -> list[Any]:
        with psycopg.connect(self.dsn) as connection:
            return [row[0] for row in connection.execute(text.encode()).fetchall()]

    @asynccontextmanager
    async def transaction(self, role: str) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.url(role))
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()


@pytest.fixture
def site(postgres_dsn: str, postgres_server: PostgresClient) -> Iterator[Site]:
    store = PostgresStore(postgres_dsn)

    async def apply() -> None:
        await store.apply_schema()
        await store.close()

    asyncio.run(apply())
    names = {role: f"{role}_{uuid4().hex}" for role in ALLOWED}
    for name in names.values():
        postgres_server.query(f"CREATE ROLE {name} LOGIN")
    try:
        yield Site(postgres_dsn, postgres_server, names)
    finally:
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            for name in names.values():
                connection.execute(f"DROP OWNED BY {name}".encode())
                connection.execute(f"DROP ROLE {name}".encode())


def message(number: int, **fields: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", type="order.placed", payload=str(number).encode(), **fields)


@pytest.mark.requirement("S4-24")
def test_the_page_has_a_block_for_each_role() -> None:
    """None is left untested."""
    assert set(BLOCKS) == set(ALLOWED)


@pytest.mark.requirement("S4-24")
@pytest.mark.parametrize("role", sorted(ALLOWED))
def test_a_role_is_refused_whatever_its_block_does_not_grant(role: str, site: Site) -> None:
    """Every verb on every table and view is tried."""
    site.grant(role)
    allowed = set()
    with psycopg.connect(site.url(role), autocommit=True) as connection:
        for relation, column in RELATIONS.items():
            for verb, text in VERBS.items():
                try:
                    connection.execute(text.format(relation=relation, column=column).encode())
                except psycopg.errors.InsufficientPrivilege:
                    continue
                except psycopg.errors.WrongObjectType:  # a view cannot be truncated by anyone
                    continue
                allowed.add(f"{verb} {relation}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SET ROLE postgres")

    assert allowed == ALLOWED[role]


@pytest.mark.requirement("S2-34", "S4-24")
async def test_a_producer_adds_and_hints_and_reads_no_payload(site: Site) -> None:
    """With dedupe keys, batches, order by key and tickets."""
    site.grant("producer")
    store = site.store("producer")
    await store.open()
    outbox, now = store.outbox(), datetime.now(UTC)
    try:
        async with site.transaction("producer") as connection:
            await outbox.add(connection, message(1))
            first = await outbox.add(connection, message(2, dedupe_key="a"))
            again = await outbox.add(connection, message(3, dedupe_key="a"))
            await outbox.add(connection, [message(4), message(5)])
            await outbox.add(connection, [message(6), message(7, headers={"a": "b"})])
            await Outbox(strict_order=True).add(connection, message(8, key="k"))
            decisions = Decisions(outbox)
            await decisions.schedule(connection, "ticket", now)
            [due] = await decisions.find_due(connection)
            decided = await decisions.decide(connection, due.ticket, due.expires_at, message(9))
            await decisions.forget(connection, older_than=timedelta(0))
        store.notify()
        await asyncio.sleep(0)
    finally:
        await store.close()

    assert (again.id, again.is_new) == (first.id, False)
    assert isinstance(decided, Enqueued)
    assert await asyncio.to_thread(site.look, "SELECT count(*) FROM postroom_outbox") == [8]


@pytest.mark.requirement("S4-24")
async def test_a_producer_that_may_only_insert_adds_messages_without_dedupe_keys(site: Site) -> None:
    """What the page says the other grants are for."""
    site.grant("producer", "GRANT INSERT ON postroom_outbox TO producer")
    outbox = Outbox()
    async with site.transaction("producer") as connection:
        await outbox.add(connection, message(1, key="a"), delay=timedelta(minutes=1))
        await outbox.add(connection, [{"order_id": 2}, {"order_id": 3}], topic="orders", type="order.placed")
        await outbox.add(connection, message(4, dedupe_key="a"))
    for refused in ([message(5, dedupe_key="a")], [message(6), message(7)]):
        with pytest.raises(StorePermissionError):
            async with site.transaction("producer") as connection:
                await outbox.add(connection, refused)

    assert await asyncio.to_thread(site.look, "SELECT count(*) FROM postroom_outbox") == [4]


@pytest.mark.requirement("S4-24")
async def test_a_dispatcher_delivers_retries_and_purges(site: Site) -> None:
    """On both drivers it needs no more than its block."""
    site.grant("dispatcher")
    site.grant("producer")
    async with site.transaction("producer") as connection:
        await Outbox().add(connection, [message(1), message(2, key="a"), message(3, key="a")])
    store, broker = site.store("dispatcher"), MemoryBroker()
    failed: list[Message] = []

    async def publish(one: Message) -> None:
        if not failed:
            failed.append(one)
            raise LookupError("not yet")
        await broker.publish_batch([one])

    dispatcher = Dispatcher(store, Each(publish), backoff=Backoff(base=timedelta(milliseconds=1)))
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: len(broker.received) == 3, "three messages", within=timedelta(seconds=60))
    await dispatcher.stop()
    await running
    await store.open()
    try:
        assert (await store.stats()).delivered == 3
        assert await store.purge(older_than=timedelta(0)) == 3
    finally:
        await store.close()


@pytest.mark.requirement("S4-24")
async def test_a_consumer_marks_adds_buries_and_cleans_up(site: Site) -> None:
    """Its handler writes to a table of the application, which the page leaves to it."""
    site.grant("consumer")
    router, handled = Router(), list[int]()

    @router.on("order.placed")
    async def handle(order: Message) -> list[Message]:
        if order.payload == b"2":
            raise RejectError("never")
        handled.append(int(order.payload))
        return [message(10, dedupe_key="x"), message(11, key="y")]

    store, broker = site.store("consumer"), MemoryBroker()
    stack = transactional(store, consumer="stock")
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, stack)
    await broker.publish_batch([first := message(1), message(2), first])
    running = asyncio.create_task(consumer.run())
    await until(lambda: broker.backlog("stock") == 0 or running.done(), "the messages", within=timedelta(seconds=60))
    age = "UPDATE postroom_inbox SET created_at = now() - interval '1 day'"
    await asyncio.to_thread(site.run, age)
    purged = await store.inbox("stock", retention=timedelta(hours=1)).purge(store.transactions(), limit=10)
    await consumer.stop()
    await running

    assert handled == [1]
    assert purged == 1
    assert await asyncio.to_thread(site.look, "SELECT payload FROM postroom_inbox_dead") == [b"2"]
    assert await asyncio.to_thread(site.look, "SELECT count(*) FROM postroom_outbox") == [2]


@pytest.mark.requirement("S4-24")
async def test_an_operator_looks_at_everything_and_has_dead_messages_sent_again(site: Site) -> None:
    """With the statement of the page."""
    site.grant("operator")
    site.grant("producer")
    async with site.transaction("producer") as connection:
        added = await Outbox().add(connection, message(1))
    await asyncio.to_thread(site.run, "UPDATE postroom_outbox SET status = 'dead', attempts = 10")
    [resend] = re.findall(r"```sql\n(UPDATE .*?;)\n```", PAGE.read_text(), flags=re.DOTALL)
    store = site.store("operator")
    await store.open()
    try:
        before = await store.stats()
        assert await store.check_schema() == []
        async with site.transaction("operator") as connection:
            assert await connection.execute(resend.replace("…", str(added.id))) == "UPDATE 1"
        after = await store.stats()
    finally:
        await store.close()

    assert (before.dead, after.pending) == (1, 1)
