"""Stores in a cluster: a namespace is in one slot, namespaces are in many, and a server may die."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, cast
from uuid import uuid4

import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from postroom import Consumer, Dispatcher, Message, Outbox, Router, transactional
from postroom.brokers import MemoryBroker
from postroom.decisions import Decisions, Enqueued, Scheduled
from postroom.errors import CommandRefusedError, ConfigurationError, StoreError, StoreUnavailableError
from postroom.events import Event, StoreFailed, log_event
from postroom.store import ClaimTerms, Delivered, Settlement
from postroom.stores import store_from_url
from postroom.stores.redis import RedisStore, RedisStreamStore, current_pipeline, hints
from postroom.stores.redis.addresses import connect, hang_up
from postroom.stores.redis.client import Client
from postroom.stores.redis.errors import translated
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.profile import check_profile, confirm
from postroom.stores.redis.stream_keys import StreamKeys
from postroom.testing.clients import RedisClient
from postroom.testing.cluster import RedisCluster, ValkeyCluster
from postroom.testing.servers import RedisServer, ServerMissingError
from postroom.testing.waiting import until
from tests.support.server_fixtures import skip_or_fail

from .worlds import REDIS_CLUSTERS

# The library's own types name neither all commands nor what they answer.
Foreign = Any
Kind: TypeAlias = type[RedisStore] | type[RedisStreamStore]

SECOND = timedelta(seconds=1)
#: How long a machine with other things to do may take.
#: A claim whose answer was lost comes again after its lease of 30 seconds, and another may be lost then.
PATIENCE = 300 * SECOND
KINDS = [RedisStore, RedisStreamStore]
#: What a producer may hear while a server is gone.
LOST = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, StoreError, OSError)


def url_of(server: RedisClient | RedisCluster) -> str:
    return server.dsn.replace("redis:", "redis+cluster:", 1)


def terms() -> ClaimTerms:
    return ClaimTerms(worker=uuid4())


@pytest.fixture(params=REDIS_CLUSTERS)
def node(request: pytest.FixtureRequest) -> RedisClient:
    """One server of the cluster of this run, whose keys are everybody's."""
    return cast("RedisClient", request.getfixturevalue(request.param))


@pytest.fixture
async def client(node: RedisClient) -> AsyncIterator[Foreign]:
    """A client as a user makes it."""
    async with redis.asyncio.RedisCluster.from_url(node.dsn, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@asynccontextmanager
async def opened(kind: Kind, server: RedisClient | RedisCluster, namespace: str) -> AsyncIterator[Any]:
    store = kind(url_of(server), namespace=namespace, timeout=10 * SECOND)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def fresh() -> str:
    return f"shop-{uuid4().hex}"


# -- keys and slots ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize("namespace", ["shop", "a{b", "a}b", "{}", "{x}{y}", "}{", "ü ß", "a:b", "%7B"])
def test_all_keys_of_a_namespace_are_in_one_slot(node: RedisClient, namespace: str) -> None:
    """Whatever it is called, those of both stores, and what is made from their prefix."""
    keys, stream = Keys("outbox", namespace), StreamKeys("stream", namespace)
    others = [f"{keys.prefix}:tickets", keys.channel, Keys("inbox", namespace).prefix + ":mark"]

    slots = {node.ask("CLUSTER", "KEYSLOT", key) for key in [*keys.all, *stream.all, *others]}

    assert len(slots) == 1


@pytest.mark.requirement("S0-31")
async def test_several_namespaces_are_in_several_slots_and_on_all_servers(client: Foreign) -> None:
    keys = [Keys("outbox", f"shop-{number}").all[0] for number in range(60)]

    await client.initialize()

    assert len({client.keyslot(key) for key in keys}) > 50
    assert len({client.get_node_from_key(key).name for key in keys}) == 3


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_transaction_of_the_user_takes_messages_and_keys_of_their_slot_only(
    client: Foreign, node: RedisClient, kind: Kind
) -> None:
    """What is in another slot is refused before anything is sent."""
    namespace = fresh()
    async with opened(kind, node, namespace) as store:
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.set(f"{{{namespace}}}:order", "placed")
            await store.outbox().add(pipeline, {"order": 1}, topic="orders")
            await pipeline.execute()
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.set(f"order-of-{namespace}", "placed")
            await store.outbox().add(pipeline, {"order": 2}, topic="orders")
            with pytest.raises(redis.exceptions.RedisClusterException, match="slot"):
                await pipeline.execute()

        claims = await store.claim(10, terms())

    assert [claim.message.payload for claim in claims] == [b'{"order":1}']
    assert await client.get(f"{{{namespace}}}:order") == b"placed"
    assert await client.get(f"order-of-{namespace}") is None


@pytest.mark.requirement("S0-30", "S0-31")
async def test_a_handler_has_its_effect_and_its_output_in_one_slot(client: Foreign, node: RedisClient) -> None:
    """With the inbox beside them; an effect in another slot is refused, and nothing of it happens."""
    namespace = fresh()
    broker, router = MemoryBroker(), Router(topic="stock")
    store = RedisStore(client, namespace=namespace)
    stock = store.transactions().key("stock")
    refused: list[str] = []

    @router.on("order.placed")
    async def reserve(message: Message) -> list[Message]:
        await current_pipeline(client).hincrby(stock, "apples", -1)
        return [Message(topic="events", type="stock.reserved", payload=b"{}")]

    @router.on("order.lost")
    async def lose(message: Message) -> None:
        await current_pipeline(client).hincrby(stock, "apples", -1)
        try:
            await current_pipeline(client).hincrby(f"stock-of-{namespace}", "apples", -1)
        except CommandRefusedError as error:
            refused.append(str(error))
            raise

    stack = transactional(store, consumer="stock", max_attempts=1, listener=lambda _: None)
    consumer = Consumer(broker.subscribe("stock", group="stock"), router, stack, listener=lambda _: None)
    running = asyncio.create_task(consumer.run())
    placed = Message(topic="stock", type="order.placed", payload=b"{}")
    for message in (placed, placed, Message(topic="stock", type="order.lost", payload=b"{}")):
        await broker.publish_batch([message])
        await until(lambda: broker.backlog("stock") == 0, "the acknowledgement", within=PATIENCE)
    await consumer.stop()
    await running

    assert await client.hget(stock, "apples") == b"-1"
    assert [claim.message.type for claim in await store.claim(10, terms())] == ["stock.reserved"]
    assert len(refused) == 1
    assert "another slot" in refused[0]


@pytest.mark.requirement("S0-31")
async def test_decisions_are_made_in_a_cluster(client: Foreign, node: RedisClient) -> None:
    """Tickets are in the slot of the outbox."""
    namespace = fresh()
    decisions = Decisions(Outbox(namespace=namespace))
    expires = datetime.now(UTC) - SECOND

    scheduled = await decisions.schedule(client, "ticket", expires)
    due = await decisions.find_due(client)
    decided = await decisions.decide(client, "ticket", expires, {"ticket": 1}, topic="tickets")

    assert scheduled == Scheduled()
    assert [one.ticket for one in due] == ["ticket"]
    assert isinstance(decided, Enqueued)
    async with opened(RedisStore, node, namespace) as store:
        assert len(await store.claim(10, terms())) == 1


# -- clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_many_may_be_the_first_to_use_a_client(node: RedisClient, kind: Kind) -> None:
    """The library's client, if several commands find the servers for it, closes connections that are in use."""
    for _ in range(3):
        client = redis.asyncio.RedisCluster.from_url(node.dsn, retry=Retry(NoBackoff(), 0))
        store = kind(client, namespace=fresh())

        await asyncio.gather(*[store.stats() for _ in range(8)])

        await client.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_many_may_be_the_first_to_add_with_a_client(node: RedisClient, kind: Kind) -> None:
    for _ in range(3):
        client: Foreign = redis.asyncio.RedisCluster.from_url(node.dsn, retry=Retry(NoBackoff(), 0))
        store = kind(client, namespace=fresh())

        await asyncio.gather(*[store.outbox().add(client, {"order": n}, topic="orders") for n in range(8)])

        await store.open()
        assert (await store.stats()).pending == 8
        await client.aclose()


@pytest.mark.requirement("S0-31")
async def test_a_url_may_name_several_servers_some_of_which_are_gone(node: RedisClient) -> None:
    address = node.dsn.removeprefix("redis://").removesuffix("/0")
    store = store_from_url(f"redis+cluster://127.0.0.1:1,{address}", namespace=fresh(), timeout=10 * SECOND)

    assert await store.open()
    assert (await store.stats()).pending == 0
    await store.close()


@pytest.mark.requirement("S0-36")
async def test_a_client_for_one_server_is_told_that_it_is_in_a_cluster(node: RedisClient) -> None:
    """And the error is one of those that pass, since a slot may be on its way."""
    places = {(await _said(RedisStore(node.dsn, namespace=fresh()))) for _ in range(12)}

    assert any("MovedError" in said and "use redis+cluster://" in said for said in places)


async def _said(store: RedisStore) -> str:
    try:
        await store.stats()
    except StoreUnavailableError as error:
        return str(error)
    finally:
        await store.close()
    return ""


async def test_a_client_for_a_cluster_is_told_that_there_is_none(redis_server: RedisClient) -> None:
    store = RedisStore(url_of(redis_server), timeout=10 * SECOND)

    with pytest.raises(StoreUnavailableError, match=r"[Cc]luster"):
        await store.open()

    await store.close()


@pytest.mark.parametrize(
    "url", ["redis+cluster://localhost:port", "redis+cluster://localhost/3", "redis+cluster://a:1,b:x"]
)
def test_a_url_that_no_cluster_can_have_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        RedisStore(url)


@pytest.mark.requirement("S0-31")
async def test_a_url_says_how_to_connect_and_errors_do_not_say_the_password() -> None:
    url = "rediss+cluster://ann:se%40cret@one.example:7000,[::1],two.example/?client_name=shop"
    client, store = connect(url, timeout=4 * SECOND), RedisStore(url)
    nodes = {(node.host, node.port): node for node in client.nodes_manager.startup_nodes.values()}
    options: dict[str, Foreign] = client.connection_kwargs

    assert set(nodes) == {("one.example", 7000), ("::1", 6379), ("two.example", 6379)}
    assert (options["username"], options["password"], options["client_name"]) == ("ann", "se@cret", "shop")
    assert client.retry.get_retries() == 0
    assert "cret" not in repr(store)
    assert Client(url, timeout=SECOND).place == "rediss+cluster://one.example:7000,[::1],two.example"


@pytest.mark.requirement("S0-36")
@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"),
        redis.exceptions.MovedError("1234 127.0.0.1:7001"),
        redis.exceptions.AskError("1234 127.0.0.1:7001"),
        redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"),
        redis.exceptions.ClusterError("TTL exhausted."),
        redis.exceptions.SlotNotCoveredError('Slot "7" is not covered by the cluster.'),
        redis.exceptions.MasterDownError("MASTERDOWN Link with MASTER is down"),
        redis.exceptions.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
        redis.exceptions.RedisClusterException("Redis Cluster cannot be connected."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_passes_in_a_cluster_is_an_error_that_passes(error: Exception) -> None:
    """A dispatcher that hears it tries again."""
    assert type(translated(error, "redis")) is StoreUnavailableError


# -- hints ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_hint_comes_through_a_cluster(client: Foreign, node: RedisClient, kind: Kind) -> None:
    """Whichever server was connected to first."""
    woken = asyncio.Event()
    async with opened(kind, node, fresh()) as store:
        listening = asyncio.create_task(store.listen(woken.set))
        await asyncio.wait_for(woken.wait(), 60)
        woken.clear()

        await store.outbox().add(client, {"order": 1}, topic="orders")

        await asyncio.wait_for(woken.wait(), 60)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.requirement("S0-31")
async def test_who_hears_nothing_asks_and_follows_the_messages_to_another_server(
    private_valkey_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a replica that takes over although nothing has died."""
    cluster, namespace = private_valkey_cluster, "shop"
    monkeypatch.setattr(hints, "SILENCE", timedelta(seconds=2))
    wakes: list[int] = []
    async with opened(RedisStore, cluster, namespace) as store:
        listening = asyncio.create_task(store.listen(lambda: wakes.append(1)))
        await until(lambda: bool(wakes), "the listener", within=PATIENCE)
        old = cluster.primary_of("{shop}")
        before = pings(old)
        await until(lambda: pings(old) > before + 2, "questions whether it is there", within=PATIENCE)
        was_listening = not listening.done()

        new = cluster.replica_of(old)
        new.client.ask("CLUSTER", "FAILOVER")
        await until(lambda: cluster.primary_of("{shop}") is new, "the failover", within=PATIENCE)
        await until(lambda: _answers(store), "an answer", within=PATIENCE)
        with pytest.raises(StoreUnavailableError, match="another server of the cluster"):
            await asyncio.wait_for(listening, 60)

        wakes.clear()
        listening = asyncio.create_task(store.listen(lambda: wakes.append(1)))
        await until(lambda: len(wakes) == 1, "the listener", within=PATIENCE)
        await store.outbox().add(store.client, {"order": 1}, topic="orders")
        await until(lambda: len(wakes) == 2, "the hint", within=PATIENCE)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    assert was_listening


def pings(server: RedisServer) -> int:
    found = re.search(r"cmdstat_ping:calls=(\d+)", str(server.client.ask("INFO", "commandstats")))
    return int(found.group(1)) if found else 0


@pytest.mark.requirement("S0-31")
async def test_a_server_that_hangs_is_not_listened_to_for_ever(
    private_valkey_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And calls find the server that took its place, though nobody has closed a connection."""
    cluster = private_valkey_cluster
    monkeypatch.setattr(hints, "SILENCE", timedelta(milliseconds=200))
    listens = asyncio.Event()
    store = RedisStore(url_of(cluster), namespace="shop", timeout=4 * SECOND)
    await store.open()
    listening = asyncio.create_task(store.listen(listens.set))
    await asyncio.wait_for(listens.wait(), 60)

    old = cluster.primary_of("{shop}")
    old.pause()
    with pytest.raises(StoreError):
        await asyncio.wait_for(listening, 60)
    await until(lambda: _answers(store), "an answer", within=PATIENCE)
    old.resume()
    await store.close()


async def _answers(store: RedisStore | RedisStreamStore) -> bool:
    try:
        await store.stats()
    except StoreError:
        return False
    return True


# -- a server dies -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize(
    ("kind", "fixture"), [(RedisStore, "private_redis_cluster"), (RedisStreamStore, "private_valkey_cluster")]
)
async def test_a_server_is_killed_and_nothing_is_lost_that_its_replica_had_confirmed(
    request: pytest.FixtureRequest, kind: Kind, fixture: str
) -> None:
    """The replica takes over, the dispatcher goes on by itself, and what was confirmed is delivered."""
    cluster = cast("RedisCluster", request.getfixturevalue(fixture))

    def kill() -> None:
        cluster.kill_node(cluster.primary_of("{shop}"))

    await check_a_failover(kind, url_of(cluster), kill, cluster.wait_until_whole)


async def check_a_failover(kind: Kind, url: str, kill: Callable[[], None], wait: Callable[[], None]) -> None:
    """Kill the primary beneath a dispatcher: what a replica has confirmed is delivered, and what comes after it."""
    heard: list[Event] = []
    delivered: set[bytes] = set()

    async def deliver(message: Message) -> None:
        delivered.add(message.payload)

    def listen(event: Event) -> None:
        heard.append(event)
        log_event(event)  # a failure shows what the dispatcher met

    store = kind(url, namespace="shop", timeout=10 * SECOND)
    dispatcher = Dispatcher(store, deliver, poll_interval=SECOND / 2, listener=listen)
    running = asyncio.create_task(dispatcher.run())
    gate, prefix = Client(url, timeout=10 * SECOND), Keys("any", "shop").prefix
    checked = await check_profile(gate, "replicated", prefix=prefix)
    producer = Producer(connect(url, timeout=5 * SECOND), store.outbox())
    confirmed: set[bytes] = set()

    for _ in range(10):
        confirmed |= await producer.produce(5)
        await confirm(gate, checked, prefix=prefix)
    kill()
    with pytest.raises(StoreUnavailableError):
        await confirm(gate, checked, prefix=prefix)
    for _ in range(20):
        await producer.produce(1)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(wait)
    afterwards = await producer.produce_for_sure(10)

    await until(lambda: confirmed | afterwards <= delivered, "all deliveries", within=PATIENCE)
    await dispatcher.stop()
    await running
    await hang_up(producer.client)
    await gate.close()
    assert len(confirmed) == 50
    assert any(isinstance(event, StoreFailed) for event in heard)


class Producer:
    """Adds messages that can be told by their numbers."""

    def __init__(self, client: Foreign, outbox: Outbox) -> None:
        self.client = client
        self._outbox = outbox
        self._count = 0

    async def produce(self, count: int) -> set[bytes]:
        """Add messages; return those of which the server has said that they were."""
        added: set[bytes] = set()
        for _ in range(count):
            self._count += 1
            try:
                async with asyncio.timeout(5):
                    await self._outbox.add(self.client, {"order": self._count}, topic="orders")
            except (*LOST, TimeoutError):
                continue
            added.add(b'{"order":%d}' % self._count)
        return added

    async def produce_for_sure(self, count: int) -> set[bytes]:
        added: set[bytes] = set()
        async with asyncio.timeout(60):
            while len(added) < count:
                added |= await self.produce(1)
                await asyncio.sleep(0.02)
        return added


@pytest.fixture
def lenient_cluster() -> Iterator[RedisCluster]:
    """A cluster that goes on with the slots that have a server."""
    try:
        cluster = ValkeyCluster(settings={"cluster-require-full-coverage": "no"}).start()
    except ServerMissingError as error:
        skip_or_fail(error)
    yield cluster
    cluster.stop()


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_noticed_of_a_server_that_dies_with_none_of_our_messages(
    lenient_cluster: RedisCluster, kind: Kind
) -> None:
    """Not even of the one that the library's client asks which words of a command are keys."""
    cluster = lenient_cluster
    client = connect(url_of(cluster), timeout=10 * SECOND)
    await client.initialize()
    asked = next(node for node in cluster.nodes if node.port == client.get_default_node().port)
    namespace = next(name for name in map(str, range(100)) if cluster.primary_of(f"{{{name}}}") is not asked)
    store = kind(client, namespace=namespace)
    await store.open()
    await store.outbox().add(client, {"order": 1}, topic="orders")

    cluster.kill_node(asked)
    claims = await store.claim(10, terms())

    assert len(claims) == 1
    assert await store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
    await client.aclose()
