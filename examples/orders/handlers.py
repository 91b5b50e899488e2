"""What the shop does with a command; it knows no Redis, no transaction and no broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from postroom import Router


@dataclass
class PlaceOrder:
    """Somebody wants something."""

    order_id: str
    product_id: str
    quantity: int


@dataclass
class OrderPlaced:
    """The order is in the books."""

    order_id: str


class Orders(Protocol):
    """The books."""

    async def save(self, order: PlaceOrder) -> None:
        """Write an order down."""
        ...


def order_router(orders: Orders) -> Router:
    """Return the handlers of the shop."""
    router = Router(topic="order-events", source="/orders")

    @router.on(PlaceOrder)
    async def place_order(command: PlaceOrder) -> list[OrderPlaced]:
        await orders.save(command)
        return [OrderPlaced(command.order_id)]

    return router
