"""The books, in Redis: at once where nothing else is going on, and as a part of the transaction around a handler."""

from __future__ import annotations

from redis.asyncio import Redis

from postroom.stores.redis import current_pipeline

from .handlers import PlaceOrder


class RedisOrders:
    """A hash for each order."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def key(self, order_id: str) -> str:
        """Return the key of an order, which a cluster keeps together with the messages of the shop."""
        return f"{{{self._namespace}}}:order:{order_id}"

    async def save(self, order: PlaceOrder) -> None:
        """Write an order down."""
        await current_pipeline(self._client).hset(
            self.key(order.order_id),
            mapping={"product_id": order.product_id, "quantity": order.quantity, "status": "placed"},
        )
