"""A message is never sent at once through a pipeline that was to hold it back."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import AsyncIterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from postroom import Outbox
from postroom.decisions import Decisions
from postroom.errors import CommandRefusedError, ConfigurationError
from postroom.stores.redis.pipelines import refuse_if_it_repeats
from postroom.stores.redis.stream_outbox import StreamOutbox
from postroom.testing.clients import ValkeyClient

Foreign = Any


@pytest.fixture(params=["async", "sync", "async-cluster", "sync-cluster"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Foreign]:
    """Every kind of client that has pipelines."""
    kind: str = request.param
    is_cluster = kind.endswith("cluster")
    server: ValkeyClient = request.getfixturevalue("valkey_cluster" if is_cluster else "valkey_server")
    library = redis.asyncio if kind.startswith("async") else redis
    made: Foreign = library.RedisCluster if is_cluster else library.Redis
    client = made.from_url(server.dsn, retry=(AsyncRetry if kind.startswith("async") else Retry)(NoBackoff(), 0))
    if kind == "async-cluster":
        await client.initialize()  # otherwise its pipeline does so in another event loop
    yield client
    await answered(client.aclose() if kind.startswith("async") else client.close())


async def answered(answer: Foreign) -> Foreign:
    return await answer if inspect.isawaitable(answer) else answer


async def watching(client: Foreign, key: str) -> Foreign:
    """Return a pipeline that watches a key."""
    pipeline = client.pipeline(transaction=True)
    await answered(pipeline.watch(key))
    return pipeline


@pytest.fixture
def namespace() -> str:
    return f"shop-{uuid4().hex}"


@pytest.mark.requirement("G1", "S0-03")
@pytest.mark.parametrize("kind", [Outbox, StreamOutbox])
async def test_what_is_added_between_watch_and_multi_is_refused(
    client: Foreign, kind: type[Outbox], namespace: str
) -> None:
    """The library would store it at once, whatever became of the transaction."""
    stock = f"{{{namespace}}}:stock"
    pipeline = await watching(client, stock)

    with pytest.raises(CommandRefusedError, match=r"watches keys, and sends everything at once; call multi\(\) first"):
        await answered(kind(namespace=namespace).add(pipeline, {"order_id": 42}, topic="orders"))

    await answered(pipeline.reset())
    names = [f"postroom_outbox:{{{namespace}}}:entries", f"postroom_stream:{{{namespace}}}:stream"]
    assert await answered(client.exists(*names)) == 0


@pytest.mark.requirement("G1", "S0-20", "S0-59")
@pytest.mark.parametrize("kind", [Outbox, StreamOutbox])
async def test_what_is_added_after_multi_is_stored_with_the_rest_or_not_at_all(
    client: Foreign, kind: type[Outbox], namespace: str
) -> None:
    """Whoever reads what they watch decides, and a change meanwhile undoes the message as well."""
    stock, outbox = f"{{{namespace}}}:stock", kind(namespace=namespace)
    name = (
        f"postroom_stream:{{{namespace}}}:stream" if kind is StreamOutbox else f"{outbox.table}:{{{namespace}}}:entries"
    )
    seen: list[int] = []

    for is_disturbed in (True, False):
        pipeline = await watching(client, stock)
        if is_disturbed:
            await answered(client.set(stock, "9"))
        pipeline.multi()
        pipeline.decr(stock)
        await answered(outbox.add(pipeline, {"order_id": 42}, topic="orders"))
        if is_disturbed:
            with pytest.raises(redis.WatchError):
                await answered(pipeline.execute())
        else:
            await answered(pipeline.execute())
        seen.append(await answered(client.exists(name)))

    assert (seen, await answered(client.get(stock))) == ([0, 1], b"8")


@pytest.mark.requirement("G1")
async def test_a_ticket_is_not_scheduled_between_watch_and_multi(client: Foreign, namespace: str) -> None:
    """It would stand there although the transaction that it belongs to failed."""
    pipeline = await watching(client, f"{{{namespace}}}:stock")
    soon = datetime.now(UTC) + timedelta(minutes=1)

    with pytest.raises(CommandRefusedError, match=r"schedule\(\) cannot be part"):
        await answered(Decisions(Outbox(namespace=namespace)).schedule(pipeline, "ticket", soon))

    await answered(pipeline.reset())


@pytest.mark.requirement("S2-17")
@pytest.mark.parametrize("kind", [Outbox, StreamOutbox])
@pytest.mark.parametrize("client", ["async", "async-cluster"], indirect=True)
async def test_an_add_that_is_never_awaited_is_named_in_the_warning(
    client: Foreign, kind: type[Outbox], namespace: str
) -> None:
    """Also of a pipeline, in which nothing is queued until it is awaited."""
    outbox = kind(namespace=namespace)
    pipeline = client.pipeline(transaction=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        for connection in (client, pipeline):
            _ = outbox.add(connection, {"n": 1}, topic="orders")
            _ = outbox.add(connection, [{"n": 1}], topic="orders")
        del _
        gc.collect()

    # The collector may also have found what another test has left open.
    told = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert told == ["coroutine 'Outbox.add' was never awaited"] * 4
    assert await client.keys(f"*{namespace}*") == []


@pytest.mark.parametrize("is_pipeline", [False, True], ids=["client", "pipeline"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["store", "stream"])
@pytest.mark.parametrize("kind", ["async", "sync", "async-cluster", "sync-cluster"])
async def test_a_client_that_repeats_commands_by_itself_is_refused(
    kind: str,
    is_stream: bool,  # noqa: FBT001
    is_pipeline: bool,  # noqa: FBT001
    namespace: str,
    request: pytest.FixtureRequest,
) -> None:
    """It would write a message again, and all else of its pipeline, when only the answer was lost."""
    is_cluster = kind.endswith("cluster")
    server: ValkeyClient = request.getfixturevalue("valkey_cluster" if is_cluster else "valkey_server")
    library = redis.asyncio if kind.startswith("async") else redis
    made: Foreign = library.RedisCluster if is_cluster else library.Redis
    client = made.from_url(server.dsn, retry=(AsyncRetry if kind.startswith("async") else Retry)(NoBackoff(), 3))
    outbox = (StreamOutbox if is_stream else Outbox)(namespace=namespace)

    with pytest.raises(ConfigurationError, match="repeats commands by itself; pass retry="):
        await answered(outbox.add(client.pipeline() if is_pipeline else client, {"n": 1}, topic="orders"))

    await answered(client.aclose() if kind.startswith("async") else client.close())


@pytest.mark.parametrize("repeats", [0, 3])
async def test_an_async_pipeline_of_a_cluster_is_checked_in_the_first_releases_of_redis_py_6_too(repeats: int) -> None:
    """There it keeps its client under another name, and has no pool."""
    client: Foreign = redis.asyncio.RedisCluster(host="localhost", retry=AsyncRetry(NoBackoff(), repeats))

    class ClusterPipeline:
        __slots__ = ("_client", "_command_stack")

        def __init__(self) -> None:
            self._client = client
            self._command_stack = list[object]()

    with pytest.raises(ConfigurationError, match="repeats commands") if repeats else nullcontext():
        refuse_if_it_repeats(ClusterPipeline())
