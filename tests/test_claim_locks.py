"""Claims beside a transaction that holds locks: they wait for nobody, and overtake nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from uuid import uuid4

import pytest

from postroom import Claim, ClaimTerms
from postroom.stores.sql.store import SQLStore
from tests.rooms import ROOMS, Room

from .worlds import SQL_SERVERS


@pytest.fixture(params=SQL_SERVERS)
def room(request: pytest.FixtureRequest) -> Room:
    kind, fixture = ROOMS[request.param]
    return kind(str(request.getfixturevalue(fixture)))


@pytest.fixture
async def store(room: Room) -> AsyncIterator[SQLStore]:
    store = room.store()
    await store.apply_schema()
    await store.open()
    yield store
    await store.close()


def add(room: Room, store: SQLStore, *payloads: bytes, key: str | None = None) -> None:
    with closing(room.connect()) as connection:
        store.outbox().add(connection, list(payloads), topic="orders", key=key, outside_transaction=True)


@contextmanager
def locked(room: Room, payload: bytes) -> Iterator[None]:
    """Hold the lock of one message, as a transaction does that settles or claims it."""
    with closing(room.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT id FROM postroom_outbox WHERE payload = %s", (payload,))
        identity = cursor.fetchone()
        cursor.execute("BEGIN")
        cursor.execute("SELECT id FROM postroom_outbox WHERE id = %s FOR UPDATE", identity)
        yield
        cursor.execute("ROLLBACK")


def payloads(claims: list[Claim]) -> list[bytes]:
    return [claim.message.payload for claim in claims]


@pytest.mark.requirement("S2-25")
async def test_a_claim_passes_over_what_another_transaction_has_locked(room: Room, store: SQLStore) -> None:
    """Workers do not wait for each other."""
    add(room, store, b"1", b"2", b"3")

    with locked(room, b"2"):
        beside = await store.claim(10, ClaimTerms(worker=uuid4()))
    afterwards = await store.claim(10, ClaimTerms(worker=uuid4()))

    assert (payloads(beside), payloads(afterwards)) == ([b"1", b"3"], [b"2"])


@pytest.mark.requirement("G6")
async def test_nothing_of_a_key_overtakes_what_another_transaction_has_locked(room: Room, store: SQLStore) -> None:
    """What stands behind a message that cannot be had waits for it, and other keys do not."""
    add(room, store, b"a1", b"a2", b"a3", key="a")
    add(room, store, b"b1", key="b")

    with locked(room, b"a2"):
        beside = await store.claim(10, ClaimTerms(worker=uuid4()))

    assert sorted(payloads(beside)) == [b"a1", b"b1"]


@pytest.mark.requirement("G6")
async def test_a_locked_head_holds_back_its_own_key_only(room: Room, store: SQLStore) -> None:
    """Neither is anything of its key claimed, nor is it waited for."""
    add(room, store, b"a1", b"a2", key="a")
    add(room, store, b"b1", key="b")

    with locked(room, b"a1"):
        beside = await store.claim(10, ClaimTerms(worker=uuid4()))

    assert payloads(beside) == [b"b1"]
