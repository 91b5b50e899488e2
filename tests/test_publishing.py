"""Whatever a publisher raises, every message gets an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from postroom import Backoff, Delivered, Dispatcher, Message, Outbox, Outcome, Publisher
from postroom import events as ev
from postroom.broker import Each, Send
from postroom.custody import Custody
from postroom.stores import MemoryStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
LONG = 40 * SECOND


class Panic(BaseException):
    """What an extension module raises instead of ending the process."""


RAISED = [
    Panic("index out of bounds"),
    GeneratorExit(),
    BaseExceptionGroup("two", [Panic("one")]),
    asyncio.CancelledError(),
]


def failing(error: BaseException, times: int) -> tuple[Send, Publisher]:
    left = times

    async def send(message: Message) -> None:
        nonlocal left
        if left:
            left -= 1
            raise error

    class Batches:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            await send(messages[0])
            return [Delivered()] * len(messages)

    return send, Batches()


def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    with store.transaction() as transaction:
        Outbox().add(transaction, [{"n": n} for n in range(count)], topic="t")
    return store


@pytest.mark.parametrize("shape", [0, 1], ids=["function", "batches"])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
async def test_whatever_a_publisher_raises_its_messages_are_tried_again(error: BaseException, shape: int) -> None:
    store, seen = filled(12), list[ev.Event]()
    quick = Backoff(base=MS, max=10 * MS)
    options = {"backoff": quick, "outage_backoff": quick, "batch": 4, "poll_interval": 20 * MS}
    publisher = failing(error, 6)[shape]
    dispatcher = Dispatcher(store, publisher, listener=seen.append, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: {row.status for row in store.rows} == {"delivered"}, "everything being delivered", within=LONG)
    await dispatcher.stop()
    await running

    assert any(isinstance(event, ev.Retried | ev.BreakerOpened) for event in seen)


@pytest.mark.parametrize("shape", [0, 1], ids=["function", "batches"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["KeyboardInterrupt", "SystemExit"])
def test_a_publisher_may_end_the_program(error: BaseException, shape: int) -> None:
    """What was confirmed is recorded, the rest is given back with its attempt, and run() raises it."""
    store, seen, confirmed = filled(12), list[ev.Event](), list[Message]()

    async def send(message: Message) -> None:
        if len(confirmed) >= 3:
            raise error
        confirmed.append(message)

    class Batches:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            if confirmed:
                raise error
            confirmed.extend(messages)
            return [Delivered()] * len(messages)

    publisher: Send | Publisher = [send, Batches()][shape]  # type: ignore[assignment]
    options = {"batch": 4, "concurrency": 1, "batches_in_flight": 1, "poll_interval": 20 * MS}
    dispatcher = Dispatcher(store, publisher, listener=seen.append, **options)  # type: ignore[arg-type]

    with pytest.raises(type(error)):
        asyncio.run(dispatcher.run())

    delivered = {row.message.id for row in store.rows if row.status == "delivered"}
    assert delivered == {message.id for message in confirmed}
    assert [(row.status, row.message.attempt) for row in store.rows if row.message.id not in delivered] == [
        ("pending", 0)
    ] * (12 - len(confirmed))
    assert [event for event in seen if isinstance(event, ev.Stopped)]


def test_a_coroutine_that_is_closed_from_outside_ends() -> None:
    """Without a loop nothing can be awaited any more, so the request to end must pass."""

    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    publishing = Each(send).send(Message(topic="t", payload=b""), "t")

    async def begin() -> None:
        context = asyncio.current_task()
        assert context is not None
        publishing.send(None)

    asyncio.run(begin())

    publishing.close()


async def test_a_listener_that_panics_does_not_stop_delivery() -> None:
    store = filled(3)

    def listener(event: ev.Event) -> None:
        raise Panic

    await Dispatcher(store, failing(Panic(), 0)[0], listener=listener).run(until_idle=True)

    assert {row.status for row in store.rows} == {"delivered"}


async def test_a_function_that_cannot_name_a_destination_is_reported_and_the_topic_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = filled(3)

    def destination(message: Message) -> str:
        raise Panic

    await Dispatcher(store, failing(Panic(), 0)[0], destination=destination).run(until_idle=True)

    assert {row.status for row in store.rows} == {"delivered"}
    assert "naming the destination" in caplog.text


def test_a_publisher_that_ends_the_program_twice_does_not_cut_off_what_is_under_way() -> None:
    """What is confirmed within the grace is recorded, however many calls raise."""
    store, confirmed, arrived, both = filled(3), list[Message](), list[Message](), asyncio.Event()

    async def send(message: Message) -> None:
        if message.id == store.rows[0].message.id:
            await both.wait()
            await asyncio.sleep(0.05)
            confirmed.append(message)
            return
        arrived.append(message)
        if len(arrived) == 2:
            both.set()
        await both.wait()
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        asyncio.run(Dispatcher(store, send, poll_interval=20 * MS).run())

    delivered = [row.message.id for row in store.rows if row.status == "delivered"]
    assert delivered == [message.id for message in confirmed]
    assert len(delivered) == 1


async def test_a_message_whose_lease_ends_before_it_is_sent_keeps_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it was not renewed in time says nothing about the message, which was never sent."""
    store, seen, refused = filled(3), list[ev.Event](), list[Message]()

    def is_safe_later(_: Custody, message: Message) -> bool:
        refused.append(message)
        return len(refused) > 3

    monkeypatch.setattr(Custody, "is_safe", is_safe_later)
    dispatcher = Dispatcher(store, failing(Panic(), 0)[0], max_attempts=1, poll_interval=20 * MS, listener=seen.append)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: len(refused) > 3, "another try", within=LONG)
    await until(lambda: not any(row.status == "pending" for row in store.rows), "everything being settled", within=LONG)
    await dispatcher.stop()
    await running

    assert {row.status for row in store.rows} == {"delivered"}
    assert not [event for event in seen if isinstance(event, ev.PublishFailed)]


async def test_a_batch_gives_its_place_among_new_destinations_back() -> None:
    """Also one that fails; a place that is kept would in the end keep out every other new destination."""
    store = filled(12)
    quick = Backoff(base=MS, max=10 * MS)
    dispatcher = Dispatcher(
        store,
        failing(LookupError("no route"), 6)[0],
        backoff=quick,
        outage_backoff=quick,
        batch=4,
        poll_interval=20 * MS,
    )
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: {row.status for row in store.rows} == {"delivered"}, "everything being delivered", within=LONG)
    slots = dispatcher._publishing.slots  # noqa: SLF001

    await until(lambda: not slots, "the end of all batches")
    await dispatcher.stop()
    await running
