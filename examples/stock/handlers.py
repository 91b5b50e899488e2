"""What the stock room does when an order comes; it knows no database, no transaction and no broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from postroom import Router


@dataclass
class OrderPlaced:
    """Somebody wants something."""

    order_id: int
    item: str
    quantity: int


@dataclass
class StockReserved:
    """It is put aside for the order."""

    order_id: int
    item: str
    quantity: int


@dataclass
class StockMissing:
    """There is not enough of it."""

    order_id: int
    item: str


class Stock(Protocol):
    """What there is on the shelves."""

    async def reserve(self, item: str, quantity: int) -> bool:
        """Put something aside; tell whether there was enough of it."""
        ...


def stock_router(stock: Stock) -> Router:
    """Return the handlers of the stock room."""
    router = Router(topic="stock", source="/stock")

    @router.on(OrderPlaced)
    async def reserve(order: OrderPlaced) -> StockReserved | StockMissing:
        if await stock.reserve(order.item, order.quantity):
            return StockReserved(order.order_id, order.item, order.quantity)
        return StockMissing(order.order_id, order.item)

    return router
