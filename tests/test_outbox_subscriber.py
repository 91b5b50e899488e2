"""The outbox as a subscriber: a stream of deliveries."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from postroom import ClaimTerms, Delivery, Dispatcher, Outbox, OutboxSubscriber, Release, Settlement, events
from postroom.brokers import MemoryBroker
from postroom.errors import SchemaMissingError, StoreUnavailableError
from postroom.stores import MemoryStore, SQLiteStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)


def add(store: MemoryStore, count: int, *, key: str | None = None) -> None:
    with store.transaction() as transaction:
        Outbox().add(transaction, [{"n": n} for n in range(count)], topic="t", key=key)


def statuses(store: MemoryStore) -> list[str]:
    return [row.status for row in store.rows]


@pytest.mark.requirement("S0-49", "S1-30", "S1-32")
async def test_an_acknowledged_delivery_is_recorded_when_ack_returns() -> None:
    """Ack marks the row as delivered, and has done so when it returns."""
    store = MemoryStore()
    add(store, 2)
    async with OutboxSubscriber(store) as deliveries:
        delivery = await anext(deliveries)
        await delivery.ack()
        assert statuses(store) == ["delivered", "processing"]

    assert statuses(store) == ["delivered", "pending"]


@pytest.mark.requirement("S1-32", "S1-36")
async def test_a_nacked_delivery_comes_again_after_its_delay() -> None:
    """Nack leaves the message for later, with an attempt spent and a wait."""
    store, attempts = MemoryStore(), list[int]()
    add(store, 1)
    async with OutboxSubscriber(store, poll_interval=10 * MS) as deliveries:
        async for delivery in deliveries:
            attempts.append(delivery.message.attempt)
            if delivery.message.attempt == 3:
                await delivery.ack()
                break
            await delivery.nack("not now", delay=1 * MS)

    assert attempts == [1, 2, 3]
    assert statuses(store) == ["delivered"]


async def test_a_reader_gets_what_a_dispatcher_has_parked_and_everything_else() -> None:
    """A reader has no destination that could be down, so nothing waits for one."""
    store = MemoryStore()
    add(store, 300)
    [parked] = await store.claim(1, ClaimTerms(worker=uuid4()))
    await store.settle([Settlement(parked, Release(destination="t"))])
    seen: set[UUID] = set()

    async with OutboxSubscriber(store, poll_interval=10 * MS) as deliveries, asyncio.timeout(60):
        async for delivery in deliveries:
            await delivery.ack()
            seen.add(delivery.message.id)
            if len(seen) == 300:
                break

    assert parked.message.id in seen


@pytest.mark.requirement("S2-04")
async def test_a_rejected_delivery_is_dead() -> None:
    """The reader can say that a message will never succeed."""
    store = MemoryStore()
    add(store, 1)
    async with OutboxSubscriber(store) as deliveries:
        await (await anext(deliveries)).reject("no such customer")

    assert (store.rows[0].status, store.rows[0].error) == ("dead", "no such customer")


async def test_the_first_settlement_counts() -> None:
    """Ack after nack, or twice, does nothing more."""
    store = MemoryStore()
    add(store, 1)
    async with OutboxSubscriber(store) as deliveries:
        delivery = await anext(deliveries)
        await delivery.ack()
        await delivery.reject("too late")

    assert statuses(store) == ["delivered"]
    assert "Delivered" in repr(delivery)


@pytest.mark.requirement("S1-35")
async def test_rows_in_flight_are_not_emitted_again() -> None:
    """A delivery that is still open is not handed out a second time, however long it takes."""
    store, lease = MemoryStore(), 150 * MS
    add(store, 1)
    async with OutboxSubscriber(store, lease=lease, poll_interval=10 * MS) as deliveries:
        delivery = await anext(deliveries)
        first = store.rows[0].locked_until
        assert first is not None
        await until(lambda: (store.rows[0].locked_until or first) > first + lease, "the lease being renewed twice")
        assert await store.claim(1, ClaimTerms(worker=uuid4())) == []
        await delivery.ack()

    assert store.rows[0].message.token == 1


@pytest.mark.requirement("S1-30", "S1-37")
async def test_closing_ends_the_iteration_and_releases_what_is_open() -> None:
    """It ends cleanly; open deliveries go back, acknowledged ones are recorded."""
    store, seen = MemoryStore(), list[Delivery]()
    add(store, 3)
    deliveries = OutboxSubscriber(store)

    async def read() -> None:
        async for delivery in deliveries:
            seen.append(delivery)
            if len(seen) == 3:
                await delivery.ack()

    reading = asyncio.create_task(read())
    await until(lambda: statuses(store).count("delivered") == 1, "one delivery being recorded")
    await deliveries.aclose()
    await deliveries.aclose()
    await reading

    assert sorted(statuses(store)) == ["delivered", "pending", "pending"]
    assert [row.message.attempt for row in store.rows if row.status == "pending"] == [0, 0]


@pytest.mark.requirement("S1-35")
async def test_readers_of_one_outbox_compete() -> None:
    """Each message goes to one of them."""
    store = MemoryStore()
    add(store, 20)
    async with OutboxSubscriber(store, batch=10) as one, OutboxSubscriber(store, batch=10) as other:
        seen = [[await asyncio.wait_for(anext(reader), 60) for _ in range(10)] for reader in (one, other)]
        for deliveries in seen:
            for delivery in deliveries:
                await delivery.ack()

    first, second = ({delivery.message.id for delivery in deliveries} for deliveries in seen)
    assert first | second == {row.message.id for row in store.rows}
    assert not first & second


async def test_a_dispatcher_and_a_broker_take_every_message_to_every_group() -> None:
    """What the page says for two services that both need every message."""
    store, broker = MemoryStore(), MemoryBroker()
    subscriptions = [broker.subscribe("t", group=group) for group in ("billing", "stock")]
    add(store, 20)

    await Dispatcher(store, broker).run(until_idle=True)

    for subscription in subscriptions:
        async with subscription as deliveries:
            reader = aiter(deliveries)
            seen = {(await asyncio.wait_for(anext(reader), 60)).message.id for _ in range(20)}
        assert seen == {row.message.id for row in store.rows}


@pytest.mark.requirement("G6")
async def test_messages_of_a_key_are_handed_out_one_after_the_other() -> None:
    """The second of a key appears when the first is acknowledged."""
    store = MemoryStore()
    add(store, 3, key="k")
    numbers: list[bytes] = []
    async with OutboxSubscriber(store) as deliveries:
        for _ in range(3):
            delivery = await anext(deliveries)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(deliveries), 0.05)
            numbers.append(delivery.message.payload)
            await delivery.ack()

    assert numbers == [b'{"n":0}', b'{"n":1}', b'{"n":2}']


@pytest.mark.requirement("S1-04")
async def test_what_no_retry_can_mend_is_raised_to_the_reader(sqlite_path: str) -> None:
    """A subscriber creates no tables; a missing schema is raised to its reader."""
    store = SQLiteStore(sqlite_path)
    deliveries = OutboxSubscriber(store)

    with pytest.raises(SchemaMissingError, match="postroom schema apply"):
        await anext(deliveries)

    await store.close()


@pytest.mark.requirement("S1-30")
async def test_as_many_deliveries_may_be_open_as_the_batch_says() -> None:
    """A reader may gather several before it acknowledges, also when they arrive one by one."""
    store = MemoryStore()
    async with OutboxSubscriber(store, batch=10, poll_interval=5 * MS) as deliveries:
        gathered = list[Delivery]()
        for _ in range(10):
            add(store, 1)
            gathered.append(await asyncio.wait_for(anext(deliveries), 10))
        for delivery in gathered:
            await delivery.ack()

    assert statuses(store) == ["delivered"] * 10


@pytest.mark.requirement("S1-30")
async def test_a_delivery_that_a_cancelled_reader_missed_goes_to_the_next() -> None:
    """A time limit around reading loses nothing."""
    store = MemoryStore()
    async with OutboxSubscriber(store, poll_interval=5 * MS) as deliveries:
        for number in range(50):
            reading = asyncio.ensure_future(anext(deliveries))
            add(store, 1)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            await asyncio.sleep(0.002 * (number % 5))
            if reading.done():
                await reading.result().ack()
                continue
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await reading).ack()
        while statuses(store).count("delivered") < 50:
            await (await asyncio.wait_for(anext(deliveries), 10)).ack()


@pytest.mark.requirement("S1-37")
async def test_nothing_is_handed_out_after_closing_and_a_late_ack_says_so() -> None:
    """What was released belongs to others again; an ack without effect is an error, not a promise."""
    store = MemoryStore()
    add(store, 3)
    deliveries = OutboxSubscriber(store)
    delivery = await anext(deliveries)
    await deliveries.aclose()

    with pytest.raises(StopAsyncIteration):
        await anext(deliveries)
    with pytest.raises(StoreUnavailableError, match="will come again"):
        await delivery.ack()
    assert statuses(store) == ["pending"] * 3


@pytest.mark.requirement("S1-30")
async def test_an_open_suspect_does_not_keep_a_subscriber_from_closing() -> None:
    """Closing does not wait for the reader."""
    ahead = timedelta(0)
    store = MemoryStore(clock=lambda: datetime.now(UTC) + ahead)
    add(store, 1)
    for _ in range(3):
        await store.claim(1, ClaimTerms(worker=uuid4()))
        ahead += timedelta(minutes=1)
    async with OutboxSubscriber(store) as deliveries:
        assert (await anext(deliveries)).message.attempt == 4

    assert statuses(store) == ["pending"]


async def test_a_released_delivery_comes_again_while_others_are_held() -> None:
    """It does not wait for the rest of its batch."""
    store = MemoryStore()
    add(store, 2)
    async with OutboxSubscriber(store, poll_interval=10 * MS) as deliveries:
        one, two = await anext(deliveries), await anext(deliveries)
        await one.release()

        async with asyncio.timeout(10):
            again = await anext(deliveries)

        assert (again.message.id, again.message.attempt) == (one.message.id, 1)
        assert two.outcome is None


@pytest.mark.requirement("G13")
async def test_who_gives_a_message_back_does_not_stop_its_topic() -> None:
    """Nothing is down, so no breaker opens, and the next comes at once."""
    store, seen = MemoryStore(), list[events.Event]()
    add(store, 3)
    async with OutboxSubscriber(store, batch=1, poll_interval=10 * MS, listener=seen.append) as deliveries:
        async with asyncio.timeout(10):
            for _ in range(6):
                await (await anext(deliveries)).release()
            for _ in range(3):
                await (await anext(deliveries)).ack()

    assert [event for event in seen if isinstance(event, events.BreakerOpened)] == []
    assert statuses(store) == ["delivered"] * 3
