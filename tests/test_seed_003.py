"""What the seed asks of an outbox in Redis: entries, retries, counters, and a relay that is hot, cold and patient.

Two tests walk through the methods of the document in its order. Where we differ: to find is to claim, with a lease and
a token, so that two pollers do not publish one entry; the store adds the delay of a retry to its own time; and a
``due_cutoff`` narrows what is due by the server's clock, but makes nothing due before its time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
import redis.asyncio
import redis.exceptions

from postroom import Backoff, Dispatcher, Message, Outbox
from postroom.brokers import MemoryBroker
from postroom.decisions import Decisions, Due, Duplicate, Enqueued, NotDue, Revoked, Scheduled, expiry_id
from postroom.errors import ConfigurationError, EncodeError, NotInTransactionError
from postroom.events import BreakerClosed, BreakerOpened, Died, Event, Retried
from postroom.store import Claim, ClaimTerms, Dead, Delivered, Outcome, Retry, Settlement, Store
from postroom.stores import MemoryStore, MySQLStore, PostgresStore, SQLiteStore
from postroom.stores.redis import Counters, RedisStore, RedisStreamStore, scripted
from postroom.stores.redis.scripts import composed
from postroom.testing.clients import ValkeyClient
from postroom.testing.contracts import StoreContract
from postroom.testing.waiting import until

from . import test_redis_store, test_redis_stream
from .contracts import test_stores
from .test_docs import execute, snippets
from .test_redis_store import MINUTE, SECOND, TERMS, Shop, client_of, deliver_by_hints, message

shop = test_redis_store.shop

PAST = datetime(2026, 1, 1, tzinfo=UTC)
LONG = timedelta(seconds=60)
STORES: list[type[Store]] = [MemoryStore, SQLiteStore, PostgresStore, MySQLStore, RedisStore, RedisStreamStore]


class Entry(NamedTuple):
    """What is stored of a message beside its payload."""

    status: str
    attempts: int
    #: In how many seconds it may go out, by the server's clock.
    due_in: float
    error: str
    is_due: bool
    is_leased: bool
    is_done: bool


_ENTRY = """
local id = ARGV[1]
local state = read(id)
local function has(key, member) return redis.call('ZSCORE', key, member) and 1 or 0 end
return {
  state[STATUS], state[ATTEMPTS], string.format('%.0f', state[DUE] - now), redis.call('HGET', errors, id) or '',
  has(due, by_due(id, state)), has(leased, id), has(done, id),
}
"""


async def entry(shop: Shop, identity: UUID) -> Entry:
    text = composed(_ENTRY).text
    told = await shop.client.eval(text, len(shop.keys.all), *shop.keys.all, identity.bytes)
    status, attempts, due_in, error, *places = told
    return Entry(status.decode(), attempts, int(due_in) / 1e6, error.decode(), *map(bool, places))


async def claim_one(shop: Shop) -> Claim:
    [claim] = await shop.store.claim(1, TERMS)
    return claim


async def settle(shop: Shop, claim: Claim, outcome: Outcome) -> list[Claim]:
    return await shop.store.settle([Settlement(claim, outcome)])


# -- the methods of the document, in its order --------------------------------------------------------------------


@pytest.mark.requirement("S3-01", "S3-02", "S3-09", "S3-12", "S3-14", "S3-16", "S3-17", "S3-18")
async def test_what_the_document_calls_persist_find_mark_sent_and_mark_failure(shop: Shop) -> None:
    """Each method of the document beside what it is here."""
    store, outbox, client = shop.store, shop.outbox, shop.client
    record, other = message(1), message(2)

    # requiresActiveTransaction() -> false
    assert store.features.requires_transaction is False

    # persistPending(record): a duplicate is a no-op, logged and counted
    assert (await outbox.add(client, record)).is_new is True
    assert (await outbox.add(client, record)).is_new is False
    assert (await outbox.add(client, other)).is_new is True
    assert (await store.counters()).duplicates == 1

    # findPendingBatch(batchSize): what is due, the oldest first
    [first, second] = await store.claim(2, TERMS)
    assert [first.message.id, second.message.id] == [record.id, other.id]

    # markSent(aggregateId, eventId) -> 1, and 0 once it is terminal
    assert await settle(shop, first, Delivered()) == []
    assert await settle(shop, first, Retry("late", timedelta(0))) == [first]
    assert (await entry(shop, record.id)).status == "d"

    # markFailureAttempt(aggregateId, eventId, lastError, maxRetries) -> 1: retried by the store's clock
    assert await settle(shop, second, Retry("no answer", timedelta(0))) == []
    failed = await entry(shop, other.id)
    assert (failed.status, failed.attempts, failed.error) == ("p", 1, "no answer")

    # ... and parked as FAILED at the budget: kept, until an operator re-arms it
    assert await settle(shop, await claim_one(shop), Dead("no answer")) == []
    assert (await entry(shop, other.id)).status == "x"
    assert await store.redrive(other.id) == 1
    assert (await entry(shop, other.id)).status == "p"


@pytest.mark.requirement("S3-22", "S3-24", "S3-25", "S3-26")
async def test_what_the_document_calls_record_find_and_decide_expiry(shop: Shop) -> None:
    """Each method of the document beside what it is here."""
    decisions, client = Decisions(shop.outbox), shop.client
    entry_of = {"ticket": "t"}

    # recordExpiryDue(ticketId, expiresAt): the intent
    for ticket in ("t", "revoked"):
        assert await decisions.schedule(client, ticket, PAST) == Scheduled()

    # findDueExpiries(limit): read-only
    assert await decisions.find_due(client, limit=1) == [Due("revoked", PAST)]
    assert await decisions.find_due(client, limit=10) == [Due("revoked", PAST), Due("t", PAST)]

    # decideExpiry(ticketId, expiredEventId, expiredEntry, dueCutoff, alreadyRevoked): one step, by the cutoff
    early = await decisions.decide(client, "t", PAST, entry_of, topic="expired", due_cutoff=PAST - SECOND)
    assert early == NotDue()
    first = await decisions.decide(client, "t", PAST, entry_of, topic="expired", due_cutoff=PAST)
    again = await decisions.decide(client, "t", PAST, entry_of, topic="expired", due_cutoff=PAST)
    expired_event_id = expiry_id(shop.outbox.namespace, "t", PAST)  # UUIDv3(ticket_id|expires_at)
    assert (first, again) == (Enqueued(expired_event_id), Duplicate(expired_event_id))
    revoked = await decisions.decide(client, "revoked", PAST, {}, topic="expired", due_cutoff=PAST, is_revoked=True)
    assert revoked == Revoked()

    assert [claim.message.id for claim in await shop.store.claim(10, TERMS)] == [expired_event_id]


# -- one port for all stores -------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-01")
@pytest.mark.parametrize("store", STORES)
def test_every_store_has_the_one_port_and_keeps_its_contract(store: type[Store]) -> None:
    """What the seed calls persist, find, mark sent and mark failed is add, claim and settle, everywhere."""
    port = {name: part for name, part in vars(Store).items() if inspect.iscoroutinefunction(part)}
    suites = [
        name
        for module in (test_stores, test_redis_stream)
        for name, suite in vars(module).items()
        if isinstance(suite, type) and issubclass(suite, StoreContract) and name.startswith(f"Test{store.__name__}")
    ]

    assert {"claim", "settle", "extend", "sweep", "purge", "stats"} <= port.keys()
    for name, part in port.items():
        assert inspect.signature(getattr(store, name)).parameters.keys() == inspect.signature(part).parameters.keys()
        assert inspect.iscoroutinefunction(getattr(store, name))
    assert suites


@pytest.mark.requirement("S3-01", "S3-02")
async def test_a_store_says_whether_adding_needs_a_transaction_and_one_that_does_refuses(
    shop: Shop, sqlite_path: Path
) -> None:
    """No transaction is needed here, since one script is all or nothing; SQL needs one."""
    sql = SQLiteStore(sqlite_path)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        SQLiteStore.create_tables(connection)
        with pytest.raises(NotInTransactionError):
            Outbox().add(connection, {}, topic="orders")

    added = await shop.outbox.add(shop.client, {}, topic="orders")

    assert (sql.features.requires_transaction, shop.store.features.requires_transaction) == (True, False)
    assert added.is_new


@pytest.mark.requirement("S3-04")
async def test_every_change_is_one_script(shop: Shop) -> None:
    """Of what reaches the server about a namespace, nothing but scripts writes."""
    decisions = Decisions(shop.outbox)
    async with shop.client.monitor() as monitor:
        await shop.add(message(1, key="a"), message(2, dedupe_key="x"))
        claims = await shop.store.claim(10, TERMS)
        await shop.store.extend(claims, MINUTE)
        await shop.store.settle([Settlement(claims[0], Delivered()), Settlement(claims[1], Dead("never"))])
        await shop.store.redrive(claims[1].message.id)
        await shop.store.sweep(TERMS)
        await shop.store.purge(older_than=timedelta(0))
        await shop.store.repair()
        for ticket in ("a", "b"):
            await decisions.schedule(shop.client, ticket, PAST)
        await decisions.renew(shop.client, "a", PAST)
        await decisions.decide(shop.client, "a", PAST, {}, topic="expired")
        await decisions.cancel(shop.client, "b", {}, topic="revoked")
        await decisions.forget(shop.client, older_than=timedelta(0))
        await shop.client.echo(shop.table)
        words = {word async for word in _words_until_echo(monitor, shop.table)}

    assert words == {"EVAL", "EVALSHA"}


async def _words_until_echo(monitor: Any, table: str) -> AsyncIterator[str]:  # noqa: ANN401
    """Yield the commands about a table that came from clients, and not from within scripts."""
    async for told in monitor.listen():
        word, *rest = told["command"].split(" ", 1)
        if word.upper() == "ECHO" and rest == [table]:
            return
        if told["client_type"] != "lua" and table in told["command"]:
            yield word.upper()


# -- entries -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-08", "S3-11")
async def test_a_fresh_entry_is_pending_and_due_now_by_the_clock_of_the_server(shop: Shop) -> None:
    """Whatever the clock of the one that adds it says; one with a delay is due later."""
    await shop.add(one := message(1))
    [later] = await shop.outbox.add(shop.client, [message(2)], delay=MINUTE)
    assert later.id is not None

    fresh, delayed = await entry(shop, one.id), await entry(shop, later.id)

    assert fresh._replace(due_in=0.0) == Entry("p", 0, 0.0, "", is_due=True, is_leased=False, is_done=False)
    assert -60 < fresh.due_in <= 0
    assert (delayed.status, delayed.is_due) == ("p", True)
    assert 0 < delayed.due_in <= 60
    assert [claim.message.id for claim in await shop.store.claim(10, TERMS)] == [one.id]


@pytest.mark.requirement("S3-08")
async def test_what_failed_comes_by_its_next_attempt_and_not_by_its_age(shop: Shop) -> None:
    """The oldest messages of a destination that is down must not be tried again and again before all others."""
    await shop.add(old := message(1))
    await settle(shop, await claim_one(shop), Retry("down", MINUTE))
    await shop.add(young := message(2))

    claims = await shop.store.claim(10, TERMS)

    assert [claim.message.id for claim in claims] == [young.id]
    assert (await entry(shop, old.id)).due_in > 0


@pytest.mark.requirement("S3-09")
async def test_a_batch_is_what_is_due_and_no_more_than_asked_for_the_oldest_due_first(shop: Shop) -> None:
    """By when it was due, which is not when it was added."""
    now = datetime.now(UTC)
    for number, hours in enumerate((1, 3, 2, -1, 4)):
        await shop.outbox.add(shop.client, message(number), due_at=now - timedelta(hours=hours))

    batches = [[int(claim.message.payload) for claim in await shop.store.claim(3, TERMS)] for _ in range(3)]

    assert [set(batch) for batch in batches] == [{4, 1, 2}, {0}, set()]


@pytest.mark.requirement("S3-13")
async def test_an_event_that_cannot_be_encoded_is_told_and_nothing_is_stored(shop: Shop) -> None:
    """Before anything is sent."""
    with pytest.raises(EncodeError):
        await shop.outbox.add(shop.client, {"what": object()}, topic="orders")

    assert await shop.client.keys(f"{shop.table}*") == []


@pytest.mark.requirement("S3-14", "S3-15")
async def test_what_was_delivered_says_when_and_is_nowhere_else(shop: Shop) -> None:
    """Its last error is gone; a second word is no loss if it says the same, and lost if it does not."""
    await shop.add(one := message(1))
    await settle(shop, await claim_one(shop), Retry("not yet"))
    failed = await entry(shop, one.id)
    claim = await claim_one(shop)

    lost = [await settle(shop, claim, outcome) for outcome in (Delivered(), Delivered(), Retry("late"), Dead("late"))]

    assert (failed.error, failed.is_due) == ("not yet", True)
    stored = await entry(shop, one.id)
    assert stored._replace(due_in=0.0) == Entry("d", 2, 0.0, "", is_due=False, is_leased=False, is_done=True)
    assert lost == [[], [], [claim], [claim]]


_DELIVERED = """
local id = ARGV[1]
return { string.format('%.0f', read(id)[CHANGED]), string.format('%.0f', redis.call('ZSCORE', done, id)) }
"""


@pytest.mark.requirement("S3-14")
async def test_when_a_message_was_delivered_is_stored_by_the_clock_of_the_server(shop: Shop) -> None:
    """The time of the document's sentAt, in the entry and in the index that the purge goes by."""
    await shop.add(one := message(1))
    claim = await claim_one(shop)
    before = await shop.store.clock()
    await settle(shop, claim, Delivered())
    after = await shop.store.clock()

    told = await shop.client.eval(composed(_DELIVERED).text, len(shop.keys.all), *shop.keys.all, one.id.bytes)

    changed, done = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(text)) for text in told)
    assert before <= changed <= after
    assert done == changed
    assert await shop.store.purge(older_than=timedelta(hours=1)) == 0
    assert await shop.store.purge(older_than=timedelta(0)) == 1


@pytest.mark.requirement("S3-16")
async def test_a_failure_is_recorded_once_and_only_of_what_is_out(shop: Shop) -> None:
    """Attempts, error and next attempt; a claim that somebody else holds by now changes nothing."""
    await shop.add(one := message(1))
    first = await claim_one(shop)

    lost = [await settle(shop, first, Retry("no answer", MINUTE)) for _ in range(2)]
    failed = await entry(shop, one.id)
    await settle(shop, replace(first, message=replace(first.message, id=uuid4())), Retry("another", MINUTE))
    stale = replace(first, message=replace(first.message, token=first.message.token + 1))

    assert lost == [[], []]
    assert failed._replace(due_in=0.0) == Entry("p", 1, 0.0, "no answer", is_due=True, is_leased=False, is_done=False)
    assert 0 < failed.due_in <= 60
    assert await settle(shop, stale, Retry("stale", MINUTE)) == [stale]
    assert (await entry(shop, one.id)).error == "no answer"


@pytest.mark.requirement("S3-20")
async def test_an_entry_is_known_by_its_id_alone(shop: Shop) -> None:
    """Key, topic and tenant of a claim are there to be read, and decide nothing when it is settled."""
    await shop.add(one := message(1, key="a"), two := message(2, key="a"), message(3, key="b"))
    [first, *others] = await shop.store.claim(10, TERMS)
    told = replace(first, message=replace(first.message, key="b", topic="other", tenant_id=uuid4()))

    lost = await settle(shop, told, Delivered())
    await shop.store.settle([Settlement(claim, Retry("no")) for claim in others])

    assert lost == []
    assert ((await entry(shop, one.id)).status, (await entry(shop, two.id)).status) == ("d", "p")
    assert await shop.store.repair() == 0


# -- retries -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncGenerator[None]:
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        await dispatcher.stop()
        await task


async def confirmed(broker: MemoryBroker, count: int) -> None:
    await until(lambda: broker.confirmed == count, f"the delivery of {count}", within=LONG)


async def refuse(message: Message) -> object:
    raise ValueError("no")


@pytest.mark.requirement("S3-16", "S3-19")
@pytest.mark.parametrize(("failures", "minutes"), [(0, 1), (1, 2), (2, 4), (3, 5), (9, 5)])
async def test_a_wait_doubles_with_the_attempts_that_are_stored_up_to_its_limit(
    shop: Shop, failures: int, minutes: int
) -> None:
    """Whoever failed before; it is the server that adds it to its own time."""
    told: list[Event] = []
    await shop.add(one := message(1))
    for _ in range(failures):
        await settle(shop, await claim_one(shop), Retry("before", timedelta(0)))
    backoff = Backoff(base=MINUTE, max=5 * MINUTE, jitter="none")

    await Dispatcher(shop.store, refuse, backoff=backoff, max_attempts=20, listener=told.append).run(until_idle=True)

    [retried] = [event for event in told if isinstance(event, Retried)]
    assert (retried.attempt, retried.delay) == (failures + 1, minutes * MINUTE)
    stored = await entry(shop, one.id)
    assert (stored.status, stored.attempts) == ("p", failures + 1)
    assert minutes * 60 - 50 < stored.due_in <= minutes * 60


@pytest.mark.requirement("S3-17", "S3-18", "S3-28")
async def test_a_message_without_attempts_left_is_parked_counted_and_never_deleted(shop: Shop) -> None:
    """Until somebody has it tried again."""
    told: list[Event] = []
    await shop.add(one := message(1))

    dispatcher = Dispatcher(shop.store, refuse, backoff=lambda _: timedelta(0), max_attempts=3, listener=told.append)
    await dispatcher.run(until_idle=True)
    purged = await shop.store.purge(older_than=timedelta(0))

    [died] = [event for event in told if isinstance(event, Died)]
    assert (died.message_id, died.attempt, died.error) == (one.id, 3, "ValueError: no")
    parked = await entry(shop, one.id)
    assert parked._replace(due_in=0.0) == Entry("x", 3, 0.0, died.error, is_due=False, is_leased=False, is_done=False)
    assert (purged, (await shop.store.stats()).dead, (await shop.store.counters()).died) == (0, 1, 1)
    assert await shop.store.redrive(one.id) == 1
    assert [claim.message.attempt for claim in await shop.store.claim(10, TERMS)] == [1]


@pytest.mark.requirement("S3-12", "S3-28")
async def test_what_was_added_repeated_and_parked_is_counted_for_ever(shop: Shop) -> None:
    """Whichever way it was added; what is delivered and purged is not counted less."""
    one, two = message(1), message(2, dedupe_key="x")
    none = await shop.store.counters()
    await shop.add(one, two, one)
    async with shop.client.pipeline(transaction=True) as pipeline:
        await shop.outbox.add(pipeline, [message(3), message(4, dedupe_key="x")])
        await pipeline.execute()
    decisions = Decisions(shop.outbox)
    await decisions.schedule(shop.client, "t", PAST)
    for _ in range(2):
        await decisions.decide(shop.client, "t", PAST, {}, topic="expired")
    claims = await shop.store.claim(10, TERMS)
    await shop.store.settle([Settlement(claim, Delivered()) for claim in claims[1:]])
    await settle(shop, claims[0], Dead("never"))
    await shop.store.purge(older_than=timedelta(0))

    counted = await shop.store.counters()

    assert none == Counters(added=0, duplicates=0, died=0, mended=0, orphans=0)
    assert counted == Counters(added=4, duplicates=2, died=1, mended=0, orphans=0)


@pytest.mark.requirement("S3-12")
async def test_a_duplicate_is_logged_at_debug_level_by_id_and_topic_alone(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says, and under which dedupe key, may be about a person."""
    person = "ada@example.com"
    one, two = message(1), message(2, dedupe_key=person)
    caplog.set_level(logging.DEBUG, logger="postroom")
    await shop.add(one, two)
    before = list(caplog.records)
    [again, other] = await shop.outbox.add(shop.client, [one, message(3, dedupe_key=person)])

    assert before == []
    assert [(result.id, result.is_new) for result in (again, other)] == [(one.id, False), (two.id, False)]
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("postroom", "DEBUG", f"duplicate not added: message {known.id} topic=orders") for known in (one, two)
    ]
    assert not any(person in str(vars(record)) for record in caplog.records)


@pytest.mark.requirement("S3-12")
@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_a_duplicate_is_logged_by_the_other_stores_too(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One message or several of one call, in the transaction of the caller."""
    caplog.set_level(logging.DEBUG, logger="postroom")
    one, two, outbox, memory = message(1), message(2), Outbox(), MemoryStore()
    with closing(sqlite3.connect(":memory:")) as connection:
        SQLiteStore.create_tables(connection)

        def begin() -> AbstractContextManager[Any]:
            return connection if kind == "sqlite" else memory.transaction()

        for events in (one, one, [one, two, two]):
            with begin() as transaction:
                outbox.add(transaction, events)

    assert [record.getMessage() for record in caplog.records] == [
        f"duplicate not added: message {known.id} topic=orders" for known in (one, one, two)
    ]


@pytest.mark.requirement("S3-21")
async def test_one_store_serves_many_at_once(shop: Shop) -> None:
    """It keeps nothing of one call for another, so that each message goes to one of them."""
    await asyncio.gather(*(shop.add(*(message(number) for _ in range(5))) for number in range(20)))

    async def work() -> list[UUID]:
        done: list[UUID] = []
        while claims := await shop.store.claim(7, ClaimTerms(worker=uuid4())):
            assert await shop.store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
            done += [claim.message.id for claim in claims]
        return done

    done = [identity for each in await asyncio.gather(*(work() for _ in range(8))) for identity in each]

    assert (len(done), len(set(done))) == (100, 100)


# -- hot, cold and patient ---------------------------------------------------------------------------------------


@pytest.fixture
async def mute(shop: Shop) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that may do everything but publish hints."""
    name = f"mute-{uuid4().hex}"
    await shop.client.acl_setuser(name, enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset_channels=True)
    client = client_of(shop.url.replace("redis://", f"redis://{name}:any@"))
    yield client
    await client.aclose()
    await shop.client.acl_deluser(name)


@pytest.mark.requirement("S3-03")
async def test_a_message_whose_hint_is_lost_is_found_by_the_next_look(shop: Shop, mute: redis.asyncio.Redis) -> None:
    """The hint is for speed alone; the poll is what counts."""
    broker = MemoryBroker()
    async with (
        running(Dispatcher(shop.store, broker, poll_interval=SECOND / 10)),
        shop.client.pubsub() as hints,
    ):
        await shop.add(message(1))
        await confirmed(broker, 1)
        await hints.subscribe(shop.keys.channel)
        added = await shop.outbox.add(mute, message(2))
        await confirmed(broker, 2)
        await shop.client.publish(shop.keys.channel, "end")
        heard = [hint["data"] async for hint in _hints_until_end(hints)]

    assert added.is_new
    assert heard == [b"end"]


async def _hints_until_end(hints: Any) -> AsyncIterator[dict[str, Any]]:  # noqa: ANN401
    async for hint in hints.listen():
        if hint["type"] == "message":
            yield hint
            if hint["data"] == b"end":
                return


class Counting:
    """A broker that counts how often it is asked to take messages of a topic."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.asked: list[str] = []

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self.asked += [one.topic for one in messages]
        return await self.broker.publish_batch(messages)


@pytest.mark.requirement("S3-03")
async def test_hints_do_not_press_a_destination_that_is_down(shop: Shop) -> None:
    """Its breaker keeps the hot path away from it, and from it alone; no attempt is used up meanwhile."""
    counting, told = Counting(), list[Event]()
    counting.broker.down("slow")
    dispatcher = Dispatcher(
        shop.store,
        counting,
        poll_interval=10 * MINUTE,
        lease=30 * MINUTE,
        outage_backoff=lambda _: 10 * MINUTE,
        listener=told.append,
    )
    async with running(dispatcher):
        await shop.add(first := message(0, topic="slow"))
        await until(lambda: any(isinstance(event, BreakerOpened) for event in told), "the outage", within=LONG)
        for number in range(1, 6):
            await shop.add(message(number, topic="slow"), message(number, topic="quick"))
            await confirmed(counting.broker, number)

    assert counting.asked.count("slow") == 3  # as many as it takes to tell a destination from single messages
    assert counting.asked.count("quick") == 5
    assert (await entry(shop, first.id)).attempts == 0
    assert (await shop.store.stats()).pending == 6


@pytest.mark.requirement("S3-03")
async def test_a_destination_that_comes_back_is_found_by_one_message_and_then_gets_all(shop: Shop) -> None:
    """In their order, and each on its first attempt."""
    counting, told = Counting(), list[Event]()
    counting.broker.down()
    dispatcher = Dispatcher(
        shop.store, counting, poll_interval=SECOND / 10, outage_backoff=lambda _: SECOND / 10, listener=told.append
    )
    async with running(dispatcher):
        await shop.add(*(message(number, key="a") for number in range(5)))
        await until(lambda: any(isinstance(event, BreakerOpened) for event in told), "the outage", within=LONG)
        counting.broker.up()
        await confirmed(counting.broker, 5)

    assert [int(one.payload) for one in counting.broker.received] == [0, 1, 2, 3, 4]
    assert {one.attempt for one in counting.broker.received} == {1}
    assert any(isinstance(event, BreakerClosed) for event in told)


# -- scripts of the user's own -----------------------------------------------------------------------------------


@pytest.mark.requirement("S3-02", "S3-04")
async def test_the_pattern_of_a_script_with_messages_works_as_printed(valkey_server: ValkeyClient) -> None:
    """What it looks at, what it writes and the message are one step."""
    namespace = f"ns-{uuid4().hex}"
    [snippet] = [one for one in snippets("docs/patterns.md") if "scripted" in one]
    async with client_of(valkey_server.dsn) as client:
        names: dict[str, Any] = {"client": client}
        await execute(snippet.replace("shop", namespace), names)
        await client.hset(f"{{{namespace}}}:stock", "apple", "1")
        told = [await names["take"]("apple") for _ in range(2)]
        store = RedisStore(client, namespace=namespace)
        claims = await store.claim(10, TERMS)

        assert told == [b"taken", b"sold out"]
        assert await client.hget(f"{{{namespace}}}:stock", "apple") == b"0"
        assert [(claim.message.topic, claim.message.payload) for claim in claims] == [
            ("stock.taken", b'{"item":"apple"}')
        ]


ADD = """
if ARGV[1] ~= 'go' then return { KEYS[1], #KEYS, #ARGV } end
local added = add_messages()
if added.err then return added end
redis.call('SET', KEYS[1], ARGV[2])
return added -- with a comment at its end"""


@pytest.mark.requirement("S3-04")
async def test_a_script_has_its_own_keys_and_arguments_and_decides_whether_to_add(shop: Shop) -> None:
    """Also in a pipeline, and what is there already is told."""
    own, one, two = f"{shop.keys.prefix}:own", message(1), message(2)

    def call(*arguments: str) -> list[Any]:
        return scripted(shop.outbox, ADD, [one, two], keys=[own], arguments=arguments)

    refused = await shop.client.eval(*call("stop"))
    before = await shop.client.keys(f"{shop.table}*")
    added = await shop.client.eval(*call("go", "1"))
    async with shop.client.pipeline(transaction=True) as pipeline:
        pipeline.eval(*call("go", "2"))
        [again] = await pipeline.execute()

    assert (refused, before) == ([own.encode(), 1, 1], [])
    assert added == [b"1", b"1"]
    assert again == [one.id.hex.encode(), two.id.hex.encode()]
    assert await shop.client.get(own) == b"2"
    assert [each.id for each in await shop.deliver_all()] == [one.id, two.id]
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-06")
async def test_a_script_with_messages_writes_nothing_where_they_cannot_be_stored(shop: Shop) -> None:
    """Neither beside a key of another type nor with one topic too many."""
    own = f"{shop.keys.prefix}:own"
    call = scripted(shop.outbox, ADD, message(1), keys=[own], arguments=["go", "1"])
    hasty = scripted(shop.outbox, "redis.call('SET', KEYS[1], '1') return add_messages()", message(1), keys=[own])

    await shop.client.set(shop.key("due"), "taken")
    for each in (call, hasty):
        with pytest.raises(redis.exceptions.ResponseError, match="due is a string"):
            await shop.client.eval(*each)
    await shop.client.delete(shop.key("due"))
    await shop.client.hset(shop.key("topics"), mapping={f"topic-{number}": number for number in range(65536)})
    with pytest.raises(redis.exceptions.ResponseError, match="takes no more"):
        await shop.client.eval(*call)
    await shop.client.delete(shop.key("topics"))

    assert await shop.client.keys(f"{shop.table}*") == []


@pytest.mark.requirement("S3-03")
async def test_a_script_with_messages_wakes_a_dispatcher(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like all others."""

    async def add(added: Message) -> None:
        await shop.client.eval(*scripted(shop.outbox, "return add_messages()", added))

    await deliver_by_hints(shop, add, monkeypatch)


@pytest.mark.requirement("S3-04")
def test_a_script_takes_so_many_messages_and_no_stream() -> None:
    """Scripts are bounded."""
    with pytest.raises(ConfigurationError, match="too many for one script"):
        scripted(Outbox(), ADD, [message(1)] * 501)
    with pytest.raises(ConfigurationError, match="use the outbox of a RedisStore"):
        scripted(RedisStreamStore("redis://localhost").outbox(), ADD, message(1))
