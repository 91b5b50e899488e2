"""Adds messages to a store until SIGTERM, one transaction each, on the source of any commit; writes down their ids."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from pathlib import Path
from typing import Any

from postroom import Message, stores

KEYS = (None, "a", "b", "c")
#: What MySQL says when it has rolled a transaction back for the sake of another; applications repeat it.
DEADLOCK = "1213"


async def is_added(message: Message, outbox: Any, transactions: Any) -> bool:  # noqa: ANN401 -- of any commit
    """Add one message in a transaction, unless the database rolled it back."""
    try:
        async with transactions.begin() as transaction:
            added = outbox.add(transaction.connection, message)
            if inspect.isawaitable(added):
                await added
    except Exception as error:
        if DEADLOCK not in f"{error} {error.__cause__}":
            raise
        return False
    return True


async def main(url: str, journal: Path) -> None:
    """Add until the signal comes."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    # Earlier commits have it under another name.
    from_url: Any = getattr(stores, "store_from_url", None) or vars(stores)["open_url"]
    store: Any = from_url(url, namespace="shop")
    await store.open()
    outbox, transactions = store.outbox(), store.transactions()
    number = 0
    with journal.open("a") as written:
        while not stopped.is_set():
            message = Message(topic="orders", key=KEYS[number % len(KEYS)], payload=b"{}", namespace="shop")
            if await is_added(message, outbox, transactions):
                written.write(f"{message.id}\n")
                written.flush()
            number += 1
            await asyncio.sleep(0.01)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
