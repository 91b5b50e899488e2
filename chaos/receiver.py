"""The receiver: takes messages over TCP, writes each into its history, and only then confirms it.

It refuses some messages now and then and the poisoned ones always, so that failures and budgets are exercised. What it
has confirmed its broker hands out to consumers, who come to the same port.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any, Final

from .broker import Broker
from .groups import GROUPS, TOPICS
from .history import History, read_file
from .worker import Setting, at_work

__all__ = ["Receiver", "main"]

#: How many of a thousand deliveries fail for no reason that lasts.
_FLAKY: Final = 30
#: How many seconds pass before a batch is taken, one of these at random.
_DELAYS: Final = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4)
_KEPT: Final = ("id", "topic", "key", "token", "n", "event_type", "payload")


class Receiver:
    """One server of all destinations."""

    def __init__(self, seed: int, history: History, broker: Broker) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._history = history
        self._broker = broker

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve whoever it is, until the other end has nothing more to say."""
        try:
            line = await reader.readline()
            said: dict[str, Any] = json.loads(line) if line else {"count": True}
            if "subscribe" in said:
                await self._broker.serve(said["subscribe"], reader, writer)
            elif "count" in said:
                writer.write(json.dumps(self._broker.counts).encode() + b"\n")
                await writer.drain()
            else:
                await self._take_all(line, reader, writer)
        except OSError:
            pass  # the other end is gone; what was taken is taken
        finally:
            writer.close()

    async def _take_all(self, line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each line with a word."""
        blocked: set[tuple[str, str]] = set()
        # Slow now and then, so that leases run out and workers die while a message is under way.
        await asyncio.sleep(self._rng.choice(_DELAYS))
        while line:
            writer.write(f"{self.take(json.loads(line), blocked)}\n".encode())
            await writer.drain()
            await asyncio.sleep(0)  # so that batches interleave, and a kill can hit the middle of one
            line = await reader.readline()

    def take(self, message: dict[str, Any], blocked: set[tuple[str, str]]) -> str:
        """Receive one message, or say why not; after a failure the rest of its key is left alone."""
        place = (message["topic"], message["key"])
        if message["key"] is not None and place in blocked:
            return "skipped"
        answer = self._answer(message)
        if answer != "delivered":
            blocked.add(place)
            self._history.write("refuse", "ok", **{name: message[name] for name in ("id", "topic", "key", "token")})
        else:
            kept = {name: message[name] for name in _KEPT}
            self._history.write("deliver", "ok", **kept)
            self._broker.put(kept)
        return answer

    def _answer(self, message: dict[str, Any]) -> str:
        if message["kind"] == "reject":
            return "rejected"
        dice = hashlib.sha256(f"{self._seed} {message['id']} {message['attempt']}".encode()).digest()
        is_flaky = int.from_bytes(dice[:4]) % 1000 < _FLAKY
        return "refused" if is_flaky or message["kind"] == "poison" else "delivered"


async def _run(setting: Setting) -> None:
    history = History(setting.place, setting.name)
    broker = Broker(GROUPS, TOPICS, life=setting.life, seed=setting.seed, history=history)
    broker.remember(read_file(setting.place / f"{setting.name}.jsonl"))
    receiver = Receiver(setting.seed, history, broker)
    ticking = asyncio.create_task(broker.tick())
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", setting.port)
    at_work()
    async with server:
        await asyncio.gather(server.serve_forever(), ticking)


def main(setting: Setting) -> None:
    """Serve until killed."""
    asyncio.run(_run(setting))
