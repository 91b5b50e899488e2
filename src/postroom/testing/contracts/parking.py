"""Parking: messages of a destination that is down wait until it is back, and claims pass over them."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from ...store import PARKED_FOR, Claim, Dead, Delivered, Release, Retry, Settlement
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, states, terms

__all__ = ["ParkingContract"]


def _needs_parking(harness: StoreHarness) -> None:
    if not harness.store.features.parks:
        pytest.skip("this store cannot park messages")


async def _park(harness: StoreHarness, claims: Sequence[Claim], destination: str = "east") -> None:
    _needs_parking(harness)
    lost = await harness.store.settle([Settlement(claim, Release(destination=destination)) for claim in claims])
    assert lost == []


async def _claim_all(harness: StoreHarness) -> list[Claim]:
    """Claim everything that can be claimed: one claim need not return messages with and without a key together."""
    return [claim for _ in range(4) for claim in await harness.store.claim(10, TERMS)]


async def _parked(harness: StoreHarness, *added: int, destination: str = "east") -> None:
    """Add messages and park all of them at once."""
    await harness.add(*[numbered(number) for number in added])
    await _park(harness, await harness.store.claim(len(added), TERMS), destination)


class ParkingContract:
    """How messages wait for a destination."""

    async def test_a_parked_message_is_not_claimed_and_keeps_its_attempts(self, harness: StoreHarness) -> None:
        """Waiting for a destination costs nothing, and the delay of the release does not count."""
        _needs_parking(harness)
        await harness.add(numbered(1), numbered(2))
        one, two = await harness.store.claim(10, TERMS)

        lost = await harness.store.settle(
            [
                Settlement(one, Release(timedelta(microseconds=1), destination="east")),
                Settlement(two, Release()),
            ]
        )
        claimed = await _claim_all(harness)
        await harness.advance(30 * MINUTE)
        later = await harness.store.claim(10, terms(max_attempts=1))

        row = (await harness.rows())[0]
        assert lost == []
        assert (numbers(claimed), later) == ([2], [])
        assert (row.status, row.attempts, row.token, row.worker) == ("pending", 0, 1, None)

    async def test_parking_the_same_claim_twice_is_no_loss(self, harness: StoreHarness) -> None:
        """A call whose answer got lost may be repeated; another outcome comes too late."""
        await harness.add(numbered(1))
        [claim] = await harness.store.claim(10, TERMS)
        await _park(harness, [claim])

        assert await harness.store.settle([Settlement(claim, Release(destination="east"))]) == []
        assert await harness.store.settle([Settlement(claim, Dead("no"))]) == [claim]
        assert states(await harness.rows()) == [("pending", 0, 1)]
        assert await harness.store.unpark("east", 10) == 1

    async def test_a_lost_claim_cannot_be_parked(self, harness: StoreHarness) -> None:
        """The worker that holds the message now decides."""
        _needs_parking(harness)
        await harness.add(numbered(1))
        [old] = await harness.store.claim(10, TERMS)
        await harness.advance(MINUTE)
        [new] = await harness.store.claim(10, terms())

        assert await harness.store.settle([Settlement(old, Release(destination="east"))]) == [old]
        assert await harness.store.parked() == []
        assert await harness.store.settle([Settlement(new, Delivered())]) == []

    async def test_an_unparked_message_is_due_before_newer_ones(self, harness: StoreHarness) -> None:
        """It is due as of its creation, and is no longer parked."""
        await _parked(harness, 1)
        await harness.advance(MINUTE)
        await harness.add(numbered(2))

        count = await harness.store.unpark("east", 10)
        order = [numbers(await harness.store.claim(1, TERMS)) for _ in range(3)]

        assert count == 1
        assert order == [[1], [2], []]
        assert await harness.store.parked() == []
        assert await harness.store.unpark("east", 10) == 0

    async def test_messages_are_unparked_in_the_order_in_which_they_were_parked(self, harness: StoreHarness) -> None:
        """Those parked together in their order of arrival, and no more than the limit."""
        await harness.add(*[numbered(number) for number in range(1, 6)])
        claims = await harness.store.claim(10, TERMS)
        await _park(harness, claims[3:])
        await harness.advance(SECOND)
        await _park(harness, claims[:3])

        taken: list[tuple[int, list[int]]] = []
        for limit in (1, 2, 10, 10):
            count = await harness.store.unpark("east", limit)
            taken.append((count, numbers(await harness.store.claim(10, TERMS))))

        assert taken == [(1, [4]), (2, [1, 5]), (2, [2, 3]), (0, [])]

    async def test_messages_that_one_call_parks_wait_in_the_order_in_which_they_were_added(
        self, harness: StoreHarness
    ) -> None:
        """However the call lists them: they were parked at the same time."""
        await harness.add(numbered(1), numbered(2), numbered(3))
        one, two, three = await harness.store.claim(3, TERMS)
        await _park(harness, [three, one, two])

        unparked = list[int]()
        for _ in range(3):
            assert await harness.store.unpark("east", 1) == 1
            unparked += numbers(await _claim_all(harness))

        assert unparked == [1, 2, 3]

    async def test_a_message_that_is_parked_again_goes_to_the_end(self, harness: StoreHarness) -> None:
        """After a probe that failed another message is the next one."""
        await _parked(harness, 1, 2, 3)

        probes: list[int] = []
        for _ in range(7):
            await harness.advance(SECOND)
            assert await harness.store.unpark("east", 1) == 1
            claims = await harness.store.claim(10, TERMS)
            probes += numbers(claims)
            await _park(harness, claims)

        assert probes == [1, 2, 3, 1, 2, 3, 1]

    async def test_destinations_are_parked_and_unparked_apart(self, harness: StoreHarness) -> None:
        """Names that begin alike are different destinations."""
        await _parked(harness, 1, 2, destination="east")
        await _parked(harness, 3, destination="east/1")
        await _parked(harness, 4, destination="eas")

        counts = [await harness.store.unpark(name, 10) for name in ("east/1", "west", "ea")]

        assert counts == [1, 0, 0]
        assert numbers(await harness.store.claim(10, TERMS)) == [3]
        assert await harness.store.parked() == ["eas", "east"]

    async def test_the_parked_destinations_come_in_pages(self, harness: StoreHarness) -> None:
        """In ascending order, each once, from another namespace none."""
        _needs_parking(harness)
        elsewhere = await harness.another(namespace="elsewhere")
        await harness.add(numbered(0), namespace="elsewhere")
        [other] = await elsewhere.claim(10, TERMS)
        await elsewhere.settle([Settlement(other, Release(destination="b2"))])
        names = [f"{letter}{number}" for number in (2, 1, 3) for letter in "cab"]
        for number, name in enumerate(names):
            await _parked(harness, number, number + 100, destination=name)

        pages = [await harness.store.parked(limit=4)]
        while pages[-1]:
            pages.append(await harness.store.parked(after=pages[-1][-1], limit=4))

        assert pages == [["a1", "a2", "a3", "b1"], ["b2", "b3", "c1", "c2"], ["c3"], []]
        assert await elsewhere.parked() == ["b2"]
        assert await harness.store.unpark("b2", 10) == 2

    async def test_destinations_of_any_name_can_be_parked_for(self, harness: StoreHarness) -> None:
        """A name that a database would refuse must not keep a batch from being settled."""
        names = ["https://shop.example/hooks?a=b&c=%20", "größe 尺寸 🙂", "x" * 200, "a\\'\"`{b}:c"]
        for number, name in enumerate(names):
            await _parked(harness, number, destination=name)

        assert sorted(await harness.store.parked()) == sorted(names)
        assert [await harness.store.unpark(name, 10) for name in names] == [1] * len(names)

    async def test_a_message_parked_for_an_hour_is_due_by_itself(self, harness: StoreHarness) -> None:
        """A dispatcher that died before it unparked anything delays messages, and loses none."""
        await _parked(harness, 1)

        await harness.advance(PARKED_FOR - MINUTE)
        early = await harness.store.claim(10, TERMS)
        await harness.advance(2 * MINUTE)
        [claim] = await harness.store.claim(10, TERMS)

        assert early == []
        assert (claim.message.attempt, claim.message.token) == (1, 2)
        # The claim has ended the parking.
        assert await harness.store.parked() == []
        assert await harness.store.unpark("east", 10) == 0

    @pytest.mark.parametrize("outcome", [Retry("no", MINUTE), Release(MINUTE)], ids=["retried", "released"])
    async def test_a_message_that_waits_again_for_itself_is_no_longer_parked(
        self, harness: StoreHarness, outcome: Retry | Release
    ) -> None:
        """An old destination does not make it due before its time; a claim has ended the parking."""
        await _parked(harness, 1)
        await harness.advance(PARKED_FOR + MINUTE)
        [claim] = await harness.store.claim(10, TERMS)
        await harness.store.settle([Settlement(claim, outcome)])

        assert await harness.store.parked() == []
        assert await harness.store.unpark("east", 10) == 0
        assert await harness.store.claim(10, TERMS) == []

    async def test_a_message_parked_with_no_attempt_left_is_not_swept_while_it_waits(
        self, harness: StoreHarness
    ) -> None:
        """Its attempt was given back."""
        one = terms(max_attempts=1)
        await harness.add(numbered(1))
        await _park(harness, await harness.store.claim(10, one))

        assert await harness.store.sweep(one) == 0
        assert await harness.store.unpark("east", 10) == 1
        assert numbers(await harness.store.claim(10, one)) == [1]

    async def test_a_message_that_was_swept_is_no_longer_parked(self, harness: StoreHarness) -> None:
        """Its destination would be probed for ever, and another unpark would count it."""
        _needs_parking(harness)
        await harness.add(numbered(1))
        await harness.store.claim(1, TERMS)
        await harness.advance(TERMS.lease + MINUTE)
        await _park(harness, await harness.store.claim(1, TERMS))
        await harness.advance(PARKED_FOR + MINUTE)

        swept = await harness.store.sweep(terms(max_attempts=1))

        assert swept == 1
        assert await harness.store.parked() == []
        assert await harness.store.unpark("east", 10) == 0
        assert states(await harness.rows()) == [("dead", 1, 2)]

    # -- keys --------------------------------------------------------------------------------------------------

    async def test_the_followers_of_a_parked_head_wait_in_their_order(self, harness: StoreHarness) -> None:
        """The other keys go on meanwhile."""
        _needs_parking(harness)
        await harness.add(*[numbered(number, key="a") for number in (1, 2, 3)])
        await _park(harness, await harness.store.claim(1, TERMS))
        await harness.add(numbered(4, key="b"), numbered(5, key="a"), numbered(6))

        meanwhile = await _claim_all(harness)
        await harness.store.unpark("east", 10)
        after = await harness.store.claim(10, TERMS)

        assert sorted(numbers(meanwhile)) == [4, 6]
        assert numbers(after) == [1, 2, 3, 5]

    async def test_a_whole_run_that_is_parked_goes_out_in_order_after_it(self, harness: StoreHarness) -> None:
        """However few of them are unparked at a time."""
        _needs_parking(harness)
        await harness.add(*[numbered(number, key="a") for number in range(1, 6)])
        await _park(harness, await harness.store.claim(10, TERMS))

        sent: list[int] = []
        for _ in range(5):
            assert await harness.store.unpark("east", 1) == 1
            claims = await harness.store.claim(10, TERMS)
            sent += numbers(claims)
            await harness.store.settle([Settlement(claim, Delivered()) for claim in claims])

        assert sent == [1, 2, 3, 4, 5]

    async def test_the_head_of_a_key_is_unparked_with_a_parked_follower(self, harness: StoreHarness) -> None:
        """A follower that was parked before its head could not be claimed alone, and would be no probe."""
        _needs_parking(harness)
        await harness.add(*[numbered(number, key="a") for number in (1, 2, 3)])
        head, *followers = await harness.store.claim(10, TERMS)
        await _park(harness, followers)
        await harness.advance(SECOND)
        await _park(harness, [head])

        count = await harness.store.unpark("east", 1)

        assert count == 1
        assert numbers(await harness.store.claim(10, TERMS)) == [1, 2]
        assert await harness.store.unpark("east", 10) == 1

    async def test_many_parked_heads_do_not_hide_a_key_that_can_go(self, harness: StoreHarness) -> None:
        """However many followers stand before it."""
        await harness.add(*[numbered(number, key=f"k{number}") for number in range(50)])
        for _ in range(5):
            await _park(harness, await harness.store.claim(10, TERMS))
        await harness.add(*[numbered(100 + number, key=f"k{number}") for number in range(50)])
        await harness.add(numbered(1000, key="z"))

        found = [number for _ in range(60) for number in numbers(await harness.store.claim(2, TERMS))]

        assert found == [1000]

    # -- at the same time --------------------------------------------------------------------------------------

    async def test_calls_that_unpark_at_the_same_time_share_the_parked_messages(self, harness: StoreHarness) -> None:
        """Every message is made due once, and nothing is lost."""
        await _parked(harness, *range(20))
        stores = [harness.store, await harness.another()]

        counts = await asyncio.gather(*[stores[n % 2].unpark("east", 4) for n in range(6)])
        rest = await harness.store.unpark("east", 100)

        assert sum(counts) + rest == 20
        assert sorted(numbers(await harness.store.claim(100, TERMS))) == list(range(20))

    # -- stats -------------------------------------------------------------------------------------------------

    async def test_a_parked_message_counts_as_pending_and_as_waiting_since_it_was_added(
        self, harness: StoreHarness
    ) -> None:
        """An outage shows in the age of the oldest message."""
        await harness.add(numbered(1), numbered(2))
        await harness.advance(20 * MINUTE)
        await _park(harness, await harness.store.claim(10, TERMS))
        await harness.advance(20 * MINUTE)
        await harness.add(numbered(3))

        stats = await harness.store.stats()

        assert (stats.pending, stats.processing) == (3, 0)
        assert stats.oldest_due is not None
        assert 39 * MINUTE < stats.oldest_due < 45 * MINUTE

    # -- stores that cannot park -------------------------------------------------------------------------------

    async def test_a_store_without_places_treats_a_destination_as_a_plain_release(self, harness: StoreHarness) -> None:
        """The delay counts there, and there is nothing to bring back."""
        if harness.store.features.parks:
            pytest.skip("this store parks messages")
        await harness.add(numbered(1), numbered(2))
        one, two = await harness.store.claim(10, TERMS)

        lost = await harness.store.settle(
            [
                Settlement(one, Release(5 * MINUTE, destination="east")),
                Settlement(two, Release(destination="east")),
            ]
        )
        at_once = await harness.store.claim(10, TERMS)
        await harness.advance(6 * MINUTE)

        assert lost == []
        assert numbers(at_once) == [2]
        assert await harness.store.parked() == []
        assert await harness.store.unpark("east", 10) == 0
        assert 1 in numbers(await harness.store.claim(10, TERMS))
