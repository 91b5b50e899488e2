"""The store in a stream of Redis: what goes in, how it comes out, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as Retries
from redis.backoff import NoBackoff

from postroom import (
    Backoff,
    ClaimTerms,
    Dead,
    Delivered,
    Dispatcher,
    Message,
    OutboxSubscriber,
    Release,
    Retry,
    Settlement,
    transactional,
)
from postroom.brokers import MemoryBroker
from postroom.errors import ConfigurationError, EncodeError, InvalidNameError, NoTransactionError, StoreError
from postroom.middleware import OutboxMiddleware, TransactionMiddleware
from postroom.stores.redis import current_pipeline
from postroom.stores.redis.commands import slot_of
from postroom.stores.redis.stream import RedisStreamStore
from postroom.stores.redis.stream_outbox import StreamOutbox
from postroom.testing.clients import ValkeyClient
from postroom.testing.contracts import StoreContract
from postroom.testing.waiting import until
from postroom.transaction import Opening, Transaction
from tests.contracts.in_redis_stream import RedisStreamHarness

MS = timedelta(milliseconds=1)
TERMS = ClaimTerms(worker=uuid4())
GROUP = "outbox-publisher"
# The library's own types name neither all commands nor what they answer.
Foreign = Any


@pytest.fixture
async def harness(valkey_server: ValkeyClient) -> AsyncIterator[RedisStreamHarness]:
    harness = RedisStreamHarness(valkey_server.dsn, f"test-{uuid4().hex}")
    await harness.start()
    yield harness
    await harness.close()


class TestRedisStreamStore(StoreContract):
    """The contract of stores."""


@pytest.fixture
async def store(client: Foreign) -> RedisStreamStore:
    return RedisStreamStore(client, namespace="shop", table=f"test-{uuid4().hex}")


def key(store: RedisStreamStore, name: str = "") -> str:
    return store.outbox().stream + name


def numbered(number: int, **fields: Foreign) -> Message:
    return Message(topic="orders", type="order.placed", payload=str(number).encode(), **fields)


def payloads(messages: Sequence[Message]) -> list[bytes]:
    return [message.payload for message in messages]


async def claimed(store: RedisStreamStore, limit: int = 10) -> list[bytes]:
    return [claim.message.payload for claim in await store.claim(limit, TERMS)]


# -- adding ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-41")
def test_a_stream_that_cannot_be_named_is_refused_at_construction() -> None:
    """Before anything is written to a key that nobody reads."""
    for wrong in ({"table": ""}, {"table": "a{b}"}, {"namespace": ""}, {"group": ""}, {"consumer": "a|b"}):
        with pytest.raises(InvalidNameError):
            RedisStreamStore("redis://localhost", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError):
        StreamOutbox(table="")


@pytest.mark.requirement("S0-41", "S0-48")
@pytest.mark.parametrize("name", ["outbox:events", "{shop}:events", "events:{shop}"])
async def test_a_stream_may_have_a_name_of_its_own(client: Foreign, name: str) -> None:
    """What is added, claimed and dead is there, in one slot of a cluster; the key by default is not."""
    stream = f"{uuid4().hex}-{name}"
    store = RedisStreamStore(client, namespace="shop", stream=stream)
    await store.outbox().add(client, [numbered(1), numbered(2)])
    added = await client.xlen(stream)
    one, two = await store.claim(10, TERMS)
    await store.settle([Settlement(one, Delivered()), Settlement(two, Dead("never"))])

    keys = [key async for key in client.scan_iter(f"*{stream}*", count=1000)]

    assert (store.outbox().stream, added) == (stream, 2)
    assert await client.xlen(f"{stream}:dead" if "{" in stream else f"{{{stream}}}:dead") == 1
    assert {slot_of(key) for key in keys} == {slot_of(stream.encode())}
    assert len(keys) > 2


@pytest.mark.requirement("S0-41")
@pytest.mark.parametrize("name", ["", "a{}b", "a{b", "a}b{", "{a}{b}", "two\nlines", "x" * 101])
def test_a_stream_whose_keys_could_not_be_in_one_slot_is_refused(name: str) -> None:
    """By the store and by its outbox."""
    for make in (lambda: RedisStreamStore("redis://localhost", stream=name), lambda: StreamOutbox(stream=name)):
        with pytest.raises(InvalidNameError, match="cannot name a stream"):
            make()


@pytest.mark.requirement("S0-48")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch": 0}, "batch=0 must be an int from 1 to 500"),
        ({"batch": 501}, "batch=501 must be an int from 1 to 500"),
        ({"batch": 2.5}, "batch=2.5 must be an int"),
        ({"block": timedelta(0)}, "block=0:00:00 must be positive"),
        ({"block": timedelta(seconds=2), "timeout": timedelta(seconds=1)}, "block=0:00:02 must be at most 0:00:01"),
        ({"block": 5}, "block=5 must be a timedelta"),
        ({"claim_interval": -MS}, "claim_interval=.* must not be negative"),
        ({"claim_interval": 30}, "claim_interval=30 must be a timedelta"),
        ({"min_idle": MS / 2}, "min_idle=0:00:00.000500 must be at least 0:00:00.001000"),
        ({"min_idle": 60}, "min_idle=60 must be a timedelta"),
    ],
)
def test_settings_of_a_stream_that_cannot_work_are_refused_by_name(wrong: dict[str, Foreign], said: str) -> None:
    """At construction, with what is possible."""
    with pytest.raises(ConfigurationError, match=said):
        RedisStreamStore("redis://localhost", **wrong)


@pytest.mark.requirement("S0-48")
async def test_a_claim_takes_a_batch_at_the_most(client: Foreign) -> None:
    """However many a dispatcher asks for."""
    store = RedisStreamStore(client, table=f"test-{uuid4().hex}", batch=3)
    await store.outbox().add(client, [numbered(number) for number in range(7)])

    sizes = [len(await store.claim(100, TERMS)) for _ in range(4)]

    assert sizes == [3, 3, 1, 0]


@pytest.mark.requirement("S0-48")
@pytest.mark.parametrize(
    ("options", "milliseconds"),
    [({}, "1000"), ({"block": timedelta(seconds=2.5)}, "2500"), ({"timeout": 999 * MS}, "999")],
)
async def test_a_listener_blocks_for_as_long_as_the_store_says(
    client: Foreign, options: dict[str, Foreign], milliseconds: str
) -> None:
    """The server sees it in the command. A timeout below a second needs no second setting."""
    store = RedisStreamStore(client, table=f"test-{uuid4().hex}", **options)
    async with client.monitor() as monitor:
        listening = asyncio.create_task(store.listen(lambda: None))
        try:
            async for seen in monitor.listen():
                words = seen["command"].split()
                if words[0] == "XREAD" and key(store) in words:
                    break
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    assert words[words.index("BLOCK") + 1] == milliseconds


@pytest.mark.requirement("S0-42")
async def test_a_message_is_written_with_fields_that_others_can_read(client: Foreign, store: RedisStreamStore) -> None:
    """Id, topic, type, source and data as they are, whatever else is said as JSON."""
    plain, full = numbered(1), numbered(2, key="a", headers={"ce-source": "till"}, content_type="text/plain")
    await store.outbox().add(client, [plain, full])

    [(_, one), (_, two)] = await client.xrange(key(store))

    common = {b"topic": b"orders", b"type": b"order.placed"}
    assert one == {**common, b"id": plain.id.hex.encode(), b"source": b"postroom:shop", b"data": b"1"}
    assert two.pop(b"attributes") == b'{"content_type":"text/plain","headers":{"ce-source":"till"}}'
    assert two == {**common, b"id": full.id.hex.encode(), b"source": b"till", b"data": b"2", b"key": b"a"}


@pytest.mark.requirement("S0-42", "S0-48")
async def test_fields_may_be_chosen_by_functions_of_ones_own(client: Foreign) -> None:
    """Both ways, and the store adds what only it knows."""

    def marshal(message: Message) -> Mapping[str, str | bytes]:
        return {"i": str(message.id), "where": message.topic, "what": message.payload}

    def unmarshal(fields: Mapping[bytes, bytes]) -> Message:
        return Message(id=UUID(fields[b"i"].decode()), topic=fields[b"where"].decode(), payload=fields[b"what"])

    table = f"test-{uuid4().hex}"
    store = RedisStreamStore(client, namespace="shop", table=table, marshal=marshal, unmarshal=unmarshal)
    message = replace(numbered(1), namespace="shop")
    await store.outbox().add(client, message)

    [claim] = await store.claim(10, TERMS)

    assert [set(fields) for _, fields in await client.xrange(key(store))] == [{b"i", b"where", b"what"}]
    assert (claim.message.id, claim.message.topic, claim.message.payload) == (message.id, "orders", b"1")
    assert (claim.message.namespace, claim.message.attempt, claim.message.token) == ("shop", 1, 1)
    assert claim.message.time is not None


@pytest.mark.requirement("G5")
@pytest.mark.parametrize("payload", [b"[]", b"null", b"9007199254740993", b"\x00\xff", b""])
async def test_payloads_come_back_byte_for_byte(client: Foreign, store: RedisStreamStore, payload: bytes) -> None:
    """What a script might take for a number, a table or the end of a text."""
    await store.outbox().add(client, [replace(numbered(1), payload=payload)], delay=1 * MS)
    await store.outbox().add(client, [replace(numbered(1), payload=payload)])
    await until(lambda: _has_come(client, store, 1), "the delay was over")

    found = [payload for _ in range(2) for payload in await claimed(store)]

    assert found == [payload] * 2


async def _has_come(client: Foreign, store: RedisStreamStore, count: int) -> bool:
    now: tuple[int, int] = await client.time()
    come: int = await client.zcount(key(store, ":delayed"), "-inf", now[0] * 1_000_000 + now[1])
    return come >= count


@pytest.mark.requirement("S0-43", "S0-47")
async def test_each_message_is_one_xadd_in_the_pipeline_of_the_caller(client: Foreign, store: RedisStreamStore) -> None:
    """Nothing is there before EXEC, then all of it in its order; and nothing is ever trimmed."""
    async with client.pipeline(transaction=True) as pipeline:
        pipeline.set(f"{key(store)}:order", "placed")
        added = await store.outbox().add(pipeline, [numbered(n) for n in range(20)])
        before = await client.exists(key(store))
        commands = [command.args if hasattr(command, "args") else command[0] for command in pipeline.command_stack]
        await pipeline.execute()

    assert before == 0
    assert [words[:3] for words in commands[1:]] == [("XADD", key(store), "*")] * 20
    assert [UUID(fields[b"id"].decode()) for _, fields in await client.xrange(key(store))] == [one.id for one in added]


@pytest.mark.requirement("S0-43")
def test_a_client_that_does_not_wait_adds_too(valkey_server: ValkeyClient) -> None:
    """With a pipeline and without, all or nothing."""
    outbox = StreamOutbox(table=f"test-{uuid4().hex}")
    with redis.Redis.from_url(valkey_server.dsn, retry=None) as client:
        outbox.add(client, [numbered(1), numbered(2)])
        with client.pipeline() as pipeline:
            outbox.add(pipeline, numbered(3))
            pipeline.execute()

        assert [fields[b"data"] for _, fields in client.xrange(outbox.stream)] == [b"1", b"2", b"3"]


@pytest.mark.requirement("S0-46")
@pytest.mark.parametrize(
    "fields",
    [None, {}, {"a": 1}, ["a", "b"], dict.fromkeys(map(str, range(2001)), "")],
    ids=["raises", "none", "number", "list", "many"],
)
async def test_a_marshal_function_that_fails_leaves_nothing_in_the_pipeline(client: Foreign, fields: Foreign) -> None:
    """Neither that message nor the one before it, and no payload in the error."""

    def marshal(message: Message) -> Foreign:
        if message.payload == b"1":
            return {"a": "b"}
        if fields is None:
            raise KeyError("secret")
        return fields

    outbox = StreamOutbox(table=f"test-{uuid4().hex}", marshal=marshal)
    pipeline = client.pipeline(transaction=True)

    with pytest.raises(EncodeError, match="marshal") as caught:
        await outbox.add(pipeline, [numbered(1), replace(numbered(2), payload=b"my secret")])

    assert len(pipeline) == 0
    assert "my secret" not in str(caught.value)


class Pipelines:
    """Opens a pipeline for each message that is handled."""

    def __init__(self, client: Foreign) -> None:
        self._client = client

    def transactions(self) -> Pipelines:
        return self

    @asynccontextmanager
    async def begin(self, opening: Opening | None = None) -> AsyncIterator[Transaction]:
        async with self._client.pipeline(transaction=True) as pipeline:
            yield Transaction(pipeline, self)
            await pipeline.execute()

    @asynccontextmanager
    async def savepoint(self, transaction: Transaction) -> AsyncIterator[None]:
        yield


@pytest.mark.requirement("S0-43", "S0-44", "S0-45", "S0-46")
async def test_what_a_handler_returns_goes_into_the_stream_and_no_further(
    client: Foreign, store: RedisStreamStore
) -> None:
    """With its effect, or neither; and not at all without a transaction."""
    transaction, outbox = TransactionMiddleware(Pipelines(client)), OutboxMiddleware(store.outbox())

    async def handle(message: Message) -> Sequence[Message]:
        outputs = [numbered(1), numbered(2, key="x" * (256 if message.topic == "bad" else 1))]
        return await outbox(message, lambda _: asyncio.sleep(0, outputs))

    returned = await transaction(numbered(0), handle)
    with pytest.raises(NoTransactionError, match="outbox"):
        await outbox(numbered(0), lambda _: asyncio.sleep(0, []))
    with pytest.raises(ValueError, match="key"):
        await transaction(Message(topic="bad", payload=b""), handle)

    assert list(returned) == []
    assert await claimed(store) == [b"1", b"2"]


@pytest.mark.requirement("S0-43")
async def test_an_effect_its_mark_and_what_comes_of_it_are_one_step_with_a_stream_too(
    client: Foreign, store: RedisStreamStore
) -> None:
    """`transactional` takes the store; what comes twice changes nothing the second time."""
    stack = transactional(store, consumer=f"stock-{uuid4().hex}")
    stock = store.transactions().key(f"stock-{uuid4().hex}")

    async def handle(_: Message) -> Sequence[Message]:
        await current_pipeline(client).incrby(stock, 1)
        return [numbered(1)]

    message = numbered(0)
    returned = [*await stack(message, handle), *await stack(message, handle)]

    assert (returned, await client.get(stock), await claimed(store)) == ([], b"1", [b"1"])


@pytest.mark.requirement("G13", "S2-27")
async def test_a_delayed_message_says_when_it_was_added(client: Foreign, store: RedisStreamStore) -> None:
    """Those of a moment that is over, in the order in which they are due, and are so when given back."""
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    await store.outbox().add(client, numbered(1), due_at=long_ago + timedelta(minutes=1))
    await store.outbox().add(client, numbered(2), due_at=long_ago)

    two, one = await store.claim(10, TERMS)
    await store.settle([Settlement(claim, Release()) for claim in (one, two)])
    oldest = (await store.stats()).oldest_due

    assert oldest is not None
    assert oldest > timedelta(minutes=59)
    assert payloads([one.message, two.message]) == [b"1", b"2"]
    assert one.message.time is not None
    assert two.message.time is not None
    assert one.message.time < two.message.time
    assert abs(datetime.now(UTC) - one.message.time) < timedelta(minutes=1)
    assert await client.exists(key(store, ":delayed"), key(store, ":later")) == 0


@pytest.mark.requirement("S0-41")
async def test_names_of_any_kind_make_good_keys(client: Foreign) -> None:
    """Braces and colons in a namespace neither close the hash tag nor meet another's."""
    stores = [RedisStreamStore(client, namespace=name) for name in (f"{{a}}:{uuid4()}", f"ä b:{uuid4()}")]
    for number, store in enumerate(stores):
        await store.outbox().add(client, numbered(number))

    assert [await claimed(store) for store in stores] == [[b"0"], [b"1"]]
    for store in stores:
        await client.delete(*[name async for name in client.scan_iter(match=f"{key(store)}*")])


# -- the end of a message ----------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-53")
async def test_a_delivered_message_leaves_nothing_behind(client: Foreign, store: RedisStreamStore) -> None:
    """XACK and XDEL in one step, and whatever else was known of it."""
    await store.outbox().add(client, [numbered(n) for n in range(5)])
    await store.settle([Settlement(claim, Retry("no")) for claim in await store.claim(3, TERMS)])
    claims = await store.claim(10, TERMS)

    assert await store.settle([Settlement(claim, Delivered()) for claim in claims]) == []

    pending = await client.xpending(key(store), GROUP)
    assert (len(claims), await client.xlen(key(store)), pending["pending"]) == (5, 0, 0)
    left = [key(store, f":{name}") for name in ("waiting", "notes", "dead", "graves", "done", "receipts")]
    assert await client.exists(*left) == 0


@pytest.mark.requirement("S0-53")
async def test_when_a_message_was_delivered_is_kept_by_the_clock_of_the_server(client: Foreign) -> None:
    """The purge goes by it."""
    store = RedisStreamStore(client, table=f"test-{uuid4().hex}", keep_delivered=timedelta(days=1))
    await store.outbox().add(client, numbered(1))
    [claim] = await store.claim(10, TERMS)
    before = await store.clock()
    await store.settle([Settlement(claim, Delivered())])
    after = await store.clock()

    [(_, told)] = await client.zrange(key(store, ":done"), 0, -1, withscores=True)

    assert before <= datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(told)) <= after
    assert await store.purge(older_than=timedelta(hours=1)) == 0
    assert await store.purge(older_than=timedelta(0)) == 1


@pytest.mark.requirement("S0-53", "S0-57")
async def test_a_nacked_message_stays_pending_until_its_backoff_is_over(
    client: Foreign, store: RedisStreamStore
) -> None:
    """It waits under the group's eyes, with its error."""
    await store.outbox().add(client, [numbered(1)])
    [claim] = await store.claim(10, TERMS)
    await store.settle([Settlement(claim, Retry("it said no", 3000 * MS))])

    early = await claimed(store)
    pending = await client.xpending(key(store), GROUP)
    await until(lambda: _is_back(store), "the backoff was over")

    assert (early, pending["pending"]) == ([], 1)


async def _is_back(store: RedisStreamStore) -> bool:
    return await claimed(store) == [b"1"]


@pytest.mark.requirement("S0-57")
async def test_a_dead_message_goes_to_the_dead_letter_stream_and_can_be_redriven(
    client: Foreign, store: RedisStreamStore
) -> None:
    """With its fields, why and after how many attempts; in the same step as it leaves."""
    await store.outbox().add(client, [numbered(1)])
    [claim] = await store.claim(10, TERMS)

    await store.settle([Settlement(claim, Dead("never"))])
    [(_, letter)] = await client.xrange(key(store, ":dead"))
    redriven = [await store.redrive(), await store.redrive()]

    assert (letter[b"data"], letter[b"postroom:error"], letter[b"postroom:attempts"]) == (b"1", b"never", b"1")
    assert redriven == [1, 0]
    [again] = await store.claim(10, TERMS)
    assert (again.message.id, again.message.attempt) == (claim.message.id, 1)
    assert await client.exists(key(store, ":dead"), key(store, ":graves")) <= 1  # a stream stays when it is empty
    assert await client.xlen(key(store, ":dead")) == 0


@pytest.mark.requirement("S0-54", "S0-57")
async def test_a_failing_message_is_dead_after_its_budget(client: Foreign, store: RedisStreamStore) -> None:
    """Three attempts with a backoff, the others are delivered meanwhile."""
    tries: list[int] = []
    broker = MemoryBroker()

    async def send(message: Message) -> None:
        if message.payload == b"1":
            tries.append(message.attempt)
            raise RuntimeError("no")
        await broker.publish_batch([message])

    await store.outbox().add(client, [numbered(n) for n in range(3)])
    dispatcher = Dispatcher(store, send, max_attempts=3, backoff=Backoff(base=1 * MS, max=1 * MS))
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: _counts(store, dead=1, pending=0), "the budget was spent")
    await dispatcher.stop()
    await running

    assert tries == [1, 2, 3]
    assert sorted(payloads(list(broker.received))) == [b"0", b"2"]
    assert [fields[b"data"] for _, fields in await client.xrange(key(store, ":dead"))] == [b"1"]


async def _counts(store: RedisStreamStore, *, dead: int, pending: int) -> bool:
    stats = await store.stats()
    return (stats.dead, stats.pending + stats.processing) == (dead, pending)


@pytest.mark.requirement("S0-55")
@pytest.mark.parametrize("fields", [{"some": "thing"}, {"id": "x", "topic": "t", "type": "t", "data": ""}])
async def test_an_entry_that_cannot_be_read_is_parked_and_stops_nobody(
    client: Foreign, store: RedisStreamStore, fields: dict[str, str]
) -> None:
    """Whoever wrote it; it is dead with a reason, and has the same id whenever it is looked at."""
    await client.xadd(key(store), fields)
    await store.outbox().add(client, numbered(1))
    [bad, _] = claims = await store.claim(10, TERMS)
    await store.settle([Settlement(claim, Release()) for claim in claims])
    [again, _] = claims = await store.claim(10, TERMS)
    await store.settle([Settlement(claim, Release()) for claim in claims])
    broker = MemoryBroker()

    await Dispatcher(store, broker).run(until_idle=True)

    assert bad.broken
    assert bad.message.id == again.message.id
    assert payloads(list(broker.received)) == [b"1"]
    [(_, letter)] = await client.xrange(key(store, ":dead"))
    assert letter[b"postroom:error"].startswith(b"the entry ")
    assert await _counts(store, dead=1, pending=0)


@pytest.mark.requirement("S0-55")
async def test_an_unmarshal_function_that_fails_is_told_as_a_broken_entry(client: Foreign) -> None:
    """Whatever it raises, without what it raised, which may hold the payload."""

    def unmarshal(fields: Mapping[bytes, bytes]) -> Message:
        raise RuntimeError(fields[b"data"].decode())

    store = RedisStreamStore(client, table=f"test-{uuid4().hex}", unmarshal=unmarshal)
    await store.outbox().add(client, [replace(numbered(1), payload=b"my secret")])

    [claim] = await store.claim(10, TERMS)

    assert claim.broken == "the entry cannot be read (RuntimeError)"
    assert claim.message.topic == "orders"


# -- end to end --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-51", "S0-54")
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_dispatcher_delivers_what_is_added_while_it_runs(valkey_server: ValkeyClient, protocol: int) -> None:
    """Everything, in every protocol of the library's, also after an outage of the broker."""
    retry = Retries(NoBackoff(), 0)
    client: Foreign = redis.asyncio.Redis.from_url(valkey_server.dsn, retry=retry, protocol=protocol)
    store, broker = RedisStreamStore(client, table=f"test-{uuid4().hex}"), MemoryBroker()
    outage = Backoff(base=10 * MS, max=10 * MS)
    dispatcher = Dispatcher(store, broker, outage_backoff=outage)
    running = asyncio.create_task(dispatcher.run())
    await store.outbox().add(client, [numbered(n) for n in range(50)])
    await until(lambda: broker.confirmed == 50, "the first were delivered")
    broker.down()
    await store.outbox().add(client, [numbered(n) for n in range(50, 100)])
    await until(lambda: _counts(store, dead=0, pending=50), "the broker is down")
    broker.up()
    await until(lambda: _counts(store, dead=0, pending=0), "everything was delivered")
    await dispatcher.stop()
    await running
    await client.aclose()

    assert sorted(payloads(list(broker.received)), key=int) == [str(n).encode() for n in range(100)]


@pytest.mark.requirement("S0-49", "S0-53")
async def test_a_source_hands_out_messages_until_it_is_closed(client: Foreign, store: RedisStreamStore) -> None:
    """Ack is recorded when it returns, what was not acknowledged is given back."""
    await store.outbox().add(client, [numbered(n) for n in range(3)])
    async with OutboxSubscriber(store, poll_interval=10 * MS) as deliveries:
        first = await anext(deliveries)
        await first.ack()
        left = await client.xlen(key(store))
        second = await anext(deliveries)
        await second.nack("not now", delay=1 * MS)
        seen = [await anext(deliveries) for _ in range(2)]

    assert left == 2
    assert sorted(payloads([delivery.message for delivery in seen])) == [b"1", b"2"]
    assert {delivery.message.payload: delivery.message.attempt for delivery in seen} == {b"1": 2, b"2": 1}
    assert await _counts(store, dead=0, pending=2)


# -- names and groups --------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-48")
async def test_every_store_has_a_consumer_name_of_its_own(client: Foreign) -> None:
    """The host alone would be shared by all of its processes."""
    one, two = RedisStreamStore(client), RedisStreamStore(client)

    assert one.consumer != two.consumer
    assert one.consumer.startswith(f"{socket.gethostname()[:50]}-{os.getpid()}-")
    assert RedisStreamStore(client, consumer="till-1").consumer == "till-1"


@pytest.mark.requirement("S0-50")
async def test_opening_makes_the_stream_and_the_group_from_the_first_entry_on(
    client: Foreign, store: RedisStreamStore
) -> None:
    """What was added before is read; a group that is there is fine."""
    await store.open()
    [made] = await client.xinfo_groups(key(store))
    await store.outbox().add(client, numbered(1))
    await client.xgroup_destroy(key(store), GROUP)
    await store.open()
    await store.open()

    assert (made["name"], made["last-delivered-id"]) == (GROUP.encode(), b"0-0")
    assert await claimed(store) == [b"1"]


@pytest.mark.requirement("S0-48")
async def test_a_second_group_is_refused(client: Foreign, store: RedisStreamStore) -> None:
    """Each would delete what the other has not read."""
    await store.open()
    other = RedisStreamStore(client, namespace="shop", table=store._table, group="another")  # noqa: SLF001

    with pytest.raises(StoreError, match=GROUP):
        await other.open()
    with pytest.raises(StoreError, match=GROUP):
        await other.claim(10, TERMS)


@pytest.mark.requirement("S3-06")
async def test_a_key_of_the_wrong_kind_is_told_and_nothing_is_done(client: Foreign, store: RedisStreamStore) -> None:
    """Before the first write."""
    await store.outbox().add(client, numbered(1))
    [claim] = await store.claim(10, TERMS)
    await client.set(key(store, ":notes"), "mine")

    for settlement in (Settlement(claim, Delivered()), Settlement(claim, Retry("no"))):
        with pytest.raises(StoreError, match=r"WRONGTYPE .*notes is a string"):
            await store.settle([settlement])

    assert await client.xlen(key(store)) == 1
    assert (await client.xpending(key(store), GROUP))["pending"] == 1


@pytest.mark.requirement("S0-41")
async def test_a_listener_waits_for_a_second_in_one_call(client: Foreign, store: RedisStreamStore) -> None:
    """So that it neither asks all the time nor holds a connection whose server is gone."""
    await store.open()
    async with client.monitor() as monitor:
        listening = asyncio.create_task(store.listen(lambda: None))
        try:
            async with asyncio.timeout(60):
                while key(store) not in (sent := (await monitor.next_command())["command"]) or "XREAD" not in sent:
                    pass
        finally:
            listening.cancel()
            await asyncio.wait({listening})
    await store.close()

    assert sent.startswith("XREAD COUNT 1 BLOCK 1000 STREAMS ")
