"""A destination that is down delays nothing but its own messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from postroom import Backoff, Claim, ClaimTerms, Delivered, Dispatcher, Message, Outbox, Outcome, Publisher, Release
from postroom import events as ev
from postroom.broker import Send
from postroom.errors import BrokerUnavailableError
from postroom.stores import MemoryStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
LONG = 40 * SECOND
#: Longer than any of these tests: what waits for it would not be delivered.
NEVER = Backoff(base=3600 * SECOND, max=3600 * SECOND)


class Office:
    """A memory store, what its dispatcher reported, and which messages were sent."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.events: list[ev.Event] = []
        self.sent: list[Message] = []
        self.dispatcher: Dispatcher | None = None

    def add(self, count: int = 1, *, topic: str = "t", key: str | None = None, payload: bytes = b"{}") -> None:
        with self.store.transaction() as transaction:
            Outbox().add(transaction, [payload] * count, topic=topic, key=key)
        if self.dispatcher is not None:
            self.dispatcher.wake()

    @asynccontextmanager
    async def running(self, publisher: Publisher | Send, **options: object) -> AsyncIterator[Dispatcher]:
        settings: dict[str, object] = {
            "backoff": NEVER,
            "outage_backoff": NEVER,
            "poll_interval": 20 * MS,
            "listener": self.events.append,
        }
        self.dispatcher = Dispatcher(self.store, publisher, **{**settings, **options})  # type: ignore[arg-type]
        task = asyncio.create_task(self.dispatcher.run())
        try:
            yield self.dispatcher
        finally:
            await self.dispatcher.stop()
            await task

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def statuses(self, wanted: Callable[[Message], bool] = lambda _: True) -> list[str]:
        return [row.status for row in self.store.rows if wanted(row.message)]

    async def until_delivered(self, count: int) -> None:
        await until(
            lambda: self.statuses().count("delivered") == count, f"{count} messages being delivered", within=LONG
        )

    def function(self, handle: Callable[[Message], Outcome | None], hang: Callable[[Message], bool]) -> Send:
        """Return a function that delivers one message."""

        async def send(message: Message) -> Outcome | None:
            self.sent.append(message)
            if hang(message):
                await asyncio.Event().wait()
            return handle(message)

        return send

    def batches(self, handle: Callable[[Message], Outcome | None], hang: Callable[[Message], bool]) -> Publisher:
        """Return a publisher of batches; a message that hangs keeps the answers of its whole batch back."""
        office = self

        class Batches:
            async def publish(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
                office.sent += messages
                if any(hang(message) for message in messages):
                    await asyncio.Event().wait()
                return [handle(message) or Delivered() for message in messages]

        return Batches()


def nothing(_: Message) -> bool:
    return False


def taken(_: Message) -> None:
    return None


def refuses(wanted: Callable[[Message], bool]) -> Callable[[Message], Outcome | None]:
    return lambda message: Release() if wanted(message) else None


@pytest.mark.parametrize("shape", ["function", "batches"])
async def test_a_key_that_refuses_does_not_hold_up_other_keys_of_its_topic(shape: str) -> None:
    """Although the key was alone at first, so that nothing else could say that the topic works."""
    office = Office()
    publisher = getattr(office, shape)(refuses(lambda message: message.key == "bad"), nothing)
    office.add(3, key="bad")
    async with office.running(publisher):
        await until(lambda: bool(office.of(ev.BreakerOpened)), "the refusal being reported", within=LONG)
        for number in range(20):
            office.add(key=f"good {number}")
        office.add(20)
        await office.until_delivered(40)

    assert office.statuses(lambda message: message.key == "bad") == ["pending"] * 3
    assert {row.message.attempt for row in office.store.rows if row.message.key == "bad"} == {0}
    assert [message.id for message in office.sent].count(office.store.rows[0].message.id) == 1


@pytest.mark.parametrize("shape", ["function", "batches"])
async def test_a_key_that_hangs_does_not_hold_up_other_keys_of_its_topic(shape: str) -> None:
    """Silence of one key, which is alone at first, says nothing about the keys that come later."""
    office = Office()
    publisher = getattr(office, shape)(taken, lambda message: message.key == "bad")
    office.add(3, key="bad")
    async with office.running(publisher, publish_timeout=200 * MS):
        await until(lambda: bool(office.of(ev.BreakerOpened)), "the silence being reported", within=LONG)
        for number in range(20):
            office.add(key=f"good {number}")
        office.add(20)
        await office.until_delivered(40)

    assert {row.message.attempt for row in office.store.rows if row.message.key == "bad"} == {0}


class Counting(MemoryStore):
    """A store that counts its claims."""

    claims = 0

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        self.claims += 1
        return await super().claim(limit, terms)


async def test_thousands_of_destinations_that_are_down_are_left_alone() -> None:
    """Each is tried once, and then waits for its time."""
    store = Counting()
    office = Office(store)
    for number in range(1500):
        office.add(topic=f"down {number}")
    async with office.running(office.function(refuses(lambda _: True), nothing)):
        await until(lambda: len(office.of(ev.BreakerOpened)) >= 1500, "all destinations being found down", within=LONG)
        seen = store.claims
        await until(lambda: store.claims > seen + 10, "ten more claims", within=LONG)

    assert len(office.sent) == 1500


async def test_an_outage_is_reported_with_its_cause() -> None:
    office = Office()

    async def send(message: Message) -> None:
        raise BrokerUnavailableError("name of the host not found")

    office.add(topic="orders", key="k")
    async with office.running(send):
        await until(lambda: bool(office.of(ev.BreakerOpened)), "the outage being reported", within=LONG)

    [opened] = office.of(ev.BreakerOpened)
    assert isinstance(opened, ev.BreakerOpened)
    assert "name of the host not found" in opened.error
