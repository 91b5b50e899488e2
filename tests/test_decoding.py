"""Making typed objects of JSON."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypedDict,
    TypeVar,
)
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import JSONCodec
from postroom.decoding import decoder
from postroom.errors import ConfigurationError, DecodeError

T = TypeVar("T")


@dataclass
class Created:
    id: int


@dataclass
class Cancelled:
    id: int
    reason: str = ""


class Noted(TypedDict):
    id: int
    note: NotRequired[str]


class Shipped(msgspec.Struct):
    id: int
    carrier: str = ""


class Paid(pydantic.BaseModel):
    id: int
    amount: int = 0


class Branch(TypedDict):
    value: int
    branches: list[Branch]


class Link(NamedTuple):
    value: int
    links: list[Link]


@dataclass
class Endless(Generic[T]):
    value: T
    inner: Endless[list[T]] | None = None


Number = TypeVar("Number", int, str)
Bounded = TypeVar("Bounded", bound=int)
CODEC = JSONCodec()
IDENTITY = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")
MOMENT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
OrderId = NewType("OrderId", int)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 3


@dataclass(frozen=True)
class Flat:
    number: int
    text: str
    ratio: float
    yes: bool


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal


@dataclass(frozen=True)
class Node:
    name: str
    children: list[Node] = field(default_factory=list["Node"])
    parent: Node | None = None


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    first: T | None = None


@dataclass(frozen=True)
class ItemPage(Page[Item]):
    pass


@dataclass(kw_only=True)
class Totals:
    net: int
    tax: int = 0
    gross: int = field(init=False)

    def __post_init__(self) -> None:
        if self.net < 0:
            raise ValueError(f"canary {self.net}")
        self.gross = self.net + self.tax


class Address(TypedDict):
    street: str
    house: NotRequired[int]


class Contact(TypedDict, total=False):
    mail: Required[str]
    phone: str


class Point(NamedTuple):
    x: int
    y: int


class Struct(msgspec.Struct, frozen=True):
    id: UUID
    at: datetime
    sizes: dict[int, str] = {}


class Model(pydantic.BaseModel):
    id: UUID
    at: datetime
    price: Decimal
    tags: set[str] = set()


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    id: UUID
    lines: list[Model] = []


@dataclass(frozen=True)
class Mixed:
    struct: Struct
    models: list[StrictModel]


STRUCT = Struct(IDENTITY, MOMENT, {3: "l"})
MODEL = Model(id=IDENTITY, at=MOMENT, price=Decimal("1.10"), tags={"a"})

ROUND_TRIPS: list[tuple[Any, object]] = [
    (Flat, Flat(1, "é", 1.5, yes=True)),
    (Flat, Flat(-1, "", 2.0, yes=False)),
    (Item, Item("pen", Decimal("1.10"))),
    (Node, Node("a", [Node("b", [Node("c")])], Node("d"))),
    (Page[Item], Page([Item("pen", Decimal(1))], Item("cap", Decimal(2)))),
    (ItemPage, ItemPage([Item("pen", Decimal(1))])),
    (Page[dict[str, Point]], Page([{"a": Point(1, 2)}])),
    (Totals, Totals(net=2, tax=1)),
    (Address, {"street": "high"}),
    (Address, {"street": "high", "house": 3}),
    (Contact, {"mail": "a@b"}),
    (Point, Point(1, 2)),
    (Struct, STRUCT),
    (Model, MODEL),
    (StrictModel, StrictModel(id=IDENTITY, lines=[MODEL])),
    (Mixed, Mixed(STRUCT, [StrictModel(id=IDENTITY, lines=[MODEL])])),
    (list[Struct], [STRUCT]),
    (OrderId, OrderId(7)),
    (Annotated[int, "cents"], 3),
    (Literal["a", 1], 1),
    (Literal[Colour.RED], Colour.RED),
    (int | str, "a"),
    (typing.Optional[int], None),  # noqa: UP045 -- the older spelling is another type
    (typing.Union[int, str, None], 4),  # noqa: UP007
    (Item | Flat, Flat(1, "a", 1.0, yes=True)),
    (str | UUID, IDENTITY),
    (UUID | str, "no identity"),
    (datetime | date, date(2026, 3, 1)),
    (date | datetime | None, MOMENT),
    (float | int, 1),
    (list[int], [1, 2]),
    (list, [1, "a"]),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (set[UUID], {IDENTITY}),
    (frozenset[Colour], frozenset({Colour.RED})),
    (collections.abc.Set[int], {1}),
    (Sequence[date], [date(2026, 3, 1)]),
    (Mapping[str, time], {"a": time(12, 30)}),
    (dict[int, Decimal], {1: Decimal(2)}),
    (dict[float, bool], {1.5: True}),
    (dict[Size, int], {Size.LARGE: 2}),
    (dict, {"a": [1]}),
    (dict[str, object], {"a": [1]}),
    (Colour, Colour.BLUE),
    (Size, Size.SMALL),
    (None, None),
    (datetime, datetime(2026, 3, 1, tzinfo=UTC)),
    (object, {"a": 1}),
    (Any, [1]),
]


@pytest.mark.requirement("F-11", "F-22")
@pytest.mark.parametrize(("kind", "value"), ROUND_TRIPS, ids=[str(number) for number in range(len(ROUND_TRIPS))])
def test_what_was_encoded_comes_back_as_what_it_was(kind: Any, value: object) -> None:  # noqa: ANN401
    """A payload becomes what a handler is annotated with, and the same in every process."""
    payload = CODEC.encode(value)

    for decoded in (CODEC.decode(payload, kind), decoder(kind)(payload)):
        assert decoded == value
        assert type(decoded) is type(value)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@dataclass(frozen=True)
class Everything:
    number: int
    ratio: float
    text: str
    yes: bool
    identity: UUID
    price: Decimal
    at: datetime
    day: date
    hour: time
    colour: Colour
    size: Size
    maybe: int | None
    items: list[Item]
    pairs: tuple[tuple[int, str], ...]
    tags: frozenset[str]
    by_size: dict[Size, list[date]]
    tree: Node
    anything: object


NODES = st.recursive(
    st.builds(Node, TEXT),
    lambda inner: st.builds(Node, TEXT, st.lists(inner, max_size=2), st.none() | inner),
    max_leaves=4,
)
EVERYTHING = st.builds(
    Everything,
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    text=TEXT,
    price=st.decimals(allow_nan=False),
    at=st.datetimes(timezones=st.just(UTC)),
    items=st.lists(st.builds(Item, TEXT, st.decimals(allow_nan=False)), max_size=2),
    pairs=st.lists(st.tuples(st.integers(), TEXT), max_size=2).map(tuple),
    tags=st.frozensets(TEXT, max_size=3),
    tree=NODES,
    anything=JSON_VALUES,
)


@pytest.mark.requirement("F-11")
@given(EVERYTHING)
def test_any_dataclass_comes_back_as_it_was(value: Everything) -> None:
    """Encoding and decoding lose nothing."""
    assert CODEC.decode(CODEC.encode(value), Everything) == value


@pytest.mark.requirement("G11")
@given(
    JSON_VALUES, st.sampled_from([Everything, Flat, Node, list[Item], dict[int, Size], Mixed, Struct, Model, Colour])
)
def test_any_json_becomes_an_object_or_a_decode_error(value: object, kind: Any) -> None:  # noqa: ANN401
    """Nothing that a sender can write ends in another error."""
    payload = json.dumps(value).encode()

    with contextlib.suppress(DecodeError):
        CODEC.decode(payload, kind)


@pytest.mark.requirement("F-22")
def test_fields_that_are_missing_take_their_default_and_unknown_ones_are_left_out() -> None:
    """Sender and receiver are deployed at different times."""
    assert CODEC.decode(b'{"name":"a","colour":"red"}', Node) == Node("a")
    assert CODEC.decode(b'{"net":1,"tax":null,"gross":5,"tax":2}', Totals).gross == 3
    assert CODEC.decode(b'{"number":1,"text":"","ratio":1,"yes":true,"more":[]}', Flat) == Flat(1, "", 1.0, yes=True)
    assert CODEC.decode(b'{"street":"a","more":1}', Address) == {"street": "a"}


@pytest.mark.requirement("F-22")
def test_a_whole_number_is_a_float_too_and_becomes_one() -> None:
    """JSON of other languages writes 2.0 as 2."""
    assert repr(CODEC.decode(b'{"number":1,"text":"","ratio":2,"yes":true}', Flat).ratio) == "2.0"
    assert CODEC.decode(b"3", Decimal) == 3


@pytest.mark.requirement("F-22")
def test_blanks_around_json_are_allowed() -> None:
    """Some senders end a payload with a new line."""
    assert CODEC.decode(b'\n {"a":1}\r\n') == {"a": 1}
    assert CODEC.decode(b" 1 ", int) == 1


@pytest.mark.requirement("F-22")
def test_the_order_in_a_union_is_kept_also_if_it_was_seen_the_other_way_round() -> None:
    """To typing both are the same type, and here the first that fits is taken."""

    @dataclass
    class A:
        n: int

    @dataclass
    class B:
        n: int

    assert type(CODEC.decode(b'{"n":1}', A | B)) is A
    assert type(CODEC.decode(b'{"n":1}', B | A)) is B
    assert type(CODEC.decode(b'[{"n":1}]', list[A | B])[0]) is A
    assert type(CODEC.decode(b'[{"n":1}]', list[B | A])[0]) is B


CANARY = "canary-4111"
ITEM = {"name": "pen", "price": "1.10"}
WRONG: list[tuple[Any, object, str]] = [
    (Flat, {"number": CANARY, "text": "", "ratio": 1.0, "yes": True}, "no Flat: number: str is no int;"),
    (Flat, {"number": True, "text": "", "ratio": 1.0, "yes": True}, "number: bool is no int;"),
    (Flat, {"number": 1, "text": "", "ratio": 10**400, "yes": True}, "ratio: int is no float;"),
    (Flat, {"number": 1, "ratio": 1.0, "yes": True, CANARY: 1}, "text: it is missing;"),
    (Flat, [CANARY], "list is no Flat;"),
    (Flat, None, "NoneType is no Flat;"),
    (Item, {"name": "a", "price": CANARY}, "price: str is no Decimal;"),
    (Page[Item], {"items": [ITEM, {"name": "a", "price": CANARY}]}, r"items\[1\]\.price: str is no Decimal;"),
    (Page[Item], {"items": [], "first": CANARY}, "first: str is no Item;"),
    (ItemPage, {"items": [CANARY]}, r"items\[0\]: str is no Item;"),
    (
        Node,
        {"name": "a", "children": [{"name": "b", "parent": {"name": 1}}]},
        r"children\[0\]\.parent\.name: int is no str;",
    ),
    (Totals, {"net": -4111}, "Totals refuses it with a ValueError;"),
    (Address, {"house": 1}, "street: it is missing;"),
    (Address, {"street": "a", "house": CANARY}, "house: str is no int;"),
    (Contact, {"phone": CANARY}, "mail: it is missing;"),
    (dict[int, int], {CANARY: 1}, r"\[…\]: str is no int;"),
    (dict[str, Item], {CANARY: {}}, r"\[…\]\.name: it is missing;"),
    (dict[str, int], [], "list is no dict;"),
    (tuple[int, str], [1], "list is no list of 2;"),
    (tuple[int, str], [1, 2], r"\[1\]: int is no str;"),
    (list[int], {}, "dict is no list;"),
    (set[object], [[CANARY]], "TypeError;"),
    (int | Item, CANARY, "str is none of int, Item;"),
    (int | None, CANARY, "str is no int;"),
    (Literal["a", "b"], CANARY, "none of the values that are allowed;"),
    (Colour, CANARY, "str is no Colour;"),
    (Size, True, "bool is no Size;"),
    (UUID, CANARY, "str is no UUID;"),
    (datetime, CANARY, "str is no datetime;"),
    (Struct, {"id": CANARY, "at": MOMENT.isoformat()}, "id: refused with a ValidationError;"),
    (Struct, {"at": MOMENT.isoformat()}, "id: refused with a ValidationError;"),
    (Struct, {"id": str(IDENTITY), "at": MOMENT.isoformat(), "sizes": {CANARY: "a"}}, "sizes: refused"),
    (Model, {"id": CANARY, "at": CANARY, "price": 1}, "id: refused with a ValidationError;"),
    (StrictModel, {"id": str(IDENTITY), CANARY: 1}, "no StrictModel: refused with a ValidationError;"),
    (list[StrictModel], [{"id": str(IDENTITY), "lines": [{CANARY: CANARY}]}], r"\[0\]\.lines: refused"),
    (Mixed, {"struct": {"id": CANARY}, "models": []}, r"struct\.id: refused"),
]


@pytest.mark.requirement("G11", "F-22")
@pytest.mark.parametrize(("kind", "value", "said"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_payload_of_another_form_is_refused_with_its_place_and_never_shown(
    kind: Any,  # noqa: ANN401
    value: object,
    said: str,
) -> None:
    """The error says which field, not what stood there, and neither does anything that hangs on to it."""
    with pytest.raises(DecodeError, match=said) as caught:
        CODEC.decode(json.dumps(value).encode(), kind)

    error = caught.value
    assert "correct its sender" in str(error)
    assert "4111" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.requirement("G11")
@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff" + CANARY.encode(), b"[NaN]", CANARY.encode(), b"[" * 100_000, b"1 2"]
)
@pytest.mark.parametrize("kind", [object, Flat, list[Item]], ids=["plain", "dataclass", "list"])
def test_what_is_not_json_hangs_no_part_of_it_on_its_error(payload: bytes, kind: Any) -> None:  # noqa: ANN401
    """JSON's own errors carry the whole document."""
    with pytest.raises(DecodeError, match="not JSON") as caught:
        CODEC.decode(payload, kind)

    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.requirement("G11")
def test_json_that_is_nested_too_deeply_is_refused() -> None:
    """A tree without an end is a bad payload, and no end of the process."""
    payload = b'{"name":"a","parent":' * 900 + b"null" + b"}" * 900

    with pytest.raises(DecodeError):
        CODEC.decode(payload, Node)


class Odd(Enum):
    PAIR = (1, 2)


class Unknown: ...


@dataclass
class HasUnknown:
    nested: list[Unknown]


@dataclass
class HasInitVar:
    number: int
    secret: InitVar[str]


@dataclass
class HasInitVarWithDefault:
    number: int
    secret: InitVar[str] = ""
    doubled: int = field(init=False)

    def __post_init__(self, secret: str) -> None:
        self.doubled = 2 * self.number


@dataclass
class HasUnreadable:
    name: Nowhere  # type: ignore[name-defined]  # noqa: F821


class BadStruct(msgspec.Struct):
    a: dict[str, int] | dict[int, str]


@pytest.mark.requirement("F-22")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unknown, "nothing is known of Unknown, .* annotate with a dataclass"),
        (HasUnknown, "nothing is known of Unknown"),
        (list[Unknown] | None, "nothing is known of Unknown"),
        (timedelta, "nothing is known of timedelta"),
        (Odd, "the values of Odd have no form in JSON"),
        (HasInitVar, "HasInitVar needs secret, which is no field of it"),
        (HasUnreadable, "the annotations of HasUnreadable cannot be read: .*Nowhere"),
        (BadStruct, "msgspec cannot make a BadStruct"),
    ],
)
def test_a_type_that_no_payload_can_become_is_told_before_there_is_one(kind: Any, said: str) -> None:  # noqa: ANN401
    """A mistake in an annotation is found when the handler is added."""
    with pytest.raises(ConfigurationError, match=said):
        decoder(kind)


@dataclass
class OfMarks:
    constant: Final[int]  # a field all the same
    number: Annotated[int, "more than none"]


@dataclass
class OfVariables(Generic[T, Number, Bounded]):
    anything: T
    one_of: Number
    bounded: Bounded


class OwnInit(Flat):
    """Takes its fields in another order."""

    def __init__(self, yes: bool, ratio: float, text: str, number: int) -> None:  # noqa: FBT001
        super().__init__(number, text, ratio, yes)


@pytest.mark.requirement("F-22")
def test_marks_variables_and_constructors_of_all_kinds_are_understood() -> None:
    """What type checkers accept as an event is one."""
    assert CODEC.decode(b'{"constant":1,"number":2}', OfMarks) == OfMarks(1, 2)
    assert CODEC.decode(b'{"anything":[],"one_of":"a","bounded":1}', OfVariables) == OfVariables([], "a", 1)
    assert CODEC.decode(b'{"number":2}', HasInitVarWithDefault).doubled == 4
    flat = CODEC.decode(b'{"number":7,"text":"a","ratio":1.5,"yes":true}', OwnInit)
    assert (flat.number, flat.text, flat.ratio, flat.yes) == (7, "a", 1.5, True)
    with pytest.raises(DecodeError, match="bounded: str is no int"):
        CODEC.decode(b'{"anything":[],"one_of":"a","bounded":"a"}', OfVariables)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"id": 1}', Created(1)),
        (b'{"id": 1, "reason": "late"}', Cancelled(1, "late")),
        (b'{"id": 1, "note": "x"}', {"id": 1, "note": "x"}),
        (b'{"id": 1, "carrier": "post"}', Shipped(1, "post")),
        (b'{"id": 1, "amount": 5}', Paid(id=1, amount=5)),
        (b'{"id": 1, "reason": "late", "unknown": 1}', Cancelled(1, "late")),
        (b'{"id": 1, "reason": 7}', Created(1)),
        (b"7", 7),
    ],
)
def test_of_the_records_of_a_union_the_one_that_loses_least_is_taken(payload: bytes, expected: object) -> None:
    """Not the first that fits, which may know few of the keys."""
    kind = Created | Cancelled | Noted | Shipped | Paid | int

    assert CODEC.decode(payload, kind) == expected


def test_types_that_are_part_of_themselves_can_be_read() -> None:
    tree: Branch = {"value": 1, "branches": [{"value": 2, "branches": []}]}

    assert CODEC.decode(json.dumps(tree).encode(), Branch) == tree
    assert CODEC.decode(b"[1, [[2, []]]]", Link) == Link(1, [Link(2, [])])
    with pytest.raises(DecodeError, match=r"branches\[0\]\.value: str is no int"):
        CODEC.decode(b'{"value": 1, "branches": [{"value": "x", "branches": []}]}', Branch)


def test_a_type_without_end_is_refused_before_there_is_a_payload() -> None:
    with pytest.raises(ConfigurationError, match="without end"):
        decoder(Endless[int])


def test_annotations_need_no_hash() -> None:
    assert CODEC.decode(b"1", Annotated[int, ["unhashable"]]) == 1
    assert CODEC.decode(b"[1]", list[Annotated[int, ["unhashable"]]]) == [1]


@pytest.mark.parametrize("payload", [b"1e999", b"[-1e999]", b'"\\ud800"', b'{"\\uDC00": 1}', b' ["\\ud83d\\ud83d"] '])
def test_what_could_not_be_encoded_again_is_not_decoded(payload: bytes) -> None:
    """Neither infinite numbers nor halves of characters, which no store takes."""
    with pytest.raises(DecodeError, match="is not JSON"):
        CODEC.decode(payload)


def test_characters_may_be_written_as_two_halves() -> None:
    assert CODEC.decode(b'"\\ud83d\\ude00"') == "\U0001f600"


def test_an_error_of_a_validator_with_other_errors_of_its_own_shows_nothing() -> None:
    """Whatever it calls so."""

    class CardError(Exception):
        def __init__(self, card: str) -> None:
            super().__init__(card)
            self.errors = [card]

    class Payment(pydantic.BaseModel):
        card: str

        @pydantic.field_validator("card")
        @classmethod
        def check(cls, card: str) -> str:
            raise CardError(card)

    with pytest.raises(DecodeError) as raised:
        CODEC.decode(b'{"card": "4111-1111"}', Payment)

    assert raised.value.__context__ is None
    assert "4111" not in str(raised.value)
