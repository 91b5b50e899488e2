"""The wiring: which server, which broker, and what is around the handlers."""

from __future__ import annotations

import asyncio
import sys

from postroom import Consumer, Dispatcher, JSONCodec, Message, transactional
from postroom.brokers import MemoryBroker
from postroom.stores.redis import RedisStore

from .handlers import PlaceOrder, order_router
from .repository import RedisOrders

NAMESPACE = "shop"
COMMANDS = [PlaceOrder("xyz", "chair", 2), PlaceOrder("xyy", "table", 1)]


def sent(command: PlaceOrder) -> Message:
    """Return the message that brings a command."""
    payload = JSONCodec().encode(command)
    return Message(topic="commands", type="place.order", key=command.order_id, payload=payload)


async def main(store: RedisStore) -> None:
    """Receive two commands, one of them twice; write orders down; tell what was placed."""
    broker = MemoryBroker()
    told: list[Message] = []

    async def tell(message: Message) -> None:
        sys.stdout.write(f"{message.type} {message.payload.decode()}\n")
        told.append(message)
        if len(told) == len(COMMANDS):
            dispatcher.stop_soon()

    dispatcher = Dispatcher(store, tell)
    around = transactional(store, consumer="orders", wake=dispatcher.wake)
    router = order_router(RedisOrders(store.client, NAMESPACE))
    consumer = Consumer(broker.subscribe("commands", group="orders"), router, around)
    messages = [sent(command) for command in COMMANDS]
    await broker.publish_batch([messages[0], *messages])  # a broker may hand out a message twice
    async with asyncio.TaskGroup() as group:
        consuming = group.create_task(consumer.run())
        await dispatcher.run()
        await consumer.stop()
        await consuming
    await store.close()


if __name__ == "__main__":
    url, profile = [*sys.argv[1:], "durable"][:2]
    asyncio.run(main(RedisStore(url, namespace=NAMESPACE, profile=profile)))  # type: ignore[arg-type]  # it is checked
