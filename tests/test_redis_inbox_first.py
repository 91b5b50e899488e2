"""An inbox in Redis outside of its transaction: it claims a message first, and the transaction completes the claim.

What holds in either order of the two is in `test_redis_inbox`, which runs in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from postroom import Message, Outbox, events
from postroom.errors import MiddlewareOrderError
from postroom.inbox import Inbox
from postroom.middleware import InboxMiddleware, OutboxMiddleware, TransactionMiddleware
from postroom.middleware.chain import Middleware, Next
from postroom.store import Delivered, Outcome, Release, Retry
from postroom.stores.redis import current_pipeline
from postroom.transaction import in_transaction

from . import test_redis_transaction
from .test_redis_inbox import Hand, counting, effects, elsewhere, failing, inbox, mark, message
from .test_redis_transaction import Shop

shop = test_redis_transaction.shop


def inbox_first(shop: Shop, box: Inbox, work: Callable[[Message], Any], *between: Middleware) -> Hand:
    """Return a consumer whose inbox claims a message before its transaction, with other middlewares in between."""
    heard: list[events.Event] = []
    hand = Hand(
        work,
        InboxMiddleware(box, listener=heard.append),
        *between,
        TransactionMiddleware(shop.transactions),
        OutboxMiddleware(Outbox(namespace=shop.tag)),
    )
    hand.heard = heard
    return hand


@pytest.mark.requirement("S0-10", "S0-15", "S0-22")
async def test_the_transaction_takes_the_claim_over_and_ends_it(shop: Shop) -> None:
    """The claim is there before the transaction begins; effect, event and mark come together."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()
    steps: list[tuple[bool, str, tuple[int, int]]] = []

    async def look() -> None:
        steps.append((in_transaction() is not None, await mark(shop, box, handled), await effects(shop)))

    async def between(received: Message, call_next: Next) -> Sequence[Message]:
        await look()
        outputs = await call_next(received)
        await look()
        return outputs

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        await look()
        return [Message(topic="events", type="stock.reserved", payload=b"{}")]

    outcome = await inbox_first(shop, box, handle, between).deliver(handled)

    assert outcome == Delivered()
    assert steps == [(False, "p", (0, 0)), (True, "p", (0, 0)), (False, "done", (1, 1))]


@pytest.mark.requirement("S0-17", "S0-35")
async def test_of_deliveries_at_the_same_time_one_is_handled_and_none_is_acknowledged_before(shop: Shop) -> None:
    """The others are released while it runs, and are duplicates then."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()
    during: list[Outcome] = []

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        during.extend(await asyncio.gather(*(elsewhere(hand.deliver(handled)) for _ in range(3))))
        return []

    hand = inbox_first(shop, box, handle)
    outcomes = [await hand.deliver(handled), await hand.deliver(handled)]

    assert [type(outcome) for outcome in during] == [Release, Release, Release]
    assert (outcomes, hand.calls, await effects(shop)) == ([Delivered(), Delivered()], 1, (1, 0))
    assert [type(event) for event in hand.heard] == [events.DuplicateSkipped]


@pytest.mark.requirement("S0-22")
async def test_a_middleware_in_between_that_answers_by_itself_ends_the_message(shop: Shop) -> None:
    """No transaction began; the message is marked all the same, since it is acknowledged."""
    box, handled = inbox(), message()

    async def answer(received: Message, call_next: Next) -> Sequence[Message]:
        return []

    hand = inbox_first(shop, box, counting(shop), answer)
    outcomes = [await hand.deliver(handled), await hand.deliver(handled)]

    assert (outcomes, hand.calls) == ([Delivered(), Delivered()], 0)
    assert await mark(shop, box, handled) == "done"
    assert [type(event) for event in hand.heard] == [events.DuplicateSkipped]


@pytest.mark.requirement("S0-21", "S0-37")
async def test_a_middleware_in_between_that_fails_gives_the_claim_back(shop: Shop) -> None:
    """Also before a transaction has begun."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()

    async def fail(received: Message, call_next: Next) -> Sequence[Message]:
        raise ZeroDivisionError

    outcome = await inbox_first(shop, box, counting(shop), fail).deliver(handled)

    assert isinstance(outcome, Retry)
    assert await mark(shop, box, handled) == ""
    assert await inbox_first(shop, box, counting(shop)).deliver(handled) == Delivered()


@pytest.mark.requirement("S0-20")
async def test_a_middleware_in_between_may_try_again_with_a_claim_of_its_own(shop: Shop) -> None:
    """Each transaction claims the message again; one that finds it done runs no handler."""
    box, handled, lost = inbox(lease=timedelta(minutes=10)), message(), message()
    other = inbox_first(shop, box, counting(shop))

    async def again(received: Message, call_next: Next) -> Sequence[Message]:
        with suppress(ZeroDivisionError):
            return await call_next(received)
        if received.id == lost.id:
            assert await elsewhere(other.deliver(received)) == Delivered()
        return await call_next(received)

    async def handle(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        if hand.calls % 2:
            raise ZeroDivisionError
        return []

    hand = inbox_first(shop, box, handle, again)

    assert await hand.deliver(handled) == Delivered()
    assert (hand.calls, await effects(shop), await mark(shop, box, handled)) == (2, (1, 0), "done")
    assert await hand.deliver(lost) == Delivered()
    assert (hand.calls, other.calls, await effects(shop)) == (3, 1, (2, 0))
    assert [type(event) for event in hand.heard] == [events.DuplicateSkipped]


@pytest.mark.requirement("S0-22")
async def test_other_transactions_leave_the_claim_alone(shop: Shop) -> None:
    """Those of a middleware in between, and of a handler; what they commit does not mark the message."""
    box, handled = inbox(lease=timedelta(minutes=10)), message()
    other, same = TransactionMiddleware(shop.also(shop.client)), TransactionMiddleware(shop.transactions)
    marks: list[str] = []

    async def write(_: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("alone"), 1)
        return []

    async def between(received: Message, call_next: Next) -> Sequence[Message]:
        await other(received, write)
        marks.append(await mark(shop, box, handled))
        return await call_next(received)

    async def handle(received: Message) -> Sequence[Message]:
        await other(received, lambda again: same(again, write))
        marks.append(await mark(shop, box, handled))
        raise ZeroDivisionError

    hand = inbox_first(shop, box, handle, between)
    outcome = await hand.deliver(handled)

    assert [type(error) for error in hand.errors] == [ZeroDivisionError]
    assert isinstance(outcome, Retry)
    assert marks == ["p", "p"]
    assert (await shop.client.get(shop.key("alone")), await mark(shop, box, handled)) == (b"2", "")


@pytest.mark.requirement("S0-22")
async def test_a_message_handed_on_inside_a_transaction_is_not_marked_if_its_handler_fails(shop: Shop) -> None:
    """The outer handler goes on after the error, and commits without it."""
    box, inner_message = inbox(lease=timedelta(minutes=10)), message()
    inner = inbox_first(shop, box, failing)

    async def outer(received: Message) -> Sequence[Message]:
        await current_pipeline(shop.client).incrby(shop.key("effect"), 1)
        with suppress(ZeroDivisionError):
            await inner.chain(inner_message)
        return []

    await Hand(outer, TransactionMiddleware(shop.transactions)).deliver(message())

    assert (await effects(shop), await mark(shop, box, inner_message)) == ((1, 0), "")
    assert await inbox_first(shop, box, counting(shop)).deliver(inner_message) == Delivered()
    assert await effects(shop) == (2, 0)


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_inbox_that_claims_belongs_to_one_list_of_middlewares(shop: Shop, *, is_first: bool) -> None:
    """In another one its mark would outlive a transaction that is rolled back, and the message be lost."""
    shared, other = InboxMiddleware(inbox()), TransactionMiddleware(shop.also(shop.client))
    lists: list[list[Middleware]] = [[shared, TransactionMiddleware(shop.transactions)], [other, shared]]
    one, another = lists if is_first else reversed(lists)
    Hand(failing, *one)
    Hand(failing, *one)  # as a consumer that is made again

    with pytest.raises(MiddlewareOrderError, match="create another one"):
        Hand(failing, *another)


async def test_an_inbox_that_claims_is_not_shared_by_different_transactions(shop: Shop) -> None:
    """Each completes its own claims only."""
    shared, other = InboxMiddleware(inbox()), TransactionMiddleware(shop.also(shop.client))
    Hand(failing, shared, TransactionMiddleware(shop.transactions))

    with pytest.raises(MiddlewareOrderError, match="create another one"):
        Hand(failing, shared, other)
