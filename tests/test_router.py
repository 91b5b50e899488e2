"""The router: each message to the one handler of its type."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, NewType
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import Local, Match, Message, Router
from postroom.errors import (
    AlreadyStartedError,
    ConfigurationError,
    EncodeError,
    HandlerExistsError,
    HandlerRejectedError,
    InvalidMessageError,
    NoHandlerError,
)

TENANT = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")


@dataclass(frozen=True)
class OrderPlaced:
    order_id: int


@dataclass(frozen=True)
class StockReserved:
    order_id: int


class StockCounted(NamedTuple):
    left: int


NewId = NewType("NewId", int)


def message(kind: str = "order.placed", source: str | None = None, payload: bytes = b'{"order_id":42}') -> Message:
    headers = {} if source is None else {"ce-source": source}
    return Message(topic="orders", type=kind, payload=payload, headers=headers, namespace="shop", tenant_id=TENANT)


@pytest.mark.requirement("F-21")
async def test_a_message_goes_to_the_handler_of_its_type() -> None:
    """By the type of CloudEvents; registered by decorator or by call, by name or by class."""
    router, calls = Router(), list[str]()

    @router.on("order.placed")
    async def placed(order: OrderPlaced) -> None:
        calls.append(f"placed {order.order_id}")

    @router.on(StockReserved)
    def reserved(stock: StockReserved) -> None:
        calls.append(f"reserved {stock.order_id}")

    async def cancelled(order: OrderPlaced) -> None:
        calls.append(f"cancelled {order.order_id}")

    router.add("order.cancelled", cancelled)

    for kind in ("order.cancelled", "stock.reserved", "order.placed"):
        assert list(await router(message(kind))) == []
    assert calls == ["cancelled 42", "reserved 42", "placed 42"]
    assert router.types == ("order.placed", "stock.reserved", "order.cancelled")


@pytest.mark.requirement("F-21")
async def test_the_decorator_returns_the_function_as_it_is() -> None:
    """A handler can be called in a test without a router."""
    router = Router()

    async def handle(order: OrderPlaced) -> int:
        return order.order_id

    assert router.on("order.placed")(handle) is handle


@pytest.mark.requirement("F-21")
async def test_without_a_type_the_class_of_the_payload_names_it() -> None:
    """With and without parentheses, async and plain, whatever else the handler asks for."""
    router, calls = Router(), list[str]()

    @router.on
    async def placed(order: OrderPlaced) -> None:
        calls.append(f"placed {order.order_id}")

    @router.on()
    def reserved(received: Message, stock: StockReserved) -> None:
        calls.append(f"reserved {stock.order_id} of {received.topic}")

    @router.on(topic="audit", match=Match(source="/shop/*"))
    async def counted(stock: StockCounted) -> StockCounted:
        return stock

    await router(message())
    await router(message("stock.reserved"))
    [output] = await router(message("stock.counted", source="/shop/eu", payload=b"[3]"))

    assert router.types == ("order.placed", "stock.reserved", "stock.counted")
    assert calls == ["placed 42", "reserved 42 of orders"]
    assert output.topic == "audit"
    with pytest.raises(HandlerRejectedError):
        await router(message("stock.counted", payload=b"[3]"))


@pytest.mark.requirement("F-21")
async def test_the_bare_decorator_takes_anything_that_can_be_called() -> None:
    """And returns it as it is."""

    class Handling:
        async def __call__(self, order: OrderPlaced) -> None: ...

        def method(self, stock: StockReserved) -> None: ...

    router, handling = Router(), Handling()
    method = handling.method

    assert router.on(handling) is handling
    assert router.on(method) is method
    assert router.types == ("order.placed", "stock.reserved")


def a_dict(order: dict[str, int]) -> None: ...
def a_plain_dict(order: dict) -> None: ...  # type: ignore[type-arg]
def some_bytes(order: bytes) -> None: ...
def a_message(message: Message) -> None: ...
def one_of_two(order: OrderPlaced | StockReserved) -> None: ...
def perhaps(order: OrderPlaced | None) -> None: ...
def many(orders: list[OrderPlaced]) -> None: ...
def a_moment(order: datetime) -> None: ...
def anything(order: Any) -> None: ...  # noqa: ANN401
def nothing() -> None: ...
def unannotated(order) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001


NAMELESS: list[Callable[..., None]] = [
    a_dict,
    a_plain_dict,
    some_bytes,
    a_message,
    one_of_two,
    perhaps,
    many,
    a_moment,
    anything,
    nothing,
    unannotated,
]


@pytest.mark.requirement("F-21")
@pytest.mark.parametrize("handler", NAMELESS)
def test_a_payload_without_a_class_of_its_own_names_no_type(handler: Callable[..., None]) -> None:
    """The error says what to write; nothing is registered."""
    router = Router()
    expected = r'handler .* does not say which type of message it takes.*; write @router\.on\("order\.placed"\)'

    with pytest.raises(ConfigurationError, match=expected):
        router.on(handler)
    with pytest.raises(ConfigurationError, match=expected):
        router.on()(handler)
    assert router.types == ()


@pytest.mark.requirement("F-21")
@pytest.mark.parametrize(
    "kind",
    [dict, bytes, object, Message, list[int], OrderPlaced | StockReserved, OrderPlaced(1), 42, a_dict, NewId],
    ids=["dict", "bytes", "object", "message", "list", "union", "event", "number", "handler", "new type"],
)
def test_only_a_name_or_a_class_of_its_own_is_a_type(kind: Any) -> None:  # noqa: ANN401
    """A handler, an event or a container in its place is refused, never taken for one."""
    router = Router()

    async def handle(order: OrderPlaced) -> None: ...

    with pytest.raises(ConfigurationError, match=r"is not a type of message|does not say which type of message"):
        router.on(kind)
    with pytest.raises(ConfigurationError, match="is not a type of message"):
        router.add(kind, handle)
    assert router.types == ()


@pytest.mark.requirement("F-21")
async def test_a_type_without_a_handler_is_told() -> None:
    """`NoHandlerError` names the type and how to add a handler."""
    with pytest.raises(NoHandlerError, match=r"no handler takes 'order\.placed'; add one with router\.on"):
        await Router()(message())


@pytest.mark.requirement("F-21")
async def test_a_type_has_one_handler() -> None:
    """A second is refused, whichever way the type is named, and the first stays."""
    router, calls = Router(), list[int]()

    @router.on("order.placed")
    async def first(order: OrderPlaced) -> None:
        calls.append(order.order_id)

    async def second(order: OrderPlaced) -> None: ...

    for kind in ("order.placed", OrderPlaced):
        with pytest.raises(HandlerExistsError, match="one type has one handler"):
            router.add(kind, second)
    await router(message())
    assert calls == [42]


@pytest.mark.requirement("F-21")
async def test_a_router_in_use_takes_no_more_handlers() -> None:
    """What is handled does not depend on when it arrives."""
    router = Router()
    router.start()
    router.start()

    async def late(order: OrderPlaced) -> None: ...

    with pytest.raises(AlreadyStartedError, match=r"a handler of 'order\.placed' was added to a router after it"):
        router.add("order.placed", late)
    assert router.types == ()


@pytest.mark.requirement("F-21")
def test_a_handler_that_cannot_be_served_is_not_added() -> None:
    """The type stays free for one that can."""
    router = Router()

    async def wrong(order: OrderPlaced, stock: StockReserved) -> None: ...

    with pytest.raises(ConfigurationError):
        router.add("order.placed", wrong)
    assert router.types == ()


@pytest.mark.requirement("F-21")
async def test_a_handler_takes_only_what_its_matcher_lets_through() -> None:
    """`HandlerRejectedError` for the others, which the handler never sees."""
    router, calls = Router(), list[str]()

    @router.on("order.placed", match=Match(source="/shop/*"))
    async def handle(message: Message) -> None:
        calls.append(message.source)

    await router(message(source="/shop/eu"))
    with pytest.raises(HandlerRejectedError, match=r"'order\.placed' does not take this message"):
        await router(message(source="/stock"))
    assert calls == ["/shop/eu"]


@pytest.mark.requirement("F-21")
async def test_any_function_of_a_message_is_a_matcher() -> None:
    """What patterns cannot say, code can."""
    router = Router()

    async def handle() -> None: ...

    router.add("order.placed", handle, match=lambda message: message.tenant_id != TENANT)

    with pytest.raises(HandlerRejectedError):
        await router(message())
    await router(replace(message(), tenant_id=None))


@pytest.mark.requirement("F-21")
@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("*", "", True),
        ("*", "a\nb", True),
        ("a*", "a\nb", True),
        ("a?b", "a\nb", True),
        ("order.*", "order.placed", True),
        ("order.*", "order.placed.v2", True),
        ("order.*", "order.", True),
        ("order.*", "orderXplaced", False),
        ("order.*", "border.placed", False),
        ("*.placed", "order.placed", True),
        ("*.placed", "order.placed.v2", False),
        ("order.?", "order.1", True),
        ("order.?", "order.12", False),
        ("order.?", "order.", False),
        ("order.[ab]", "order.b", True),
        ("order.[ab]", "order.c", False),
        ("order.[!ab]", "order.c", True),
        ("order.[!ab]", "order.a", False),
        ("order.[0-9]", "order.7", True),
        ("order.placed", "order.placed", True),
        ("order.placed", "Order.Placed", False),
        ("Order.*", "order.placed", False),
        ("order_placed", "order_placed", True),
        ("order_placed", "orderXplaced", False),
        ("order.%", "order.placed", False),
        ("100[*]", "100*", True),
        ("100[*]", "100 and more", False),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_patterns_are_globs(pattern: str, text: str, is_match: bool) -> None:  # noqa: FBT001
    """Asterisk, question mark and sets as in the shell; nothing else means anything."""
    assert Match(type=pattern)(message(text)) is is_match
    assert Match(source=pattern)(message(source=text or None)) is (is_match if text else pattern == "*")


@pytest.mark.requirement("F-21")
def test_type_and_source_must_both_match() -> None:
    """A source that nobody gave is that of the namespace."""
    match = Match(type="order.*", source="postroom:*")

    assert match(message())
    assert not match(message("stock.reserved"))
    assert not match(message(source="/shop"))


@pytest.mark.requirement("F-21")
@given(st.text("a*?[]!.", max_size=8), st.text("a*?[]!.", max_size=8))
def test_an_escaped_text_matches_itself_alone(pattern: str, text: str) -> None:
    """Whatever a name holds, it can be asked for."""
    assert Match(type=glob.escape(pattern))(message(text)) is (text == pattern)


def numbers(outputs: Iterable[Message]) -> list[bytes]:
    return [output.payload for output in outputs]


def generated(count: int) -> Iterator[StockReserved]:
    yield from map(StockReserved, range(count))


@pytest.mark.requirement("F-21", "S1-28")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: None, []),
        (list, []),
        (lambda: StockReserved(1), [b'{"order_id":1}']),
        (lambda: [StockReserved(n) for n in range(3)], [b'{"order_id":0}', b'{"order_id":1}', b'{"order_id":2}']),
        (lambda: (StockReserved(1), {"a": 1}), [b'{"order_id":1}', b'{"a":1}']),
        (lambda: generated(2), [b'{"order_id":0}', b'{"order_id":1}']),
        (lambda: map(StockReserved, [5, 3]), [b'{"order_id":5}', b'{"order_id":3}']),
        (lambda: {"a": 1}, [b'{"a":1}']),
        (lambda: b"raw", [b"raw"]),
        (lambda: StockCounted(3), [b"[3]"]),
    ],
    ids=["none", "empty", "one", "list", "tuple", "generator", "iterator", "dict", "bytes", "named tuple"],
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "plain"])
async def test_what_a_handler_returns_becomes_messages_in_its_order(
    make: Callable[[], object],
    expected: list[bytes],
    is_plain: bool,  # noqa: FBT001
) -> None:
    """Nothing, one or many, in any usual form."""
    router = Router(topic="stock")

    async def handle() -> object:
        return make()

    router.add("order.placed", make if is_plain else handle)

    outputs = await router(message())

    assert numbers(outputs) == expected
    assert {output.topic for output in outputs} <= {"stock"}
    assert len({output.id for output in outputs}) == len(expected)


@pytest.mark.requirement("F-10", "F-21", "S1-23")
async def test_a_returned_event_gets_an_envelope_of_its_own() -> None:
    """Its type is that of its class; tenant and namespace are those of the message, and no more."""
    router = Router(source="/stock")
    local = Local[int]("n")

    @router.on("order.placed")
    async def handle(order: OrderPlaced) -> list[object]:
        return [StockReserved(order.order_id), StockCounted(3)]

    given = local.put(message(source="/shop"), 1)
    first, second = await router(given)

    assert (first.topic, first.type, first.namespace, first.tenant_id) == ("stock.reserved",) * 2 + ("shop", TENANT)
    assert (second.topic, second.type) == ("stock.counted",) * 2
    assert first.source == "/stock"
    assert first.id != given.id
    assert (first.key, first.dedupe_key, first.attempt) == (None, None, 0)
    assert local.of(first) is None


@pytest.mark.requirement("F-21")
async def test_the_topic_of_a_handler_goes_before_that_of_the_router() -> None:
    """Where events go can be said for all, and for some."""
    router = Router(topic="everything")

    async def handle() -> StockReserved:
        return StockReserved(1)

    router.add("a", handle, topic="special")
    router.add("b", handle)

    assert [(await router(message(kind)))[0].topic for kind in "ab"] == ["special", "everything"]


@pytest.mark.requirement("F-21")
async def test_a_returned_message_is_left_as_it_is() -> None:
    """Who makes a message says everything about it."""
    router, output = Router(topic="other"), Message(topic="stock", payload=b"x", key="k")

    async def handle() -> list[Message]:
        return [output]

    router.add("order.placed", handle)

    assert (await router(message()))[0] is output


@pytest.mark.requirement("F-21")
async def test_an_event_without_a_name_needs_a_topic() -> None:
    """A dict does not say what it is, and a bare value is no event."""
    router = Router()
    returns: list[object] = [{"a": 1}, b"raw", "text"]

    async def handle() -> object:
        return returns.pop(0)

    router.add("order.placed", handle)

    for name in ("dict", "bytes"):
        with pytest.raises(InvalidMessageError, match=f"returned a {name}, which has no type of its own"):
            await router(message())
    with pytest.raises(EncodeError, match="a bare value is no event"):
        await router(message())
