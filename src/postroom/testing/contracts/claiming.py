"""Claiming: a message is leased to one worker at a time, and every try is counted before it begins."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from ...store import Claim, Dead, Delivered, Retry, Settlement
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, states, terms

__all__ = ["ClaimingContract"]

RED = UUID("11111111-1111-4111-8111-111111111111")


class ClaimingContract:
    """How messages are leased."""

    async def test_an_empty_store_has_nothing_to_claim(self, harness: StoreHarness) -> None:
        """Nothing is not an error."""
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_claim_counts_the_attempt_raises_the_token_and_is_durable(self, harness: StoreHarness) -> None:
        """All of it is seen by everybody before the claim returns."""
        worker = uuid4()
        await harness.add(numbered(1))

        [claim] = await harness.store.claim(10, terms(worker=worker))

        [row] = await harness.rows()
        assert (claim.message.attempt, claim.message.token) == (1, 1)
        assert (claim.suspect, claim.broken) == (False, None)
        assert (row.status, row.attempts, row.token, row.worker) == ("processing", 1, 1, worker)
        assert row.lease_left is not None
        assert 20 * SECOND < row.lease_left <= 30 * SECOND

    async def test_a_claim_takes_no_more_than_its_limit(self, harness: StoreHarness) -> None:
        """With and without keys together."""
        await harness.add(*[numbered(n, key=None if n % 2 else "a") for n in range(1, 11)])

        first = await harness.store.claim(3, TERMS)
        second = await harness.store.claim(1, TERMS)

        assert [len(first), len(second)] == [3, 1]
        assert [row.status for row in await harness.rows()].count("processing") == 4

    async def test_what_was_due_first_is_claimed_first(self, harness: StoreHarness) -> None:
        """By due time, then by arrival."""
        await harness.add(numbered(1), delay=3 * MINUTE)
        await harness.add(numbered(2), delay=MINUTE)
        await harness.add(numbered(3), delay=2 * MINUTE)
        await harness.add(numbered(4), delay=2 * MINUTE)
        await harness.advance(10 * MINUTE)

        order = [numbers(await harness.store.claim(1, TERMS)) for _ in range(5)]

        assert order == [[2], [3], [4], [1], []]

    async def test_among_keys_the_one_due_first_is_claimed_first(self, harness: StoreHarness) -> None:
        """By due time, then by arrival, with keys as well."""
        await harness.add(numbered(1, key="a"), delay=2 * MINUTE)
        await harness.add(numbered(2, key="b"), delay=MINUTE)
        await harness.advance(10 * MINUTE)

        order = [numbers(await harness.store.claim(1, TERMS)) for _ in range(3)]

        assert order == [[2], [1], []]

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_neither_kind_of_message_starves_the_other(self, harness: StoreHarness, key: str | None) -> None:
        """A constant load of messages without a key does not hold up those with one, nor the reverse."""
        await harness.add(numbered(1000, key="b" if key is None else None))

        claimed: list[int] = []
        for turn in range(10):
            await harness.add(*[numbered(number, key=key and f"{key}{turn}{number}") for number in range(4)])
            claimed += numbers(await harness.store.claim(2, TERMS))

        assert claimed.count(1000) == 1

    async def test_a_leased_message_is_not_claimed_until_its_lease_runs_out(self, harness: StoreHarness) -> None:
        """A crash costs the lease and an attempt, and needs nobody to clean up."""
        await harness.add(numbered(1))
        await harness.store.claim(10, TERMS)

        held = await harness.store.claim(10, terms())
        await harness.advance(20 * SECOND)
        still_held = await harness.store.claim(10, terms())
        await harness.advance(20 * SECOND)
        [again] = await harness.store.claim(10, terms())

        assert (held, still_held) == ([], [])
        assert (again.message.attempt, again.message.token) == (2, 2)
        assert states(await harness.rows()) == [("processing", 2, 2)]

    async def test_each_claim_of_a_worker_has_a_lease_of_its_own(self, harness: StoreHarness) -> None:
        """What it claimed later is not taken over along with what it claimed first."""
        await harness.add(numbered(1))
        await harness.store.claim(10, TERMS)
        await harness.advance(20 * SECOND)
        await harness.add(numbered(2))
        await harness.store.claim(10, TERMS)
        await harness.advance(20 * SECOND)

        assert numbers(await harness.store.claim(10, terms())) == [1]

    async def test_an_expired_lease_goes_before_what_is_merely_due(self, harness: StoreHarness) -> None:
        """A crash does not send a message to the end of a long line."""
        await harness.add(numbered(1))
        await harness.store.claim(1, TERMS)
        await harness.add(numbered(2), numbered(3))
        await harness.advance(MINUTE)

        assert numbers(await harness.store.claim(1, TERMS)) == [1]

    async def test_claims_at_the_same_time_share_nothing(self, harness: StoreHarness) -> None:
        """Two stores on the same data, many claims at once."""
        await harness.add(*[numbered(n) for n in range(60)])
        stores = [harness.store, await harness.another()]

        batches = await asyncio.gather(*[stores[n % 2].claim(7, terms()) for n in range(12)])

        claimed = [number for batch in batches for number in numbers(batch)]
        rest = numbers(await harness.store.claim(100, TERMS))
        assert len(claimed) == len(set(claimed))
        assert sorted(claimed + rest) == list(range(60))
        assert {row.token for row in await harness.rows()} == {1}

    async def test_a_store_claims_from_its_own_namespace_only(self, harness: StoreHarness) -> None:
        """Namespaces share a table and nothing else."""
        elsewhere = await harness.another(namespace="elsewhere")
        await harness.add(numbered(1))
        await harness.add(numbered(2), namespace="elsewhere")

        assert numbers(await harness.store.claim(10, TERMS)) == [1]
        [other] = await elsewhere.claim(10, TERMS)
        assert (other.message.payload, other.message.namespace) == (b"2", "elsewhere")

    async def test_a_claim_may_be_scoped_to_a_tenant(self, harness: StoreHarness) -> None:
        """Without a tenant all are claimed, those of the system too."""
        await harness.add(numbered(1, tenant_id=RED), numbered(2, tenant_id=uuid4()), numbered(3))

        red = await harness.store.claim(10, terms(tenant_id=RED))
        rest = await harness.store.claim(10, TERMS)

        assert (numbers(red), numbers(rest)) == ([1], [2, 3])

    async def test_a_message_without_attempts_left_is_never_claimed(self, harness: StoreHarness) -> None:
        """Two attempts are two deliveries."""
        two = terms(max_attempts=2)
        await harness.add(numbered(1), numbered(2))
        for _ in range(2):
            claims = await harness.store.claim(10, two)
            await harness.store.settle([Settlement(claims[0], Retry("no"))])
            await harness.advance(MINUTE)
            await harness.store.claim(10, two)  # what was left to its lease comes alone

        assert await harness.store.claim(10, two) == []
        assert [row.attempts for row in await harness.rows()] == [2, 2]

    async def test_a_cancelled_claim_has_happened_or_has_not(self, harness: StoreHarness) -> None:
        """Wherever the cancellation strikes, nothing is lost and the store goes on working."""
        for patience in range(12):
            await harness.add(*[numbered(n) for n in range(5)])
            claiming = asyncio.create_task(harness.store.claim(5, TERMS))
            for _ in range(patience):
                await asyncio.sleep(0)
            claiming.cancel()
            await asyncio.wait({claiming})
            found = {(row.status, row.attempts) for row in await harness.rows() if row.status != "delivered"}
            assert found in ({("pending", 0)}, {("processing", 1)})
            await self._deliver_all(harness)

        assert [row.status for row in await harness.rows()] == ["delivered"] * 60

    @staticmethod
    async def _deliver_all(harness: StoreHarness) -> None:
        """Deliver what can be claimed at once, and what the cancelled claim may have taken."""
        for _ in range(2):
            claims = await harness.store.claim(10, TERMS)
            assert await harness.store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
            await harness.advance(MINUTE)

    # -- suspects ----------------------------------------------------------------------------------------------

    @staticmethod
    async def _make_suspect(harness: StoreHarness, number: int, **fields: object) -> None:
        """Let three leases of a message run out."""
        await harness.add(numbered(number, **fields))
        for _ in range(3):
            [claim] = await harness.store.claim(1, TERMS)
            assert (numbers([claim]), claim.suspect) == ([number], False)
            await harness.advance(MINUTE)

    async def test_a_message_that_may_kill_its_worker_travels_alone(self, harness: StoreHarness) -> None:
        """After three leases that ran out its neighbours are not put at stake any more."""
        await self._make_suspect(harness, 1)
        await harness.add(numbered(2), numbered(3, key="a"))

        claims = [await harness.store.claim(10, TERMS) for _ in range(3)]
        [alone] = [batch for batch in claims if any(claim.suspect for claim in batch)]
        others = [number for batch in claims if batch is not alone for number in numbers(batch)]

        assert sorted(others) == [2, 3]
        assert [(c.message.payload, c.message.attempt, c.suspect) for c in alone] == [(b"1", 4, True)]

    async def test_two_suspects_travel_one_by_one(self, harness: StoreHarness) -> None:
        """One of them may be innocent."""
        await harness.add(numbered(1), numbered(2))
        for _ in range(3):
            assert numbers(await harness.store.claim(10, TERMS)) == [1, 2]
            await harness.advance(MINUTE)

        alone = [await harness.store.claim(10, TERMS) for _ in range(3)]

        assert [(numbers(claims), [c.suspect for c in claims]) for claims in alone] == [
            ([1], [True]),
            ([2], [True]),
            ([], []),
        ]

    async def test_a_suspect_is_not_starved_by_a_constant_load(self, harness: StoreHarness) -> None:
        """It gets its turn although there is always something else."""
        await self._make_suspect(harness, 1000)

        seen: list[Claim] = []
        for number in range(40):
            await harness.add(numbered(number))
            seen += await harness.store.claim(1, TERMS)

        assert [c.message.payload for c in seen if c.suspect] == [b"1000"]

    async def test_a_message_that_fails_in_good_order_is_no_suspect(self, harness: StoreHarness) -> None:
        """A worker that told of the failure was not killed by it."""
        await harness.add(numbered(1))
        for _ in range(6):
            [claim] = await harness.store.claim(10, TERMS)
            assert not claim.suspect
            assert await harness.store.settle([Settlement(claim, Retry("no"))]) == []

        assert states(await harness.rows()) == [("pending", 6, 6)]

    async def test_with_few_attempts_the_last_one_is_made_alone(self, harness: StoreHarness) -> None:
        """Also a budget of two attempts protects the neighbours."""
        two = terms(max_attempts=2)
        await harness.add(numbered(1))
        await harness.store.claim(10, two)
        await harness.advance(MINUTE)
        await harness.add(numbered(2))

        others, alone = await harness.store.claim(10, two), await harness.store.claim(10, two)

        assert (numbers(others), numbers(alone), alone[0].suspect) == ([2], [1], True)

    # -- broken rows -------------------------------------------------------------------------------------------

    async def test_a_broken_row_is_reported_and_the_others_go_on(self, harness: StoreHarness) -> None:
        """It can be made dead, and holds up nobody."""
        if not harness.can_damage:
            pytest.skip("a row of this store cannot be damaged")
        await harness.add(numbered(1), broken := numbered(2), numbered(3))
        await harness.damage(broken.id)

        claims = await harness.store.claim(10, TERMS)
        [bad] = [claim for claim in claims if claim.broken is not None]
        lost = await harness.store.settle(
            [Settlement(claim, Delivered() if claim.broken is None else Dead(claim.broken)) for claim in claims]
        )

        assert lost == []
        assert (bad.message.id, bad.message.token, bad.message.attempt) == (broken.id, 1, 1)
        assert [row.status for row in await harness.rows()] == ["delivered", "dead", "delivered"]

    async def test_a_broken_row_still_says_where_it_belongs(self, harness: StoreHarness) -> None:
        """Who makes it dead must know which later messages it holds back."""
        if not harness.can_damage:
            pytest.skip("a row of this store cannot be damaged")
        await harness.add(broken := numbered(1, key="a"), numbered(2, key="a"))
        await harness.damage(broken.id)

        bad = (await harness.store.claim(10, TERMS))[0]

        assert bad.broken
        assert (bad.message.namespace, bad.message.topic, bad.message.key) == (harness.store.namespace, "orders", "a")

    # -- extend ------------------------------------------------------------------------------------------------

    async def test_an_extended_lease_holds_longer(self, harness: StoreHarness) -> None:
        """Counted from now on."""
        await harness.add(numbered(1), numbered(2))
        claims = await harness.store.claim(10, TERMS)

        await harness.advance(20 * SECOND)
        lost = await harness.store.extend(claims[:1], MINUTE)
        await harness.advance(30 * SECOND)

        assert lost == []
        assert numbers(await harness.store.claim(10, terms())) == [2]

    async def test_a_lease_that_ran_out_can_be_extended_while_nobody_took_over(self, harness: StoreHarness) -> None:
        """The token decides, not the clock."""
        await harness.add(numbered(1))
        claims = await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)

        assert await harness.store.extend(claims, MINUTE) == []
        assert await harness.store.claim(10, terms()) == []

    async def test_a_lost_claim_cannot_be_extended(self, harness: StoreHarness) -> None:
        """And the lease of the one who has it now is left as it was."""
        await harness.add(numbered(1))
        old = await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)
        await harness.store.claim(10, terms(lease=10 * SECOND))

        lost = await harness.store.extend(old, timedelta(hours=1))

        [row] = await harness.rows()
        assert lost == old
        assert row.lease_left is not None
        assert row.lease_left <= 10 * SECOND

    async def test_a_settled_claim_cannot_be_extended(self, harness: StoreHarness) -> None:
        """Of several claims only those that were lost are told."""
        await harness.add(numbered(1), numbered(2))
        claims = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claims[0], Delivered())])

        assert await harness.store.extend(claims, MINUTE) == claims[:1]
        assert await harness.store.extend([], MINUTE) == []
        assert states(await harness.rows()) == [("delivered", 1, 1), ("processing", 1, 1)]
