"""Peeking: what claims would bring next is shown, and nothing is changed by looking."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from ...store import Dead, Delivered, Peeked, Release, Retry, Settlement
from .harness import MINUTE, SECOND, TERMS, StoredRow, StoreHarness, numbered, numbers, terms

__all__ = ["PeekingContract"]


def _shown(peeked: Sequence[Peeked]) -> list[int]:
    """Return which messages were shown."""
    return [int(one.message.payload) for one in peeked]


def _stored(rows: Sequence[StoredRow]) -> list[tuple[object, ...]]:
    """Return what is stored and does not change with time alone."""
    return [(row.id, row.status, row.attempts, row.token, row.worker, row.last_error) for row in rows]


class PeekingContract:
    """What a peek shows."""

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_a_peek_shows_what_the_next_claim_brings(self, harness: StoreHarness, key: str | None) -> None:
        """A claim afterwards returns the same messages, in that order, as if there had been no peek."""
        await harness.add(*[numbered(number, key=key) for number in range(5)])
        before = await harness.rows()

        peeked = [await harness.store.peek(3) for _ in range(2)]
        after = await harness.rows()
        claims = await harness.store.claim(3, TERMS)

        assert [_shown(one) for one in peeked] == [[0, 1, 2]] * 2
        assert _stored(after) == _stored(before)
        assert numbers(claims) == [0, 1, 2]
        assert [claim.message.id for claim in claims] == [one.message.id for one in peeked[0]]
        assert [(claim.message.attempt, claim.message.token) for claim in claims] == [
            (one.message.attempt + 1, one.message.token + 1) for one in peeked[0]
        ]
        assert [claim.message.attempt for claim in claims] == [1, 1, 1]

    async def test_a_peek_shows_the_whole_message(self, harness: StoreHarness) -> None:
        """An operator sees what a dispatcher would be given."""
        message = numbered(7, key="a", headers={"traceparent": "00-1"})
        await harness.add(message)
        await harness.advance(MINUTE)

        [peeked] = await harness.store.peek(10)

        shown = peeked.message
        assert (shown.id, shown.topic, shown.type, shown.key) == (message.id, "orders", "order.placed", "a")
        assert (shown.payload, shown.headers, shown.attempt) == (b"7", {"traceparent": "00-1"}, 0)
        assert shown.namespace == harness.store.namespace
        assert peeked.due_for >= timedelta(0)
        assert peeked.broken is None

    async def test_messages_with_and_without_a_key_are_shown_together(self, harness: StoreHarness) -> None:
        """Also by a store whose claims bring one kind at a time."""
        for number in range(4):
            await harness.add(numbered(number, key="a" if number % 2 else None))
            await harness.advance(SECOND)

        assert _shown(await harness.store.peek(10)) == [0, 1, 2, 3]

    async def test_a_peek_shows_no_more_than_it_may(self, harness: StoreHarness) -> None:
        """The limit is a limit, and zero is one too."""
        await harness.add(*[numbered(number) for number in range(3)])

        assert [len(await harness.store.peek(limit)) for limit in (0, 1, 2, 3, 100)] == [0, 1, 2, 3, 3]

    async def test_a_peek_shows_only_the_topic_that_it_is_asked_for(self, harness: StoreHarness) -> None:
        """The limit counts messages of that topic."""
        await harness.add(*[numbered(number, topic="bills" if number % 2 else "orders") for number in range(6)])

        assert _shown(await harness.store.peek(2, topic="bills")) == [1, 3]
        assert _shown(await harness.store.peek(10, topic="orders")) == [0, 2, 4]
        assert await harness.store.peek(10, topic="parcels") == []

    async def test_other_namespaces_are_not_shown(self, harness: StoreHarness) -> None:
        """A namespace is a world of its own."""
        other = await harness.another(namespace="other")
        await harness.add(numbered(1))

        assert await other.peek(10) == []

    async def test_what_is_leased_or_delivered_or_dead_or_not_due_is_not_shown(self, harness: StoreHarness) -> None:
        """No claim would bring it now."""
        await harness.add(*[numbered(number) for number in range(3)])
        delivered, dead, _ = await harness.store.claim(3, TERMS)
        await harness.store.settle([Settlement(delivered, Delivered()), Settlement(dead, Dead("no"))])
        await harness.add(numbered(3), delay=MINUTE)

        assert await harness.store.peek(10) == []

    async def test_a_delayed_message_is_shown_when_it_is_due(self, harness: StoreHarness) -> None:
        """With how long it has been due, and wherever a store keeps it until a claim finds it."""
        await harness.add(numbered(1), delay=MINUTE)
        await harness.advance(2 * MINUTE)
        before = await harness.rows()

        [peeked] = await harness.store.peek(10)

        assert _shown([peeked]) == [1]
        assert 30 * SECOND < peeked.due_for < 10 * MINUTE
        assert _stored(await harness.rows()) == _stored(before)
        assert numbers(await harness.store.claim(10, TERMS)) == [1]

    async def test_a_message_that_failed_is_shown_with_its_attempts_when_it_is_due_again(
        self, harness: StoreHarness
    ) -> None:
        """The claim that follows counts on from there."""
        await harness.add(numbered(1))
        claims = await harness.store.claim(1, TERMS)
        await harness.store.settle([Settlement(claims[0], Retry("no", MINUTE))])
        assert await harness.store.peek(10) == []

        await harness.advance(2 * MINUTE)
        [peeked] = await harness.store.peek(10)
        [claim] = await harness.store.claim(10, TERMS)

        assert (peeked.message.attempt, claim.message.attempt) == (1, 2)
        assert claim.message.token == peeked.message.token + 1

    async def test_a_message_that_was_given_back_is_shown_without_the_attempt(self, harness: StoreHarness) -> None:
        """It was not tried."""
        await harness.add(numbered(1))
        claims = await harness.store.claim(1, TERMS)
        await harness.store.settle([Settlement(claims[0], Release())])

        [peeked] = await harness.store.peek(10)

        assert peeked.message.attempt == 0

    async def test_messages_whose_lease_ran_out_are_shown_first(self, harness: StoreHarness) -> None:
        """They are claimed first, too."""
        await harness.add(numbered(0), numbered(1))
        await harness.store.claim(2, terms(lease=SECOND))
        await harness.add(numbered(2), numbered(3))
        await harness.advance(MINUTE)
        before = await harness.rows()

        peeked = await harness.store.peek(2)

        assert [(one.message.payload, one.message.attempt) for one in peeked] == [(b"0", 1), (b"1", 1)]
        assert _shown(await harness.store.peek(10)) == [0, 1, 2, 3]
        assert _stored(await harness.rows()) == _stored(before)
        assert numbers(await harness.store.claim(2, TERMS)) == [0, 1]

    async def test_what_waits_for_an_earlier_message_of_its_key_is_not_shown(self, harness: StoreHarness) -> None:
        """Be that one leased, waiting for its next attempt, or dead."""
        if not harness.store.features.ordered:
            pytest.skip("this store keeps no order")
        for number, key in enumerate("abc"):
            await harness.add(numbered(number, key=key))
        leased = {claim.message.key: claim for claim in await harness.store.claim(10, TERMS)}
        await harness.store.settle(
            [Settlement(leased["b"], Retry("no", MINUTE)), Settlement(leased["c"], Dead("never"))]
        )
        for number, key in enumerate("abcd"):
            await harness.add(numbered(number + 3, key=key))

        assert _shown(await harness.store.peek(10)) == [6]
        assert numbers(await harness.store.claim(10, TERMS)) == [6]

    async def test_a_key_is_shown_in_its_order_whatever_is_due_first(self, harness: StoreHarness) -> None:
        """A head that was tried again later than its followers were due still goes before them."""
        if not harness.store.features.ordered:
            pytest.skip("this store keeps no order")
        await harness.add(*[numbered(number, key="a") for number in range(3)])
        [head] = await harness.store.claim(1, TERMS)
        await harness.store.settle([Settlement(head, Retry("no", SECOND))])
        await harness.advance(MINUTE)

        assert _shown(await harness.store.peek(2)) == [0, 1]
        assert numbers(await harness.store.claim(2, TERMS)) == [0, 1]

    async def test_what_is_parked_is_not_shown(self, harness: StoreHarness) -> None:
        """It waits for its destination, not for a claim."""
        if not harness.store.features.parks:
            pytest.skip("this store parks nothing")
        await harness.add(numbered(1))
        claims = await harness.store.claim(1, TERMS)
        await harness.store.settle([Settlement(claims[0], Release(destination="east"))])
        assert await harness.store.peek(10) == []

        await harness.store.unpark("east", 10)

        assert _shown(await harness.store.peek(10)) == [1]

    async def test_a_row_that_cannot_be_read_is_shown_as_broken(self, harness: StoreHarness) -> None:
        """One damaged row does not hide the others."""
        if not harness.can_damage:
            pytest.skip("this store cannot be damaged")
        [added] = await harness.add(numbered(1))
        assert added.id is not None
        await harness.damage(added.id)

        [peeked] = await harness.store.peek(10)

        assert peeked.message.id == added.id
        assert peeked.broken
