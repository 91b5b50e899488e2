"""A user of the database who lacks a permission: dispatchers and consumers stop and say what to grant."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis.asyncio

from postroom import Consumer, Dispatcher, Message, Outbox, Router, Store, dispatcher, events
from postroom.brokers import MemoryBroker
from postroom.errors import StorePermissionError
from postroom.middleware import transactional
from postroom.store import ClaimTerms
from postroom.stores import MySQLStore, PostgresStore
from postroom.stores.redis import RedisStore
from postroom.testing.waiting import until
from postroom.transaction import current_transaction

from .test_transactions import MY, PG, asking

PASSWORD = "letmein"  # noqa: S105 -- of a throw-away server
PATIENCE = 60.0
MOMENT = timedelta(milliseconds=1)
MINUTE = timedelta(minutes=1)
ALL = "SELECT, INSERT, UPDATE, DELETE"


@dataclass
class Guest:
    """A user of a real server with some of the permissions, and the store as its owner sees it."""

    url: str
    make: Callable[..., Any]
    owner: Any
    ask: Callable[[str], Any]

    async def add(self) -> None:
        """Store a message as the owner."""
        async with self.owner.transactions().begin() as transaction:
            await transaction.do(self.owner.outbox().add, [Message(topic="orders", payload=b"{}")])

    def store(self, **options: Any) -> Any:  # noqa: ANN401
        return self.make(self.url, **options)


def as_user(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()


@asynccontextmanager
async def guest_of(family: str, request: pytest.FixtureRequest, grants: dict[str, str]) -> AsyncGenerator[Guest]:
    """A user with the given permissions, by table."""
    dsn = str(request.getfixturevalue("postgres_dsn" if family == PG else "mariadb_dsn"))
    name = f"g{uuid4().hex[:16]}"
    if family == MY:
        # Everybody may do everything in a database whose name begins with "test_".
        await asyncio.to_thread(asking(MY, dsn), f"CREATE DATABASE {name}")
        dsn = urlsplit(dsn)._replace(path=f"/{name}").geturl()
    make: Any = PostgresStore if family == PG else MySQLStore
    owner = make(dsn)
    await owner.apply_schema()
    ask = asking(family, dsn)
    statements = [f"GRANT {rights} ON {table} TO {name}" for table, rights in grants.items()]
    if family == PG:
        statements = [f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'", *statements]
    else:
        statements = [f"CREATE USER {name} IDENTIFIED BY '{PASSWORD}'", *statements]
    for statement in statements:
        await asyncio.to_thread(ask, statement)
    try:
        yield Guest(as_user(dsn, name), make, owner, ask)
    finally:
        await owner.close()
        farewell = ["DROP OWNED BY", "DROP ROLE"] if family == PG else ["DROP USER", "DROP DATABASE"]
        for statement in farewell:
            await asyncio.to_thread(ask, f"{statement} {name}")


#: What a store is opened with, and no more.
READING = dict.fromkeys(
    ("postroom_outbox", "postroom_outbox_version", "postroom_inbox", "postroom_inbox_dead"), "SELECT"
)


async def run(store: Store, **options: Any) -> list[events.Event]:  # noqa: ANN401
    told: list[events.Event] = []
    async with asyncio.timeout(PATIENCE):
        await Dispatcher(store, MemoryBroker(), listener=told.append, **options).run(until_idle=True)
    return told


# -- dispatchers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "options"), [(PG, {}), (PG, {"driver": "psycopg"}), (MY, {})])
async def test_a_dispatcher_that_may_not_claim_ends_and_says_what_to_grant(
    family: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    async with guest_of(family, request, READING) as guest:
        await guest.add()

        with pytest.raises(StorePermissionError, match=r"postroom_outbox.*; grant"):
            await run(guest.store(**options))


async def test_a_dispatcher_of_a_redis_user_without_scripts_ends_and_says_what_to_grant(redis_url: str) -> None:
    async with redis_guest(redis_url, "-@scripting") as (owner, url):
        await add_to_redis(owner)

        with pytest.raises(StorePermissionError, match=r"evalsha.*; let the user run EVALSHA"):
            await run(RedisStore(url, namespace=owner.namespace, profile="volatile"))


@pytest.mark.parametrize("family", [PG, MY])
async def test_a_dispatcher_that_may_not_settle_ends(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, every message would be sent again and again."""
    monkeypatch.setattr(dispatcher, "FAREWELL", 0.1)  # nothing can be settled any more
    grants = {**READING, "postroom_outbox": "SELECT, INSERT, UPDATE"}
    async with guest_of(family, request, grants) as guest:
        await guest.add()

        with pytest.raises(StorePermissionError, match="postroom_outbox"):
            await run(guest.store(keep_delivered=timedelta(0)))


async def test_a_dispatcher_that_may_not_purge_delivers_and_reports_it(request: pytest.FixtureRequest) -> None:
    """Deliveries do not depend on it."""
    grants = {**READING, "postroom_outbox": "SELECT, INSERT, UPDATE"}
    told: list[events.Event] = []
    async with guest_of(PG, request, grants) as guest:
        broker = MemoryBroker()
        delivering = Dispatcher(
            guest.store(), broker, cleanup_interval=timedelta(milliseconds=10), listener=told.append
        )
        running = asyncio.create_task(delivering.run())
        await until(lambda: len(failed(told, "purge")) >= 2, "the purge fails", within=timedelta(seconds=PATIENCE))
        await guest.add()
        await until(lambda: broker.confirmed == 1, "the message is delivered", within=timedelta(seconds=PATIENCE))
        await delivering.stop()
        await running

    assert "grant" in failed(told, "purge")[0].error


def failed(told: list[events.Event], operation: str) -> list[events.StoreFailed]:
    return [event for event in told if isinstance(event, events.StoreFailed) and event.operation == operation]


@asynccontextmanager
async def redis_guest(url: str, *rules: str) -> AsyncGenerator[tuple[RedisStore, str]]:
    """A user of Redis with some of the permissions."""
    name, namespace = f"g{uuid4().hex[:16]}", f"n{uuid4().hex[:16]}"
    client: Any = redis.asyncio.from_url(url)
    await client.execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", "~*", "&*", "+@all", *rules)
    owner = RedisStore(url, namespace=namespace, profile="volatile")
    try:
        yield owner, as_user(url, name)
    finally:
        await owner.close()
        await client.execute_command("ACL", "DELUSER", name)
        await client.aclose()


async def add_to_redis(store: RedisStore) -> None:
    async with store.transactions().begin() as transaction:
        await transaction.do(store.outbox().add, [Message(topic="orders", payload=b"{}")])


# -- the command -------------------------------------------------------------------------------------------------


def dispatch_once(url: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "postroom.cli", "dispatch", "--store", url, "--broker", "stdout:", "--once"]
    done = subprocess.run([*command, *options], capture_output=True, timeout=PATIENCE, check=False, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("family", [PG, MY])
async def test_dispatch_once_without_update_fails_with_what_to_grant(
    family: str, request: pytest.FixtureRequest
) -> None:
    async with guest_of(family, request, READING) as guest:
        await guest.add()

        code, said = await asyncio.to_thread(dispatch_once, guest.url)

    assert code == 1
    assert "postroom_outbox" in said.splitlines()[-1]
    assert "; grant " in said.splitlines()[-1]


async def test_dispatch_once_without_scripts_fails_with_what_to_grant(redis_url: str) -> None:
    async with redis_guest(redis_url, "-@scripting") as (owner, url):
        await add_to_redis(owner)

        code, said = await asyncio.to_thread(
            dispatch_once, url, "--namespace", owner.namespace, "--profile", "volatile"
        )

    assert code == 1
    assert "let the user run EVALSHA" in said.splitlines()[-1]


# -- consumers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "missing"),
    [
        (PG, {}, "postroom_inbox"),
        (PG, {"driver": "psycopg"}, "postroom_inbox"),
        (MY, {}, "postroom_inbox"),
        (PG, {}, "postroom_outbox"),
        (MY, {}, "postroom_outbox"),
    ],
)
async def test_a_consumer_that_may_not_write_ends_and_gives_its_message_back(
    family: str, options: dict[str, Any], missing: str, request: pytest.FixtureRequest
) -> None:
    grants = {**dict.fromkeys(READING, ALL), missing: "SELECT"}
    async with guest_of(family, request, grants) as guest:
        told: list[events.Event] = []
        broker, router = MemoryBroker(), Router(topic="stock")
        store = guest.store(**options)
        around = transactional(store, consumer="stock", max_attempts=1)
        consumer = Consumer(broker.subscribe("orders", group="stock"), router, around, listener=told.append)

        @router.on("order.placed")
        async def reserve() -> dict[str, int]:
            return {"reserved": 1}

        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
        with pytest.raises(StorePermissionError, match=rf"{missing}.*; grant"):
            async with asyncio.timeout(PATIENCE):
                await consumer.run()
        await store.close()

    assert broker.backlog("stock") == 1
    assert broker.dead("stock") == []
    assert not [event for event in told if isinstance(event, events.DeadLettered)]


async def test_a_handler_that_may_not_write_to_a_table_of_its_own_fails_its_message(
    request: pytest.FixtureRequest,
) -> None:
    """That is a fault of the application, which its other handlers need not have."""
    async with guest_of(PG, request, dict.fromkeys(READING, ALL)) as guest:
        await asyncio.to_thread(guest.ask, "CREATE TABLE business (id int)")
        told: list[events.Event] = []
        broker, router = MemoryBroker(), Router()
        store = guest.store()
        around = transactional(store, consumer="stock", max_attempts=1)
        consumer = Consumer(broker.subscribe("orders", group="stock"), router, around, listener=told.append)

        @router.on("order.placed")
        async def reserve() -> None:
            await current_transaction().connection.execute("INSERT INTO business VALUES (1)")

        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
        running = asyncio.create_task(consumer.run())
        await until(lambda: broker.backlog("stock") == 0, "the message is dead", within=timedelta(seconds=PATIENCE))
        assert not running.done()
        await consumer.stop()
        await running
        await store.close()


async def test_a_permission_that_one_handler_lacks_elsewhere_fails_its_message_alone(
    request: pytest.FixtureRequest,
) -> None:
    """It asks another store for something, as a user who may not; all other handlers can go on."""
    async with guest_of(PG, request, {"postroom_outbox_version": "SELECT"}) as guest:
        other, told = guest.store(), list[events.Event]()
        broker, router = MemoryBroker(), Router()
        around = transactional(guest.owner, consumer="stock", max_attempts=2)
        consumer = Consumer(
            broker.subscribe("orders", group="stock"), router, around, listener=told.append, backoff=lambda _: MOMENT
        )

        @router.on("order.counted")
        async def count() -> None:
            await other.stats()

        @router.on("order.placed")
        async def reserve() -> None:
            consumer.stop_soon()

        await broker.publish_batch([Message(topic="orders", type="order.counted", payload=b"{}")])
        running = asyncio.create_task(consumer.run())
        await until(lambda: broker.backlog("stock") == 0, "the message is dead", within=timedelta(seconds=PATIENCE))
        assert not running.done()
        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
        async with asyncio.timeout(PATIENCE):
            await running
        await other.close()

    [failed] = failures(told)
    [dead] = [event for event in told if isinstance(event, events.DeadLettered)]
    assert "permission denied" in failed.error
    assert "permission denied" in dead.error


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_message_that_a_policy_keeps_out_of_the_outbox_fails_alone(
    driver: str, request: pytest.FixtureRequest
) -> None:
    """PostgreSQL has one code for a row that row-level security refuses, and for a missing permission."""
    async with guest_of(PG, request, dict.fromkeys(READING, ALL)) as guest:
        for statement in (
            "ALTER TABLE postroom_outbox ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY reading ON postroom_outbox FOR SELECT USING (true)",
            "CREATE POLICY writing ON postroom_outbox FOR INSERT WITH CHECK (topic <> 'secret')",
        ):
            await asyncio.to_thread(guest.ask, statement)
        told = list[events.Event]()
        broker, router = MemoryBroker(), Router()
        store = guest.store(driver=driver)
        around = transactional(store, consumer="stock", max_attempts=None)
        consumer = Consumer(
            broker.subscribe("orders", group="stock"), router, around, listener=told.append, backoff=lambda _: MINUTE
        )

        @router.on("order.placed")
        async def reserve(message: Message) -> Message:
            if message.key == "last":
                consumer.stop_soon()
            return Message(topic="stock" if message.key else "secret", type="t", payload=b"{}")

        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
        running = asyncio.create_task(consumer.run())
        await until(lambda: bool(failures(told)), "the failure", within=timedelta(seconds=PATIENCE))
        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}", key="last")])
        async with asyncio.timeout(PATIENCE):
            await running
        await store.close()
        claimed = await guest.owner.claim(10, ClaimTerms(worker=uuid4(), lease=MINUTE))

    [failed] = failures(told)
    assert "row-level security" in failed.error
    assert broker.backlog("stock") == 1
    assert [claim.message.topic for claim in claimed] == ["stock"]


def failures(told: list[events.Event]) -> list[events.HandlingFailed]:
    return [event for event in told if isinstance(event, events.HandlingFailed)]


async def test_a_producer_that_may_not_add_is_told_what_to_grant(request: pytest.FixtureRequest) -> None:
    async with guest_of(PG, request, READING) as guest:
        store = guest.store()
        with pytest.raises(StorePermissionError, match=r"postroom_outbox.*; grant"):
            async with store.transactions().begin() as transaction:
                await Outbox().add(transaction.connection, {}, topic="orders")
        await store.close()
