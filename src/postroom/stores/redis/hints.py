"""Hints over pub/sub that there is work, from one server or from that of a cluster which has the messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Final

import redis.asyncio

from ...errors import StoreError, StoreUnavailableError
from .client import Client

__all__ = ["listen"]

# The library's own types say next to nothing about what listens.
Foreign = Any

#: How long it may be silent before the server is asked whether it is still there.
SILENCE: Final = timedelta(seconds=5)


async def listen(client: Client, channel: str, wake: Callable[[], None]) -> None:
    """Call ``wake`` at every message of a channel until cancelled.

    Raises:
        StoreError: The connection was lost, or another server has the messages now; listen again.
    """
    try:
        node = await client.node_of(channel)
        listener = client.foreign if node is None else _alone(node)
        try:
            await _listen(client, listener.pubsub(), channel, wake, node)
        finally:
            if node is not None:
                await listener.aclose()
    except StoreError:
        raise
    except Exception as error:
        raise client.told(error) from error


def _alone(node: Foreign) -> Foreign:
    """Return a client of one server of a cluster, since not every version of the library lets a cluster's listen."""
    pool = redis.asyncio.ConnectionPool(connection_class=node.connection_class, **node.connection_kwargs)
    return redis.asyncio.Redis(connection_pool=pool)


async def _listen(client: Client, hints: Foreign, channel: str, wake: Callable[[], None], node: Foreign) -> None:
    async with aclosing(hints):
        await client.call(hints.subscribe(channel))
        wake()  # what was told before is not told again
        is_asked = False
        while True:
            hint = await hints.get_message(timeout=SILENCE.total_seconds())
            if hint is not None:
                is_asked = False
                if hint["type"] == "message":
                    wake()
                continue
            if is_asked:
                raise StoreUnavailableError(f"{client.place}: a server that was listened to has gone silent")
            if await client.node_of(channel) != node:
                raise StoreUnavailableError(f"{client.place}: another server of the cluster has the messages now")
            await client.call(hints.ping())
            is_asked = True
