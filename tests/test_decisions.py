"""Due-time decisions: a ticket ends once, in one of two ways, on Redis and on every SQL database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncmy.errors
import pytest
import redis
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from sqlalchemy import orm

from postroom import ClaimTerms, Message, Outbox
from postroom.decisions import (
    Decisions,
    Due,
    Duplicate,
    Enqueued,
    Expired,
    NotDue,
    Revoked,
    Scheduled,
    Stale,
    expiry_id,
)
from postroom.errors import (
    ConfigurationError,
    InvalidDueTimeError,
    InvalidTicketError,
    NotInTransactionError,
    SchemaMissingError,
    StoreContentionError,
    StoreError,
)
from postroom.stores import MemoryStore
from postroom.stores.redis import RedisStore, RedisStreamStore
from postroom.stores.redis.decisions import ticket_keys
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.record import unpacked
from postroom.stores.sql.driver import Steps
from postroom.stores.sql.drivers.psycopg import PsycopgDriver
from postroom.stores.sql.names import Names
from postroom.stores.sql.statement import Result, Statement
from postroom.testing.clients import ValkeyClient
from postroom.testing.faults import FaultProxy
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until

from . import test_schema as schemas
from . import test_writers as writers
from .rooms import Room
from .test_inbox import DEADLOCK
from .test_redis_store import cli
from .test_writers import LIBRARIES, Databases, Library, alchemy, awaited, look

databases = writers.databases
room = schemas.room

PAST = datetime(2026, 1, 1, tzinfo=UTC)
LATER = PAST + timedelta(hours=1)
FUTURE = datetime(2126, 1, 1, tzinfo=UTC)
ALL = timedelta(0)
EXPIRED, REVOKED = "tickets.expired", "tickets.revoked"


class Place(Protocol):
    """Somewhere that tickets are kept."""

    def opened(self) -> AbstractAsyncContextManager[Any]:
        """Open what the methods of `Decisions` take; what was done is kept if the block ends well."""
        ...

    async def events(self, outbox: Outbox) -> list[tuple[str, UUID, bytes]]:
        """Return topic, id and payload of every event that is stored."""
        ...

    async def deliver(self, outbox: Outbox) -> None:
        """Take all events away, as if they had been delivered and purged."""
        ...


class SQLPlace:
    """A library that speaks to a database."""

    def __init__(self, library: Library, databases: Databases) -> None:
        self.library = library
        self.databases = databases

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any]:
        async with self.library.opened(self.databases) as link:
            await link.begin()
            try:
                yield link.handle
            except BaseException:
                await link.rollback()
                raise
            await link.commit()

    async def events(self, outbox: Outbox) -> list[tuple[str, UUID, bytes]]:
        where = f"FROM postroom_outbox WHERE namespace = '{outbox.namespace}' ORDER BY seq"
        rows = look(self.databases, self.library.database, f"SELECT topic, id, payload {where}")
        return [(topic, _uuid(identity), bytes(payload)) for topic, identity, payload in rows]

    async def deliver(self, outbox: Outbox) -> None:
        look(
            self.databases,
            self.library.database,
            f"DELETE FROM postroom_outbox WHERE namespace = '{outbox.namespace}'",
        )


def _uuid(value: Any) -> UUID:  # noqa: ANN401 -- each database has its own
    if isinstance(value, UUID):
        return value
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(value)


class RedisPlace:
    """A client of redis-py's, whose calls are awaited or not."""

    def __init__(self, url: str, *, is_async: bool = True) -> None:
        self.url = url
        self._is_async = is_async

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any]:
        if self._is_async:
            async with redis.asyncio.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
                yield client
        else:
            with closing(redis.Redis.from_url(self.url)) as client:
                yield client

    async def events(self, outbox: Outbox) -> list[tuple[str, UUID, bytes]]:
        with closing(redis.Redis.from_url(self.url)) as client:
            stored: Any = client.hgetall(Keys(outbox.table, outbox.namespace).all[0])
        said: dict[str, Any] = {"namespace": outbox.namespace, "attempt": 0, "token": 0, "arrived": 0}
        messages = [unpacked(UUID(bytes=identity), body, **said)[0] for identity, body in stored.items()]
        return [(message.topic, message.id, message.payload) for message in messages]

    async def deliver(self, outbox: Outbox) -> None:
        with closing(redis.Redis.from_url(self.url)) as client:
            client.delete(*Keys(outbox.table, outbox.namespace).all)


@pytest.fixture(params=[*(library.name for library in LIBRARIES), "redis", "redis-async"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Every library there is."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    return place_of(request, request.param)


SOME = ("asyncpg", "psycopg", "sqlite3", "asyncmy-found-rows", "redis", "redis-async")


@pytest.fixture(params=SOME)
def place(request: pytest.FixtureRequest) -> Place:
    """A library of every kind, on every database."""
    return place_of(request, request.param)


def place_of(request: pytest.FixtureRequest, name: str) -> Place:
    if name.startswith("redis"):
        server: ValkeyClient = request.getfixturevalue("valkey_server")
        return RedisPlace(server.dsn, is_async=name == "redis-async")
    return SQLPlace(_library(name), request.getfixturevalue("databases"))


def _library(name: str) -> Library:
    return next(library for library in LIBRARIES if library.name == name)


@pytest.fixture
def decisions() -> Decisions:
    """Decisions whose namespace is this test's own."""
    return Decisions(Outbox(namespace=f"ns-{uuid4().hex}"))


async def call(place: Place, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Ask one thing, in a transaction of its own where there is one."""
    async with place.opened() as connection:
        return await awaited(method(connection, *arguments, **options))


async def decide(place: Place, decisions: Decisions, ticket: str, expires_at: datetime = PAST, **options: Any) -> Any:  # noqa: ANN401
    event = {"ticket": ticket}
    return await call(place, decisions.decide, ticket, expires_at, event, topic=EXPIRED, **options)


async def cancel(place: Place, decisions: Decisions, ticket: str, **options: Any) -> Any:  # noqa: ANN401
    return await call(place, decisions.cancel, ticket, {"ticket": ticket}, topic=REVOKED, **options)


async def topics(place: Place, decisions: Decisions) -> list[str]:
    return [topic for topic, _, _ in await place.events(decisions.outbox)]


# -- on every library --------------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-22", "S3-25", "S3-26")
async def test_a_ticket_that_is_due_expires_once_and_says_so_under_an_id_known_before(
    anywhere: Place, decisions: Decisions
) -> None:
    """Whoever decides it again is told that it was decided."""
    identity = expiry_id(decisions.outbox.namespace, "t", PAST)

    scheduled = await call(anywhere, decisions.schedule, "t", PAST)
    due = await call(anywhere, decisions.find_due)
    first = await decide(anywhere, decisions, *due[0])
    second = await decide(anywhere, decisions, "t")
    after = await call(anywhere, decisions.find_due)

    assert (scheduled, due) == (Scheduled(), [Due("t", PAST)])
    assert (first, second, after) == (Enqueued(identity), Duplicate(identity), [])
    assert identity.version == 3
    assert await anywhere.events(decisions.outbox) == [(EXPIRED, identity, b'{"ticket":"t"}')]


# -- what is answered --------------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-25", "S3-27")
async def test_a_ticket_that_was_revoked_does_not_expire(place: Place, decisions: Decisions) -> None:
    """The decision itself looks whether the ticket was revoked, so nothing comes in between."""
    await call(place, decisions.schedule, "t", PAST)
    [due] = await call(place, decisions.find_due)

    revoked = await cancel(place, decisions, "t")
    decided = await decide(place, decisions, *due)
    renewed = await call(place, decisions.renew, "t", FUTURE)
    again = await cancel(place, decisions, "t")

    assert isinstance(revoked, Enqueued)
    assert (decided, renewed, again) == (Revoked(), Revoked(), Revoked())
    assert await call(place, decisions.find_due) == []
    assert await topics(place, decisions) == [REVOKED]


@pytest.mark.requirement("S3-25")
async def test_a_ticket_that_has_expired_can_be_neither_revoked_nor_renewed(place: Place, decisions: Decisions) -> None:
    """Never both events; who comes late is told, and decides what that means."""
    await call(place, decisions.schedule, "t", PAST)
    await decide(place, decisions, "t")

    told = [
        await cancel(place, decisions, "t"),
        await call(place, decisions.renew, "t", FUTURE),
        await call(place, decisions.schedule, "t", FUTURE),
        await decide(place, decisions, "t", FUTURE),
    ]

    assert told == [Expired(), Expired(), Expired(), Stale()]
    assert await topics(place, decisions) == [EXPIRED]


@pytest.mark.requirement("S3-24")
async def test_due_tickets_come_oldest_first_and_looking_takes_nothing(place: Place, decisions: Decisions) -> None:
    """And what is not due is not among them."""
    nothing = await call(place, decisions.find_due)
    for ticket, expires_at in (("b", LATER), ("a", LATER), ("c", PAST), ("d", FUTURE)):
        await call(place, decisions.schedule, ticket, expires_at)

    two = await call(place, decisions.find_due, limit=2)
    every = await call(place, decisions.find_due)
    none = await call(place, decisions.find_due, limit=0)

    assert nothing == []
    assert two == [Due("c", PAST), Due("a", LATER)]
    assert every == [Due("c", PAST), Due("a", LATER), Due("b", LATER)]
    assert none == []


@pytest.mark.requirement("S3-25")
async def test_a_cutoff_leaves_out_what_ends_after_it(place: Place, decisions: Decisions) -> None:
    """To the millisecond; a cutoff that the store's clock has not reached makes nothing due before its time."""
    soon = PAST + timedelta(milliseconds=1)
    for ticket, expires_at in (("a", PAST), ("b", soon), ("c", FUTURE)):
        await call(place, decisions.schedule, ticket, expires_at)
    before = soon - timedelta(microseconds=1)

    found = [await call(place, decisions.find_due, due_cutoff=cutoff) for cutoff in (PAST, before, soon, FUTURE)]
    one = await call(place, decisions.find_due, due_cutoff=soon, limit=1)
    early = [await decide(place, decisions, "b", soon, due_cutoff=cutoff) for cutoff in (PAST, before)]
    known = await decide(place, decisions, "b", soon, due_cutoff=before, is_revoked=True)
    future = await decide(place, decisions, "c", FUTURE, due_cutoff=FUTURE + timedelta(days=1))
    decided = await decide(place, decisions, "b", soon, due_cutoff=soon)
    again = await decide(place, decisions, "b", soon, due_cutoff=PAST)

    both = [Due("a", PAST), Due("b", soon)]
    assert (found, one) == ([both[:1], both[:1], both, both], both[:1])
    assert (early, known, future) == ([NotDue(), NotDue()], NotDue(), NotDue())
    assert (type(decided), type(again)) == (Enqueued, Duplicate)
    assert await topics(place, decisions) == [EXPIRED]


@pytest.mark.requirement("S3-25")
@pytest.mark.parametrize("wrong", [datetime(2026, 1, 1), "2026-01-01", PAST.replace(year=1000)])  # noqa: DTZ001
def test_a_cutoff_that_is_no_moment_is_refused(wrong: Any) -> None:  # noqa: ANN401
    """By its name, before anything is asked."""
    decisions = Decisions(Outbox())
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(InvalidDueTimeError, match="due_cutoff"):
            decisions.find_due(connection, due_cutoff=wrong)
        with pytest.raises(InvalidDueTimeError, match="due_cutoff"):
            decisions.decide(connection, "t", PAST, {}, topic=EXPIRED, due_cutoff=wrong)


@pytest.mark.requirement("S3-25")
async def test_a_ticket_is_not_decided_before_its_time_by_the_store_s_clock(place: Place, decisions: Decisions) -> None:
    """What the caller believes about the time does not matter."""
    await call(place, decisions.schedule, "t", FUTURE)

    decided = await decide(place, decisions, "t", FUTURE)
    known = await decide(place, decisions, "t", FUTURE, is_revoked=True)
    revoked = await cancel(place, decisions, "t")

    assert (decided, known) == (NotDue(), NotDue())
    assert isinstance(revoked, Enqueued)
    assert await topics(place, decisions) == [REVOKED]


@pytest.mark.requirement("S3-26")
async def test_who_did_not_see_that_a_ticket_was_renewed_is_told_when_it_ends(
    place: Place, decisions: Decisions
) -> None:
    """The id of the event belongs to one end, so that end must still hold."""
    await call(place, decisions.schedule, "t", PAST)
    [due] = await call(place, decisions.find_due)

    renewed = await call(place, decisions.renew, "t", LATER)
    stale = await decide(place, decisions, *due)
    decided = await decide(place, decisions, "t", stale.expires_at)

    assert (renewed, stale) == (Scheduled(), Stale(LATER))
    assert decided == Enqueued(expiry_id(decisions.outbox.namespace, "t", LATER))
    assert await topics(place, decisions) == [EXPIRED]


@pytest.mark.requirement("S3-24")
async def test_a_ticket_that_is_renewed_into_the_future_is_no_longer_due(place: Place, decisions: Decisions) -> None:
    """And one that is renewed into the past is."""
    for ticket, expires_at in (("a", PAST), ("b", FUTURE)):
        await call(place, decisions.schedule, ticket, expires_at)

    for ticket, expires_at in (("a", FUTURE), ("b", PAST)):
        await call(place, decisions.renew, ticket, expires_at)

    assert await call(place, decisions.find_due) == [Due("b", PAST)]


@pytest.mark.requirement("S3-22")
async def test_a_ticket_can_be_scheduled_again_but_only_to_the_same_end(place: Place, decisions: Decisions) -> None:
    """A call whose answer got lost may be repeated, and changes nothing that was renewed since."""
    first = await call(place, decisions.schedule, "t", PAST)
    second = await call(place, decisions.schedule, "t", PAST)
    other = await call(place, decisions.schedule, "t", LATER)

    assert (first, second, other) == (Scheduled(), Scheduled(), Stale(PAST))
    assert await call(place, decisions.find_due) == [Due("t", PAST)]


@pytest.mark.requirement("S3-22")
async def test_an_end_between_two_milliseconds_is_the_next_of_them_for_everybody(
    place: Place, decisions: Decisions
) -> None:
    """Whether it is said as it was or as it is stored."""
    between = PAST + timedelta(microseconds=1)

    scheduled = [await call(place, decisions.schedule, "t", between) for _ in range(2)]
    [due] = await call(place, decisions.find_due)
    first = await decide(place, decisions, "t", between)
    second = await decide(place, decisions, *due)

    assert scheduled == [Scheduled(), Scheduled()]
    assert due == Due("t", PAST + timedelta(milliseconds=1))
    assert second == Duplicate(first.id)


@pytest.mark.requirement("S3-26")
async def test_a_late_repetition_does_not_bring_a_ticket_back(place: Place, decisions: Decisions) -> None:
    """Not even after its event was delivered and purged, when nothing in the outbox tells of it any more."""
    await call(place, decisions.schedule, "t", PAST)
    await decide(place, decisions, "t")
    await place.deliver(decisions.outbox)

    scheduled = await call(place, decisions.schedule, "t", PAST)
    decided = await decide(place, decisions, "t")

    assert scheduled == Expired()
    assert decided == Duplicate(expiry_id(decisions.outbox.namespace, "t", PAST))
    assert await topics(place, decisions) == []


@pytest.mark.requirement("S3-25")
async def test_nothing_is_said_of_a_ticket_that_is_not_known(place: Place, decisions: Decisions) -> None:
    """It may have been forgotten, so that an event could be its second."""
    told = [
        await decide(place, decisions, "t"),
        await cancel(place, decisions, "t"),
        await call(place, decisions.renew, "t", LATER),
    ]

    assert told == [Stale(), Stale(), Stale()]
    assert await topics(place, decisions) == []
    assert await call(place, decisions.find_due) == []


@pytest.mark.requirement("S3-27")
async def test_what_the_caller_knows_of_a_revocation_counts_as_well(place: Place, decisions: Decisions) -> None:
    """The flag of old is kept as an extra input, and ends the ticket without an event."""
    await call(place, decisions.schedule, "t", PAST)

    known = await decide(place, decisions, "t", is_revoked=True)
    decided = await decide(place, decisions, "t")

    assert (known, decided) == (Revoked(), Revoked())
    assert await topics(place, decisions) == []
    assert await call(place, decisions.find_due) == []


@pytest.mark.requirement("S3-25")
async def test_an_event_that_is_there_already_still_ends_its_ticket(place: Place, decisions: Decisions) -> None:
    """A dedupe key holds for the events of tickets too."""
    for ticket in ("a", "b"):
        await call(place, decisions.schedule, ticket, PAST)

    first = await cancel(place, decisions, "a", dedupe_key="one")
    second = await cancel(place, decisions, "b", dedupe_key="one")

    assert second == Duplicate(first.id)
    assert await call(place, decisions.find_due) == []
    assert await topics(place, decisions) == [REVOKED]


@pytest.mark.requirement("S3-25", "S3-26")
async def test_an_event_with_the_id_of_an_end_is_not_stored_twice(place: Place, decisions: Decisions) -> None:
    """Whoever stored it, such as an application that moved its tickets here."""
    known = Message(id=expiry_id(decisions.outbox.namespace, "t", PAST), topic=EXPIRED, type="x", payload=b"{}")
    await call(place, decisions.outbox.add, known)
    await call(place, decisions.schedule, "t", PAST)

    decided = await decide(place, decisions, "t")

    assert decided == Duplicate(known.id)
    assert await call(place, decisions.find_due) == []
    assert await topics(place, decisions) == [EXPIRED]


async def test_tickets_that_ended_are_forgotten_the_oldest_first_and_open_ones_never(
    place: Place, decisions: Decisions
) -> None:
    """A forgotten one is as if it had never been; the outbox may hold its event for as long as it likes."""
    for ticket in ("a", "b", "open"):
        await call(place, decisions.schedule, ticket, PAST)
    await decide(place, decisions, "a")
    await cancel(place, decisions, "b")

    counts = [
        await call(place, decisions.forget, older_than=timedelta(days=1)),
        await call(place, decisions.forget, older_than=ALL, limit=1),
        await call(place, decisions.forget, older_than=ALL),
        await call(place, decisions.forget, older_than=ALL),
    ]

    assert counts == [0, 1, 1, 0]
    assert await call(place, decisions.find_due) == [Due("open", PAST)]
    assert await decide(place, decisions, "a") == Stale()
    assert await cancel(place, decisions, "b") == Stale()


@pytest.mark.requirement("S3-22")
async def test_a_ticket_may_have_any_printable_name(place: Place, decisions: Decisions) -> None:
    """None of it is taken for a part of a key, a hash tag or a statement."""
    names = {"{t}", "}{", "a:b|c", "ünï ☃", "%7B", "'; --", "x" * 255}
    async with place.opened() as connection:
        for ticket in names:
            await awaited(decisions.schedule(connection, ticket, PAST))
        due = await awaited(decisions.find_due(connection))
        told = [await awaited(decisions.decide(connection, one.ticket, PAST, {}, topic=EXPIRED)) for one in due]

    assert {one.ticket for one in due} == names
    assert {type(decided) for decided in told} == {Enqueued}


@pytest.mark.requirement("S3-25")
async def test_the_event_is_stored_byte_for_byte(place: Place, decisions: Decisions) -> None:
    """A message of the caller's keeps everything but its id."""
    payloads = [b"[]", b"null", b"9007199254740993", b"\x00\xff", b"x" * 200_000]
    async with place.opened() as connection:
        for number, payload in enumerate(payloads):
            event = Message(topic=EXPIRED, type="expired", payload=payload, content_type="application/octet-stream")
            await awaited(decisions.schedule(connection, f"t{number}", PAST))
            await awaited(decisions.decide(connection, f"t{number}", PAST, event))

    ids = [expiry_id(decisions.outbox.namespace, f"t{number}", PAST) for number in range(len(payloads))]
    stored = {identity: payload for _, identity, payload in await place.events(decisions.outbox)}
    assert stored == dict(zip(ids, payloads, strict=True))


@pytest.mark.requirement("S3-26")
async def test_tickets_of_two_namespaces_are_strangers(place: Place, decisions: Decisions) -> None:
    """Ids are unique in a table that namespaces share, so theirs must differ for the same ticket."""
    other = Decisions(Outbox(namespace=f"{decisions.outbox.namespace}-other"))
    for each in (decisions, other):
        await call(place, each.schedule, "t", PAST)

    told = [await decide(place, each, "t") for each in (decisions, other)]

    assert all(isinstance(decided, Enqueued) for decided in told)
    assert await topics(place, other) == [EXPIRED]


# -- without a store ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-26")
def test_the_id_of_an_event_depends_on_the_moment_and_not_on_how_it_is_written() -> None:
    """Stores keep whole milliseconds, up to the next one, so nothing ends before its time."""
    east = PAST.astimezone(timezone(timedelta(hours=9)))
    same = {expiry_id("shop", "t", moment) for moment in (PAST, east, PAST - timedelta(microseconds=999))}
    others = {
        expiry_id("shop", "t", PAST + timedelta(microseconds=1)),
        expiry_id("shop", "t", PAST - timedelta(milliseconds=1)),
        expiry_id("shop", "u", PAST),
        expiry_id("shed", "t", PAST),
    }

    assert same == {UUID("4021abee-33e3-3f68-a16e-5261b0e2c0b2")}
    assert len(others) == 4
    assert same.isdisjoint(others)


@pytest.mark.parametrize("ticket", ["", " t", "a\nb", "x" * 256, "\ud800", 7])
def test_a_ticket_without_a_proper_name_is_refused(decisions: Decisions, ticket: Any) -> None:  # noqa: ANN401
    connection = sqlite3.connect(":memory:")
    with closing(connection), pytest.raises(InvalidTicketError, match="ticket"):
        decisions.schedule(connection, ticket, PAST)
    with closing(connection), pytest.raises(InvalidTicketError, match="ticket"):
        decisions.decide(connection, ticket, PAST, {}, topic=EXPIRED)


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), datetime(1969, 1, 1, tzinfo=UTC), "2026-01-01"])  # noqa: DTZ001
def test_an_end_that_is_no_moment_is_refused(decisions: Decisions, moment: Any) -> None:  # noqa: ANN401
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(InvalidDueTimeError, match="expires_at"):
        decisions.renew(connection, "t", moment)


def test_a_memory_store_says_that_it_has_no_tickets(decisions: Decisions) -> None:
    with MemoryStore().transaction() as transaction, pytest.raises(ConfigurationError, match="no tickets"):
        decisions.schedule(transaction, "t", PAST)


# -- in a transaction of SQL -------------------------------------------------------------------------------------

SQL = [name for name in SOME if not name.startswith("redis")]


@pytest.mark.requirement("S3-25")
@pytest.mark.parametrize("name", SQL)
async def test_a_rollback_takes_back_the_decision_and_its_event(
    name: str, databases: Databases, decisions: Decisions
) -> None:
    """They share the fate of the caller's transaction."""
    place = SQLPlace(_library(name), databases)
    await call(place, decisions.schedule, "t", PAST)

    async with place.library.opened(databases) as link:
        await link.begin()
        first = await awaited(decisions.decide(link.handle, "t", PAST, {}, topic=EXPIRED))
        await link.rollback()
    between = await topics(place, decisions)
    second = await decide(place, decisions, "t")

    assert first == second == Enqueued(expiry_id(decisions.outbox.namespace, "t", PAST))
    assert between == []
    assert await topics(place, decisions) == [EXPIRED]


@pytest.mark.requirement("S3-25")
@pytest.mark.parametrize("name", SQL)
async def test_outside_a_transaction_one_may_look_and_not_decide(
    name: str, databases: Databases, decisions: Decisions
) -> None:
    """A decision and its event could be torn apart."""
    async with _library(name).opened(databases, autocommit=True) as link:
        found = await awaited(decisions.find_due(link.handle))
        with pytest.raises(NotInTransactionError):
            await awaited(decisions.decide(link.handle, "t", PAST, {}, topic=EXPIRED))
        with pytest.raises(NotInTransactionError):
            await awaited(decisions.schedule(link.handle, "t", PAST))

    assert found == []


WAITING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mariadb": (
        "SELECT count(*) FROM information_schema.processlist "
        "WHERE db = DATABASE() AND info LIKE 'SELECT status%postroom_outbox_tickets%' AND time_ms > 100"
    ),
}


@pytest.mark.requirement("S3-27")
@pytest.mark.parametrize("name", ["asyncpg", "psycopg-async", "asyncmy"])
@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "rolled back"])
async def test_a_revocation_waits_for_the_decision_that_is_under_way(
    name: str, databases: Databases, decisions: Decisions, *, is_committed: bool
) -> None:
    """And then says what became of it, so that there is one event whoever comes first."""
    place = SQLPlace(_library(name), databases)
    await call(place, decisions.schedule, "t", PAST)
    async with place.library.opened(databases) as one, place.library.opened(databases) as two:
        await one.begin()
        await two.begin()
        await two.execute("SELECT 1 FROM postroom_outbox_tickets")  # so that it has a snapshot of before
        first = await decisions.decide(one.handle, "t", PAST, {}, topic=EXPIRED)
        task = asyncio.ensure_future(decisions.cancel(two.handle, "t", {}, topic=REVOKED))
        kind = place.library.database
        await until(lambda: bool(look(databases, kind, WAITING[kind])[0][0]), "the wait of the revocation")
        waited = not task.done()
        await (one.commit() if is_committed else one.rollback())
        second = await task
        await two.commit()

    assert isinstance(first, Enqueued)
    assert waited
    assert second == Expired() if is_committed else isinstance(second, Enqueued)
    assert await topics(place, decisions) == ([EXPIRED] if is_committed else [REVOKED])


@pytest.mark.requirement("S3-22")
@pytest.mark.parametrize("is_endless", [False, True], ids=["once", "for ever"])
async def test_a_ticket_that_is_forgotten_while_it_is_scheduled_again_is_there_in_the_end(
    databases: Databases, decisions: Decisions, monkeypatch: pytest.MonkeyPatch, *, is_endless: bool
) -> None:
    """PostgreSQL locks no row that an INSERT runs into, so it may be gone before it is looked at."""
    place, namespace = SQLPlace(_library("psycopg"), databases), decisions.outbox.namespace
    execute = PsycopgDriver.execute

    def put_back() -> None:
        columns, values = (
            "namespace, ticket, expires_at, status, ended_at",
            f"'{namespace}', 't', now(), 'expired', now()",
        )
        look(databases, "postgres", f"INSERT INTO postroom_outbox_tickets ({columns}) VALUES ({values})")

    def interfered(driver: PsycopgDriver, connection: Any, statement: Statement) -> Steps[Result]:  # noqa: ANN401
        result = yield from execute(driver, connection, statement)
        if statement.text.startswith("INSERT"):
            look(databases, "postgres", f"DELETE FROM postroom_outbox_tickets WHERE namespace = '{namespace}'")
        elif is_endless:
            put_back()
        return result

    put_back()
    monkeypatch.setattr(PsycopgDriver, "execute", interfered)
    if is_endless:
        with pytest.raises(StoreContentionError, match="schedule it again"):
            await call(place, decisions.schedule, "t", PAST)
    else:
        assert await call(place, decisions.schedule, "t", PAST) == Scheduled()
        monkeypatch.undo()
        assert await call(place, decisions.find_due) == [Due("t", PAST)]


@pytest.mark.requirement("S3-27")
def test_nobody_comes_between_looking_and_writing_on_sqlite(databases: Databases, decisions: Decisions) -> None:
    """There a SELECT locks nothing, so whoever wants to look has to write first."""
    one, two = (sqlite3.connect(databases.sqlite, timeout=0) for _ in range(2))
    told: list[object] = []

    def interfere(statement: str) -> None:
        if statement.startswith('INSERT INTO "postroom_outbox"'):
            try:
                told.append(decisions.cancel(two, "t", {}, topic=REVOKED))
                two.commit()
            except sqlite3.OperationalError as error:
                told.append(str(error))

    with closing(one), closing(two):
        decisions.schedule(one, "t", PAST)
        one.commit()
        one.set_trace_callback(interfere)

        decided = decisions.decide(one, "t", PAST, {}, topic=EXPIRED)
        one.commit()
        revoked = decisions.cancel(two, "t", {}, topic=REVOKED)

    assert told == ["database is locked"]
    assert isinstance(decided, Enqueued)
    assert revoked == Expired()


@pytest.mark.requirement("S3-22")
async def test_an_outbox_of_the_second_version_gets_tickets_from_the_command_line(
    room: Room, decisions: Decisions
) -> None:
    """Until then whoever asks for one is told what to do, and the outbox works as before."""
    texts = [text for text in room.statements(Names())[:-1] if "postroom_outbox_tickets" not in text]
    room.run(*texts, f"INSERT INTO {room.quote}postroom_outbox_version{room.quote} (version) VALUES (2)")
    url = room.where if "://" in room.where else f"sqlite:///{room.where}"

    def inside(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with closing(room.connect()) as connection:
            connection.cursor().execute("BEGIN")
            answer = method(connection, *arguments, **options)
            connection.cursor().execute("COMMIT")
            return answer

    added = inside(decisions.outbox.add, {}, topic="orders")
    with pytest.raises(SchemaMissingError, match=r"postroom_outbox_tickets.*postroom schema apply"):
        inside(decisions.schedule, "t", PAST)
    before, applied, after = [await cli("schema", word, "--store", url) for word in ("check", "apply", "check")]

    assert (before.returncode, applied.returncode, after.returncode) == (1, 0, 0)
    assert "version is 2, should be 3" in before.stdout
    assert "from version 2 to 3.1" in applied.stdout
    assert inside(decisions.schedule, "t", PAST) == Scheduled()
    assert isinstance(inside(decisions.decide, "t", PAST, {}, topic=EXPIRED), Enqueued)
    rows = room.run("SELECT id, topic FROM postroom_outbox ORDER BY seq")
    assert [(_uuid(identity), topic) for identity, topic in rows] == [
        (added.id, "orders"),
        (expiry_id(decisions.outbox.namespace, "t", PAST), EXPIRED),
    ]


def test_a_session_wakes_the_dispatcher_after_the_commit(databases: Databases) -> None:
    woken: list[str] = []
    decisions = Decisions(Outbox(namespace=f"ns-{uuid4().hex}", wake=lambda: woken.append("woken")))

    async def run() -> list[str]:
        library = Library("session", "sqlite", alchemy("sqlite", orm.Session))
        async with library.opened(databases) as link:
            decisions.schedule(link.handle, "t", PAST)
            decisions.decide(link.handle, "t", PAST, {}, topic=EXPIRED)
            before = list(woken)
            await link.commit()
        return before

    before = asyncio.run(run())

    assert (before, woken) == ([], ["woken"])


# -- many at once ------------------------------------------------------------------------------------------------


async def repeated(place: Place, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """Ask again where others stood in the way, as they do in InnoDB."""
    while True:
        try:
            return await call(place, method, *arguments, **options)
        except asyncmy.errors.OperationalError as error:
            if error.args[0] != DEADLOCK:
                raise


@pytest.mark.requirement("S3-25", "S3-26", "S3-27")
@pytest.mark.parametrize("place", ["asyncpg", "asyncmy", "redis-async"], indirect=True)
async def test_of_many_who_decide_revoke_and_renew_one_ends_the_ticket(place: Place, decisions: Decisions) -> None:
    """And there is one event of each ticket, the one that its winner was told of."""
    tickets = [f"t{number}" for number in range(8)]
    for ticket in tickets:
        await call(place, decisions.schedule, ticket, PAST)

    async def expire(ticket: str) -> Any:  # noqa: ANN401
        answer: Any = Stale(PAST)
        while isinstance(answer, Stale):
            answer = await repeated(place, decisions.decide, ticket, answer.expires_at, {}, topic=EXPIRED)
        return answer

    async with asyncio.timeout(30):
        told = await asyncio.gather(
            *(expire(ticket) for ticket in tickets),
            *(repeated(place, decisions.cancel, ticket, {}, topic=REVOKED) for ticket in tickets),
            *(repeated(place, decisions.renew, ticket, LATER) for ticket in tickets),
            *(expire(ticket) for ticket in tickets),
        )

    stored = [identity for _, identity, _ in await place.events(decisions.outbox)]
    assert sorted(stored) == sorted(answer.id for answer in told if isinstance(answer, Enqueued))
    assert len(stored) == len(tickets)
    assert await call(place, decisions.find_due) == []


# -- in Redis ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-25")
async def test_a_dispatcher_s_claim_brings_the_event(
    client: Any,  # noqa: ANN401
    valkey_server: ValkeyClient,
    decisions: Decisions,
) -> None:
    """It is an entry like all others."""
    store = RedisStore(valkey_server.dsn, namespace=decisions.outbox.namespace)
    await decisions.schedule(client, "t", PAST)
    decided = await decisions.decide(client, "t", PAST, {"a": 1}, topic=EXPIRED, key="t")

    [claim] = await store.claim(10, ClaimTerms(worker=uuid4()))

    await store.close()
    assert decided == Enqueued(claim.message.id)
    assert (claim.message.topic, claim.message.key, claim.message.payload) == (EXPIRED, "t", b'{"a":1}')


@pytest.mark.requirement("S3-22", "S3-23")
async def test_a_decision_depends_on_no_key_s_time_to_live(client: Any, decisions: Decisions) -> None:  # noqa: ANN401
    """Tickets are members of a sorted set, which stays, in the slot of the messages."""
    keys = _keys(decisions)
    await decisions.schedule(client, "a", PAST)
    await decisions.schedule(client, "b", PAST)
    await decisions.decide(client, "a", PAST, {}, topic=EXPIRED)

    scores = await client.zrange(ticket_keys(keys)[1], 0, -1, withscores=True)
    lives = {key: await client.ttl(key) for key in [*keys.all, *ticket_keys(keys)]}
    slots = {key_slot(key.encode()) for key in lives}

    assert scores == [(b"b", PAST.timestamp() * 1000)]
    assert [lives[key] for key in ticket_keys(keys)] == [-1, -1, -1]
    assert set(lives.values()) == {-1, -2}
    assert len(slots) == 1


@pytest.mark.requirement("S3-25")
@pytest.mark.parametrize("number", range(3))
async def test_a_key_of_another_type_is_told_before_anything_is_written(
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    number: int,
) -> None:
    """Nothing is half done that repair would have to mend."""
    keys = _keys(decisions)
    await decisions.schedule(client, "t", PAST)
    await client.delete(ticket_keys(keys)[number])
    await client.set(ticket_keys(keys)[number], "taken")

    for answer in (
        decisions.decide(client, "t", PAST, {}, topic=EXPIRED),
        decisions.cancel(client, "t", {}, topic=REVOKED),
        decisions.schedule(client, "u", PAST),
        decisions.renew(client, "t", LATER),
    ):
        with pytest.raises(redis.exceptions.ResponseError, match=r"WRONGTYPE .* is a string, and should be a"):
            await answer

    left = {key for key in [*keys.all, *ticket_keys(keys)] if await client.exists(key)}
    assert left <= set(ticket_keys(keys))


@pytest.mark.requirement("S3-25")
async def test_an_event_that_cannot_be_stored_leaves_its_ticket_open(client: Any, decisions: Decisions) -> None:  # noqa: ANN401
    """Here because a namespace has only so many topics."""
    keys = _keys(decisions)
    await client.hset(keys.all[11], mapping={f"topic-{number}": number for number in range(65536)})
    await decisions.schedule(client, "t", PAST)

    for answer in (
        decisions.decide(client, "t", PAST, {}, topic="one-more"),
        decisions.cancel(client, "t", {}, topic="one-more"),
    ):
        with pytest.raises(redis.exceptions.ResponseError, match="takes no more"):
            await answer
    due = await decisions.find_due(client)
    decided = await decisions.decide(client, "t", PAST, {}, topic="topic-7")
    await client.delete(keys.all[11])

    assert due == [Due("t", PAST)]
    assert isinstance(decided, Enqueued)


class Tickets:
    """Tickets of every kind beside a store that can repair them."""

    def __init__(self, url: str, decisions: Decisions) -> None:
        self.store = RedisStore(url, namespace=decisions.outbox.namespace)
        self.known, self.expiries, self.endings = ticket_keys(_keys(decisions))

    async def seen(self, client: Any) -> tuple[Any, ...]:  # noqa: ANN401
        ended = await client.zrange(self.endings, 0, -1)
        return await client.hgetall(self.known), await client.zrange(self.expiries, 0, -1, withscores=True), set(ended)


@pytest.fixture
async def tickets(client: Any, valkey_server: ValkeyClient, decisions: Decisions) -> AsyncIterator[Tickets]:  # noqa: ANN401
    for ticket in ("open", "expired", "revoked", "known", "renewed", "later"):
        await decisions.schedule(client, ticket, FUTURE if ticket == "later" else PAST)
    await decisions.decide(client, "expired", PAST, {}, topic=EXPIRED)
    await decisions.decide(client, "known", PAST, {}, topic=EXPIRED, is_revoked=True)
    await decisions.cancel(client, "revoked", {}, topic=REVOKED)
    await decisions.renew(client, "renewed", LATER)
    tickets = Tickets(valkey_server.dsn, decisions)
    yield tickets
    await tickets.store.close()


@pytest.mark.requirement("S3-07")
async def test_repair_finds_nothing_to_mend_in_whole_tickets(client: Any, tickets: Tickets) -> None:  # noqa: ANN401
    """Whatever became of them."""
    before = await tickets.seen(client)

    assert await tickets.store.repair(at_once=2) == 0
    assert await tickets.seen(client) == before


@pytest.mark.requirement("S3-07")
@pytest.mark.parametrize(
    ("damage", "count"),
    [
        (("DEL", "{endings}"), 3),
        (("DEL", "{expiries}"), 3),
        (("ZADD", "{expiries}", "1", "expired", "1", "revoked"), 2),
        (("ZADD", "{endings}", "1", "open", "1", "later"), 2),
        (("ZADD", "{expiries}", str(int(LATER.timestamp() * 1000)), "open"), 1),
        (("HDEL", "{known}", "open", "later"), 2),
    ],
    ids=["endings", "expiries", "ended and due", "open and ended", "at another time", "not known"],
)
async def test_repair_mends_tickets_that_their_indexes_do_not_agree_with(
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    tickets: Tickets,
    damage: tuple[str, ...],
    count: int,
) -> None:
    """A ticket that nobody finds would never end, and one that is found for ever hides those behind it."""
    before = await tickets.seen(client)
    names = {"known": tickets.known, "expiries": tickets.expiries, "endings": tickets.endings}
    await client.execute_command(*(word.format_map(names) for word in damage))

    mended = await tickets.store.repair(at_once=2)

    assert mended == count
    assert await tickets.seen(client) == before
    assert await tickets.store.repair() == 0
    assert await decisions.find_due(client) == [Due("open", PAST), Due("renewed", LATER)]


@pytest.mark.requirement("S3-06")
async def test_an_open_ticket_is_never_forgotten_wherever_it_is_indexed(
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    tickets: Tickets,
) -> None:
    """What a script left behind when it failed must not cost a ticket."""
    await client.zadd(tickets.endings, {"open": 1})

    await decisions.forget(client, older_than=ALL)

    assert set(await client.hkeys(tickets.known)) == {b"open", b"renewed", b"later"}
    assert isinstance(await decisions.decide(client, "open", PAST, {}, topic=EXPIRED), Enqueued)


@pytest.mark.requirement("S3-06")
async def test_repair_leaves_alone_what_it_cannot_read(client: Any, tickets: Tickets) -> None:  # noqa: ANN401
    """And goes on with the others."""
    await client.hset(tickets.known, mapping={"odd": "?", "endless": "snever", "empty": ""})
    await client.delete(tickets.expiries)

    assert await tickets.store.repair() == 3
    assert await client.hmget(tickets.known, "odd", "endless", "empty") == [b"?", b"snever", b""]


@pytest.mark.requirement("S3-07")
async def test_repair_looks_through_many_tickets_a_few_at_a_time(
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    tickets: Tickets,
) -> None:
    """More than a server keeps in one piece, so that every page is a bounded one."""
    async with client.pipeline(transaction=False) as pipeline:
        for number in range(700):
            await decisions.schedule(pipeline, f"t{number}", PAST)
        await pipeline.execute()
    await client.delete(tickets.expiries)

    assert await tickets.store.repair(at_once=50) == 703
    assert await tickets.store.repair(at_once=50) == 0


@pytest.mark.requirement("S3-06")
@pytest.mark.parametrize("number", range(3))
async def test_repair_tells_of_a_key_of_another_type(client: Any, tickets: Tickets, number: int) -> None:  # noqa: ANN401
    """And changes nothing."""
    names = [tickets.known, tickets.expiries, tickets.endings]
    await client.set(names[number], "taken")

    with pytest.raises(StoreError, match="is a string"):
        await tickets.store.repair()

    assert await client.get(names[number]) == b"taken"


@pytest.mark.requirement("S3-22")
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_pipeline_schedules_with_what_else_it_does_and_decides_nothing(
    valkey_server: ValkeyClient, decisions: Decisions, *, is_async: bool
) -> None:
    """A ticket is made and scheduled in one step; whatever needs an answer needs the client."""
    place = RedisPlace(valkey_server.dsn, is_async=is_async)
    async with place.opened() as client:
        pipeline = client.pipeline(transaction=True)
        pipeline.set(f"{decisions.outbox.namespace}:ticket", "t")
        hoped = await awaited(decisions.schedule(pipeline, "t", PAST))
        for method, arguments in (
            (decisions.decide, ("t", PAST, {})),
            (decisions.cancel, ("t", {})),
            (decisions.renew, ("t", PAST)),
            (decisions.find_due, ()),
        ):
            options: Any = {"topic": EXPIRED} if {} in arguments else {}
            with pytest.raises(ConfigurationError, match="pass the client itself"):
                await awaited(method(pipeline, *arguments, **options))
        before = await awaited(decisions.find_due(client))
        told = await awaited(pipeline.execute())
        after = await awaited(decisions.find_due(client))

    assert (hoped, before, after) == (Scheduled(), [], [Due("t", PAST)])
    assert told == [True, [b"scheduled"]]


@pytest.mark.requirement("S3-05", "S3-22", "S3-25")
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_cluster_keeps_tickets_beside_their_messages(
    valkey_cluster: ValkeyClient, decisions: Decisions, *, is_async: bool
) -> None:
    """With its clients and with their pipelines."""
    url, outbox = valkey_cluster.dsn, decisions.outbox
    client: Any = (
        redis.asyncio.RedisCluster.from_url(url, retry=Retry(NoBackoff(), 0))
        if is_async
        else redis.RedisCluster.from_url(url, retry=redis.retry.Retry(NoBackoff(), 0))
    )
    await awaited(client.initialize() if is_async else None)  # before a pipeline, which would do it on another loop
    pipeline = client.pipeline(transaction=True)
    await awaited(outbox.add(pipeline, {}, topic="orders"))
    for ticket in ("a", "b"):
        await awaited(decisions.schedule(pipeline, ticket, PAST))
    await awaited(pipeline.execute())

    due = await awaited(decisions.find_due(client))
    first = [await awaited(decisions.decide(client, "a", PAST, {}, topic=EXPIRED)) for _ in range(2)]
    second = [await awaited(decisions.cancel(client, "b", {}, topic=REVOKED)) for _ in range(2)]
    stored = await awaited(client.hlen(Keys(outbox.table, outbox.namespace).all[0]))
    await awaited(client.aclose() if is_async else client.close())

    identity = expiry_id(outbox.namespace, "a", PAST)
    assert due == [Due("a", PAST), Due("b", PAST)]
    assert first == [Enqueued(identity), Duplicate(identity)]
    assert [type(answer) for answer in second] == [Enqueued, Revoked]
    assert stored == 3


@pytest.mark.requirement("S3-22", "S3-25", "S3-26")
@pytest.mark.parametrize("is_patient", [False, True], ids=["told", "repeated by the client"])
async def test_what_was_done_although_the_answer_got_lost_is_done_once(
    valkey_server: ValkeyClient,
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    *,
    is_patient: bool,
) -> None:
    """Who asks again is told how it stands; a client that repeats by itself does no harm."""
    url, identity = urlsplit(valkey_server.dsn), expiry_id(decisions.outbox.namespace, "a", PAST)
    asked: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], object]] = [
        (decisions.schedule, ("a", PAST), {}, Scheduled()),
        (decisions.schedule, ("b", PAST), {}, Scheduled()),
        (decisions.renew, ("b", LATER), {}, Scheduled()),
        (decisions.decide, ("a", PAST, {}), {"topic": EXPIRED}, Duplicate(identity)),
        (decisions.cancel, ("b", {}), {"topic": REVOKED}, Revoked()),
    ]
    for method, arguments, options, _ in asked:  # so that the server knows the scripts, and is asked by their digests
        await method(client, *arguments, **options)
    await client.delete(*_keys(decisions).all, *ticket_keys(_keys(decisions)))
    retry = Retry(NoBackoff(), 3 if is_patient else 0)
    told: list[object] = []

    async with (
        FaultProxy(url.hostname or "", url.port or 0) as proxy,
        redis.asyncio.Redis(host="127.0.0.1", port=proxy.port, retry=retry) as far,
    ):
        for method, arguments, options, _ in asked:
            proxy.drop_reply(b"EVALSHA")
            if is_patient:
                told.append(await method(far, *arguments, **options))
            else:
                with pytest.raises(redis.exceptions.ConnectionError):
                    await method(far, *arguments, **options)
                told.append(await method(client, *arguments, **options))

    assert told == [answer for *_, answer in asked]
    assert sorted(await topics(RedisPlace(valkey_server.dsn), decisions)) == [EXPIRED, REVOKED]


def _keys(decisions: Decisions) -> Keys:
    return Keys(decisions.outbox.table, decisions.outbox.namespace)


@pytest.mark.requirement("S3-25")
async def test_the_outbox_of_a_stream_has_no_tickets(valkey_server: ValkeyClient, client: Any) -> None:  # noqa: ANN401
    """Their events would be stored where nobody looks for them."""
    store = RedisStreamStore(valkey_server.dsn, namespace=f"ns-{uuid4().hex}")
    decisions = Decisions(store.outbox())

    for method, arguments in ((decisions.schedule, ("t", PAST)), (decisions.find_due, ())):
        with pytest.raises(ConfigurationError, match="use the outbox of a RedisStore"):
            await awaited(method(client, *arguments))

    await store.close()
    assert await client.keys(f"*{decisions.outbox.namespace}*") == []


@pytest.mark.requirement("S3-22")
@pytest.mark.parametrize("seconds", [10**9, 1_700_000_000, 999_999_999.999])
async def test_an_end_that_is_a_round_number_is_one_like_all_others(
    client: Any,  # noqa: ANN401
    decisions: Decisions,
    seconds: float,
) -> None:
    """Servers write large round scores in different ways."""
    moment = datetime.fromtimestamp(seconds, UTC)
    await decisions.schedule(client, "t", moment)

    assert await decisions.find_due(client) == [Due("t", moment)]
    assert isinstance(await decisions.decide(client, "t", moment, {}, topic=EXPIRED), Enqueued)


async def test_every_decision_wakes_who_delivers_it_and_nothing_else_does(client: Any) -> None:  # noqa: ANN401
    woken: list[str] = []
    decisions = Decisions(Outbox(namespace=f"ns-{uuid4().hex}", wake=lambda: woken.append("woken")))
    channel = _keys(decisions).channel
    async with client.pubsub() as hints:
        await hints.subscribe(channel)
        await decisions.schedule(client, "t", PAST)
        for _ in range(2):
            await decisions.decide(client, "t", PAST, {}, topic=EXPIRED)
        await client.publish(channel, "end")
        heard = [hint["data"] async for hint in _until_end(hints)]

    assert woken == ["woken"]
    assert heard == [b"", b"end"]


async def _until_end(hints: Any) -> AsyncIterator[dict[str, Any]]:  # noqa: ANN401
    async for hint in hints.listen():
        if hint["type"] == "message":
            yield hint
            if hint["data"] == b"end":
                return


@pytest.mark.requirement("S3-26")
async def test_a_server_that_was_killed_knows_what_was_decided_and_no_script(
    private_valkey: ValkeyServer, decisions: Decisions
) -> None:
    """Whoever repeats a decision after a crash hears that it was made; a forgotten script is sent again."""
    for is_async in (True, False):
        ticket = f"t{is_async}"
        place = RedisPlace(private_valkey.dsn, is_async=is_async)
        with closing(redis.Redis.from_url(private_valkey.dsn)) as client:
            client.config_set("appendfsync", "always")  # by default what a second brings may be lost, but as a whole
        await call(place, decisions.schedule, ticket, PAST)
        first = await decide(place, decisions, ticket)
        private_valkey.kill9()
        private_valkey.start()

        second = await decide(place, decisions, ticket)
        revoked = await cancel(place, decisions, ticket)

        assert second == Duplicate(first.id)
        assert revoked == Expired()
