"""Custody: whose leases are renewed, and until when a claim may be trusted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from uuid import uuid4

import pytest

from postroom import Claim, ClaimTerms, Delivered, Outbox, Settlement
from postroom.custody import Custody
from postroom.stores import MemoryStore
from postroom.testing.waiting import until

#: Renewed every ten milliseconds.
LEASE = timedelta(milliseconds=30)


class Gated(MemoryStore):
    """Answers renewals one by one, as the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.may_answer = asyncio.Semaphore(0)

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        self.asked.append(len(claims))
        await self.may_answer.acquire()
        return []


@asynccontextmanager
async def running(custody: Custody) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(custody.renew_forever()), asyncio.create_task(custody.settle_forever())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def held(store: MemoryStore, *, chunk: int) -> tuple[Custody, Sequence[Claim], float]:
    """Return the custody of four claims that were made together, and when they expire."""
    with store.transaction() as transaction:
        Outbox().add(transaction, [{"n": n} for n in range(4)], topic="orders")
    claims = await store.claim(4, ClaimTerms(worker=uuid4(), lease=timedelta(minutes=1)))
    custody, expires = Custody(store, LEASE, lambda _: None, chunk=chunk), time.monotonic()
    custody.hold(claims, expires)
    return custody, claims, expires


async def test_a_claim_counts_as_renewed_only_when_its_own_renewal_was_answered() -> None:
    """A message must not be sent on the strength of what the store has answered about others."""
    store = Gated()
    custody, claims, expires = await held(store, chunk=2)

    async with running(custody):
        store.may_answer.release()
        await until(lambda: store.asked == [2, 2], "the renewal of the second half")
        halfway = [custody.expires(claim) > expires for claim in claims]
        store.may_answer.release()
        await until(lambda: custody.expires(claims[3]) > expires, "the second answer")

    assert halfway == [True, True, False, False]


@pytest.mark.parametrize("chunk", [2, 4], ids=["in parts", "at once"])
async def test_a_claim_that_is_settled_while_it_is_renewed_is_not_held_again(chunk: int) -> None:
    """It would never be settled again, and the dispatcher would wait for it for ever when it stops."""
    store = Gated()
    custody, claims, _ = await held(store, chunk=chunk)

    async with running(custody):
        await until(lambda: store.asked == [chunk], "the renewal")
        custody.settle([Settlement(claims[0], Delivered())])
        await custody.wait_until_settled()
        for _ in range(4):
            store.may_answer.release()
        await until(lambda: len(store.asked) > 4 // chunk, "another renewal")

    assert len(custody) == 3


@pytest.mark.requirement("S2-29")
async def test_a_claim_is_safe_to_send_until_its_lease_has_ended() -> None:
    """What another worker may have claimed by now is not sent."""
    custody, claims, expires = await held(MemoryStore(), chunk=4)
    custody.hold(claims[:2], expires - 1)
    custody.hold(claims[2:], expires + 3600)

    assert [custody.is_safe(claim.message) for claim in claims] == [False, False, True, True]
