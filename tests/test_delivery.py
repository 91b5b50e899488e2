"""Deliveries: settled once, by whoever comes first, and known to all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import Dead, Delivered, Delivery, Message, Outcome, Release, Retry, current_delivery, share
from postroom.delivery import current
from postroom.errors import NoDeliveryError


def message(payload: bytes = b"{}") -> Message:
    return Message(topic="orders", type="order.placed", payload=payload)


class Broker:
    """Writes down what it is told; an answer can be held back."""

    def __init__(self) -> None:
        self.told: list[Outcome] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def settle(self, outcome: Outcome) -> None:
        self.told.append(outcome)
        await self.may_answer.wait()

    def delivery(self) -> Delivery:
        return Delivery(message(), self.settle)


@pytest.mark.requirement("F-03", "F-06")
async def test_each_way_to_settle_tells_the_broker_its_outcome() -> None:
    """Ack, nack, reject and release are the four things that can be said."""
    broker = Broker()
    acked, nacked, rejected, released = (broker.delivery() for _ in range(4))

    await acked.ack()
    await nacked.nack("no stock", delay=timedelta(seconds=3))
    await rejected.reject("no such order")
    await released.release()

    expected: list[Outcome] = [
        Delivered(),
        Retry("no stock", timedelta(seconds=3)),
        Dead("no such order"),
        Release(),
    ]
    assert broker.told == expected
    assert [each.outcome for each in (acked, nacked, rejected, released)] == expected


@pytest.mark.requirement("F-06")
async def test_a_second_ack_does_nothing() -> None:
    """Settlement is idempotent, and the callback runs at most once."""
    broker = Broker()
    delivery = broker.delivery()

    await delivery.ack()
    await delivery.ack()
    await delivery.nack("too late")

    assert broker.told == [Delivered()]
    assert delivery.error is None


@pytest.mark.requirement("F-06")
async def test_the_error_of_the_first_nack_is_kept_and_can_be_read() -> None:
    """What comes later changes neither the outcome nor the reason."""
    broker = Broker()
    delivery = broker.delivery()
    assert delivery.error is None

    await delivery.nack("first")
    await delivery.nack("second")
    await delivery.reject("third")
    await delivery.ack()

    assert delivery.error == "first"
    assert broker.told == [Retry("first")]


@pytest.mark.requirement("F-06")
async def test_of_two_tasks_that_settle_at_once_the_first_counts() -> None:
    """Settlement is exclusive, also while the broker has not answered yet."""
    broker = Broker()
    broker.may_answer.clear()
    delivery = broker.delivery()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(delivery.nack("first"))
        tasks.create_task(delivery.ack())
        tasks.create_task(delivery.reject("third"))
        await asyncio.sleep(0)
        broker.may_answer.set()

    assert broker.told == [Retry("first")]
    assert delivery.outcome == Retry("first")


@pytest.mark.requirement("F-06")
async def test_a_callback_that_fails_is_not_called_again() -> None:
    """What the broker did not hear is told to whoever settled, and stays said."""
    calls: list[Outcome] = []

    async def fail(outcome: Outcome) -> None:
        calls.append(outcome)
        raise ConnectionError

    delivery = Delivery(message(), fail)

    with pytest.raises(ConnectionError):
        await delivery.ack()
    await delivery.nack()

    assert calls == [Delivered()]
    assert delivery.outcome == Delivered()


@pytest.mark.requirement("F-07")
async def test_everybody_who_waits_learns_how_a_delivery_was_settled() -> None:
    """The signal is called settled, can be awaited, and answers at once afterwards."""
    delivery = Broker().delivery()
    waiters = [asyncio.create_task(delivery.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)

    await delivery.nack("no stock")

    assert await asyncio.gather(*waiters) == [Retry("no stock")] * 3
    assert await delivery.settled() == Retry("no stock")


@pytest.mark.requirement("F-07")
async def test_a_waiter_that_gives_up_disturbs_nobody() -> None:
    """To wait is no claim; a cancelled waiter ends neither the delivery nor the other waiters."""
    broker = Broker()
    delivery = broker.delivery()
    patient, impatient = (asyncio.create_task(delivery.settled()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await delivery.settled()

    await delivery.ack()

    assert await patient == Delivered()
    assert broker.told == [Delivered()]


@pytest.mark.requirement("F-07")
async def test_a_delivery_whose_waiters_have_all_gone_can_be_settled() -> None:
    """Nothing is left behind by a waiter."""
    delivery = Broker().delivery()
    waiter = asyncio.create_task(delivery.settled())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait({waiter})

    await delivery.ack()

    assert await delivery.settled() == Delivered()


@pytest.mark.requirement("G11")
async def test_a_repr_shows_no_payload() -> None:
    """Reprs end up in logs."""
    delivery = Delivery(message(b"canary"), Broker().settle)

    assert "canary" not in repr(delivery)
    assert "order.placed" in repr(delivery)


@pytest.mark.requirement("F-05")
async def test_there_is_a_current_delivery_only_while_one_is_handled() -> None:
    """Who acknowledges by hand finds the delivery, and elsewhere learns where to look."""
    delivery = Broker().delivery()
    with pytest.raises(NoDeliveryError, match="from a handler that a Consumer runs"):
        current_delivery()

    token = current.set(delivery)
    assert current_delivery() is delivery
    current.reset(token)


@pytest.mark.requirement("F-04")
async def test_an_input_is_acknowledged_with_the_last_of_its_outputs() -> None:
    """Shared acking waits for all."""
    broker = Broker()
    delivery = broker.delivery()
    outputs = [message(), message(), message()]

    shared = share(delivery, outputs)

    assert [each.message for each in shared] == outputs
    for each in shared:
        assert delivery.outcome is None
        await each.ack()
    assert broker.told == [Delivered()]


@pytest.mark.requirement("F-04", "F-06")
async def test_an_output_that_is_settled_often_counts_once() -> None:
    """Two acks of one output do not stand for an ack of another."""
    broker = Broker()
    first, second = share(broker.delivery(), [message(), message()])

    await first.ack()
    await first.ack()
    await first.nack("too late")
    assert broker.told == []
    await second.ack()

    assert broker.told == [Delivered()]


@pytest.mark.requirement("F-04")
@pytest.mark.parametrize(
    "outcome", [Retry("broker full"), Dead("too large"), Release()], ids=["nack", "reject", "release"]
)
async def test_one_output_that_fails_fails_the_input(outcome: Outcome) -> None:
    """Any nack of an output is a nack of the input, at once and whatever follows."""
    broker = Broker()
    first, second, third = share(broker.delivery(), [message(), message(), message()])

    await first.ack()
    await second.settle(outcome)
    assert broker.told == [outcome]
    await third.ack()

    assert broker.told == [outcome]


@pytest.mark.requirement("F-04")
def test_without_outputs_there_is_nothing_to_share() -> None:
    """The caller acknowledges, since nobody else would."""
    assert share(Broker().delivery(), []) == []


OUTCOMES = st.sampled_from([Delivered(), Retry("a"), Dead("b"), Release()])


@pytest.mark.requirement("F-04", "F-06")
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, n - 1), OUTCOMES)).map(lambda said: (n, said))
    )
)
def test_whatever_is_said_in_whatever_order_the_first_failure_or_the_last_ack_counts(
    case: tuple[int, Sequence[tuple[int, Outcome]]],
) -> None:
    """The same for any number of outputs, settled any number of times."""
    count, said = case

    async def play() -> list[Outcome]:
        broker = Broker()
        shared = share(broker.delivery(), [message()] * count)
        for place, outcome in said:
            await shared[place].settle(outcome)
        return broker.told

    first: dict[int, Outcome] = {}
    for place, outcome in said:
        first.setdefault(place, outcome)
    failures = [outcome for outcome in first.values() if outcome != Delivered()]
    expected = failures[:1] or ([Delivered()] if len(first) == count else [])
    assert asyncio.run(play()) == expected


async def test_a_delivery_shows_how_it_was_settled_and_not_why() -> None:
    """An error's text may be made of the payload."""
    delivery = Broker().delivery()
    assert repr(delivery).endswith("outcome=None)")

    await delivery.nack("invalid literal: '4111-1111'")

    assert repr(delivery).endswith("outcome=Retry)")
    assert "4111" not in repr(delivery)


@pytest.mark.requirement("F-06")
async def test_what_a_handler_says_is_told_though_it_is_cancelled() -> None:
    """And whoever records it again waits until it is."""
    broker = Broker()
    broker.may_answer.clear()
    delivery = broker.delivery()
    delivery.is_handled = True
    handler = asyncio.create_task(delivery.ack())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    handler.cancel()
    await asyncio.wait({handler})
    waiting = asyncio.create_task(delivery.record(Release()))
    await asyncio.sleep(0)
    assert handler.cancelled()
    assert not waiting.done()

    broker.may_answer.set()
    await waiting

    assert broker.told == [Delivered()]
