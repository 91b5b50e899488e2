"""Commands: typed in, events out, and with an outbox in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from postroom import Message, Outbox, Router, Transaction, TransactionMiddleware
from postroom.codec import Naming
from postroom.cqrs import command_handler, command_handler_with_outbox
from postroom.errors import ConfigurationError, DecodeError, InvalidMessageError
from postroom.stores import SQLiteStore

TENANT = UUID("0197a4c2-7e6b-7d3e-9f51-3a2b1c0d4e5f")


@dataclass(frozen=True)
class PlaceOrder:
    order_id: int


@dataclass(frozen=True)
class OrderPlaced:
    order_id: int


@dataclass(frozen=True)
class HTTPCallMade:
    status: int


def command(kind: str = "place.order", order_id: object = 42) -> Message:
    payload = f'{{"order_id":{order_id}}}'.encode()
    return Message(topic="commands", type=kind, payload=payload, key="42", namespace="shop", tenant_id=TENANT)


async def place(order: PlaceOrder) -> OrderPlaced:
    return OrderPlaced(order.order_id)


@pytest.mark.requirement("F-22")
async def test_a_command_becomes_events_with_an_envelope() -> None:
    """Id, specversion, type, source and time are made, and what was configured stands beside them."""
    handler = command_handler(place, source="/orders", topic="orders", headers={"ce-dataschema": "v1"})
    before = datetime.now(UTC)

    (event,) = await handler(command())

    assert handler.type == "place.order"
    assert event.payload == b'{"order_id":42}'
    assert (event.topic, event.key, event.namespace, event.tenant_id) == ("orders", "42", "shop", TENANT)
    assert event.headers == {"ce-dataschema": "v1", "ce-source": "/orders"}
    assert event.time is not None
    assert before <= event.time <= datetime.now(UTC)
    assert event.attributes == {
        "specversion": "1.0",
        "id": str(event.id),
        "source": "/orders",
        "type": "order.placed",
        "datacontenttype": "application/json",
        "subject": "42",
        "time": event.time.isoformat(),
    }
    assert event.id.version == 7
    assert event.id != command().id


@pytest.mark.requirement("F-23")
@pytest.mark.parametrize(
    ("naming", "taken", "made"),
    [
        ("default", "PlaceOrder", ["OrderPlaced", "HTTPCallMade"]),
        ("dot", "place.order", ["order.placed", "http.call.made"]),
        ("kebab", "place-order", ["order-placed", "http-call-made"]),
        ("snake", "place_order", ["order_placed", "http_call_made"]),
    ],
)
async def test_types_are_named_by_a_strategy(naming: Naming, taken: str, made: list[str]) -> None:
    """Default, dot, kebab and snake, for commands and events alike, and for topics that nobody gave."""

    async def handle(order: PlaceOrder) -> list[object]:
        return [OrderPlaced(order.order_id), HTTPCallMade(200)]

    handler = command_handler(handle, source="/orders", naming=naming)
    events = await handler(command(taken))

    assert handler.type == taken
    assert [event.type for event in events] == made
    assert [event.topic for event in events] == made


@pytest.mark.requirement("F-21", "F-22")
async def test_a_command_handler_is_a_handler_of_a_router() -> None:
    """Nothing else need know that it is one."""
    router = Router()
    handler = command_handler(place, source="/orders")
    router.add(handler.type, handler)

    (event,) = await router(command())

    assert (event.type, event.source) == ("order.placed", "/orders")


class Orders:
    def place(self, order: PlaceOrder) -> Iterator[OrderPlaced]:
        yield OrderPlaced(order.order_id)
        yield OrderPlaced(order.order_id + 1)

    async def nothing(self, message: Message, order: PlaceOrder) -> None: ...

    async def as_message(self, order: PlaceOrder) -> Message:
        return Message(topic="elsewhere", type="t", payload=b"x")

    async def with_limit(self, limit: int, order: PlaceOrder) -> OrderPlaced:
        return OrderPlaced(limit)


@pytest.mark.requirement("F-22")
async def test_a_command_may_lead_to_none_one_or_many_events() -> None:
    """From plain and async functions, methods and partials; a message is left as it is."""
    orders = Orders()

    async def events(handler: Any) -> list[bytes]:  # noqa: ANN401
        made = command_handler(handler, source="/orders")
        assert made.type == "place.order"
        return [event.payload for event in await made(command())]

    assert await events(orders.place) == [b'{"order_id":42}', b'{"order_id":43}']
    assert await events(orders.nothing) == []
    assert await events(orders.as_message) == [b"x"]
    assert await events(partial(orders.with_limit, 7)) == [b'{"order_id":7}']


@pytest.mark.requirement("F-22")
async def test_an_event_without_a_class_needs_a_topic() -> None:
    """A dict has no name that a type could be made of."""

    async def handle(order: PlaceOrder) -> dict[str, int]:
        return {"order_id": order.order_id}

    with pytest.raises(InvalidMessageError, match="returned a dict, which has no type of its own"):
        await command_handler(handle, source="/orders")(command())
    (event,) = await command_handler(handle, source="/orders", topic="orders")(command())
    assert (event.topic, event.type) == ("orders", "orders")


@pytest.mark.requirement("F-22")
async def test_a_command_of_another_form_never_reaches_its_handler() -> None:
    """Typed in."""
    with pytest.raises(DecodeError, match="no PlaceOrder: order_id: str is no int"):
        await command_handler(place, source="/orders")(command(order_id='"x"'))


async def untyped(order) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ...


async def without() -> None: ...


async def of_a_list(orders: list[PlaceOrder]) -> None: ...


async def of_a_dict(order: dict) -> None: ...  # type: ignore[type-arg]


@pytest.mark.requirement("F-22")
@pytest.mark.parametrize("handler", [untyped, without, of_a_list, of_a_dict])
def test_a_function_that_does_not_say_its_command_is_refused(handler: Any) -> None:  # noqa: ANN401
    """The type of the message comes from it."""
    with pytest.raises(ConfigurationError, match="does not say which command it takes; annotate its parameter"):
        command_handler(handler, source="/orders")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A database with orders and an outbox."""
    path = tmp_path / "shop.sqlite3"
    connection = sqlite3.connect(path)
    SQLiteStore.create_tables(connection)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    connection.commit()
    connection.close()
    return path


def rows(path: Path) -> tuple[list[int], list[tuple[str, str, bytes]]]:
    connection = sqlite3.connect(path)
    orders = [number for (number,) in connection.execute("SELECT id FROM orders ORDER BY id")]
    stored = list(connection.execute("SELECT type, topic, payload FROM postroom_outbox ORDER BY seq"))
    connection.close()
    return orders, stored


def insert(connection: sqlite3.Connection, order_id: int) -> None:
    connection.execute("INSERT INTO orders VALUES (?)", (order_id,))


async def place_stored(order: PlaceOrder, transaction: Transaction) -> list[OrderPlaced]:
    await transaction.do(insert, order.order_id)
    return [OrderPlaced(order.order_id), OrderPlaced(order.order_id + 1)]


def place_stored_plainly(order: PlaceOrder, transaction: Transaction) -> list[OrderPlaced]:
    insert(transaction.connection, order.order_id)
    return [OrderPlaced(order.order_id), OrderPlaced(order.order_id + 1)]


@pytest.mark.requirement("S1-28", "S4-18", "S4-19")
@pytest.mark.parametrize("handler", [place_stored, place_stored_plainly], ids=["async", "plain"])
async def test_the_events_of_a_command_are_stored_in_the_transaction_that_its_handler_gets(
    shop: Path,
    handler: Any,  # noqa: ANN401
) -> None:
    """The handler writes through the transaction; its events are in the outbox, in their order."""
    rung: list[int] = []
    outbox = Outbox(wake=lambda: rung.append(1))
    handling = command_handler_with_outbox(shop, outbox, handler, source="/orders", topic="orders")

    outputs = await handling(command())

    assert list(outputs) == []
    assert rows(shop) == (
        [42],
        [("order.placed", "orders", b'{"order_id":42}'), ("order.placed", "orders", b'{"order_id":43}')],
    )
    assert rung == [1]


@pytest.mark.requirement("S4-19", "S4-20")
async def test_a_command_that_fails_leaves_nothing_behind(shop: Path) -> None:
    """Neither its data nor its events, whether the handler fails or an event cannot be stored."""

    async def fail(order: PlaceOrder, transaction: Transaction) -> None:
        await transaction.do(insert, order.order_id)
        raise LookupError

    async def unstorable(order: PlaceOrder, transaction: Transaction) -> list[Message]:
        await transaction.do(insert, order.order_id)
        return [Message(topic="orders", payload=b"x"), Message(topic="", payload=b"x")]

    with pytest.raises(LookupError):
        await command_handler_with_outbox(shop, Outbox(), fail, source="/orders")(command())
    with pytest.raises(ValueError, match="topic"):
        await command_handler_with_outbox(shop, Outbox(), unstorable, source="/orders")(command())
    assert rows(shop) == ([], [])


@pytest.mark.requirement("F-17", "S4-19")
async def test_a_command_joins_the_transaction_that_is_open_on_its_pool(shop: Path) -> None:
    """What fails around it takes its events with it."""
    handling = command_handler_with_outbox(shop, Outbox(), place_stored, source="/orders")
    transaction = TransactionMiddleware(shop)

    async def fail_after(message: Message) -> list[Message]:
        await handling(message)
        raise LookupError

    with pytest.raises(LookupError):
        await transaction(command(), fail_after)
    assert rows(shop) == ([], [])
    await transaction(command(), handling)
    assert rows(shop)[0] == [42]
    assert len(rows(shop)[1]) == 2
