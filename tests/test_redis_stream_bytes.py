"""The bytes of a claim from a stream: counted by the script, or known to be few enough."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from postroom import ClaimTerms, Dead, Delivered, Message, Settlement
from postroom.stores.redis.stream import RedisStreamStore
from postroom.stores.redis.stream_outbox import SMALL
from postroom.transaction import transactions_of

# The library's own types name neither all commands nor what they answer.
Foreign = Any

#: So many small entries fit into a claim, however large they are.
LIMIT = 10
MAX_BYTES = LIMIT * SMALL
TERMS = ClaimTerms(worker=uuid4(), max_bytes=MAX_BYTES)
#: More than any number of claims that one of them must leave behind to read without counting.
MANY = 10 * LIMIT
LARGE = 4 * SMALL


@pytest.fixture
async def store(client: Foreign) -> RedisStreamStore:
    return RedisStreamStore(client, table=f"test-{uuid4().hex}")


def messages(count: int, size: int) -> list[Message]:
    return [Message(topic="orders", type="order.placed", payload=b"x" * size) for _ in range(count)]


async def drained(store: RedisStreamStore) -> list[int]:
    """Deliver everything, and return how many bytes of payload each claim brought."""
    sizes: list[int] = []
    while claims := await store.claim(LIMIT, TERMS):
        sizes.append(sum(len(claim.message.payload) for claim in claims))
        assert await store.settle([Settlement(claim, Delivered()) for claim in claims]) == []
    return sizes


async def is_announced(client: Foreign, store: RedisStreamStore) -> bool:
    return bool(await client.hexists(f"{store.outbox().stream}:counters", "large"))


@pytest.mark.requirement("G11")
async def test_large_messages_behind_many_small_ones_are_counted(client: Foreign, store: RedisStreamStore) -> None:
    """A claim that reads without counting must not reach them."""
    await store.outbox().add(client, messages(MANY, 10))
    await store.outbox().add(client, messages(MANY, LARGE))

    sizes = await drained(store)

    assert sum(sizes) == MANY * (10 + LARGE)
    assert max(sizes) <= MAX_BYTES


@pytest.mark.requirement("G11")
async def test_a_large_message_of_a_transaction_is_announced(client: Foreign, store: RedisStreamStore) -> None:
    """The commit applies the announcement with the message."""
    await store.open()
    async with transactions_of(store).begin() as transaction:
        await transaction.do(store.outbox().add, messages(5, LARGE))

    assert await is_announced(client, store)
    assert await drained(store) == [2 * LARGE, 2 * LARGE, LARGE]


@pytest.mark.requirement("G11")
async def test_large_messages_that_become_due_are_counted(client: Foreign, store: RedisStreamStore) -> None:
    """The claim that moves them into the stream announces them."""
    await store.open()
    await store.outbox().add(client, messages(MANY, 10))
    await store.outbox().add(client, messages(MANY, LARGE), delay=timedelta(microseconds=1))

    assert max(await drained(store)) <= MAX_BYTES


@pytest.mark.requirement("G11")
async def test_large_messages_that_are_redriven_are_counted(client: Foreign, store: RedisStreamStore) -> None:
    """They become new entries."""
    await store.outbox().add(client, messages(MANY, LARGE))
    while claims := await store.claim(LIMIT, TERMS):
        await store.settle([Settlement(claim, Dead("refused")) for claim in claims])
    assert not await is_announced(client, store)

    assert await store.redrive(limit=MANY) == MANY
    sizes = await drained(store)

    assert sum(sizes) == MANY * LARGE
    assert max(sizes) <= MAX_BYTES


async def test_the_announcement_is_taken_back_when_nothing_is_unread(client: Foreign, store: RedisStreamStore) -> None:
    """Later small messages are read at full speed."""
    await store.outbox().add(client, messages(1, LARGE))
    assert await is_announced(client, store)

    await drained(store)

    assert not await is_announced(client, store)


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("before", [0, MANY])
async def test_large_entries_of_other_programs_are_counted_from_the_second_claim_on(
    client: Foreign, store: RedisStreamStore, before: int
) -> None:
    """A program that writes XADD by itself announces nothing; the first entry that is seen announces the rest."""
    await store.open()
    await store.outbox().add(client, messages(before, 10))
    fields = {"id": uuid4().hex, "topic": "orders", "type": "order.placed", "source": "till", "data": b"x" * LARGE}
    for _ in range(MANY):
        await client.xadd(store.outbox().stream, fields)

    sizes = await drained(store)

    assert sum(sizes) == before * 10 + MANY * LARGE
    assert sum(size > MAX_BYTES for size in sizes) <= 1
    assert await is_announced(client, store)  # for a day: the program will go on
