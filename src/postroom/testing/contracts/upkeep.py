"""Upkeep: sweeping, purging, counting, hinting, opening and closing."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from ...store import Claim, Dead, Delivered, Retry, Settlement
from .harness import MINUTE, TERMS, StoreHarness, numbered, numbers, states, terms

__all__ = ["UpkeepContract"]

ONE = terms(max_attempts=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


async def _deliver(harness: StoreHarness, *messages: int) -> None:
    await harness.add(*[numbered(n) for n in messages])
    claims = await harness.store.claim(100, TERMS)
    await harness.store.settle([Settlement(claim, Delivered()) for claim in claims])


class UpkeepContract:
    """What keeps a store in order."""

    # -- other namespaces --------------------------------------------------------------------------------------

    async def test_messages_that_are_due_in_other_namespaces_are_found(self, harness: StoreHarness) -> None:
        """A dispatcher that finds nothing reports them, unless they are not due or a worker is at work there."""
        await harness.add(numbered(1))
        await harness.add(numbered(2), numbered(3, key="a"), namespace="shop")
        await harness.add(numbered(4), namespace="later", delay=HOUR)
        await harness.add(numbered(5), numbered(6), namespace="served")
        await (await harness.another(namespace="served")).claim(1, TERMS)
        await harness.add(numbered(7), namespace="done")
        done = await harness.another(namespace="done")
        await done.settle([Settlement(claim, Delivered()) for claim in await done.claim(1, TERMS)])

        found = [await harness.store.due_elsewhere(), await (await harness.another(namespace="shop")).due_elsewhere()]
        await harness.advance(MINUTE)
        found.append(await harness.store.due_elsewhere())

        if not harness.store.features.sees_namespaces:
            assert found == [{}, {}, {}]
            return
        own = harness.store.namespace
        assert found == [{"shop": 2}, {own: 1}, {"shop": 2, "served": 1}]

    # -- sweep -------------------------------------------------------------------------------------------------

    async def test_the_sweep_buries_a_message_whose_last_lease_ran_out(self, harness: StoreHarness) -> None:
        """It is counted once and says why; nothing is left in between."""
        await harness.add(numbered(1), numbered(2, key="a"))
        for _ in range(2):  # since a claim need not bring messages with a key and without one together
            await harness.store.claim(10, ONE)
        await harness.advance(MINUTE)

        counts = [await harness.store.sweep(ONE), await harness.store.sweep(ONE)]

        rows = await harness.rows()
        assert counts == [2, 0]
        assert states(rows) == [("dead", 1, 1), ("dead", 1, 1)]
        assert [(row.worker, row.lease_left) for row in rows] == [(None, None)] * 2
        assert all(row.last_error and "lease" in row.last_error for row in rows)

    async def test_the_sweep_leaves_alone_what_may_still_be_delivered(self, harness: StoreHarness) -> None:
        """What is leased, what has attempts left, what is settled, what is another's."""
        await harness.add(numbered(1), namespace="elsewhere")
        await (await harness.another(namespace="elsewhere")).claim(10, ONE)
        await harness.add(numbered(2))
        await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)
        await _deliver(harness, 3)
        await harness.add(numbered(4))
        await harness.store.claim(1, ONE)

        before = states(await harness.rows())
        counts = [await harness.store.sweep(terms(max_attempts=3)), await harness.store.sweep(terms(max_attempts=2))]

        assert counts == [0, 0]
        assert states(await harness.rows()) == before
        assert [state for state, _, _ in before] == ["processing", "delivered", "delivered", "processing"]

    async def test_the_sweep_buries_what_waits_without_an_attempt_left(self, harness: StoreHarness) -> None:
        """Also when the budget was lowered; the last error stays."""
        await harness.add(numbered(1), numbered(2))
        [one, two] = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(one, Retry("it said no")), Settlement(two, Retry("later", HOUR))])

        assert await harness.store.sweep(ONE) == 1

        rows = await harness.rows()
        assert states(rows) == [("dead", 1, 1), ("pending", 1, 1)]
        assert rows[0].last_error == "it said no"

    async def test_a_late_confirmation_makes_a_swept_message_delivered(self, harness: StoreHarness) -> None:
        """The worker was only slow, and the message is out."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, ONE)
        await harness.advance(MINUTE)
        await harness.store.sweep(ONE)

        assert await harness.store.settle([Settlement(claim, Delivered())]) == []

        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token, row.last_error) == ("delivered", 1, 1, None)

    @pytest.mark.parametrize("outcome", [Retry("no"), Dead("no")], ids=["retry", "dead"])
    async def test_a_late_failure_leaves_a_swept_message_as_it_is(
        self, harness: StoreHarness, outcome: Retry | Dead
    ) -> None:
        """Dead stays dead, with the reason of the sweep."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, ONE)
        await harness.advance(MINUTE)
        await harness.store.sweep(ONE)

        await harness.store.settle([Settlement(claim, outcome)])

        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token) == ("dead", 1, 1)
        assert row.last_error != "no"
        assert await harness.store.claim(10, TERMS) == []

    async def test_sweep_and_claims_at_the_same_time_agree(self, harness: StoreHarness) -> None:
        """Nobody holds what is dead."""
        await harness.add(*[numbered(n) for n in range(20)])
        two = terms(max_attempts=2)
        await harness.store.claim(20, two)
        await harness.advance(MINUTE)
        other = await harness.another()

        for _ in range(4):
            await asyncio.gather(*[store.claim(5, two) for store in (harness.store, other) for _ in range(3)])
            await harness.advance(MINUTE)
            await asyncio.gather(harness.store.sweep(two), other.sweep(two), harness.store.claim(1, two))

        assert [row for row in await harness.rows() if row.status == "dead" and row.attempts != 2] == []
        assert {row.status for row in await harness.rows() if row.worker is None} <= {"dead"}

    # -- purge -------------------------------------------------------------------------------------------------

    async def test_the_purge_deletes_what_was_delivered_long_ago(self, harness: StoreHarness) -> None:
        """By the time of delivery, not of arrival."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)
        await harness.advance(2 * DAY)
        await harness.store.settle([Settlement(claim, Delivered())])

        early = await harness.store.purge(older_than=DAY)
        await harness.advance(2 * DAY)
        late = await harness.store.purge(older_than=DAY)

        assert (early, late) == (0, 1)
        assert await harness.rows() == []

    async def test_the_purge_deletes_no_more_than_its_limit(self, harness: StoreHarness) -> None:
        """The oldest first, in chunks."""
        await _deliver(harness, 1, 2, 3)
        await harness.advance(HOUR)
        await _deliver(harness, 4, 5)
        await harness.advance(DAY)
        ids = [row.id for row in await harness.rows()]

        first = await harness.store.purge(older_than=HOUR, limit=3)
        left = [row.id for row in await harness.rows()]
        rest = [await harness.store.purge(older_than=HOUR, limit=3) for _ in range(2)]

        assert (first, rest) == (3, [2, 0])
        assert left == ids[3:]

    async def test_a_retention_longer_than_the_calendar_deletes_nothing(self, harness: StoreHarness) -> None:
        """``timedelta.max`` means "for good"; an error of the store would be retried for ever."""
        await _deliver(harness, 1)
        await harness.advance(DAY)

        assert await harness.store.purge(older_than=timedelta.max) == 0

    async def test_the_purge_never_deletes_what_was_not_delivered(self, harness: StoreHarness) -> None:
        """Neither pending nor processing nor dead, nor what belongs to another namespace."""
        elsewhere = await harness.another(namespace="elsewhere")
        await harness.add(numbered(1), namespace="elsewhere")
        await elsewhere.settle([Settlement(claim, Delivered()) for claim in await elsewhere.claim(10, TERMS)])
        await harness.add(numbered(2), numbered(3), numbered(4))
        two, three, _ = await harness.store.claim(3, TERMS)
        await harness.store.settle([Settlement(two, Dead("no")), Settlement(three, Retry("no"))])
        await harness.advance(1000 * DAY)

        assert await harness.store.purge(older_than=timedelta(0)) == 0
        assert [row.status for row in await harness.rows()] == ["delivered", "dead", "pending", "processing"]

    # -- stats -------------------------------------------------------------------------------------------------

    async def test_an_empty_store_counts_nothing(self, harness: StoreHarness) -> None:
        """And nothing waits."""
        stats = await harness.store.stats()

        assert (stats.pending, stats.processing, stats.delivered, stats.dead) == (0, 0, 0, 0)
        assert stats.oldest_due is None

    async def test_the_stats_count_every_state_of_the_namespace(self, harness: StoreHarness) -> None:
        """Dead messages are visible."""
        await harness.add(numbered(0), namespace="elsewhere")
        await _deliver(harness, 1, 2, 3, 4)
        await harness.add(*[numbered(n) for n in range(5, 8)])
        dead, _, _ = await harness.store.claim(3, TERMS)
        await harness.store.settle([Settlement(dead, Dead("no"))])
        await harness.add(numbered(8), numbered(9, key="a"), numbered(10, key="a"))

        stats = await harness.store.stats()

        assert (stats.pending, stats.processing, stats.delivered, stats.dead) == (3, 2, 4, 1)
        assert stats.ceiling >= 1000

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_the_stats_tell_how_long_the_oldest_due_message_has_waited(
        self, harness: StoreHarness, key: str | None
    ) -> None:
        """Counted from when it was due, for messages with and without a key."""
        await harness.add(numbered(1, key=key), delay=HOUR)
        early = await harness.store.stats()
        await harness.advance(HOUR + 10 * MINUTE)
        await harness.add(numbered(2), numbered(3, key="b"))
        late = await harness.store.stats()

        assert early.oldest_due is None
        assert late.oldest_due is not None
        assert 9 * MINUTE < late.oldest_due < 11 * MINUTE

    async def test_messages_that_a_dead_one_holds_back_are_not_waiting(self, harness: StoreHarness) -> None:
        """Nothing can be done about them by delivering faster."""
        if not harness.store.features.ordered:
            pytest.skip("this store holds nothing back")
        await harness.add(*[numbered(n, key="a") for n in range(3)])
        [head] = await harness.store.claim(1, TERMS)
        await harness.store.settle([Settlement(head, Dead("no"))])
        await harness.advance(HOUR)

        held_back = await harness.store.stats()
        await harness.add(numbered(3, key="b"))
        await harness.advance(10 * MINUTE)
        other = await harness.store.stats()

        assert (held_back.pending, held_back.oldest_due) == (2, None)
        assert other.oldest_due is not None
        assert 9 * MINUTE < other.oldest_due < 15 * MINUTE

    async def test_messages_behind_one_that_is_under_way_are_not_waiting(self, harness: StoreHarness) -> None:
        """Or behind one that is to be tried again later."""
        if not harness.store.features.ordered:
            pytest.skip("this store holds nothing back")
        await harness.add(*[numbered(n, key=key) for key in "ab" for n in range(2)])
        one, two = [claim for _ in range(2) for claim in await harness.store.claim(1, TERMS)]
        await harness.store.settle([Settlement(one, Retry("no", 5 * HOUR))])
        await harness.store.extend([two], 5 * HOUR)
        await harness.advance(HOUR)

        stats = await harness.store.stats()

        assert (stats.pending, stats.processing, stats.oldest_due) == (3, 1, None)

    # -- wake-ups ----------------------------------------------------------------------------------------------

    async def test_a_hint_of_another_process_wakes_those_who_listen(self, harness: StoreHarness) -> None:
        """Where the store can; elsewhere listening ends at once."""
        woken = asyncio.Event()
        listening = asyncio.create_task(harness.store.listen(woken.set))
        try:
            if not harness.store.features.wakeups:
                await asyncio.wait_for(listening, 10)
                assert not woken.is_set()
                return
            await asyncio.wait_for(woken.wait(), 10)  # told once at the start: something may have been missed
            for _ in range(2):
                woken.clear()
                await harness.hint()
                await asyncio.wait_for(woken.wait(), 10)
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    # -- open and close ----------------------------------------------------------------------------------------

    async def test_a_store_can_be_opened_twice_and_again_after_closing(self, harness: StoreHarness) -> None:
        """What was added and claimed is still there."""
        await harness.add(numbered(1), numbered(2))
        await harness.store.open()
        [one] = await harness.store.claim(1, TERMS)

        await harness.store.close()
        await harness.store.close()
        await harness.store.open()

        assert states(await harness.rows()) == [("processing", 1, 1), ("pending", 0, 0)]
        assert await harness.store.settle([Settlement(one, Delivered())]) == []
        assert numbers(await harness.store.claim(10, TERMS)) == [2]

    async def test_calls_at_the_same_time_do_not_disturb_each_other(self, harness: StoreHarness) -> None:
        """More calls at once than a store has connections."""
        await harness.add(*[numbered(n) for n in range(30)])
        store = harness.store

        async def work() -> list[Claim]:
            claims = await store.claim(1, terms())
            await store.extend(claims, MINUTE)
            await store.stats()
            await store.sweep(TERMS)
            lost = await store.settle([Settlement(claim, Delivered()) for claim in claims])
            return lost + claims[1:]

        answers = await asyncio.gather(*[work() for _ in range(30)])

        assert answers == [[]] * 30
        assert states(await harness.rows()) == [("delivered", 1, 1)] * 30
        assert await harness.store.purge(older_than=HOUR) == 0
