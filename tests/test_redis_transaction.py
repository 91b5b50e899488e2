"""Transactions in Redis: recorded while a handler runs, applied whole at its end, or not at all."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from random import Random
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry as Retries
from redis.backoff import NoBackoff

from postroom import Message, Outbox, events
from postroom.dead_letters import StoredDeadLetters
from postroom.errors import (
    CommandRefusedError,
    CommitRefusedError,
    CommitUnknownError,
    ConfigurationError,
    FencedError,
    MessageError,
    NoTransactionError,
    PartlyAppliedError,
    StoreContentionError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
    TransactionClosedError,
)
from postroom.middleware import OutboxMiddleware, TransactionMiddleware
from postroom.middleware.chain import Middleware, chained
from postroom.store import ClaimTerms, Dead, Retry, Settlement
from postroom.stores.redis import RedisInbox, RedisStore, RedisTransactions, current_pipeline, marks
from postroom.stores.redis.commands import READS, slot_of
from postroom.stores.redis.keys import Keys
from postroom.stores.redis.scripts import script
from postroom.stores.redis.stream import RedisStreamStore
from postroom.testing.cancelling import Moment, cuts
from postroom.testing.clients import ValkeyClient
from postroom.testing.faults import FaultProxy
from postroom.testing.programs import ServerError
from postroom.testing.servers import ValkeyServer
from postroom.testing.waiting import until
from postroom.transaction import transactions_of

MODES = ("guarded", "multi")
MOMENTS: tuple[Moment, ...] = ("waiting", "answered")


def connect(url: str, **options: Any) -> Any:  # noqa: ANN401
    """Return a client that repeats nothing, and leaves deadlines to us, as one that a store makes of a URL."""
    return redis.asyncio.Redis.from_url(url, retry=Retries(NoBackoff(), 0), socket_timeout=None, **options)


class Shop:
    """Keys of one test on a server, transactions on them, and what became of them."""

    def __init__(self, url: str, *, order: str = "transaction_first", **options: Any) -> None:  # noqa: ANN401
        self.url = url
        #: In which order inbox and transaction stand, where that matters.
        self.order = order
        self.client = connect(url)
        self.tag = f"shop-{uuid4().hex}"
        self.heard: list[events.Event] = []
        self.transactions = self.also(self.client, **options)

    def also(self, client: Any, **options: Any) -> RedisTransactions:  # noqa: ANN401
        """Return transactions of another process, so to say."""
        return RedisTransactions(client, tag=self.tag, listener=self.heard.append, **options)

    def key(self, name: str) -> str:
        return self.transactions.key(name)

    async def keys(self) -> set[str]:
        """Return what there is, marks of commits apart."""
        found = [key.decode() async for key in self.client.scan_iter(f"*{{{self.tag}}}*", count=1000)]
        return {key for key in found if ":commit:" not in key}

    def store(self) -> RedisStore:
        return RedisStore(self.client, namespace=self.tag)

    async def published(self) -> list[Message]:
        """Return what the outbox holds, in its order."""
        terms = ClaimTerms(worker=uuid4(), lease=timedelta(seconds=60))
        return [claim.message for claim in await self.store().claim(100, terms)]


@asynccontextmanager
async def shop_on(url: str, **options: Any) -> AsyncGenerator[Shop]:  # noqa: ANN401
    shop = Shop(url, **options)
    try:
        yield shop
    finally:
        await shop.client.aclose()


@pytest.fixture
async def shop(valkey_server: ValkeyClient) -> AsyncGenerator[Shop]:
    """Keys that are this test's own."""
    async with shop_on(valkey_server.dsn) as shop:
        yield shop


@asynccontextmanager
async def through_proxy(shop: Shop) -> AsyncGenerator[tuple[FaultProxy, Any]]:
    """Give a client whose network fails on request."""
    port = urlsplit(shop.url).port or 6379
    async with FaultProxy("127.0.0.1", port) as proxy:
        client = connect(f"redis://127.0.0.1:{proxy.port}/0")
        try:
            yield proxy, client
        finally:
            with suppress(OSError, redis.exceptions.RedisError):
                await client.aclose()


def message(**parts: Any) -> Message:  # noqa: ANN401
    return Message(topic="orders", payload=b"{}", **parts)


# -- recording -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-01", "S0-07", "S0-12", "S0-26", "S0-59")
@pytest.mark.parametrize("mode", MODES)
async def test_commands_are_queued_until_the_end_and_applied_together_then(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """Nothing is sent while the block runs, and everything when it ends."""
    transactions = shop.also(shop.client, mode=mode)

    async with transactions.begin() as transaction:
        answer = await transaction.connection.hset(shop.key("stock"), mapping={"apples": 3})
        transaction.connection.incrby(shop.key("orders"), 2)  # not awaited, and recorded all the same
        before = await shop.keys()

    assert (answer, before) == (None, set())
    assert await shop.client.hgetall(shop.key("stock")) == {b"apples": b"3"}
    assert await shop.client.get(shop.key("orders")) == b"2"


@pytest.mark.requirement("S0-21", "S0-27")
@pytest.mark.parametrize("mode", MODES)
async def test_a_block_that_fails_applies_nothing(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """What was recorded is forgotten, and the error is the handler's own."""
    transactions = shop.also(shop.client, mode=mode)

    with pytest.raises(ZeroDivisionError):
        async with transactions.begin() as transaction:
            await transaction.connection.set(shop.key("stock"), "1")
            raise ZeroDivisionError

    assert await shop.keys() == set()


class Stock:
    """An adapter as an application writes it: one way to say it, with a transaction and without."""

    def __init__(self, client: Any, key: str) -> None:  # noqa: ANN401
        self._client = client
        self._key = key

    async def take(self, product: str, count: int) -> None:
        await current_pipeline(self._client).hincrby(self._key, product, -count)


@pytest.mark.requirement("S0-05", "S0-06", "S0-14", "S0-23", "S0-24", "S0-28", "S0-29", "S0-58")
async def test_an_adapter_writes_at_once_outside_a_transaction_and_with_the_commit_inside(shop: Shop) -> None:
    """The handler knows a port, the adapter a pipeline."""
    stock = Stock(shop.client, shop.key("stock"))
    seen: list[bytes | None] = []

    async def handle(handled: Message) -> Sequence[Message]:
        await stock.take("apples", 2)
        seen.append(await shop.client.hget(shop.key("stock"), "apples"))
        return []

    await stock.take("apples", 1)
    at_once = await shop.client.hget(shop.key("stock"), "apples")
    await TransactionMiddleware(shop.transactions)(message(), handle)

    assert (at_once, seen) == (b"-1", [b"-1"])
    assert await shop.client.hget(shop.key("stock"), "apples") == b"-3"


@pytest.mark.requirement("S0-58")
async def test_outside_a_transaction_an_adapter_hears_of_errors_at_once(shop: Shop) -> None:
    """The client itself answers there."""
    await shop.client.set(shop.key("stock"), "text")

    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        await Stock(shop.client, shop.key("stock")).take("apples", 1)


@pytest.mark.requirement("S0-25")
def test_the_recorder_has_the_commands_of_a_client() -> None:
    """What an adapter calls is there under the same name with the same parameters, with a client and without."""
    names = "set delete hset hdel hincrby sadd srem zadd zrem rpush lpush incrby decrby expire pexpire xadd eval"
    from postroom.stores.redis.recorder import Recorder  # noqa: PLC0415

    for name in names.split():
        ours, theirs = getattr(Recorder, name), getattr(redis.asyncio.Redis, name)

        assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.requirement("S0-31")
async def test_a_transaction_is_found_for_a_client_and_is_the_same_for_the_same(shop: Shop) -> None:
    """A client is all that the middleware needs; nested handlers find the transaction of their client."""
    found = transactions_of(shop.client)

    assert isinstance(found, RedisTransactions)
    assert transactions_of(shop.client) is found
    assert transactions_of(shop.transactions) is shop.transactions
    assert transactions_of(connect(shop.url)) is not found


@pytest.mark.requirement("S0-30")
async def test_a_client_that_repeats_commands_is_refused(shop: Shop) -> None:
    """What is sent twice by the library may be applied twice."""
    with pytest.raises(ConfigurationError, match="repeats"):
        RedisTransactions(redis.asyncio.Redis.from_url(shop.url, retry=Retries(NoBackoff(), 3)))


async def test_a_mode_that_there_is_not_is_refused(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="guarded"):
        shop.also(shop.client, mode="fast")


@pytest.mark.requirement("S0-07")
@pytest.mark.parametrize("command", ["get", "hget", "exists", "smembers", "zscore", "lrange", "ttl"])
async def test_reading_inside_a_transaction_says_why_not_and_how(shop: Shop, command: str) -> None:
    """An answer would come only after the end, so it is an error that names what to do instead."""
    arguments = {"hget": ("field",), "zscore": ("member",), "lrange": (0, -1)}.get(command, ())

    async with shop.transactions.begin() as transaction:
        with pytest.raises(CommandRefusedError, match=r"read with your own client before.*mode='multi'") as caught:
            getattr(transaction.connection, command)(shop.key("stock"), *arguments)

    assert caught.value.command in READS


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize(
    "words",
    [
        ("FLUSHALL",),
        ("LPOP", "k"),
        ("GETDEL", "k"),
        ("SET", "k", "v", "GET"),
        ("SET", "k", "v", "EX", "0"),
        ("SET", "k", "v", "EXAT", "1"),
        ("SET", "k"),
        ("EXPIRE", "k", "soon"),
        ("EXPIRE", "k", 10**18),
        ("PEXPIRE", "k", "1", "NX"),
        ("HSET", "k", "odd"),
        ("HINCRBY", "k", "f", "1.5"),
        ("HINCRBY", "k", "f", "01"),
        ("INCRBY", "k", "007"),
        ("INCRBY", "k", "-0"),
        ("EXPIRE", "k", "010"),
        ("SET", "k", "v", "EX", "010"),
        ("SET k", "v"),
        ("INCRBY", "k", 2**63),
        ("DECRBY", "k", -(2**63)),
        ("ZADD", "k", "nan", "m"),
        ("ZADD", "k", "high", "m"),
        ("ZADD", "k", "1e400", "m"),
        ("ZADD", "k", "1e-400", "m"),
        ("ZADD", "k", 10**400, "m"),
        ("ZADD", "k", "GT", "1", "m"),
        ("ZADD", "k"),
        ("XADD", "k", "1-1", "f", "v"),
        ("XADD", "k", "MAXLEN", "~", "*", "f", "v"),
        ("XADD", "k", "MAXLEN", "010", "*", "f", "v"),
        ("XADD", "k", "*", "f"),
        ("SADD", "k"),
        ("DEL",),
        ("PERSIST", "k", "k"),
        ("EVAL", "return 1", 0),
        ("RPUSH", "k", *range(5000)),
    ],
    ids=lambda words: " ".join(map(str, words))[:30],
)
async def test_what_could_fail_half_way_is_refused_before_it_is_sent(shop: Shop, words: tuple[Any, ...]) -> None:
    """Syntax, arity, unknown commands; a handler that catches the error is not applied without its command."""
    with pytest.raises(CommandRefusedError):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.set(shop.key("other"), "1")
            with suppress(CommandRefusedError):
                transaction.connection.execute_command(*words)

    assert await shop.keys() == set()


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ZADD", "0 -0.0 0e9 1e-320 -1e-400 1. .5 +5 +.5e+3 1e308 -1e309 inf +INF -inf nan infinite 1e e1 . 1_0"),
        ("INCRBY", "0 -0 00 1 -1 +1 01 9223372036854775807 9223372036854775808 -9223372036854775807 1e3 1.0 1_0"),
        ("EXPIRE", "0 -0 1 -1 007 1.0 9999999999999 -9999999999999"),
    ],
)
async def test_a_number_is_recorded_if_and_only_if_the_server_takes_it(shop: Shop, command: str, words: str) -> None:
    """What passes here and is refused there would be found out after others were applied."""
    taken: dict[str, list[str]] = {"here": [], "there": []}

    for word in words.split():
        said = (command, shop.key("number"), word, *(("m",) if command == "ZADD" else ()))
        await shop.client.delete(shop.key("number"))
        with suppress(redis.exceptions.ResponseError):
            await shop.client.execute_command(*said)
            taken["there"].append(word)
        with suppress(CommandRefusedError):
            async with shop.transactions.begin() as transaction:
                transaction.connection.delete(shop.key("number"))
                transaction.connection.execute_command(*said)
            taken["here"].append(word)

    assert taken["here"] == taken["there"]


@pytest.mark.requirement("S0-25")
async def test_every_command_of_the_list_is_applied_as_the_client_would(shop: Shop) -> None:
    """The same calls on a client and in a transaction leave the same data."""

    async def write(pipeline: Any, start: str) -> None:  # noqa: ANN401
        key = f"{shop.key(start)}:"
        await pipeline.set(key + "text", "a", ex=100)
        await pipeline.set(key + "text", "b", nx=True)
        await pipeline.append(key + "text", "c")
        await pipeline.set(key + "kept", "d", xx=True)
        await pipeline.execute_command("SETNX", key + "once", "e")
        await pipeline.execute_command("SETEX", key + "brief", 100, "f")
        await pipeline.execute_command("PSETEX", key + "briefer", 100_000, "f")
        await pipeline.incr(key + "count")
        await pipeline.decr(key + "count", 5)
        await pipeline.hset(key + "hash", mapping={"a": "1", "b": b"\xff", "c": 1.5})
        await pipeline.hincrby(key + "hash", "a", 4)
        await pipeline.hsetnx(key + "hash", "a", "7")
        await pipeline.hdel(key + "hash", "b")
        await pipeline.sadd(key + "set", "x", "y")
        await pipeline.srem(key + "set", "y")
        await pipeline.zadd(key + "zset", {"m": 1, "n": 2.5, "o": float("inf")})
        await pipeline.zrem(key + "zset", "m")
        await pipeline.rpush(key + "list", 1, 2)
        await pipeline.lpush(key + "list", 0)
        await pipeline.xadd(key + "stream", {"f": "v"}, maxlen=10)
        await pipeline.expire(key + "hash", timedelta(seconds=50))
        await pipeline.pexpire(key + "set", 50_000)
        await pipeline.expireat(key + "zset", 4_000_000_000)
        await pipeline.pexpireat(key + "list", 4_000_000_000_000)
        await pipeline.persist(key + "brief")
        await pipeline.set(key + "gone", 1)
        await pipeline.delete(key + "gone")
        await pipeline.hset(key + "gone", "now", "a hash")
        await pipeline.unlink(key + "count", key + "nothing")

    began = time.monotonic()
    await write(shop.client, "direct")
    async with shop.transactions.begin() as transaction:
        await write(transaction.connection, "queued")
    took = time.monotonic() - began

    direct = sorted(key for key in await shop.keys() if "direct" in key)
    assert len(direct) == 10
    for key in direct:
        twin = key.replace("direct", "queued")
        if key.endswith("stream"):
            assert [fields for _, fields in await shop.client.xrange(twin)] == [{b"f": b"v"}]
        else:
            assert await shop.client.dump(twin) == await shop.client.dump(key), key
        ends = [await shop.client.ttl(one) for one in (twin, key)]
        assert abs(ends[0] - ends[1]) <= 1 + took
        assert (ends[0] < 0) == (ends[1] < 0)


@pytest.mark.requirement("S0-12")
async def test_nothing_can_be_recorded_after_the_end(shop: Shop) -> None:
    """A task that outlives its handler must not write alone."""
    async with shop.transactions.begin() as transaction:
        recorder = transaction.connection

    with pytest.raises(TransactionClosedError):
        await recorder.set(shop.key("stock"), "1")


async def test_what_fails_in_a_savepoint_is_forgotten_alone(shop: Shop) -> None:
    async with shop.transactions.begin() as transaction:
        await transaction.connection.set(shop.key("kept"), "1")
        with suppress(ZeroDivisionError):
            async with shop.transactions.savepoint(transaction):
                await transaction.connection.set(shop.key("undone"), "1")
                raise ZeroDivisionError

    assert await shop.keys() == {shop.key("kept")}


@pytest.mark.requirement("G2", "S0-22")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("marking", ["pessimistic", "setnx_may_lose_messages"])
async def test_a_message_that_fails_in_a_savepoint_is_not_marked_by_the_rest(
    shop: Shop,
    mode: Any,  # noqa: ANN401
    marking: Any,  # noqa: ANN401
) -> None:
    """Its effect is forgotten, so whoever gets it next must not take it for handled."""
    transactions, inbox, handled = shop.also(shop.client, mode=mode), RedisInbox("stock", mode=marking), message()

    async with transactions.begin() as transaction:
        await transaction.connection.set(shop.key("kept"), "1")
        with suppress(ZeroDivisionError):
            async with transactions.savepoint(transaction):
                assert await inbox.admit(transaction, handled)
                await transaction.connection.set(shop.key("undone"), "1")
                raise ZeroDivisionError
    before = await shop.keys()
    async with transactions.begin() as transaction:
        is_new = await inbox.admit(transaction, handled)

    assert is_new
    assert before == {shop.key("kept")}


@pytest.mark.requirement("S0-22")
async def test_a_message_stays_marked_when_something_else_fails_in_a_savepoint(shop: Shop) -> None:
    """Only what was claimed inside is given up with it."""
    inbox, handled = RedisInbox("stock"), message()

    async with shop.transactions.begin() as transaction:
        assert await inbox.admit(transaction, handled)
        with suppress(ZeroDivisionError):
            async with shop.transactions.savepoint(transaction):
                raise ZeroDivisionError
    async with shop.transactions.begin() as transaction:
        is_new = await inbox.admit(transaction, handled)

    assert not is_new


@pytest.mark.requirement("S0-01")
async def test_a_transaction_holds_a_thousand_commands_and_no_more(shop: Shop) -> None:
    """A script holds everybody up, so it is short."""
    async with shop.transactions.begin() as transaction:
        for number in range(1000):
            transaction.connection.rpush(shop.key("list"), number)
    with pytest.raises(CommandRefusedError, match="1,000 commands"):
        async with shop.transactions.begin() as transaction:
            for number in range(1001):
                transaction.connection.rpush(shop.key("list"), number)
    with pytest.raises(CommandRefusedError, match="bytes"):
        async with shop.transactions.begin() as transaction:
            transaction.connection.set(shop.key("list"), bytes(1024 * 1024 + 1))
    with pytest.raises(CommandRefusedError, match="bytes"):
        async with shop.transactions.begin() as transaction:
            for _ in range(999):
                transaction.connection.rpush(shop.key("list"), *[""] * 3000)  # what is empty has to be sent too

    assert await shop.client.llen(shop.key("list")) == 1000


async def test_after_the_commit_and_only_then_is_told_who_wants_to_know(shop: Shop) -> None:
    rung: list[str] = []

    async with shop.transactions.begin() as transaction:
        transaction.after_commit(lambda: rung.append("committed"))
        assert rung == []
    with suppress(ZeroDivisionError):
        async with shop.transactions.begin() as transaction:
            transaction.after_commit(lambda: rung.append("rolled back"))
            raise ZeroDivisionError

    assert rung == ["committed"]


# -- the guarded commit ----------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-08", "S0-30")
async def test_a_key_of_the_wrong_type_keeps_everything_from_being_applied(shop: Shop) -> None:
    """The effect and the event are both missing, instead of one of them."""
    await shop.client.set(shop.key("stock"), "a text")

    with pytest.raises(CommitRefusedError, match=r"stock' is a string, and HINCRBY needs a hash"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await transaction.connection.hincrby(shop.key("stock"), "apples", -1)
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")

    assert await shop.keys() == {shop.key("stock")}


@pytest.mark.requirement("S0-30")
async def test_what_is_checked_writes_nothing(shop: Shop) -> None:
    """Two outboxes, of which the second cannot be written to; the first is left as it was."""
    broken = f"{shop.tag}-broken"
    await shop.client.set(f"postroom_outbox:{{{broken}}}:due", "a text")

    with pytest.raises(CommitRefusedError, match="WRONGTYPE"):
        async with shop.transactions.begin() as transaction:
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")
            await Outbox(namespace=broken).add(transaction.connection, {}, topic="orders")

    assert await shop.keys() == set()


#: Commands that fail by a value, each behind the command that has written it.
BY_VALUE = {
    "INCRBY of a text": ("SET k many", "INCRBY k 1"),
    "INCRBY of zeros before a number": ("SET k 007", "INCRBY k 1"),
    "INCRBY of a long number": (f"SET k {'1' * 100}", "INCRBY k 1"),
    "INCRBY that overflows": (f"SET k {2**63 - 1}", "INCRBY k 1"),
    "DECRBY that overflows": (f"SET k {-(2**63)}", "DECRBY k 1"),
    "HINCRBY of a text": ("HSET k f many", "HINCRBY k f 1"),
    "HINCRBY of a long number": (f"HSET k f {'1' * 100}", "HINCRBY k f 1"),
    "HINCRBY that overflows": (f"HSET k f {2**63 - 1}", "HINCRBY k f 1"),
    "XADD after the last id": (f"XADD k {2**64 - 1}-{2**64 - 1} f v", "XADD k * f v"),
}


def words_of(shop: Shop, line: str) -> list[str]:
    """Return the words of a command, in which ``k`` and ``other`` stand for keys of the shop."""
    return [shop.key(word) if word in {"k", "other"} else word for word in line.split()]


@pytest.mark.requirement("S0-08", "S0-30")
@pytest.mark.parametrize("case", BY_VALUE)
async def test_a_value_that_does_not_fit_fails_when_it_is_applied_and_is_reported(shop: Shop, case: str) -> None:
    """After another command: what came before stays, no event goes out, and the mark keeps the message aside."""
    before, command = BY_VALUE[case]
    await shop.client.execute_command(*words_of(shop, before))

    with pytest.raises(PartlyAppliedError, match="1 of 4 applied: ERR ") as caught:
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await transaction.connection.execute_command(*words_of(shop, command))
            await transaction.connection.sadd(shop.key("later"), "42")
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")

    assert await shop.keys() == {shop.key("k"), shop.key("orders")}
    assert [type(event) for event in shop.heard] == [events.PartlyApplied]
    assert (await shop.client.get(caught.value.mark)).startswith(b"partial:")
    assert await shop.client.ttl(caught.value.mark) == -1


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("case", BY_VALUE)
async def test_a_value_that_does_not_fit_applies_nothing_if_it_comes_first(shop: Shop, case: str) -> None:
    """There is nothing before it that would have to be undone, so the message may be handled again."""
    before, command = BY_VALUE[case]
    await shop.client.execute_command(*words_of(shop, before))
    held = await shop.client.dump(shop.key("k"))

    with pytest.raises(CommitRefusedError, match="nothing of the transaction was applied: ERR "):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.execute_command(*words_of(shop, command))
            await transaction.connection.sadd(shop.key("orders"), "42")
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")

    assert await shop.keys() == {shop.key("k")}
    assert await shop.client.dump(shop.key("k")) == held
    assert shop.heard == []


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("value", ["text", " 1", "", str(2**63), str(-(2**63) - 1)])
async def test_a_value_that_the_transaction_writes_itself_is_not_checked_either(shop: Shop, value: str) -> None:
    """It fails at the command that counts it up, after the one that has written it."""
    with pytest.raises(PartlyAppliedError, match="1 of 2 applied: ERR value is not an integer"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.set(shop.key("new"), value)
            await transaction.connection.incrby(shop.key("new"), 1)

    assert await shop.client.get(shop.key("new")) == value.encode()
    assert [type(event) for event in shop.heard] == [events.PartlyApplied]


#: What may be recorded of one key, whatever it is.
ON_A_KEY = [
    *("DEL k", "UNLINK k", "SET k v", "SET k v NX", "SET k v XX", "APPEND k v", "PERSIST k"),
    *("EXPIRE k 0", "PEXPIRE k 60000", "EXPIREAT k 1", "PEXPIREAT k 1", "EXPIRE k 60"),
    *("HSET k f v", "HSETNX k f v", "HDEL k f", "SADD k m", "SREM k m", "RPUSH k v", "XADD k * f v"),
    *("ZADD k 1 m", "ZADD k XX 1 m", "ZADD k NX 1 m", "ZREM k m"),
]
MADE_BEFORE = ("", "SET k v", "HSET k f v", "SADD k m", "ZADD k 1 m", "RPUSH k v", "XADD k * f v")


@pytest.mark.requirement("S0-08", "S0-30")
@pytest.mark.parametrize("before", MADE_BEFORE)
async def test_no_transaction_is_applied_in_part_because_of_a_type(shop: Shop, before: str) -> None:
    """Whatever its commands make of a key on the way: either all of them are applied, or none."""
    chosen = Random(before)  # the same at every run
    outcomes = Counter[str]()

    for _ in range(150):
        lines = chosen.choices(ON_A_KEY, k=3)
        await shop.client.delete(shop.key("k"), shop.key("orders"))
        if before:
            await shop.client.execute_command(*words_of(shop, before))
        outcome = "applied"
        try:
            async with shop.transactions.begin() as transaction:
                transaction.connection.sadd(shop.key("orders"), "42")
                for line in lines:
                    transaction.connection.execute_command(*words_of(shop, line))
        except CommitRefusedError:
            outcome = "refused"
        except PartlyAppliedError as error:
            raise AssertionError(lines) from error
        outcomes[outcome] += 1
        assert await shop.client.exists(shop.key("orders")) == (outcome == "applied"), lines

    assert min(outcomes["applied"], outcomes["refused"]) > 20


GONE = {
    "HDEL": ("HSET k f 1", "HDEL k f"),
    "SREM": ("SADD k m", "SREM k m"),
    "ZREM": ("ZADD k 1 m", "ZREM k m"),
    "ZADD XX": ("DEL k", "ZADD k XX 1 m"),
}


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("removal", GONE)
@pytest.mark.parametrize("condition", ["NX", "XX"])
async def test_whether_a_key_will_be_there_is_not_guessed(shop: Shop, removal: str, condition: str) -> None:
    """What is empty is gone; a SET that depends on it could make what follows fail after it was applied."""
    before, command = GONE[removal]
    await shop.client.execute_command(*words_of(shop, before))
    there = await shop.keys()

    with pytest.raises(CommitRefusedError, match=f"cannot determine whether .*k' exists when SET {condition} runs"):
        async with shop.transactions.begin() as transaction:
            transaction.connection.sadd(shop.key("orders"), "42")
            transaction.connection.execute_command(*words_of(shop, command))
            transaction.connection.execute_command("SET", shop.key("k"), "x", condition)
    async with shop.transactions.begin() as transaction:
        transaction.connection.execute_command(*words_of(shop, command))
        transaction.connection.set(shop.key("k"), "x")
        transaction.connection.set(shop.key("k"), "y", xx=True)

    assert shop.key("orders") not in there | await shop.keys()
    assert await shop.client.get(shop.key("k")) == b"y"


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("command", ["EXPIRE 0", "EXPIRE -5", "PEXPIRE -1", "EXPIREAT 1", "PEXPIREAT 1000"])
async def test_a_key_whose_time_is_over_is_foreseen_to_be_gone(shop: Shop, command: str) -> None:
    """Another type may be written there then."""
    name, time = command.split()
    key, other = shop.key("k"), shop.key("other")
    await shop.client.hset(key, "f", "5")
    await shop.client.hset(other, "f", "5")

    with pytest.raises(CommitRefusedError, match="is a string, and HSET needs a hash"):
        async with shop.transactions.begin() as transaction:
            transaction.connection.execute_command(name, key, time)
            transaction.connection.set(key, "x", nx=True)
            transaction.connection.hset(key, "f", "v")
    with pytest.raises(PartlyAppliedError, match="2 of 3 applied: ERR hash value is not an integer"):
        async with shop.transactions.begin() as transaction:
            transaction.connection.execute_command(name, key, time)
            transaction.connection.hsetnx(key, "f", "text")  # the field was gone with its key
            transaction.connection.hincrby(key, "f", 1)
    async with shop.transactions.begin() as transaction:
        transaction.connection.execute_command(name, key, time)
        transaction.connection.set(key, "7", nx=True)
        transaction.connection.incrby(key, 1)
        transaction.connection.execute_command(name.removesuffix("AT"), other, 100)
        transaction.connection.hincrby(other, "f", 1)

    assert (await shop.client.get(key), await shop.client.hget(other, "f")) == (b"8", b"6")


async def test_the_smallest_number_can_be_added_to(shop: Shop) -> None:
    await shop.client.set(shop.key("count"), -(2**63))

    async with shop.transactions.begin() as transaction:
        transaction.connection.incrby(shop.key("count"), 1)

    assert await shop.client.get(shop.key("count")) == str(1 - 2**63).encode()


@pytest.mark.requirement("S0-30")
async def test_what_a_transaction_does_itself_is_foreseen(shop: Shop) -> None:
    """A type that changes on the way is neither refused in vain, nor found out too late."""
    await shop.client.hset(shop.key("a"), "f", "1")

    async with shop.transactions.begin() as transaction:
        await transaction.connection.delete(shop.key("a"))
        await transaction.connection.rpush(shop.key("a"), "1")
        await transaction.connection.set(shop.key("b"), "x")
        await transaction.connection.set(shop.key("b"), "5")
        await transaction.connection.incrby(shop.key("b"), 1)
        await transaction.connection.incrby(shop.key("b"), 1)
        await transaction.connection.hset(shop.key("c"), "f", "x")
        await transaction.connection.hdel(shop.key("c"), "f")
        await transaction.connection.hincrby(shop.key("c"), "f", 1)
        await transaction.connection.append(shop.key("d"), "1")
        await transaction.connection.incrby(shop.key("d"), 1)
        await transaction.connection.set(shop.key("d"), "x", nx=True)  # it is there, so nothing happens
        await transaction.connection.decrby(shop.key("d"), 1)
        await transaction.connection.hsetnx(shop.key("c"), "f", "x")
        await transaction.connection.hincrby(shop.key("c"), "f", 1)
        await transaction.connection.set(shop.key("f"), "x", xx=True)
        await transaction.connection.hset(shop.key("f"), "f", "1")
    for second in ("hset", "incrby"):
        with pytest.raises(CommitRefusedError):
            async with shop.transactions.begin() as transaction:
                await transaction.connection.rpush(shop.key("e"), "1")
                getattr(transaction.connection, second)(shop.key("e"), *((1,) if second == "incrby" else ("f", 1)))

    assert await shop.client.lrange(shop.key("a"), 0, -1) == [b"1"]
    assert (await shop.client.get(shop.key("b")), await shop.client.get(shop.key("d"))) == (b"7", b"1")
    assert await shop.client.hget(shop.key("c"), "f") == b"2"
    assert not await shop.client.exists(shop.key("e"))


@pytest.mark.requirement("S0-30")
async def test_what_could_not_be_foreseen_is_told_and_publishes_nothing(shop: Shop) -> None:
    """An overflow after another command; no event goes out, and the listener is called."""
    await shop.client.set(shop.key("count"), 2**63 - 1)

    with pytest.raises(PartlyAppliedError, match=r"1 of 3 applied: .*overflow") as caught:
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await transaction.connection.incrby(shop.key("count"), 1)
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")

    assert await shop.client.smembers(shop.key("orders")) == {b"42"}
    assert await shop.published() == []
    assert [type(event) for event in shop.heard] == [events.PartlyApplied]
    assert (await shop.client.get(caught.value.mark)).startswith(b"partial:")
    assert await shop.client.ttl(caught.value.mark) == -1


@pytest.mark.requirement("S0-30")
async def test_the_first_command_may_fail_and_nothing_is_applied(shop: Shop) -> None:
    """There is nothing before it that would have to be undone."""
    await shop.client.set(shop.key("count"), 2**63 - 1)

    with pytest.raises(CommitRefusedError, match="overflow"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("count"), 1)
            await transaction.connection.sadd(shop.key("orders"), "42")

    assert await shop.keys() == {shop.key("count")}
    assert shop.heard == []


@pytest.mark.requirement("S0-30")
async def test_an_outbox_whose_keys_are_something_else_keeps_everything_from_being_applied(shop: Shop) -> None:
    """The keys of the outbox are looked at before the first write as well."""
    await shop.client.set(f"postroom_outbox:{{{shop.tag}}}:due", "a text")

    with pytest.raises(CommitRefusedError, match="WRONGTYPE"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")

    assert await shop.keys() == {f"postroom_outbox:{{{shop.tag}}}:due"}


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("before", ["", "in use"])
async def test_a_command_that_changes_the_type_of_a_key_of_the_outbox_keeps_everything_from_being_applied(
    shop: Shop, before: str
) -> None:
    """The outbox is added to after all commands, and would fail then."""
    outbox, due = Outbox(namespace=shop.tag), f"postroom_outbox:{{{shop.tag}}}:due"
    if before:
        await outbox.add(shop.client, {}, topic="orders")
    there = await shop.keys()

    with pytest.raises(CommitRefusedError, match=r"due' is a key of the outbox, and a command .* makes it a string"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.set(due, "a text")
            await outbox.add(transaction.connection, {}, topic="orders")
    assert await shop.keys() == there
    async with shop.transactions.begin() as transaction:
        await transaction.connection.set(due, "a text")
        await transaction.connection.delete(due)  # it is free again when the outbox is added to
        await outbox.add(transaction.connection, {}, topic="orders")

    assert await shop.client.type(due) == b"zset"


@pytest.mark.requirement("S0-30")
async def test_an_outbox_that_refuses_a_topic_keeps_everything_from_being_applied_if_nothing_was_before(
    shop: Shop,
) -> None:
    """65,536 topics are the limit of a namespace, which is known before anything is added."""
    topics = f"postroom_outbox:{{{shop.tag}}}:topics"
    for start in range(0, 65_536, 8_192):
        await shop.client.hset(topics, mapping={f"topic-{n}": n for n in range(start, start + 8_192)})

    with pytest.raises(CommitRefusedError, match="65,536 topics"):
        async with shop.transactions.begin() as transaction:
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="one more")
    with pytest.raises(PartlyAppliedError, match=r"1 of 2 applied: .*65,536 topics"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="one more")

    assert await shop.keys() == {topics, shop.key("orders")}


@pytest.mark.requirement("S0-30")
async def test_an_outbox_that_breaks_off_is_told_as_partly_applied(shop: Shop) -> None:
    """What is stored there is none of ours, and that is found out half way."""
    await shop.client.hset(f"postroom_outbox:{{{shop.tag}}}:topics", "orders", "no number")

    with pytest.raises(PartlyAppliedError, match="1 of 1 applied"):
        async with shop.transactions.begin() as transaction:
            await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")


@pytest.mark.requirement("S0-30")
async def test_without_memory_nothing_is_applied(private_valkey: ValkeyServer) -> None:
    """The first write is refused, in both modes, and it is the server's fault."""
    async with shop_on(private_valkey.dsn) as shop:
        multi = shop.also(shop.client, mode="multi")
        await shop.client.config_set("maxmemory", "1")
        for transactions in (shop.transactions, multi):
            with pytest.raises(StoreUnavailableError, match=r"OOM|memory"):
                async with transactions.begin() as transaction:
                    await transaction.connection.sadd(shop.key("orders"), "42")
                    await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")
        await shop.client.config_set("maxmemory", "0")

        assert await shop.keys() == set()
        async with shop.transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")


@pytest.mark.requirement("S0-30")
async def test_a_server_that_has_forgotten_its_scripts_is_told_them_again(shop: Shop) -> None:
    """NOSCRIPT after a restart or a failover."""
    for _ in range(2):
        await shop.client.script_flush()
        async with shop.transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("count"), 1)

    assert await shop.client.get(shop.key("count")) == b"2"


@pytest.mark.requirement("S0-30")
async def test_a_user_who_may_not_call_a_command_applies_nothing(private_valkey: ValkeyServer) -> None:
    """Permissions are looked at before the first write; without EVAL, that is said."""
    async with shop_on(private_valkey.dsn) as shop:
        await shop.client.execute_command("ACL", "SETUSER", "clerk", "on", ">pw", "~*", "&*", "+@all", "-hset")
        await shop.client.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~*", "&*", "+@all", "-@scripting")
        clerk, guest = (connect(shop.url, username=name, password="pw") for name in ("clerk", "guest"))  # noqa: S106
        with pytest.raises(CommitRefusedError, match="may not call HSET"):
            async with shop.also(clerk).begin() as transaction:
                await transaction.connection.sadd(shop.key("orders"), "42")
                await transaction.connection.hset(shop.key("stock"), "apples", "1")
        with pytest.raises(CommitRefusedError, match="may not call HSET"):
            async with shop.also(clerk).begin() as transaction:
                await transaction.connection.sadd(shop.key("orders"), "42")
                await Outbox(namespace=shop.tag).add(transaction.connection, {}, topic="orders")
        with pytest.raises(StorePermissionError, match=r"NOPERM|permission"):
            async with shop.also(guest).begin() as transaction:
                await transaction.connection.sadd(shop.key("orders"), "42")

        assert await shop.keys() == set()
        await clerk.aclose()
        await guest.aclose()


# -- lost replies ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_whose_reply_is_lost_is_applied_once(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """It is asked again, or looked at, instead of done again."""
    async with through_proxy(shop) as (proxy, client):
        transactions = shop.also(client, mode=mode)
        async with transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("warm"), 1)

        async with transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("count"), 1)
            proxy.drop_reply(b"INCRBY")

    assert proxy.dropped == 1
    assert await shop.client.get(shop.key("count")) == b"1"


@pytest.mark.requirement("S0-30")
async def test_a_commit_that_was_lost_on_its_way_is_sent_again(shop: Shop) -> None:
    """A connection that is reset costs neither the handler nor the message anything."""
    async with through_proxy(shop) as (proxy, client):
        transactions = shop.also(client)
        async with transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("warm"), 1)

        async def commit() -> None:
            async with transactions.begin() as transaction:
                await transaction.connection.incrby(shop.key("count"), 1)
                proxy.black_hole("requests")
                asyncio.get_running_loop().call_later(0.1, reset)

        def reset() -> None:
            proxy.cut()  # what was held back is gone
            proxy.heal()

        await commit()

    assert await shop.client.get(shop.key("count")) == b"1"


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("mode", MODES)
async def test_a_commit_that_never_arrived_is_known_not_to_be_applied(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """Requests are lost until the server is asked what became of it, and that answer ends the matter."""
    async with through_proxy(shop) as (proxy, client):
        transactions = shop.also(client, mode=mode, timeout=timedelta(seconds=1))
        async with transactions.begin() as transaction:
            await transaction.connection.incrby(shop.key("warm"), 1)
        with pytest.raises(CommitUnknownError) as caught:
            async with transactions.begin() as transaction:
                await transaction.connection.incrby(shop.key("count"), 1)
                proxy.black_hole("requests")
        unknown = caught.value
        unknown.witness = transaction.witness
        proxy.heal()

        was_applied = await unknown.resolve()

        # What was held back reached the server after all: applied if it came before the question, and never later.
        assert was_applied == (await shop.client.get(shop.key("count")) == b"1")
        assert await shop.client.get(shop.key("count")) in {None, b"1"}


@pytest.mark.requirement("S0-30")
async def test_a_server_that_is_gone_leaves_it_unknown_until_it_is_back(private_valkey: ValkeyServer) -> None:
    """Unknown is an error of its own, and resolve() tells."""
    async with shop_on(private_valkey.dsn) as shop:
        with pytest.raises(CommitUnknownError) as caught:
            async with shop.transactions.begin() as transaction:
                await transaction.connection.incrby(shop.key("count"), 1)
                private_valkey.kill9()
        unknown = caught.value
        unknown.witness = transaction.witness
        private_valkey.start()

        assert await unknown.resolve() is False
        assert await shop.keys() == set()


@pytest.mark.requirement("S0-30")
async def test_a_commit_that_is_cancelled_is_given_up(shop: Shop) -> None:
    """What might still be on its way when nobody waits for it any more is refused from then on."""
    async with through_proxy(shop) as (proxy, client):
        transactions, is_committing = shop.also(client), asyncio.Event()

        async def work() -> None:
            async with transactions.begin() as transaction:
                await transaction.connection.incrby(shop.key("count"), 1)
                proxy.black_hole("requests")
                is_committing.set()

        task = asyncio.create_task(work())
        await is_committing.wait()
        await until(lambda: proxy.open > 0, "the connection on which it is sent")
        task.cancel()
        proxy.cut()
        proxy.heal()
        with pytest.raises(asyncio.CancelledError):
            await task

    marks = [key async for key in shop.client.scan_iter(f"*{{{shop.tag}}}:commit:*", count=1000)]
    assert [(await shop.client.get(key))[:5] for key in marks] == [b"void:"]
    assert await shop.client.get(shop.key("count")) is None


# -- MULTI and EXEC --------------------------------------------------------------------------------------------


async def test_a_read_after_the_end_is_refused_at_once(shop: Shop) -> None:
    """Its connection is about to be another transaction's."""
    async with shop.also(shop.client, mode="multi").begin() as transaction:
        pipeline = transaction.connection
        await pipeline.watch(shop.key("stock"))

        pipeline.close()

        with pytest.raises(TransactionClosedError):
            pipeline.get(shop.key("stock"))


@pytest.mark.requirement("S0-20")
async def test_multi_takes_any_command_and_reads_what_it_watches(shop: Shop) -> None:
    """A handler that must read watches first; the commit is refused if that has changed."""
    transactions = shop.also(shop.client, mode="multi")
    await shop.client.set(shop.key("stock"), "5")

    async with transactions.begin() as transaction:
        pipeline = transaction.connection
        with pytest.raises(CommandRefusedError, match="watch"):
            pipeline.get(shop.key("stock"))
        await pipeline.watch(shop.key("stock"))
        left = int(await pipeline.get(shop.key("stock")))
        await pipeline.execute_command("GETSET", shop.key("stock"), left - 1)
    with pytest.raises(StoreContentionError, match="changed"):
        async with transactions.begin() as transaction:
            await transaction.connection.watch(shop.key("stock"))
            await transaction.connection.set(shop.key("stock"), "0")
            await shop.client.incr(shop.key("stock"))

    assert await shop.client.get(shop.key("stock")) == b"5"


@pytest.mark.requirement("S0-08", "S0-30")
async def test_multi_looks_at_every_reply(shop: Shop) -> None:
    """WRONGTYPE in the middle does not stop the others there, so it is partly applied, and told."""
    transactions = shop.also(shop.client, mode="multi")
    await shop.client.set(shop.key("stock"), "a text")

    with pytest.raises(PartlyAppliedError, match=r"2 of 3 applied: .*WRONGTYPE") as caught:
        async with transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await transaction.connection.hincrby(shop.key("stock"), "apples", -1)

    assert await shop.client.smembers(shop.key("orders")) == {b"42"}
    assert [type(event) for event in shop.heard] == [events.PartlyApplied]
    assert (await shop.client.get(caught.value.mark)).startswith(b"partial:")


@pytest.mark.requirement("S0-30")
async def test_multi_that_cannot_put_its_mark_right_is_told_as_partly_applied_all_the_same(
    private_valkey: ValkeyServer,
) -> None:
    """The mark says done, and nobody is told that all is well."""
    async with shop_on(private_valkey.dsn, mode="multi") as shop:
        await shop.client.set(shop.key("stock"), "a text")

        with pytest.raises(PartlyAppliedError, match="WRONGTYPE"):
            async with shop.transactions.begin() as transaction:
                transaction.connection.hincrby(shop.key("stock"), "apples", -1)
                transaction.connection.config_set("maxmemory", "1")  # from then on nothing can be written

        assert [type(event) for event in shop.heard] == [events.PartlyApplied]


STEERING = "SELECT 1,EXEC,DISCARD,MULTI,WATCH k,UNWATCH,CLIENT REPLY OFF,SUBSCRIBE c,QUIT,RESET,HELLO,AUTH x,MONITOR"


@pytest.mark.requirement("S0-30")
@pytest.mark.parametrize("line", STEERING.split(","))
async def test_multi_does_not_let_go_of_its_connection(shop: Shop, line: str) -> None:
    """A handler that could end MULTI or turn to another database would be done without its effect."""
    transactions = shop.also(shop.client, mode="multi")

    with pytest.raises(CommandRefusedError, match="connection"):
        async with transactions.begin() as transaction:
            transaction.connection.set(shop.key("stock"), "1")
            with suppress(CommandRefusedError):
                transaction.connection.execute_command(*line.lower().split())

    assert await shop.keys() == set()


@pytest.mark.requirement("S0-20")
async def test_multi_answers_questions_that_are_asked_at_the_same_time(shop: Shop) -> None:
    """There is one connection for them, so they wait for each other."""
    transactions = shop.also(shop.client, mode="multi")
    names = [shop.key(str(number)) for number in range(5)]
    await shop.client.mset({name: number for number, name in enumerate(names)})

    async with transactions.begin() as transaction:
        await transaction.connection.watch(*names)
        found = await asyncio.gather(*[transaction.connection.get(name) for name in names])
        kind = await transaction.connection.execute_command(b"type", names[0])
        await shop.client.xadd(shop.key("stream"), {"a": "b"})
        about = await transaction.connection.xinfo_stream(shop.key("stream"))

    assert (found, kind) == ([b"0", b"1", b"2", b"3", b"4"], b"string")
    assert about["length"] == 1


@pytest.mark.requirement("S0-20")
@pytest.mark.parametrize("fault", ["cut", "given up"])
async def test_multi_does_not_forget_what_it_watched_with_a_lost_connection(shop: Shop, fault: str) -> None:
    """A handler that survives the error would write over what somebody else has written."""
    await shop.client.set(shop.key("stock"), "5")
    async with through_proxy(shop) as (proxy, client):
        transactions = shop.also(client, mode="multi")

        with pytest.raises(StoreContentionError, match="lost; nothing was applied"):
            async with transactions.begin() as transaction:
                pipeline = transaction.connection
                await pipeline.watch(shop.key("stock"))
                left = int(await pipeline.get(shop.key("stock")))
                if fault == "cut":
                    proxy.cut()
                else:
                    proxy.black_hole("replies")
                with suppress(StoreError, TimeoutError):
                    await asyncio.wait_for(pipeline.get(shop.key("stock")), 60 if fault == "cut" else 0.05)
                proxy.heal()
                await shop.client.incr(shop.key("stock"))
                pipeline.set(shop.key("stock"), left - 1)

    assert await shop.client.get(shop.key("stock")) == b"6"


@pytest.mark.requirement("S0-20")
async def test_multi_answers_nobody_after_its_end(shop: Shop) -> None:
    """A question that waited for its turn until then would take a connection for ever."""
    transactions = shop.also(shop.client, mode="multi")

    async with transactions.begin() as transaction:
        await transaction.connection.watch(shop.key("stock"))
        late = transaction.connection.get(shop.key("stock"))

    with pytest.raises(TransactionClosedError):
        await late


@pytest.mark.requirement("S0-30")
async def test_multi_with_a_syntax_error_applies_nothing(shop: Shop) -> None:
    """EXECABORT."""
    transactions = shop.also(shop.client, mode="multi")

    with pytest.raises(CommitRefusedError, match="wrong number of arguments") as caught:
        async with transactions.begin() as transaction:
            await transaction.connection.sadd(shop.key("orders"), "42")
            await transaction.connection.execute_command("HSET", shop.key("stock"), "secret")

    assert await shop.keys() == set()
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(CommitRefusedError, match="unknown command") as caught:
        async with transactions.begin() as transaction:
            await transaction.connection.execute_command("HSAT", shop.key("stock"), "secret")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.requirement("S0-19")
async def test_a_lease_is_renewed_after_a_lost_connection(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, as long as the lease lasts."""
    monkeypatch.setattr(marks, "PER_LEASE", 1000)
    inbox, handled = RedisInbox("stock", lease=timedelta(seconds=60)), message()
    async with through_proxy(shop) as (proxy, client), shop.also(client).begin() as transaction:
        await inbox.admit(transaction, handled)
        mark = inbox.key(shop.tag, handled)

        async def is_renewed() -> bool:
            return bool(await shop.client.pttl(mark) > 50_000)

        await shop.client.pexpire(mark, 40_000)
        await until(is_renewed, "the lease was renewed")
        proxy.cut()
        await shop.client.pexpire(mark, 40_000)
        await until(is_renewed, "the lease was renewed again")


@pytest.mark.requirement("G11", "S0-30")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_transaction_may_be_cancelled_anywhere(shop: Shop, mode: Any, moment: Moment) -> None:  # noqa: ANN401
    """It is applied or not, and never in part; no connection is kept, and no task runs on."""
    client = connect(shop.url, max_connections=2)
    transactions, inbox = shop.also(client, mode=mode), RedisInbox("stock", lease=timedelta(milliseconds=3))
    count, names = 0, (shop.key("one"), shop.key("two"))

    async def work() -> None:
        async with transactions.begin() as transaction:
            await inbox.admit(transaction, message())
            if mode == "multi":
                await transaction.connection.watch(names[0])
                await transaction.connection.get(names[0])
            await asyncio.sleep(0.002)  # long enough for the lease to be renewed
            for name in names:
                transaction.connection.incrby(name, 1)

    for cut in cuts(moment=moment):
        count += 1
        with suppress(FencedError, StoreContentionError):  # a lease this short may end before
            await cut.run(work())

        one, two = await shop.client.mget(names)
        assert one == two, cut
        assert cut.unfinished == 0, cut
    assert count > 5
    for _ in range(3):  # what was kept would be missing
        async with transactions.begin() as transaction:
            transaction.connection.incrby(names[0], 1)
    await client.aclose()


# -- the outbox ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-03", "S0-13", "S0-43", "S0-44", "S0-47", "S0-59")
@pytest.mark.parametrize("mode", MODES)
async def test_what_a_handler_returns_is_in_the_outbox_with_its_effect(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """One commit, outputs swallowed, in order, payloads as they were."""
    rung: list[str] = []
    outbox = Outbox(namespace=shop.tag, wake=lambda: rung.append("rung"))
    payloads = [b"[]", b"null", b"9007199254740993", b"\xff\x00{}"]
    middlewares: list[Middleware] = [TransactionMiddleware(shop.also(shop.client, mode=mode)), OutboxMiddleware(outbox)]
    seen: list[set[str]] = []

    async def handle(handled: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).set(shop.key("stock"), "1")
        seen.append(await shop.keys())
        return [Message(topic="events", type="t", payload=payload, key="k") for payload in payloads]

    outputs = await chained(middlewares, handle)(message())

    assert (list(outputs), seen, rung) == ([], [set()], ["rung"])
    assert await shop.client.get(shop.key("stock")) == b"1"
    assert [found.payload for found in await shop.published()] == payloads


@pytest.mark.requirement("S0-59")
@pytest.mark.parametrize("mode", MODES)
async def test_messages_reach_the_recorder_as_a_script_with_its_keys_and_arguments(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """One call for all of them, and no command."""
    outbox, keys = Outbox(namespace=shop.tag), Keys("postroom_outbox", shop.tag)

    async with shop.also(shop.client, mode=mode).begin() as transaction:
        added = await outbox.add(transaction.connection, [{"n": 1}, {"n": 2}], topic="orders")
        recorder = transaction.connection
        (call,), commands = recorder.calls, list(recorder.recorded)

    assert (call.script, call.keys, commands) == ("enqueue", tuple(key.encode() for key in keys.all), [])
    assert [call.arguments[place] for place in (1, 9)] == [one.id.bytes for one in added]
    assert [found.id for found in await shop.published()] == [one.id for one in added]


@pytest.mark.requirement("S0-30")
async def test_the_script_of_the_outbox_is_refused_as_an_eval_like_any_other(shop: Shop) -> None:
    """The text of a script says nothing: only the outbox hands the recorder one that it can check."""
    keys = Keys("postroom_outbox", shop.tag).all

    with pytest.raises(CommandRefusedError, match="EVAL cannot be part of this transaction"):
        async with shop.transactions.begin() as transaction:
            await transaction.connection.set(shop.key("stock"), "1")
            with suppress(CommandRefusedError):
                await transaction.connection.eval(script("enqueue").text, len(keys), *keys, "")

    assert await shop.keys() == set()


@pytest.mark.requirement("S0-12")
async def test_nothing_can_be_added_after_the_end(shop: Shop) -> None:
    """Nor by a task that outlives its handler."""
    async with shop.transactions.begin() as transaction:
        recorder = transaction.connection

    with pytest.raises(TransactionClosedError):
        await Outbox(namespace=shop.tag).add(recorder, {}, topic="orders")

    assert await shop.published() == []


async def test_messages_that_are_added_in_a_savepoint_that_fails_are_forgotten_with_it(shop: Shop) -> None:
    outbox = Outbox(namespace=shop.tag)

    async with shop.transactions.begin() as transaction:
        kept = await outbox.add(transaction.connection, {}, topic="orders")
        with suppress(ZeroDivisionError):
            async with shop.transactions.savepoint(transaction):
                await outbox.add(transaction.connection, {}, topic="orders")
                raise ZeroDivisionError

    assert [found.id for found in await shop.published()] == [kept.id]


@pytest.mark.requirement("S0-01")
async def test_messages_count_to_the_commands_of_a_transaction_and_its_bytes(shop: Shop) -> None:
    """Whoever catches the error is not committed without them."""
    outbox = Outbox(namespace=shop.tag)

    with pytest.raises(CommandRefusedError, match="1,000 commands"):
        async with shop.transactions.begin() as transaction:
            for number in range(1000):
                transaction.connection.rpush(shop.key("list"), number)
            with suppress(CommandRefusedError):
                await outbox.add(transaction.connection, {}, topic="orders")
    with pytest.raises(CommandRefusedError, match="bytes"):
        async with shop.transactions.begin() as transaction:
            for _ in range(5):
                await outbox.add(transaction.connection, {"text": "x" * 250_000}, topic="orders")

    assert await shop.keys() == set()


@pytest.mark.requirement("S0-46")
async def test_what_cannot_be_stored_discards_the_whole_transaction(shop: Shop) -> None:
    """An output that is no valid message is an error before anything is sent."""
    middlewares: list[Middleware] = [
        TransactionMiddleware(shop.transactions),
        OutboxMiddleware(Outbox(namespace=shop.tag)),
    ]

    async def handle(handled: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).set(shop.key("stock"), "1")
        return [Message(topic="events", type="t", payload=b"{}"), Message(topic="", type="t", payload=b"{}")]

    with pytest.raises(MessageError):
        await chained(middlewares, handle)(message())

    assert await shop.keys() == set()


@pytest.mark.requirement("S0-45")
async def test_an_outbox_without_a_transaction_says_what_is_missing(shop: Shop) -> None:
    """On the first message, whether it leads to outputs or not."""

    async def handle(handled: Message) -> Sequence[Message]:
        raise AssertionError

    with pytest.raises(NoTransactionError, match="TransactionMiddleware"):
        await OutboxMiddleware(Outbox(namespace=shop.tag))(message(), handle)


@pytest.mark.requirement("S0-03", "S0-43", "S0-47", "S0-59")
@pytest.mark.parametrize("mode", MODES)
async def test_an_outbox_in_a_stream_is_part_of_the_transaction(shop: Shop, mode: Any) -> None:  # noqa: ANN401
    """One XADD for each output, in their order, with the effect or not at all."""
    rung: list[str] = []
    transactions, stream = shop.also(shop.client, mode=mode), RedisStreamStore(shop.client, namespace=shop.tag)
    outbox = stream.outbox(wake=lambda: rung.append("rung"))
    outputs = [Message(topic="events", type="t", payload=str(number).encode()) for number in range(5)]

    with suppress(ZeroDivisionError):
        async with transactions.begin() as transaction:
            await outbox.add(transaction.connection, outputs)
            raise ZeroDivisionError
    before = await shop.keys()
    async with transactions.begin() as transaction:
        await transaction.connection.set(shop.key("stock"), "1")
        await outbox.add(transaction.connection, outputs)

    claims = await stream.claim(10, ClaimTerms(worker=uuid4()))
    assert (before, rung, await shop.client.get(shop.key("stock"))) == (set(), ["rung"], b"1")
    assert [claim.message.id for claim in claims] == [output.id for output in outputs]


@pytest.mark.requirement("G9", "G11")
@pytest.mark.parametrize("kind", ["store", "stream"])
async def test_an_error_that_cannot_be_written_holds_up_nothing(shop: Shop, kind: str) -> None:
    """Half a character in it would keep the message, and those beside it, from being settled for ever."""
    store = shop.store() if kind == "store" else RedisStreamStore(shop.client, namespace=shop.tag)
    error = "no \udcff" * 5000
    await (Outbox(namespace=shop.tag) if isinstance(store, RedisStore) else store.outbox()).add(
        shop.client, [message(), message()]
    )

    for outcome in (Retry(error), Dead(error)):
        claims = await store.claim(10, ClaimTerms(worker=uuid4()))
        assert await store.settle([Settlement(claim, outcome) for claim in claims]) == []
    await StoredDeadLetters(RedisInbox("stock"), shop.transactions).bury(message(), error)

    assert (await store.stats()).dead == 2


async def test_the_same_message_twice_is_one_in_the_outbox(shop: Shop) -> None:
    rung: list[str] = []
    outbox = Outbox(namespace=shop.tag, wake=lambda: rung.append("rung"))
    added = Message(topic="events", type="t", payload=b"{}")

    for count in range(2):
        async with shop.transactions.begin() as transaction:
            await outbox.add(transaction.connection, added)
            assert len(rung) == count  # whoever is woken finds it

    assert len(rung) == 2
    assert [found.id for found in await shop.published()] == [added.id]


# -- clusters --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-31")
@pytest.mark.parametrize(
    ("key", "slot"),
    [("123456789", 12739), ("foo{}{bar}", 8363), ("foo{{bar}}zap", 4015), ("{user1000}.following", 3443)],
)
def test_the_slot_of_a_key_is_what_the_cluster_says(key: str, slot: int) -> None:
    """CRC16 of what is between the first braces, if there is anything between them."""
    assert slot_of(key.encode()) == slot


def lonely_node() -> ValkeyServer:
    """Start a node of a cluster, whose second port may be taken by somebody while it starts."""
    for attempt in range(5):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with suppress(ServerError) if attempt < 4 else nullcontext():
            return ValkeyServer(settings={"cluster-enabled": "yes", "cluster-port": str(port)}).start()
    raise AssertionError


@pytest.mark.requirement("S0-30", "S0-31")
async def test_a_cluster_refuses_keys_of_other_slots_before_anything_is_sent() -> None:
    """On a cluster of one node, which has all slots, and still asks for one in each transaction."""
    server = lonely_node()
    try:
        node = connect(server.dsn)
        await node.execute_command("CLUSTER", "ADDSLOTS", *range(16384))

        async def is_ready() -> bool:
            return bool((await node.execute_command("CLUSTER INFO"))["cluster_state"] == "ok")

        await until(is_ready, "the cluster")
        await node.aclose()
        url = urlsplit(server.dsn)
        client: Any = redis.asyncio.RedisCluster(
            host=url.hostname, port=url.port or 6379, retry=Retries(NoBackoff(), 0)
        )
        transactions = RedisTransactions(client, tag="shop")
        with pytest.raises(CommandRefusedError, match="another slot"):
            async with transactions.begin() as transaction:
                await transaction.connection.set(transactions.key("stock"), "1")
                await transaction.connection.set("stock", "1")
        with pytest.raises(CommandRefusedError, match="another slot"):
            async with transactions.begin() as transaction:
                await Outbox(namespace="other").add(transaction.connection, {}, topic="orders")
        with pytest.raises(ConfigurationError, match="cluster"):
            RedisTransactions(client, tag="shop", mode="multi")
        before = await client.exists(transactions.key("stock"))

        async with transactions.begin() as transaction:
            await transaction.connection.set(transactions.key("stock"), "1")
            await Outbox(namespace="shop").add(transaction.connection, {}, topic="orders")

        assert (before, await client.get(transactions.key("stock"))) == (0, b"1")
        await client.aclose()
    finally:
        server.stop()


@pytest.mark.requirement("S0-36")
async def test_errors_of_the_store_are_ours(shop: Shop) -> None:
    """Nothing of the library's comes through; a server that is not there is known before anything is sent."""
    transactions = shop.also(connect("redis://127.0.0.1:1/0"))

    with pytest.raises(StoreUnavailableError):
        async with transactions.begin() as transaction:
            await transaction.connection.set(shop.key("stock"), "1")
