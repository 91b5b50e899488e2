"""What may be passed as a publisher: functions and objects, async and plain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from postroom import (
    Backoff,
    Consumer,
    Dead,
    Delivered,
    Dispatcher,
    Each,
    Message,
    Outbox,
    Outcome,
    Publisher,
    Release,
    Retry,
    Router,
)
from postroom import events as ev
from postroom.brokers import MemoryBroker
from postroom.dead_letters import PublishedDeadLetters
from postroom.errors import BrokerUnavailableError, ConfigurationError, PublishUnknownError, RejectError
from postroom.outputs import OutputError, send_outputs
from postroom.publisher import AnyPublisher, as_publisher
from postroom.store import Claim, ClaimTerms
from postroom.stores import MemoryStore, SQLiteStore
from postroom.testing.published import SQLiteOutbox
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
QUICK = Backoff(base=MS, max=10 * MS)
#: How publishers call their threads.
THREAD = "postroom-publisher"
MESSAGE = Message(topic="t", payload=b"")


class Office:
    """A store in memory, what its dispatcher reported, and which messages arrived."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.events: list[ev.Event] = []
        self.arrived: list[Message] = []

    def add(self, count: int = 1, *, topic: str = "t", key: str | None = None) -> None:
        with self.store.transaction() as transaction:
            Outbox().add(transaction, [{"n": n} for n in range(count)], topic=topic, key=key)

    def dispatcher(self, publisher: AnyPublisher, **options: object) -> Dispatcher:
        settings: dict[str, object] = {"backoff": QUICK, "outage_backoff": QUICK, "poll_interval": 20 * MS}
        settings |= {"listener": self.events.append, **options}
        return Dispatcher(self.store, publisher, **settings)  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self, publisher: AnyPublisher, **options: object) -> AsyncIterator[Dispatcher]:
        dispatcher = self.dispatcher(publisher, **options)
        task = asyncio.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            await dispatcher.stop()
            await task

    def statuses(self) -> list[str]:
        return [row.status for row in self.store.rows]

    async def until_delivered(self, count: int) -> None:
        await until(lambda: self.statuses().count("delivered") == count, f"the delivery of {count} messages")

    def reported(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def office() -> Office:
    """Return an office without messages."""
    return Office()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return what plain publishers wait for; in the end they need not wait any more."""
    event = threading.Event()
    yield event
    event.set()


# -- what is accepted --------------------------------------------------------------------------------------------

Take = Callable[[Message], object]


def async_function(take: Take) -> AnyPublisher:
    async def send(message: Message) -> None:
        take(message)

    return send


def plain_function(take: Take) -> AnyPublisher:
    def send(message: Message) -> None:
        take(message)

    return send


def lambda_around_async(take: Take) -> AnyPublisher:
    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        take(message)

    return lambda message: send(message)  # noqa: PLW0108 -- what a lambda hides is what is tested


def partial_of_async(take: Take) -> AnyPublisher:
    async def send(address: str, message: Message) -> None:
        await asyncio.sleep(0)
        take(message)

    return partial(send, "address")


def partial_of_plain(take: Take) -> AnyPublisher:
    def send(address: str, message: Message) -> None:
        take(message)

    return partial(send, "address")


def async_callable(take: Take) -> AnyPublisher:
    class Sender:
        async def __call__(self, message: Message) -> None:
            await asyncio.sleep(0)
            take(message)

    return Sender()


def plain_callable(take: Take) -> AnyPublisher:
    class Sender:
        def __call__(self, message: Message) -> None:
            take(message)

    return Sender()


def async_publish(take: Take) -> AnyPublisher:
    class Client:
        async def publish(self, message: Message) -> None:
            await asyncio.sleep(0)
            take(message)

    return Client()


def plain_publish(take: Take) -> AnyPublisher:
    class Client:
        def publish(self, message: Message) -> None:
            take(message)

    return Client()


def publish_batch(take: Take) -> AnyPublisher:
    class Client:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            for message in messages:
                take(message)
            return [Delivered()] * len(messages)

    return Client()


def both_methods(take: Take) -> AnyPublisher:
    class Client:
        def publish(self, message: Message) -> None:
            raise AssertionError("publish_batch wins")

        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            for message in messages:
                take(message)
            return [Delivered()] * len(messages)

    return Client()


PLAIN = (plain_function, partial_of_plain, plain_callable, plain_publish)
AWAITED = (async_function, partial_of_async, async_callable, async_publish, publish_batch, both_methods)
SHAPES = (*PLAIN, *AWAITED, lambda_around_async)


@pytest.mark.requirement("S4-11")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_every_shape_delivers_each_message_once(office: Office, shape: Callable[[Take], AnyPublisher]) -> None:
    """An object with ``publish(msg)`` is a publisher, and so are functions; async or plain."""
    office.add(3)

    await office.dispatcher(shape(office.arrived.append)).run(until_idle=True)

    # Without a key they have no order, and threads finish as they come.
    assert sorted(message.payload for message in office.arrived) == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert office.statuses() == ["delivered"] * 3


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
async def test_plain_ones_run_on_threads_and_async_ones_on_the_loop(
    office: Office, shape: Callable[[Take], AnyPublisher]
) -> None:
    """A plain publisher that waits must not keep the event loop waiting."""
    names: list[str] = []
    office.add()

    await office.dispatcher(shape(lambda _: names.append(threading.current_thread().name))).run(until_idle=True)

    [name] = names
    assert name.startswith(THREAD) is (shape in PLAIN)


async def test_an_object_with_publish_names_its_destinations(office: Office) -> None:
    """What may be down is an endpoint, of which a topic has many."""

    class Webhooks:
        def destination(self, message: Message) -> str:
            return f"host-{message.key}"

        def publish(self, message: Message) -> None:
            if message.key == "down":
                raise BrokerUnavailableError("refused")
            office.arrived.append(message)

    office.add(key="down")
    office.add(3, key="up")
    async with office.running(Webhooks()):
        await office.until_delivered(3)
        await until(lambda: bool(office.reported(ev.BreakerOpened)), "the breaker")

    down = [event.destination for event in office.events if isinstance(event, ev.BreakerOpened)]
    assert down[0].startswith("host-down")


async def test_an_attribute_of_a_publisher_that_is_called_destination_names_none(office: Office) -> None:
    """Where a publisher keeps an address in it, messages count to their topics."""

    class Webhook:
        destination = "https://example.com/hook"

        def publish(self, message: Message) -> None:
            office.arrived.append(message)

    office.add(2)
    await office.dispatcher(Webhook()).run(until_idle=True)

    assert len(office.arrived) == 2
    assert not office.reported(ev.NamingFailed)


async def test_async_objects_of_unittest_mock_are_publishers(office: Office) -> None:
    """Tests of applications pass them."""
    one, many = AsyncMock(spec=["__call__"]), AsyncMock(spec=Publisher)
    many.publish_batch.side_effect = lambda messages: [Delivered()] * len(messages)
    for publisher in one, many:
        office.add(1)
        await office.dispatcher(publisher).run(until_idle=True)

    assert office.statuses() == ["delivered"] * 2
    one.assert_awaited_once()
    many.publish_batch.assert_awaited_once()


async def test_print_is_a_publisher(office: Office, capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a newcomer passes."""
    office.add()

    await office.dispatcher(print).run(until_idle=True)

    assert capsys.readouterr().out.startswith("Message(")
    assert office.statuses() == ["delivered"]


async def test_a_plain_publisher_delivers_from_sqlite(tmp_path: Path) -> None:
    """The whole way through a database."""
    outbox, arrived = SQLiteOutbox(tmp_path / "shop.sqlite3"), list[int]()
    with outbox.connection as connection:
        for number in range(20):
            outbox.add(connection, {"n": number}, topic="orders", key=str(number % 2))

    def send(message: Message) -> None:
        arrived.append(int(message.payload.partition(b":")[2].rstrip(b"}")))

    await Dispatcher(SQLiteStore(outbox.path), send).run(until_idle=True)

    assert [number for number in arrived if number % 2] == list(range(1, 20, 2))
    assert [number for number in arrived if not number % 2] == list(range(0, 20, 2))
    assert (await outbox.store.stats()).delivered == 20
    outbox.close()


async def test_a_consumer_takes_a_plain_publisher() -> None:
    """What handlers return goes out through the same shapes."""
    router, broker, outputs, threads = Router(), MemoryBroker(), list[Message](), list[threading.Thread]()

    @router.on("order.placed")
    async def reserve(message: Message) -> Message:
        return Message(topic="stock", type="stock.reserved", payload=message.payload)

    def publish(message: Message) -> None:
        threads.append(threading.current_thread())
        outputs.append(message)

    consumer = Consumer(broker.subscribe("orders", group="g"), router, publisher=publish)
    running = asyncio.create_task(consumer.run())
    await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
    await until(lambda: broker.backlog("g") == 0, "the acknowledgement")
    await consumer.stop()
    await running

    assert [message.topic for message in outputs] == ["stock"]
    await until(lambda: not threads[0].is_alive(), "the end of the thread")


def refused(_: Message) -> None:
    raise ConnectionRefusedError("by mail.example.com")


def is_full(_: Message) -> None:
    raise BrokerUnavailableError("the queue is full")


@pytest.mark.parametrize("publisher", [refused, is_full])
async def test_why_an_output_was_not_delivered_is_said(publisher: AnyPublisher) -> None:
    """That its destination is down does not tell an operator what to look for."""
    said = "its destination is down: .*: (by mail|the queue is full)"
    with pytest.raises(OutputError, match=said) as output:
        await send_outputs(as_publisher(publisher), MESSAGE, [MESSAGE])
    with pytest.raises(PublishUnknownError, match=said) as letter:
        await PublishedDeadLetters(publisher, "dead", consumer="stock").bury(MESSAGE, "boom")

    assert isinstance(output.value.__cause__, ConnectionRefusedError | BrokerUnavailableError)
    assert isinstance(letter.value.__cause__, ConnectionRefusedError | BrokerUnavailableError)


async def test_dead_letters_take_a_plain_publisher() -> None:
    """They are published by whatever publishes."""
    letters = list[Message]()

    await PublishedDeadLetters(letters.append, "dead", consumer="stock").bury(Message(topic="t", payload=b""), "broken")

    assert [(letter.topic, letter.headers["postroom-error"]) for letter in letters] == [("dead", "broken")]


# -- what is refused -----------------------------------------------------------------------------------------------


class WithPublish:
    def publish(self, message: Message) -> None: ...


class WithNeither:
    def send(self, message: Message) -> None: ...


class WithText:
    publish = "kafka://localhost"


class WithPlainBatch:
    def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        return [Delivered()] * len(messages)


async def yielding(message: Message) -> AsyncIterator[None]:
    yield


def generating(message: Message) -> Iterator[None]:
    yield


def without_parameters() -> None: ...


REFUSED = {
    "None": (None, "publisher must not be None; it takes a function"),
    "a number": (5, "publisher must not be of type int; it takes a function"),
    "a text": ("kafka://localhost", "publisher must not be of type str; it takes a function"),
    "a class": (WithPublish, "publisher must not be the class WithPublish: pass an instance"),
    "neither method": (WithNeither(), "publisher must not be of type WithNeither; it takes a function"),
    "a text as method": (WithText(), "publisher.publish must be a function, not of type str"),
    "plain batches": (WithPlainBatch(), "publisher.publish_batch must be declared with async def"),
    "a generator": (generating, "publisher must not be a generator"),
    "an async generator": (yielding, "publisher must not be a generator"),
    "no parameter": (without_parameters, "publisher must be callable with one argument"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_by_the_constructor(given: AnyPublisher, why: str) -> None:
    """Who passes something else learns it at once, with what is taken instead."""
    with pytest.raises(ConfigurationError) as refused:
        Dispatcher(MemoryStore(), given)

    assert str(refused.value).startswith(why)
    assert "publish(message)" in str(refused.value)
    assert "publish_batch(messages)" in str(refused.value)


@pytest.mark.parametrize("given", [5, WithNeither(), WithPublish])
def test_a_consumer_refuses_the_same(given: AnyPublisher) -> None:
    """One function decides for all that take a publisher."""
    with pytest.raises(ConfigurationError, match="publisher must not be"):
        Consumer(MemoryBroker().subscribe("t", group="g"), Router(), publisher=given)


# -- threads -------------------------------------------------------------------------------------------------------


async def test_threads_begin_with_the_first_message_and_end_with_the_dispatcher(office: Office) -> None:
    """An idle dispatcher costs no thread, and none is left behind."""
    threads = set[threading.Thread]()
    before = set(threading.enumerate())
    dispatcher = office.dispatcher(lambda _: threads.add(threading.current_thread()))
    new = set(threading.enumerate()) - before
    office.add(5)

    await dispatcher.run(until_idle=True)

    assert not new
    assert threads
    assert not threads & before
    await until(lambda: not any(thread.is_alive() for thread in threads), "the end of the threads")


async def test_threads_of_a_publisher_that_is_forgotten_end() -> None:
    """Nobody closes those of dead letters."""
    threads = list[threading.Thread]()
    each = Each(lambda _: threads.append(threading.current_thread()))
    await each.publish_batch([Message(topic="t", payload=b"")])
    assert threads[0].is_alive()

    del each

    await until(lambda: not threads[0].is_alive(), "the end of the thread")


async def test_threads_are_the_publishers_own(office: Office, gate: threading.Event) -> None:
    """An application that keeps asyncio's own threads busy delays no message."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, gate.wait)
    office.add(3)

    async with office.running(office.arrived.append):
        await office.until_delivered(3)

    gate.set()
    await busy


async def test_a_thread_that_cannot_be_started_fails_its_message_only(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that is out of threads for a while must not leave the publisher without any for good."""
    start, refused = threading.Thread.start, list[str]()

    def start_unless_full(thread: threading.Thread) -> None:
        if thread.name.startswith(THREAD) and len(refused) < 5:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_full)
    office.add(3)

    async with office.running(office.arrived.append, concurrency=1, publish_timeout=10 * SECOND):
        await office.until_delivered(3)

    assert len(office.arrived) == 3, "what was reported as failed is not sent later on"
    failures = {str(failed) for failed in office.reported(ev.PublishFailed)}
    assert all("can't start new thread" in failure for failure in failures), failures
    assert failures


async def test_no_more_calls_than_concurrency_run_at_once(office: Office) -> None:
    """The number of threads is the number of calls."""
    at_once, most, turn = 0, 0, threading.Lock()
    meeting = threading.Barrier(2, timeout=20)

    def send(message: Message) -> None:
        nonlocal at_once, most
        if message.payload == b'{"n":0}':
            return  # it proves that the destination works, so that others may be sent side by side
        with turn:
            at_once += 1
            most = max(most, at_once)
        meeting.wait()  # so that there are two of them at least
        with turn:
            at_once -= 1

    office.add(21)
    async with office.running(send, concurrency=2):
        await office.until_delivered(21)

    assert most == 2


async def test_context_variables_reach_the_thread(office: Office) -> None:
    """Whoever runs the dispatcher in a context finds it in the publisher."""
    region: ContextVar[str] = ContextVar("region", default="nowhere")
    seen: list[str] = []
    office.add()

    region.set("eu")
    await office.dispatcher(lambda _: seen.append(region.get())).run(until_idle=True)

    assert seen == ["eu"]


@pytest.mark.requirement("S2-42")
async def test_messages_of_one_key_stay_in_order_on_threads(office: Office) -> None:
    """One after the other, although keys run side by side and the first message of one fails at first."""
    sent, failed, turn = defaultdict[str, list[bytes]](list), set[str](), threading.Lock()

    def send(message: Message) -> None:
        key = str(message.key)
        with turn:
            if key not in failed:
                failed.add(key)
                raise OSError("not yet")
            sent[key].append(message.payload)

    for key in "abc":
        office.add(10, key=key)
    async with office.running(send):
        await office.until_delivered(30)

    assert dict(sent) == {key: [b'{"n":%d}' % n for n in range(10)] for key in "abc"}


# -- outcomes ------------------------------------------------------------------------------------------------------


async def test_outcomes_that_a_plain_function_returns_are_respected(office: Office) -> None:
    """To return an outcome is to choose it."""
    calls: Counter[str] = Counter()
    answers: dict[str, list[object]] = {
        "retry": [Retry("later"), None],
        "dead": [Dead("never")],
        "release": [Release(), Delivered()],
        "text": ["whatever else"],
    }

    def send(message: Message) -> object:
        calls[message.topic] += 1
        return answers[message.topic][calls[message.topic] - 1]

    for topic in answers:
        office.add(topic=topic)
    async with office.running(send):
        await until(lambda: sorted(office.statuses()) == ["dead"] + ["delivered"] * 3, "all outcomes")

    rows = {row.message.topic: row for row in office.store.rows}
    assert calls == {"retry": 2, "dead": 1, "release": 2, "text": 1}
    assert {topic: row.message.attempt for topic, row in rows.items()} == {
        "retry": 2,
        "dead": 1,
        "release": 1,
        "text": 1,
    }
    assert rows["dead"].error == "never"


async def test_errors_of_a_plain_function_count_as_those_of_an_async_one(office: Office) -> None:
    """An error is a retry, a rejection is dead at once, and an outage costs no attempt."""
    calls: Counter[str] = Counter()
    errors = {"error": ValueError("bad"), "rejected": RejectError("no"), "outage": BrokerUnavailableError("down")}

    def send(message: Message) -> None:
        calls[message.topic] += 1
        if calls[message.topic] == 1:
            raise errors[message.topic]

    for topic in errors:
        office.add(topic=topic)
    async with office.running(send):
        await until(lambda: sorted(office.statuses()) == ["dead", "delivered", "delivered"], "all outcomes")

    attempts = {row.message.topic: row.message.attempt for row in office.store.rows}
    assert attempts == {"error": 2, "rejected": 1, "outage": 1}


async def test_stop_iteration_fails_a_message_and_nothing_hangs(office: Office) -> None:
    """``next(iterator)`` in a publisher raises what no future can hold."""

    def send(message: Message) -> None:
        if message.attempt == 1:
            next(iter(()))

    office.add(2)
    async with office.running(send):
        await office.until_delivered(2)

    failures = [event for event in office.events if isinstance(event, ev.PublishFailed)]
    assert {failure.error for failure in failures} == {"RuntimeError: the publisher raised StopIteration"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("shape", [plain_function, async_function], ids=lambda shape: shape.__name__)
async def test_an_interrupt_ends_the_dispatcher(
    office: Office, shape: Callable[[Take], AnyPublisher], kind: type[BaseException]
) -> None:
    """A plain publisher that wants to end the program does so; its message is given back."""

    def interrupt(message: Message) -> None:
        raise kind

    office.add()

    with pytest.raises(kind):
        await office.dispatcher(shape(interrupt)).run()

    assert [(row.status, row.message.attempt) for row in office.store.rows] == [("pending", 0)]


# -- calls that hang -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "async"])
async def test_a_call_that_takes_too_long_is_unknown(office: Office, gate: threading.Event, *, is_plain: bool) -> None:
    """No answer came, so the message is sent again; plain or async makes no difference to what is reported."""
    calls: Counter[bytes] = Counter()

    def send(message: Message) -> None:
        calls[message.payload] += 1
        if calls[message.payload] == 1 and message.payload == b'{"n":0}':
            gate.wait()

    async def send_async(message: Message) -> None:
        calls[message.payload] += 1
        if calls[message.payload] == 1 and message.payload == b'{"n":0}':
            await asyncio.Event().wait()

    office.add(2)
    async with office.running(send if is_plain else send_async, publish_timeout=200 * MS):
        await office.until_delivered(2)

    [failure] = [event for event in office.events if isinstance(event, ev.PublishFailed)]
    assert failure.error == "TimeoutError: no answer within 0.2 s"
    assert calls == {b'{"n":0}': 2, b'{"n":1}': 1}


async def test_a_dispatcher_may_be_stopped_from_a_thread(office: Office) -> None:
    """Plain publishers run on threads, where asyncio's own events must not be set; in debug mode it says so."""
    asyncio.get_running_loop().set_debug(True)
    polls = list[None]()

    class Counting(MemoryStore):
        async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
            polls.append(None)
            return await super().claim(limit, terms)

    office.store = Counting()
    dispatcher = office.dispatcher(print)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: len(polls) > 3, "an idle dispatcher")

    await asyncio.to_thread(dispatcher.stop_soon)

    await running


async def test_a_thread_that_hangs_does_not_keep_run_from_ending(office: Office, gate: threading.Event) -> None:
    """After the grace the message is given back, and the dispatcher ends."""
    entered = threading.Event()

    def send(message: Message) -> None:
        entered.set()
        gate.wait()

    office.add()
    dispatcher = office.dispatcher(send, shutdown_grace=50 * MS)
    running = asyncio.create_task(dispatcher.run())
    await until(entered.is_set, "the call")
    await dispatcher.stop()

    await running
    assert office.statuses() == ["pending"]
    assert not gate.is_set()


def test_a_thread_that_hangs_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    """Neither does it once the dispatcher has ended."""
    program = tmp_path / "hanging.py"
    program.write_text(
        """
import asyncio, threading
from datetime import timedelta
from postroom import Dispatcher, Outbox
from postroom.stores import MemoryStore

store, entered = MemoryStore(), threading.Event()

def send(message):
    entered.set()
    threading.Event().wait()

async def main():
    with store.transaction() as transaction:
        Outbox().add(transaction, {}, topic="t")
    dispatcher = Dispatcher(store, send, shutdown_grace=timedelta(0))
    running = asyncio.create_task(dispatcher.run())
    while not entered.is_set():
        await asyncio.sleep(0.01)
    await dispatcher.stop()
    await running

asyncio.run(main())
print("ended")
"""
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "ended\n"


class Hanging:
    """A plain publisher whose calls to the topic ``hung`` wait for a gate."""

    def __init__(self, office: Office, gate: threading.Event) -> None:
        self.office = office
        self.gate = gate
        self.is_on = True
        self.waiting = list[Message]()

    def publish(self, message: Message) -> None:
        if self.is_on and message.topic == "hung":
            self.waiting.append(message)
            self.gate.wait()
        self.office.arrived.append(message)


async def test_a_destination_that_hangs_does_not_hold_up_others(office: Office, gate: threading.Event) -> None:
    """Two healthy destinations go on while the calls of a third never return."""
    publisher = Hanging(office, gate)
    async with office.running(publisher, concurrency=8, publish_timeout=200 * MS, shutdown_grace=timedelta(0)):
        office.add(50, topic="hung")
        await until(lambda: bool(publisher.waiting), "a call that hangs")
        for number in range(1, 11):
            office.add(10, topic="healthy")
            office.add(10, topic="well")
            await office.until_delivered(20 * number)

    arrived = Counter(topic for topic, _ in {(message.topic, message.id) for message in office.arrived})
    assert arrived == {"healthy": 100, "well": 100}


async def test_a_destination_that_begins_to_hang_does_not_hold_up_others(office: Office, gate: threading.Event) -> None:
    """It has answered before, so that it may take all places; those that hang make way for the others."""
    publisher = Hanging(office, gate)
    publisher.is_on = False
    async with office.running(publisher, concurrency=4, publish_timeout=5 * SECOND, shutdown_grace=timedelta(0)):
        office.add(topic="hung")
        office.add(topic="healthy")
        await office.until_delivered(2)
        publisher.is_on = True
        office.add(50, topic="hung")
        await until(lambda: len(publisher.waiting) == 4, "the calls that hang")
        office.add(20, topic="healthy")
        await office.until_delivered(22)
        hung = len(publisher.waiting)
        gate.set()
        await office.until_delivered(72)

    assert hung == 4


async def test_a_backlog_for_calls_that_never_return_makes_way(office: Office, gate: threading.Event) -> None:
    """Messages that wait for a place which never comes are put aside, so that others can be claimed."""
    publisher = Hanging(office, gate)
    publisher.is_on = False
    options = {"publish_timeout": 200 * MS, "shutdown_grace": timedelta(0), "batch": 5, "batches_in_flight": 2}
    async with office.running(publisher, concurrency=4, **options):
        office.add(topic="hung")
        await office.until_delivered(1)
        publisher.is_on = True
        office.add(50, topic="hung")
        await until(lambda: len(publisher.waiting) == 4, "the calls that hang")
        office.add(20, topic="healthy")
        await office.until_delivered(21)
        hung = len(publisher.waiting)
        gate.set()
        await office.until_delivered(71)

    assert hung == 4


async def test_calls_that_never_return_do_not_use_up_the_threads(office: Office, gate: threading.Event) -> None:
    """A destination whose calls hang for ever is not called again and again until no thread is left."""
    publisher, refused = Hanging(office, gate), list[str]()

    def listen(event: ev.Event) -> None:
        if isinstance(event, ev.PublishFailed) and "earlier calls have not returned yet" in event.error:
            refused.append(event.error)

    options = {"publish_timeout": 50 * MS, "shutdown_grace": timedelta(0), "listener": listen}
    async with office.running(publisher, concurrency=8, **options):
        office.add(20, topic="hung")
        await until(lambda: len(refused) > 20, "probes that are refused")
        hung = len(publisher.waiting)
        office.add(20, topic="healthy")
        await office.until_delivered(20)
        gate.set()
        await office.until_delivered(40)

    assert hung <= 8  # half of the threads, however often the destination is probed
    assert "dead" not in office.statuses()


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_with_few_places_calls_that_never_return_are_an_outage_too(
    office: Office, gate: threading.Event, concurrency: int
) -> None:
    """Messages that wait for a place that never comes would be held for ever, and those of others with them."""
    publisher = Hanging(office, gate)
    options = {"publish_timeout": 50 * MS, "shutdown_grace": timedelta(0), "concurrency": concurrency}
    async with office.running(publisher, **options):
        office.add(6, topic="hung")
        await until(lambda: len(publisher.waiting) == concurrency, "the calls that hang")
        office.add(6, topic="healthy")
        await office.until_delivered(6)
        assert {message.topic for message in office.arrived} == {"healthy"}
        gate.set()
        await office.until_delivered(12)


async def test_each_takes_a_plain_function_too() -> None:
    """It is the adapter for one message at a time."""
    arrived = list[Message]()
    messages = [Message(topic="t", key="k", payload=b"%d" % n) for n in range(5)]
    each = Each(arrived.append, concurrency=2)

    outcomes = await each.publish_batch(messages)
    each.close()

    assert list(outcomes) == [Delivered()] * 5
    assert arrived == messages
