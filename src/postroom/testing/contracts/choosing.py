"""Choosing: how many bytes a claim returns, and from which end of what is due it takes them."""

# ruff: noqa: PLR2004 -- expectations are literals

from __future__ import annotations

from dataclasses import replace

import pytest

from ...message import Message
from ...store import Delivered, Settlement
from .harness import MINUTE, SECOND, TERMS, StoreHarness, numbered, numbers, terms

__all__ = ["ChoosingContract"]


def _large(number: int, **fields: object) -> Message:
    """Return a message of ten thousand bytes."""
    return replace(numbered(number, **fields), payload=f"{number:<10000}".encode())


class ChoosingContract:
    """Which of the due messages a claim takes."""

    # -- bytes -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_a_claim_returns_no_more_bytes_than_it_may(self, harness: StoreHarness, key: str | None) -> None:
        """What did not fit was not leased, and comes with the next claims in its order."""
        await harness.add(*[_large(number, key=key) for number in range(7)])

        batches = [await harness.store.claim(10, terms(max_bytes=35_000)) for _ in range(3)]
        leased = [row.status for row in await harness.rows()].count("processing")
        first = [numbers(batch) for batch in batches]

        if key is None or not harness.store.features.ordered:
            assert first == [[0, 1, 2], [3, 4, 5], [6]]
            assert leased == 7
        else:
            assert first == [[0, 1, 2], [], []]
            assert leased == 3
            await harness.store.settle([Settlement(claim, Delivered()) for claim in batches[0]])
            assert numbers(await harness.store.claim(10, terms(max_bytes=35_000))) == [3, 4, 5]

    async def test_the_bytes_of_all_keys_are_counted_together(self, harness: StoreHarness) -> None:
        """A run of a key is cut, and nothing of it is left out in between."""
        await harness.add(*[_large(number, key=f"k{number % 4}") for number in range(12)])

        sent: list[int] = []
        for _ in range(30):
            claims = await harness.store.claim(10, terms(max_bytes=25_000))
            assert sum(len(claim.message.payload) for claim in claims) <= 25_000
            sent += numbers(claims)
            await harness.store.settle([Settlement(claim, Delivered()) for claim in claims])

        assert sorted(sent) == list(range(12))
        if harness.store.features.ordered:
            for key in range(4):
                assert [number for number in sent if number % 4 == key] == [key, key + 4, key + 8]

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_a_message_that_is_larger_than_a_claim_is_claimed_alone(
        self, harness: StoreHarness, key: str | None
    ) -> None:
        """Every claim makes progress, whatever the bound."""
        await harness.add(numbered(0, key=key), _large(1, key=key), _large(2, key=key), numbered(3, key=key))

        sent: list[list[int]] = []
        for _ in range(4):
            claims = await harness.store.claim(10, terms(max_bytes=5_000))
            sent.append(numbers(claims))
            await harness.store.settle([Settlement(claim, Delivered()) for claim in claims])

        assert sent == [[0], [1], [2], [3]]

    async def test_messages_with_and_without_a_key_share_the_bytes_of_a_claim(self, harness: StoreHarness) -> None:
        """However a store looks for the two kinds."""
        await harness.add(*[_large(number, key="a" if number % 2 else None) for number in range(6)])

        batches = [await harness.store.claim(10, terms(max_bytes=25_000)) for _ in range(8)]

        assert all(sum(len(claim.message.payload) for claim in batch) <= 25_000 for batch in batches)
        assert {0, 2, 4, 1} <= {number for batch in batches for number in numbers(batch)}

    async def test_the_bytes_of_expired_leases_count_as_well(self, harness: StoreHarness) -> None:
        """Together with what is due, and a suspect of any size comes alone."""
        await harness.add(*[_large(number) for number in range(3)])
        for _ in range(3):
            assert numbers(await harness.store.claim(3, TERMS)) == [0, 1, 2]
            await harness.advance(MINUTE)
        await harness.add(*[_large(number) for number in (3, 4)])
        await harness.store.claim(2, TERMS)
        await harness.advance(MINUTE)
        await harness.add(*[_large(number) for number in (5, 6)])

        small = terms(max_bytes=35_000)
        batches = [await harness.store.claim(10, small) for _ in range(5)]

        assert all(sum(len(claim.message.payload) for claim in batch) <= 35_000 for batch in batches)
        suspects = [numbers(batch) for batch in batches if batch[0].suspect]
        others = [number for batch in batches if not batch[0].suspect for number in numbers(batch)]
        assert sorted(suspects) == [[0], [1], [2]]
        assert sorted(others) == [3, 4, 5, 6]

        assert (await harness.store.claim(10, small)) == []

    # -- from the newest on ------------------------------------------------------------------------------------

    async def test_a_claim_may_look_from_the_newest_on(self, harness: StoreHarness) -> None:
        """New messages are found before a backlog that cannot be delivered."""
        if not harness.store.features.ordered:
            pytest.skip("this store has one order only")
        for number in range(6):
            await harness.add(numbered(number), delay=MINUTE)
            await harness.advance(SECOND)
        await harness.advance(MINUTE)

        newest = await harness.store.claim(2, terms(newest_first=True))
        oldest = await harness.store.claim(2, TERMS)
        rest = await harness.store.claim(10, terms(newest_first=True))

        assert [numbers(newest), numbers(oldest), numbers(rest)] == [[4, 5], [0, 1], [2, 3]]

    @pytest.mark.parametrize("key", [None, "a"])
    async def test_two_claims_from_the_newest_on_see_what_was_added_last(
        self, harness: StoreHarness, key: str | None
    ) -> None:
        """Also if it has a key and the backlog has none, or the other way round."""
        if not harness.store.features.ordered:
            pytest.skip("this store has one order only")
        for number in range(12):
            await harness.add(numbered(number, key=None if key else f"k{number}"))
        await harness.advance(SECOND)

        await harness.add(numbered(12, key=key))
        claims = [await harness.store.claim(4, terms(newest_first=True)) for _ in range(2)]

        assert 12 in numbers([*claims[0], *claims[1]])

    async def test_from_the_newest_on_a_key_still_goes_out_in_order(self, harness: StoreHarness) -> None:
        """The run of the newest key begins at its head."""
        if not harness.store.features.ordered:
            pytest.skip("this store keeps no order")
        for number in range(8):
            await harness.add(numbered(number, key=f"k{number // 2}"))
            await harness.advance(SECOND)

        claimed = [numbers(await harness.store.claim(2, terms(newest_first=True))) for _ in range(5)]

        assert claimed == [[6, 7], [4, 5], [2, 3], [0, 1], []]

    async def test_from_the_newest_on_expired_leases_still_come_first(self, harness: StoreHarness) -> None:
        """A crash is made good first."""
        await harness.add(numbered(1))
        await harness.store.claim(1, TERMS)
        await harness.add(numbered(2), numbered(3))
        await harness.advance(MINUTE)

        assert numbers(await harness.store.claim(1, terms(newest_first=True))) == [1]
