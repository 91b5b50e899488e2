"""Stores whose server is found by Sentinel: they follow it to the replica that takes its place."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import pytest
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from postroom.errors import ConfigurationError, StoreError, StoreUnavailableError
from postroom.store import ClaimTerms
from postroom.stores import store_from_url
from postroom.stores.redis import RedisStore, RedisStreamStore
from postroom.stores.redis.addresses import connect
from postroom.stores.redis.client import Client
from postroom.testing.programs import ServerError
from postroom.testing.sentinel import RedisSentinel, ValkeySentinel
from postroom.testing.waiting import until

from .test_redis_cluster import LOST, PATIENCE, SECOND, Kind, check_a_failover

# The library's own types name neither all options nor what a Sentinel answers.
Foreign = Any


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize(
    ("kind", "fixture"), [(RedisStore, "private_valkey_sentinel"), (RedisStreamStore, "private_redis_sentinel")]
)
async def test_a_primary_is_killed_and_nothing_is_lost_that_its_replica_had_confirmed(
    request: pytest.FixtureRequest, kind: Kind, fixture: str
) -> None:
    """The replica takes over, the dispatcher goes on by itself, and what was confirmed is delivered."""
    servers = cast("RedisSentinel", request.getfixturevalue(fixture))

    await check_a_failover(
        kind, servers.url, servers.primary.kill9, lambda: servers.wait_until_serving(servers.replica)
    )


@pytest.mark.requirement("S0-31")
async def test_a_primary_that_became_a_replica_is_left(private_redis_sentinel: RedisSentinel) -> None:
    """Also by who listens, and by a client of the user's."""
    servers = private_redis_sentinel
    once: Foreign = {"retry": Retry(NoBackoff(), 0)}
    sentinel: Foreign = Sentinel(  # type: ignore[no-untyped-call]
        [("127.0.0.1", servers.sentinel.port)], sentinel_kwargs=once, **once
    )
    async with aclosing(sentinel), sentinel.master_for(servers.service) as client:
        store = RedisStore(client, namespace="shop")
        await store.open()
        listens = asyncio.Event()
        listening = asyncio.create_task(store.listen(listens.set))
        await asyncio.wait_for(listens.wait(), 60)

        await asyncio.to_thread(servers.fail_over)
        # Sentinel does the same, only later.
        servers.primary.client.ask("REPLICAOF", "127.0.0.1", servers.replica.port)
        for connections in ("pubsub", "normal"):
            servers.primary.client.ask("CLIENT", "KILL", "TYPE", connections)
        with pytest.raises(StoreUnavailableError):
            await asyncio.wait_for(listening, 60)
        await until(lambda: _is_added(store), "a message", within=PATIENCE)
        claims = await store.claim(10, ClaimTerms(worker=uuid4()))

    assert claims
    assert "role:master" in str(servers.replica.client.ask("INFO", "replication"))
    assert servers.replica.client.ask("HLEN", "postroom_outbox:{shop}:entries") == len(claims)


async def _is_added(store: RedisStore) -> bool:
    try:
        await store.outbox().add(store.client, {"order": 1}, topic="orders")
    except LOST:
        return False
    return True


@pytest.mark.requirement("S0-31")
async def test_a_sentinel_that_is_gone_or_hangs_is_passed_over(private_valkey_sentinel: ValkeySentinel) -> None:
    """As long as one of them answers."""
    servers = private_valkey_sentinel
    hung = socket.create_server(("127.0.0.1", 0))  # where nobody will ever answer
    ports = [1, hung.getsockname()[1], servers.sentinel.port]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    store = store_from_url(f"redis+sentinel://{hosts}/{servers.service}/3", namespace="shop", timeout=8 * SECOND)

    assert await store.open()
    await cast("RedisStore", store).outbox().add(cast("RedisStore", store).client, {"order": 1}, topic="orders")

    assert (await store.stats()).pending == 1
    assert "db3:keys=" in str(servers.primary.client.ask("INFO", "keyspace"))
    await store.close()
    hung.close()


async def test_a_service_that_no_sentinel_knows_is_told(private_valkey_sentinel: ValkeySentinel) -> None:
    url = private_valkey_sentinel.url.replace(private_valkey_sentinel.service, "nobody")
    store = RedisStore(url, timeout=4 * SECOND)

    with pytest.raises(StoreUnavailableError, match="No master found for 'nobody'"):
        await store.open()

    await store.close()


@pytest.mark.requirement("S0-36")
def test_a_client_that_repeats_commands_is_refused() -> None:
    again = Retry(NoBackoff(), 3)
    sentinel: Foreign = Sentinel([("127.0.0.1", 1)], retry=again)  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigurationError, match="repeats commands"):
        RedisStore(sentinel.master_for("shop"))


@pytest.mark.parametrize(
    "url", ["redis+sentinel://localhost", "redis+sentinel://localhost/", "redis+sentinel://localhost:1/shop/first"]
)
def test_a_url_without_a_service_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="service"):
        RedisStore(url)


@pytest.mark.requirement("S0-31")
async def test_a_url_says_how_to_connect_and_errors_do_not_say_the_password() -> None:
    """Who is greeted with the password is the server; Sentinel has none, or is told by a client of one's own."""
    url = "rediss+sentinel://ann:se%40cret@one.example,two.example:7000/my%20shop/2?client_name=shop"
    client = connect(url, timeout=timedelta(seconds=6))
    pool = client.connection_pool
    asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    options: dict[str, Foreign] = pool.connection_kwargs

    assert [(one["host"], one["port"]) for one in asked] == [("one.example", 26379), ("two.example", 7000)]
    assert [one.get("password") for one in asked] == [None, None]
    assert (options["username"], options["password"], options["db"]) == ("ann", "se@cret", 2)
    assert (pool.service_name, "SSL" in pool.connection_class.__name__) == ("my shop", True)
    assert Client(url, timeout=SECOND).place == "rediss+sentinel://one.example,two.example:7000"
    with pytest.raises(StoreError) as caught:
        await RedisStore("redis+sentinel://ann:secret@127.0.0.1:1/shop", timeout=4 * SECOND).open()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("fixture", ["private_redis_sentinel", "private_valkey_sentinel"])
def test_the_servers_are_of_one_kind_and_say_so_if_none_takes_over(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    servers = cast("RedisSentinel", request.getfixturevalue(fixture))
    is_valkey = fixture == "private_valkey_sentinel"

    told = [str(node.client.ask("INFO", "server")) for node in servers.nodes]
    servers.wait_until_serving(servers.primary)
    servers._patience = timedelta(milliseconds=50)  # noqa: SLF001
    with pytest.raises(ServerError, match=r"did not make redis://.* the primary within"):
        servers.wait_until_serving(servers.replica)

    assert [("valkey_version" in one) for one in told] == [is_valkey] * 3
