"""Settling: what became of a claim is recorded for its holder alone, and once."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

from datetime import timedelta

import pytest

from ...store import Claim, Dead, Delivered, Outcome, Release, Retry, Settlement
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, states, terms

__all__ = ["SettlingContract"]

HOUR = timedelta(hours=1)
OUTCOMES: list[Outcome] = [Delivered(), Retry("no", HOUR), Dead("never"), Release(HOUR)]
NAMES = ["delivered", "retry", "dead", "release"]


async def _settle(harness: StoreHarness, claim: Claim, outcome: Outcome) -> list[Claim]:
    return await harness.store.settle([Settlement(claim, outcome)])


class SettlingContract:
    """How claims end."""

    async def test_to_settle_nothing_does_nothing(self, harness: StoreHarness) -> None:
        """An empty batch is no error."""
        assert await harness.store.settle([]) == []

    async def test_a_delivered_message_is_never_claimed_again(self, harness: StoreHarness) -> None:
        """Delivered is the end, and the lock is gone."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)
        await _settle(harness, claim, Retry("first try"))
        [claim] = await harness.store.claim(10, TERMS)

        assert await _settle(harness, claim, Delivered()) == []

        await harness.advance(HOUR)
        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token) == ("delivered", 2, 2)
        assert (row.worker, row.lease_left, row.last_error) == (None, None, None)
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_store_that_keeps_nothing_deletes_what_is_delivered(self, harness: StoreHarness) -> None:
        """And says nothing of a loss when it is told again, which may be after a lost answer."""
        store = await harness.another(keep_delivered=timedelta(0))
        await harness.add(numbered(1), numbered(2))
        one, two = await store.claim(10, TERMS)
        settlements = [Settlement(one, Delivered()), Settlement(two, Retry("no"))]

        first, again = await store.settle(settlements), await store.settle(settlements)

        assert (first, again) == ([], [])
        assert states(await harness.rows()) == [("pending", 1, 1)]
        assert await store.settle([Settlement(one, Retry("no"))]) == [one]

    async def test_a_failed_message_waits_for_its_delay_and_keeps_its_error(self, harness: StoreHarness) -> None:
        """The attempt stays counted, the lease is cleared."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)

        assert await _settle(harness, claim, Retry("broker said no: ä", 5 * MINUTE)) == []

        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token, row.worker) == ("pending", 1, 1, None)
        assert row.last_error == "broker said no: ä"
        assert 4 * MINUTE < row.due_in <= 5 * MINUTE
        assert await harness.store.claim(10, TERMS) == []
        await harness.advance(6 * MINUTE)
        [again] = await harness.store.claim(10, TERMS)
        assert (again.message.attempt, again.message.token, again.message.id) == (2, 2, claim.message.id)

    async def test_a_retry_without_a_delay_is_due_at_once(self, harness: StoreHarness) -> None:
        """None leaves it to the dispatcher, which has decided before."""
        await harness.add(numbered(1))
        await _settle(harness, (await harness.store.claim(10, TERMS))[0], Retry("no"))

        assert numbers(await harness.store.claim(10, TERMS)) == [1]

    async def test_a_dead_message_stays_dead_and_says_why(self, harness: StoreHarness) -> None:
        """Neither claims nor sweeps nor purges touch it."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)

        assert await _settle(harness, claim, Dead("rejected")) == []

        await harness.advance(HOUR)
        await harness.store.sweep(TERMS)
        await harness.store.purge(older_than=timedelta(0))
        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token) == ("dead", 1, 1)
        assert (row.worker, row.lease_left, row.last_error) == (None, None, "rejected")
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_released_message_gets_its_attempt_back(self, harness: StoreHarness) -> None:
        """But its token has risen for good, so the old claim stays refused."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)

        assert await _settle(harness, claim, Release()) == []

        assert states(await harness.rows()) == [("pending", 0, 1)]
        [again] = await harness.store.claim(10, TERMS)
        assert (again.message.attempt, again.message.token) == (1, 2)

    async def test_a_released_message_is_due_since_it_was(self, harness: StoreHarness) -> None:
        """The age of the oldest due message grows through an outage, however often its claim is given back."""
        await harness.add(numbered(1))
        for _ in range(3):
            await harness.advance(timedelta(minutes=1))
            [claim] = await harness.store.claim(10, TERMS)
            await _settle(harness, claim, Release())

        oldest = (await harness.store.stats()).oldest_due
        assert oldest is not None
        assert oldest >= timedelta(minutes=3)

    async def test_a_release_may_ask_for_a_delay(self, harness: StoreHarness) -> None:
        """A destination that is down is left alone for a while."""
        await harness.add(numbered(1))
        await _settle(harness, (await harness.store.claim(10, TERMS))[0], Release(5 * MINUTE))

        early = await harness.store.claim(10, TERMS)
        await harness.advance(6 * MINUTE)

        assert early == []
        assert numbers(await harness.store.claim(10, TERMS)) == [1]

    async def test_an_outage_costs_no_attempts_however_long_it_lasts(self, harness: StoreHarness) -> None:
        """Twenty releases with a budget of three attempts make nothing dead."""
        three = terms(max_attempts=3)
        await harness.add(numbered(1))

        for _ in range(20):
            [claim] = await harness.store.claim(10, three)
            await _settle(harness, claim, Release())

        assert await harness.store.sweep(three) == 0
        assert states(await harness.rows()) == [("pending", 0, 20)]

    async def test_a_release_keeps_the_error_of_the_failure_before(self, harness: StoreHarness) -> None:
        """What is known of a message is not forgotten because it was not tried."""
        await harness.add(numbered(1))
        await _settle(harness, (await harness.store.claim(10, TERMS))[0], Retry("it failed"))
        await _settle(harness, (await harness.store.claim(10, TERMS))[0], Release())

        [row] = await harness.rows()
        assert (row.attempts, row.last_error) == (1, "it failed")

    # -- the token ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("outcome", "state"),
        list(zip(OUTCOMES, [("delivered", 1, 1), ("pending", 1, 1), ("dead", 1, 1), ("pending", 0, 1)], strict=True)),
        ids=NAMES,
    )
    async def test_a_late_settlement_counts_while_nobody_else_took_over(
        self, harness: StoreHarness, outcome: Outcome, state: tuple[str, int, int]
    ) -> None:
        """A pause past the lease costs nothing if the token is still current."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)
        await harness.advance(HOUR)

        assert await _settle(harness, claim, outcome) == []
        assert states(await harness.rows()) == [state]

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=NAMES)
    async def test_a_claim_that_was_taken_over_cannot_be_settled(self, harness: StoreHarness, outcome: Outcome) -> None:
        """It is told as lost and nothing changes, although the worker is the same."""
        await harness.add(numbered(1))
        [old] = await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)
        [new] = await harness.store.claim(10, TERMS)
        [before] = await harness.rows()

        lost = await _settle(harness, old, outcome)

        [after] = await harness.rows()
        assert lost == [old]
        assert (after.status, after.attempts, after.token) == ("processing", 2, 2)
        assert (after.worker, after.last_error) == (before.worker, None)
        assert await _settle(harness, new, Delivered()) == []

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=NAMES)
    async def test_a_claim_cannot_be_settled_after_another_worker_has_settled(
        self, harness: StoreHarness, outcome: Outcome
    ) -> None:
        """Neither freed, nor buried, nor counted twice."""
        await harness.add(numbered(1))
        [old] = await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)
        [new] = await harness.store.claim(10, terms())
        await _settle(harness, new, Retry("mine"))

        assert await _settle(harness, old, outcome) == [old]

        [row] = await harness.rows()
        assert (row.status, row.attempts, row.token, row.last_error) == ("pending", 2, 2, "mine")

    @pytest.mark.parametrize(
        ("outcome", "state"),
        list(zip(OUTCOMES, [("delivered", 2, 2), ("pending", 2, 2), ("dead", 2, 2), ("pending", 1, 2)], strict=True)),
        ids=NAMES,
    )
    async def test_to_settle_twice_is_no_loss_and_has_no_second_effect(
        self, harness: StoreHarness, outcome: Outcome, state: tuple[str, int, int]
    ) -> None:
        """A call whose answer was lost may be repeated, also in one batch."""
        await harness.add(numbered(1))
        await _settle(harness, (await harness.store.claim(10, TERMS))[0], Retry("before"))
        [claim] = await harness.store.claim(10, TERMS)

        first = await harness.store.settle([Settlement(claim, outcome), Settlement(claim, outcome)])
        again = await _settle(harness, claim, outcome)

        assert (first, again) == ([], [])
        assert states(await harness.rows()) == [state]

    @pytest.mark.parametrize(
        ("first", "second", "state"),
        [
            (Delivered(), Retry("no"), ("delivered", 1, 1)),
            (Delivered(), Dead("no"), ("delivered", 1, 1)),
            (Delivered(), Release(), ("delivered", 1, 1)),
            (Dead("no"), Retry("no"), ("dead", 1, 1)),
            (Dead("no"), Release(), ("dead", 1, 1)),
            (Retry("no"), Delivered(), ("pending", 1, 1)),
            (Retry("no"), Dead("no"), ("pending", 1, 1)),
            (Release(), Delivered(), ("pending", 0, 1)),
        ],
    )
    async def test_a_second_decision_is_refused(
        self, harness: StoreHarness, first: Outcome, second: Outcome, state: tuple[str, int, int]
    ) -> None:
        """A claim ends once."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)
        await _settle(harness, claim, first)

        assert await _settle(harness, claim, second) == [claim]
        assert states(await harness.rows()) == [state]

    async def test_a_message_that_is_not_there_is_lost_unless_delivered(self, harness: StoreHarness) -> None:
        """Only delivered messages are ever deleted, so there a missing row tells what happened."""
        stranger = Claim(numbered(1, token=1, attempt=1))

        assert await _settle(harness, stranger, Retry("no")) == [stranger]
        assert await _settle(harness, stranger, Dead("no")) == [stranger]
        assert await _settle(harness, stranger, Delivered()) == []
        assert await harness.rows() == []

    async def test_one_batch_settles_each_claim_by_itself(self, harness: StoreHarness) -> None:
        """What was lost does not take the others along."""
        await harness.add(*[numbered(n) for n in range(1, 7)])
        claims = await harness.store.claim(10, TERMS)
        stale = claims[5]
        await _settle(harness, stale, Release())
        await harness.store.claim(10, terms())

        lost = await harness.store.settle(
            [
                Settlement(claims[0], Delivered()),
                Settlement(claims[1], Retry("one", MINUTE)),
                Settlement(stale, Delivered()),
                Settlement(claims[2], Dead("two")),
                Settlement(claims[3], Release()),
                Settlement(claims[4], Retry("three", HOUR)),
            ]
        )

        rows = await harness.rows()
        assert lost == [stale]
        assert states(rows) == [
            ("delivered", 1, 1),
            ("pending", 1, 1),
            ("dead", 1, 1),
            ("pending", 0, 1),
            ("pending", 1, 1),
            ("processing", 1, 2),
        ]
        assert [row.last_error for row in rows] == [None, "one", "two", None, "three", None]
        assert rows[1].due_in <= MINUTE < 59 * MINUTE < rows[4].due_in

    async def test_claim_settle_and_extend_say_when_a_row_was_changed(self, harness: StoreHarness) -> None:
        """Without a trigger."""
        await harness.add(numbered(1))
        ages: list[timedelta] = []

        async def note() -> None:
            ages.extend(row.unchanged_for for row in await harness.rows())
            await harness.advance(HOUR)

        await harness.advance(HOUR)
        [claim] = await harness.store.claim(10, TERMS)
        await note()
        await harness.store.extend([claim], MINUTE)
        await note()
        await _settle(harness, claim, Retry("no"))
        await note()
        [claim] = await harness.store.claim(10, TERMS)
        await _settle(harness, claim, Release())
        await note()
        [claim] = await harness.store.claim(10, TERMS)
        await _settle(harness, claim, Dead("no"))
        await note()
        await _settle(harness, claim, Delivered())
        await note()

        assert len(ages) == 6
        assert max(ages) < MINUTE
        assert (await harness.rows())[0].unchanged_for > 59 * MINUTE

    async def test_an_error_of_any_length_is_kept(self, harness: StoreHarness) -> None:
        """Or its beginning; in no case does it keep the settlement from being recorded."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)

        assert await _settle(harness, claim, Retry("ä\x00" * 100_000, SECOND)) == []

        [row] = await harness.rows()
        assert row.last_error is not None
        assert row.last_error.startswith("ä")
        assert states([row]) == [("pending", 1, 1)]
