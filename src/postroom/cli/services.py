"""What hears of the orders of the demo: a stock room that puts things aside, and a desk that ships them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from .. import events
from ..broker import Subscriber
from ..consumer import Consumer
from ..message import Message
from ..middleware import Middleware, SubjectMiddleware, transactional
from ..retry import Backoff
from ..router import Router
from ..stores import SQLiteStore
from ..transaction import Transaction

__all__ = ["EFFECTS", "OrderPlaced", "StockReserved", "shipping", "stock"]

#: One message in so many fails at its first attempt, after its handler has written.
STUMBLES = 200
_BACKOFF = Backoff(base=timedelta(milliseconds=100), max=timedelta(seconds=1))

#: The tables of the services. Nothing in them is unique, so that an effect that happened twice is there twice.
EFFECTS = ("reservations", "shipments")


@dataclass(frozen=True, slots=True)
class OrderPlaced:
    """A customer has ordered."""

    customer: str
    number: int
    cents: int


@dataclass(frozen=True, slots=True)
class StockReserved:
    """What was ordered is put aside."""

    customer: str
    number: int


def stock(
    subscriber: Subscriber,
    store: SQLiteStore,
    outermost: Middleware,
    *,
    wake: Callable[[], object],
    listener: events.Listener,
) -> Consumer:
    """Return the stock room, which tells shipping of every order."""
    router = Router(topic="stock")

    @router.on(OrderPlaced)
    def reserve(order: OrderPlaced, message: Message, transaction: Transaction) -> StockReserved:
        _write(transaction, "reservations", order)
        _stumble(message)
        return StockReserved(order.customer, order.number)

    around = transactional(store, consumer="stock", wake=wake, listener=listener)
    # What is told of a customer stays in the customer's order.
    middlewares = (outermost, around, SubjectMiddleware())
    return Consumer(subscriber, router, *middlewares, backoff=_BACKOFF, listener=listener)


def shipping(
    subscriber: Subscriber, store: SQLiteStore, outermost: Middleware, *, listener: events.Listener
) -> Consumer:
    """Return the desk that ships what was put aside."""
    router = Router()

    @router.on(StockReserved)
    def ship(reserved: StockReserved, message: Message, transaction: Transaction) -> None:
        _write(transaction, "shipments", reserved)
        _stumble(message)

    around = transactional(store, consumer="shipping", listener=listener)
    return Consumer(subscriber, router, outermost, around, backoff=_BACKOFF, listener=listener)


def _write(transaction: Transaction, table: str, order: OrderPlaced | StockReserved) -> None:
    transaction.connection.execute(
        f"INSERT INTO {table} VALUES (?, ?)",  # noqa: S608 -- one of two names
        (order.customer, order.number),
    )


def _stumble(message: Message) -> None:
    if message.attempt == 1 and random.random() < 1 / STUMBLES:
        raise RuntimeError("something fell off the shelf")
