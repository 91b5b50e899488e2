"""A destination that is down delays nothing but its own messages."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from postroom import (
    Backoff,
    Claim,
    ClaimTerms,
    Delivered,
    Dispatcher,
    Message,
    Outbox,
    Outcome,
    Publisher,
    Release,
    Settlement,
)
from postroom import events as ev
from postroom.broker import Send
from postroom.destination import Naming
from postroom.errors import BrokerUnavailableError
from postroom.store import MAX_DESTINATION, Features
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
            async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
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
    """None is tried twice before its time, and what was not tried yet waits in the store as well."""
    store = Counting()
    office = Office(store)
    for number in range(1500):
        office.add(topic=f"down {number}")
    async with office.running(office.function(refuses(lambda _: True), nothing)):
        await until(lambda: all(row.destination for row in store.rows), "everything being parked", within=LONG)
        seen = store.claims
        await until(lambda: store.claims > seen + 10, "ten more claims", within=LONG)

    assert max(Counter(message.id for message in office.sent).values()) == 1


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


QUICK = Backoff(base=MS, max=10 * MS)


async def test_a_destination_that_is_down_costs_a_few_calls_and_not_one_for_each_message() -> None:
    """What was claimed together with the messages that failed is parked without being sent."""
    office = Office()
    office.add(500, topic="down")
    async with office.running(office.function(refuses(lambda _: True), nothing)):
        await until(lambda: len(office.store.rows.parked) > 0, "messages being parked", within=LONG)
        await until(lambda: office.statuses() == ["pending"] * 500, "everything being given back", within=LONG)

    assert 3 <= len(office.sent) <= 6
    assert {row.message.attempt for row in office.store.rows} == {0}
    assert sum(row.destination == "down" for row in office.store.rows) >= 494


async def test_after_a_failed_probe_a_different_message_is_the_next() -> None:
    """One that can never be sent does not stand for its destination."""
    office = Office()
    office.add(6, topic="down")
    async with office.running(office.function(refuses(lambda _: True), nothing), outage_backoff=QUICK):
        await until(lambda: len(office.sent) > 20, "a number of probes", within=LONG)

    probes = [message.id for message in office.sent[3:]]
    assert len(set(probes)) >= 4  # the others wait for a part of the destination, which is down as a whole
    assert all(one != other for one, other in itertools.pairwise(probes))


async def test_there_are_at_most_twenty_probes_a_second() -> None:
    """However many destinations are down, and however short their pause."""
    office, times = Office(), list[float]()

    async def send(message: Message) -> None:
        office.sent.append(message)
        times.append(time.monotonic())
        raise BrokerUnavailableError("connection refused")

    for number in range(40):
        office.add(topic=f"down {number}")
    async with office.running(send, outage_backoff=QUICK):
        await until(lambda: len(times) >= 40 + 60, "sixty probes", within=LONG)

    probes = times[40:]
    assert len(probes) <= 20 * (probes[-1] - probes[0]) + 2


async def parked(store: MemoryStore, destination: str, limit: int = 100) -> None:
    """Leave messages behind as a dispatcher does that has ended."""
    claims = await store.claim(limit, ClaimTerms(worker=uuid4()))
    await store.settle([Settlement(claim, Release(destination=destination)) for claim in claims])


@pytest.mark.parametrize("name", ["t", "t\x1fkey", "a name that nothing leads to any more"])
async def test_what_another_dispatcher_parked_is_delivered(name: str) -> None:
    office = Office()
    office.add(20)
    await parked(office.store, name)
    async with office.running(office.function(taken, nothing)):
        await office.until_delivered(20)


async def test_a_run_until_idle_tries_what_is_parked() -> None:
    office = Office()
    office.add(20)
    await parked(office.store, "t")
    await Dispatcher(office.store, office.function(taken, nothing)).run(until_idle=True)

    assert office.statuses() == ["delivered"] * 20


async def test_a_run_until_idle_ends_while_a_destination_is_down() -> None:
    office = Office()
    office.add(20, topic="down")
    office.add(20, topic="up")
    async with asyncio.timeout(60):
        await Dispatcher(
            office.store,
            office.function(refuses(lambda message: message.topic == "down"), nothing),
            outage_backoff=NEVER,
        ).run(until_idle=True)

    assert office.statuses(lambda message: message.topic == "up") == ["delivered"] * 20


class Webhooks:
    """A publisher that names the host of each message."""

    def __init__(self, office: Office) -> None:
        self._office = office

    def destination(self, message: Message) -> str:
        return message.payload.decode()

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self._office.sent += messages
        return [Release() if message.payload == b"down.example" else Delivered() for message in messages]


@pytest.mark.parametrize("shape", ["publisher", "function"])
async def test_a_publisher_may_name_the_destination_of_a_message(shape: str) -> None:
    """Messages of one topic go to several hosts, of which one is down."""
    office = Office()
    webhooks = Webhooks(office)

    async def send(message: Message) -> Outcome | None:
        return (await webhooks.publish_batch([message]))[0]

    office.add(10, payload=b"down.example")
    options = {"destination": webhooks.destination} if shape == "function" else {}
    async with office.running(webhooks if shape == "publisher" else send, **options):
        await until(lambda: bool(office.of(ev.BreakerOpened)), "the outage", within=LONG)
        office.add(30, payload=b"up.example")
        await office.until_delivered(30)

    assert {row.destination for row in office.store.rows if row.status == "pending"} >= {"down.example"}
    assert any(isinstance(event, ev.BreakerOpened) and event.destination == "down.example" for event in office.events)


@pytest.mark.parametrize("name", ["x" * 201, "x" * 5000, "with\nnewline", "\ud800", "nul\x00"])
def test_a_name_that_a_store_could_not_keep_is_shortened(name: str) -> None:
    naming = Naming(lambda _: name)
    message = Message(topic="t", payload=b"", key="k" * 255)

    assert len(naming.destination(message)) <= MAX_DESTINATION
    assert naming.destination(message).isprintable()
    assert naming.destination(message) == naming.destination(message)
    assert naming.destination(message) != Naming(lambda _: name + "!").destination(message)
    assert len(naming.part(message)) <= MAX_DESTINATION
    assert naming.part(message) != naming.part(replace(message, key="k" * 254))


@pytest.mark.parametrize("named", [None, "", 5])
def test_a_name_that_is_none_is_replaced_by_the_topic(named: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: ANN401
    assert Naming(lambda _: named).destination(Message(topic="orders", payload=b"")) == "orders"
    assert "destination() must return" in caplog.text


async def test_destinations_that_hang_from_the_start_leave_room_for_others() -> None:
    """Those that have never answered share half of the calls, so the other half is free."""
    office, under_way, most = Office(), 0, 0

    async def send(message: Message) -> None:
        nonlocal under_way, most
        if message.topic.startswith("hangs"):
            under_way += 1
            most = max(most, under_way)
            await asyncio.Event().wait()

    office.add(topic="works")
    options = {"publish_timeout": 600 * SECOND, "lease": 1200 * SECOND, "shutdown_grace": MS}
    async with office.running(send, concurrency=10, **options):
        await office.until_delivered(1)
        for number in range(100):
            office.add(3, topic=f"hangs {number}")
        await until(lambda: under_way > 0, "the first hanging", within=LONG)
        office.add(50, topic="works")
        await office.until_delivered(51)

    assert most <= 5


def most_recent(office: Office) -> set[str]:
    """Return the topics of which a message was delivered."""
    return {row.message.topic for row in office.store.rows if row.status == "delivered"}


async def test_new_destinations_beyond_the_slots_are_tried_as_soon_as_there_is_room() -> None:
    """A hundred healthy ones with room for one are all served."""
    office = Office()
    for number in range(100):
        office.add(2, topic=f"new {number}")
    async with office.running(office.function(taken, nothing), concurrency=2):
        await office.until_delivered(200)


async def test_a_message_that_hung_in_a_batch_travels_alone() -> None:
    """It does not take the same neighbours, or others, with it again and again."""
    office, calls = Office(), list[list[str | None]]()

    class Broker:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            calls.append([message.key for message in messages])
            if any(message.key == "bad" for message in messages):
                await asyncio.Event().wait()
            return [Delivered()] * len(messages)

    office.add(2, key="bad")
    for number in range(5):
        office.add(key=f"good {number}")
    async with office.running(
        Broker(), publish_timeout=200 * MS, outage_backoff=QUICK, backoff=QUICK, max_attempts=1000
    ):
        await office.until_delivered(5)
        for number in range(5, 25):
            office.add(key=f"good {number}")
        await office.until_delivered(25)
        await until(lambda: sum("bad" in keys for keys in calls) >= 3, "the bad one being tried again", within=LONG)

    together = [keys for keys in calls if "bad" in keys and set(keys) != {"bad"}]
    assert len(together) <= 1


async def test_messages_behind_a_backlog_that_cannot_be_sent_are_found_at_once() -> None:
    """Every other claim begins with the newest while most of what comes has to wait."""
    store = Counting()
    office = Office(store)
    office.add(5000, topic="down")
    async with office.running(office.function(refuses(lambda m: m.topic == "down"), nothing), batch=50):
        await until(lambda: bool(office.of(ev.BreakerOpened)), "the outage", within=LONG)
        office.add(topic="up")
        seen = store.claims
        await until(lambda: "up" in most_recent(office), "the message behind them", within=LONG)
        needed = store.claims - seen

    assert needed <= 200  # where 5000 rows are claimed ten at a time


class Unparking(MemoryStore):
    """A store that cannot park."""

    features = Features(durable=False, parks=False)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        assert all(getattr(one.outcome, "destination", None) is None for one in settlements)
        return await super().settle(settlements)


async def test_a_store_that_cannot_park_gives_messages_back_with_a_delay() -> None:
    office, is_down = Office(Unparking()), True
    office.add(30)
    async with office.running(office.function(refuses(lambda _: is_down), nothing), outage_backoff=QUICK):
        await until(lambda: len(office.sent) > 10, "a number of probes", within=LONG)
        is_down = False
        await office.until_delivered(30)

    assert {row.message.attempt for row in office.store.rows} == {1}


async def test_more_breakers_than_are_kept_lose_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parked for a breaker that was forgotten is found in the store."""
    monkeypatch.setattr("postroom.breakers.MAX_BREAKERS", 5)
    monkeypatch.setattr("postroom.probing.WALK_EVERY", 0.05)
    office, is_down = Office(), True
    for number in range(30):
        office.add(topic=f"down {number}")
    async with office.running(office.function(refuses(lambda _: is_down), nothing), outage_backoff=QUICK):
        await until(lambda: len(office.sent) >= 30, "all being tried", within=LONG)
        is_down = False
        await office.until_delivered(30)


async def test_silence_is_judged_by_what_other_calls_heard_meanwhile() -> None:
    """A key that hangs while other keys of its topic are answered has failed, and spends attempts."""
    office = Office()

    async def send(message: Message) -> None:
        if message.key == "bad":
            for number in range(3):
                office.add(key=f"good {number}")
            await asyncio.Event().wait()

    office.add(key="bad")
    async with office.running(send, publish_timeout=2 * SECOND):
        await until(lambda: bool(office.of(ev.Retried)), "the failure being reported", within=LONG)

    assert office.store.rows[0].message.attempt == 1


async def test_destinations_that_answered_and_then_hang_leave_room_for_others() -> None:
    """More of them than calls may run at once: the healthy messages do not wait until they are given up."""
    office, hanging = Office(), asyncio.Event()
    publisher = office.function(taken, lambda message: hanging.is_set() and message.topic != "healthy")
    async with office.running(
        publisher, concurrency=20, lease=7200 * SECOND, publish_timeout=3600 * SECOND, shutdown_grace=MS
    ):
        office.add(topic="healthy")
        for number in range(59):
            office.add(topic=f"t {number}")
        await office.until_delivered(60)
        hanging.set()
        for number in range(59):
            office.add(5, topic=f"t {number}")
        await until(lambda: len(office.sent) >= 80, "the first calls hanging", within=LONG)
        office.add(50, topic="healthy")
        await office.until_delivered(110)

    assert max(Counter(message.topic for message in office.sent if message.topic != "healthy").values()) <= 1 + 5


async def test_parked_messages_of_a_destination_that_was_renamed_are_sent() -> None:
    office, worker = Office(), uuid4()
    office.add(40)
    claims = await office.store.claim(40, ClaimTerms(worker=worker))
    await office.store.settle([Settlement(claim, Release(destination="old name")) for claim in claims])

    dispatcher = Dispatcher(office.store, office.function(taken, nothing), destination=lambda _: "new name")
    await asyncio.wait_for(dispatcher.run(until_idle=True), LONG.total_seconds())

    assert office.statuses() == ["delivered"] * 40


async def test_dispatchers_of_two_tenants_leave_each_others_parked_messages_alone() -> None:
    """One of them knows that the destination is down for its tenant; the other could not claim what it made due."""
    office, tenants = Office(), (uuid4(), uuid4())
    down = office.function(refuses(lambda _: True), nothing)
    with office.store.transaction() as transaction:
        Outbox().add(transaction, [b"{}"] * 10, topic="t", tenant_id=tenants[0])
    async with office.running(down, tenant_id=tenants[0]):
        await until(lambda: all(row.destination for row in office.store.rows), "all being parked", within=LONG)
    parked = {row.message.id: row.destination for row in office.store.rows}

    other = Dispatcher(office.store, office.function(taken, nothing), tenant_id=tenants[1])
    await asyncio.wait_for(other.run(until_idle=True), LONG.total_seconds())
    assert {row.message.id: row.destination for row in office.store.rows} == parked

    async with office.running(office.function(taken, nothing), tenant_id=tenants[0], outage_backoff=QUICK):
        await office.until_delivered(10)
