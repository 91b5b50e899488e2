"""What a Redis server itself says of a run: its keys, and its log, in which every change of a message stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import redis.asyncio

from chaos.audit import Change, Effect, Letter, Truth, truth_of
from chaos.checker import CHECKS
from chaos.consumer import WRITERS
from chaos.desk import Rollback, desk_for
from chaos.evidence import Violation, gather
from chaos.log import WHOLE_LOG, commands
from chaos.stores import delivering_store, handling_store
from postroom import ClaimTerms, Dead, Delivered, Message, Release, Retry, Settlement
from postroom.dead_letters import StoredDeadLetters
from postroom.store import Claim, Store
from postroom.testing.servers import ServerMissingError, ValkeyServer
from postroom.testing.waiting import until
from tests.support.server_fixtures import skip_or_fail

LEASE = timedelta(seconds=30)
#: One that can be waited for.
SHORT = timedelta(milliseconds=50)


class Place:
    """A server with one of the stores on it, and what looks into it."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.store: Store = delivering_store(name, url)
        self.truth: Truth = truth_of(name, url)

    async def add(self, count: int = 1, *, delay: timedelta = timedelta(0)) -> list[str]:
        """Add messages as producers do; return their ids."""
        async with desk_for(self.name, self.url) as desk:
            outbox = desk.outbox(strict_order=False)
            async with desk.transaction(outbox) as connection:
                added = await desk.add(
                    outbox, connection, [{"n": n} for n in range(count)], topic="orders", delay=delay
                )
                await desk.note(connection, [one.id for one in added if one.id is not None])
        return [str(one.id) for one in added]

    async def claim(self, lease: timedelta = LEASE, *, limit: int = 10) -> list[Claim]:
        return await self.store.claim(limit, ClaimTerms(worker=uuid4(), lease=lease))

    def changes(self) -> list[Change]:
        """Return what the log says of the messages that are there."""
        there = {row.id for row in self.truth.rows()}
        return [change for change in self.truth.changes() if change.id in there]

    def violations(self, check: str) -> list[Violation]:
        """Return what a check finds wrong with what the server says."""
        evidence = gather([], rows=self.truth.rows(), changes=self.changes())
        return list(CHECKS[check](evidence))


@asynccontextmanager
async def opened(name: str, url: str) -> AsyncIterator[Place]:
    place = Place(name, url)
    place.truth.install()
    await place.store.open()
    try:
        yield place
    finally:
        await place.store.close()
        place.truth.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server whose log is that of these tests alone."""
    server = ValkeyServer(settings=WHOLE_LOG)
    try:
        server.start()
    except ServerMissingError as error:
        skip_or_fail(error)
    yield server
    server.stop()


@pytest.fixture(params=["redis", "redis-stream"])
async def place(request: pytest.FixtureRequest, server: ValkeyServer) -> AsyncIterator[Place]:
    """A store with nothing in it; the log knows what was there before."""
    server.client.ask("FLUSHALL")
    async with opened(request.param, server.dsn) as place:
        yield place


async def test_every_change_of_a_message_stands_in_the_log(place: Place) -> None:
    """Three claims and what became of them: tokens, leases and the time are those of the server."""
    [identity] = await place.add()
    for outcome in (Release(), Retry("it failed"), Delivered()):
        [claim] = await place.claim()
        assert await place.store.settle([Settlement(claim, outcome)]) == []

    changes = place.changes()

    assert place.truth.business() == {identity}
    assert [(row.id, row.status, row.token, row.attempts) for row in place.truth.rows()] == [
        (identity, "delivered", 3, 2)
    ]
    assert [(one.old_status, one.new_status, one.old_token, one.new_token) for one in changes] == [
        ("pending", "processing", 0, 1),
        ("processing", "pending", 1, 1),
        ("pending", "processing", 1, 2),
        ("processing", "pending", 2, 2),
        ("pending", "processing", 2, 3),
        ("processing", "delivered", 3, 3),
    ]
    assert all(one.id == identity for one in changes)
    assert changes[0].new_until == changes[1].old_until == changes[0].at + LEASE // timedelta(microseconds=1)
    assert [one.at for one in changes] == sorted(one.at for one in changes)
    assert place.truth.unsettled() == (0, 1)


async def test_renewals_and_deaths_stand_there_too(place: Place) -> None:
    """A lease that is extended, one that runs out, a death, and a confirmation that comes after it."""
    [identity] = await place.add()
    [lost] = await place.claim(SHORT)
    await asyncio.sleep(2 * SHORT.total_seconds())
    [held] = await place.claim(SHORT)
    assert await place.store.settle([Settlement(lost, Delivered())]) == [lost]
    assert await place.store.extend([held], LEASE) == []
    assert await place.store.settle([Settlement(held, Dead("it is hopeless"))]) == []
    [dead] = place.truth.rows()
    assert await place.store.settle([Settlement(held, Delivered())]) == []

    changes = place.changes()

    assert (dead.id, dead.status, dead.error, dead.attempts) == (identity, "dead", "it is hopeless", 2)
    assert [(one.old_status, one.new_status, one.new_token) for one in changes] == [
        ("pending", "processing", 1),
        ("processing", "processing", 2),
        ("processing", "processing", 2),
        ("processing", "dead", 2),
        ("dead", "delivered", 2),
    ]
    assert (changes[1].old_until or 0) < changes[1].at
    assert (changes[2].new_until or 0) > (changes[1].new_until or 0)
    assert [row.status for row in place.truth.rows()] == ["delivered"]
    assert place.violations("C4") == []


async def test_what_waits_is_counted_whether_it_is_due_or_not(place: Place) -> None:
    """A run ends when nothing waits; what was rolled back never did."""
    await place.add(2)
    await place.add(delay=LEASE)
    async with desk_for(place.name, place.url) as desk:
        outbox = desk.outbox(strict_order=False)
        with pytest.raises(Rollback):
            async with desk.transaction(outbox) as connection:
                await desk.add(outbox, connection, [{"n": 0}], topic="orders")
                raise Rollback
    [first] = await place.claim(limit=1)
    await place.store.settle([Settlement(first, Delivered())])

    assert place.truth.unsettled() == (2, 1)
    assert sorted(row.status for row in place.truth.rows()) == ["delivered", "pending", "pending"]
    assert len(place.truth.business()) == 3


async def test_the_log_outlives_a_server_that_is_killed(private_valkey: ValkeyServer) -> None:
    """What was answered is there, in its order, before the kill and after it."""
    async with opened("redis", private_valkey.dsn) as place:
        [identity] = await place.add()
        [claim] = await place.claim()
    private_valkey.kill9()
    private_valkey.start()
    async with opened("redis", private_valkey.dsn) as place:
        await place.store.settle([Settlement(claim, Delivered())])

        assert [(one.id, one.new_status) for one in place.truth.changes()] == [
            (identity, "processing"),
            (identity, "delivered"),
        ]


async def test_what_consumers_leave_behind_in_redis_is_read_past_the_library(place: Place) -> None:
    """Effects, marks in the inbox and dead letters, each with the consumer that they are of."""
    store, write = handling_store(place.name, place.url), WRITERS["redis"]
    handled, given_up = Message(topic="orders", payload=b"{}"), Message(topic="orders", payload=b"{}", attempt=3)
    inbox = store.inbox("stock", mode="pessimistic", by="id", retention=LEASE, redelivery_horizon=None)

    async with store.transactions().begin() as transaction:
        assert await inbox.admit(transaction, handled)
        await transaction.do(write, "stock", str(handled.id), 7, str(given_up.id))
    await StoredDeadLetters(inbox, store.transactions()).bury(given_up, "it always fails")
    await store.close()

    assert place.truth.effects() == [Effect(consumer="stock", id=str(handled.id), handle=7, output=str(given_up.id))]
    assert place.truth.marks() == {("stock", str(handled.id))}
    assert place.truth.letters() == [Letter(consumer="stock", id=str(given_up.id), attempts=3, error="it always fails")]
    assert place.truth.oddities() == []


async def test_a_message_has_one_claim_at_a_time(place: Place) -> None:
    """Another worker that asks for messages gets none that somebody holds."""
    await place.add(3)

    await place.claim()
    await place.claim()

    assert place.violations("C4") == []


async def test_what_was_only_claimed_is_not_marked_as_delivered(place: Place) -> None:
    """Whoever claimed it may die before anybody has it."""
    await place.add(3)

    await place.claim()

    assert place.violations("C1") == []


async def test_a_log_that_was_written_anew_is_not_believed(private_valkey: ValkeyServer) -> None:
    """What came before is missing from it."""
    async with redis.asyncio.Redis.from_url(private_valkey.dsn) as client:
        told = await client.config_get("dir", "appenddirname")
        folder = Path(str(told["dir"]), str(told["appenddirname"]))
        await client.set("stock", 1)
        assert [b"SET", b"stock", b"1"] in list(commands(folder))
        await client.bgrewriteaof()

        async def is_written() -> bool:
            info = await client.info("persistence")
            return not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]

        await until(is_written, "a log that tells what is left")
        with pytest.raises(ValueError, match="written anew"):
            list(commands(folder))
