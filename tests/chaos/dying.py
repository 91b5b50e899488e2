"""A consumer that dies in the middle of a message, after its effect was recorded.

Run as ``python -m tests.chaos.dying URL ID [VARIANT]``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from uuid import UUID

from chaos.variants import apply
from postroom import Message, Transaction

from .test_receiving import message
from .test_receiving_in_redis import room_on


async def die(url: str, identity: str) -> None:
    """Begin to handle a message, and never end."""
    room = room_on(url)

    async def handle(received: Message, transaction: Transaction) -> None:
        await room.effect(received, transaction)
        os.kill(os.getpid(), signal.SIGKILL)

    await room.deliver(room.consumer(handle), replace(message(), id=UUID(identity)))


if __name__ == "__main__":
    for variant in sys.argv[3:]:
        apply(variant)
    asyncio.run(die(*sys.argv[1:3]))
