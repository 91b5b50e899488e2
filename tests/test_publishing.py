"""Whatever a publisher raises, every message gets an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from postroom import Backoff, Delivered, Dispatcher, Message, Outbox, Outcome, Publisher
from postroom import events as ev
from postroom.broker import Send
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
        async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
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
