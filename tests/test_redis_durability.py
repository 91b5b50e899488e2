"""Stores and transactions hold their server to its profile: nothing is acknowledged or handed out before it is safe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, TypeAlias, cast
from uuid import uuid4

import pytest

from postroom import Message, OutboxSubscriber, events
from postroom.errors import CommitUnknownError, ConfigurationError, StoreUnavailableError
from postroom.inbox import Mode
from postroom.middleware import TransactionMiddleware
from postroom.middleware.chain import chained
from postroom.store import ClaimTerms, Delivered, Release, Settlement, Stats
from postroom.stores import store_from_url
from postroom.stores.redis import RedisStore, RedisStreamStore, RedisTransactions, current_pipeline
from postroom.stores.redis.transactions import CommitMode
from postroom.testing.cluster import RedisReplicated
from postroom.testing.servers import RedisServer, ValkeyServer
from postroom.testing.waiting import until

from . import test_redis_profile as of_profiles
from .test_redis_inbox import counting, effects, ended, handled_by, inbox, message
from .test_redis_profile import SHORT, configure
from .test_redis_transaction import shop_on, through_proxy

started, pair, server = of_profiles.started, of_profiles.pair, of_profiles.server

AnyStore: TypeAlias = RedisStore | RedisStreamStore
STORES: list[type[AnyStore]] = [RedisStore, RedisStreamStore]
TERMS = ClaimTerms(worker=uuid4(), lease=timedelta(seconds=60))


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Any]]:
    """Makes stores, and closes them after the test."""
    async with AsyncExitStack() as stack:

        def make(kind: type[AnyStore], url: str, **options: Any) -> AnyStore:  # noqa: ANN401
            store = kind(url, **options)
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes what will not wait for long until something is confirmed, so that a test need not either."""

    def hasty(made: Callable[..., Any], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with monkeypatch.context() as patch:
            patch.setattr("postroom.stores.redis.profile.PATIENCE", SHORT)
            return made(*arguments, **options)

    return hasty


async def add(store: AnyStore) -> None:
    outbox: Any = store.outbox()
    await outbox.add(store._client.foreign, {"order_id": 42}, topic="orders")  # noqa: SLF001


async def without_replica(pair: RedisReplicated) -> None:
    """Kill the replica, and wait until the primary knows."""
    pair.replica.kill9()
    await until(lambda: "connected_slaves:0" in str(pair.primary.client.ask("INFO", "replication")), "the loss")


@pytest.mark.parametrize("kind", STORES)
class TestStoreThatOpens:
    @pytest.mark.requirement("S3-29")
    async def test_refuses_a_server_that_forgets_unless_somebody_says_so(
        self, server: RedisServer, kind: type[AnyStore], make: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """What is there by default is what is safe; the error says what to set or to choose."""
        configure(server, appendonly="no")
        careful, knowing = make(kind, server.dsn), make(kind, server.dsn, profile="volatile")

        with pytest.raises(ConfigurationError, match="appendonly is no and must be yes") as caught:
            await careful.open()
        assert 'profile="volatile"' in str(caught.value)
        assert [record for record in caplog.records if record.name == "postroom"] == []

        assert await knowing.open() is True
        await add(knowing)
        assert len(await knowing.claim(10, TERMS)) == 1
        [told] = [record for record in caplog.records if record.name == "postroom"]
        assert (told.levelno, "may be lost" in told.getMessage()) == (logging.WARNING, True)

    async def test_refuses_to_claim_where_it_was_not_opened_as_well(
        self, server: RedisServer, kind: type[AnyStore], make: Callable[..., Any]
    ) -> None:
        configure(server, appendonly="no")
        store = make(kind, server.dsn)
        await add(store)

        with pytest.raises(ConfigurationError, match="appendonly"):
            await store.claim(10, TERMS)

    def test_is_told_at_once_of_a_profile_that_nobody_knows(self, server: RedisServer, kind: type[AnyStore]) -> None:
        with pytest.raises(ConfigurationError, match="profile='safe' is unknown; pass one of durable, replicated"):
            kind(server.dsn, profile=cast("Any", "safe"))
        with pytest.raises(ConfigurationError, match="replicas=0 must be an int of at least 1"):
            kind(server.dsn, replicas=0)


@pytest.mark.parametrize("kind", STORES)
class TestStoreWithReplicas:
    @pytest.mark.requirement("G3")
    async def test_hands_out_nothing_that_a_failover_would_take_back(
        self, pair: RedisReplicated, kind: type[AnyStore], make: Callable[..., Any], hasty: Callable[..., Any]
    ) -> None:
        """What is not certain to be there is not published, and costs no attempt."""
        store = make(kind, pair.dsn, profile="replicated")
        impatient = hasty(make, kind, pair.dsn, profile="replicated")
        await impatient.open()
        await add(store)
        pair.replica.pause()

        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas confirmed in time"):
            await impatient.claim(10, TERMS)
        during: Stats = await store.stats()
        pair.replica.resume()
        [claim] = await store.claim(10, TERMS)

        assert (during.pending, during.processing) == (1, 0)
        assert claim.message.attempt == 1

    @pytest.mark.requirement("G8")
    async def test_settles_nothing_that_a_failover_would_take_back(
        self, pair: RedisReplicated, kind: type[AnyStore], make: Callable[..., Any], hasty: Callable[..., Any]
    ) -> None:
        """Told again, which is the same as told once."""
        store = make(kind, pair.dsn, profile="replicated", keep_delivered=timedelta(days=1))
        impatient = hasty(make, kind, pair.dsn, profile="replicated", keep_delivered=timedelta(days=1))
        await add(store)
        [claim] = await store.claim(10, TERMS)
        await impatient.open()
        pair.replica.pause()

        with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
            await impatient.settle([Settlement(claim, Delivered())])
        pair.replica.resume()

        assert await store.settle([Settlement(claim, Delivered())]) == []
        assert (await store.stats()).delivered == 1

    @pytest.mark.requirement("G2")
    async def test_waits_for_a_replica_that_is_gone_as_for_a_server_that_is_down(
        self, pair: RedisReplicated, kind: type[AnyStore], make: Callable[..., Any], hasty: Callable[..., Any]
    ) -> None:
        """A dispatcher survives errors of the store, and no errors of its settings, so this must be none."""
        store = hasty(make, kind, pair.dsn, profile="replicated")
        await store.open()
        await add(store)
        await without_replica(pair)

        for why in ("0 of 1 replicas confirmed", "connected replicas is 0 and must be at least 1"):
            with pytest.raises(StoreUnavailableError, match=why):
                await store.claim(10, TERMS)
        pair.replica.start()
        pair.wait_until_connected()
        patient = make(kind, pair.dsn, profile="replicated")

        assert len(await patient.claim(10, TERMS)) == 1

    @pytest.mark.requirement("G8", "S0-49", "S0-53")
    async def test_acknowledges_to_a_reader_once_that_is_safe(
        self, pair: RedisReplicated, kind: type[AnyStore], make: Callable[..., Any], hasty: Callable[..., Any]
    ) -> None:
        """Whoever has read `ack()` may forget the message."""
        heard: list[events.Event] = []
        store = hasty(make, kind, pair.dsn, profile="replicated")
        await make(kind, pair.dsn, profile="replicated").open()
        await add(store)

        async with OutboxSubscriber(store, listener=heard.append) as reading:
            delivery = await anext(reading)
            pair.replica.pause()
            acking = asyncio.create_task(delivery.ack())
            await until(lambda: any(is_about_settling(event) for event in heard), "the error of the store")
            was_done = acking.done()
            pair.replica.resume()
            await acking

        assert was_done is False
        assert (await store.stats()).processing == 0

    @pytest.mark.requirement("G1", "G12")
    async def test_tells_whoever_adds_whether_that_is_safe(
        self, pair: RedisReplicated, kind: type[AnyStore], make: Callable[..., Any], hasty: Callable[..., Any]
    ) -> None:
        """The answer of the server to a pipeline says only that the server itself has it."""
        store = make(kind, pair.dsn, profile="replicated")
        impatient = hasty(make, kind, pair.dsn, profile="replicated")

        async with store.confirmed():
            await add(store)
        await impatient.open()
        pair.replica.pause()
        with pytest.raises(StoreUnavailableError, match=r"0 of 1 replicas .* it may have been stored all the same"):
            async with impatient.confirmed():
                await add(store)


def is_about_settling(event: events.Event) -> bool:
    return isinstance(event, events.StoreFailed) and event.operation == "settle"


class TestTransaction:
    @pytest.mark.requirement("S0-36", "S3-29")
    async def test_does_not_begin_on_a_server_that_forgets(self, server: RedisServer) -> None:
        """Before anything is recorded, also with nothing but a client; unless somebody says so."""
        configure(server, appendonly="no")
        calls: list[Message] = []

        async def handle(received: Message) -> Sequence[Message]:
            calls.append(received)
            return []

        async with shop_on(server.dsn, profile="volatile") as shop:
            with pytest.raises(ConfigurationError, match="appendonly is no"):
                await chained([TransactionMiddleware(shop.client)], handle)(message())
            assert calls == []

            await chained([TransactionMiddleware(shop.transactions)], handle)(message())
            assert len(calls) == 1

    @pytest.mark.requirement("G8", "S0-60")
    @pytest.mark.parametrize(
        ("mode", "marking"), [("guarded", "pessimistic"), ("multi", "pessimistic"), ("guarded", "optimistic")]
    )
    async def test_is_not_acknowledged_until_replicas_have_it(
        self, pair: RedisReplicated, hasty: Callable[..., Any], mode: CommitMode, marking: Mode
    ) -> None:
        """Neither the message nor its duplicate, whose effect may be lost all the same."""
        async with shop_on(pair.dsn) as shop:
            handled, box = message(), inbox(mode=marking)
            patient = shop.also(shop.client, profile="replicated", mode=mode)
            impatient: RedisTransactions = hasty(shop.also, shop.client, profile="replicated", mode=mode)
            hand = handled_by(shop, box, counting(shop), impatient)
            await impatient.assurance.check()
            pair.replica.pause()

            outcomes = [await hand.deliver(handled), await hand.deliver(handled)]
            calls, during = hand.calls, await effects(shop)
            pair.replica.resume()
            outcome = await handled_by(shop, box, counting(shop), patient).deliver(handled)

            assert [type(outcome) for outcome in outcomes] == [Release, Release]
            assert all(isinstance(error, StoreUnavailableError) for error in hand.errors)
            assert (calls, during) == (1, (1, 0))
            assert (outcome, await effects(shop)) == (Delivered(), (1, 0))

    @pytest.mark.requirement("G8", "G12", "S0-30")
    async def test_of_which_nobody_knows_is_known_to_be_applied_once_replicas_have_it(
        self, pair: RedisReplicated, hasty: Callable[..., Any]
    ) -> None:
        """Whoever asks what became of a commit would acknowledge it then."""
        async with shop_on(pair.dsn) as shop, through_proxy(shop) as (proxy, client):
            second = timedelta(seconds=1)
            transactions: RedisTransactions = hasty(shop.also, client, profile="replicated", timeout=second)
            async with shop.transactions.begin() as transaction:  # so that the server knows the script
                await transaction.connection.incrby(shop.key("warm"), 1)
            await transactions.assurance.check()
            with pytest.raises(CommitUnknownError) as caught:
                async with transactions.begin() as transaction:
                    await transaction.connection.incrby(shop.key("effect"), 1)
                    proxy.black_hole("replies")
            unknown = caught.value
            unknown.witness = transaction.witness
            proxy.cut()
            proxy.heal()
            pair.replica.pause()

            with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                await unknown.resolve()
            pair.replica.resume()

            async def is_resolved() -> bool:
                with suppress(StoreUnavailableError):
                    return await unknown.resolve()
                return False

            await until(is_resolved, "the replica")
            assert await effects(shop) == (1, 0)

    @pytest.mark.requirement("G8")
    async def test_is_not_acknowledged_until_it_is_on_the_disk(
        self, private_valkey: ValkeyServer, hasty: Callable[..., Any]
    ) -> None:
        """With ``everysec`` the answer of the server says nothing about the disk."""
        configure(private_valkey, appendfsync="everysec")
        async with shop_on(private_valkey.dsn) as shop:
            committed: list[str] = []

            async def write(transactions: RedisTransactions, what: str) -> None:
                async with transactions.begin() as transaction:
                    transaction.after_commit(lambda: committed.append(what))
                    await current_pipeline(transaction.connection).set(shop.key(what), "1")

            async def is_safe() -> bool:
                with suppress(StoreUnavailableError):  # of a disk that has too much to do
                    await write(shop.transactions, "safe")
                return bool(committed)

            await until(is_safe, "the disk")
            impatient = hasty(shop.also, shop.client)
            await impatient.assurance.check()
            configure(private_valkey, appendfsync="no")  # it writes nothing by itself any more
            with pytest.raises(StoreUnavailableError, match="0 of 1 disks confirmed in time"):
                await write(impatient, "unsafe")

            assert committed == ["safe"]

    @pytest.mark.requirement("G8")
    async def test_is_not_acknowledged_by_a_server_that_was_started_again_meanwhile(
        self, private_valkey: ValkeyServer
    ) -> None:
        """What it had answered to before may be gone; the redelivery finds out, and takes effect once."""
        configure(private_valkey, appendfsync="everysec")
        async with shop_on(private_valkey.dsn) as shop:
            handled, box = message(), inbox()

            async def handle(received: Message) -> Sequence[Message]:
                await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
                private_valkey.restart()
                configure(private_valkey, appendfsync="everysec")
                return []

            hand = handled_by(shop, box, handle)
            outcome = await hand.deliver(handled)

            assert isinstance(outcome, Release)
            assert "started again" in str(hand.errors[0])
            assert await ended(shop, hand, handled) == (0, 0)  # there are neither events nor effects under its id
            assert (hand.calls, await effects(shop)) == (1, (1, 0))


@pytest.mark.requirement("S3-29")
def test_a_profile_can_be_chosen_for_a_url() -> None:
    """And says nothing to stores that keep everything anyway."""
    with pytest.raises(ConfigurationError, match="profile='safe' is unknown"):
        store_from_url("redis://localhost:6379", profile="safe")
    assert repr(store_from_url("sqlite:///shop.sqlite3", profile="durable")).startswith("SQLiteStore(")
