"""Messages: their identity, their limits, and what of them may be shown."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest

from postroom import Limits, Local, Message, Outbox, uuid7
from postroom.brokers import MemoryBroker
from postroom.errors import (
    ConfigurationError,
    InvalidDedupeKeyError,
    InvalidHeaderError,
    InvalidKeyError,
    InvalidMessageError,
    InvalidTopicError,
    MessageError,
    PayloadTooLargeError,
    TenantMismatchError,
)
from postroom.message import drafted, validate
from postroom.stores import MemoryStore

TENANT = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")
LIMITS = Limits()


def message(**parts: Any) -> Message:  # noqa: ANN401
    return Message(**{"topic": "orders", "type": "order.placed", "payload": b"{}", **parts})


@pytest.mark.requirement("G5")
def test_an_id_is_a_uuid_of_version_7_that_rises_with_time() -> None:
    """Ids are made by the client, and sort by the moment they were made at."""
    before = datetime.now(UTC)
    ids = [uuid7() for _ in range(1000)]
    after = datetime.now(UTC)

    assert len(set(ids)) == 1000
    assert {(identity.version, identity.variant) for identity in ids} == {(7, "specified in RFC 4122")}
    moments = [identity.int >> 80 for identity in ids]
    assert moments == sorted(moments)
    assert int(before.timestamp() * 1000) <= moments[0] <= moments[-1] <= int(after.timestamp() * 1000)


@pytest.mark.requirement("G5")
def test_a_message_keeps_its_id_and_cannot_be_changed() -> None:
    """What changes from one delivery to the next does not make another message."""
    first = message()

    with pytest.raises(FrozenInstanceError):
        first.topic = "other"  # type: ignore[misc]
    assert replace(first, attempt=3, token=9, time=datetime.now(UTC)) == first
    assert message() != first


@pytest.mark.requirement("G11")
def test_a_repr_shows_neither_payload_nor_headers() -> None:
    """Reprs end up in logs."""
    shown = repr(message(payload=b"canary-4111", headers={"authorization": "canary-4111"}, key="k"))

    assert "canary" not in shown
    assert "'orders'" in shown
    assert "'k'" in shown


@pytest.mark.requirement("S2-16")
def test_attributes_are_those_of_cloudevents() -> None:
    """A message needs no translation to travel as an event."""
    stored = message(id=TENANT, key="42", namespace="shop", time=datetime(2026, 1, 2, tzinfo=UTC))

    assert stored.attributes == {
        "specversion": "1.0",
        "id": "0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f",
        "source": "postroom:shop",
        "type": "order.placed",
        "datacontenttype": "application/json",
        "subject": "42",
        "time": "2026-01-02T00:00:00+00:00",
    }
    assert message(headers={"ce-source": "urn:x"}).attributes["source"] == "urn:x"
    assert "subject" not in message().attributes


@pytest.mark.requirement("G11", "S2-12", "S2-15")
@pytest.mark.parametrize(
    "parts",
    [
        {"topic": "x" * 249},
        {"key": "\U0001f600" * 255},
        {"dedupe_key": "e\u0301" * 127},
        {"type": "a b"},
        {"payload": b"x" * (256 * 1024)},
        {"payload": b""},
        {"headers": {"x" * 128: ""}},
        {"headers": {f"h{n}": "v" for n in range(64)}},
        {"headers": {"h": "v" * (8 * 1024 - 1)}},
        {"headers": {"h": " outer blanks \u2028 and \U0001f600 "}},
        {"tenant_id": TENANT, "dedupe_key": "0197a4c27e6b7d3e9f513a2b1c0d4e5f/order-42"},
        {"tenant_id": TENANT, "dedupe_key": "0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f/order-42"},
        {"tenant_id": TENANT},
    ],
)
def test_what_is_within_the_limits_is_accepted(parts: dict[str, Any]) -> None:
    """Exactly at a limit is within it; both ways to write a tenant are known."""
    validate(message(**parts), LIMITS)


BAD_NAMES: list[object] = ["", " x", "x ", "a\x00b", "a\nb", "a\x7f", "a\x9f", "\ud800", 5, b"x"]


@pytest.mark.requirement("G11", "S2-14", "S2-15")
@pytest.mark.parametrize(
    ("parts", "error", "remedy"),
    [
        *(({"topic": bad}, InvalidTopicError, "pass another topic=") for bad in [*BAD_NAMES, None, "x" * 250]),
        *(({"key": bad}, InvalidKeyError, "pass key=None") for bad in [*BAD_NAMES, "x" * 256]),
        *(({"dedupe_key": bad}, InvalidDedupeKeyError, "hash a longer one") for bad in [*BAD_NAMES, "x" * 256]),
        *(({"type": bad}, InvalidMessageError, "pass type=") for bad in [*BAD_NAMES, "x" * 256]),
        *(({"content_type": bad}, InvalidMessageError, "pass content_type=") for bad in [*BAD_NAMES, "x" * 256]),
        ({"payload": b"x" * (256 * 1024 + 1)}, PayloadTooLargeError, "send a reference"),
        ({"payload": "canary"}, InvalidMessageError, "convert it"),
        ({"payload": bytearray(b"canary")}, InvalidMessageError, "convert it"),
        ({"id": str(TENANT)}, InvalidMessageError, "convert it"),
        ({"tenant_id": str(TENANT)}, InvalidMessageError, "convert it"),
        ({"headers": {"h\r\n": "canary"}}, InvalidHeaderError, "use 1 to 128 of"),
        ({"headers": {"": "canary"}}, InvalidHeaderError, "use 1 to 128 of"),
        ({"headers": {"x" * 129: "canary"}}, InvalidHeaderError, "use 1 to 128 of"),
        ({"headers": {5: "canary"}}, InvalidHeaderError, "use 1 to 128 of"),
        ({"headers": {"h": "canary\r\nx: y"}}, InvalidHeaderError, "use text without"),
        ({"headers": {"h": "canary\ud800"}}, InvalidHeaderError, "use text without"),
        ({"headers": {"h": b"canary"}}, InvalidHeaderError, "use text without"),
        ({"headers": [("h", "canary")]}, InvalidHeaderError, "pass a mapping"),
        ({"headers": {f"h{n}": "canary" for n in range(65)}}, InvalidHeaderError, "put data into the payload"),
        ({"headers": {"h": "canary" * 2000}}, InvalidHeaderError, "put data into the payload"),
        ({"tenant_id": TENANT, "dedupe_key": "order-42"}, TenantMismatchError, "opaque_dedupe_keys=True"),
        ({"tenant_id": TENANT, "dedupe_key": TENANT.hex}, TenantMismatchError, "must begin with"),
    ],
)
def test_what_is_not_is_refused_with_its_remedy(parts: dict[str, Any], error: type[MessageError], remedy: str) -> None:
    """A distinct error for each part, which shows no payload and no header value."""
    with pytest.raises(error) as caught:
        validate(message(**parts), LIMITS)

    assert type(caught.value) is error
    assert remedy in str(caught.value)
    assert "canary" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.requirement("S2-13", "S2-15")
def test_a_tenant_and_a_dedupe_key_need_not_agree_if_keys_are_opaque() -> None:
    """The policy switch."""
    validate(message(tenant_id=TENANT, dedupe_key="order-42"), LIMITS, opaque_dedupe_keys=True)


@pytest.mark.requirement("G11")
@pytest.mark.parametrize(("name", "value"), [("payload", 0), ("headers", -1), ("header_bytes", -1)])
def test_limits_that_refuse_everything_are_refused_themselves(name: str, value: int) -> None:
    """A mistake in the settings is told at the start, not at every message."""
    with pytest.raises(ConfigurationError, match=f"{name}={value} must be an int of at least"):
        Limits(**cast("Any", {name: value}))


REGION = Local[str]("region")


@pytest.mark.requirement("F-08", "F-09")
def test_components_that_use_the_same_word_do_not_overwrite_each_other() -> None:
    """A value is found by the object it was put with; the message that it was put on stays as it was."""
    mine, theirs = Local[int]("trace"), Local[int]("trace")
    first = message()

    second = theirs.put(mine.put(first, 1), 2)

    assert (mine.of(second), theirs.of(second)) == (1, 2)
    assert (mine.of(first), theirs.of(first)) == (None, None)
    assert mine.of(mine.put(second, 3)) == 3
    assert theirs.of(mine.put(second, 3)) == 2
    assert repr(mine) == "Local('trace')"


@pytest.mark.requirement("F-10", "F-11")
def test_a_copy_keeps_the_values_of_this_process() -> None:
    """Whatever is changed of a message on its way through this process."""
    carrying = REGION.put(message(), "eu")

    copies = [
        replace(carrying, payload=b"[]", headers={"a": "b"}, attempt=2),
        copy.copy(carrying),
        copy.deepcopy(carrying),
    ]

    assert [REGION.of(each) for each in copies] == ["eu"] * 3


@pytest.mark.requirement("F-10")
def test_a_new_message_starts_without_values_of_this_process() -> None:
    """However it is made; no two messages share a place to put them."""
    made = drafted(
        id=TENANT,
        topic="t",
        payload=b"",
        type="t",
        key=None,
        namespace="n",
        content_type="c",
        headers={},
        tenant_id=None,
        dedupe_key=None,
    )

    assert not message().local
    assert not made.local
    assert message().local is not message().local


@pytest.mark.requirement("F-08", "F-10", "F-19")
async def test_values_of_this_process_end_where_a_message_leaves_it() -> None:
    """In the outbox, at a broker, and in a pickle for another process."""
    carrying, store, broker = REGION.put(message(), "eu"), MemoryStore(), MemoryBroker()

    with store.transaction() as transaction:
        Outbox().add(transaction, carrying)
    async with broker.subscribe("orders", group="g") as deliveries:
        await broker.publish_batch([carrying])
        delivered = (await anext(aiter(deliveries))).message
        pickled = pickle.loads(pickle.dumps(carrying))  # noqa: S301 -- made here

    left = [Outbox().prepare(carrying).message, store.rows[0].message, broker.received[0], delivered, pickled]
    assert [dict(each.local) for each in left] == [{}] * 5
    assert {each.id for each in left} == {carrying.id}
    assert pickled == carrying


@pytest.mark.requirement("G11", "F-08")
def test_values_of_this_process_are_neither_shown_nor_compared() -> None:
    """They are no part of what a message says."""
    plain = message()
    carrying = REGION.put(plain, "canary")

    assert "canary" not in repr(carrying)
    assert carrying == plain
    assert asdict(plain)["local"] == {}
