"""The consumer: when it acknowledges, what it does side by side, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import pytest

from postroom import (
    Consumer,
    Dead,
    Delivered,
    Delivery,
    Message,
    Outbox,
    OutboxSubscriber,
    Outcome,
    Release,
    Retry,
    Router,
    events,
)
from postroom.brokers import MemoryBroker
from postroom.deadline import Limit, Within
from postroom.errors import (
    AlreadyStartedError,
    BrokerUnavailableError,
    CommitUnknownError,
    ConfigurationError,
    MiddlewareOrderError,
    RejectError,
    StoreContentionError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from postroom.middleware import DeadLetterMiddleware, Middleware, Next, RetryMiddleware
from postroom.stores import MemoryStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
DELAY = timedelta(seconds=7)


def order(number: int = 1, *, key: str | None = None, attempt: int = 1) -> Message:
    return Message(topic="orders", type="order.placed", payload=b"%d" % number, key=key, attempt=attempt)


def no_delay(_: int) -> timedelta:
    return timedelta(0)


class Desk:
    """A subscriber that hands out what it is given, and keeps what it is told."""

    redelivery_horizon: timedelta | None = None

    def __init__(self, *messages: Message, error: Exception | None = None) -> None:
        self.waiting = deque(messages)
        self.error = error
        self.taken = 0
        self.is_left = False
        self.deliveries: list[Delivery] = []
        self.told: list[tuple[int, Outcome]] = []
        self.changed = asyncio.Event()

    def deliver(self, message: Message) -> Delivery:
        number = int(message.payload)

        async def settle(outcome: Outcome) -> None:
            self.told.append((number, outcome))

        return Delivery(message, settle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_left = True

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while self.waiting:
            self.taken += 1
            self.deliveries.append(self.deliver(self.waiting.popleft()))
            yield self.deliveries[-1]
        if self.error is not None:
            raise self.error
        await self.changed.wait()

    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcome in self.told]


class Seen(list[events.Event]):
    """A listener that keeps what it is told."""

    def of(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


def routed(handler: Callable[..., Any]) -> Router:
    router = Router()
    router.add("order.placed", handler)
    return router


async def handled(
    handler: Callable[..., Any],
    *middlewares: Middleware,
    message: Message | None = None,
    **choices: Any,  # noqa: ANN401 -- those of a consumer
) -> tuple[list[Outcome], Seen]:
    """Have one message handled, and return what its broker was told, and what the listener was."""
    desk, seen = Desk(), Seen()
    choices.setdefault("backoff", lambda attempt: attempt * DELAY)
    consumer = Consumer(desk, routed(handler), *middlewares, listener=seen.append, **choices)
    await consumer.handle(desk.deliver(message or order()))
    return desk.outcomes(), seen


@asynccontextmanager
async def running(consumer: Consumer) -> AsyncGenerator[asyncio.Task[None]]:
    """Run a consumer for a block, and see that it leaves no task behind."""
    before = asyncio.all_tasks()
    task = asyncio.create_task(consumer.run())
    try:
        yield task
        await consumer.stop()
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert asyncio.all_tasks() == before


class Answering:
    """A publisher that gives prepared answers."""

    def __init__(self, *answers: Outcome | None, error: Exception | None = None) -> None:
        self.answers = answers
        self.error = error
        self.published: list[Message] = []

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self.published.extend(messages)
        if self.error is not None:
            raise self.error
        return self.answers


# -- acknowledging -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-03")
async def test_what_was_handled_is_acknowledged() -> None:
    """Success is an ack, and that is the default."""

    async def handler(_: Message) -> None:
        pass

    outcomes, seen = await handled(handler)

    assert outcomes == [Delivered()]
    assert [type(event) for event in seen] == [events.Handled]


@pytest.mark.requirement("F-03")
async def test_an_error_is_a_nack_that_says_why() -> None:
    """An exception is a nack with its error, after the backoff of its attempt."""

    async def handler(_: Message) -> None:
        raise ValueError("no stock")

    outcomes, seen = await handled(handler, message=order(attempt=3))

    assert outcomes == [Retry("ValueError: no stock", 3 * DELAY)]
    assert [(event.attempt, event.error) for event in seen.of(events.HandlingFailed)] == [(3, "ValueError: no stock")]


@pytest.mark.requirement("G8", "F-01")
async def test_acknowledging_is_outside_of_every_middleware() -> None:
    """The broker hears of a message when the outermost middleware has ended."""
    steps: list[str] = []

    async def outermost(message: Message, call_next: Next) -> Sequence[Message]:
        outputs = await call_next(message)
        steps.append("outermost ended")
        return outputs

    async def handler(_: Message) -> None:
        steps.append("handled")

    async def settle(_: Outcome) -> None:
        steps.append("acked")

    await Consumer(Desk(), routed(handler), outermost).handle(Delivery(order(), settle))

    assert steps == ["handled", "outermost ended", "acked"]


@pytest.mark.requirement("F-01")
async def test_an_error_of_the_outermost_middleware_is_a_nack() -> None:
    """A commit that fails after the handler ended well makes the message come again."""

    async def commit(message: Message, call_next: Next) -> Sequence[Message]:
        await call_next(message)
        raise ConnectionError("commit failed")

    async def handler(_: Message) -> None:
        pass

    outcomes, _ = await handled(handler, commit)

    assert outcomes == [Retry("ConnectionError: commit failed", DELAY)]


@pytest.mark.requirement("F-02")
async def test_the_first_middleware_is_the_outermost() -> None:
    """They are entered in the order of the list, and left in the other one."""
    steps: list[str] = []

    def layer(name: str) -> Middleware:
        async def middleware(message: Message, call_next: Next) -> Sequence[Message]:
            steps.append(f"+{name}")
            outputs = await call_next(message)
            steps.append(f"-{name}")
            return outputs

        return middleware

    async def handler(_: Message) -> None:
        steps.append("handler")

    await handled(handler, layer("a"), layer("b"), layer("c"))

    assert steps == ["+a", "+b", "+c", "handler", "-c", "-b", "-a"]


@pytest.mark.requirement("G9")
async def test_a_rejection_is_told_as_one() -> None:
    """What can never succeed is not tried again."""

    async def handler(_: Message) -> None:
        raise RejectError("no such customer")

    outcomes, seen = await handled(handler)

    assert outcomes == [Dead("RejectError: no such customer")]
    assert [event.error for event in seen.of(events.DeadLettered)] == ["RejectError: no such customer"]
    assert seen.of(events.HandlingFailed) == []


@pytest.mark.requirement("G9")
async def test_a_payload_that_cannot_be_decoded_is_a_failure_like_any_other() -> None:
    """A newer version may read it, so it comes again until its attempts are spent."""

    async def handler(_: dict[str, int]) -> None:
        raise AssertionError("it has nothing to handle")

    outcomes, seen = await handled(handler)

    assert [type(outcome) for outcome in outcomes] == [Retry]
    assert [event.error.partition(":")[0] for event in seen.of(events.HandlingFailed)] == ["DecodeError"]
    assert seen.of(events.DeadLettered) == []


@pytest.mark.requirement("G13")
@pytest.mark.parametrize("error", [StoreUnavailableError("down"), StoreTimeoutError("slow"), CommitUnknownError()])
async def test_a_database_that_is_away_costs_no_attempt(error: StoreError | CommitUnknownError) -> None:
    """An outage says nothing about the message, so it makes no dead letters however long it takes."""
    error.is_outage = True
    left = 12
    letters: list[str] = []

    class Letters:
        async def bury(self, message: Message, error: str) -> None:
            letters.append(error)

    async def handler(_: Message) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        consumer.stop_soon()

    broker = MemoryBroker()
    router = routed(handler)
    dead_letters = DeadLetterMiddleware(Letters(), max_attempts=3)
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, dead_letters, backoff=no_delay)
    await broker.publish_batch([order()])
    await consumer.run()

    assert (left, letters) == (-1, [])


@pytest.mark.requirement("G9")
async def test_a_transaction_that_others_always_stand_in_the_way_of_is_put_aside() -> None:
    """A message that leads to a deadlock each time is poison like any other."""

    async def handler(_: Message) -> None:
        raise StoreContentionError("deadlock")

    outcomes, _ = await handled(handler)

    assert [type(outcome) for outcome in outcomes] == [Retry]


@pytest.mark.requirement("G8")
async def test_an_ack_that_fails_is_told_and_is_no_nack() -> None:
    """The effect is durable, so the message is not said to have failed; it comes again and is known then."""
    said: list[Outcome] = []
    seen = Seen()

    async def handler(_: Message) -> None:
        pass

    async def settle(outcome: Outcome) -> None:
        said.append(outcome)
        raise ConnectionError("gone")

    delivery = Delivery(order(), settle)
    await Consumer(Desk(), routed(handler), listener=seen.append).handle(delivery)

    assert said == [Delivered()]
    assert [event.error for event in seen.of(events.AckFailed)] == ["ConnectionError: gone"]
    assert seen.of(events.HandlingFailed) == []


@pytest.mark.requirement("G11")
async def test_an_ack_that_never_returns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer holds no handler for ever."""
    monkeypatch.setattr("postroom.consumer.PATIENCE", 10 * MS)
    seen = Seen()

    async def handler(_: Message) -> None:
        pass

    async def settle(_: Outcome) -> None:
        await asyncio.Event().wait()

    await Consumer(Desk(), routed(handler), listener=seen.append).handle(Delivery(order(), settle))

    assert [event.error for event in seen.of(events.AckFailed)] == ["TimeoutError"]


async def test_an_ack_whose_future_the_brokers_library_cancelled_has_failed() -> None:
    """Libraries cancel what waits for an answer when a connection breaks; nobody cancelled the handler."""
    seen = Seen()

    async def handler(_: Message) -> None:
        pass

    async def settle(_: Outcome) -> None:
        raise asyncio.CancelledError

    await Consumer(Desk(), routed(handler), listener=seen.append).handle(Delivery(order(), settle))

    assert [event.error for event in seen.of(events.AckFailed)] == ["CancelledError"]


@pytest.mark.requirement("F-20")
async def test_something_cancelled_inside_a_handler_is_an_error_of_the_message() -> None:
    """A cancelled future that a handler waits for ends neither the task nor the consumer."""

    async def handler(_: Message) -> None:
        raise asyncio.CancelledError

    outcomes, _ = await handled(handler)

    assert outcomes == [Retry("CancelledError", DELAY)]


async def failing_group(error: Exception) -> None:
    """Fail as a TaskGroup does, which in Python 3.11 leaves a request to cancel the task behind."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())


async def run_once(handler: Callable[..., Any], **choices: Any) -> tuple[list[Outcome], Seen]:  # noqa: ANN401
    """Have a consumer run until its broker was told of one message."""
    desk, seen = Desk(order()), Seen()
    consumer = Consumer(desk, routed(handler), listener=seen.append, backoff=lambda _: DELAY, **choices)
    async with running(consumer):
        await until(lambda: bool(desk.told), "the message being settled")
    return desk.outcomes(), seen


@pytest.mark.requirement("G9", "F-03")
async def test_a_task_group_that_fails_is_an_error_of_the_message() -> None:
    """It is counted and told, and not taken for the end of the consumer."""

    async def handler(_: Message) -> None:
        await failing_group(ValueError("bad answer"))

    outcomes, seen = await run_once(handler)

    said = "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): ValueError: bad answer"
    assert outcomes == [Retry(said, DELAY)]
    assert [event.error for event in seen.of(events.HandlingFailed)] == [said]
    assert seen.of(events.ConsumerStopped) == [events.ConsumerStopped(0)]


@pytest.mark.requirement("G9")
@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_group_of_rejections_is_one(is_direct: bool) -> None:  # noqa: FBT001
    """What can never be handled is dead at once, also if a task of the handler says so."""

    async def handler(_: Message) -> None:
        await failing_group(RejectError("never"))

    outcomes, _ = await (handled(handler) if is_direct else run_once(handler))

    assert [type(outcome) for outcome in outcomes] == [Dead]


async def test_a_group_with_an_error_that_may_pass_comes_again() -> None:
    async def handler(_: Message) -> None:
        raise ExceptionGroup("both", [RejectError("never"), ExceptionGroup("inner", [ValueError("now")])])

    outcomes, _ = await handled(handler)

    assert [type(outcome) for outcome in outcomes] == [Retry]


@pytest.mark.requirement("G9", "F-25")
async def test_a_handler_that_is_too_slow_after_a_task_group_failed_is_late() -> None:
    """Nobody else cancelled it, though there seem to be two requests."""

    async def handler(_: Message) -> None:
        with contextlib.suppress(ExceptionGroup):
            await failing_group(ValueError())
        await asyncio.Event().wait()

    outcomes, seen = await run_once(handler, timeout=10 * MS)

    assert outcomes == [Retry("TimeoutError: the handler did not end within 0.01 s", DELAY)]
    assert len(seen.of(events.HandlingFailed)) == 1


async def test_something_cancelled_after_a_task_group_failed_is_an_error_of_the_message() -> None:
    async def handler(_: Message) -> None:
        with contextlib.suppress(ExceptionGroup):
            await failing_group(ValueError())
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    outcomes, _ = await run_once(handler)

    assert outcomes == [Retry("CancelledError", DELAY)]


@pytest.mark.requirement("F-25")
async def test_what_ends_the_whole_program_says_nothing_of_messages() -> None:
    """Tasks are cancelled in any order then, and the consumer may be the last to hear of it."""
    desk, gate, seen = Desk(order()), Gate(), Seen()
    consumer = Consumer(desk, routed(gate), listener=seen.append)
    before = asyncio.all_tasks()
    task = asyncio.create_task(consumer.run())
    await until(lambda: gate.inside == 1, "the handler being at work")

    for each in asyncio.all_tasks() - before:
        each.cancel()
    await asyncio.wait({task})

    assert desk.told == [(1, Release())]
    assert seen.of(events.HandlingFailed) == []


@pytest.mark.requirement("G9")
async def test_an_error_that_cannot_be_told_is_told_by_its_name() -> None:
    """It does not end the consumer."""

    class SilentError(Exception):
        def __str__(self) -> str:
            raise AttributeError("no text")

    async def handler(_: Message) -> None:
        raise SilentError

    outcomes, _ = await run_once(handler)

    assert outcomes == [Retry("SilentError", DELAY)]


@pytest.mark.requirement("F-25")
async def test_a_handler_that_takes_too_long_is_cancelled_and_comes_again() -> None:
    """The process timeout."""
    ended: list[str] = []

    async def handler(_: Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("handler")

    outcomes, _ = await handled(handler, timeout=10 * MS)

    assert ended == ["handler"]
    assert outcomes == [Retry("TimeoutError: the handler did not end within 0.01 s", DELAY)]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"buffer": -1}, "buffer=-1"),
        ({"timeout": timedelta(0)}, "timeout=0"),
        ({"shutdown_grace": -SECOND}, "shutdown_grace"),
        ({"acking": "sometimes"}, "acking='sometimes'"),
        ({"acking": "forward"}, "needs publisher="),
    ],
)
def test_choices_that_cannot_work_are_refused(choices: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Consumer(Desk(), Router(), **choices)


# -- outputs -----------------------------------------------------------------------------------------------------


async def two_outputs(_: Message) -> list[Message]:
    return [order(10), order(11)]


async def test_a_publisher_gets_what_handlers_return() -> None:
    broker = MemoryBroker()

    outcomes, _ = await handled(two_outputs, publisher=broker)

    assert [message.payload for message in broker.received] == [b"10", b"11"]
    assert outcomes == [Delivered()]


@pytest.mark.requirement("G2")
async def test_outputs_that_nobody_takes_are_an_error_that_says_what_to_do() -> None:
    """What a handler returned is not lost without a word."""
    outcomes, _ = await handled(two_outputs)

    assert len(outcomes) == 1
    assert isinstance(outcomes[0], Retry)
    assert "nobody takes them; use transactional() or OutboxMiddleware, or pass publisher=" in outcomes[0].error


@pytest.mark.requirement("F-04")
async def test_forward_acknowledges_what_has_no_outputs() -> None:
    """No outputs, so nobody else would."""

    async def handler(_: Message) -> None:
        pass

    outcomes, _ = await handled(handler, acking="forward", publisher=Answering())

    assert outcomes == [Delivered()]


@pytest.mark.requirement("F-04")
async def test_forward_acknowledges_when_all_final_outputs_are_delivered() -> None:
    """It is the outputs of the whole chain that count, not those of the handler."""
    publisher = Answering(Delivered())

    async def first_only(message: Message, call_next: Next) -> Sequence[Message]:
        return (await call_next(message))[:1]

    outcomes, _ = await handled(two_outputs, first_only, acking="forward", publisher=publisher)

    assert [message.payload for message in publisher.published] == [b"10"]
    assert outcomes == [Delivered()]


@pytest.mark.requirement("G13", "F-04")
@pytest.mark.parametrize("acking", ["forward", "on_success"])
@pytest.mark.parametrize(
    ("publisher", "outcome"),
    [
        (
            Answering(Delivered(), Retry("full", SECOND)),
            Retry("OutputError: an output was not delivered: full", DELAY),
        ),
        (
            Answering(None, Delivered()),
            Retry("OutputError: an output was not delivered: it is not known whether it was", DELAY),
        ),
        (Answering(Delivered(), Dead("too large")), Dead("OutputError: an output was not delivered: too large")),
        (Answering(Delivered(), Release()), Release(DELAY)),
        (Answering(error=BrokerUnavailableError("down")), Release(DELAY)),
        (Answering(error=ValueError("broken")), Retry("ValueError: broken", DELAY)),
        (
            Answering(Delivered()),
            Retry("OutputError: an output was not delivered: the publisher was given 2 and answered for 1", DELAY),
        ),
    ],
)
async def test_an_output_that_is_not_delivered_makes_the_message_come_again(
    acking: str, publisher: Answering, outcome: Outcome
) -> None:
    """Any output's nack is the input's, with a wait; an outage of its destination costs no attempt."""
    outcomes, _ = await handled(two_outputs, acking=acking, publisher=publisher)

    assert outcomes == [outcome]


# -- by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-05")
async def test_a_handler_may_acknowledge_by_hand() -> None:
    """The handler asks for its delivery, and what it says counts."""

    async def handler(_: Message, delivery: Delivery) -> None:
        await delivery.reject("by hand")

    outcomes, _ = await handled(handler, acking="manual")

    assert outcomes == [Dead("by hand")]


class Deaf(Desk):
    """A broker that fails to take note of the first message, or takes its time."""

    def __init__(self, *messages: Message, takes: float = 0, failure: Exception | None = None) -> None:
        super().__init__(*messages)
        self.takes = takes
        self.failure = failure

    def deliver(self, message: Message) -> Delivery:
        usual = super().deliver(message)
        if message.payload != b"0":
            return usual

        async def settle(outcome: Outcome) -> None:
            await asyncio.sleep(self.takes)
            if self.failure is not None:
                raise self.failure
            self.told.append((0, outcome))

        return Delivery(message, settle)


async def ack_by_hand(_: Message, delivery: Delivery) -> None:
    with contextlib.suppress(ConnectionError):
        await delivery.ack()


@pytest.mark.requirement("G6", "F-05")
async def test_an_ack_by_hand_that_failed_holds_back_the_later_ones_of_its_key() -> None:
    """Whatever the handler makes of the error, the message comes again, and those behind it after it."""
    desk, seen = Deaf(order(0, key="a"), order(1, key="a"), failure=ConnectionError("gone")), Seen()

    async with running(Consumer(desk, routed(ack_by_hand), acking="manual", listener=seen.append)):
        await until(lambda: len(desk.told) == 1, "the second being settled")

    assert desk.told == [(1, Release())]
    assert [event.error for event in seen.of(events.AckFailed)] == ["ConnectionError: gone"]


@pytest.mark.requirement("F-05")
async def test_an_ack_by_hand_is_told_though_the_handlers_time_is_over() -> None:
    """A broker has a time of its own to take note."""
    desk, seen = Deaf(takes=0.05), Seen()
    consumer = Consumer(desk, routed(ack_by_hand), acking="manual", timeout=10 * MS, listener=seen.append)

    is_recorded = await consumer.handle(desk.deliver(order(0)))

    assert (is_recorded, desk.told) == (True, [(0, Delivered())])
    assert seen.of(events.AckFailed) == []


@pytest.mark.requirement("G6", "G11")
async def test_an_ack_by_hand_that_never_returns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be heard or not, so those behind it wait for it to come again."""
    monkeypatch.setattr("postroom.consumer.PATIENCE", 10 * MS)
    desk, seen = Deaf(order(0, key="a"), order(1, key="a"), takes=3600), Seen()
    consumer = Consumer(desk, routed(ack_by_hand), acking="manual", timeout=10 * MS, listener=seen.append)

    async with running(consumer):
        await until(lambda: len(desk.told) == 1, "the second being settled")

    assert desk.told == [(1, Release())]
    assert [event.error for event in seen.of(events.AckFailed)] == ["TimeoutError"]


@pytest.mark.requirement("F-05")
async def test_what_a_handler_leaves_open_stays_open() -> None:
    """To return says nothing of the message."""
    held: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        held.append(delivery)

    outcomes, _ = await handled(handler, acking="manual")

    assert outcomes == []
    assert held[0].outcome is None


@pytest.mark.requirement("F-05")
async def test_an_error_nacks_what_the_handler_has_not_settled() -> None:
    """An exception still nacks."""

    async def handler(_: Delivery) -> None:
        raise ValueError("no stock")

    outcomes, _ = await handled(handler, acking="manual")

    assert outcomes == [Retry("ValueError: no stock", DELAY)]


@pytest.mark.requirement("F-05", "F-06")
async def test_an_error_after_an_ack_by_hand_changes_nothing() -> None:
    """The first settlement counts."""

    async def handler(delivery: Delivery) -> None:
        await delivery.ack()
        raise ValueError("too late")

    outcomes, _ = await handled(handler, acking="manual")

    assert outcomes == [Delivered()]


@pytest.mark.requirement("G11", "F-05")
async def test_what_is_held_by_hand_takes_up_room_until_it_is_settled() -> None:
    """A handler that returns at once cannot gather deliveries without end, and order per key holds."""
    desk, held = Desk(*[order(n, key="k" if n < 2 else None) for n in range(6)]), dict[int, Delivery]()

    async def handler(message: Message, delivery: Delivery) -> None:
        held[int(message.payload)] = delivery

    consumer = Consumer(desk, routed(handler), acking="manual", concurrency=1, buffer=3)
    async with running(consumer):
        await until(lambda: desk.taken == 4 and len(held) == 3, "as many being held as may be")
        assert sorted(held) == [0, 2, 3]
        await held[0].ack()
        await until(lambda: sorted(held) == [0, 1, 2, 3, 4], "the next of the key, and one more")
        assert desk.taken == 5
        for delivery in list(held.values()):
            await delivery.ack()
        await until(lambda: 5 in held, "the last")
        await held[5].ack()


@pytest.mark.requirement("F-05", "F-25")
async def test_what_is_held_by_hand_at_the_end_is_released() -> None:
    """Nobody is left to say something of it."""
    desk, held = Desk(order(1), order(2, key="k"), order(3, key="k")), list[Delivery]()

    async def handler(delivery: Delivery) -> None:
        held.append(delivery)

    consumer = Consumer(desk, routed(handler), acking="manual", shutdown_grace=timedelta(0))
    async with running(consumer):
        await until(lambda: len(held) == 2, "two being held")

    assert sorted(desk.told, key=lambda told: told[0]) == [(1, Release()), (2, Release()), (3, Release())]


# -- side by side ------------------------------------------------------------------------------------------------


class Gate:
    """A handler that waits to be let go, and counts who is inside."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.inside = 0
        self.most = 0
        self.open = asyncio.Event()
        self.failing: set[int] = set()

    async def __call__(self, message: Message) -> None:
        number = int(message.payload)
        self.begun.append(number)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            if number in self.failing:
                raise ValueError("failing")
        finally:
            self.inside -= 1
        self.ended.append(number)


@pytest.mark.requirement("G11", "F-25")
async def test_never_more_are_handled_or_taken_than_there_is_room_for() -> None:
    """Concurrency handlers at a time, and buffer more that wait."""
    desk, gate = Desk(*map(order, range(20))), Gate()
    consumer = Consumer(desk, routed(gate), concurrency=3, buffer=2)

    async with running(consumer):
        await until(lambda: desk.taken == 5, "all the room being taken")
        for _ in range(10):
            await asyncio.sleep(0)
        assert (desk.taken, gate.begun) == (5, [0, 1, 2])
        gate.open.set()
        await until(lambda: len(gate.ended) == 20, "everything being handled")

    assert gate.most == 3
    assert desk.outcomes() == [Delivered()] * 20


@pytest.mark.requirement("F-25")
async def test_without_a_buffer_only_what_is_handled_is_taken() -> None:
    """The next delivery is asked for when a handler is free."""
    desk, gate = Desk(*map(order, range(3))), Gate()

    async with running(Consumer(desk, routed(gate), concurrency=1, buffer=0)):
        await until(lambda: gate.begun == [0], "the first")
        for _ in range(10):
            await asyncio.sleep(0)
        assert desk.taken == 1
        gate.open.set()
        await until(lambda: len(gate.ended) == 3, "everything being handled")


@pytest.mark.requirement("G6", "F-25")
async def test_messages_of_a_key_follow_each_other_and_keys_go_side_by_side() -> None:
    """Two keys and one without are at work together, and each key in its order."""
    keys = ["a", "a", "b", "a", None, None]
    desk, gate = Desk(*[order(n, key=key) for n, key in enumerate(keys)]), Gate()

    async with running(Consumer(desk, routed(gate), concurrency=10)):
        await until(lambda: len(gate.begun) == 4, "one of each key, and those without")
        assert sorted(gate.begun) == [0, 2, 4, 5]
        gate.open.set()
        await until(lambda: len(gate.ended) == 6, "everything being handled")

    assert [number for number in gate.ended if keys[number] == "a"] == [0, 1, 3]


async def test_what_a_handler_leaves_in_its_context_is_none_of_the_next_ones() -> None:
    """Not even for messages of one key, which may be of several tenants."""
    tenant, seen = ContextVar[int | None]("tenant", default=None), list[int | None]()
    desk = Desk(*[order(number, key="a") for number in range(3)])

    async def handler(message: Message) -> None:
        seen.append(tenant.get())
        tenant.set(int(message.payload))
        await asyncio.sleep(0)

    async with running(Consumer(desk, routed(handler))):
        await until(lambda: len(desk.told) == 3, "all being handled")

    assert seen == [None] * 3
    assert desk.outcomes() == [Delivered()] * 3


@pytest.mark.requirement("G6")
async def test_once_one_of_a_key_fails_those_behind_it_are_released() -> None:
    """What was taken already comes again after it; other keys do not notice."""
    keys = ["a", "a", "b", "a"]
    desk, gate = Desk(*[order(n, key=key) for n, key in enumerate(keys)]), Gate()
    gate.failing = {0}
    gate.open.set()

    async with running(Consumer(desk, routed(gate), concurrency=10, backoff=no_delay)):
        await until(lambda: len(desk.told) == 4, "everything being settled")

    assert gate.begun == [0, 2]
    assert [told for told in desk.told if told[0] != 2] == [
        (0, Retry("ValueError: failing", timedelta(0))),
        (1, Release()),
        (3, Release()),
    ]
    assert (2, Delivered()) in desk.told


@pytest.mark.requirement("G6")
async def test_an_ack_that_failed_holds_back_the_later_ones_of_its_key() -> None:
    """The message comes again, so those behind it must come after it."""

    class Deaf(Desk):
        def deliver(self, message: Message) -> Delivery:
            delivery = super().deliver(message)
            if message.payload != b"0":
                return delivery

            async def settle(_: Outcome) -> None:
                raise ConnectionError("gone")

            return Delivery(message, settle)

    desk, gate = Deaf(order(0, key="a"), order(1, key="a")), Gate()
    gate.open.set()

    async with running(Consumer(desk, routed(gate), listener=Seen().append)):
        await until(lambda: len(desk.told) == 1, "the second being settled")

    assert (gate.begun, desk.told) == ([0], [(1, Release())])


@pytest.mark.requirement("G6", "G7")
async def test_a_failed_message_of_a_key_comes_again_before_the_next() -> None:
    """With a broker that keeps order, handlers see it too, whatever fails."""
    broker, order_of_ends, failed = MemoryBroker(), list[bytes](), set[bytes]()
    await_all = 40

    async def handler(message: Message) -> None:
        await asyncio.sleep(0)
        if message.attempt == 1 and int(message.payload) % 3 == 0:
            failed.add(message.payload)
            raise ValueError("the first time")
        order_of_ends.append(message.payload)

    consumer = Consumer(
        broker.subscribe("orders", group="g"), routed(handler), concurrency=8, backoff=no_delay, listener=Seen().append
    )
    await broker.publish_batch([order(n, key=f"k{n % 4}") for n in range(await_all)])
    async with running(consumer):
        await until(lambda: len(order_of_ends) == await_all, "everything being handled")

    assert len(failed) == 14
    for key in range(4):
        numbers = [int(number) for number in order_of_ends if int(number) % 4 == key]
        assert numbers == sorted(numbers)


# -- sources -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-25", "S1-30", "S1-32")
async def test_an_outbox_can_be_consumed_without_a_broker() -> None:
    """What `OutboxSubscriber` hands out is handled, recorded, and comes again when it failed."""
    store, seen = MemoryStore(), list[tuple[bytes, int]]()
    with store.transaction() as transaction:
        Outbox().add(transaction, [{"n": n} for n in range(20)], topic="orders", type="order.placed")

    async def handler(message: Message) -> None:
        seen.append((message.payload, message.attempt))
        if message.payload == b'{"n":3}' and message.attempt == 1:
            raise ValueError("once")

    deliveries = OutboxSubscriber(store, poll_interval=5 * MS)
    async with running(Consumer(deliveries, routed(handler), backoff=lambda _: MS, listener=Seen().append)):
        await until(lambda: all(row.status == "delivered" for row in store.rows), "everything being recorded")

    assert len(seen) == 21
    assert (b'{"n":3}', 2) in seen


@pytest.mark.requirement("F-25", "S1-37")
async def test_what_a_consumer_of_an_outbox_did_not_begin_is_pending_again() -> None:
    """It is released with its attempt, and what was handled is recorded."""
    store, gate = MemoryStore(), Gate()
    with store.transaction() as transaction:
        Outbox().add(
            transaction,
            [Message(topic="orders", type="order.placed", payload=b"%d" % n) for n in range(10)],
        )
    consumer = Consumer(OutboxSubscriber(store), routed(gate), concurrency=1, buffer=3)

    async with running(consumer):
        await until(lambda: gate.begun == [0], "the first")
        consumer.stop_soon()
        gate.open.set()

    assert sorted(row.status for row in store.rows) == ["delivered", *["pending"] * 9]
    assert sum(row.message.attempt for row in store.rows) == 1


# -- ending ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-25")
async def test_stopping_lets_handlers_end_and_releases_what_has_not_begun() -> None:
    """No more is taken, nothing is cancelled within the grace."""
    desk, gate, seen = Desk(*map(order, range(9))), Gate(), Seen()
    consumer = Consumer(desk, routed(gate), concurrency=2, buffer=2, listener=seen.append)

    async with running(consumer) as task:
        await until(lambda: desk.taken == 4, "all the room being taken")
        stopping = [asyncio.create_task(consumer.stop()) for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert gate.inside == 2
        assert not task.done()
        gate.open.set()
        await asyncio.gather(*stopping, task)

    assert (desk.taken, desk.is_left, sorted(gate.ended)) == (4, True, [0, 1])
    assert sorted(desk.told, key=lambda told: told[0]) == [
        (0, Delivered()),
        (1, Delivered()),
        (2, Release()),
        (3, Release()),
    ]
    assert seen[0] == events.ConsumerStarted(("order.placed",))
    assert seen[-1] == events.ConsumerStopped(2)


@pytest.mark.requirement("G2", "F-25")
async def test_after_the_grace_handlers_are_cancelled_and_released() -> None:
    """The end of the process says nothing of the message."""
    desk, gate, seen = Desk(order(1)), Gate(), Seen()
    consumer = Consumer(desk, routed(gate), shutdown_grace=10 * MS, listener=seen.append)

    async with running(consumer):
        await until(lambda: gate.inside == 1, "the handler being at work")
        await consumer.stop()
        await consumer.stop()

    assert (gate.inside, desk.told) == (0, [(1, Release())])
    assert seen.of(events.HandlingFailed) == []


@pytest.mark.requirement("G13", "F-25")
async def test_an_error_that_comes_of_the_end_is_not_the_messages() -> None:
    """A connection that breaks because its handler was cancelled costs no attempt, and ends nothing else."""
    desk, seen, begun = Desk(order(1)), Seen(), asyncio.Event()

    async def handler(_: Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("broken") from None

    consumer = Consumer(desk, routed(handler), shutdown_grace=timedelta(0), listener=seen.append)
    async with running(consumer):
        await begun.wait()

    assert desk.told == [(1, Release())]
    assert seen.of(events.HandlingFailed) == []


def test_a_plain_handler_may_stop_its_consumer() -> None:
    """It runs on a thread, where no task of asyncio may be cancelled; in debug mode asyncio says so."""
    router, seen = Router(), list[events.Event]()
    broker = MemoryBroker()
    consumer = Consumer(broker.subscribe("orders", group="stock"), router, listener=seen.append)
    router.add("order.placed", consumer.stop_soon)

    async def run() -> None:
        await broker.publish_batch([Message(topic="orders", type="order.placed", payload=b"{}")])
        await consumer.run()

    asyncio.run(run(), debug=True)

    assert [event for event in seen if isinstance(event, events.Handled)]
    assert not [event for event in seen if isinstance(event, events.HandlingFailed)]


@pytest.mark.requirement("F-25")
async def test_a_second_stop_soon_cancels_handlers() -> None:
    """Who asks twice does not want to wait."""
    desk, gate = Desk(order(1)), Gate()
    consumer = Consumer(desk, routed(gate), shutdown_grace=timedelta(hours=1))

    async with running(consumer) as task:
        await until(lambda: gate.inside == 1, "the handler being at work")
        consumer.stop_soon()
        for _ in range(5):
            await asyncio.sleep(0)
        assert gate.inside == 1
        consumer.stop_soon()
        await asyncio.wait_for(task, 10)

    assert desk.told == [(1, Release())]


@pytest.mark.requirement("F-25")
async def test_what_is_released_at_the_end_is_not_read_again() -> None:
    """Each delivery is counted once, also if nobody wants to wait."""
    broker, seen = MemoryBroker(), Seen()
    consumer = Consumer(broker.subscribe("orders", group="g"), routed(Gate()), listener=seen.append)
    await broker.publish_batch([order(number, key=str(number)) for number in range(8)])

    async with running(consumer) as task:
        await until(lambda: bool(seen.of(events.ConsumerStarted)), "the consumer running")
        for _ in range(3):
            await asyncio.sleep(0)
        consumer.stop_soon()
        consumer.stop_soon()
        await asyncio.wait_for(task, 10)

    assert seen.of(events.ConsumerStopped) == [events.ConsumerStopped(8)]
    assert broker.backlog("g") == 8


async def test_a_consumer_runs_once() -> None:
    consumer = Consumer(Desk(), Router())
    async with running(consumer):
        await asyncio.sleep(0)
        with pytest.raises(AlreadyStartedError):
            await consumer.run()


async def test_a_consumer_that_was_stopped_before_it_ran_takes_nothing() -> None:
    desk = Desk(*map(order, range(9)))
    consumer = Consumer(desk, routed(Gate()))
    await consumer.stop()

    await asyncio.wait_for(consumer.run(), 10)

    assert desk.outcomes() == [Release()] * desk.taken


@pytest.mark.requirement("G2", "F-25")
async def test_an_error_of_the_subscriber_ends_the_consumer_after_its_handlers() -> None:
    """What is at work is finished and acknowledged first."""
    desk, gate = Desk(order(1), error=ConnectionError("the broker is gone")), Gate()
    consumer = Consumer(desk, routed(gate))
    task = asyncio.create_task(consumer.run())
    await until(lambda: gate.inside == 1, "the handler being at work")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    gate.open.set()

    with pytest.raises(ConnectionError, match="the broker is gone"):
        await task

    assert (desk.told, desk.is_left) == ([(1, Delivered())], True)


@pytest.mark.requirement("S1-30")
async def test_a_consumer_ends_with_its_subscriber() -> None:
    """A stream that ends is no error."""
    desk, gate = Desk(order(1)), Gate()
    desk.changed.set()
    gate.open.set()

    await asyncio.wait_for(Consumer(desk, routed(gate)).run(), 10)

    assert desk.told == [(1, Delivered())]


@pytest.mark.requirement("F-20", "F-25")
@pytest.mark.parametrize("steps", range(12))
async def test_a_cancelled_consumer_leaves_no_task_and_holds_no_delivery(steps: int) -> None:
    """Wherever the cancellation strikes."""
    before = asyncio.all_tasks()
    broker, begun = MemoryBroker(), list[bytes]()
    await broker.publish_batch([])
    subscription = broker.subscribe("orders", group="g")
    await broker.publish_batch([order(n, key="k" if n % 2 else None) for n in range(10)])

    async def handler(message: Message) -> None:
        begun.append(message.payload)
        await asyncio.Event().wait()

    task = asyncio.create_task(Consumer(subscription, routed(handler), concurrency=2).run())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert asyncio.all_tasks() == before
    async with broker.subscribe("orders", group="g") as other:
        again = list[Message]()
        while len(again) < 10:
            delivery = await asyncio.wait_for(anext(other), 10)
            again.append(delivery.message)
            await delivery.ack()
    assert {message.attempt for message in again} == {1}
    assert [m.payload for m in again if m.key] == [b"1", b"3", b"5", b"7", b"9"]


@pytest.mark.requirement("F-25")
async def test_a_cancelled_consumer_takes_no_more() -> None:
    """The room that cancelled handlers leave is not filled again."""
    desk, gate = Desk(*map(order, range(9))), Gate()
    task = asyncio.create_task(Consumer(desk, routed(gate), concurrency=2, buffer=0).run())
    await until(lambda: gate.inside == 2, "all the room being taken")
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert (desk.taken, desk.outcomes(), desk.is_left) == (2, [Release(), Release()], True)


@pytest.mark.requirement("F-20")
async def test_a_handler_that_ends_the_process_ends_the_consumer() -> None:
    """What is no error of a message is not swallowed, and the message comes again."""

    class End(BaseException):
        pass

    async def handler(_: Message) -> None:
        raise End

    desk = Desk(order(1))
    with pytest.raises(End):
        await asyncio.wait_for(Consumer(desk, routed(handler), backoff=no_delay, listener=Seen().append).run(), 10)

    assert desk.told == [(1, Retry("End", timedelta(0)))]


# -- services ----------------------------------------------------------------------------------------------------


class Serving:
    """A middleware that does something beside handling."""

    def __init__(self, serve: Callable[[events.Listener], Any]) -> None:
        self.serve = serve
        self.horizons: list[timedelta | None] = []

    def check_horizon(self, horizon: timedelta | None) -> None:
        self.horizons.append(horizon)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        return await call_next(message)


@pytest.mark.requirement("S1-40")
async def test_a_service_of_a_middleware_runs_as_long_as_the_consumer() -> None:
    """It is cancelled at the end, after the last handler."""
    steps, gate, desk = list[str](), Gate(), Desk(order(1))

    async def serve(tell: events.Listener) -> None:
        tell(events.InboxPurged("stock", 3))
        try:
            await asyncio.Event().wait()
        finally:
            steps.append(f"service ended, {len(gate.ended)} handled")

    seen = Seen()
    consumer = Consumer(desk, routed(gate), Serving(serve), listener=seen.append)
    async with running(consumer):
        await until(lambda: gate.inside == 1, "the handler being at work")
        consumer.stop_soon()
        gate.open.set()

    assert steps == ["service ended, 1 handled"]
    assert seen.of(events.InboxPurged) == [events.InboxPurged("stock", 3)]


async def test_a_service_that_has_nothing_to_do_stops_nobody() -> None:
    async def serve(_: events.Listener) -> None:
        pass

    desk, gate = Desk(order(1), order(2)), Gate()
    async with running(Consumer(desk, routed(gate), Serving(serve), concurrency=1, buffer=0)):
        await until(lambda: gate.inside == 1, "the handler being at work")
        gate.open.set()
        await until(lambda: desk.outcomes() == [Delivered()] * 2, "both messages being handled")


@pytest.mark.requirement("S1-40")
async def test_a_service_that_fails_ends_the_consumer_with_its_error() -> None:
    """An inbox that is never cleaned would grow without a word."""

    async def serve(_: events.Listener) -> None:
        raise LookupError("no such table")

    with pytest.raises(LookupError, match="no such table"):
        await asyncio.wait_for(Consumer(Desk(), Router(), Serving(serve)).run(), 10)


@pytest.mark.requirement("S1-06")
async def test_a_wrong_order_is_refused_before_a_message_is_taken() -> None:
    """At the start, and the consumer says that it has ended."""
    desk = Desk(order(1))
    consumer = Consumer(desk, Router(), RetryMiddleware(), RetryMiddleware())

    with pytest.raises(MiddlewareOrderError, match="RetryMiddleware is there twice"):
        await consumer.run()
    await asyncio.wait_for(consumer.stop(), 10)

    assert desk.taken == 0


@pytest.mark.requirement("S1-41")
async def test_middlewares_may_refuse_a_broker_by_how_long_it_remembers() -> None:
    """They are told at the start, before a message is taken."""
    desk = Desk(order(1))
    desk.redelivery_horizon = timedelta(days=30)

    class Forgetful(Serving):
        def check_horizon(self, horizon: timedelta | None) -> None:
            super().check_horizon(horizon)
            raise ConfigurationError("too long")

    async def serve(_: events.Listener) -> None:
        pass

    middleware = Forgetful(serve)
    with pytest.raises(ConfigurationError, match="too long"):
        await Consumer(desk, Router(), middleware).run()

    assert (middleware.horizons, desk.taken) == ([timedelta(days=30)], 0)


# -- time limits -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F-25")
async def test_each_piece_of_work_has_the_whole_time_of_a_limit() -> None:
    """One timer for many, and none of them is cut short or forgotten."""
    limit, loop = Limit(50 * MS), asyncio.get_running_loop()
    took: list[float] = []

    async def work(delay: float) -> None:
        await asyncio.sleep(delay)
        began = loop.time()
        with contextlib.suppress(TimeoutError), Within(limit):
            await asyncio.Event().wait()
        took.append(loop.time() - began)

    async with asyncio.timeout(10):
        await asyncio.gather(*[work(0.01 * n) for n in range(8)])

    assert len(took) == 8
    assert min(took) >= 0.049


async def test_work_that_ends_in_time_is_not_cancelled_later() -> None:
    limit = Limit(5 * MS)
    for _ in range(3):
        with Within(limit):
            await asyncio.sleep(0)
    await asyncio.sleep(0.03)

    with pytest.raises(TimeoutError), Within(limit):
        await asyncio.Event().wait()


@pytest.mark.requirement("F-20")
async def test_a_task_that_somebody_cancels_is_cancelled_and_not_late() -> None:
    """Also when its time is over at the same moment."""
    limit = Limit(10 * MS)

    async def work() -> None:
        with Within(limit):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, task.cancel)
    time.sleep(0.03)  # noqa: ASYNC251 -- so that both strike before the task goes on

    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_limit_inside_another_knows_whose_time_is_over() -> None:
    outer, inner = Limit(10 * MS), Limit(SECOND * 60)
    steps: list[str] = []

    with pytest.raises(TimeoutError), Within(outer):
        try:
            with Within(inner):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            steps.append("cancelled from outside")
            raise

    assert steps == ["cancelled from outside"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_a_limit_works_in_one_loop_after_another() -> None:
    limit = Limit(5 * MS)

    async def late() -> str:
        try:
            with Within(limit):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "in time"

    async def quick() -> None:
        with Within(limit):
            await asyncio.sleep(0)

    asyncio.run(quick())

    assert [asyncio.run(late()), asyncio.run(late())] == ["late", "late"]


@pytest.mark.requirement("G11")
def test_a_limit_outlives_a_loop_that_was_closed_with_work_in_it() -> None:
    """What can never end there holds up nothing elsewhere."""
    limit, loop = Limit(5 * MS), asyncio.new_event_loop()

    async def work() -> str:
        try:
            with Within(limit):
                await asyncio.sleep(10)
        except TimeoutError:
            return "late"
        return "in time"

    left = loop.create_task(work())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    assert [asyncio.run(work()), asyncio.run(work())] == ["late", "late"]
    assert not left.done()
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- it cannot be ended any more


async def test_work_that_moves_on_has_the_whole_time_of_the_other_limit() -> None:
    long, short = Limit(timedelta(hours=1)), Limit(10 * MS)
    work = Within(long)
    work.move(short)

    with pytest.raises(asyncio.CancelledError) as raised:
        await asyncio.sleep(10)

    assert isinstance(work.end(raised.value), TimeoutError)
    assert not long.watched
    assert not short.watched
