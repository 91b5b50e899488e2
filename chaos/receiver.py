"""The receiver: takes messages over TCP, writes each into its history, and only then confirms it.

It refuses some messages now and then and the poisoned ones always, so that failures and budgets are exercised.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any, Final

from .history import History
from .worker import Setting, at_work

__all__ = ["Receiver", "main"]

#: How many of a thousand deliveries fail for no reason that lasts.
_FLAKY: Final = 30
#: How many seconds pass before a batch is taken, one of these at random.
_DELAYS: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4)


class Receiver:
    """One server of all destinations."""

    def __init__(self, seed: int, history: History) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._history = history

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each line with a word, until the other end has nothing more to say."""
        blocked: set[tuple[str, str]] = set()
        # Slow now and then, so that leases run out and workers die while a message is under way.
        await asyncio.sleep(self._rng.choice(_DELAYS))
        try:
            while line := await reader.readline():
                writer.write(f"{self.take(json.loads(line), blocked)}\n".encode())
                await writer.drain()
                await asyncio.sleep(0)  # so that batches interleave, and a kill can hit the middle of one
        except OSError:
            pass  # the other end is gone; what was taken is taken
        finally:
            writer.close()

    def take(self, message: dict[str, Any], blocked: set[tuple[str, str]]) -> str:
        """Receive one message, or say why not; after a failure the rest of its key is left alone."""
        place = (message["topic"], message["key"])
        if message["key"] is not None and place in blocked:
            return "skipped"
        answer = self._answer(message)
        if answer != "delivered":
            blocked.add(place)
        op = "deliver" if answer == "delivered" else "refuse"
        self._history.write(op, "ok", **{name: message[name] for name in ("id", "topic", "key", "token", "n")})
        return answer

    def _answer(self, message: dict[str, Any]) -> str:
        if message["kind"] == "reject":
            return "rejected"
        dice = hashlib.sha256(f"{self._seed} {message['id']} {message['attempt']}".encode()).digest()
        is_flaky = int.from_bytes(dice[:4]) % 1000 < _FLAKY
        return "refused" if is_flaky or message["kind"] == "poison" else "delivered"


async def _run(setting: Setting) -> None:
    receiver = Receiver(setting.seed, History(setting.place, setting.name))
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", setting.port)
    at_work()
    async with server:
        await server.serve_forever()


def main(setting: Setting) -> None:
    """Serve until killed."""
    asyncio.run(_run(setting))
