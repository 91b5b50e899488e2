"""The virtual clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from uuid import uuid4

import pytest

from postroom import ClaimTerms, Message, Outbox
from postroom.errors import ConfigurationError, ExpiredError
from postroom.middleware import DeadlineMiddleware
from postroom.stores import MemoryStore
from postroom.testing.clock import VirtualClock

HOUR = timedelta(hours=1)
TERMS = ClaimTerms(worker=uuid4())


def test_it_tells_the_same_moment_until_it_is_advanced() -> None:
    clock = VirtualClock()
    began = clock()

    assert clock() == began
    assert clock.advance(HOUR) == began + HOUR
    assert clock() == began + HOUR


def test_two_clocks_begin_alike_and_go_on_alone() -> None:
    first, second = VirtualClock(), VirtualClock()

    first.advance(HOUR)

    assert first() - second() == HOUR


def test_it_tells_utc_wherever_it_was_set() -> None:
    moment = datetime(2026, 7, 1, 12, tzinfo=timezone(2 * HOUR))

    clock = VirtualClock(moment)

    assert clock() == moment
    assert clock().tzinfo is UTC
    assert repr(clock) == "VirtualClock(2026-07-01T10:00:00+00:00)"


def test_a_moment_without_a_time_zone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no time zone; use datetime.now\(UTC\)"):
        VirtualClock(datetime(2026, 7, 1))  # noqa: DTZ001 -- that is the point


def test_it_does_not_go_back() -> None:
    clock = VirtualClock()
    began = clock()

    with pytest.raises(ConfigurationError, match="time does not go back"):
        clock.advance(-HOUR)

    assert clock() == began
    assert clock.advance(timedelta(0)) == began


async def test_a_store_in_memory_delivers_what_is_delayed_when_the_clock_says_so() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    with store.transaction() as transaction:
        Outbox().add(transaction, {"order_id": 42}, topic="reminders", delay=HOUR)

    early = await store.claim(10, TERMS)
    clock.advance(HOUR)
    due = await store.claim(10, TERMS)

    assert early == []
    assert [claim.message.topic for claim in due] == ["reminders"]


@pytest.mark.requirement("F-24")
async def test_a_message_expires_when_the_clock_says_so() -> None:
    """A deadline can be tested without waiting for it."""
    clock = VirtualClock()
    deadline = DeadlineMiddleware(clock=clock)
    message = Message(
        topic="orders", type="order.placed", payload=b"{}", headers={"ce-expirytime": (clock() + HOUR).isoformat()}
    )
    handled: list[Message] = []

    async def handle(message: Message) -> list[Message]:
        handled.append(message)
        return []

    await deadline(message, handle)
    clock.advance(HOUR)
    with pytest.raises(ExpiredError):
        await deadline(message, handle)

    assert handled == [message]
