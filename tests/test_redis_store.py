"""The store in Redis on bad days: wrong types, lost scripts, lost replies, no memory, no rights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as ClientRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from postroom import Dispatcher, Message, Outbox, upkeep
from postroom import dispatcher as dispatcher_module
from postroom.brokers import MemoryBroker
from postroom.errors import (
    ConfigurationError,
    InvalidNameError,
    ReadOnlyStoreError,
    StoreAuthenticationError,
    StoreError,
    StorePermissionError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from postroom.events import Event, MessagesDelivered, Repaired
from postroom.outbox import AddResult
from postroom.store import Claim, ClaimTerms, Dead, Delivered, Outcome, Release, Retry, Settlement
from postroom.stores.redis import RedisStore
from postroom.stores.redis.client import Client
from postroom.stores.redis.keys import Keys
from postroom.testing.clients import ValkeyClient
from postroom.testing.faults import FaultProxy
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until

TERMS = ClaimTerms(worker=uuid4())
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def client_of(url: str, **options: Any) -> redis.asyncio.Redis:  # noqa: ANN401
    """Return a client as a user would make one for postroom."""
    return redis.asyncio.Redis.from_url(url, retry=ClientRetry(NoBackoff(), 0), **options)


class Shop:
    """A store under names of its own, and its outbox."""

    def __init__(self, url: str, **options: Any) -> None:  # noqa: ANN401
        self.url = url
        self.namespace: str = options.pop("namespace", "shop")
        self.table = f"t{uuid4().hex}"
        self.store = RedisStore(url, namespace=self.namespace, table=self.table, **options)
        self.keys = Keys(self.table, self.namespace)
        self.client: redis.asyncio.Redis = client_of(url)
        self.outbox: Outbox = self.store.outbox()

    async def add(self, *messages: Message) -> list[AddResult]:
        return await self.outbox.add(self.client, list(messages))

    async def deliver_all(self) -> list[Message]:
        claims = await self.store.claim(100, TERMS)
        await self.store.settle([Settlement(claim, Delivered()) for claim in claims])
        return [claim.message for claim in claims]

    def key(self, name: str) -> str:
        return f"{self.keys.prefix}:{name}"

    async def close(self) -> None:
        await self.store.close()
        await self.client.aclose()


@pytest.fixture
async def shop(valkey_server: ValkeyClient) -> AsyncIterator[Shop]:
    shop = Shop(valkey_server.dsn)
    yield shop
    await shop.close()


def message(number: int = 1, **parts: Any) -> Message:  # noqa: ANN401
    return Message(**{"topic": "orders", "type": "order.placed", "payload": str(number).encode(), **parts})


# -- what goes in comes out ------------------------------------------------------------------------------------


@pytest.mark.requirement("G5", "S3-06")
@pytest.mark.parametrize(
    "payload", [b"[]", b"null", b"9007199254740993", b"", b"\x00\xff\r\n", b'{"a": 1.0}', b"x" * 200_000]
)
async def test_a_payload_comes_back_byte_for_byte(shop: Shop, payload: bytes) -> None:
    """No script looks into it."""
    await shop.add(message(payload=payload))

    assert [one.payload for one in await shop.deliver_all()] == [payload]


@pytest.mark.requirement("S3-05")
@pytest.mark.parametrize("word", ["a{b}c", "}", "{}", "a:b", "ü", "%7B", "{a}{b}"])
async def test_braces_and_colons_in_names_mix_nothing_up(valkey_server: ValkeyClient, word: str) -> None:
    """The namespace is the hash tag, and cannot close it."""
    shop = Shop(valkey_server.dsn, namespace=word)
    other = RedisStore(valkey_server.dsn, namespace=word + "2", table=shop.table)
    await shop.add(message(key=word, dedupe_key=word), message(2, topic=word.replace(" ", "_")))

    assert await other.claim(10, TERMS) == []
    assert len({key_slot(key.encode()) for key in shop.keys.all}) == 1
    assert [(one.key, one.dedupe_key) for one in await shop.deliver_all()] == [(word, word), (None, None)]
    await other.close()
    await shop.close()


@pytest.mark.requirement("S3-21")
def test_names_that_cannot_be_used_are_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidNameError, match="without braces"):
        RedisStore("redis://localhost", table="a{b}")
    with pytest.raises(InvalidNameError, match="namespace"):
        RedisStore("redis://localhost", namespace="a\nb")
    with pytest.raises(ConfigurationError, match="negative"):
        RedisStore("redis://localhost", keep_delivered=-SECOND)
    with pytest.raises(ConfigurationError, match="positive"):
        RedisStore("redis://localhost", timeout=timedelta(0))


# -- through whatever the caller has ------------------------------------------------------------------------------


@pytest.mark.requirement("G1", "G3", "S0-03", "S0-59", "S3-02")
async def test_a_pipeline_adds_when_it_is_executed_and_never_when_it_is_not(shop: Shop) -> None:
    """Business and outbox in one MULTI."""
    business = f"{shop.keys.prefix}:business"
    async with shop.client.pipeline(transaction=True) as pipeline:
        pipeline.set(business, "1")
        await shop.outbox.add(pipeline, message(1))
        assert await shop.deliver_all() == []
        await pipeline.execute()
    async with shop.client.pipeline(transaction=True) as pipeline:
        pipeline.set(business, "2")
        await shop.outbox.add(pipeline, message(2))

    assert await shop.client.get(business) == b"1"
    assert [one.payload for one in await shop.deliver_all()] == [b"1"]


@pytest.mark.requirement("S3-02")
def test_a_client_that_does_not_await_adds_as_well(valkey_server: ValkeyClient) -> None:
    """Also one that turns answers into texts, and its pipelines."""
    table = f"t{uuid4().hex}"
    outbox = Outbox(namespace="shop", table=table)
    client = redis.Redis.from_url(valkey_server.dsn, decode_responses=True, retry=None)
    first, pipe = message(1), client.pipeline()

    added = outbox.add(client, first)
    again = outbox.add(client, first)
    outbox.add(pipe, message(2))
    pipe.execute()

    async def stored() -> list[bytes]:
        store = RedisStore(valkey_server.dsn, namespace="shop", table=table)
        claims = await store.claim(10, TERMS)
        await store.close()
        return [claim.message.payload for claim in claims]

    assert (added, again) == (AddResult(first.id, is_new=True), AddResult(first.id, is_new=False))
    assert asyncio.run(stored()) == [b"1", b"2"]
    client.close()


class Watched(RedisStore):
    """A store that tells when nobody is claiming and nothing was found last."""

    claiming = 0
    is_empty = False

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        self.claiming += 1
        try:
            claims = await super().claim(limit, terms)
        finally:
            self.claiming -= 1
        self.is_empty = not claims
        return claims

    def is_quiet(self) -> bool:
        return self.is_empty and not self.claiming


def _has_confirmed(broker: MemoryBroker, count: int) -> bool:
    return broker.confirmed == count


async def deliver_by_hints(
    shop: Shop, add: Callable[[Message], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add messages to a store whose dispatcher would not look again for minutes, and wait for each of them."""
    monkeypatch.setattr(dispatcher_module, "SHORTEST_IDLE", 600.0)
    store, broker = Watched(shop.url, namespace=shop.namespace, table=shop.table), MemoryBroker()
    dispatcher = Dispatcher(store, broker, poll_interval=10 * MINUTE, lease=30 * MINUTE)
    running = asyncio.create_task(dispatcher.run())
    try:
        # The first may be found as the dispatcher begins, and the next as it begins to listen; none after them.
        for number in range(1, 5):
            await until(store.is_quiet, "a dispatcher at rest", within=MINUTE)
            await add(message(number))
            await until(partial(_has_confirmed, broker, number), "the message", within=MINUTE)
    finally:
        await dispatcher.stop()
        await running


@pytest.mark.requirement("S3-03")
async def test_a_hint_wakes_whoever_listens(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path, which a dispatcher takes without waiting for its next look."""
    await deliver_by_hints(shop, shop.add, monkeypatch)


# -- a client that would do harm -------------------------------------------------------------------------------


@pytest.mark.requirement("S3-13")
async def test_a_client_that_repeats_commands_by_itself_is_refused(valkey_server: ValkeyClient) -> None:
    """A write whose answer was lost would be written twice."""
    with pytest.raises(ConfigurationError, match="repeats commands"):
        RedisStore(redis.asyncio.Redis(port=urlsplit(valkey_server.dsn).port or 0))
    with pytest.raises(ConfigurationError, match="decode_responses"):
        RedisStore(client_of(valkey_server.dsn, decode_responses=True))


@pytest.mark.requirement("S3-21")
async def test_a_client_of_the_users_is_used_and_left_open(shop: Shop) -> None:
    """Who opened it closes it."""
    store = RedisStore(shop.client, namespace=shop.namespace, table=shop.table)
    await store.open()
    await shop.add(message(1))
    claims = await store.claim(10, TERMS)
    await store.close()

    assert len(claims) == 1
    assert await shop.client.ping()


# -- a server on a bad day -------------------------------------------------------------------------------------


NAMES = ["entries", "states", "errors", "due", "held", "leased", "dead", "done", "lanes", "tombs", "tried"]


@pytest.mark.requirement("S3-06")
@pytest.mark.parametrize("name", [*NAMES, "dedupes", "topics", "counters"])
async def test_a_key_of_the_wrong_type_is_told_and_nothing_is_written(shop: Shop, name: str) -> None:
    """Types are looked at before the first write."""
    await shop.client.set(shop.key(name), "somebody else's")

    with pytest.raises(redis.ResponseError, match=f"{name} is a string"):
        await shop.add(message(1, key="a", dedupe_key="x"))
    with pytest.raises(StoreError, match=r"use another table= or namespace="):
        await shop.store.claim(10, TERMS)

    assert await shop.client.keys(f"{shop.table}*") == [shop.key(name).encode()]


@pytest.mark.requirement("S3-04")
async def test_a_server_that_forgot_its_scripts_is_told_them_again(shop: Shop) -> None:
    """NOSCRIPT after a restart or a failover."""
    await shop.add(message(1))
    await shop.client.script_flush()

    assert len(await shop.deliver_all()) == 1


@pytest.mark.requirement("G2", "S3-15")
async def test_a_claim_whose_answer_was_lost_is_neither_lost_nor_doubled(valkey_server: ValkeyClient) -> None:
    """It comes again when the lease ran out; an answer to a settlement can be asked for again."""
    url = urlsplit(valkey_server.dsn)
    async with FaultProxy(url.hostname or "", url.port or 0) as proxy:
        shop = Shop(f"redis://127.0.0.1:{proxy.port}")
        shop.client = client_of(valkey_server.dsn)
        await shop.store.open()
        await shop.add(message(1))
        await shop.store.stats()
        await shop.store.claim(0, TERMS)
        proxy.drop_reply(b"EVALSHA")
        with pytest.raises(StoreUnavailableError):
            await shop.store.claim(10, ClaimTerms(worker=uuid4(), lease=SECOND))
        claims: list[Claim] = []

        async def again() -> bool:
            claims.extend(await shop.store.claim(10, TERMS))
            return bool(claims)

        await until(again, "the end of the lease")
        settled = [Settlement(claim, Delivered()) for claim in claims]
        proxy.drop_reply(b"EVALSHA")
        with pytest.raises(StoreUnavailableError):
            await shop.store.settle(settled)

        assert [claim.message.attempt for claim in claims] == [2]
        assert await shop.store.settle(settled) == []
        assert (await shop.store.stats()).delivered == 1
        await shop.close()


@pytest.mark.requirement("S3-13")
async def test_a_server_without_memory_refuses_the_whole_message_and_lets_others_go(
    private_valkey: ValkeyServer,
) -> None:
    """What is delivered makes room, and then there is some."""
    shop = Shop(private_valkey.dsn, keep_delivered=timedelta(0))
    await shop.add(message(1))
    before = await shop.client.hgetall(shop.key("topics"))
    await shop.client.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        await shop.add(message(2, topic="other"))

    assert [one.payload for one in await shop.deliver_all()] == [b"1"]
    assert await shop.client.hgetall(shop.key("topics")) == before
    await shop.client.config_set("maxmemory", "0")
    await shop.add(message(2))
    assert [one.payload for one in await shop.deliver_all()] == [b"2"]
    await shop.close()


@pytest.mark.requirement("S3-13")
async def test_a_user_without_the_right_is_told_what_to_allow(private_valkey: ValkeyServer) -> None:
    """And a wrong password is not shown."""
    admin = client_of(private_valkey.dsn)
    await admin.acl_setuser("poor", enabled=True, passwords=["+poor-secret"], keys=["*"], commands=["+ping"])
    await admin.aclose()
    poor = RedisStore(private_valkey.dsn.replace("redis://", "redis://poor:poor-secret@"))
    wrong = RedisStore(private_valkey.dsn.replace("redis://", "redis://poor:other-secret@"))

    with pytest.raises(StorePermissionError, match="EVALSHA"):
        await poor.claim(10, TERMS)
    with pytest.raises(StoreAuthenticationError) as refused:
        await wrong.open()

    assert "secret" not in str(refused.value) + repr(wrong)
    await poor.close()
    await wrong.close()


@pytest.mark.requirement("S3-29")
async def test_a_replica_is_told_from_the_primary(private_valkey: ValkeyServer, shop: Shop) -> None:
    """Nothing is claimed where nothing can be written."""
    url = urlsplit(shop.url)
    await shop.add(message(1))
    await shop.client.config_set("repl-diskless-sync-delay", 0)  # it would wait for more replicas
    client = client_of(private_valkey.dsn)
    await client.replicaof(url.hostname, url.port)
    store = RedisStore(private_valkey.dsn, namespace=shop.namespace, table=shop.table)

    async def is_refused() -> bool:
        try:
            await store.claim(10, TERMS)
        except ReadOnlyStoreError as error:
            return "connect to the primary" in str(error)
        except StoreUnavailableError:
            return False  # while it copies what the primary has
        return False

    await until(is_refused, "a replica that answers")
    await store.close()
    await client.aclose()


@pytest.mark.requirement("G4", "S3-29")
async def test_a_server_that_is_away_is_told_and_found_again(private_valkey: ValkeyServer) -> None:
    """What was stored is there after a crash of the server."""
    shop = Shop(private_valkey.dsn)
    await shop.add(message(1))
    await shop.client.waitaof(1, 0, 5000)
    private_valkey.kill9()
    with pytest.raises(StoreUnavailableError, match="check that the server runs"):
        await shop.store.claim(10, TERMS)
    private_valkey.start()

    assert len(await shop.deliver_all()) == 1
    await shop.close()


@pytest.mark.requirement("G13")
async def test_a_server_that_hangs_is_given_up(private_valkey: ValkeyServer) -> None:
    """No call waits for longer than it may."""
    shop = Shop(private_valkey.dsn, timeout=5 * SECOND)
    await shop.store.open()
    private_valkey.pause()
    try:
        with pytest.raises(StoreTimeoutError, match="did not answer within 5 s"):
            await shop.store.stats()
    finally:
        private_valkey.resume()
    assert (await shop.store.stats()).pending == 0
    await shop.close()


# -- what a script leaves behind when it fails half way ----------------------------------------------------------


async def _settled(shop: Shop) -> None:
    """Have messages in every state, with and without keys."""
    await shop.add(*(message(n, key=key, topic=f"t{n % 2}") for n in range(1, 13) for key in (None, f"k{n % 3}")))
    claims = await shop.store.claim(12, TERMS)
    outcomes: list[Outcome] = [Delivered(), Retry("later", MINUTE), Dead("never"), Release()]
    settlements = [Settlement(claim, outcomes[n % 4]) for n, claim in enumerate(claims[:8])]
    await shop.store.settle(settlements)
    # Some of those that failed are out again.
    again = await shop.store.claim(3, TERMS)
    await shop.store.settle([Settlement(claim, Retry("again")) for claim in again])
    await shop.store.claim(2, TERMS)


@pytest.mark.requirement("S3-07")
async def test_repair_finds_nothing_to_mend_after_whole_scripts(shop: Shop) -> None:
    """Its count should read zero for ever."""
    await _settled(shop)

    assert await shop.store.repair(at_once=5) == 0


@pytest.mark.requirement("S3-06", "S3-07", "S3-10")
@pytest.mark.parametrize("name", ["due", "leased", "dead", "done", "lanes", "tombs", "tried", "held"])
async def test_repair_mends_an_index_that_was_lost(shop: Shop, name: str) -> None:
    """Whatever state a message is in, it is found again."""
    await _settled(shop)
    before = await _seen(shop)
    await shop.client.delete(shop.key(name))

    for _ in range(3):  # an index may be mended only after another
        await shop.store.repair()

    assert await _seen(shop) == before
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-07")
async def test_a_dispatcher_has_its_store_repaired(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, and tells if there was anything to mend."""
    monkeypatch.setattr(upkeep, "HOUR", SECOND / 50)
    told: list[Event] = []
    await shop.add(message(1))
    await shop.client.delete(shop.key("due"))
    dispatcher = Dispatcher(shop.store, MemoryBroker(), listener=told.append)
    running = asyncio.create_task(dispatcher.run())

    await until(lambda: {MessagesDelivered(1), Repaired(1)} <= set(told), "the delivery of what was lost")
    await dispatcher.stop()
    await running

    assert [event for event in told if isinstance(event, Repaired)] == [Repaired(1)]


async def _seen(shop: Shop) -> dict[str, list[Any]]:
    names = ("due", "held", "leased", "lanes", "tombs", "tried")
    found: dict[str, list[Any]] = {
        name: await shop.client.zrange(shop.key(name), 0, -1, withscores=True) for name in names
    }
    return {**found, **{name: sorted(await shop.client.zrange(shop.key(name), 0, -1)) for name in ("dead", "done")}}


@pytest.mark.requirement("S3-10")
async def test_members_without_an_entry_are_dropped_and_counted(shop: Shop) -> None:
    """An orphan stops nobody."""
    await shop.add(message(1), message(2))
    [claim] = await shop.store.claim(1, ClaimTerms(worker=uuid4(), lease=timedelta(microseconds=1)))
    ids = await shop.client.hkeys(shop.key("states"))
    await shop.client.hdel(shop.key("states"), claim.message.id.bytes)

    claims = await shop.store.claim(10, TERMS)

    assert len(ids) - len(claims) == 1
    assert await shop.client.hget(shop.key("counters"), "orphans") == b"1"


@pytest.mark.requirement("S3-29")
@pytest.mark.parametrize("keep", [timedelta(0), timedelta(days=1)], ids=["nothing kept", "purged"])
async def test_what_was_delivered_leaves_nothing_behind(valkey_server: ValkeyClient, keep: timedelta) -> None:
    """Neither indexes nor errors nor dedupe keys."""
    shop = Shop(valkey_server.dsn, keep_delivered=keep)
    await shop.add(*(message(n, key=key, dedupe_key=f"{n}-{key}") for n in range(3) for key in (None, "a", "b")))
    for outcome in (Retry("no"), Dead("never"), Release()):
        claims = await shop.store.claim(100, TERMS)
        await shop.store.settle([Settlement(claim, outcome) for claim in claims[:3]])
        await shop.store.settle([Settlement(claim, Release()) for claim in claims[3:]])
        await shop.store.redrive(*(claim.message.id for claim in claims))
    await shop.deliver_all()
    await shop.store.purge(older_than=timedelta(0))

    left = set(await shop.client.keys(f"{shop.table}*"))
    assert left == {shop.key("counters").encode(), shop.key("topics").encode()}
    await shop.close()


# -- dead messages that are tried again ----------------------------------------------------------------------------


@pytest.mark.requirement("G6", "S3-17", "S3-18")
async def test_a_dead_message_that_is_redriven_goes_before_those_it_held_back(shop: Shop) -> None:
    """Never deleted by itself, and first in its place again."""
    await shop.add(message(1, key="a"), message(2, key="a"), message(3))
    [dead] = await shop.store.claim(1, TERMS)
    await shop.store.settle([Settlement(dead, Dead("never"))])
    blocked = [one.payload for one in await shop.deliver_all()]

    assert (await shop.store.stats()).oldest_due is None  # what is held back cannot go out
    assert await shop.store.redrive(dead.message.id, uuid4()) == 1
    assert await shop.store.redrive(dead.message.id) == 0
    assert await shop.store.repair() == 0
    [one, two] = await shop.store.claim(10, TERMS)

    assert blocked == [b"3"]
    assert [(each.message.payload, each.message.attempt) for each in (one, two)] == [(b"1", 1), (b"2", 1)]
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-18")
async def test_a_redriven_message_waits_for_nobody_that_was_let_pass(shop: Shop) -> None:
    """With dead messages passed over, a later one may be out already."""
    terms = ClaimTerms(worker=uuid4(), on_dead="skip")
    await shop.add(message(1, key="a"), message(2, key="a"), message(3, key="a"))
    [dead] = await shop.store.claim(1, terms)
    await shop.store.settle([Settlement(dead, Dead("never"))])
    [second] = await shop.store.claim(1, terms)
    await shop.store.redrive(dead.message.id)

    again = await shop.store.claim(10, terms)
    await shop.store.settle([Settlement(claim, Delivered()) for claim in (second, *again)])

    assert [claim.message.payload for claim in again] == [b"1"]
    assert [one.payload for one in await shop.deliver_all()] == [b"3"]
    assert await shop.store.repair() == 0


# -- much at once ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-14")
async def test_a_tenant_is_found_behind_many_of_others(shop: Shop) -> None:
    """A claim that looks through much goes on where it stopped."""
    tenant = uuid4()
    await shop.add(*(message(n) for n in range(2500)))
    await shop.add(message(1, tenant_id=tenant), message(2, tenant_id=tenant))

    claims = await shop.store.claim(10, ClaimTerms(worker=uuid4(), tenant_id=tenant))

    assert [claim.message.payload for claim in claims] == [b"1", b"2"]


@pytest.mark.requirement("S2-27")
async def test_parked_messages_hide_nothing_of_the_others(shop: Shop) -> None:
    """However many of them wait; and all of them come back."""
    await shop.add(*(message(n, topic="down") for n in range(2500)))
    while claims := await shop.store.claim(500, ClaimTerms(worker=uuid4())):
        await shop.store.settle([Settlement(claim, Release(destination="down")) for claim in claims])
    await shop.add(message(1, topic="up"))

    found = await shop.store.claim(10, ClaimTerms(worker=uuid4()))
    unparked = [await shop.store.unpark("down", 1700) for _ in range(3)]

    assert [claim.message.topic for claim in found] == ["up"]
    assert unparked == [1700, 800, 0]
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S2-27")
async def test_thousands_of_topics_that_have_one_message_each_are_claimed(shop: Shop) -> None:
    """A script cannot pass more than about 8,000 values to one command."""
    for first in range(0, 9000, 500):
        await shop.add(*(message(n, topic=f"topic {n}") for n in range(first, first + 500)))

    claims = await shop.store.claim(500, ClaimTerms(worker=uuid4()))

    assert [claim.message.payload for claim in claims] == [b"%d" % n for n in range(500)]


@pytest.mark.requirement("G2")
async def test_places_of_messages_that_an_earlier_version_claimed_are_cleaned_up(shop: Shop) -> None:
    """Such a worker claims what was parked for an hour, and leaves its place among the parked ones."""
    await shop.add(*(message(n) for n in range(10)))
    claims = await shop.store.claim(10, ClaimTerms(worker=uuid4()))
    await shop.store.settle([Settlement(claim, Release(destination="down")) for claim in claims])
    members: Any = await shop.client.zrange(shop.keys.all[14], 0, -1)
    await shop.store.unpark("down", 10)
    claims = await shop.store.claim(10, ClaimTerms(worker=uuid4()))
    await shop.store.settle([Settlement(claim, Release(destination="west")) for claim in claims[5:]])
    await shop.client.zadd(shop.keys.all[14], dict.fromkeys(members, 0))

    assert await shop.store.unpark("down", 3) == 0
    assert await shop.store.parked(limit=1) == ["west"]
    assert await shop.client.zcard(shop.keys.all[14]) == 5
    assert await shop.store.unpark("west", 10) == 5
    assert await shop.store.repair() == 0


@pytest.mark.requirement("G2")
async def test_repair_mends_the_places_of_parked_messages(shop: Shop) -> None:
    """Those that are missing, and those that should not be there."""
    await shop.add(message(1))
    claims = await shop.store.claim(10, ClaimTerms(worker=uuid4()))
    await shop.store.settle([Settlement(claim, Release(destination="down")) for claim in claims])
    members: Any = await shop.client.zrange(shop.keys.all[14], 0, -1)
    await shop.client.zrem(shop.keys.all[14], *members)

    missing = await shop.store.repair()
    there = await shop.store.parked()
    await shop.store.unpark("down", 1)
    await shop.store.claim(10, ClaimTerms(worker=uuid4()))

    assert (missing, there) == (1, ["down"])
    assert await shop.store.repair() == 0


@pytest.mark.requirement("G5", "S3-12")
async def test_one_message_that_is_added_twice_in_one_call_is_there_once(shop: Shop) -> None:
    """With a key and without."""
    loose, keyed = message(1), message(2, key="a")

    added = await shop.add(loose, loose, keyed, keyed)

    assert [one.id for one in added] == [loose.id, loose.id, keyed.id, keyed.id]
    assert [one.is_new for one in added] == [True, False, True, False]
    assert [one.payload for one in await shop.deliver_all()] == [b"1", b"2"]
    assert await shop.deliver_all() == []
    assert await shop.store.repair() == 0


@pytest.mark.requirement("G6", "S2-31")
async def test_two_calls_of_one_moment_keep_their_order(shop: Shop) -> None:
    """Places in the order of arrival are never given twice, however many came at once before."""
    async with shop.client.pipeline(transaction=True) as pipeline:
        await shop.outbox.add(pipeline, [message(n, key="a") for n in range(400)])
        await shop.outbox.add(pipeline, message(400, key="a"))
        await pipeline.execute()

    claims = await shop.store.claim(500, TERMS)

    assert [int(claim.message.payload) for claim in claims] == list(range(401))


@pytest.mark.requirement("S3-07")
async def test_a_message_that_is_out_again_is_no_longer_among_those_that_wait(shop: Shop) -> None:
    """Nothing is left for repair."""
    await shop.add(message(1))
    await shop.store.settle([Settlement(claim, Retry("no")) for claim in await shop.store.claim(1, TERMS)])
    [again] = await shop.store.claim(1, TERMS)

    assert again.message.attempt == 2
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-07")
async def test_a_lease_that_was_renewed_is_indexed_as_it_is(shop: Shop) -> None:
    """Nothing is left for repair."""
    await shop.add(message(1))
    claims = await shop.store.claim(1, TERMS)
    await shop.store.extend(claims, 10 * MINUTE)

    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-14", "S3-15")
@pytest.mark.parametrize("key", [None, "a"])
async def test_of_two_words_about_one_claim_in_one_call_the_first_counts(shop: Shop, key: str | None) -> None:
    """The second is lost, unless it says the same."""
    await shop.add(message(1, key=key))
    [claim] = await shop.store.claim(1, TERMS)

    words = [Settlement(claim, Retry("no")), Settlement(claim, Delivered()), Settlement(claim, Retry("no"))]
    lost = await shop.store.settle(words)

    assert lost == [claim]
    assert (await shop.store.stats()).pending == 1
    assert await shop.store.repair() == 0


@pytest.mark.requirement("S3-09")
async def test_more_than_one_script_takes_is_settled_all_the_same(shop: Shop) -> None:
    """Scripts are bounded, batches are not."""
    await shop.add(*(message(n) for n in range(1200)))
    claims = [claim for _ in range(3) for claim in await shop.store.claim(1000, TERMS)]

    assert len(claims) == 1200
    assert await shop.store.extend(claims, MINUTE) == []
    assert await shop.store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
    assert (await shop.store.stats()).delivered == 1200


# -- from the command line ---------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-03")
async def test_the_command_line_delivers_and_counts(shop: Shop, tmp_path: Path) -> None:
    """A store is a URL there."""
    await shop.add(message(1), message(2))
    store = ("--store", shop.url, "--namespace", shop.namespace, "--table", shop.table)

    delivered = await cli("dispatch", *store, "--broker", f"file:{tmp_path / 'out.jsonl'}", "--once")
    status = await cli("status", *store, "--json")
    schema = await cli("schema", "check", *store)

    assert delivered.returncode == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert json.loads(status.stdout)["delivered"] == 2
    assert (schema.returncode, "has no tables" in schema.stderr) == (2, True)


async def cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "postroom.cli", *words]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio.wait_for starts no task since Python 3.12")
async def test_a_connection_that_another_task_closes_before_it_sends_is_a_lost_connection(redis_url: str) -> None:
    """A client of a cluster closes all connections when it cannot find the servers, also those that others use."""
    address = urlsplit(redis_url)
    connection: Any = redis.asyncio.Connection(host=address.hostname or "", port=address.port or 0, socket_timeout=60)
    await connection.connect()
    client = Client(redis_url, timeout=MINUTE)

    sending = asyncio.create_task(client.call(connection.send_packed_command(connection.pack_command("PING"))))
    await asyncio.sleep(0)  # the library has started the task that writes, which has not run yet
    await connection.disconnect(nowait=True)

    with pytest.raises(StoreUnavailableError, match="connection lost"):
        await sending
    await client.close()


async def test_a_write_to_a_lost_transport_is_told_as_a_lost_connection() -> None:
    """Asyncio of Python 3.12 and redis-py fail with an AttributeError, which would end a dispatcher."""
    client, no_loop = Client("redis://127.0.0.1:1", timeout=timedelta(seconds=5)), None

    async def call(name: str) -> None:
        getattr(no_loop, name)

    for name in ("_add_writer", "writelines", "drain", "_buffer"):
        with pytest.raises(StoreUnavailableError, match="connection lost"):
            await client.call(call(name))
    with pytest.raises(AttributeError):
        await client.call(call("misspelt"))


async def test_what_is_redriven_is_named_by_uuids(shop: Shop) -> None:
    """A text is refused before anything is tried again."""
    with pytest.raises(TypeError, match="takes the ids of messages as UUID objects, not str"):
        await shop.store.redrive("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["", ".store", ".writer", ".inbox", ".transactions"])
def test_without_the_library_the_extra_is_named(module: str) -> None:
    """Whichever part is imported first."""
    blocked = f"import sys; sys.modules['redis'] = None; import postroom.stores.redis{module}"

    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False, timeout=110)

    assert done.returncode == 1
    assert "MissingExtraError: redis is not installed; run: pip install 'postroom[redis]'" in done.stderr
