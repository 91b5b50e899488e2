"""How much one call to a store takes: bounded by bytes, and less after a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

import pytest

from postroom import Claim, ClaimTerms, Delivered, Dispatcher, Message, Outbox, Outcome, Settlement
from postroom import events as ev
from postroom.chunk import CALM, Chunk
from postroom.claiming import (
    CLOGGED_LEAST,
    CLOGGED_SHARE,
    MAX_FREE_RUNS,
    MAX_NEWEST_RUNS,
    NEWEST_LEAST,
    Claimed,
    Claiming,
)
from postroom.custody import Custody
from postroom.errors import ConfigurationError, StoreTimeoutError
from postroom.store import Features
from postroom.stores import MemoryStore
from postroom.testing.waiting import until

MS = timedelta(milliseconds=1)
SECOND = timedelta(seconds=1)
KIB = 1024
LONG = 40 * SECOND


class SlowLink(MemoryStore):
    """A store that answers in time only if little goes over the wire."""

    def __init__(self, *, bytes_in_time: int = 10**9, settlements_in_time: int = 10**9) -> None:
        super().__init__()
        self._bytes = bytes_in_time
        self._settlements = settlements_in_time
        self.timeouts: list[str] = []
        self.claimed: list[int] = []

    async def claim(self, limit: int, terms: ClaimTerms) -> list[Claim]:
        asked = limit * 256 * KIB if terms.max_bytes is None else min(limit * 256 * KIB, terms.max_bytes)
        self._check("claim", asked <= self._bytes)
        claims = await super().claim(limit, terms)
        self.claimed.append(sum(len(claim.message.payload) for claim in claims))
        return claims

    async def settle(self, settlements: Sequence[Settlement]) -> list[Claim]:
        self._check("settle", len(settlements) <= self._settlements)
        return await super().settle(settlements)

    async def extend(self, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        self._check("extend", len(claims) <= self._settlements)
        return await super().extend(claims, lease)

    def _check(self, operation: str, in_time: bool) -> None:  # noqa: FBT001
        if not in_time:
            self.timeouts.append(operation)
            raise StoreTimeoutError(operation)


def fill(store: MemoryStore, count: int, size: int) -> None:
    with store.transaction() as transaction:
        Outbox().add(transaction, [bytes(size)] * count, topic="t")


async def accept(message: Message) -> None:
    """Take every message."""


async def deliver(store: MemoryStore, **options: object) -> None:
    dispatcher = Dispatcher(store, accept, listener=lambda _: None, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: {row.status for row in store.rows} == {"delivered"}, "everything being delivered", within=LONG)
    await dispatcher.stop()
    await running


async def test_a_claim_brings_no_more_bytes_than_it_may() -> None:
    """Sixteen messages of 256 KiB are the 4 MiB of the default."""
    store = SlowLink()
    fill(store, 40, 256 * KIB)
    await deliver(store)

    assert max(store.claimed) == 16 * 256 * KIB


async def test_a_message_larger_than_a_batch_is_claimed_alone() -> None:
    store = SlowLink()
    fill(store, 3, 256 * KIB)
    await deliver(store, batch_bytes=1)

    assert max(store.claimed) == 256 * KIB


async def test_a_claim_that_takes_too_long_is_tried_with_less() -> None:
    store = SlowLink(bytes_in_time=256 * KIB)
    fill(store, 4, 200 * KIB)
    await deliver(store)

    assert store.timeouts
    assert len(set(store.timeouts)) == 1


async def test_a_settlement_that_takes_too_long_is_tried_with_less() -> None:
    store = SlowLink(settlements_in_time=1)
    fill(store, 8, 10)
    await deliver(store, batch=4)

    assert set(store.timeouts) == {"settle"}


async def test_leases_are_renewed_in_portions_that_shrink_likewise() -> None:
    """All four leases are renewed although only two fit into a call."""
    store, finish = SlowLink(settlements_in_time=2), asyncio.Event()
    fill(store, 4, 10)

    async def send(message: Message) -> None:
        await finish.wait()

    dispatcher = Dispatcher(store, send, lease=6 * SECOND, publish_timeout=5 * SECOND, batch=4, listener=lambda _: None)
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: all(row.locked_until for row in store.rows), "all being claimed", within=LONG)
    first = [row.locked_until for row in store.rows]
    await until(
        lambda: all((row.locked_until or 0) != before for row, before in zip(store.rows, first, strict=True)),
        "all leases being renewed",
        within=LONG,
    )
    finish.set()
    await dispatcher.stop()
    await running

    assert "extend" in store.timeouts


async def test_calls_take_more_again_after_many_that_ended_in_time() -> None:
    chunk, sizes = Chunk(8), list[int]()

    async def call(size: int) -> None:
        sizes.append(size)
        if size > 2 and len(sizes) < 3:
            raise StoreTimeoutError("claim")

    for _ in range(2):
        with pytest.raises(StoreTimeoutError):
            await chunk.call(call)
    for _ in range(3 * CALM):
        await chunk.call(call)

    assert sizes == [8, 4, *[2] * CALM, *[4] * CALM, *[8] * CALM]


async def test_payloads_in_flight_stay_within_the_documented_bound() -> None:
    """At most batches_in_flight + 1 times batch_bytes, and one message more where one alone is larger."""
    store, held, most, finish = MemoryStore(), 0, 0, asyncio.Event()
    fill(store, 200, 64 * KIB)

    class Broker:
        async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
            await finish.wait()
            return [Delivered()] * len(messages)

    def listener(event: ev.Event) -> None:
        nonlocal most
        held = sum(len(row.message.payload) for row in store.rows if row.status == "processing")
        most = max(most, held)

    options = {"batch_bytes": 256 * KIB, "batches_in_flight": 3, "poll_interval": 10 * MS, "listener": listener}
    dispatcher = Dispatcher(store, Broker(), **options)  # type: ignore[arg-type]
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: most >= 3 * 256 * KIB, "three batches being held", within=LONG)
    finish.set()
    await until(lambda: {row.status for row in store.rows} == {"delivered"}, "everything being delivered", within=LONG)
    await dispatcher.stop()
    await running

    assert held == 0
    assert most <= (3 + 1) * 256 * KIB


async def test_functions_hold_no_more_bytes_than_batches() -> None:
    """A function that delivers one message is not limited by the number of batches, so the bytes limit it."""
    store, most, finish = MemoryStore(), 0, asyncio.Event()
    fill(store, 200, 64 * KIB)

    async def send(message: Message) -> None:
        await finish.wait()

    def listener(event: ev.Event) -> None:
        nonlocal most
        most = max(most, sum(len(row.message.payload) for row in store.rows if row.status == "processing"))

    options = {"batch_bytes": 256 * KIB, "batches_in_flight": 3, "poll_interval": 10 * MS, "listener": listener}
    dispatcher = Dispatcher(store, send, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(dispatcher.run())
    await until(lambda: most >= 3 * 256 * KIB, "three batches being held", within=LONG)
    finish.set()
    await until(lambda: {row.status for row in store.rows} == {"delivered"}, "everything being delivered", within=LONG)
    await dispatcher.stop()
    await running

    assert most <= (3 + 1) * 256 * KIB


def test_a_limit_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_bytes"):
        Dispatcher(MemoryStore(), accept, batch_bytes=0)


def _claimed(count: int, *, newest_first: bool = False) -> Claimed:
    claims = [Claim(Message(topic="t", payload=b"")) for _ in range(count)]
    return Claimed(claims, began_idle=False, newest_first=newest_first)


def test_a_few_messages_that_can_be_sent_do_not_end_the_care_for_a_backlog() -> None:
    """Messages with and without keys are claimed by turns: what is said of the ones says nothing of the others."""
    claiming = _claiming(500)
    claiming.report(_claimed(500), sent=0)
    for _ in range(20):
        claiming.report(_claimed(1), sent=1)
        claiming.report(_claimed(31), sent=0)
        assert claiming.is_clogged

    for _ in range(MAX_FREE_RUNS):
        claiming.report(_claimed(1), sent=1)
    assert not claiming.is_clogged


def test_many_messages_that_can_be_sent_end_the_care_for_a_backlog() -> None:
    claiming = _claiming(500)
    claiming.report(_claimed(500), sent=0)
    claiming.report(_claimed(31, newest_first=True), sent=31)
    assert claiming.is_clogged, "there may be a backlog behind the newest"

    claiming.report(_claimed(31), sent=31)

    assert not claiming.is_clogged


async def test_only_a_claim_that_begins_with_the_newest_sees_what_was_added_behind_a_backlog() -> None:
    claiming = _claiming(500)
    assert claiming.begin(1, lambda _: False)
    await claiming.next()
    claiming.report(_claimed(500), sent=0)

    seen = []
    for _ in range(4):
        seen.append(claiming.begin(1, lambda _: False))
        seen.append((await claiming.next()).newest_first)

    assert seen == [True, True, False, False] * 2


@pytest.mark.requirement("G13")
async def test_a_hint_begins_claims_with_the_newest_but_the_oldest_get_their_turn() -> None:
    """Messages that are added at a high rate do not keep old ones waiting for ever."""
    claiming = _claiming(500)
    claiming.report(_claimed(500), sent=0)

    turns: list[bool] = []
    for _ in range(3 * (MAX_NEWEST_RUNS + 1)):
        claiming.begin(1, lambda _: False, is_hinted=True)
        turns.append((await claiming.next()).newest_first)

    assert turns == ([True] * MAX_NEWEST_RUNS + [False]) * 3


async def test_claims_of_a_backlog_are_smallest_while_messages_are_added_that_can_be_sent() -> None:
    store = MemoryStore()
    fill(store, 600, 1)
    claiming = _claiming(500, store)

    async def sizes() -> dict[bool, int]:
        found: dict[bool, int] = {}
        for _ in range(2):
            claiming.begin(1, lambda _: False)
            claimed = await claiming.next()
            found[claimed.newest_first] = len(claimed.claims)
            claiming.report(claimed, sent=0)
        return found

    claiming.report(_claimed(500), sent=0)
    claiming.report(_claimed(4, newest_first=True), sent=0)
    quiet = await sizes()
    claiming.report(_claimed(2, newest_first=True), sent=1)
    await sizes()
    busy = await sizes()

    assert quiet == {True: NEWEST_LEAST, False: 500 // CLOGGED_SHARE}
    assert busy == {True: NEWEST_LEAST, False: CLOGGED_LEAST}


def test_a_store_that_separates_keys_needs_two_claims_to_see_what_was_added_behind_a_backlog() -> None:
    separating = MemoryStore()
    separating.features = Features(separates_keys=True)
    one, two = _claiming(500), _claiming(500, separating)
    assert [one.complete, two.complete] == [1, 1]

    one.report(_claimed(500), sent=0)
    two.report(_claimed(500), sent=0)

    assert [one.complete, two.complete] == [1, 2]


def _claiming(batch: int, store: MemoryStore | None = None) -> Claiming:
    store, terms = store or MemoryStore(), ClaimTerms(worker=uuid4())
    custody = Custody(store, terms.lease, lambda _: None, chunk=batch)
    return Claiming(store, terms, custody, lambda _: None, batch, asyncio.Event())
