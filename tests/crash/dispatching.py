"""A dispatcher as a process of its own, for tests that kill it.

Run as ``python dispatching.py STORE_URL JOURNAL OPTIONS``. What it delivers it appends to the journal, one line and
one write for each message, before it confirms: like a broker, the journal outlives the dispatcher.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

from postroom import Delivered, Dispatcher, Message, Outcome
from postroom.stores import store_from_url


class Journal:
    """A publisher that appends to a file."""

    def __init__(self, path: str, poison: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._poison = poison

    async def publish_batch(self, messages: Sequence[Message]) -> Sequence[Outcome | None]:
        for message in messages:
            if message.dedupe_key is not None and message.dedupe_key == self._poison:
                os.kill(os.getpid(), signal.SIGKILL)
            line = f"{message.id} {message.key or '-'} {message.payload.decode()} {message.attempt}\n"
            os.write(self._file, line.encode())
            await asyncio.sleep(0)
        return [Delivered()] * len(messages)


async def main(url: str, journal: str, text: str) -> None:
    options = json.loads(text)
    store = store_from_url(url)
    dispatcher = Dispatcher(
        store,
        Journal(journal, options.get("poison", "")),
        batch=options.get("batch", 100),
        lease=timedelta(seconds=options.get("lease", 2)),
        publish_timeout=timedelta(seconds=options.get("lease", 2) / 3),
        poll_interval=timedelta(seconds=0.1),
        sweep_interval=timedelta(seconds=0.5),
        max_attempts=options.get("max_attempts", 1000),
        listener=lambda _: None,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, dispatcher.stop_soon)
    await dispatcher.run()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
