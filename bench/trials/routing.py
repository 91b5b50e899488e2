"""What it costs to take a message through a router, middlewares and acking, over what nobody can do without."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postroom import Consumer, Delivered, Delivery, JSONCodec, Message, Outcome, Router
from postroom.brokers import MemoryBroker
from postroom.middleware import Next

__all__ = ["contender"]

#: How many messages are timed in one go; one alone would be over before the clock has moved.
_CHUNK = 500
_PAYLOAD = b'{"order_id": 42, "customer": "c-17", "cents": 990}'


@dataclass
class OrderPlaced:
    """What the handler takes."""

    order_id: int
    customer: str
    cents: int


_CODEC = JSONCodec()


async def _pass_on(message: Message, call_next: Next) -> Sequence[Message]:
    return await call_next(message)


async def _innermost(order: OrderPlaced) -> None: ...


async def _fourth(payload: bytes) -> None:
    return await _innermost(_CODEC.decode(payload, OrderPlaced))


async def _third(payload: bytes) -> None:
    return await _fourth(payload)


async def _second(payload: bytes) -> None:
    return await _third(payload)


async def _outermost(payload: bytes) -> None:
    return await _second(payload)


class Routing:
    """A consumer that is called by hand, and five coroutines that do the least."""

    async def ratio(self, count: int) -> dict[str, float]:
        """Return the median time for a message with us and by hand, in chunks that take turns."""
        router = Router()
        router.add(OrderPlaced, _innermost)
        consumer = Consumer(MemoryBroker().subscribe("orders", group="bench"), router, *[_pass_on] * 5)
        ours: list[float] = []
        bare: list[float] = []
        wrong = 0
        for _ in range(count // _CHUNK):
            deliveries = [Delivery(_message(), _settled) for _ in range(_CHUNK)]
            gc.collect()
            began = time.perf_counter()
            for delivery in deliveries:
                await consumer.handle(delivery)
            ours.append((time.perf_counter() - began) / _CHUNK)
            wrong += sum(delivery.outcome != Delivered() for delivery in deliveries)
            began = time.perf_counter()
            for _ in range(_CHUNK):
                await _outermost(_PAYLOAD)
            bare.append((time.perf_counter() - began) / _CHUNK)
        if wrong:
            raise RuntimeError(f"{wrong} of {count} messages were not acknowledged")
        return {"ours": statistics.median(ours), "bare": statistics.median(bare)}


def _message() -> Message:
    return Message(topic="orders", type="order.placed", payload=_PAYLOAD, attempt=1)


async def _settled(_: Outcome) -> None: ...


def contender(_dsn: str, **_: Any) -> Routing:  # noqa: ANN401 -- as for every contender
    """Return what is measured; it needs no database."""
    return Routing()
