"""Order: of one key only the head goes, with followers that travel together, and nobody else waits for it."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

import pytest

from ...store import Claim, Dead, Delivered, OnDead, Release, Retry, Settlement, Store
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, states, terms

__all__ = ["OrderingContract"]

RED = UUID("11111111-1111-4111-8111-111111111111")
BLUE = UUID("22222222-2222-4222-8222-222222222222")


class OrderingContract:
    """How messages of one key follow each other, in stores whose features have ``ordered``."""

    @pytest.fixture(autouse=True)
    def _only_where_order_is_promised(self, request: pytest.FixtureRequest, harness: StoreHarness) -> None:
        # Other contracts are inherited together with this one, and their tests come by here too.
        if request.function.__name__ in vars(OrderingContract) and not harness.store.features.ordered:
            pytest.skip("this store does not keep the order of a key, and says so in its features")

    async def test_a_run_of_one_key_travels_in_one_claim_in_order(self, harness: StoreHarness) -> None:
        """As many as fit, and the rest waits for them."""
        await harness.add(*[numbered(n, key="a") for n in range(1, 6)])

        run = await harness.store.claim(3, TERMS)
        rest = await harness.store.claim(3, TERMS)

        assert (numbers(run), numbers(rest)) == ([1, 2, 3], [])

    async def test_followers_wait_until_everything_before_them_is_settled(self, harness: StoreHarness) -> None:
        """Only the head of a key may be in flight outside its own batch."""
        await harness.add(*[numbered(n, key="a") for n in range(1, 5)])
        one, two = await harness.store.claim(2, TERMS)

        await harness.store.settle([Settlement(two, Delivered())])
        early = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(one, Delivered())])
        rest = await harness.store.claim(10, TERMS)

        assert (numbers(early), numbers(rest)) == ([], [3, 4])

    async def test_keys_and_messages_without_one_do_not_wait_for_each_other(self, harness: StoreHarness) -> None:
        """A key is a line of its own, in its own topic."""
        await harness.add(numbered(1, key="a"))
        await harness.store.claim(10, TERMS)
        await harness.add(numbered(2, key="a"), numbered(3, key="b"), numbered(4), numbered(5, key="a", topic="bills"))

        claimed = [number for _ in range(2) for number in numbers(await harness.store.claim(10, TERMS))]

        assert sorted(claimed) == [3, 4, 5]

    async def test_a_key_of_another_namespace_is_another_key(self, harness: StoreHarness) -> None:
        """What is in flight elsewhere holds back nothing here."""
        elsewhere = await harness.another(namespace="elsewhere")
        await harness.add(numbered(1, key="a"), namespace="elsewhere")
        await harness.add(numbered(2, key="a"))
        await elsewhere.claim(10, TERMS)

        assert numbers(await harness.store.claim(10, TERMS)) == [2]

    async def test_a_failing_head_holds_back_its_own_key_only(self, harness: StoreHarness) -> None:
        """Until its delay is over; then the key goes on in order."""
        await harness.add(numbered(1, key="a"), numbered(2, key="a"), numbered(3, key="b"))
        one, two, three = sorted(await harness.store.claim(10, TERMS), key=lambda claim: claim.message.payload)

        await harness.store.settle(
            [Settlement(one, Retry("no", 5 * MINUTE)), Settlement(two, Release()), Settlement(three, Delivered())]
        )
        await harness.add(numbered(4, key="b"))
        meanwhile = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claim, Delivered()) for claim in meanwhile])
        await harness.advance(6 * MINUTE)
        after = await harness.store.claim(10, TERMS)

        assert (numbers(meanwhile), numbers(after)) == ([4], [1, 2])
        assert [claim.message.attempt for claim in after] == [2, 1]

    async def test_a_delayed_head_holds_back_its_key(self, harness: StoreHarness) -> None:
        """Order is that of arrival, whatever is due first."""
        await harness.add(numbered(1, key="a"), delay=5 * MINUTE)
        await harness.add(numbered(2, key="a"), numbered(3, key="b"))

        meanwhile = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claim, Delivered()) for claim in meanwhile])
        await harness.advance(6 * MINUTE)
        after = await harness.store.claim(10, TERMS)

        assert (numbers(meanwhile), numbers(after)) == ([3], [1, 2])

    async def test_a_delayed_follower_ends_the_run(self, harness: StoreHarness) -> None:
        """Those behind it wait for it, although they are due."""
        await harness.add(numbered(1, key="a"))
        await harness.add(numbered(2, key="a"), delay=5 * MINUTE)
        await harness.add(numbered(3, key="a"))

        first = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claim, Delivered()) for claim in first])
        early = await harness.store.claim(10, TERMS)
        await harness.advance(6 * MINUTE)

        assert (numbers(first), early) == ([1], [])
        assert numbers(await harness.store.claim(10, TERMS)) == [2, 3]

    async def test_a_run_whose_lease_ran_out_is_claimed_again_in_order(self, harness: StoreHarness) -> None:
        """A crash does not change the order."""
        await harness.add(*[numbered(n, key="a") for n in range(1, 5)])
        await harness.store.claim(2, TERMS)
        await harness.advance(MINUTE)

        again = await harness.store.claim(10, TERMS)

        assert numbers(again) == [1, 2, 3, 4]
        assert [claim.message.token for claim in again] == [2, 2, 1, 1]

    async def test_a_follower_whose_lease_ran_out_waits_for_a_head_that_is_held(self, harness: StoreHarness) -> None:
        """A heartbeat for the head alone frees nothing behind it."""
        await harness.add(numbered(1, key="a"), numbered(2, key="a"))
        head, _ = await harness.store.claim(10, TERMS)
        await harness.store.extend([head], 10 * MINUTE)
        await harness.advance(MINUTE)

        assert await harness.store.claim(10, TERMS) == []

    async def test_a_suspect_head_holds_back_its_key_and_goes_alone(self, harness: StoreHarness) -> None:
        """Its followers wait while it is tried by itself."""
        await harness.add(numbered(1, key="a"))
        for _ in range(3):
            assert numbers(await harness.store.claim(1, TERMS)) == [1]
            await harness.advance(MINUTE)
        await harness.add(numbered(2, key="a"), numbered(3, key="b"))

        others = await harness.store.claim(10, TERMS)
        alone = await harness.store.claim(10, TERMS)
        nothing = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claim, Delivered()) for claim in alone])

        assert (numbers(others), numbers(alone), nothing) == ([3], [1], [])
        assert alone[0].suspect
        assert numbers(await harness.store.claim(10, TERMS)) == [2]

    async def test_a_suspect_behind_another_message_waits_for_it(self, harness: StoreHarness) -> None:
        """Being tried alone does not mean being tried first."""
        await harness.add(numbered(1, key="a"), numbered(2, key="a"))
        for _ in range(3):
            assert numbers(await harness.store.claim(10, TERMS)) == [1, 2]
            await harness.advance(MINUTE)

        head = await harness.store.claim(10, TERMS)
        nothing = await harness.store.claim(10, TERMS)

        assert (numbers(head), nothing) == ([1], [])

    # -- dead heads --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("on_dead", "expected"), [("block", [4]), ("skip", [2, 3, 4])])
    async def test_a_dead_head_blocks_its_key_or_is_skipped(
        self, harness: StoreHarness, on_dead: OnDead, expected: list[int]
    ) -> None:
        """As the dispatcher wishes; other keys go on in any case."""
        await harness.add(numbered(1, key="a"), numbered(2, key="a"), numbered(3, key="a"), numbered(4, key="b"))
        head = next(claim for claim in await harness.store.claim(10, TERMS) if claim.message.payload == b"1")
        await harness.advance(MINUTE)
        await harness.store.settle([Settlement(head, Dead("no"))])

        assert sorted(numbers(await harness.store.claim(10, terms(on_dead=on_dead)))) == expected

    async def test_a_message_that_died_behind_the_head_blocks_those_behind_it(self, harness: StoreHarness) -> None:
        """What comes before it still goes."""
        await harness.add(*[numbered(n, key="a") for n in range(1, 4)])
        one, two, three = await harness.store.claim(10, TERMS)
        await harness.store.settle(
            [Settlement(one, Release()), Settlement(two, Dead("no")), Settlement(three, Release())]
        )

        assert numbers(await harness.store.claim(10, TERMS)) == [1]
        assert numbers(await harness.store.claim(10, terms(on_dead="skip"))) == []
        await harness.store.settle([Settlement(claim, Delivered()) for claim in await self._reclaim(harness, 1)])
        assert numbers(await harness.store.claim(10, TERMS)) == []
        assert numbers(await harness.store.claim(10, terms(on_dead="skip"))) == [3]

    @staticmethod
    async def _reclaim(harness: StoreHarness, count: int) -> Sequence[Claim]:
        await harness.advance(MINUTE)
        return await harness.store.claim(count, TERMS)

    async def test_a_head_that_the_sweep_buried_blocks_its_key(self, harness: StoreHarness) -> None:
        """A crash budget that is spent does not let the followers pass."""
        await harness.add(numbered(1, key="a"), numbered(2, key="a"))
        one = terms(max_attempts=1)
        await harness.store.claim(1, one)
        await harness.advance(MINUTE)

        assert await harness.store.sweep(one) == 1
        assert await harness.store.claim(10, one) == []
        assert numbers(await harness.store.claim(10, terms(on_dead="skip"))) == [2]

    async def test_a_head_of_another_tenant_holds_back_the_key(self, harness: StoreHarness) -> None:
        """A scope does not change the order."""
        await harness.add(numbered(1, key="a", tenant_id=RED), numbered(2, key="a", tenant_id=BLUE))

        early = await harness.store.claim(10, terms(tenant_id=BLUE))
        await harness.store.settle([Settlement(c, Delivered()) for c in await harness.store.claim(1, TERMS)])

        assert early == []
        assert numbers(await harness.store.claim(10, terms(tenant_id=BLUE))) == [2]

    # -- many at once ------------------------------------------------------------------------------------------

    async def test_a_long_line_behind_one_key_does_not_starve_the_others(self, harness: StoreHarness) -> None:
        """More followers than any claim would look at stand before the keys that could go."""
        await harness.add(*[numbered(n, key="a") for n in range(60)])
        await harness.store.claim(5, TERMS)
        await harness.advance(SECOND)
        await harness.add(numbered(100, key="b"), numbered(101, key="c"), numbered(102, key="A"))

        claimed = [await harness.store.claim(5, TERMS) for _ in range(2)]

        assert sorted(number for claims in claimed for number in numbers(claims)) == [100, 101, 102]

    @pytest.mark.parametrize("limit", [1, 5])
    async def test_many_blocked_keys_do_not_starve_another(self, harness: StoreHarness, limit: int) -> None:
        """Dead heads may hold back any number of keys for as long as nobody looks after them."""
        await harness.add(*[numbered(n, key=f"k{n:02}") for n in range(40)])
        await harness.store.settle([Settlement(c, Dead("no")) for c in await self._claim_all(harness)])
        await harness.add(*[numbered(100 + n, key=f"k{n:02}") for n in range(40)])
        await harness.advance(SECOND)
        await harness.add(
            numbered(1000, key="a first"), numbered(1001, key="z last"), numbered(1002, key="k20 between")
        )

        # Looking at some keys in each claim is enough, as long as the next one looks at others.
        claimed = [number for _ in range(60) for number in numbers(await harness.store.claim(limit, TERMS))]

        assert sorted(claimed) == [1000, 1001, 1002]

    async def test_expired_leases_behind_a_dead_head_do_not_starve_another(self, harness: StoreHarness) -> None:
        """A worker that crashed in the middle of a long run leaves them behind."""
        await harness.add(*[numbered(n, key="a") for n in range(60)])
        run = await harness.store.claim(100, TERMS)
        await harness.store.settle([Settlement(run[0], Dead("no"))])
        await harness.advance(SECOND)
        await harness.add(numbered(100, key="b"), numbered(101, key="A"))
        assert sorted(numbers(await harness.store.claim(100, TERMS))) == [100, 101]
        await harness.advance(MINUTE)

        claimed = [number for _ in range(10) for number in numbers(await harness.store.claim(5, TERMS))]

        assert len(run) == 60
        assert sorted(claimed) == [100, 101]

    @staticmethod
    async def _claim_all(harness: StoreHarness) -> list[Claim]:
        claimed: list[Claim] = []
        while claims := await harness.store.claim(100, TERMS):
            claimed += claims
        return claimed

    async def test_claims_at_the_same_time_never_overtake_within_a_key(self, harness: StoreHarness) -> None:
        """Two stores, many claims at once, until everything is delivered."""
        await harness.add(*[numbered(n, key=f"k{n % 4}") for n in range(48)])
        stores = [harness.store, await harness.another()]
        delivered: list[int] = []

        for _ in range(100):
            claims = await self._claim_at_once(stores)
            delivered += numbers(claims)
            await stores[0].settle([Settlement(claim, Delivered()) for claim in claims])
            if len(delivered) == 48:
                break

        lines = [[number for number in delivered if number % 4 == key] for key in range(4)]
        assert lines == [list(range(key, 48, 4)) for key in range(4)]
        assert set(states(await harness.rows())) == {("delivered", 1, 1)}

    @staticmethod
    async def _claim_at_once(stores: Sequence[Store]) -> list[Claim]:
        # Of different lengths, so that one claim has taken only the beginning of what another is about to take.
        batches = await asyncio.gather(*[stores[n % 2].claim(1 + n % 4, terms()) for n in range(8)])
        holders = [(claim.message.key, number) for number, batch in enumerate(batches) for claim in batch]
        # Of one key everything in flight belongs to one claim: two would run side by side.
        assert len(dict(holders)) == len(set(holders))
        return [claim for batch in batches for claim in batch]

    async def test_a_retry_among_claims_at_the_same_time_stays_in_front(self, harness: StoreHarness) -> None:
        """With failures and releases in between, first deliveries keep the order of arrival."""
        await harness.add(*[numbered(n, key=f"k{n % 3}") for n in range(30)])
        stores = [harness.store, await harness.another()]
        delivered: list[int] = []

        for turn in range(200):
            claims = await self._claim_at_once(stores)
            failing = {claim.message.key for claim in claims if (int(claim.message.payload) + turn) % 3 == 0}
            settlements = [
                Settlement(c, Release(timedelta(0)) if c.message.key in failing else Delivered()) for c in claims
            ]
            delivered += [int(s.claim.message.payload) for s in settlements if isinstance(s.outcome, Delivered)]
            assert await stores[turn % 2].settle(settlements) == []
            if len(delivered) == 30:
                break

        lines = [[number for number in delivered if number % 3 == key] for key in range(3)]
        assert lines == [list(range(key, 30, 3)) for key in range(3)]
