"""How messages are written in Redis and read again, quickly: nothing that is read once for many may show."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from bench.redis_backlog import connect
from postroom import Message
from postroom.errors import DecodeError
from postroom.store import ClaimTerms, Delivered, Retry, Settlement
from postroom.stores.redis import RedisStore, RedisStreamStore
from postroom.stores.redis.record import identity_of, packed, unpacked
from postroom.stores.redis.stream_record import arrival, marshalled, moment, unmarshalled
from postroom.testing.clients import ValkeyClient

TERMS = ClaimTerms(worker=uuid4())
SAID: dict[str, Any] = {"namespace": "shop", "attempt": 1, "token": 1, "arrived": 1_700_000_000_000_001}
FULL = Message(
    topic="orders",
    type="order.placed",
    payload=b"[]",
    key="k",
    namespace="shop",
    content_type="text/plain",
    headers={"a": "1"},
    tenant_id=UUID(int=7),
    dedupe_key=f"{UUID(int=7)}:d",
)


@pytest.mark.parametrize("number", [0, 1, 2**128 - 1])
def test_an_id_that_was_stored_is_a_uuid_like_any_other(number: int) -> None:
    quick, plain = identity_of(number), UUID(int=number)

    assert (quick, hash(quick), repr(quick), quick.is_safe) == (plain, hash(plain), repr(plain), plain.is_safe)
    assert pickle.loads(pickle.dumps(quick)) == copy.deepcopy(quick) == plain  # noqa: S301


@pytest.mark.parametrize("message", [FULL, Message(topic="orders", type="orders", payload=b"", namespace="shop")])
def test_a_message_comes_back_as_it_was_stored_however_often_its_head_was_read(message: Message) -> None:
    for payload in (message.payload, b"{}", b'{"topic":"other"}'):
        stored = Message(**{**_parts(message), "payload": payload, "id": uuid4()})

        assert unpacked(stored.id, packed(stored), **SAID) == (stored, None)


def _parts(message: Message) -> dict[str, Any]:
    names = ("topic", "type", "key", "namespace", "content_type", "headers", "tenant_id", "dedupe_key")
    return {name: getattr(message, name) for name in names}


def test_messages_with_the_same_head_share_nothing_that_can_be_changed() -> None:
    one, _ = unpacked(FULL.id, packed(FULL), **SAID)
    cast("dict[str, str]", one.headers)["a"] = "changed"

    other, _ = unpacked(FULL.id, packed(FULL), **SAID)

    assert other.headers == {"a": "1"}


@pytest.mark.parametrize(
    ("head", "topic"),
    [
        (b"", ""),
        (b"\xff", ""),
        (b"[]", ""),
        (b'{"topic":"orders"}', "orders"),
        (b'{"topic":"orders","type":"t","headers":[]}', "orders"),
        (b'{"topic":"orders","type":"t","tenant_id":7}', "orders"),
        (b'{"topic":"orders","type":"t","tenant_id":"secret"}', "orders"),
    ],
)
def test_a_head_that_is_broken_says_where_it_belongs_and_shows_nothing(head: bytes, topic: str) -> None:
    for _ in range(2):
        message, broken = unpacked(FULL.id, len(head).to_bytes(4) + head + b"data", **SAID)

        assert message.topic == topic
        assert broken is not None
        assert "secret" not in broken


@pytest.mark.parametrize("identity", [b"1" + b"0" * 32, b"-1", b"x", b""])
def test_an_entry_whose_id_is_none_cannot_be_read(identity: bytes) -> None:
    fields = {b"id": identity, b"topic": b"orders", b"type": b"orders", b"data": b"{}"}

    with pytest.raises(DecodeError):
        unmarshalled(fields, "shop", 1, 1, moment(0))


def test_a_moment_that_there_is_not_is_the_last_one_and_what_is_none_cannot_be_read() -> None:
    assert arrival(f"{2**64 - 1}-0").year == 9999
    with pytest.raises(DecodeError):
        moment(b"soon")
    assert arrival("1700000000001-5") == moment(1_700_000_000_001_000)


@pytest.mark.requirement("S0-55")
async def test_an_entry_of_a_far_future_holds_up_no_other(valkey_server: ValkeyClient) -> None:
    """Somebody else's XADD may name any moment."""
    store = RedisStreamStore(valkey_server.dsn, table=f"t{uuid4().hex}")
    fields: Any = marshalled(Message(topic="orders", type="orders", payload=b"{}"))
    async with connect(valkey_server.dsn) as client:
        await client.xadd(store.outbox().stream, fields)
        await client.xadd(store.outbox().stream, fields, id=f"{2**63 - 1}-0")

    claims = await store.claim(10, TERMS)
    await store.close()

    assert [claim.broken is None for claim in claims] == [True, True]


@pytest.mark.requirement("S3-14")
async def test_of_many_that_were_delivered_the_lost_ones_are_told(valkey_server: ValkeyClient) -> None:
    """Also where all of them are told in one word."""
    store = RedisStore(valkey_server.dsn, table=f"t{uuid4().hex}")
    async with connect(valkey_server.dsn) as client:
        await store.outbox().add(client, [{"n": n} for n in range(4)], topic="orders")
    claims = await store.claim(10, TERMS)
    await store.settle([Settlement(claims[2], Retry("no", timedelta(hours=1)))])

    lost = await store.settle([Settlement(claim, Delivered()) for claim in claims])
    stats = await store.stats()
    await store.close()

    assert lost == [claims[2]]
    assert (stats.delivered, stats.pending, stats.processing) == (3, 1, 0)
