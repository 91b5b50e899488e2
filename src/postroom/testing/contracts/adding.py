"""Adding: a message is there if and only if its transaction committed, and once."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from ...errors import TenantMismatchError
from ...message import Message
from ...store import Claim, Delivered, Settlement
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, states

__all__ = ["AddingContract"]

RED = UUID("11111111-1111-4111-8111-111111111111")
BLUE = UUID("22222222-2222-4222-8222-222222222222")


def _skip_without_duplicates(harness: StoreHarness) -> None:
    if not harness.store.features.dedupes:
        pytest.skip("this store does not know duplicates, and says so in its features")


class AddingContract:
    """How messages come into a store."""

    async def test_a_committed_message_waits_as_pending_untried_unlocked_and_due(self, harness: StoreHarness) -> None:
        """What a new row says."""
        [added] = await harness.add(numbered(1))

        [row] = await harness.rows()

        assert added.is_new
        assert row.id == added.id
        assert (row.status, row.attempts, row.token) == ("pending", 0, 0)
        assert (row.worker, row.lease_left, row.last_error) == (None, None, None)
        assert -MINUTE < row.due_in <= timedelta(0)

    async def test_a_rolled_back_message_leaves_nothing(self, harness: StoreHarness) -> None:
        """No phantom."""
        await harness.add_and_roll_back(numbered(1), numbered(2, key="a"))

        assert await harness.rows() == []
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_message_cannot_be_claimed_before_its_commit(self, harness: StoreHarness) -> None:
        """A store with one writer may let the claim wait, but never see what is not committed."""
        async with harness.transaction() as transaction:
            await harness.write(transaction, numbered(1))
            early = asyncio.create_task(harness.store.claim(10, TERMS))
            await asyncio.wait({early}, timeout=0.2)
            seen = early.result() if early.done() else []

        assert seen == []
        assert numbers(await early + await harness.store.claim(10, TERMS)) == [1]

    async def test_a_transaction_that_rolls_back_late_is_never_claimed(self, harness: StoreHarness) -> None:
        """Also not by a claim that was waiting for it."""
        claiming: list[asyncio.Task[list[Claim]]] = []
        with pytest.raises(ZeroDivisionError):
            async with harness.transaction() as transaction:
                await harness.write(transaction, numbered(1))
                claiming.append(asyncio.create_task(harness.store.claim(10, TERMS)))
                await asyncio.wait(claiming, timeout=0.05)
                raise ZeroDivisionError

        assert await asyncio.gather(*claiming) == [[]]
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_message_comes_out_as_it_went_in(self, harness: StoreHarness) -> None:
        """Id, names, bytes and headers survive the store."""
        message = Message(
            topic="orders",
            type="order.placed",
            key="42 ä",
            payload=b"\x00\xff not JSON",
            content_type="application/octet-stream",
            headers={"ce-source": "shop", "note": "grün"},
            tenant_id=RED,
            dedupe_key=f"{RED.hex}/42",
            namespace=harness.store.namespace,
        )
        await harness.add(message)

        [claim] = await harness.store.claim(10, TERMS)

        assert claim.message == message
        assert claim.message.time is not None
        assert abs(datetime.now(UTC) - claim.message.time) < MINUTE

    async def test_one_call_adds_many_messages_in_their_order(self, harness: StoreHarness) -> None:
        """Arrival order is the order of the call."""
        added = await harness.add(*[numbered(n) for n in range(1, 31)])

        assert [one.is_new for one in added] == [True] * 30
        assert [row.id for row in await harness.rows()] == [one.id for one in added]

    async def test_a_delayed_message_is_claimed_only_when_it_is_due(self, harness: StoreHarness) -> None:
        """Due means due."""
        await harness.add(numbered(1), delay=10 * MINUTE)

        early = await harness.store.claim(10, TERMS)
        await harness.advance(9 * MINUTE)
        still_early = await harness.store.claim(10, TERMS)
        await harness.advance(2 * MINUTE)
        due = await harness.store.claim(10, TERMS)

        assert (early, still_early) == ([], [])
        assert numbers(due) == [1]

    async def test_a_message_with_a_due_time_is_claimed_only_then(self, harness: StoreHarness) -> None:
        """A moment, in whatever time zone, is as good as a delay."""
        await harness.add(numbered(1), due_at=datetime.now(UTC).astimezone() + 10 * MINUTE)

        early = await harness.store.claim(10, TERMS)
        await harness.advance(11 * MINUTE)
        due = await harness.store.claim(10, TERMS)

        assert early == []
        assert numbers(due) == [1]

    async def test_adding_the_same_message_again_adds_nothing(self, harness: StoreHarness) -> None:
        """One id is one message."""
        _skip_without_duplicates(harness)
        message = numbered(1)
        await harness.add(message)

        [again] = await harness.add(message)

        assert (again.is_new, again.id) == (False, message.id)
        assert len(await harness.rows()) == 1

    async def test_a_duplicate_is_told_and_named_and_not_stored(self, harness: StoreHarness) -> None:
        """One row for a dedupe key, and no error."""
        _skip_without_duplicates(harness)
        [first] = await harness.add(numbered(1, dedupe_key="order-1"))

        [second] = await harness.add(numbered(2, dedupe_key="order-1"))

        assert (second.is_new, second.id) == (False, first.id)
        assert [row.id for row in await harness.rows()] == [first.id]

    async def test_of_duplicates_in_one_call_the_first_is_added(self, harness: StoreHarness) -> None:
        """Also among messages that come together with others."""
        _skip_without_duplicates(harness)
        one, two, three = numbered(1, dedupe_key="x"), numbered(2, dedupe_key="x"), numbered(3)

        added = await harness.add(one, two, three)

        assert [(result.id, result.is_new) for result in added] == [(one.id, True), (one.id, False), (three.id, True)]
        assert numbers(await harness.store.claim(10, TERMS)) == [1, 3]

    async def test_a_dedupe_key_counts_within_its_namespace_and_topic(self, harness: StoreHarness) -> None:
        """Others may use the same key for something else."""
        [first] = await harness.add(numbered(1, dedupe_key="x"))
        [topic] = await harness.add(numbered(2, dedupe_key="x", topic="invoices"))
        [namespace] = await harness.add(numbered(3, dedupe_key="x"), namespace="elsewhere")

        assert [first.is_new, topic.is_new, namespace.is_new] == [True, True, True]
        assert len(await harness.rows()) == 3

    async def test_tenants_cannot_get_into_the_way_of_each_other(self, harness: StoreHarness) -> None:
        """A tenant's dedupe keys are its own."""
        [red] = await harness.add(numbered(1, tenant_id=RED, dedupe_key=f"{RED.hex}/order-1"))
        [blue] = await harness.add(numbered(2, tenant_id=BLUE, dedupe_key=f"{BLUE.hex}/order-1"))

        assert [red.is_new, blue.is_new] == [True, True]

    async def test_a_dedupe_key_of_another_tenant_is_refused_and_nothing_is_stored(self, harness: StoreHarness) -> None:
        """Neither that message nor the one before it in the call."""
        with pytest.raises(TenantMismatchError):
            await harness.add(numbered(1), numbered(2, tenant_id=RED, dedupe_key=f"{BLUE.hex}/order-1"))

        assert await harness.rows() == []

    async def test_a_rolled_back_dedupe_key_is_free_again(self, harness: StoreHarness) -> None:
        """Only what committed is a duplicate's first."""
        await harness.add_and_roll_back(numbered(1, dedupe_key="x"))

        [added] = await harness.add(numbered(2, dedupe_key="x"))

        assert added.is_new
        assert numbers(await harness.store.claim(10, TERMS)) == [2]

    async def test_a_delivered_message_keeps_its_dedupe_key_until_it_is_purged(self, harness: StoreHarness) -> None:
        """The retention of delivered messages is how far back duplicates are known."""
        _skip_without_duplicates(harness)
        await harness.add(numbered(1, dedupe_key="x"))
        await harness.store.settle([Settlement(c, Delivered()) for c in await harness.store.claim(10, TERMS)])

        [before] = await harness.add(numbered(2, dedupe_key="x"))
        await harness.advance(SECOND)
        await harness.store.purge(older_than=timedelta(0))
        [after] = await harness.add(numbered(3, dedupe_key="x"))

        assert [before.is_new, after.is_new] == [False, True]

    async def test_of_many_that_race_with_one_dedupe_key_one_is_added(self, harness: StoreHarness) -> None:
        """The losers learn the id of the winner."""
        _skip_without_duplicates(harness)
        results = await asyncio.gather(*[harness.add(numbered(n, dedupe_key="x")) for n in range(8)])

        added = [one for [one] in results]
        [winner] = await harness.rows()
        assert sorted(one.is_new for one in added) == [False] * 7 + [True]
        assert {one.id for one in added} == {winner.id}
        assert states([winner]) == [("pending", 0, 0)]
