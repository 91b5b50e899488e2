"""Turning events into bytes and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pydantic
import pytest

from postroom import JSONCodec, type_name
from postroom.codec import Naming, encoded, named, reader
from postroom.errors import DecodeError, EncodeError

IDENTITY = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")
MOMENT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 3


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal


@dataclass(frozen=True)
class OrderPlaced:
    id: UUID
    at: datetime
    items: list[Item]
    colour: Colour = Colour.RED
    size: Size = Size.LARGE
    day: date = date(2026, 3, 1)
    hour: time = time(12, 30)
    tags: frozenset[str] = frozenset({"new"})
    extra: dict[str, object] = field(default_factory=dict[str, object])


class OrderStruct(msgspec.Struct):
    id: UUID
    at: datetime
    items: list[str]


class OrderModel(pydantic.BaseModel):
    id: UUID
    at: datetime
    price: Decimal


STRUCT = OrderStruct(IDENTITY, MOMENT, ["a"])
MODEL = OrderModel(id=IDENTITY, at=MOMENT, price=Decimal("1.10"))
STRUCT_JSON = {"id": str(IDENTITY), "at": "2026-03-01T12:30:00Z", "items": ["a"]}
MODEL_JSON = {"id": str(IDENTITY), "at": "2026-03-01T12:30:00Z", "price": "1.10"}


@pytest.mark.requirement("S1-23", "S2-25")
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"a": 1, "b": [None, True, 1.5, "é\U0001f600"]}, {"a": 1, "b": [None, True, 1.5, "é\U0001f600"]}),
        (
            OrderPlaced(IDENTITY, MOMENT, [Item("pen", Decimal("1.10"))], extra={"n": Item("cap", Decimal(2))}),
            {
                "id": str(IDENTITY),
                "at": "2026-03-01T12:30:00+00:00",
                "items": [{"name": "pen", "price": "1.10"}],
                "colour": "red",
                "size": 3,
                "day": "2026-03-01",
                "hour": "12:30:00",
                "tags": ["new"],
                "extra": {"n": {"name": "cap", "price": "2"}},
            },
        ),
        (STRUCT, STRUCT_JSON),
        (MODEL, MODEL_JSON),
        ({"struct": STRUCT, "model": [MODEL]}, {"struct": STRUCT_JSON, "model": [MODEL_JSON]}),
    ],
    ids=["dict", "dataclass", "struct", "model", "mixed"],
)
def test_an_event_becomes_json_and_comes_back_as_plain_values(event: object, expected: object) -> None:
    """A consumer needs no class of the producer's to read it."""
    codec = JSONCodec()

    payload = codec.encode(event)

    assert json.loads(payload) == expected
    assert codec.decode(payload) == expected
    assert codec.content_type == "application/json"


class Secret:
    def __repr__(self) -> str:
        return "canary"


CIRCLE: dict[str, object] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.requirement("G11", "S1-27")
@pytest.mark.parametrize(
    "event",
    [
        {"a": float("nan")},
        {"a": [float("inf")]},
        Item("canary", Decimal(1)).__class__,
        {"a": Secret()},
        {("canary",): 1},
        {"a": "canary\ud800"},
        {"a": b"canary"},
        CIRCLE,
        object(),
        OrderPlaced(IDENTITY, MOMENT, [], extra={"x": Secret()}),
    ],
)
def test_what_has_no_json_form_is_refused_and_not_shown(event: object) -> None:
    """The error names the type and what would do instead, never the value."""
    with pytest.raises(
        EncodeError, match=r"pass a dict, dataclass, msgspec\.Struct, pydantic model or bytes"
    ) as caught:
        JSONCodec().encode(event)

    assert "canary" not in str(caught.value)


@pytest.mark.requirement("G11")
@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"NaN", b"canary", b"[" * 100_000])
def test_what_is_not_json_cannot_be_decoded(payload: bytes) -> None:
    """Neither is it shown."""
    with pytest.raises(DecodeError, match="decode it with the codec that encoded it") as caught:
        JSONCodec().decode(payload)

    assert "canary" not in str(caught.value)


class HTTPServerStarted(NamedTuple):
    port: int


@pytest.mark.requirement("S1-23")
@pytest.mark.parametrize(
    ("event", "name"),
    [
        (STRUCT, "order.struct"),
        (HTTPServerStarted(80), "http.server.started"),
        (Item("x", Decimal(1)), "item"),
        (MODEL, "order.model"),
    ],
)
def test_a_type_is_the_name_of_the_class_in_dots(event: object, name: str) -> None:
    """The type of an event comes from its class."""
    assert type_name(event) == name


@pytest.mark.requirement("F-23")
def test_a_class_is_named_like_its_events() -> None:
    """So that a handler can be added by the class."""
    assert type_name(Item) == "item"
    assert type_name(HTTPServerStarted) == "http.server.started"


@pytest.mark.requirement("F-23")
@pytest.mark.parametrize(
    ("naming", "name"),
    [
        ("default", "HTTPServerStarted"),
        ("dot", "http.server.started"),
        ("kebab", "http-server-started"),
        ("snake", "http_server_started"),
    ],
)
def test_there_are_four_ways_to_name_a_type(naming: Naming, name: str) -> None:
    """Default, dot, kebab, snake."""
    assert named(HTTPServerStarted(80), naming) == name
    assert encoded(JSONCodec(), HTTPServerStarted(80), None, naming) == (b"[80]", name, "application/json")


@pytest.mark.requirement("F-22", "S1-23")
def test_an_event_without_a_class_of_its_own_is_named_like_its_topic() -> None:
    """A dict and raw bytes say nothing about what they are."""
    codec = JSONCodec()

    assert encoded(codec, {"a": 1}, "orders") == (b'{"a":1}', "orders", "application/json")
    assert encoded(codec, memoryview(b"raw"), "orders") == (b"raw", "orders", "application/octet-stream")
    assert encoded(codec, {}, None)[1] == ""
    with pytest.raises(EncodeError, match="a bare value is no event"):
        encoded(codec, 3, "orders")


@pytest.mark.requirement("F-22")
def test_a_reader_decodes_as_its_codec_does() -> None:
    """What is found out before the first payload does not change what comes of it."""

    class Doubling(JSONCodec):
        def decode(self, payload: bytes, kind: Any = object, /) -> Any:  # noqa: ANN401
            return [super().decode(payload, kind)] * 2

    item, payload = Item("pen", Decimal("1.10")), b'{"name":"pen","price":"1.10"}'

    assert reader(JSONCodec(), Item)(payload) == JSONCodec().decode(payload, Item) == item
    assert reader(Doubling(), Item)(payload) == [item, item]


def test_what_cannot_be_encoded_is_not_kept_by_the_error() -> None:
    """An error of Unicode holds all of the text, and tracebacks show what errors hold."""
    with pytest.raises(EncodeError) as raised:
        JSONCodec().encode({"card": "4111-1111 \ud800"})

    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert "4111" not in str(raised.value)
