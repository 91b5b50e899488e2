"""Dead letters of a consumer: kept whole and once, in a table or behind a topic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from postroom import Message
from postroom.dead_letters import PublishedDeadLetters, StoredDeadLetters
from postroom.errors import PublishUnknownError
from postroom.inbox import Inbox
from postroom.message import Limits, validate
from postroom.store import Delivered, Outcome, Release, Retry

from . import test_writers as writers
from .test_inbox import Opener
from .test_writers import LIBRARIES, Databases, Library, as_uuid, look

databases = writers.databases
library = writers.library

TENANT = UUID(int=7)
COLUMNS = "tenant_id, message_id, topic, type, {key}, namespace, payload, content_type, headers, attempts, error"


@pytest.fixture
def inbox() -> Inbox:
    """An inbox whose consumer is this test's own."""
    return Inbox(f"consumer-{uuid4().hex}")


def letters(databases: Databases, library: Library, inbox: Inbox) -> list[tuple[Any, ...]]:
    """Return the dead letters of a consumer, as they are committed, values as Python has them."""
    key = "`key`" if library.database == "mariadb" else '"key"'
    sql = f"SELECT {COLUMNS.format(key=key)} FROM postroom_inbox_dead WHERE consumer = '{inbox.consumer}'"
    return [
        (
            as_uuid(tenant),
            as_uuid(identity),
            *parts,
            headers if isinstance(headers, dict) else json.loads(headers),
            *rest,
        )
        for tenant, identity, *parts, headers, attempts, error in look(databases, library.database, sql)
        for rest in [(attempts, error)]
    ]


@pytest.mark.requirement("G2", "S1-19")
async def test_a_dead_letter_is_kept_whole_and_once(library: Library, databases: Databases, inbox: Inbox) -> None:
    """Every part of the message, why it died and when; whoever repeats it changes nothing."""
    message = Message(
        topic="orders",
        type="order.placed",
        key="42",
        namespace="shop",
        payload=b"\x00\xff",
        content_type="application/octet-stream",
        headers={"trace": "ä"},
        tenant_id=TENANT,
        attempt=3,
    )
    plain = Message(topic="orders", type="order.placed", payload=b"")
    buried = StoredDeadLetters(inbox, Opener(library, databases))

    await buried.bury(message, "ValueError: no")
    await buried.bury(message, "a second time")
    await buried.bury(plain, "never")

    found = sorted(letters(databases, library, inbox), key=lambda row: row[0], reverse=True)
    assert found == [
        (
            *(TENANT, message.id, "orders", "order.placed", "42", "shop", b"\x00\xff", "application/octet-stream"),
            *({"trace": "ä"}, 3, "ValueError: no"),
        ),
        (UUID(int=0), plain.id, "orders", "order.placed", None, "default", b"", "application/json", {}, 0, "never"),
    ]
    young = {"postgres": "now() - interval '1 minute'", "mariadb": "UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE"}
    limit = young.get(library.database, "(julianday('now') - 2440587.5) * 86400000 - 60000")
    sql = f"SELECT count(*) FROM postroom_inbox_dead WHERE consumer = '{inbox.consumer}' AND died_at > {limit}"
    assert look(databases, library.database, sql)[0][0] == 2


@pytest.mark.requirement("S1-16")
async def test_each_consumer_keeps_its_own_letter(library: Library, databases: Databases, inbox: Inbox) -> None:
    """A message that one consumer gave up may be fine for another, or dead as well."""
    message = Message(topic="orders", type="order.placed", payload=b"{}")
    other = Inbox(f"{inbox.consumer}-other")
    opener = Opener(library, databases)

    await StoredDeadLetters(inbox, opener).bury(message, "one")
    await StoredDeadLetters(other, opener).bury(message, "two")

    assert [row[-1] for row in letters(databases, library, inbox)] == ["one"]
    assert [row[-1] for row in letters(databases, library, other)] == ["two"]


@pytest.mark.requirement("G9")
@pytest.mark.parametrize("name", ["asyncpg", "psycopg", "asyncmy", "sqlite3"])
async def test_what_is_wrong_with_a_message_does_not_keep_it_from_being_buried(
    name: str, databases: Databases, inbox: Inbox
) -> None:
    """A letter that the database refused would come again for ever."""
    library = next(library for library in LIBRARIES if library.name == name)
    message = Message(
        topic="t" * 300,
        type="\x00",
        key="\ud800" * 300,
        payload=b"\xff" * 300_000,
        content_type="c\x00" * 200,
        namespace="n" * 300,
        headers={"h\x00": "\x00\ud800"},
    )

    await StoredDeadLetters(inbox, Opener(library, databases)).bury(message, "\x00\ud800" + "e" * 100_000)

    [letter] = letters(databases, library, inbox)
    assert letter[2:6] == ("t" * 300, " ", "?" * 300, "n" * 300)
    assert letter[6] == message.payload
    assert letter[8] == {"h ": " ?"}
    assert letter[10] == " ?" + "e" * 1998


# -- behind a topic --------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A publisher that answers as it is told."""

    answers: Sequence[Outcome | None] = (Delivered(),)
    messages: list[Message] = field(default_factory=list[Message])

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        self.messages += messages
        return self.answers


@pytest.mark.requirement("G5")
async def test_a_published_letter_is_the_message_with_its_error_beside_it() -> None:
    """Under the same id, so that a second one is known for a duplicate."""
    broker = Recorder()
    message = Message(topic="orders", type="order.placed", key="42", payload=b"{}", headers={"trace": "1"})

    await PublishedDeadLetters(broker, "orders.dead", consumer="stock").bury(
        message, "ValueError: ä\r\nx\x00" + "e" * 5000
    )

    [letter] = broker.messages
    assert (letter.id, letter.topic, letter.type, letter.key) == (message.id, "orders.dead", "order.placed", "42")
    assert letter.payload == message.payload
    assert letter.headers["trace"] == "1"
    assert letter.headers["postroom-consumer"] == "stock"
    assert letter.headers["postroom-error"].startswith("ValueError: ???x?eee")
    assert len(letter.headers["postroom-error"]) == 1000
    validate(letter, Limits())


@pytest.mark.requirement("G2")
@pytest.mark.parametrize("answer", [None, Release(), Retry("later")])
async def test_a_letter_that_is_not_confirmed_is_not_buried(answer: Outcome | None) -> None:
    """Who acknowledges it all the same would lose it."""
    letters = PublishedDeadLetters(Recorder([answer]), "orders.dead", consumer="stock")

    with pytest.raises(PublishUnknownError, match=r"was not confirmed by 'orders\.dead'"):
        await letters.bury(Message(topic="orders", payload=b"{}"), "no")
